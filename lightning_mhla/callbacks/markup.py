"""Building blocks of the web pages that report on runs: style, document, figures and plots.

A page is one file without scripts. It loads nothing from elsewhere: pictures are embedded, and curves are drawn as SVG. All
functions escape their text arguments by :func:`html_text`, except the argument ``body`` of :func:`document`, which is HTML.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_mhla.callbacks.axes import Axis, label_width
from lightning_mhla.callbacks.stored_pictures import StoredPicture
from lightning_mhla.system.listing import without_controls
from lightning_mhla.system.numbers import rounded
from lightning_mhla.system.redaction import redact

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --panel: #f6f8fa;
  --series0: #1f6feb; --series1: #bc4c00; --series2: #1a7f37; --series3: #8250df; --share: 31 111 235 }
@media (prefers-color-scheme: dark) { :root { --page: #14171c; --ink: #e6e8eb; --soft: #9aa4af; --line: #343b44;
  --panel: #1d2127; --series0: #79b8ff; --series1: #ffab70; --series2: #7ee2a0; --series3: #c9a6ff; --share: 121 184 255 } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 1.2rem auto; padding: 0 1rem;
  background: var(--page); color: var(--ink); overflow-wrap: break-word }
h1 { font-size: 1.4rem; margin: 0; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin: 2rem 0 .3rem }
h3 { font-size: 1rem; margin: 1rem 0 .3rem } p { margin: .3rem 0 }
.muted { color: var(--soft) }
.scroll { overflow-x: auto; background:
  linear-gradient(to left, var(--page) 60%, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to left, #8885, transparent) right / 1.2rem 100% no-repeat scroll }
table { border-collapse: collapse }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
tr.group td { border-bottom: 0; padding-bottom: 0 }
pre { background: var(--panel); padding: .6rem .8rem; overflow: auto; max-height: 30rem; border-radius: .4rem; margin: .3rem 0 }
pre.command, pre.sample { white-space: pre-wrap; overflow-wrap: anywhere } pre.command span { display: inline-block }
summary { cursor: pointer }
figure { margin: .6rem 0 } figcaption { font-size: .87rem; color: var(--soft); max-width: 46rem }
.sides figcaption { max-width: 26rem }
img { max-width: 100%; height: auto; border-radius: .3rem } svg { width: 100%; height: auto; display: block }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft) }
svg .frame { stroke: var(--line) } svg .reference { stroke: var(--ink); stroke-dasharray: 5 4 }
.key { display: inline-block; width: 1.1rem; height: .2rem; margin: 0 .3rem .2rem .8rem; vertical-align: middle }
.key:first-child { margin-left: 0 }
.top { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1.1fr); grid-template-rows: max-content 1fr;
  grid-template-areas: "facts score" "next score"; gap: .5rem 2rem; margin: .8rem 0 }
.facts { grid-area: facts } .main { grid-area: score } .next { grid-area: next }
.facts { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .15rem 1rem; margin: 0; align-content: start }
.facts dt { color: var(--soft) } .facts dd { margin: 0; overflow-wrap: anywhere }
.score { font-size: 2rem; line-height: 1.2; font-variant-numeric: tabular-nums }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); gap: 0 1.5rem }
.badge { font-size: .8rem; border: 1px solid var(--line); border-radius: 1rem; padding: .1rem .6rem; margin-left: .5rem;
  white-space: nowrap; vertical-align: middle; font-weight: 400 }
.note { border-left: .25rem solid var(--series1); background: var(--panel); padding: .4rem .8rem; margin: .8rem 0 }
.note ul { margin: .2rem 0; padding-left: 1.2rem }
.matrix td, .matrix th { padding: .1rem .35rem; text-align: center; border: 1px solid var(--page); min-width: 1.7rem;
  font-variant-numeric: tabular-nums }
.matrix tr > th:first-child { text-align: right }
.bar { display: inline-block; height: .6rem; background: var(--series0); border-radius: .2rem; vertical-align: middle }
.rail { display: inline-block; width: 7rem; background: var(--line); border-radius: .2rem; line-height: .6rem }
.sides { display: flex; flex-wrap: wrap; gap: 0 3rem } .sides > div { max-width: 100% }
.top h2 { margin-top: 1.2rem }
.mistakes { display: grid; grid-template-columns: repeat(auto-fill, minmax(7rem, 1fr)); gap: .8rem; max-width: 56rem }
.mistakes figure { margin: 0; overflow-wrap: anywhere } .mistakes img { width: 100%; image-rendering: pixelated }
@media (max-width: 44rem) {
  .top { grid-template-columns: minmax(0, 1fr); grid-template-areas: "facts" "score" "next" }
  .facts { grid-template-columns: minmax(0, 1fr); gap: 0 }
  .facts dd { margin-bottom: .35rem } .rail { width: 3.5rem }
  .wide img { max-width: none; width: max(min(100%, var(--width)), calc(var(--width) / 2)) }
  th, td { padding-right: .5rem }
  table:not(.matrix) :is(td:first-child:not(.n, [colspan]), td:last-child:not(.n)) { min-width: 5rem; max-width: 9rem;
    overflow-wrap: anywhere }
  .matrix td, .matrix th { padding: .1rem; min-width: 1.5rem; font-size: .85rem }
  .matrix tr > th:first-child { min-width: 4rem; max-width: 6rem; overflow-wrap: anywhere }
}
"""
"""Style sheet of all pages, for light and dark screens and for phones."""


