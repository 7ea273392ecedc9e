"""Pictures and samples that compared runs have written, side by side, as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_mhla.callbacks.curves import CURVES
from lightning_mhla.callbacks.markup import embedded, html_text
from lightning_mhla.callbacks.stored_pictures import StoredPicture, newest_pictures, read_picture, step_of
from lightning_mhla.system.figures import DARK
from lightning_mhla.system.listing import shown
from mhla_tasks.tools.comparison.groups import Group

LARGEST, LARGEST_PAGE = 8 << 20, 96 << 20
"""Maximum size of a picture, and maximum total size of the pictures of a page, in bytes."""

LAST = 4000
"""Number of characters at the end of a file with text samples that the page shows."""


def pictures(groups: Sequence[Group], swatch: Sequence[str]) -> str:
    """Return a section of HTML with the latest picture of each kind for each group; empty if there are no pictures.

    The first run of a group represents it. Pictures whose names differ only in the optimizer step are of the same kind. The
    learning curves of single runs are left out, since the page has the curves of all runs.

    Args:
        groups: compared groups.
        swatch: HTML for each group, with its color and number.
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
            if path is None or picture is None:  # an empty place keeps the pictures of a group below each other
                figures.append(_figure(group, swatch[index], "has no such picture", ""))
                left_out += [] if path is None else [path]
                continue
            has_picture = True
            room -= len(picture.content) + len(picture.dark or b"")
            captions.append(picture.description)
            facts = [f"seed {group.seeds[0]}"] if len(group.runs) > 1 else []
            facts += [f"step {step_of(path):,}"] if step_of(path) >= 0 else []
            figures.append(
                _figure(group, swatch[index], ", ".join(facts), _image(picture, f"{path.name} of {group.label}"))
            )
        if has_picture:
            # Runs of a sweep write the same caption, so one is enough.
            caption = f'<p class="muted">{html_text(captions[0])}</p>' if captions[0] else ""
            parts.append(f'<h3>{html_text(Path(kind).stem)}</h3>{caption}<div class="side">{"".join(figures)}</div>')
    if left_out:
        names = ", ".join(shown(path) for path in left_out)
        parts.append(
            f'<p class="muted">Left out, because they are too large or are not pictures: {html_text(names)}.</p>'
        )
    return f"<h2>Pictures</h2>{''.join(parts)}" if parts else ""


def _read(path: Path, room: int) -> StoredPicture | None:
    """Read a picture file; return None if it is not a picture, or is larger than :data:`LARGEST` or ``room`` bytes."""
    dark = path.parent / DARK / path.name
    size = path.stat().st_size + (dark.stat().st_size if dark.is_file() else 0)
    return read_picture(path) if size <= min(LARGEST, room) else None


def _image(picture: StoredPicture, alt: str) -> str:
    """Return HTML with an embedded picture.

    On a narrow screen, the picture keeps at least half of its width and can be scrolled, so that text in it stays readable.

    Args:
        picture: picture to embed.
        alt: description of the picture for screen readers.
    """
    source = embedded(picture.kind, picture.content)
    image = f'<img loading="lazy" alt="{html_text(alt)}" src="{source}" style="--width: {picture.width}px">'
    if picture.dark is not None:
        dark = embedded(picture.kind, picture.dark)
        image = f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">{image}</picture>'
    return f'<div class="scroll">{image}</div>'


def _figure(group: Group, swatch: str, detail: str, image: str) -> str:
    muted = f' <span class="muted">{html_text(detail)}</span>' if detail else ""
    return f"<figure><figcaption>{swatch} {html_text(group.label)}{muted}</figcaption>{image}</figure>"


def _latest(folder: Path) -> dict[str, Path]:
    """Return the path of the latest picture of each series in a run's folder, by name of the series.

    The file names in a series differ only in the optimizer step.
    """
    latest = newest_pictures(folder / "checkpoints") | newest_pictures(folder / "pictures")
    return {series: path for series, path in latest.items() if series != CURVES}


def samples(groups: Sequence[Group], swatch: Sequence[str]) -> str:
    """Return a section of HTML with the last text samples of the first run of each group; empty if no run has any.

    Args:
        groups: compared groups.
        swatch: HTML for each group, with its color and number.
    """
    figures = []
    for index, group in enumerate(groups):
        for path in sorted(group.first.folder.glob("samples*.md")):
            text = html_text(path.read_text(encoding="utf-8", errors="replace")[-LAST:], lines=True)
            caption = f'{swatch[index]} {html_text(group.label)} <span class="muted">{html_text(path.name)}</span>'
            figures.append(f"<figure><figcaption>{caption}</figcaption><pre>{text}</pre></figure>")
    return f'<h2>Samples</h2><div class="side">{"".join(figures)}</div>' if figures else ""
