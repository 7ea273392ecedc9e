"""Drawn images in the folders that benchmarks of text-to-image models read."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from lightning_mhla.generative.text import read_prompts

TILES = 4
"""Images of a prompt that DPG-Bench reads, as quarters of one."""


def arrange(images: Path, prompts: Path, layout: str, target: Path) -> int:
    """Copy what predict drew into a benchmark's layout.

    Args:
        images: folder of ``NAME-NUMBER.png``.
        prompts: the benchmark's own list, for which they were drawn.
        layout: one of :data:`LAYOUTS`.
        target: folder to write; made if missing.

    Returns:
        Number of prompts.

    Raises:
        FileNotFoundError: when an image is missing.
    """
    names = [name for name, _ in read_prompts(prompts)]
    if not list(images.glob("*.png")):
        raise FileNotFoundError(f"{images} holds no .png files; give the folder images that predict wrote")
    LAYOUTS[layout](images, names, prompts, target)
    return len(names)


def _geneval(images: Path, names: Sequence[str], prompts: Path, target: Path) -> None:
    """``00000/metadata.jsonl`` and ``00000/samples/0000.png``."""
    if prompts.suffix != ".jsonl":
        raise ValueError(f"--prompts {prompts} is not GenEval's evaluation_metadata.jsonl")
    lines = [line for line in prompts.read_text().splitlines() if line.strip()]
    for name, line in zip(names, lines, strict=True):
        folder = target / name
        (folder / "samples").mkdir(parents=True, exist_ok=True)
        (folder / "metadata.jsonl").write_text(line + "\n")
        for number, path in enumerate(_numbered(images, name)):
            shutil.copy(path, folder / "samples" / f"{number:04d}.png")


def _dpg(images: Path, names: Sequence[str], _: Path, target: Path) -> None:
    """``NAME.png``: four images in one, two in a row."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        found = _numbered(images, name)
        if len(found) < TILES:
            raise FileNotFoundError(
                f"{images} has {len(found)} images of {name}, DPG-Bench wants {TILES}: "
                f"--data.prompts.per_prompt={TILES}"
            )
        tiles = [Image.open(path).convert("RGB") for path in found[:TILES]]
        width, height = tiles[0].size
        canvas = Image.new("RGB", (2 * width, 2 * height))
        for number, tile in enumerate(tiles):
            canvas.paste(tile, (number % 2 * width, number // 2 * height))
        canvas.save(target / f"{name}.png")


def _mjhq(images: Path, names: Sequence[str], _: Path, target: Path) -> None:
    """``NAME.png``: one image of each prompt."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copy(_numbered(images, name)[0], target / f"{name}.png")


LAYOUTS: dict[str, Callable[[Path, Sequence[str], Path, Path], Any]] = {
    "geneval": _geneval,
    "dpg": _dpg,
    "mjhq": _mjhq,
}


def _numbered(images: Path, name: str) -> list[Path]:
    """Images of a prompt in order.

    Raises:
        FileNotFoundError: when there is none.
    """
    found: list[Path] = []
    while (path := images / f"{name}-{len(found)}.png").is_file():
        found.append(path)
    if not found:
        raise FileNotFoundError(f"{images / f'{name}-0.png'} is missing; draw all prompts of the list first")
    return found
