"""Conversion of a folder of images to WebDataset shards, for ``lightning prepare images``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_mhla.data import ShardReader, write_shards
from lightning_mhla.data.classes import data_set_classes, read_classes
from lightning_mhla.data.images import LabelledFolder, decode_image
from lightning_mhla.data.pack import Packing
from lightning_mhla.data.write import check_outside
from lightning_mhla.system.listing import shown


def images_to_shards(source: Path, packing: Packing, classes: Sequence[str] | None = None) -> tuple[list[Path], int]:
    """Convert a folder of images to WebDataset shards, as ``lightning prepare images`` does.

    Args:
        source: folder that contains one subfolder of images for each class.
        packing: options of the shards, such as the target folder and the prefix of the file names.
        classes: class names in the order of their labels. None uses the class names of existing shards with a different prefix
            in the target folder or, if there are none, the subfolder names in alphabetical order.

    Returns:
        Paths of the shards, and the number of images that were skipped because they cannot be decoded.

    Raises:
        BrokenSampleError: if more than ``packing.max_skipped`` images cannot be decoded.
        FileNotFoundError: if ``source`` contains no class folders with images.
        ValueError: if ``source`` has a class that is not in ``classes``, if the target folder is inside ``source`` and would be
            taken for a class, or if the target folder holds shards that were written with different options or from images
            that have changed since.
    """
    if packing.target.resolve() != source.resolve():  # beside the class folders, shards are not taken for a class
        check_outside(packing.target, [source])
    if classes is None:
        classes = data_set_classes(packing.target, packing.prefix)
    folder = LabelledFolder(source, classes=classes)
    order = np.random.default_rng(packing.seed).permutation(len(folder))  # mixes the classes within each shard

    def encode(item: tuple[Path, int]) -> dict[str, bytes]:
        # Decoding only detects broken images; the shard gets the original bytes.
        path, label = item
        data = path.read_bytes()
        decode_image(data, shown(path))
        return {path.suffix.lower().lstrip("."): data, "cls": str(label).encode()}

    origins = folder.origins()
    paths = write_shards(
        [folder.labelled[i] for i in order], encode, packing.target, packing.prefix, packing.per_shard,
        packing.max_skipped, {"seed": packing.seed}, [origins[i] for i in order], packing.force, folder.classes,
    )  # fmt: skip
    return paths, len(folder) - len(ShardReader(paths))


def class_list(file: Path) -> list[str]:
    """Read class names, in the order of their labels, from a text file with one name on each line.

    Args:
        file: path of the file. Error messages refer to it as ``--classes``.

    Returns:
        The class names.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if a name occurs twice, a line before the last name is blank, or the file is empty.
    """
    names = read_classes(file)
    if names is None:
        raise FileNotFoundError(f"{file} is not a file; --classes takes a file with the name of a class on each line")
    if not names:
        raise ValueError(f"{file} has no class names")
    return names
