"""Writer of ``compared.html``, a web page that compares runs. The page needs neither the network nor other files.

Names, options and texts come from run folders, which may have been created by other people. All of them are escaped, and a
content security policy forbids every script except that of the page.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from lightning_mhla.callbacks.markup import html_text
from lightning_mhla.callbacks.page import PAGE as REPORT
from lightning_mhla.system.files import write_whole
from mhla_tasks.tools.comparison import pictures
from mhla_tasks.tools.comparison.curves import color_class, color_rules, dash, drawn_metrics, legend, panel
from mhla_tasks.tools.comparison.formats import as_latex, as_markdown
from mhla_tasks.tools.comparison.groups import Group, direction, remarks
from mhla_tasks.tools.comparison.options import SEED, option_text, plain
from mhla_tasks.tools.comparison.runs import compared_keys, differences
from mhla_tasks.tools.comparison.table import ARROWS, Cell, Column, Table, tabulate

STYLE = """
:root { color-scheme: light dark; --line: #8886; --paper: #fff; --tint: #8881; --shade: #0003 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 1.5rem auto; padding: 0 1rem; background: var(--paper);
  overflow-wrap: break-word }
h1 { font-size: 1.4rem; margin-bottom: 0; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem }
.muted { opacity: .72 } p { margin: .4rem 0 }
.scroll { overflow-x: auto; max-width: 100%; background:
  linear-gradient(to left, var(--paper) 60%, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to left, var(--shade), transparent) right / 1.2rem 100% no-repeat scroll }
table { border-collapse: collapse } th, td { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: baseline }
tr > * { border-bottom: 1px solid var(--line) } td.number, th.number { text-align: right }
td.number, tr > :first-child { font-variant-numeric: tabular-nums; white-space: nowrap }
abbr { text-decoration: none; color: #d33; font-weight: 700 } li { overflow-wrap: anywhere }
.option, .run { overflow-wrap: break-word; max-width: 24rem }
td.run { min-width: 10rem; overflow-wrap: anywhere }
tr > :first-child { position: sticky; left: 0; background: var(--paper); white-space: nowrap }
th:not(.option) { white-space: nowrap }
th button { font: inherit; font-weight: 600; color: inherit; background: none; border: 0; padding: 0; cursor: pointer;
  text-align: inherit }
th button:hover, a:hover { text-decoration: underline }
th[aria-sort=ascending] button::after { content: " \\25B4" } th[aria-sort=descending] button::after { content: " \\25BE" }
.keys { display: flex; flex-wrap: wrap; gap: .4rem .5rem; margin: .6rem 0 1rem }
.keys button { font: inherit; color: inherit; background: var(--tint); border: 1px solid var(--line); border-radius: 1rem;
  padding: .1rem .7rem; cursor: pointer; text-align: left; overflow-wrap: anywhere }
.keys button[aria-pressed=false] { opacity: .4; text-decoration: line-through }
.swatch { width: 1.6em; height: .7em; vertical-align: baseline; stroke: var(--color); stroke-width: 3; fill: none }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(21rem, 100%), 1fr)); gap: 1rem 1.5rem }
.side { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr)); gap: 1rem 1.5rem;
  align-items: start }
