"""Copying of drawn images to the folder layouts that text-to-image benchmarks read."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from lightning_mhla.data import BrokenSampleError
from lightning_mhla.data.images import decode_file, open_image
from lightning_mhla.data.lines import plain_suffix, read_lines
from lightning_mhla.data.source import read_sample
from lightning_mhla.system.listing import is_file_name, shown
from lightning_mhla.system.untrusted import BROKEN
from mhla_tasks.captioned.text import read_prompts

TILES = 4
"""Number of images of each prompt that DPG-Bench expects, joined into one file as its four quarters."""


def arrange(images: Path, prompts: Path, layout: str, target: Path) -> int:
    """Copy images that the predict command has drawn to the folder layout of a benchmark.

    Args:
        images: folder of the drawn images. Each file name is the name of the prompt, a hyphen, and a number from 0, such as
            ``00000-0.png``.
        prompts: path of the benchmark's list of prompts, for which the images were drawn.
        layout: name of the benchmark: ``geneval``, ``dpg`` or ``mjhq``.
        target: folder to write to, created if missing.

    Returns:
        Number of different prompts in the benchmark's list.

    Raises:
        FileNotFoundError: if an image is missing.
        ValueError: if a name in the list of prompts is not a valid file name or occurs twice, or the list or an image does not
            have the format that the benchmark requires.
    """
    names = [name for name, _ in dict.fromkeys(read_prompts(prompts))]
    if wrong := [name for name in names if not is_file_name(name)]:
        raise ValueError(
            f"{prompts}: the name {wrong[0][:60]!r} cannot be a file name (a slash, a leading dot, or too long), and files "
            "outside the folders are neither read nor written; correct the list"
        )
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"{prompts}: the name {twice[:60]!r} occurs twice, so one image would overwrite the other")
    if not list(images.glob("*.png")):
        raise FileNotFoundError(f"{images} holds no .png files; give the folder images that predict wrote")
    LAYOUTS[layout](images, names, prompts, target)
    return len(names)


def _geneval(images: Path, names: Sequence[str], prompts: Path, target: Path) -> None:
    """Copy images to GenEval's layout, one folder for each prompt: ``00000/metadata.jsonl``, ``00000/samples/0000.png``.

    Args:
        images: folder of the drawn images.
        names: name of each prompt.
        prompts: path of GenEval's list of prompts.
        target: folder to write to.

    Raises:
        ValueError: if ``prompts`` is not a ``.jsonl`` file.
    """
    if plain_suffix(prompts) != ".jsonl":
        raise ValueError(f"--prompts {prompts} is not GenEval's evaluation_metadata.jsonl")
    lines = [line for _, line in read_lines(prompts)]
    for name, line in zip(names, lines, strict=True):
        folder = target / name
        (folder / "samples").mkdir(parents=True, exist_ok=True)
        (folder / "metadata.jsonl").write_text(line + "\n", encoding="utf-8")
        for number, path in enumerate(_numbered(images, name)):
            _copy(path, folder / "samples" / f"{number:04d}.png")


def _dpg(images: Path, names: Sequence[str], _: Path, target: Path) -> None:
    """Join the first four images of each prompt into one PNG file, in two rows of two, as DPG-Bench requires.

    Raises:
        FileNotFoundError: if a prompt has fewer than four images.
        BrokenSampleError: if an image cannot be decoded, or the images of a prompt have different sizes.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        paths = _numbered(images, name)
        if len(paths) < TILES:
            raise FileNotFoundError(
                f"{images} has {len(paths)} images of {name}, DPG-Bench needs {TILES}: "
                f"--data.prompts.per_prompt={TILES}"
            )
        tiles = [decode_file(path) for path in paths[:TILES]]
        width, height = tiles[0].size
        if any(tile.size != tiles[0].size for tile in tiles):
            raise BrokenSampleError(f"{paths[0]}: the {TILES} images of a prompt have different sizes; draw them again")
        canvas = Image.new("RGB", (2 * width, 2 * height))
        for number, tile in enumerate(tiles):
            canvas.paste(tile, (number % 2 * width, number // 2 * height))
        stream = io.BytesIO()
        canvas.save(stream, "PNG")
        _write(target / f"{name}.png", stream.getvalue())


def _mjhq(images: Path, names: Sequence[str], _: Path, target: Path) -> None:
    """Copy the first image of each prompt to a PNG file with the prompt's name, as MJHQ-30K requires."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        _copy(_numbered(images, name)[0], target / f"{name}.png")


LAYOUTS: dict[str, Callable[[Path, Sequence[str], Path, Path], Any]] = {
    "geneval": _geneval,
    "dpg": _dpg,
    "mjhq": _mjhq,
}


def _numbered(images: Path, name: str) -> list[Path]:
    """List the image files of a prompt in the order of their numbers: ``00000-0.png``, ``00000-1.png`` and so on.

    Raises:
        FileNotFoundError: if the prompt has no images.
    """
    paths: list[Path] = []
    while (path := images / f"{name}-{len(paths)}.png").is_file():
        paths.append(path)
    if not paths:
        raise FileNotFoundError(f"{images / f'{name}-0.png'} is missing; draw all prompts of the list first")
    return paths


def _copy(path: Path, target: Path) -> None:
    """Copy an image file after checking its format, because a symbolic link could point to any file.

    Raises:
        BrokenSampleError: if the file is not an image.
    """
    data = read_sample(path)
    try:
        open_image(data)
    except (OSError, Image.DecompressionBombError, *BROKEN) as error:
        raise BrokenSampleError(f"{shown(path)} is not a JPEG, PNG or WebP image; draw it again") from error
    _write(target, data)


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically, replacing an existing file or link."""
    aside = path.with_name(f"{path.name}.part")
    aside.unlink(missing_ok=True)
    # This mode creates a new file, and never writes through a link.
    with aside.open("xb") as stream:
        stream.write(data)
    aside.replace(path)