DIRECTIONS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that change the direction of writing (Unicode Standard Annex 9, table of explicit formatting characters)."""


def html_text(text: str, lines: bool = False) -> str:
    r"""Remove the secrets of a text, and escape it for HTML.

    Args:
        text: any text, such as a name that comes from a run.
        lines: whether to keep all characters, as in a ``<pre>`` element; otherwise line breaks, control characters, and
            characters that change the direction of writing, by which a name could look like another one, become escapes such as
            ``\n`` and ``\u202e``.
    """
    text = redact(text)
    if not lines:
        text = without_controls(text)
        text = "".join(sign.encode("unicode_escape").decode() if sign in DIRECTIONS else sign for sign in text)
    return html.escape(text)


def document(title: str, body: str) -> str:
    """Return a complete HTML document.

    Characters that UTF-8 cannot encode, which stand for invalid bytes in file names, become escapes such as ``\\udcff``.

    Args:
        title: title of the browser window, as text.
        body: HTML of the page.
    """
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html_text(title)}</title>'
    page = f"<!doctype html>\n<html lang=en>{head}<style>{STYLE}</style>\n<body>\n{body}\n</body></html>\n"
    return page.encode("utf-8", "backslashreplace").decode()


def embedded(kind: str, content: bytes) -> str:
    """Return a ``data:`` URL that embeds a picture in a page.

    Args:
        kind: MIME type of the picture, such as ``image/png``.
        content: bytes of the picture file.
    """
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def picture(caption: str, stored: StoredPicture) -> str:
    """Return an embedded picture with a caption as an HTML figure.

    On a phone, a picture is shown at no less than half its size, so that its text stays readable. If it is then wider than the
    screen, it scrolls inside the figure.

    Args:
        caption: text of the caption.
        stored: picture to embed.
    """
    text = html_text(caption)
    image = f'<img alt="{text}" src="{embedded(stored.kind, stored.content)}">'
    if stored.dark is not None:
        source = f'<source media="(prefers-color-scheme: dark)" srcset="{embedded(stored.kind, stored.dark)}">'
        image = f"<picture>{source}{image}</picture>"
    scrolled = f'<div class="scroll wide" style="--width: {stored.width}px">{image}</div>'
    return f"<figure>{scrolled}<figcaption>{text}</figcaption></figure>"


class Curve(NamedTuple):
    """Curve in a plot of a metric against the optimizer step.

    Attributes:
        name: name in the legend.
        points: (step, value) pairs in ascending order of steps.
    """

    name: str
    points: Sequence[tuple[float, float]]


WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 420, 210, 52, 34, 8, 12
"""Size of a plot and its margins, in pixels of the SVG. The left margin grows with the labels of the vertical axis."""
LONGEST_CURVE = 300
"""Number of points above which a curve is thinned by averaging neighbors."""
LOG_RATIO = 50
"""Ratio of the largest to the smallest value above which the value axis is logarithmic."""


def plot(title: str, curves: Sequence[Curve], reference: tuple[str, float] | None = None) -> str:
    """Return a plot of curves against the optimizer step, as an HTML figure with an SVG and a legend.

    The colors adapt to light and dark screens. The value axis is logarithmic if all values are positive and the largest is more
    than 50 times the smallest.

    Args:
        title: title of the plot, as text; empty for no title.
        curves: curves with finite values, at least one of them with a point.
        reference: name and value of a horizontal line; None for no line.
    """
    curves = [Curve(curve.name, _thinned(curve.points)) for curve in curves if curve.points]
    steps = [step for curve in curves for step, _ in curve.points]
    values = [value for curve in curves for _, value in curve.points] + ([reference[1]] if reference else [])
    logarithmic = min(values) > 0 and max(values) / min(values) > LOG_RATIO
    scale_y = Axis(min(values), max(values), HEIGHT - BOTTOM, TOP, logarithmic)
    ticks_y = scale_y.ticks()
    left = label_width(ticks_y, LEFT)
    scale_x = Axis(min(0, *steps), max(steps), left, WIDTH - RIGHT, margin=0, whole=True)
    lines = []
    for value, label in ticks_y:
        y = scale_y(value)
        lines.append(f'<path class="frame" d="M{left} {y:.1f}H{WIDTH - RIGHT}"/>')
        lines.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for step, label in scale_x.ticks():
        x = scale_x(step)
        anchor = "end" if x > WIDTH - 2 * RIGHT else "middle"  # a label at the right edge would be cut
        lines.append(f'<text x="{x:.1f}" y="{HEIGHT - 18}" text-anchor="{anchor}">{label}</text>')
    axis_text = "optimizer step" + (" (vertical axis logarithmic)" if logarithmic else "")
    lines.append(f'<text x="{(left + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}" text-anchor="middle">{axis_text}</text>')
    if reference:
        lines.append(f'<path class="reference" d="M{left} {scale_y(reference[1]):.1f}H{WIDTH - RIGHT}"/>')
    for index, curve in enumerate(curves):
        color = f"var(--series{index % 4})"
        places = [(scale_x(step), scale_y(value)) for step, value in curve.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        lines.append(f'<path fill="none" stroke="{color}" stroke-width="2" stroke-linejoin="round" d="M{path}"/>')
        if len(places) <= 12:  # few points, perhaps a single one, would be hard to see as a line
            lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
    legend = _legend(curves, reference)
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html_text(title)}">{"".join(lines)}</svg>'
    heading = f"<h3>{html_text(title)}</h3>" if title else ""
    return f"<figure>{heading}{drawing}{f'<figcaption>{legend}</figcaption>' if legend else ''}</figure>"


def _legend(curves: Sequence[Curve], reference: tuple[str, float] | None) -> str:
    if len(curves) == 1 and reference is None:
        return ""
    entries = [
        f'<span class="key" style="background: var(--series{index % 4})"></span>{html_text(curve.name)}'
        for index, curve in enumerate(curves)
    ]
    if reference:
        key = '<span class="key" style="border-top: 2px dashed var(--ink)"></span>'
        entries.append(f"{key}{html_text(reference[0])} {rounded(reference[1])}")
    return "".join(entries)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduce a curve of more than 300 points to 151 to 301 points by averaging neighbors. Shorter curves stay unchanged.

    The last point of a curve is never averaged.
    """
    size = math.ceil(len(points) / LONGEST_CURVE)
    if size <= 1:
        return list(points)
    # The last point is kept apart: the end of a curve should show the value that tables list.
    groups = [points[start : start + size] for start in range(0, len(points) - 1, size)]
    means = [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
    return [*means, points[-1]]