figure { margin: 0; min-width: 0 } figcaption { overflow-wrap: anywhere; margin-bottom: .2rem }
figure svg:not(.swatch) { width: 100%; height: auto; display: block }
svg text { fill: currentColor; font-size: 11px; opacity: .8 } .grid { stroke: var(--line); stroke-width: .6; fill: none }
.series { fill: none; stroke: var(--color); stroke-linejoin: round } .series[hidden] { display: none }
.mean { stroke-width: 2.2 } .thin { stroke-width: 1; opacity: .45 } circle { fill: var(--color); stroke: none }
img { max-width: 100%; height: auto; border-radius: .3rem; display: block }
pre { background: var(--tint); padding: .7rem; overflow: auto; max-height: 26rem; border-radius: .3rem; margin: .4rem 0 }
summary { cursor: pointer; margin: .5rem 0 } ul.remarks { margin: .6rem 0; padding-left: 1.2rem }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171c; --shade: #fff3 }
  body { color: #e6e8eb } a { color: #79b8ff }
}
@media (max-width: 40rem) {
  .side img { max-width: none; width: max(min(100%, var(--width)), calc(var(--width) / 2)) }
  th, td { padding-right: .6rem }
  .option, .run, tr > .name { min-width: 6rem; max-width: 9rem; white-space: normal; overflow-wrap: anywhere }
  tr > .name { overflow-wrap: break-word; min-width: 8rem }
}
"""
COLORS = f"{color_rules(dark=False)}\n@media (prefers-color-scheme: dark) {{ {color_rules(dark=True)} }}\n"
"""Rules of the style sheet for the colors of groups."""

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], original = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    if (button) button.onclick = () => {
      const order = {null: "ascending", ascending: "descending", descending: null}[head.getAttribute("aria-sort")];
      heads.forEach(other => other.removeAttribute("aria-sort"));
      let rows = original;
      if (order) {
        head.setAttribute("aria-sort", order);
        const sign = order == "ascending" ? 1 : -1;
        const number = row => parseFloat(row.cells[column].dataset.v ?? "");
        const text = row => row.cells[column].textContent;
        const missing = row => head.classList.contains("number") ? isNaN(number(row)) : !text(row);
        const words = (a, b) => text(a).localeCompare(text(b), undefined, {numeric: true});
        const compare = (a, b) => isNaN(number(a)) - isNaN(number(b))
          || (isNaN(number(a)) ? words(a, b) : number(a) - number(b));
        rows = [...original].sort((a, b) => missing(a) - missing(b) || (missing(a) ? 0 : sign * compare(a, b)));
      }
      body.append(...rows);
    };
  });
}
for (const key of document.querySelectorAll(".keys button")) key.onclick = () => {
  const visible = key.getAttribute("aria-pressed") != "true";
  key.setAttribute("aria-pressed", visible);
  for (const series of document.querySelectorAll(`.series[data-group="${key.dataset.group}"]`))
    series.toggleAttribute("hidden", !visible);
};
"""


def write_page(
    path: Path, title: str, groups: Sequence[Group], metrics: Sequence[str] | None = None, left_out: Sequence[str] = ()
) -> None:
    """Write the web page of a comparison atomically.

    Args:
        path: path of the file to write.
        title: heading of the page.
        groups: compared groups.
        metrics: metrics to show; None for all.
        left_out: sentences about runs that are not compared.
    """
    table = tabulate(groups, metrics)
    marks = [_swatch(index) for index in range(len(groups))]
    parts = [
        f"<h1>{html_text(title)}</h1>",
        _summary(groups, table, marks, left_out),
        f"<h2>Results</h2>{_results(table, groups, marks, path)}",
        _curves(groups, marks, metrics),
        _options(groups, marks),
        pictures.pictures(groups, marks),
        pictures.samples(groups, marks),
        "<h2>Copy the table</h2>",
        *(
            f"<details><summary>{name}</summary><pre>{html_text(text, lines=True)}</pre></details>"
            for name, text in {"Markdown": as_markdown(table), "LaTeX": as_latex(table)}.items()
        ),
    ]
    # The policy allows scripts by their hash, so that text from a run that looks like a script is not executed.
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    )
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{html_text(title)}</title>'
        f"<style>{STYLE}{COLORS}</style>"
    )
    body = "\n".join(part for part in parts if part)
    text = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n<script>{SCRIPT}</script></body></html>\n'
    write_whole(path, text.encode("utf-8", "backslashreplace").decode())


def _swatch(index: int) -> str:
    """Return HTML that identifies a group: a short line in its color, and the number of its row, which is ``index + 1``."""
    line = f'<path d="M0 5H22"{dash(index)}/>'
    return f'<svg class="swatch {color_class(index)}" viewBox="0 0 22 8" aria-hidden="true">{line}</svg> {index + 1}'


