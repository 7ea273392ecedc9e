"""Encode clips and captions into latent shards, once, for training without VAE and text encoder.

    python -m mhla_tasks.video.prepare_latents 'clips/train-{0000..0099}.tar' latents --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers
    torchrun --nproc-per-node 8 -m mhla_tasks.video.prepare_latents clips latents --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers

The source is WebDataset shards of NNN.mp4 with NNN.txt (or NNN.json), or a folder of such files. The middle of every video
is encoded by Wan's VAE and its caption by UMT5, both in float16. Videos that cannot be read, are too short or lack a
caption are skipped, with a warning each, up to a limit. A shard gets its name when it is complete, so calling again
after a stop resumes, with any number of processes: those of torchrun or srun share the shards, and each takes
the GPU of its local rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.logging import RichHandler

from lightning_mhla.data import BrokenSampleError, SampleSource, ShardReader, find_shards
from lightning_mhla.data.write import Skipped, array_bytes, check_manifest, files_digest, fill_shards, shard_ranges
from lightning_mhla.generative.codecs import ClipCodec
from lightning_mhla.generative.text import CaptionEncoder, TextConfig, make_encoder
from lightning_mhla.system.commands import command_parser, short_errors
from lightning_mhla.system.processes import process_device, process_ranks
from mhla_tasks.video.sources import EMBEDDING, LATENT, ClipFolder, ShardClips, empty_caption_file


def encode_clips(
    source: SampleSource,
    identity: dict[str, Any],
    target: Path,
    codec: ClipCodec,
    captions: CaptionEncoder,
    prefix: str,
    per_shard: int,
    device: torch.device,
    max_skipped: int = 100,
    share: tuple[int, int] = (0, 1),
) -> tuple[list[Path], int]:
    """Write ``target/prefix-00000.tar`` and so on; the shards of this process of ``share``, rank and number.

    Args:
        source: gives ``video`` ``[3, F, H, W]`` in -1 .. 1 and ``caption``.
        identity: what the clips are and how they are made, so that shards of others are not mixed with these.
        target: made if missing.
        codec: encodes clips.
        captions: encodes captions.
        prefix: of the file names.
        per_shard: videos for a shard; it holds fewer where some are broken.
        device: where.
        max_skipped: broken videos that this process skips before it stops.
        share: which shards.

    Returns:
        Paths of all shards, of every process, and how many videos this one skipped.

    Raises:
        ValueError: when the folder holds shards of other clips, or made otherwise.
        BrokenSampleError: when more videos are broken than ``max_skipped``.
    """
    manifest = {"samples": len(source), "per_shard": per_shard, **identity}
    begun = bool(list(target.glob(f"{prefix}-*.tar")))
    check_manifest(target / f"{prefix}-manifest.json", manifest)
    shards = shard_ranges(target, prefix, len(source), per_shard)
    empty = empty_caption_file(shards[0][0])
    if not (begun and empty.exists()):
        aside = empty.with_name(f"{empty.name}.{share[0]}.part")
        aside.write_bytes(array_bytes(captions.tokens("", device).half()))
        aside.replace(empty)
    mine, skipped = shards[share[0] :: share[1]], Skipped(max_skipped)

    def samples(here: range) -> Iterator[dict[str, Any]]:
        for index in here:
            try:
                sample = source[index]
            except BrokenSampleError as error:
                skipped.add(error)
                continue
            latent = codec.encode(sample["video"][None].to(device))[0].half()
            tokens = captions.tokens(sample["caption"], device).half()
            members = {LATENT: array_bytes(latent), EMBEDDING: array_bytes(tokens), "txt": sample["caption"].encode()}
            yield {"__key__": f"{index:08d}", **members}

    fill_shards(
        ((path, len(here), samples(here)) for path, here in mine),
        f"encoding {prefix} shards",
        sum(len(here) for _, here in mine),
        quiet=share[0] > 0,
    )
    return [path for path, _ in shards], skipped.count


def open_source(name: str, **options: Any) -> tuple[SampleSource, str]:
    """The clips of a folder or of shards, and what identifies them; ``options`` as for :class:`ShardClips`."""
    if Path(name).is_dir() and not list(Path(name).glob("*.tar")):
        folder = ClipFolder(name, **options)
        return folder, files_digest((path, str(path.relative_to(name))) for path in folder.paths)
    shards = find_shards(name)
    return ShardClips(ShardReader(shards), **options), files_digest((path, path.name) for path in shards)


def main() -> None:
    """Command line."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[RichHandler(show_path=False)])
    parser = command_parser("mhla_tasks.video.prepare_latents", __doc__)
    parser.add_argument("source", help="shards of videos and captions, or a folder of them")
    parser.add_argument("target", type=Path, help="folder for the latent shards")
    parser.add_argument(
        "--model", required=True, help="folder or hub name of a diffusers Wan pipeline: VAE, UMT5, tokenizer"
    )
    parser.add_argument("--frames", type=int, default=81, help="of a clip (default: 81)")
    parser.add_argument("--height", type=int, default=480, help="in pixels (default: 480)")
    parser.add_argument("--width", type=int, default=800, help="in pixels (default: 800)")
    parser.add_argument("--fps", type=float, default=16.0, help="frames a second that are taken (default: 16)")
    parser.add_argument(
        "--caption-key", default="caption", help="entry of NNN.json that is the caption (default: caption)"
    )
    parser.add_argument("--text-length", type=int, default=512, help="tokens of a caption, at most (default: 512)")
    parser.add_argument(
        "--text-width", type=int, help="of a token's embedding; an encoder of another width is an error"
    )
    parser.add_argument("--prefix", default="train", help="of the shards' names (default: train)")
    parser.add_argument("--per-shard", type=int, default=100, help="videos for a shard (default: 100)")
    parser.add_argument(
        "--max-skipped", type=int, default=100, help="broken videos that a process skips before it stops (default: 100)"
    )
    parser.add_argument("--device", help="cpu or cuda; a GPU if there is one")
    args = parser.parse_args()
    (rank, world, _), device = process_ranks(), process_device(args.device)
    size = {"frames": args.frames, "height": args.height, "width": args.width}
    with short_errors():
        source, digest = open_source(args.source, **size, fps=args.fps, caption_key=args.caption_key)
        codec = ClipCodec(args.model)
        codec.latent_size(*size.values())
        codec.check_size(tuple(size.values()))
        captions = make_encoder(TextConfig(args.model, args.text_length), args.text_width)
        identity = {
            "clips": digest,
            **size,
            "fps": args.fps,
            "model": args.model,
            "caption_key": args.caption_key,
            "text_length": args.text_length,
        }
        paths, skipped = encode_clips(
            source,
            identity,
            args.target,
            codec,
            captions,
            args.prefix,
            args.per_shard,
            device,
            args.max_skipped,
            (rank, world),
        )
    share = f", {len(paths[rank::world])} of them by process {rank} of {world}" if world > 1 else ""
    left_out = f"; {skipped} videos skipped" if skipped else ""
    Console(soft_wrap=True).print(f"{len(source)} videos in {len(paths)} shards{share}: {paths[0]} ..{left_out}")


if __name__ == "__main__":
    main()
