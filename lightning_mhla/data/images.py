"""Image data sets: labeled images in shards or class folders, and unlabeled images in a folder."""

# Longer than other modules because it decodes image files, and reads them from shards, class folders and plain folders.

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

from lightning_mhla.data.classes import CLASSES, folder_classes, match_classes, read_classes
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

Transform = Callable[[Image.Image], Tensor]


def open_image(data: bytes) -> Image.Image:
    """Open a JPEG, PNG or WebP image with Pillow without decoding its pixels.

    Args:
        data: content of the image file.

    Raises:
        OSError: if the data is not an image in one of these formats.
        Image.DecompressionBombError: if the image has more than 178,956,970 pixels, which is Pillow's limit.
    """
    return Image.open(io.BytesIO(data), formats=FORMATS)


def decode_image(data: bytes, name: str, mode: str = "RGB") -> Image.Image:
    """Decode a JPEG, PNG or WebP image to the pixels that an image viewer would show.

    The EXIF orientation is applied, transparent pixels are blended with a white background, and 16-bit gray levels are divided
    by 256.

    Args:
        data: content of the image file.
        name: name of the image, for error messages.
        mode: Pillow mode of the result: ``"RGB"`` for color or ``"L"`` for gray.

    Raises:
        BrokenSampleError: if the data is not a complete image, if the image has more than 178,956,970 pixels, or if its longer
            side is more than 256 times the shorter one.
    """
    try:
        image = open_image(data)
        width, height = image.size
        if width * height > LARGEST_IMAGE or max(width, height) > NARROWEST * min(width, height):
            raise BrokenSampleError(
                f"{name}: an image of {width} x {height} pixels is too large or too narrow (at most {LARGEST_IMAGE:,} pixels, "
                f"and {NARROWEST} times as long as wide)"
            )
        image = as_shown(image)
        return image if image.mode == mode else image.convert(mode)  # convert would copy
    except BrokenSampleError:
        raise
    except UnidentifiedImageError as error:
        raise BrokenSampleError(f"{name}: the image cannot be decoded (it is not JPEG, PNG or WebP)") from error
    except (OSError, Image.DecompressionBombError, *BROKEN) as error:
        raise BrokenSampleError(f"{name}: the image cannot be decoded ({reason(error)})") from error


def decode_file(path: Path, mode: str = "RGB") -> Image.Image:
    """Read a JPEG, PNG or WebP file, and decode it to the pixels that an image viewer would show.

    Args:
        path: path of the image file.
        mode: Pillow mode of the result: ``"RGB"`` for color or ``"L"`` for gray.

    Raises:
        BrokenSampleError: if the file is not a complete image, or the image is too large or too narrow for
            :func:`decode_image`.
    """
    return decode_image(read_sample(path), shown(path), mode)


