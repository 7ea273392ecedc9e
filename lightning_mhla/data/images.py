"""Sources of images: labeled images from shards or folders, and unlabeled images from a folder."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from typing_extensions import override

from lightning_mhla.data.classes import folder_classes, match_classes, read_classes
from lightning_mhla.data.module import ShardSets
from lightning_mhla.data.origins import Origin
from lightning_mhla.data.shards import ShardReader, beside_shard
from lightning_mhla.data.source import BrokenSampleError, read_sample
from lightning_mhla.system.listing import shown, visible_files, visible_folders, with_extension
from lightning_mhla.system.untrusted import BROKEN, reason

log = logging.getLogger(__name__)

EXTENSIONS = ("jpg", "jpeg", "png", "webp")
FORMATS = ("JPEG", "PNG", "WEBP")
"""Formats that Pillow may open. Without this list, it tries all of its formats, and starts Ghostscript for PostScript."""

LARGEST_IMAGE, NARROWEST = 178_956_970, 256
"""Maximum number of pixels (Pillow's own limit) and maximum aspect ratio; images beyond them are rejected."""

BACKGROUND = "white"
"""Background color of transparent pixels."""

ORIENTATION = 0x0112
"""EXIF tag of the orientation, whose values 5 to 8 swap height and width."""

CLASSES = "classes.txt"
"""Suffix of the file beside the shards of a prefix that lists their classes, one per line."""

Transform = Callable[[Image.Image], Tensor]


def open_image(data: bytes) -> Image.Image:
    """Open a JPEG, PNG or WebP image with Pillow, and read its header only.

    Raises:
        OSError: if the data is not an image in one of these formats.
        Image.DecompressionBombError: if the image has more than :data:`LARGEST_IMAGE` pixels.
    """
    return Image.open(io.BytesIO(data), formats=FORMATS)


def decode_image(data: bytes, name: str, mode: str = "RGB") -> Image.Image:
    """Decode a JPEG, PNG or WebP image to the pixels that a viewer would show.

    The EXIF orientation is applied, transparent pixels are composed on :data:`BACKGROUND`, and 16-bit gray levels are divided
    by 256.

    Args:
        data: content of the image file.
        name: name of the image, for error messages.
        mode: Pillow mode of the result, ``"RGB"`` or ``"L"``.

    Raises:
        BrokenSampleError: if the data is not a complete image, if the image has more than :data:`LARGEST_IMAGE` pixels, or if
            its longer side is more than :data:`NARROWEST` times the shorter one.
    """
    try:
        image = open_image(data)
        width, height = image.size
        if width * height > LARGEST_IMAGE or max(width, height) > NARROWEST * min(width, height):
            raise BrokenSampleError(
                f"{name}: an image of {width} x {height} pixels is too large or too narrow (at most {LARGEST_IMAGE:,} pixels, "
                f"and {NARROWEST} times as long as wide)"
            )
        return _as_shown(image).convert(mode)
    except BrokenSampleError:
        raise
    except UnidentifiedImageError as error:
        raise BrokenSampleError(f"{name}: the image cannot be decoded (it is not JPEG, PNG or WebP)") from error
    except (OSError, Image.DecompressionBombError, *BROKEN) as error:
        raise BrokenSampleError(f"{name}: the image cannot be decoded ({reason(error)})") from error


def decode_file(path: Path, mode: str = "RGB") -> Image.Image:
    """Read an image file, and decode it with :func:`decode_image`."""
    return decode_image(read_sample(path), shown(path), mode)


def _as_shown(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation, compose transparent pixels on :data:`BACKGROUND`, and reduce 16-bit gray to 8 bits."""
    image = ImageOps.exif_transpose(image)
    if image.mode == "I" or image.mode.startswith("I;16"):  # Pillow would clip levels above 255
        levels = np.asarray(image).astype(np.uint32) >> 8
        image = Image.fromarray(levels.astype(np.uint8))
    if image.has_transparency_data:
        shown = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", shown.size, BACKGROUND), shown)
    return image


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return the height and width that an image has once its EXIF orientation is applied, without decoding its pixels."""
    width, height = image.size
    on_its_side = image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
    return (width, height) if on_its_side else (height, width)


class LabelledImages:
    """Base class of sources of images with class labels; subclasses read shards or folders.

    Args:
        transform: function from a Pillow image to a tensor; None to return the Pillow image.
        shard_sizes: number of samples in each shard.
    """

    def __init__(self, transform: Transform | None, shard_sizes: Sequence[int]) -> None:
        self.transform, self.shard_sizes = transform, shard_sizes

    def encoded(self, index: int) -> tuple[bytes, str, int]:
        """Return the content of a sample's image file, its location for messages, and its class label.

        Raises:
            BrokenSampleError: if the sample cannot be read.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        """Number of images."""
        return sum(self.shard_sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a dict of the transformed ``image``, its ``label`` and its ``index``."""
        data, name, label = self.encoded(index)
        image: Any = decode_image(data, name)
        return {"image": self.transform(image) if self.transform else image, "label": label, "index": index}


class ShardImages(LabelledImages):
    """Source of images and class labels in WebDataset shards: ``KEY.jpg`` (or png, webp) and ``KEY.cls``.

    Args:
        reader: reader of the shards.
        transform: function from a Pillow image to a tensor.
        num_classes: number of classes of the data set; labels must be below it.
        labels: list whose entry i is the label in the data set for label i in the shards; None if both are the same.
    """

    def __init__(
        self, reader: ShardReader, transform: Transform, num_classes: int, labels: Sequence[int] | None = None
    ) -> None:
        super().__init__(transform, reader.shard_sizes)
        self.reader, self.num_classes, self.labels = reader, num_classes, labels

    @override
    def encoded(self, index: int) -> tuple[bytes, str, int]:
        label = self.reader.label(index, self.num_classes, self.labels)
        data = self.reader.read(index, self.reader.extension(index, EXTENSIONS))
        return data, self.reader.describe(index), label


class LabelledFolder(LabelledImages):
    """Source of images in a folder with one subfolder per class.

    Args:
        folder: folder that contains the class folders; hidden folders are skipped, and links are followed.
        transform: function from a Pillow image to a tensor; None to return the Pillow image.
        classes: names of all classes of the data set, in the order of their labels; None for the names of the class folders in
            alphabetical order.

    Raises:
        FileNotFoundError: if there are no class folders, or one of them contains no image.
        ValueError: if the name of a class folder is not among the classes.
    """

    def __init__(
        self, folder: str | Path, transform: Transform | None = None, classes: Sequence[str] | None = None
    ) -> None:
        self.folder = Path(folder)
        folders = visible_folders(self.folder) if self.folder.is_dir() else []
        if not folders:
            raise FileNotFoundError(f"{folder} must hold one folder of images for each class")
        folder_names = folder_classes(self.folder)
        self.classes = folder_names if classes is None else list(classes)
        labels = match_classes(folder_names, self.classes, str(folder))
        self.labelled = [
            (path, label)
            for label, class_folder in zip(labels, folders, strict=True)
            for path in image_files(class_folder)
        ]
        super().__init__(transform, [len(self.labelled)])

    @override
    def encoded(self, index: int) -> tuple[bytes, str, int]:
        path, label = self.labelled[index]
        return read_sample(path), shown(path), label

    def origins(self) -> list[Origin]:
        """List the origin of each image: its file and its class."""
        return [
            Origin(str(path.relative_to(self.folder)), (path,), self.classes[label]) for path, label in self.labelled
        ]


def labelled_images(
    sets: ShardSets, stage: str, transform: Transform, num_classes: int, classes: Sequence[str] | None
) -> LabelledImages:
    """Create the source of labeled images for a stage, from shards or from a folder with one subfolder per class.

    Args:
        sets: shards or folders of the data set.
        stage: ``"train"``, ``"validate"`` or ``"test"``.
        transform: function from a Pillow image to a tensor.
        num_classes: number of classes of the data set.
        classes: class names of the data set, in the order of its labels; None if they are not known.

    Raises:
        FileNotFoundError: if there are neither shards nor class folders.
        ValueError: if the stage has a class that the data set does not have.
    """
    folder = sets.class_folder(stage)
    if folder is not None:
        return LabelledFolder(folder, transform, classes)
    labels = shard_labels(sets, stage, classes)
    return ShardImages(sets.reader(stage), transform, num_classes, labels)


def shard_labels(sets: ShardSets, stage: str, classes: Sequence[str] | None) -> list[int] | None:
    """Map the labels in the shards of a stage to labels of the data set, by class name.

    Args:
        sets: shards of the data set.
        stage: ``"train"``, ``"validate"`` or ``"test"``.
        classes: names of the classes of the data set; None if they are not known.

    Returns:
        List whose entry i is the label in the data set for label i in the shards; None if both are the same, or if class names
        are not known.
    """
    stage_names = class_names(sets, stage)
    if stage_names is None or classes is None or stage_names == list(classes):
        return None
    return match_classes(stage_names, classes, f"{sets.locations[stage]} ({CLASSES})")


def class_names(sets: ShardSets, stage: str = "train") -> list[str] | None:
    """Return the class names in the data of a stage, from class folders or ``PREFIX-classes.txt``; None if there are none.

    Raises:
        ValueError: if shards of several prefixes have different lists.
    """
    folder = sets.class_folder(stage)
    if folder is not None:
        return folder_classes(folder)
    return shard_classes(sets.find(stage))


def shard_classes(shards: Sequence[Path]) -> list[str] | None:
    """Read the class names of shards from ``PREFIX-classes.txt`` beside them; None if there is no such file.

    Raises:
        ValueError: if shards of several prefixes have different lists.
    """
    files = sorted({beside_shard(shard, CLASSES) for shard in shards})
    lists = {file: read_classes(file) for file in files}
    first = lists[files[0]]
    if different := [file for file, names in lists.items() if names != first]:
        raise ValueError(
            f"{files[0]} and {different[0]} do not list the same classes, so that their labels cannot be mixed; prepare the "
            "shards into one folder"
        )
    return first


class FolderImages:
    """Source of unlabeled images: all files below a folder, sorted by path.

    Args:
        folder: folder to search, including its subfolders; hidden files are left out.
        transform: function from image to tensor.
        mode: Pillow mode of the decoded images, ``"RGB"`` or ``"L"``.

    Raises:
        FileNotFoundError: if there is no such folder, or no file in it.
    """

    def __init__(self, folder: str | Path, transform: Transform, mode: str = "RGB") -> None:
        self.folder, self.transform, self.mode = Path(folder), transform, mode
        self.paths = _checked_files(self.folder)
        if not self.paths:
            raise FileNotFoundError(f"{folder} holds no files")
        self.shard_sizes: Sequence[int] = [len(self.paths)]

    def __len__(self) -> int:
        """Number of files."""
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a dict of the transformed ``image``, its ``index``, and ``broken``: whether the file could not be decoded.

        A black image takes the place of a broken one.
        """
        path = self.paths[index]
        try:
            image, broken = decode_file(path, self.mode), False
        except BrokenSampleError as error:
            log.warning("skipped: %s", error)
            image, broken = Image.new(self.mode, (64, 64)), True
        return {"image": self.transform(image), "index": index, "broken": broken}


def image_files(folder: Path) -> list[Path]:
    """List the images below a folder, sorted by path.

    Links are followed, hidden files are skipped, and the number of files in other formats is logged.

    Raises:
        FileNotFoundError: if there is no such folder, or no image in it.
    """
    files = _checked_files(folder)
    paths = with_extension(files, EXTENSIONS)
    if not paths:
        raise FileNotFoundError(f"{folder} holds no images ({', '.join(EXTENSIONS)})")
    if others := sorted(set(files) - set(paths)):
        log.warning(
            "%s: %d files are not JPEG, PNG or WebP and are left out, such as %s", folder, len(others), shown(others[0])
        )
    return paths


def _checked_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; give one that holds images")
    return visible_files(folder)
