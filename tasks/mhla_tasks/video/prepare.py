"""Turn a folder of clips with captions into WebDataset shards.

    python -m mhla_tasks.video.prepare clips/train shards --prefix train

The source holds NNN.mp4 with NNN.txt, or with NNN.json, beside it, in any folders below. The files are copied byte for
byte, in an order shuffled by the seed. Videos that are truncated, cannot be decoded at their beginning or their end, or lack
a caption are skipped with a warning each, up to a limit. The command resumes after a stop.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.logging import RichHandler

from lightning_mhla.data import ShardReader, write_shards
from lightning_mhla.system.commands import command_parser, short_errors
from mhla_tasks.video.clips import check_video
from mhla_tasks.video.sources import JSON, TEXT, VIDEO, ClipFolder


def clips_to_shards(
    source: Path, target: Path, prefix: str, per_shard: int, seed: int, caption_key: str, max_skipped: int
) -> tuple[list[Path], int]:
    """Write the shards; see the module's description.

    Args:
        source: folder of the clips.
        target: folder of the shards, made if missing.
        prefix: of the shards' names.
        per_shard: videos in a shard.
        seed: of their order.
        caption_key: entry of a ``.json`` that is the caption.
        max_skipped: broken videos that are left out before it stops.

    Returns:
        Paths of the shards, and how many videos of the folder are not in them.

    Raises:
        FileNotFoundError: when ``source`` holds no videos.
        BrokenSampleError: when more videos are broken than ``max_skipped``.
        ValueError: when ``target`` holds shards of other videos, or made with other options.
    """
    folder = ClipFolder(source, 1, 16, 16, caption_key=caption_key)
    order = np.random.default_rng(seed).permutation(len(folder))

    def encode(path: Path) -> dict[str, bytes]:
        index = indices[path]
        folder.caption(index)
        (_, video), (extension, text) = folder.member(index, (VIDEO,)), folder.member(index, (TEXT, JSON))
        check_video(video, str(path))
        return {VIDEO: video, extension: text}

    indices = {path: index for index, path in enumerate(folder.paths)}
    items, made_with = [folder.paths[i] for i in order], {"caption_key": caption_key}
    paths = write_shards(items, encode, target, prefix, per_shard, max_skipped, made_with)
    return paths, len(folder) - len(ShardReader(paths))


def main() -> None:
    """Command line."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[RichHandler(show_path=False)])
    parser = command_parser("mhla_tasks.video.prepare", __doc__)
    parser.add_argument("source", type=Path, help="folder of videos and captions")
    parser.add_argument("target", type=Path, help="folder for the shards")
    parser.add_argument("--prefix", default="train", help="of the shards' names (default: train)")
    parser.add_argument("--per-shard", type=int, default=100, help="videos in a shard (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the videos (default: 0)")
    parser.add_argument(
        "--caption-key", default="caption", help="entry of NNN.json that is the caption (default: caption)"
    )
    parser.add_argument(
        "--max-skipped", type=int, default=100, help="broken videos that are left out before it stops (default: 100)"
    )
    args = parser.parse_args()
    with short_errors():
        paths, skipped = clips_to_shards(
            args.source, args.target, args.prefix, args.per_shard, args.seed, args.caption_key, args.max_skipped
        )
    left_out = f"; {skipped} videos skipped (to add them once repaired, delete the shards)" if skipped else ""
    Console(soft_wrap=True).print(f"{len(ShardReader(paths))} videos in {len(paths)} shards: {paths[0]} ..{left_out}")


if __name__ == "__main__":
    main()
