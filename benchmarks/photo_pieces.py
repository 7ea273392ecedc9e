"""Pieces of photographs as a classification task: which of 27 photographs does a gray piece of 64 x 64 pixels come from?

    lightning bench photo_pieces --out pieces

The photographs are desktop backgrounds of Debian packages, fetched by ``apt-get download`` and unpacked into a temporary
folder; nothing is installed. ``--tree`` names a folder with packages that are already unpacked. Each photograph is scaled to
1,024 pixels on its shorter side and divided into 4 x 4 regions. Three of them are held out, so that no held-out pixel is seen
in training; pieces of one region overlap by half. All pieces are gray and have the same mean and contrast: neither color nor
brightness tells the photographs apart. Pieces with little contrast, such as sky, are left out. The pieces are written to
``train`` and ``val``, a folder for each photograph.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from benchmarks.real_texts import unpack
from lightning_mhla.data.images import decode_file

PHOTOGRAPHS = {
    "mate-backgrounds": (
        *("Aqua", "Blinds", "Dune", "Garden", "GreenMeadow", "LadyBird", "RainDrops", "YellowFlower"),
    ),
    "lomiri-wallpapers-16.04": (
        *("Dragonfly_by_Bolly", "Picture_0B_by_freespace", "Picture_1A_by_freespace", "Wine_by_Jakkub_Mede"),
        *("aitzgorri_by_Aitzol_Berasategi", "friends_by_Aitzol_Berasategi", "life_by_Aitzol_Berasategi"),
        *("picosdeeuropa_by_Aitzol_Berasategi", "seeding_by_Clements_Engelhardt", "sunset_by_Aitzol_Berasategi"),
    ),
    "lomiri-wallpapers-20.04": ("Kleiber_by_Lukas_Baubkus",),
    "plasma-workspace-wallpapers": (
        *("BytheWater", "ColdRipple", "ColorfulCups", "EveningGlow", "FallenLeaf", "Grey", "OneStandsOut", "Path"),
    ),
}
"""Names of the photographs by Debian 12 package: those with enough contrast in the held-out regions, too."""

SHORTER, GRID, SIDE, STEP = 1024, 4, 64, 32
"""Shorter side of a scaled photograph, regions along each of its sides, side of a piece, and distance of pieces, in pixels."""
HELD_OUT = (2, 7, 12)
"""Held-out regions, counted by rows: in three rows and three columns."""
EACH = {"train": 160, "val": 40}
"""Number of pieces from each photograph."""
LEAST_CONTRAST = 8.0
"""Smallest standard deviation of a piece's brightness, which ranges from 0 to 255, before it is scaled."""
MEAN, CONTRAST = 127.5, 50.0
"""Mean and standard deviation of the brightness of all pieces."""


def find(tree: Path, name: str) -> Path:
    """Return the largest file of a photograph below the folder ``tree``.

    Raises:
        SystemExit: if there is none.
    """
    files = [*tree.rglob(f"{name}.jpg"), *tree.rglob(f"wallpapers/{name}/contents/images/*.jpg")]
    if not files:
        raise SystemExit(f"error: no photograph {name} in {tree}; the packages are those of Debian 12")
    return max(files, key=lambda file: (file.stat().st_size, file))


def brightness(file: Path) -> npt.NDArray[np.float64]:
    """Return the gray values ``[height, width]`` float64 of a photograph whose shorter side is scaled to 1,024 pixels."""
    picture = decode_file(file).convert("L")
    scale = SHORTER / min(picture.size)
    size = (round(picture.width * scale), round(picture.height * scale))
    return np.asarray(picture.resize(size, Image.Resampling.LANCZOS), dtype=np.float64)


def pieces(values: npt.NDArray[np.float64], stage: str) -> list[npt.NDArray[np.uint8]]:
    """Cut regions of a photograph into pieces, and draw some of those with enough contrast, always the same ones.

    Args:
        values: gray values of the photograph.
        stage: train or val.

    Returns:
        Gray values ``[64, 64]`` uint8 of each piece.
    """
    cut = []
    for region in range(GRID**2):
        if (region in HELD_OUT) != (stage == "val"):
            continue
        part = np.array_split(np.array_split(values, GRID, 0)[region // GRID], GRID, 1)[region % GRID]
        for y in range(0, part.shape[0] - SIDE + 1, STEP):
            cut += [part[y : y + SIDE, x : x + SIDE] for x in range(0, part.shape[1] - SIDE + 1, STEP)]
    clear = [piece for piece in cut if piece.std() >= LEAST_CONTRAST]
    chosen = np.random.default_rng(0).permutation(len(clear))[: EACH[stage]]
    scaled = [(clear[index] - clear[index].mean()) / clear[index].std() * CONTRAST + MEAN for index in sorted(chosen)]
    return [piece.round().clip(0, 255).astype(np.uint8) for piece in scaled]


def write_pieces(folder: Path, packages: Path | None = None) -> dict[str, int]:
    """Write the pieces of all photographs to a folder, divided into training and held-out data.

    Args:
        folder: folder to write to. It appears only when it is complete.
        packages: folder with unpacked packages; None to download and unpack them.

    Returns:
        Number of pieces in ``train`` and in ``val``.

    Raises:
        SystemExit: if a photograph is missing, or ``folder`` exists.
    """
    if folder.exists():
        raise SystemExit(f"error: {folder} exists; choose another folder, or delete it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    counts = dict.fromkeys(EACH, 0)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        tree, target = packages or Path(scratch, "packages"), Path(scratch, "pieces")
        if packages is None:
            tree.mkdir()
            unpack(tree, tuple(PHOTOGRAPHS))
        for name in (name for names in PHOTOGRAPHS.values() for name in names):
            values = brightness(find(tree, name))
            for stage in EACH:
                (target / stage / name).mkdir(parents=True)
                for number, piece in enumerate(pieces(values, stage)):
                    Image.fromarray(piece).save(target / stage / name / f"{number:03d}.png")
                    counts[stage] += 1
        target.rename(folder)
    return counts


def main() -> None:
    """Write the pieces of all photographs to the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to, which must not exist")
    parser.add_argument("--tree", type=Path, help="folder with unpacked packages (default: download and unpack them)")
    options = parser.parse_args()
    counts = write_pieces(options.out, options.tree)
    print(f"{counts['train']} pieces to train on, {counts['val']} held out")
