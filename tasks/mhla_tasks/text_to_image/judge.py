"""Functions that check whether an image shows the digits, colors, count and relative position that its caption states.

GenEval (arXiv 2310.11513) makes the same checks with an object detector. Here, a digit is a connected area of bright pixels.
Its color is the nearest of four, and a support vector machine trained on MNIST's training digits classifies it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_mhla.data.digits import load_mnist
from mhla_tasks.text_to_image.scenes import COLOURS, COUNTS, NAMES, RELATIONS, Scene

DARK = 90
"""Largest value of a background pixel's brightest channel, from 0 to 255."""

SMALLEST = 12
"""Smallest area of a digit in pixels; smaller areas are treated as noise."""

READ = 12
"""Side in pixels of the box that a digit is scaled to before it is classified."""

CHECKS = ("digit", "colour", "count", "relation")


@dataclass(frozen=True)
class Found:
    """Digit found in an image: its label from 0 to 9, its color's name, and the row and column of its center in pixels."""

    label: int
    colour: str
    row: float
    column: float


def parse_caption(caption: str) -> Scene:
    """Parse a caption such as ``a red three left of a green seven`` into the scene that it describes.

    Raises:
        ValueError: if the caption does not describe a scene of digits, or has two digits of the same color in a spatial
            relation.
    """
    colours, names, counts = "|".join(COLOURS), "|".join(NAMES), "|".join(COUNTS.values())
    if match := re.fullmatch(rf"({counts}) ({colours}) ({names})e?s", caption):
        number, colour, name = match.groups()
        (count,) = (count for count, word in COUNTS.items() if word == number)
        return Scene(((NAMES.index(name), colour),), count)
    digit = rf"a ({colours}) ({names})"
    if match := re.fullmatch(rf"{digit}(?: ({'|'.join(RELATIONS)}) {digit})?", caption):
        colour, name, relation, other_colour, other = match.groups()
        if colour == other_colour:
            raise ValueError(f"{caption!r} has two digits of the same color, whose positions cannot be distinguished")
        first = (NAMES.index(name), colour)
        return Scene((first, (NAMES.index(other), other_colour)), 2, relation) if other else Scene((first,))
    raise ValueError(f"{caption!r} is not a caption of a scene of digits, such as 'a red three left of a green seven'")


def find_digits(pixels: Tensor) -> list[Found]:
    """Find and classify the digits in an image ``[3, H, W]`` uint8 with a dark background."""
    from scipy import ndimage

    bright = pixels.amax(0).numpy() > DARK
    # Pixels that touch at a corner are connected too.
    areas, _ = ndimage.label(bright, structure=np.ones((3, 3)))
    properties, images = [], []
    palette = torch.tensor(list(COLOURS.values()))
    for number, (rows, columns) in enumerate(ndimage.find_objects(areas), 1):
        mask = torch.from_numpy(areas[rows, columns] == number)
        if int(mask.sum()) < SMALLEST:
            continue
        area = pixels[:, rows, columns].float()
        colour = area[:, mask].mean(1)
        nearest = int(F.cosine_similarity(palette, colour[None]).argmax())
        images.append(_boxed(area.amax(0) * mask))
        properties.append((list(COLOURS)[nearest], (rows.start + rows.stop) / 2, (columns.start + columns.stop) / 2))
    if not properties:
        return []
    labels = _reader().predict(torch.stack(images).flatten(1).numpy())
    return [Found(int(label), *values) for label, values in zip(labels, properties, strict=True)]


def check_scene(pixels: Tensor, caption: str) -> dict[str, bool]:
    """Check whether an image shows the scene that a caption describes.

    Args:
        pixels: image ``[3, H, W]`` uint8.
        caption: caption of the scene.

    Returns:
        Whether the image passes each check, by name: ``digit`` (the right digits), ``colour`` (the right colors), ``count``
        (the right number of digits) and ``relation`` (the right relative position). ``relation`` is present only if the caption
        states a relative position.

    Raises:
        ValueError: if the caption does not describe a scene of digits, or has two digits of the same color in a spatial
            relation.
    """
    scene, digits = parse_caption(caption), find_digits(pixels)
    correct = {
        "digit": sorted(digit.label for digit in digits) == sorted(label for label, _ in scene.shown),
        "colour": sorted(digit.colour for digit in digits) == sorted(colour for _, colour in scene.shown),
        "count": len(digits) == scene.count,
    }
    if scene.relation is not None:
        places = {digit.colour: digit for digit in digits}
        first, second = (places.get(colour) for _, colour in scene.shown)
        correct["relation"] = len(digits) == 2 and _stand(scene.relation, first, second)
    return correct


def score_scenes(pictures: Tensor, captions: Sequence[str]) -> dict[str, float]:
    """Compute the share of images that pass each check of :func:`check_scene`.

    Args:
        pictures: images ``[n, 3, H, W]`` uint8.
        captions: caption of each image.

    Returns:
        Shares from 0 to 1 by name of the check. The share of a check counts only the images that it applies to, and a check
        that applies to no image is left out. The entry ``all`` is the share of images that pass all checks.

    Raises:
        ValueError: if a caption does not describe a scene of digits, or has two digits of the same color in a spatial relation.
    """
    checks = [check_scene(picture, caption) for picture, caption in zip(pictures, captions, strict=True)]
    shares = {}
    for name in CHECKS:
        results = [check[name] for check in checks if name in check]
        if results:
            shares[name] = sum(results) / len(results)
    return {**shares, "all": sum(all(check.values()) for check in checks) / len(checks)}


def _stand(relation: str, first: Found | None, second: Found | None) -> bool:
    if first is None or second is None:
        return False
    across, down = second.column - first.column, second.row - first.row
    return across > abs(down) if relation == "left of" else down > abs(across)


def _boxed(image: Tensor) -> Tensor:
    """Resize a digit's image ``[h, w]`` and center it in a black image ``[12, 12]``, float32 with values in 0 .. 1."""
    height, width = image.shape
    scale = READ / max(height, width)
    size = max(1, round(height * scale)), max(1, round(width * scale))
    small = F.interpolate(image[None, None], size, mode="bilinear", antialias=True)[0, 0]
    out = torch.zeros(READ, READ)
    top, left = (READ - size[0]) // 2, (READ - size[1]) // 2
    out[top : top + size[0], left : left + size[1]] = small / small.max().clamp(min=1)
    return out


@cache
def _reader() -> Any:
    """Return scikit-learn's support vector classifier, trained on cropped MNIST digits ``[12, 12]`` as rows of 144 numbers."""
    from sklearn.svm import SVC

    images, labels = load_mnist(True)
    # the size of one of several digits in a scene, the smaller of the two sizes
    small = F.interpolate(images, (14, 14), mode="bilinear", antialias=True)[:, 0] * 255
    boxes = []
    for image in small:
        rows, columns = (image > DARK).any(1).nonzero(), (image > DARK).any(0).nonzero()
        boxes.append(_boxed(image[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]))
    return SVC(C=10, gamma="scale").fit(torch.stack(boxes).flatten(1).numpy(), labels.numpy())
