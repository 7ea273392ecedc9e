"""Writer of ``report.html``, a web page that reports on a run and embeds its pictures, so that it needs no other files."""

from __future__ import annotations

import base64
import html
import io
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_mhla.callbacks.curves import CURVES
from lightning_mhla.callbacks.points import draw_curves
from lightning_mhla.system.files import write_whole

PAGE = "report.html"
TYPES = {".png": "image/png", ".gif": "image/gif"}
LONGEST = 20_000
"""Number of characters shown of a text file; the last ones are shown."""

STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } th, td { padding: .2rem .8rem .2rem 0; text-align: left; border-bottom: 1px solid #8884 }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #8882; padding: .8rem; overflow: auto; max-height: 30rem; border-radius: .3rem }
figure { margin: 0 } figcaption { font-size: .85rem; opacity: .8 }
img { max-width: 100%; background: #fff; border-radius: .3rem }
@media (max-width: 40rem) { figure { overflow-x: auto } img { max-width: 220% } }
.muted { opacity: .7 }
"""


def write_page(folder: Path, checkpoints: Path, record: Mapping[str, Any]) -> None:
    """Write the web page of a run, ``report.html``, atomically.

    Args:
        folder: folder of the run, to which the page is written.
        checkpoints: folder of the run's checkpoints.
        record: metrics, duration, library versions and other facts about the run, as stored in ``run.json``.
    """
    name = html.escape("/".join(folder.parts[-2:]))
    state = "finished" if record["finished"] else "not finished"
    seconds, steps = record["seconds"], record["steps"]
    speed = f", {steps / seconds:.3g} steps per second overall" if seconds and steps else ""
    parts = [
        f"<h1>{name}</h1>",
        f'<p class="muted">{state}; {steps:,} steps, {duration(seconds)}{speed}; '
        f"{record['parameters']:,} parameters, {record['trained_parameters']:,} of them trained; {_processes(record)}</p>",
        _metrics(record),
        _curves(record) if not (checkpoints / CURVES).exists() else "",
        *_pictures(folder, checkpoints),
        *_samples(folder),
        _resume(folder, checkpoints),
        *_text("Configuration", folder / "config.yaml"),
        f"<h2>Versions</h2><p>{html.escape(', '.join(f'{name} {value}' for name, value in record['versions'].items()))}</p>",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>'
    body = "\n".join(part for part in parts if part)
    write_whole(
        folder / PAGE, f"<!doctype html>\n<html lang=en>{head}<style>{STYLE}</style>\n<body>\n{body}\n</body></html>\n"
    )


def fenced(text: str, language: str = "") -> str:
    """Format text as a code block in Markdown, with a fence that does not occur in the text.

    Args:
        text: content of the code block.
        language: name of the language for syntax highlighting; empty for none.
    """
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def duration(seconds: float) -> str:
    """Format a duration in its two largest units, such as 2 d 3 h, 1 h 20 min or 4 min 05 s.

    Args:
        seconds: duration in seconds.
    """
    minutes, leftover = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return (
        f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {leftover:02d} s" if minutes else f"{leftover} s"
    )


def _processes(record: Mapping[str, Any]) -> str:
    return "1 process" if record["processes"] == 1 else f"{record['processes']} processes"


def _metrics(record: Mapping[str, Any]) -> str:
    if not record["metrics"]:
        return "<p>No validation yet.</p>"
    best = record["best"]
    rows = []
    for name, points in record["metrics"].items():
        step, value = points[-1]
        chosen = f"{_figure(best['value'])} at step {best['step']:,}" if best and best["metric"] == name else ""
        cells = f'<td class="n">{_figure(value)}</td><td class="n">{step:,}</td><td>{chosen}</td>'
        rows.append(f"<tr><td>{html.escape(name)}</td>{cells}</tr>")
    head = '<tr><th>metric<th class="n">last<th class="n">step<th>best</tr>'
    return f"<h2>Metrics</h2><table>{head}{''.join(rows)}</table>"


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.5g}"


def _curves(record: Mapping[str, Any]) -> str:
    """Return an HTML plot of the validation metrics that change during the run, or an empty string if none changes."""
    finite = {
        name: [(step, value) for step, value in points if value is not None]
        for name, points in record["metrics"].items()
    }
    picture = io.BytesIO()
    if not draw_curves(finite, picture):
        return ""
    return f"<h2>Curves</h2>{_embedded('validation metrics', 'image/png', picture.getvalue())}"


def _embedded(caption: str, kind: str, content: bytes) -> str:
    """Format a picture as an HTML figure with embedded content and a caption.

    Args:
        caption: text of the caption.
        kind: MIME type of the picture, such as ``image/png``.
        content: bytes of the picture file.
    """
    text, data = html.escape(caption), base64.b64encode(content).decode()
    return f'<figure><img alt="{text}" src="data:{kind};base64,{data}"><figcaption>{text}</figcaption></figure>'


def _pictures(folder: Path, checkpoints: Path) -> list[str]:
    """Return a section of HTML with the pictures of a run, as a list with one string.

    The list is empty if the run has no pictures. Among pictures whose names differ only in the optimizer step, only the latest
    is included.
    """
    last: dict[str, Path] = {}
    for path in [*sorted(checkpoints.glob("*.png")), *sorted((folder / "pictures").glob("*"))]:
        if path.suffix in TYPES:
            last[re.sub(r"step\d+", "", path.name)] = path  # names of one kind differ in the step only
    figures = [_embedded(path.name, TYPES[path.suffix], path.read_bytes()) for path in last.values()]
    return [f"<h2>Pictures</h2>{''.join(figures)}"] if figures else []


def _samples(folder: Path) -> list[str]:
    return [part for path in sorted(folder.glob("samples*.md")) for part in _text("Samples", path, open_=True)]


def _text(title: str, path: Path, open_: bool = False) -> list[str]:
    if not path.exists():
        return []
    text = html.escape(path.read_text(errors="replace")[-LONGEST:])
    inside = f"<summary>{html.escape(path.name)}</summary><pre>{text}</pre>"
    return [f"<h2>{title}</h2><details{' open' * open_}>{inside}</details>"]


def _resume(folder: Path, checkpoints: Path) -> str:
    """Return HTML with the command that resumes the run, or an empty string if the run cannot be resumed."""
    shown_folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    if checkpoints.parent == folder and (folder / "lock").exists():
        command = f"lightning fit --run_dir {shlex.quote(str(shown_folder))}"
    elif (folder / "config.yaml").exists():
        config, quoted_folder = (shlex.quote(str(path)) for path in (shown_folder / "config.yaml", shown_folder))
        command = f"lightning fit --config {config} --ckpt_path {quoted_folder}"
    else:
        return ""
    return f"<h2>Resume</h2><pre>{html.escape(command)}</pre>"
