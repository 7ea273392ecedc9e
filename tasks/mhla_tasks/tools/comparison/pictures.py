"""Pictures and samples that compared runs have written, side by side, as HTML."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from lightning_mhla.callbacks.curves import CURVES
from lightning_mhla.system.listing import shown, without_controls
from lightning_mhla.system.redaction import redact
from mhla_tasks.tools.comparison.curves import color_class
from mhla_tasks.tools.comparison.groups import Group

SIGNATURES = {".png": ("image/png", b"\x89PNG\r\n\x1a\n"), ".gif": ("image/gif", b"GIF8")}
"""MIME types and first bytes of pictures, by extension."""

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
    size = 0
    parts, left_out = [], []
    for kind in kinds:
        figures = []
        for index, (group, of_group) in enumerate(zip(groups, latest, strict=True)):
            if kind not in of_group:  # an empty place keeps the pictures of a group below each other
                figures.append(_empty(group, swatch[index]))
                continue
            path = of_group[kind]
            size += path.stat().st_size
            mime, signature = SIGNATURES[path.suffix]
            content = path.read_bytes() if path.stat().st_size <= LARGEST and size <= LARGEST_PAGE else b""
            if not content.startswith(signature):
                left_out.append(path)
                figures.append(_empty(group, swatch[index]))
                continue
            figures.append(
                _figure(group, swatch[index], index, path, f"data:{mime};base64,{base64.b64encode(content).decode()}")
            )
        if any("<img" in figure for figure in figures):
            parts.append(f'<h3>{_text(kind)}</h3><div class="side">{"".join(figures)}</div>')
    if left_out:
        names = ", ".join(shown(path) for path in left_out)
        parts.append(f'<p class="muted">Left out, because they are too large or are not pictures: {_text(names)}.</p>')
    return f"<h2>Pictures</h2>{''.join(parts)}" if parts else ""


def _latest(folder: Path) -> dict[str, Path]:
    """Return the path of the latest picture of each kind in a run's folder."""
    latest: dict[str, tuple[int, Path]] = {}
    for path in [*sorted((folder / "checkpoints").glob("*")), *sorted((folder / "pictures").glob("*"))]:
        if path.suffix not in SIGNATURES or path.name == CURVES or not path.is_file():
            continue
        step = _step(path)
        kind = re.sub(r"[-_]?step\d+", "", path.stem) or path.stem
        if kind not in latest or latest[kind][0] <= step:
            latest[kind] = (step, path)
    return {kind: path for kind, (_, path) in latest.items()}


def _step(path: Path) -> int:
    match = re.search(r"step(\d{1,18})", path.name)
    return int(match[1]) if match else -1


def _figure(group: Group, swatch: str, index: int, path: Path, source: str) -> str:
    facts = [f"seed {group.seeds[0]}"] if len(group.runs) > 1 else []
    facts += [f"step {_step(path):,}"] if _step(path) >= 0 else []
    detail = f' <span class="muted">{_text(", ".join(facts))}</span>' if facts else ""
    caption = f"{swatch} {_text(group.label)}{detail}"
    alt = _text(f"{path.name} of {group.label}")
    return (
        f'<figure class="{color_class(index)}"><figcaption>{caption}</figcaption>'
        f'<img loading="lazy" alt="{alt}" src="{source}"></figure>'
    )


def _empty(group: Group, swatch: str) -> str:
    caption = f'{swatch} {_text(group.label)} <span class="muted">has no such picture</span>'
    return f"<figure><figcaption>{caption}</figcaption></figure>"


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
