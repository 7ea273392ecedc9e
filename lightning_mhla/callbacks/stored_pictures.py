"""Functions that find the newest picture of each series in a folder, and read pictures to embed them in a web page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from lightning_mhla.data.images import open_image
from lightning_mhla.system.figures import DARK

TYPES = {".png": "image/png", ".gif": "image/gif"}
"""MIME types of pictures, by extension."""


class StoredPicture(NamedTuple):
    """Picture file of a run.

    Attributes:
        kind: MIME type.
        content: bytes of the file.
        dark: bytes of the variant for dark screens; None if there is none.
        width: width in pixels.
        description: text, stored in the file, that says what the picture shows; empty if there is none.
    """

    kind: str
    content: bytes
    dark: bytes | None
    width: int
    description: str


def newest_pictures(folder: Path) -> dict[str, Path]:
    """Return the path of the picture with the latest step of each series in a folder, by the name of the series.

    Args:
        folder: folder with pictures. The file names of a series differ only in the optimizer step, so ``clips.png`` and
            ``clips.gif`` belong to two series.
    """
    newest: dict[str, Path] = {}
    for path in sorted(folder.glob("*")):
        series = re.sub(r"[-_]?step\d+", "", path.name)
        if path.suffix in TYPES and path.is_file() and step_of(path) >= step_of(newest.get(series)):
            newest[series] = path
    return newest


def step_of(path: Path | None) -> int:
    """Return the optimizer step in the name of a picture, or -1 if the name has no step or the path is None."""
    match = re.search(r"step(\d{1,18})", path.stem if path is not None else "")
    return int(match[1]) if match else -1


def read_picture(path: Path) -> StoredPicture | None:
    """Read a picture and its variant for dark screens.

    Args:
        path: PNG or GIF file. The variant of a PNG file has the same name, in the subfolder ``dark``.

    Returns:
        The picture; None if the file or its variant cannot be read as a picture.
    """
    content, dark = path.read_bytes(), path.parent / DARK / path.name
    if path.suffix == ".gif":  # open_image does not read animations
        # The header: "GIF89a", width and height in two bytes each, flags (byte 10), background and aspect ratio.
        width = int.from_bytes(content[6:8], "little")
        is_gif = content.startswith(b"GIF8")
        return StoredPicture(TYPES[".gif"], content, None, width, _comment(content)) if is_gif else None
    try:
        image = open_image(content)
        dark_content = dark.read_bytes() if dark.is_file() else None
        if dark_content is not None:
            open_image(dark_content)
    # Pillow raises ValueError and SyntaxError for some broken chunks, and a broken picture must not end a run.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return StoredPicture(TYPES[path.suffix], content, dark_content, image.width, str(image.info.get("Description", "")))


def _comment(content: bytes) -> str:
    """Return the text of the comment that precedes the first frame of a GIF file; empty if there is none."""
    flags = content[10] if len(content) > 10 else 0
    position = 13 + (3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0)  # behind the header and the palette
    text = b""
    # Extensions come first. Each consists of a "!", its type, and blocks that begin with their length, the last one with 0.
    while content[position : position + 1] == b"!":
        is_comment = content[position + 1 : position + 2] == b"\xfe"
        position += 2
        while length := content[position] if position < len(content) else 0:
            text += content[position + 1 : position + 1 + length] if is_comment else b""
            position += 1 + length
        position += 1
    return text.decode(errors="replace")