def as_shown(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation, blend transparent pixels with white, and reduce 16-bit gray levels to 8 bits.

    The orientation is applied to ``image`` in place. EXIF data that cannot be read is ignored.

    Returns:
        The image as a viewer would show it, which may be ``image`` itself.
    """
    image.load()
    try:
        orientation = image.getexif().get(ORIENTATION)
    # Pillow ignores such data when it opens a JPEG file, but not in a copy of the image, nor in the other formats.
    except BROKEN:
        orientation = None
    if orientation is not None:
        ImageOps.exif_transpose(image, in_place=True)  # without in_place, it copies images that are upright
    if image.mode == "I" or image.mode.startswith("I;16"):  # Pillow would clip levels above 255
        levels, transparent = np.asarray(image), image.info.get("transparency")
        shades = (levels.astype(np.uint32) >> 8).astype(np.uint8)
        if transparent is not None:  # a level of 16 bits, which several shades of 8 bits would share
            shades[levels == transparent] = 255  # the background, white
        image = Image.fromarray(shades)
    if image.has_transparency_data:
        shown = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", shown.size, BACKGROUND), shown)
    return image


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return the height and width of an image after its EXIF orientation is applied, without decoding the pixels."""
    width, height = image.size
    on_its_side = image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
    return (width, height) if on_its_side else (height, width)


class LabelledImages:
    """Base class of data sets of labeled images; subclasses read the images from shards or from class folders.

    Args:
        transform: function from a Pillow image to a tensor; None to return Pillow images.
        shard_sizes: number of images in each shard; a folder counts as one shard.
    """

    def __init__(self, transform: Transform | None, shard_sizes: Sequence[int]) -> None:
        self.transform, self.shard_sizes = transform, shard_sizes

    def encoded(self, index: int) -> tuple[bytes, str, int]:
        """Read the encoded image and the label of a sample.

        Returns:
            Content of the image file, location of the sample for messages, and class label.

        Raises:
            BrokenSampleError: if the image or the label cannot be read.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of images."""
        return sum(self.shard_sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sample: a dict with the transformed ``image``, its class ``label`` and its ``index``."""
        data, name, label = self.encoded(index)
        image: Any = decode_image(data, name)
        return {"image": self.transform(image) if self.transform else image, "label": label, "index": index}


class ShardImages(LabelledImages):
    """Data set of labeled images in WebDataset shards: ``KEY.jpg`` (or png, webp) and ``KEY.cls`` for each sample ``KEY``.

    Args:
        reader: reader of the shards.
        transform: function from a Pillow image to a tensor.
        num_classes: number of classes. Without ``labels``, a label outside 0 to ``num_classes - 1`` is an error.
        labels: list whose entry i replaces label i of the shards; None to leave labels unchanged.
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
    """Data set of labeled images in a folder that has one subfolder of images per class.

    Args:
        folder: folder that contains the class subfolders. Hidden files are ignored, and symbolic links are followed.
        transform: function from a Pillow image to a tensor; None to return Pillow images.
        classes: names of all classes in the order of their labels; None to use the subfolder names in alphabetical order.

    Raises:
        FileNotFoundError: if the folder has no subfolders, or one of them contains no images.
        ValueError: if the name of a subfolder is not in ``classes``.
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
        """Return the image file and the class name of each sample, which are recorded beside shards made from the samples."""
        return [
            Origin(str(path.relative_to(self.folder)), (path,), self.classes[label]) for path, label in self.labelled
        ]


def labelled_images(
    sets: ShardSets, stage: str, transform: Transform, num_classes: int, classes: Sequence[str] | None
) -> LabelledImages:
    """Create the data set of labeled images for a stage, from shards or from a folder with one subfolder per class.

    For validation and tests, the images of a folder are put into a fixed random order.

    Args:
        sets: locations of the training and validation data.
        stage: ``"train"``, ``"validate"`` or ``"test"``.
        transform: function from a Pillow image to a tensor.
        num_classes: number of classes.
        classes: names of all classes in the order of their labels. With None, class folders are labeled in alphabetical
            order, and labels in shards stay unchanged.

    Raises:
        FileNotFoundError: if the stage has neither shards nor class folders.
        ValueError: if the data of the stage contains a class that is not in ``classes``.
    """
    folder = sets.class_folder(stage)
    if folder is not None:
        images = LabelledFolder(folder, transform, classes)
        if stage != "train":  # mixed, so that a few batches (limit_val_batches) are not those of the first class only
            order = np.random.default_rng(0).permutation(len(images))
            images.labelled = [images.labelled[index] for index in order]
        return images
    labels = shard_labels(sets, stage, classes)
    return ShardImages(sets.reader(stage), transform, num_classes, labels)


def shard_labels(sets: ShardSets, stage: str, classes: Sequence[str] | None) -> list[int] | None:
    """Map the labels in the shards of a stage to the labels of the complete data set, by class name.

    Args:
        sets: locations of the training and validation data.
        stage: ``"train"``, ``"validate"`` or ``"test"``.
        classes: class names of the complete data set in the order of their labels; None if they are not known.

    Returns:
        List whose entry i is the label in the complete data set for label i in the shards. None if no label changes, or if the
        class names of the shards or of the complete data set are not known.

    Raises:
        ValueError: if the shards have a class that is not in ``classes``.
    """
    stage_names = class_names(sets, stage)
    if stage_names is None or classes is None or stage_names == list(classes):
        return None
    return match_classes(stage_names, classes, f"{sets.locations[stage]} ({CLASSES})")


def class_names(sets: ShardSets, stage: str = "train") -> list[str] | None:
    """Return the class names of the data for a stage, in the order of their labels.

    Args:
        sets: locations of the training and validation data.
        stage: ``"train"``, ``"validate"`` or ``"test"``.

    Returns:
        Names of the class subfolders of a folder, or the lines of ``PREFIX-classes.txt`` beside shards ``PREFIX-*.tar``; None
        if there is no such file.

    Raises:
        FileNotFoundError: if the data does not exist.
        ValueError: if shards with different prefixes have different class lists.
    """
    folder = sets.class_folder(stage)
    if folder is not None:
        return folder_classes(folder)
    return shard_classes(sets.find(stage))


def shard_classes(shards: Sequence[Path]) -> list[str] | None:
    """Read the class names of shards ``PREFIX-*.tar`` from the file ``PREFIX-classes.txt`` beside them.

    Returns:
        Class names in the order of their labels; None if the file does not exist.

    Raises:
        ValueError: if shards with different prefixes have different class lists.
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
    """Data set of unlabeled images: all visible files in a folder and its subfolders, sorted by path.

    A file that cannot be decoded as an image is not left out. Its sample is a black image, marked as broken.

    Args:
        folder: folder to search.
        transform: function from a Pillow image to a tensor.
        mode: Pillow mode of the decoded images: ``"RGB"`` for color or ``"L"`` for gray.

    Raises:
        FileNotFoundError: if the folder does not exist, or contains no files.
    """

    def __init__(self, folder: str | Path, transform: Transform, mode: str = "RGB") -> None:
        self.folder, self.transform, self.mode = Path(folder), transform, mode
        self.paths = _checked_files(self.folder)
        if not self.paths:
            raise FileNotFoundError(f"{folder} holds no files")
        self.shard_sizes: Sequence[int] = [len(self.paths)]

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sample: a dict with the transformed ``image``, its ``index`` and the flag ``broken``.

        If the file cannot be read or decoded, ``broken`` is True and a black image is returned.
        """
        path = self.paths[index]
        try:
            image, broken = decode_file(path, self.mode), False
        except (BrokenSampleError, OSError) as error:  # OSError: the file was removed, or may not be read
            log.warning("skipped: %s", error)
            image, broken = Image.new(self.mode, (64, 64)), True
        return {"image": self.transform(image), "index": index, "broken": broken}


def image_files(folder: Path) -> list[Path]:
    """List the JPEG, PNG and WebP files in a folder and its subfolders, sorted by path.

    Symbolic links are followed, and hidden files are ignored. A warning gives the number of files with other extensions.

    Raises:
        FileNotFoundError: if the folder does not exist, or contains no images.
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
