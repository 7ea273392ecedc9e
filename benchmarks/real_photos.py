"""Photographs for linearizing image encoders: desktop backgrounds from Debian packages.

    lightning bench real_photos --out photos

The packages are fetched by ``apt-get download`` and unpacked into a temporary folder; nothing is installed. ``--tree`` names a
folder with packages that are already unpacked. Each picture is reduced to at most 2,240 pixels on its shorter side and cut into
squares of 560 pixels; squares with little contrast, such as sky, are left out. Every sixth picture, in the order of a hash of
its content, is held out. The squares are in ``train/photo`` and ``val/photo``, as a folder with one class.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.real_texts import unpack
from lightning_mhla.data.images import decode_file

PACKAGES = ("mate-backgrounds", "gnome-backgrounds", "plasma-workspace-wallpapers", "ukui-wallpapers")
"""Debian 12 packages that contain pictures."""

SIDE, LARGEST, HELD_OUT = 560, 2240, 6
"""Side of a square and maximum length of a picture's shorter side, in pixels. One of ``HELD_OUT`` pictures is held out."""

LEAST_CONTRAST = 20.0
"""Smallest standard deviation of a square's brightness, which ranges from 0 to 255."""


def pictures(tree: Path) -> list[Path]:
    """Return one file for each distinct picture with sides of at least 1,120 pixels, in the order of a hash of the content."""
    files = [path for path in tree.rglob("*") if path.suffix in (".jpg", ".png", ".webp") and path.is_file()]
    by_content: dict[bytes, Path] = {}
    for file in sorted(files):
        picture = decode_file(file)
        if min(picture.size) < 2 * SIDE:
            continue
        # equal for copies of a picture in several sizes
        small = np.asarray(picture.convert("L").resize((16, 16)), dtype=int) // 32
        by_content.setdefault(hashlib.sha256(small.tobytes()).digest(), file)
    return [by_content[key] for key in sorted(by_content)]


def squares(file: Path) -> list[Image.Image]:
    """Cut a picture into squares of 560 pixels, and return the squares with enough contrast.

    A picture whose shorter side exceeds 2,240 pixels is scaled down first.

    Args:
        file: file of the picture.
    """
    picture = decode_file(file)
    scale = min(1.0, LARGEST / min(picture.size))
    picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.LANCZOS)
    corners = [
        (x, y) for y in range(0, picture.height - SIDE + 1, SIDE) for x in range(0, picture.width - SIDE + 1, SIDE)
    ]
    cut = [picture.crop((x, y, x + SIDE, y + SIDE)) for x, y in corners]
    return [square for square in cut if np.asarray(square.convert("L"), dtype=float).std() >= LEAST_CONTRAST]


def main() -> None:
    """Write the squares of all pictures to a folder, divided into training and held-out data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--tree", type=Path, help="folder with unpacked packages (default: download and unpack them)")
    options = parser.parse_args()
    counts = {"train": 0, "val": 0}
    with tempfile.TemporaryDirectory() as folder:
        tree = options.tree or Path(folder)
        if options.tree is None:
            unpack(tree, PACKAGES)
        for number, file in enumerate(pictures(tree)):
            stage = "train" if number % HELD_OUT else "val"
            target = options.out / stage / "photo"
            target.mkdir(parents=True, exist_ok=True)
            for square in squares(file):
                square.save(target / f"{counts[stage]:05d}.jpg", quality=92)
                counts[stage] += 1
    if not all(counts.values()):
        raise SystemExit(f"too few pictures in {tree}")
    print(f"{counts['train']} squares to train on, {counts['val']} held out")
