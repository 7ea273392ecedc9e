"""Pictures and samples that compared runs have written, side by side, as HTML."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from PIL import Image

from lightning_mhla.callbacks.curves import CURVES
from lightning_mhla.data.images import open_image
from lightning_mhla.system.figures import DARK
from lightning_mhla.system.listing import shown, without_controls
from lightning_mhla.system.redaction import redact
from mhla_tasks.tools.comparison.groups import Group

TYPES = {".png": "image/png", ".gif": "image/gif"}
"""MIME types of pictures, by extension."""

LARGEST, LARGEST_PAGE = 8 << 20, 96 << 20
"""Size limits in bytes of a picture, and of all pictures of a page."""

LAST = 4000
"""Number of characters shown of a file with text samples; the last ones are shown."""


def pictures(groups: Sequence[Group], swatch: Sequence[str]) -> str:
    """Return a section of HTML with the latest pictures of each kind, one for each group.

    The first run of a group stands for it. Pictures whose names differ only in the optimizer step are of one kind. The learning
    curves of single runs are left out, since the page has the curves of all runs.

    Args:
        groups: compared groups.
        swatch: HTML that marks each group.
    """
    latest = [_latest(group.first.folder) for group in groups]
    kinds = list(dict.fromkeys(kind for of_group in latest for kind in of_group))
    room = LARGEST_PAGE
    parts, left_out = [], []
    for kind in kinds:
        figures, captions, has_picture = [], [], False
        for index, group in enumerate(groups):
            path = latest[index].get(kind)
            picture = None if path is None else _read(path, room)
            if picture is None:  # an empty place keeps the pictures of a group below each other
                figures.append(_figure(group, swatch[index], "has no such picture", ""))
                left_out += [] if path is None else [path]
                continue
            has_picture = True
            room -= picture.size
            captions.append(picture.description)
            facts = [f"seed {group.seeds[0]}"] if len(group.runs) > 1 else []
            facts += [f"step {_step(picture.path):,}"] if _step(picture.path) >= 0 else []
            figures.append(_figure(group, swatch[index], ", ".join(facts), _image(picture, group)))
        if has_picture:
            # Runs of a sweep write the same caption, so one is enough.
            caption = f'<p class="muted">{_text(captions[0])}</p>' if captions[0] else ""
            parts.append(f'<h3>{_text(kind)}</h3>{caption}<div class="side">{"".join(figures)}</div>')
    if left_out:
        names = ", ".join(shown(path) for path in left_out)
        parts.append(f'<p class="muted">Left out, because they are too large or are not pictures: {_text(names)}.</p>')
    return f"<h2>Pictures</h2>{''.join(parts)}" if parts else ""


@dataclass(frozen=True)
class _Picture:
    """Picture file of a run.

    Attributes:
        path: path of the file.
        content: bytes of the file.
        dark: bytes of its variant for dark screens; empty if there is none.
        width: width in pixels.
        description: text in the file that says what it shows; empty if there is none.
    """

    path: Path
    content: bytes
    dark: bytes
    width: int
    description: str

    @property
    def size(self) -> int:
        """Number of bytes of the file and its variant."""
        return len(self.content) + len(self.dark)


def _read(path: Path, room: int) -> _Picture | None:
    """Read a picture; return None if it is not one, or if it is larger than the limit or than ``room`` bytes."""
    dark = path.parent / DARK / path.name
    size = path.stat().st_size + (dark.stat().st_size if dark.is_file() else 0)
    if size > min(LARGEST, room):
        return None
    content, dark_content = path.read_bytes(), dark.read_bytes() if dark.is_file() else b""
    if path.suffix == ".gif":  # the reader of pictures does not read animations
        width = int.from_bytes(content[6:8], "little")
        return _Picture(path, content, dark_content, width, "") if content.startswith(b"GIF8") else None
    try:
        image = open_image(content)
        dark_content = dark_content if dark_content and open_image(dark_content).size else b""
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return _Picture(path, content, dark_content, image.width, str(image.info.get("Description", "")))


def _image(picture: _Picture, group: Group) -> str:
    """Return an embedded picture as HTML. On a phone it keeps half of its size, so that its texts stay readable."""
    mime = TYPES[picture.path.suffix]
    light, dark = (f"data:{mime};base64,{base64.b64encode(data).decode()}" for data in (picture.content, picture.dark))
    alt = _text(f"{picture.path.name} of {group.label}")
    image = f'<img loading="lazy" alt="{alt}" src="{light}" style="--width: {picture.width}px">'
    if picture.dark:
        image = f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">{image}</picture>'
    return f'<div class="scroll">{image}</div>'


def _figure(group: Group, swatch: str, detail: str, image: str) -> str:
    muted = f' <span class="muted">{_text(detail)}</span>' if detail else ""
    return f"<figure><figcaption>{swatch} {_text(group.label)}{muted}</figcaption>{image}</figure>"


def _latest(folder: Path) -> dict[str, Path]:
    """Return the path of the latest picture of each kind in a run's folder."""
    latest: dict[str, tuple[int, Path]] = {}
    for path in [*sorted((folder / "checkpoints").glob("*")), *sorted((folder / "pictures").glob("*"))]:
        if path.suffix not in TYPES or path.name == CURVES or not path.is_file():
            continue
        step = _step(path)
        kind = re.sub(r"[-_]?step\d+", "", path.stem) or path.stem
        if kind not in latest or latest[kind][0] <= step:
            latest[kind] = (step, path)
    return {kind: path for kind, (_, path) in latest.items()}


def _step(path: Path) -> int:
    match = re.search(r"step(\d{1,18})", path.name)
    return int(match[1]) if match else -1


def samples(groups: Sequence[Group], swatch: Sequence[str]) -> str:
    """Return a section of HTML with the last text samples of the first run of each group; empty if no run has any.

    Args:
        groups: compared groups.
        swatch: HTML that marks each group.
    """
    figures = []
    for index, group in enumerate(groups):
        for path in sorted(group.first.folder.glob("samples*.md")):
            text = _text(path.read_text(encoding="utf-8", errors="replace")[-LAST:], lines=True)
            caption = f'{swatch[index]} {_text(group.label)} <span class="muted">{_text(path.name)}</span>'
            figures.append(f"<figure><figcaption>{caption}</figcaption><pre>{text}</pre></figure>")
    return f'<h2>Samples</h2><div class="side">{"".join(figures)}</div>' if figures else ""


def _text(text: str, lines: bool = False) -> str:
    """Escape a text of a run for HTML, without secrets, and as one line unless ``lines`` is set."""
    return escape(redact(text) if lines else without_controls(redact(text)))
