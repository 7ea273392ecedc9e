"""Comparison of training runs by options, metrics, time and number of parameters, for ``lightning compare``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_mhla.callbacks.report import RECORD
from lightning_mhla.system.files import to_json
from lightning_mhla.system.listing import shown
from mhla_tasks.commandline.console import harmless
from mhla_tasks.tools.comparison.curves import draw, drawn_metrics
from mhla_tasks.tools.comparison.formats import as_csv, as_latex, as_markdown, print_table
from mhla_tasks.tools.comparison.groups import group_runs, remarks
from mhla_tasks.tools.comparison.page import write_page
from mhla_tasks.tools.comparison.runs import as_json, read_runs, unrecorded
from mhla_tasks.tools.comparison.table import tabulate

PAGE, PICTURE = "compared.html", "compared.png"
"""Names of the web page and the picture that compare the runs of a sweep, in the folder of the sweep."""


def compare(
    folders: Sequence[Path],
    form: str = "table",
    page: Path | None = None,
    picture: Path | None = None,
    metrics: Sequence[str] | None = None,
) -> None:
    """Compare the runs in folders: print a table and, on request, write a web page and a picture of the curves.

    Runs that have no ``run.json`` or an invalid one are named on standard error and left out.

    Args:
        folders: folders of runs, or folders that contain such folders at any depth.
        form: format of the table on standard output: ``table``, ``markdown``, ``csv``, ``latex`` or ``json``. JSON has an entry
            for each run; the other formats average runs that differ only in their seed.
        page: path of the web page to write; None for no page.
        picture: path of the picture of the curves to write; None for no picture.
        metrics: names of the metrics to show, in this order; None for all. Names of other columns are also accepted, see
            :func:`~mhla_tasks.tools.comparison.table.tabulate`.

    Raises:
        FileNotFoundError: if a folder does not exist or does not contain any run.
        ValueError: if no run has valid files, ``metrics`` has a name that is unknown, or there is no curve to draw.
    """
    unreadable: dict[Path, str] = {}
    runs = read_runs(folders, unreadable)
    groups = group_runs(runs)
    table = tabulate(groups, metrics)
    left_out = _left_out(unrecorded(folders), unreadable)
    sys.stderr.write("".join(f"{sentence}\n" for sentence in map(harmless, left_out)))
    if form == "table":
        print_table(table, remarks(groups))
    else:
        texts = {
            "markdown": lambda: as_markdown(table),
            "csv": lambda: as_csv(table, groups),
            "latex": lambda: as_latex(table),
            "json": lambda: to_json(as_json(runs, metrics), indent=1, default=str) + "\n",
        }
        sys.stdout.write(texts[form]())
        sys.stderr.write("".join(f"{remark}\n" for remark in map(harmless, remarks(groups))))
    if page is not None:
        write_page(page, f"Comparison of {', '.join(map(shown, folders))}", groups, metrics, left_out)
        sys.stderr.write(f"page: {shown(page)}\n")
    if picture is not None:
        draw(groups, picture, metrics)
        sys.stderr.write(f"curves: {shown(picture)}\n")


def _left_out(unrecorded: Sequence[Path], unreadable: Mapping[Path, str]) -> list[str]:
    """Return sentences about runs that are not compared.

    Args:
        unrecorded: folders of runs without ``run.json``.
        unreadable: error messages about the files of other runs, by folder.
    """
    names = ", ".join(map(shown, unrecorded))
    without = f"Left out, because they have no {RECORD}, which RunReport writes at each validation: {names}."
    return [without] * bool(names) + [f"{shown(folder)} is left out: {error}" for folder, error in unreadable.items()]


def write_comparison(folder: Path, runs: Sequence[Path], failed: Sequence[str] = ()) -> None:
    """Print the comparison of the runs of a sweep, and write it as a web page and a picture.

    Args:
        folder: folder of the sweep, to which the page and the picture are written.
        runs: folders of the runs, in the order of the sweep. Runs without ``run.json`` are left out, with a message.
        failed: names of the folders of runs that failed. The message omits these runs.
    """
    recorded = [run for run in runs if (run / RECORD).exists()]
    missing = [Path(run.name) for run in runs if run not in recorded]
    if unexplained := [shown(name) for name in missing if name.name not in failed]:
        sys.stderr.write(
            f"runs without {RECORD}, which RunReport writes if there is a logger: {', '.join(unexplained)}\n"
        )
    if not recorded:
        return
    unreadable: dict[Path, str] = {}
    groups = group_runs(read_runs(recorded, unreadable))
    print_table(tabulate(groups), remarks(groups))
    sys.stderr.write("".join(f"{sentence}\n" for sentence in map(harmless, _left_out([], unreadable))))
    write_page(folder / PAGE, f"Comparison of {shown(folder)}", groups, left_out=_left_out(missing, unreadable))
    sys.stderr.write(f"page: {shown(folder / PAGE)}\n")
    if drawn_metrics(groups):
        draw(groups, folder / PICTURE)
        sys.stderr.write(f"curves: {shown(folder / PICTURE)}\n")
    sys.stderr.write(f"as a table: lightning compare {shlex.quote(shown(folder))} --latex\n")
