"""Scenes of colored handwritten digits, with captions that name the digits, their number and their positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_mhla.data.digits import load_mnist

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = {
    "red": (1.0, 0.15, 0.15),
    "green": (0.15, 1.0, 0.15),
    "blue": (0.25, 0.35, 1.0),
    "yellow": (1.0, 1.0, 0.15),
}
"""Mapping from the name of a color to its red, green and blue values, from 0 to 1."""

RELATIONS = ("left of", "above")
COUNTS = {2: "two", 3: "three"}

SIDE, LARGE, SMALL = 32, 20, 14
"""Side of the canvas, of a single digit, and of one of several digits, in pixels."""

SHIFT = 3
"""Largest distance of a single digit from the center along each axis, in pixels."""

SCENES, HELD_OUT_SCENES = 20_000, 400
"""Number of training scenes and of held-out scenes, which show different digits."""


@dataclass(frozen=True)
class Scene:
    """Description of a scene: one digit, several equal digits, or two digits in a spatial relation.

    Args:
        digits: label (0 to 9) and color name of each digit; equal digits are listed once.
        count: number of digits.
        relation: position of the first digit relative to the second, ``left of`` or ``above``; None for one digit or equal
            digits.
    """

    digits: tuple[tuple[int, str], ...]
    count: int = 1
    relation: str | None = None

    @property
    def shown(self) -> list[tuple[int, str]]:
        """Label and color of each digit in the scene. Equal digits are repeated, so the length is ``count``."""
        return [self.digits[min(number, len(self.digits) - 1)] for number in range(self.count)]

    @property
    def caption(self) -> str:
        """Caption of the scene, such as ``a red three``, ``two blue fives`` or ``a red three left of a green seven``."""
        names = [f"{colour} {NAMES[label]}" for label, colour in self.digits]
        if self.relation is not None:
            return f"a {names[0]} {self.relation} a {names[1]}"
        if self.count == 1:
            return f"a {names[0]}"
        return f"{COUNTS[self.count]} {names[0]}{'es' if names[0].endswith('x') else 's'}"


def draw_scene(random: np.random.Generator) -> Scene:
    """Choose a random scene: one digit, two or three equal digits, or two digits side by side or one above the other."""
    kind = ("single", "count", "relation")[random.choice(3, p=[0.4, 0.2, 0.4])]
    labels = random.integers(10, size=2 if kind == "relation" else 1)
    colours = random.permutation(list(COLOURS))
    # There are more colors than labels; the first ones are used.
    digits = tuple((int(label), str(colour)) for label, colour in zip(labels, colours, strict=False))
    if kind == "count":
        return Scene(digits, int(random.choice(list(COUNTS))))
    return Scene(digits, 2, str(random.choice(RELATIONS))) if kind == "relation" else Scene(digits)


def every_caption() -> list[str]:
    """Return sixty fixed captions: 20 of one digit, 16 of equal digits and 24 of two digits in a spatial relation."""
    random, missing = np.random.default_rng(0), {(1, False): 20, (2, False): 8, (3, False): 8, (2, True): 24}
    captions: list[str] = []
    while any(missing.values()):
        scene = draw_scene(random)
        kind = scene.count, scene.relation is not None
        if missing[kind] and scene.caption not in captions:
            captions.append(scene.caption)
            missing[kind] -= 1
    return captions


def render(scene: Scene, digits: Sequence[Tensor], random: np.random.Generator) -> Tensor:
    """Render a scene as an image.

    Args:
        scene: scene to render.
        digits: images ``[1, 28, 28]`` in 0 .. 1 for the digits of the scene, one for each of its ``count`` digits.
        random: random generator for the positions of the digits.

    Returns:
        Image ``[3, 32, 32]`` float32 in -1 .. 1.
    """
    canvas = torch.zeros(3, SIDE, SIDE)
    size = LARGE if scene.count == 1 else SMALL
    for (top, left), (_, colour), digit in zip(_places(scene, size, random), scene.shown, digits, strict=True):
        image = F.interpolate(digit[None], (size, size), mode="bilinear", antialias=True)[0]
        stroke = image * torch.tensor(COLOURS[colour]).view(3, 1, 1)
        area = canvas[:, top : top + size, left : left + size]
        torch.maximum(area, stroke, out=area)
    return canvas * 2 - 1


def _places(scene: Scene, size: int, random: np.random.Generator) -> list[tuple[int, int]]:
    """Choose a random position for each digit of a scene. If there are several, each is in a different quarter.

    Args:
        scene: scene to render.
        size: height and width of a digit's image in pixels.
        random: random generator.

    Returns:
        Top and left edge of each digit's image, in pixels.
    """
    if scene.count == 1:
        middle = (SIDE - size) // 2
        down, right = random.integers(-SHIFT, SHIFT + 1, size=2)
        return [(middle + int(down), middle + int(right))]
    half, room = SIDE // 2, SIDE // 2 - size + 1
    if scene.relation is None:
        quarters = [divmod(int(quarter), 2) for quarter in random.permutation(4)[: scene.count]]
    else:
        line = int(random.integers(2))
        quarters = [(line, 0), (line, 1)] if scene.relation == "left of" else [(0, line), (1, line)]
    places = []
    for row, column in quarters:
        down, right = int(random.integers(room)), int(random.integers(room))
        places.append((row * half + down, column * half + right))
    return places


@cache
def _by_label(train: bool) -> list[Tensor]:
    images, labels = load_mnist(train)
    return [images[labels == label] for label in range(10)]


class SceneSamples:
    """Map-style data set of rendered random scenes of digits. The same index always gives the same scene.

    Args:
        train: whether the scenes show MNIST's training digits instead of held-out digits.
    """

    def __init__(self, train: bool) -> None:
        self.train = train
        self.shard_sizes: Sequence[int] = [SCENES if train else HELD_OUT_SCENES]

    def __len__(self) -> int:
        return self.shard_sizes[0]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one scene as a dict with ``image`` ``[3, 32, 32]`` float32 in -1 .. 1, ``caption`` and the given ``index``."""
        random = np.random.default_rng([index, self.train])
        scene = draw_scene(random)
        images_by_label = _by_label(self.train)
        digits = [images_by_label[label][int(random.integers(len(images_by_label[label])))] for label, _ in scene.shown]
        return {"image": render(scene, digits, random), "caption": scene.caption, "index": index}