def _summary(groups: Sequence[Group], table: Table, marks: Sequence[str], left_out: Sequence[str]) -> str:
    runs = sum(len(group.runs) for group in groups)
    facts = [f"{runs} run{'s' * (runs != 1)} in {len(groups)} row{'s' * (len(groups) != 1)}"]
    facts += (
        [f"seeds {html_text(', '.join(groups[0].seeds))}"] if len({tuple(group.seeds) for group in groups}) == 1 else []
    )
    sentences = [*remarks(groups), *left_out]
    listed = f'<ul class="remarks">{"".join(f"<li>{html_text(sentence)}</li>" for sentence in sentences)}</ul>'
    return f'<p class="muted">{"; ".join(facts)}</p>{_winner(groups, table, marks)}{listed if sentences else ""}'


def _winner(groups: Sequence[Group], table: Table, marks: Sequence[str]) -> str:
    """Return HTML that names the groups with the best value of a metric, and the next one; empty if no best value is marked.

    The metric is that of the first column in which the table marks a best value.

    Args:
        groups: compared groups.
        table: table with a row for each group.
        marks: HTML for each group, with its color and number.
    """
    for index, column in enumerate(table.columns):
        cells = [row[index] for row in table.rows]
        best = [number for number, cell in enumerate(cells) if cell.best]
        if not best:
            continue
        finished = [number for number, group in enumerate(groups) if group.first.record["finished"]]
        others = [
            (value, number) for number in finished if number not in best and (value := cells[number].value) is not None
        ]
        _, following = max(others) if column.better == "max" else min(others)
        texts = {}
        for number in (*best, following):
            mark = marks[number] + "*" * bool(groups[number].notes)
            texts[number] = f"{mark} {html_text(groups[number].label)} with {html_text(str(cells[number]))}"
        first = ", ".join(texts[number] for number in best)
        return f"<p>Best {html_text(column.title)}: {first}; next: {texts[following]}.</p>"
    return ""


def _results(table: Table, groups: Sequence[Group], marks: Sequence[str], path: Path) -> str:
    shown = (table.without("run") if table.identified else table).without("note")
    # The notes stand below the table, because a column at its right end would be out of sight on a phone.
    notes = {number: row[-1].text for number, row in enumerate(table.rows, 1) if table.columns[-1].kind == "note"}
    notes = {number: note for number, note in notes.items() if note}
    rows = []
    for number, (row, group, mark) in enumerate(zip(shown.rows, groups, marks, strict=True), 1):
        name = f'{mark}<abbr title="{html_text(notes[number])}">*</abbr>' if number in notes else mark
        cells = [f"<td>{name}", *(_cell(cell, column) for cell, column in zip(row, shown.columns, strict=True))]
        rows.append(f"<tr>{''.join(cells)}<td>{_seeds(group, path)}</tr>")
    sentences = ["Metrics are those of the last validation."]
    if any(cell.spread for row in table.rows for cell in row):
        sentences.insert(0, "Mean ± standard deviation over runs that differ only in their seed.")
    if any(cell.best for row in table.rows for cell in row):
        sentences.append("The best value of a column is bold; a difference smaller than the deviation is not evidence.")
    sentences.append("Click a heading to sort, and a seed to read the report of its run.")
    heads = f"<th>row{''.join(map(_head, shown.columns))}<th>seeds"
    body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
    listed = "".join(f"<li>{marks[number - 1]}: {html_text(note)}</li>" for number, note in notes.items())
    return (
        f'<p class="muted">{" ".join(sentences)}</p><div class="scroll"><table class="sortable">{body}</table></div>'
        + (f'<ul class="remarks">{listed}</ul>' if notes else "")
    )


