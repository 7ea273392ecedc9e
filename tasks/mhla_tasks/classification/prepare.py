"""Shards of a folder of images: what ``lightning prepare images`` writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lightning_mhla.data import ShardReader, write_shards
from lightning_mhla.data.images import LabelledFolder, decode_image


def images_to_shards(
    source: Path, target: Path, prefix: str, per_shard: int, seed: int, max_skipped: int = 100
) -> tuple[list[Path], int]:
    """Write the shards; see ``lightning prepare images --help``.

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
