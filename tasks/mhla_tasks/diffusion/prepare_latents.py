"""Encode images into latent shards by a diffusers VAE, once, for training without it.

    python -m mhla_tasks.diffusion.prepare_latents photos/train latents --vae stabilityai/sd-vae-ft-ema --image-size 256
    torchrun --nproc-per-node 8 -m mhla_tasks.diffusion.prepare_latents 'shards/train-{0000..1023}.tar' latents --vae VAE

The source is a folder that holds one folder of images for each class, or WebDataset shards of NNN.jpg and NNN.cls. Every
sample keeps means and standard deviations of its latent and of its mirror image's, in float16. A shard gets its name when
it is complete, so calling again after a stop resumes, with any number of processes: those of torchrun or srun
share the shards, and each takes the GPU of its local rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from lightning_mhla.data import SampleSource, ShardReader, find_shards
from lightning_mhla.data.images import LabelledFolder, ShardImages
from lightning_mhla.data.write import array_bytes, check_manifest, files_digest, fill_shards, shard_ranges
from lightning_mhla.generative.codecs import LatentCodec
from lightning_mhla.system.commands import command_parser, short_errors
from lightning_mhla.system.processes import process_device, process_ranks
from mhla_tasks.diffusion.sources import FLIPPED, LATENT, SignedImage

SHUFFLE_SEED = 0
"""Of the order in which images of a folder are encoded."""


def encode_images(
    source: SampleSource,
    identity: str,
    target: Path,
    vae: LatentCodec,
    prefix: str,
    per_shard: int,
    batch_size: int,
    device: torch.device,
    image_size: int,
    share: tuple[int, int] = (0, 1),
) -> list[Path]:
    """Write ``target/prefix-00000.tar`` and so on; the shards of this process of ``share``, rank and number.

    Args:
        source: gives ``image`` ``[3, S, S]`` in -1 .. 1 and ``label``; broken images are an error.
        identity: what the images are, so that shards of others are not mixed with these.
        target: made if missing.
        vae: encodes.
        prefix: of the file names.
        per_shard: latents in a shard.
        batch_size: images encoded at once.
        device: where.
        image_size: S.
        share: which shards.

    Returns:
        Paths of all shards, of every process.

    Raises:
        ValueError: when the folder holds shards of other images, or made otherwise.
        BrokenSampleError: for an image that cannot be read.
    """
    manifest = {
        "samples": len(source),
        "per_shard": per_shard,
        "images": identity,
        "image_size": image_size,
        "vae": vae.path,
        "scale": vae.scale(device),
    }
    check_manifest(target / f"{prefix}-manifest.json", manifest)
    shards = shard_ranges(target, prefix, len(source), per_shard)
    mine = shards[share[0] :: share[1]]
    fill_shards(
        ((path, len(here), _encoded(source, here, vae, batch_size, device)) for path, here in mine),
        f"encoding {prefix} shards",
        sum(len(here) for _, here in mine),
        quiet=share[0] > 0,
    )
    return [path for path, _ in shards]


def _encoded(
    source: SampleSource, indices: range, vae: LatentCodec, batch_size: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    for start in range(0, len(indices), batch_size):
        rows = indices[start : start + batch_size]
        samples = [source[index] for index in rows]
        images = torch.stack([sample["image"] for sample in samples]).to(device)
        both = [vae.moments(pictures).half().cpu() for pictures in (images, images.flip(-1))]
        for index, sample, latent, flipped in zip(rows, samples, *both, strict=True):
            members = {LATENT: array_bytes(latent), FLIPPED: array_bytes(flipped), "cls": str(sample["label"]).encode()}
            yield {"__key__": f"{index:08d}", **members}


def open_source(name: str, image_size: int, num_classes: int) -> tuple[SampleSource, str]:
    """The images of a folder or of shards, and what identifies them."""
    transform = SignedImage(image_size)
    if Path(name).is_dir() and not list(Path(name).glob("*.tar")):
        folder = LabelledFolder(name, transform)
        order = np.random.default_rng(SHUFFLE_SEED).permutation(len(folder))  # or a shard would hold one class
        folder.labelled = [folder.labelled[index] for index in order]
        return folder, files_digest((path, str(path.relative_to(name))) for path, _ in folder.labelled)
    shards = find_shards(name)
    source = ShardImages(ShardReader(shards), transform, num_classes)
    return source, files_digest((path, path.name) for path in shards)


def main() -> None:
    """Command line."""
    parser = command_parser("mhla_tasks.diffusion.prepare_latents", __doc__)
    parser.add_argument("source", help="folder of class folders, or shards of images")
    parser.add_argument("target", type=Path, help="folder for the latent shards")
    parser.add_argument("--vae", required=True, help="folder or hub name of a diffusers AutoencoderKL")
    parser.add_argument("--image-size", type=int, default=256, help="side of the square that is encoded (default: 256)")
    parser.add_argument("--prefix", default="train", help="of the shards' names (default: train)")
    parser.add_argument("--per-shard", type=int, default=1000, help="latents in a shard (default: 1000)")
    parser.add_argument("--batch-size", type=int, default=32, help="images encoded at once (default: 32)")
    parser.add_argument("--num-classes", type=int, default=1000, help="labels of shards lie below it (default: 1000)")
    parser.add_argument("--device", help="cpu or cuda; a GPU if there is one")
    args = parser.parse_args()
    (rank, world, _), device = process_ranks(), process_device(args.device)
    with short_errors():
        source, identity = open_source(args.source, args.image_size, args.num_classes)
        paths = encode_images(
            source,
            identity,
            args.target,
            LatentCodec(args.vae),
            args.prefix,
            args.per_shard,
            args.batch_size,
            device,
            args.image_size,
            (rank, world),
        )
    mine = len(paths[rank::world])
    share = f", {mine} of them by process {rank} of {world}" if world > 1 else ""
    Console(soft_wrap=True).print(f"{len(source)} latents in {len(paths)} shards{share}: {paths[0]} ..")


if __name__ == "__main__":
    main()
