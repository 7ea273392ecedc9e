"""Shards of a folder of images: what ``lightning prepare images`` writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_mhla.data import ShardReader, write_shards
from lightning_mhla.data.classes import data_set_classes, read_classes, write_classes
from lightning_mhla.data.images import CLASSES, LabelledFolder, decode_image
from lightning_mhla.data.pack import Packing
from lightning_mhla.system.listing import shown


def images_to_shards(source: Path, packing: Packing, classes: Sequence[str] | None = None) -> tuple[list[Path], int]:
    """Write the shards; see ``lightning prepare images --help``.

    Args:
        source: folder that holds one folder of images for each class.
        packing: options of the shards.
        classes: names of the classes in the order of their labels; None for those of shards of another prefix in the target,
            or else those of the folders, in alphabetical order.

    Returns:
        Paths of the shards, and how many images of the folder are not in them.

    Raises:
        BrokenSampleError: when more images cannot be decoded than ``max_skipped``.
        FileNotFoundError: when ``source`` holds no class folders with images.
        ValueError: when ``source`` has a class that is not among the classes; when the target holds shards of images that
            have changed since, or made with other options.
    """
    if classes is None:
        classes = data_set_classes(packing.target, packing.prefix)
    folder = LabelledFolder(source, classes=classes)
    order = np.random.default_rng(packing.seed).permutation(len(folder))

    def encode(item: tuple[Path, int]) -> dict[str, bytes]:
        path, label = item
        data = path.read_bytes()
        decode_image(data, shown(path))
        return {path.suffix.lower().lstrip("."): data, "cls": str(label).encode()}

    origins = folder.origins()
    paths = write_shards(
        [folder.labelled[i] for i in order], encode, packing.target, packing.prefix, packing.per_shard,
        packing.max_skipped, {"seed": packing.seed}, [origins[i] for i in order], packing.force,
    )  # fmt: skip
    write_classes(packing.target / f"{packing.prefix}-{CLASSES}", folder.classes)
    return paths, len(folder) - len(ShardReader(paths))


def class_list(file: Path) -> list[str]:
    """The names of classes in a file that ``--classes`` names, a line each.

    Raises:
        FileNotFoundError: when it is not there.
        ValueError: when a name comes twice, or there is none.
    """
    names = read_classes(file)
    if names is None:
        raise FileNotFoundError(f"{file} is not a file; --classes takes one with the name of a class on each line")
    if not names:
        raise ValueError(f"{file} names no class")
    return names
