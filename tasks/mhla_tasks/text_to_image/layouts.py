"""Functions that copy drawn images to the folder layouts that text-to-image benchmarks read."""

from __future__ import annotations

import io
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from PIL import Image

from lightning_mhla.data import BrokenSampleError
from lightning_mhla.data.images import decode_file, open_image
from lightning_mhla.data.lines import plain_suffix, read_lines
from lightning_mhla.data.source import read_sample
from lightning_mhla.system.listing import is_file_name, shown, visible_files
from lightning_mhla.system.untrusted import BROKEN
from mhla_tasks.captioned.text import read_prompts

TILES = 4
"""Number of images of each prompt that DPG-Bench expects, joined into one file as its four quarters."""

PART = ".part"
"""Suffix of a file while it is written."""

DRAWN = re.compile(r"(.+)-(0|[1-9][0-9]*)\.png", re.DOTALL)
"""Pattern of the names of drawn images; the groups are the name of the prompt and the number of the image."""

Contents = dict[str, Callable[[], bytes]]
"""Functions that return the contents of the files to write, by path relative to the target folder."""


def arrange(images: Path, prompts: Path, layout: str, target: Path) -> int:
    """Copy images that the predict command has drawn to the folder layout of a benchmark.

    Args:
        images: folder of the drawn images. Each file name is the prompt's name in the list, a hyphen, and a number from 0, such
            as ``00000-0.png``. All prompts must have the same number of images.
        prompts: path of the benchmark's list of prompts, for which the images were drawn.
        layout: name of the benchmark: ``geneval``, ``dpg`` or ``mjhq``.
        target: folder to write to, created if missing. It must not contain any files except those that are written again.

    Returns:
        Number of different prompts in the benchmark's list.

    Raises:
        FileNotFoundError: if an image is missing.
        FileExistsError: if ``target`` contains a file that is not written again, such as an image of an earlier call.
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
    contents = LAYOUTS[layout](_numbered(images, names), prompts)
    _check_target(target, contents)
    for path, content in contents.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        _write(target / path, content())
    return len(names)


def _geneval(images: dict[str, list[Path]], prompts: Path) -> Contents:
    """List the files of GenEval's layout, one folder for each prompt: ``00000/metadata.jsonl``, ``00000/samples/0000.png``.

    Args:
        images: image files of each prompt, by name of the prompt.
        prompts: path of GenEval's list of prompts.

    Returns:
        Functions that return the contents of the files, by path relative to the target folder.

    Raises:
        ValueError: if ``prompts`` is not a ``.jsonl`` file.
    """
    if plain_suffix(prompts) != ".jsonl":
        raise ValueError(f"--prompts {prompts} is not GenEval's evaluation_metadata.jsonl")
    contents: Contents = {}
    for (name, paths), (_, line) in zip(images.items(), read_lines(prompts), strict=True):
        contents[f"{name}/metadata.jsonl"] = partial(str.encode, f"{line}\n")
        for number, path in enumerate(paths):
            contents[f"{name}/samples/{number:04d}.png"] = partial(_image_bytes, path)
    return contents


def _dpg(images: dict[str, list[Path]], _: Path) -> Contents:
    """List the files of DPG-Bench's layout: one PNG file for each prompt, which joins the first four images of the prompt.

    Args:
        images: image files of each prompt, by name of the prompt.

    Returns:
        Functions that return the contents of the files, by path relative to the target folder.

    Raises:
        FileNotFoundError: if a prompt has fewer than four images.
    """
    for name, paths in images.items():
        if len(paths) < TILES:
            raise FileNotFoundError(
                f"{paths[0].parent} has {len(paths)} images of {name}, DPG-Bench needs {TILES}: "
                f"--data.prompts.per_prompt={TILES}"
            )
    return {f"{name}.png": partial(_joined, paths[:TILES]) for name, paths in images.items()}


def _mjhq(images: dict[str, list[Path]], _: Path) -> Contents:
    """List the files of MJHQ-30K's layout: the first image of each prompt, as a PNG file with the prompt's name.

    Args:
        images: image files of each prompt, by name of the prompt.

    Returns:
        Functions that return the contents of the files, by path relative to the target folder.
    """
    return {f"{name}.png": partial(_image_bytes, paths[0]) for name, paths in images.items()}


LAYOUTS: dict[str, Callable[[dict[str, list[Path]], Path], Contents]] = {
    "geneval": _geneval,
    "dpg": _dpg,
    "mjhq": _mjhq,
}


def _numbered(images: Path, names: Sequence[str]) -> dict[str, list[Path]]:
    """List the image files of each prompt in the order of their numbers: ``00000-0.png``, ``00000-1.png`` and so on.

    Args:
        images: folder of the drawn images.
        names: name of each prompt.

    Returns:
        The image files by name of the prompt.

    Raises:
        FileNotFoundError: if there are no images, or a prompt lacks an image with a number that another prompt has.
    """
    files: dict[str, dict[int, Path]] = defaultdict(dict)
    for path in images.glob("*.png"):
        if (match := DRAWN.fullmatch(path.name)) and path.is_file():
            files[match[1]][int(match[2])] = path
    if not files:
        raise FileNotFoundError(f"{images} holds no .png files of prompts; give the folder images that predict wrote")
    count = 1 + max(max(files[name], default=0) for name in names)
    for name in names:
        for number in range(count):
            if number not in files[name]:
                raise FileNotFoundError(
                    f"{images / f'{name}-{number}.png'} is missing; draw all prompts of the list first, each with the "
                    "same number of images (--data.prompts.per_prompt)"
                )
    return {name: [files[name][number] for number in range(count)] for name in names}


def _check_target(target: Path, contents: Contents) -> None:
    """Check that a folder contains only files that will be overwritten, because a benchmark would also score other files.

    Args:
        target: folder to write to, which need not exist.
        contents: functions that return the contents of the files to write, by path relative to ``target``.

    Raises:
        FileExistsError: if the folder contains any other file.
    """
    for path in visible_files(target) if target.is_dir() else ():
        # A stopped call leaves a temporary file, which is replaced.
        if str(path.relative_to(target)).removesuffix(PART) not in contents:
            raise FileExistsError(
                f"{shown(path)} is not one of the files to write, and the benchmark would score it too; choose a new "
                "folder, or delete the files of the earlier call"
            )


def _joined(paths: Sequence[Path]) -> bytes:
    """Join four images into one PNG file, in two rows of two, as DPG-Bench requires.

    Raises:
        BrokenSampleError: if an image cannot be decoded, or the images have different sizes.
    """
    tiles = [decode_file(path) for path in paths]
    width, height = tiles[0].size
    if any(tile.size != tiles[0].size for tile in tiles):
        raise BrokenSampleError(f"{paths[0]}: the {TILES} images of a prompt have different sizes; draw them again")
    canvas = Image.new("RGB", (2 * width, 2 * height))
    for number, tile in enumerate(tiles):
        canvas.paste(tile, (number % 2 * width, number // 2 * height))
    stream = io.BytesIO()
    canvas.save(stream, "PNG")
    return stream.getvalue()


def _image_bytes(path: Path) -> bytes:
    """Read an image file and check its format, because a symbolic link could point to any file.

    Raises:
        BrokenSampleError: if the file is not an image.
    """
    data = read_sample(path)
    try:
        open_image(data)
    except (OSError, Image.DecompressionBombError, *BROKEN) as error:
        raise BrokenSampleError(f"{shown(path)} is not a JPEG, PNG or WebP image; draw it again") from error
    return data


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically, replacing an existing file or link."""
    aside = path.with_name(f"{path.name}{PART}")
    aside.unlink(missing_ok=True)
    # This mode creates a new file, and never writes through a link.
    with aside.open("xb") as stream:
        stream.write(data)
    aside.replace(path)