def _head(column: Column) -> str:
    meaning = {"min": "lower is better", "max": "higher is better", None: column.key}[column.better]
    title = f' title="{html_text(meaning)}"' if meaning else ""
    heading = html_text(column.title).replace(f" {ARROWS[column.better]}", f"&nbsp;{ARROWS[column.better]}")
    return f'<th class="{column.kind}"{title}><button>{heading}</button>'


def _cell(cell: Cell, column: Column) -> str:
    value = "" if cell.value is None else f' data-v="{cell.value!r}"'
    text = f"<b>{html_text(cell.text)}</b>" if cell.best else html_text(cell.text)
    return f'<td class="{column.kind}"{value}>{text}{f" ± {html_text(cell.spread)}" if cell.spread else ""}'


def _seeds(group: Group, path: Path) -> str:
    """Return HTML with the seeds of a group. Each seed is a link to the report of its run, if the run has one.

    Args:
        group: runs with the seeds.
        path: path of the page that contains the links, which are relative to it.
    """
    links = []
    for run, seed in zip(group.runs, group.seeds, strict=True):
        report = run.folder / REPORT
        # quote() also encodes a colon, so that no name of a folder can be the scheme of a URL
        target = quote(os.fsencode(os.path.relpath(report.absolute(), path.absolute().parent)))
        links.append(f'<a href="{target}">{html_text(seed)}</a>' if report.is_file() else html_text(seed))
    return ", ".join(links)


def _curves(groups: Sequence[Group], marks: Sequence[str], metrics: Sequence[str] | None) -> str:
    names = drawn_metrics(groups, metrics)
    if not names and metrics is not None:
        return ""
    if not names:
        return "<h2>Curves</h2><p>No metric has more than one value.</p>"
    keys = [
        f'<button data-group="{index}" aria-pressed="true">{mark} {html_text(legend(group))}</button>'
        for index, (group, mark) in enumerate(zip(groups, marks, strict=True))
    ]
    figures = []
    for name in names:
        better = direction(name, groups)
        meaning = {"min": "lower is better", "max": "higher is better", None: ""}[better]
        caption = f'<b>{html_text(name)}</b> <span class="muted">{ARROWS[better]} {meaning}</span>'
        figures.append(f"<figure><figcaption>{caption}</figcaption>{panel(name, groups)}</figure>")
    lines = (
        "Thin lines are single runs, thick lines their mean. " if any(len(group.runs) > 1 for group in groups) else ""
    )
    hint = f'<p class="muted">{lines}Click a name to hide or show its curves.</p>'
    return f'<h2>Curves</h2>{hint}<div class="keys">{"".join(keys)}</div><div class="plots">{"".join(figures)}</div>'


def _breakable(key: str) -> str:
    """Return HTML of a configuration key as options are written on the command line, which may break after its parts."""
    return re.sub(r"([._])", r"\1<wbr>", html_text(key.replace(".init_args", "")))


def _options(groups: Sequence[Group], marks: Sequence[str]) -> str:
    runs = [run for group in groups for run in group.runs]
    configured = [run for run in runs if run.options]
    differing = [key for key in differences(runs) if key != SEED]
    rows = []
    for key in differing:
        values = [option_text(group.first.options.get(key)) if group.first.options else "unknown" for group in groups]
        rows.append(
            f"<tr><td class=name>{_breakable(key)}{''.join(f'<td class=option>{html_text(value)}' for value in values)}</tr>"
        )
    heads = "".join(f"<th>{mark}" for mark in marks)
    table = f'<div class="scroll"><table><thead><tr><th>option{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    shared = [key for key in compared_keys(runs) if key not in differing and key != SEED]
    lines = "\n".join(f"{key}: {plain(configured[0].options.get(key))}" for key in shared)
    summary = f"<summary>{len(shared)} options that are the same</summary>"
    common = f"<details>{summary}<pre>{html_text(lines, lines=True)}</pre></details>"
    inside = table if rows else "<p>None, except possibly the seed.</p>"
    return f"<h2>Options that differ</h2>{inside}{common if shared else ''}" if configured else ""
