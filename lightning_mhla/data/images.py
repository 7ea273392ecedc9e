"""Images with labels from shards, and images without labels from a folder."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from torch import Tensor

from lightning_mhla.data.module import ShardSets
from lightning_mhla.data.shards import ShardReader
from lightning_mhla.data.source import BrokenSampleError
from lightning_mhla.system.untrusted import BROKEN, reason

log = logging.getLogger(__name__)

EXTENSIONS = ("jpg", "jpeg", "png", "webp")
FORMATS = ("JPEG", "PNG", "WEBP")

LARGEST_IMAGE, NARROWEST = 1 << 26, 64
"""Pixels of an image, and the ratio of its sides, beyond which it is taken for a broken or a hostile one."""

Transform = Callable[[Image.Image], Tensor]


def decode_image(data: bytes, name: str, mode: str = "RGB") -> Image.Image:
    """Decode a JPEG, PNG or WebP image.

    Raises:
        BrokenSampleError: naming ``name``, when the data is no whole image.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > LARGEST_IMAGE or max(width, height) > NARROWEST * min(width, height):
            raise BrokenSampleError(f"{name}: an image of {width} x {height} pixels is too large or too narrow")
        return image.convert(mode)
    except BrokenSampleError:
        raise
    except UnidentifiedImageError as error:
        raise BrokenSampleError(f"{name}: the image cannot be decoded (no JPEG, PNG or WebP)") from error
    except (OSError, Image.DecompressionBombError, *BROKEN) as error:
        raise BrokenSampleError(f"{name}: the image cannot be decoded ({reason(error)})") from error


class ShardImages:
    """Images and class labels from WebDataset shards: ``KEY.jpg`` (or png, webp) and ``KEY.cls``.

    Args:
        reader: the shards.
        transform: image to tensor.
        num_classes: labels must lie below it.
    """

    def __init__(self, reader: ShardReader, transform: Transform, num_classes: int) -> None:
        self.reader, self.transform, self.num_classes = reader, transform, num_classes
        self.shard_sizes: Sequence[int] = reader.shard_sizes

    def __len__(self) -> int:
        """Number of images."""
        return len(self.reader)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``image`` as the transform gives it, ``label`` and ``index``."""
        label = self.reader.label(index, self.num_classes)
        data = self.reader.read(index, self.reader.extension(index, EXTENSIONS))
        image = self.transform(decode_image(data, self.reader.describe(index)))
        return {"image": image, "label": label, "index": index}


class LabelledFolder:
    """Images of a folder that holds one folder for each class; classes are numbered in alphabetical order.

    Args:
        folder: with the class folders.
        transform: image to tensor.

    Raises:
        FileNotFoundError: when there are no class folders, or one of them holds no image.
    """

    def __init__(self, folder: str | Path, transform: Transform | None = None) -> None:
        self.folder, self.transform = Path(folder), transform
        folders = sorted(path for path in self.folder.iterdir() if path.is_dir()) if self.folder.is_dir() else []
        if not folders:
            raise FileNotFoundError(f"{folder} must hold one folder of images for each class")
        self.classes = [folder.name for folder in folders]
        self.labelled = [(path, label) for label, folder in enumerate(folders) for path in image_files(folder)]
        self.shard_sizes: Sequence[int] = [len(self.labelled)]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labelled)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``image`` as the transform gives it, ``label`` and ``index``."""
        path, label = self.labelled[index]
        image: Any = decode_image(path.read_bytes(), str(path))
        return {"image": self.transform(image) if self.transform else image, "label": label, "index": index}


def labelled_images(
    sets: ShardSets, stage: str, transform: Transform, num_classes: int
) -> ShardImages | LabelledFolder:
    """Images and labels of a stage, from shards or from a folder that holds one folder for each class.

    Raises:
        FileNotFoundError: when there is neither.
        ValueError: when a folder has more classes than ``num_classes``.
    """
    folder = sets.class_folder(stage)
    if folder is None:
        return ShardImages(sets.reader(stage), transform, num_classes)
    source = LabelledFolder(folder, transform)
    if len(source.classes) > num_classes:
        raise ValueError(
            f"{folder} holds {len(source.classes)} classes, more than num_classes={num_classes}; set "
            f"--data.init_args.num_classes={len(source.classes)}"
        )
    return source


def class_names(sets: ShardSets) -> list[str] | None:
    """Names of the training classes: of the folders, or of ``PREFIX-classes.txt`` beside the shards; None without."""
    folder = sets.class_folder("train")
    if folder is not None:
        return LabelledFolder(folder).classes
    shard = sets.find("train")[0]
    names = shard.with_name(f"{shard.stem.rpartition('-')[0]}-classes.txt")
    return names.read_text().splitlines() if names.is_file() else None


class FolderImages:
    """Every image below a folder, in order of its path.

    Args:
        folder: searched with all folders in it.
        transform: image to tensor.
        mode: mode of the decoded image, ``"RGB"`` or ``"L"``.

    Raises:
        FileNotFoundError: when there is no such folder or no image in it.
    """

    def __init__(self, folder: str | Path, transform: Transform, mode: str = "RGB") -> None:
        self.folder, self.transform, self.mode = Path(folder), transform, mode
        self.paths = image_files(self.folder)
        self.shard_sizes: Sequence[int] = [len(self.paths)]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``image`` as the transform gives it, ``index`` into ``paths``, and ``broken``: a black image, after a warning."""
        path = self.paths[index]
        try:
            image, broken = decode_image(path.read_bytes(), str(path), self.mode), False
        except BrokenSampleError as error:
            log.warning("skipped: %s", error)
            image, broken = Image.new(self.mode, (64, 64)), True
        return {"image": self.transform(image), "index": index, "broken": broken}


def image_files(folder: Path) -> list[Path]:
    """Paths of all images below ``folder``, sorted.

    Raises:
        FileNotFoundError: when there is no such folder or no image in it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; give one that holds images")
    named = (path for path in folder.rglob("*") if path.suffix.lower().lstrip(".") in EXTENSIONS)
    paths = sorted(path for path in named if path.is_file())
    if not paths:
        raise FileNotFoundError(f"{folder} holds no images ({', '.join(EXTENSIONS)})")
    return paths
