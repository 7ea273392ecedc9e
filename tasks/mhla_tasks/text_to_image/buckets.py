"""Buckets of image sizes: each image gets the size with the nearest aspect ratio, and all images of a batch have one size."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image
from rich.progress import track

from lightning_mhla.data import BrokenSampleError, ShardUnavailableError
from lightning_mhla.data.captioned import CaptionedFiles
from lightning_mhla.data.images import EXTENSIONS, open_image, upright_size
from lightning_mhla.system.untrusted import BROKEN

log = logging.getLogger(__name__)

Size = tuple[int, int]
"""Height and width of an image, in pixels."""

HEAD = 1 << 16
"""Number of bytes that are read first to determine the size of an image; the complete file is read if they do not suffice."""


def parse_buckets(names: Sequence[str]) -> list[Size]:
    """Parse image sizes such as ``512x384``, which is 512 pixels high and 384 wide.

    Args:
        names: sizes in the format ``HEIGHTxWIDTH``.

    Returns:
        Height and width of each size, in pixels.

    Raises:
        ValueError: if a name is not a size, a size occurs twice, or there are no sizes.
    """
    sizes = []
    for name in names:
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", str(name))
        if match is None:
            raise ValueError(f"buckets: {name!r} is not a size; write HEIGHTxWIDTH in pixels, such as 512x384")
        sizes.append((int(match[1]), int(match[2])))
    if len(set(sizes)) < len(sizes) or not sizes:
        raise ValueError(f"buckets={list(names)} must be different sizes, at least one")
    return sizes


def nearest_bucket(height: int, width: int, sizes: Sequence[Size]) -> int:
    """Find the size whose aspect ratio is nearest to that of an image, on a logarithmic scale.

    Args:
        height: height of the image, in pixels.
        width: width of the image, in pixels.
        sizes: height and width of each size to choose from.

    Returns:
        Index of the nearest size.
    """
    return min(
        range(len(sizes)), key=lambda number: abs(math.log(height * sizes[number][1] / (width * sizes[number][0])))
    )


def sort_into_buckets(files: CaptionedFiles, sizes: Sequence[Size], batch_size: int) -> np.ndarray:
    """Assign each image to the size with the nearest aspect ratio.

    Only the beginning of a file is read if it contains the size of the image, otherwise the complete file.

    Args:
        files: image files.
        sizes: height and width of each size to choose from, in pixels.
        batch_size: minimum number of images of each size.

    Returns:
        Index into ``sizes`` for each image, ``[n]`` int64; 0 for images that cannot be read.

    Raises:
        ValueError: if a size gets fewer images than ``batch_size``.
    """

    def bucket(index: int) -> int:
        try:
            return nearest_bucket(*_image_size(files, index), sizes)
        except BrokenSampleError:
            return 0  # the error is reported when the image is read

    count = sum(files.shard_sizes)
    with ThreadPoolExecutor(8) as pool:
        buckets = track(pool.map(bucket, range(count)), "reading image sizes", total=count, disable=count < 10_000)
        groups = np.fromiter(buckets, np.int64, count)
    check_groups(groups, [f"{height}x{width}" for height, width in sizes], batch_size, "images")
    return groups


def check_groups(groups: np.ndarray, names: Sequence[str], batch_size: int, what: str) -> None:
    """Check that every image size has enough samples for a batch.

    Args:
        groups: index into ``names`` of each sample's size, ``[n]`` int64.
        names: name of each size, such as ``512x384``, for the error message.
        batch_size: minimum number of samples of each size.
        what: plural noun for the samples in the error message, such as ``images``.

    Raises:
        ValueError: if a size has fewer samples; the message names the size.
    """
    for name, count in zip(names, np.bincount(groups, minlength=len(names)), strict=True):
        if count < batch_size:
            fit = f"only {count} {what} are nearest to it" if count else f"no {what} are nearest to it"
            raise ValueError(f"bucket {name}: {fit}, fewer than batch_size={batch_size}; leave it out of the buckets")


def _image_size(files: CaptionedFiles, index: int) -> Size:
    size = None
    try:
        for read in (lambda: files.head(index, EXTENSIONS, HEAD), lambda: files.member(index, EXTENSIONS)[1]):
            data = read()
            try:
                image = open_image(data)
                size = (image.height, image.width)
                return upright_size(image)
            except (OSError, Image.DecompressionBombError, *BROKEN):
                continue  # the orientation may be stored after the pixels
    except ShardUnavailableError:
        raise
    except OSError as error:
        raise BrokenSampleError(f"{files.describe(index)}: {error}") from error
    if size is None:
        raise BrokenSampleError(f"{files.describe(index)} is not an image")
    return size
