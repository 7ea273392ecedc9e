"""Turn a folder of images, one folder for each class, into WebDataset shards.

    python -m mhla_tasks.classification.prepare photos/train shards --prefix train

The classes are the folder names in alphabetical order, numbered from 0; ``shards/train-classes.txt`` lists them. Every
image is decoded to check it, and copied byte for byte, in an order shuffled by the seed. Images that cannot be decoded,
truncated ones for instance, are skipped with a warning each, up to a limit. The command resumes after a stop.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.logging import RichHandler

from lightning_mhla.data import ShardReader, write_shards
from lightning_mhla.data.images import LabelledFolder, decode_image
from lightning_mhla.system.commands import command_parser, short_errors


def images_to_shards(
    source: Path, target: Path, prefix: str, per_shard: int, seed: int, max_skipped: int = 100
) -> tuple[list[Path], int]:
    """Write the shards; see the module's description.

    Returns:
        Paths of the shards, and how many images of the folder are not in them.

    Raises:
        BrokenSampleError: when more images cannot be decoded than ``max_skipped``.
        FileNotFoundError: when ``source`` holds no class folders with images.
        ValueError: when ``target`` holds shards of other images, or made with other options.
    """
    folder = LabelledFolder(source)
    order = np.random.default_rng(seed).permutation(len(folder))

    def encode(item: tuple[Path, int]) -> dict[str, bytes]:
        path, label = item
        data = path.read_bytes()
        decode_image(data, str(path))
        return {path.suffix.lower().lstrip("."): data, "cls": str(label).encode()}

    paths = write_shards([folder.labelled[i] for i in order], encode, target, prefix, per_shard, max_skipped)
    (target / f"{prefix}-classes.txt").write_text("".join(f"{name}\n" for name in folder.classes))
    return paths, len(folder) - len(ShardReader(paths))


def main() -> None:
    """Command line."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[RichHandler(show_path=False)])
    parser = command_parser("mhla_tasks.classification.prepare", __doc__)
    parser.add_argument("source", type=Path, help="folder that holds one folder of images for each class")
    parser.add_argument("target", type=Path, help="folder for the shards")
    parser.add_argument("--prefix", default="train", help="of the shards' names (default: train)")
    parser.add_argument("--per-shard", type=int, default=1000, help="images in a shard (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the images (default: 0)")
    parser.add_argument(
        "--max-skipped", type=int, default=100, help="broken images that are left out before it stops (default: 100)"
    )
    args = parser.parse_args()
    with short_errors():
        paths, skipped = images_to_shards(
            args.source, args.target, args.prefix, args.per_shard, args.seed, args.max_skipped
        )
    left_out = f"; {skipped} images skipped (to add them once repaired, delete the shards)" if skipped else ""
    Console(soft_wrap=True).print(f"{len(ShardReader(paths))} images in {len(paths)} shards: {paths[0]} ..{left_out}")


if __name__ == "__main__":
    main()
