"""Formats of the table of a comparison: terminal, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as TerminalTable
from rich.text import Text

from lightning_mhla.system.listing import without_controls
from mhla_tasks.commandline.console import harmless
from mhla_tasks.tools.comparison.groups import Group
from mhla_tasks.tools.comparison.table import Cell, Table
from mhla_tasks.tools.markdown import escaped

LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    '"': r"\textquotedbl{}", "'": r"\textquotesingle{}",
    "`": r"\textasciigrave{}", "±": r"$\pm$", "↓": r"$\downarrow$", "↑": r"$\uparrow$",
}  # fmt: skip
"""Characters that LaTeX interprets, or that its standard fonts lack, each with the LaTeX code that prints it."""


def print_table(table: Table, remarks: Sequence[str]) -> None:
    """Print a table that adapts to the width of the terminal, with the best values in bold.

    Args:
        table: table to print.
        remarks: sentences to print below the table.
    """
    printed = TerminalTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        justify = "right" if column.kind == "number" else "left"
        printed.add_column(Text(harmless(column.title)), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in table.rows:
        printed.add_row(*(Text(harmless(str(cell)), style="bold" if cell.best else "") for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        # In a file or a pipe, lines are not wrapped at the width of a terminal that is not there.
        console = Console(highlight=False, width=1000)
    console.print(printed)
    for remark in remarks:
        console.print(Text(harmless(remark)))


def as_markdown(table: Table) -> str:
    """Format a table in Markdown, with numbers aligned to the right and the best values in bold."""
    shown = table.without("run") if table.identified else table
    rule = ["---:" if column.kind == "number" else "---" for column in shown.columns]
    lines = [[escaped(column.title) for column in shown.columns], rule]
    lines += [[_markdown_cell(cell) for cell in row] for row in shown.rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _markdown_cell(cell: Cell) -> str:
    text = f"**{escaped(cell.text)}**" if cell.best else escaped(cell.text)
    return f"{text} ± {escaped(cell.spread)}" if cell.spread else text


def as_csv(table: Table, groups: Sequence[Group]) -> str:
    """Format a table as CSV with unrounded numbers, for other programs.

    If any group has several runs, the column of a metric is followed by a column of its standard deviation, which is empty for
    single runs. The last columns contain the seeds and, as a JSON list, the folders. An apostrophe precedes texts that a
    spreadsheet would execute as formulas. Negative numbers stay as they are. The cell of a metric is empty if the metric has no
    mean, for example because it is not finite in one of the runs.

    Args:
        table: table to format.
        groups: groups of runs, one for each row of the table.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    spreads = [any(row[index].spread for row in table.rows) for index in range(len(table.columns))]
    header = []
    for column, has_spread in zip(table.columns, spreads, strict=True):
        header += [column.key or column.name, *([f"{column.name} std"] if has_spread else [])]
    writer.writerow([_csv_text(name) for name in [*header, "seeds", "folders"]])
    for row, group in zip(table.rows, groups, strict=True):
        cells: list[str | float] = []
        for cell, column, has_spread in zip(row, table.columns, spreads, strict=True):
            cells.append(_csv_text(cell.text if column.kind != "number" else "") if cell.value is None else cell.value)
            if has_spread:
                cells.append("" if cell.spread_value is None else cell.spread_value)
        folders = json.dumps([str(run.folder) for run in group.runs], ensure_ascii=False)
        writer.writerow([*cells, _csv_text(" ".join(group.seeds)), _csv_text(folders)])
    return stream.getvalue()


def _csv_text(text: str) -> str:
    line = without_controls(harmless(text))
    is_number = re.fullmatch(r"[+-](\d+\.?\d*|\.\d+)(e[+-]?\d+)?", line, re.IGNORECASE)
    return f"'{line}" if line.startswith(("=", "+", "-", "@")) and not is_number else line


def as_latex(table: Table) -> str:
    r"""Format a table as a LaTeX ``tabular`` for the package booktabs, with the best values in bold.

    Values of options and headings are escaped. A comment in the first line names the packages to load.
    """
    shown = table.without("run") if table.identified else table
    align = "".join("r" if column.kind == "number" else "l" for column in shown.columns)
    lines = [
        "% \\usepackage{booktabs}, and \\usepackage[T1]{fontenc} for quotation marks",
        f"\\begin{{tabular}}{{{align}}}",
        "\\toprule",
        _latex_line([latex_text(column.title) for column in shown.columns]),
        "\\midrule",
        *(_latex_line([_latex_cell(cell) for cell in row]) for row in shown.rows),
        "\\bottomrule",
        "\\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _latex_line(cells: Sequence[str]) -> str:
    # LaTeX reads a bracket after \\ as a length, and {} ends that search at the beginning of the next row.
    first = f"{{}}{cells[0]}" if cells[0].startswith(("[", "*")) else cells[0]
    return " & ".join([first, *cells[1:]]) + " \\\\"


def _latex_cell(cell: Cell) -> str:
    text = latex_text(cell.text)
    text = f"\\textbf{{{text}}}" if cell.best else text
    return f"{text} $\\pm$ {latex_text(cell.spread)}" if cell.spread else text


def latex_text(text: str) -> str:
    """Escape a text for LaTeX.

    In a number, a hyphen becomes a minus sign, and an exponent such as ``e-05`` becomes a power of ten.
    """
    line = without_controls(harmless(text))
    if number := re.fullmatch(r"(-?)(\d[\d,]*(?:\.\d+)?)(?:e([+-]?)0*(\d+))?", line):
        sign, digits, exponent_sign, exponent = number.groups()
        power = "" if exponent is None else f"$\\cdot 10^{{{exponent_sign.replace('+', '')}{exponent}}}$"
        return ("$-$" if sign else "") + digits + power
    # LaTeX prints two hyphens as a dash.
    return "".join(LATEX.get(sign, sign) for sign in line).replace("--", "-{}-")
