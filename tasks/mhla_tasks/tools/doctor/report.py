"""Findings of the checks of ``lightning doctor``, and their output as a table or as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lightning_mhla.system.numbers import rounded

Status = Literal["ok", "note", "wrong"]

SIGNS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "wrong": "[bold red]wrong[/]"}


@dataclass(frozen=True)
class Finding:
    """Result of one check of ``lightning doctor``.

    Attributes:
        part: name of the group of checks that this check belongs to, such as ``versions`` or ``devices``.
        name: name of the checked item, such as ``python`` or ``GPU 0``.
        status: ``"ok"``; ``"note"`` for a problem that does not prevent training; ``"wrong"`` for a problem that prevents it.
        found: short description of the result.
        advice: suggested remedy; empty if there is none.
        values: measured values, with units in their names.
    """

    part: str
    name: str
    status: Status
    found: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)


Examination = Callable[[], Iterator[Finding]]


def examine(part: str, examination: Examination) -> Iterator[Finding]:
    """Run a group of checks, and yield its findings.

    If an exception ends the checks, a finding with the error follows. The last finding states the duration in seconds.

    Args:
        part: name of the group.
        examination: function that runs the checks and yields their findings.
    """
    start = time.perf_counter()
    try:
        yield from examination()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        yield Finding(part, "examination", "wrong", text[:500], "the examination itself failed: please report it")
    yield Finding(part, "time", "ok", f"{rounded(time.perf_counter() - start)} s")


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """Convert findings to a dict for :func:`~lightning_mhla.system.files.to_json`.

    Returns:
        A dict with ``verdict``, the worst status among the findings, and ``findings``, a list with a dict for each finding.
    """
    return {"verdict": verdict(findings), "findings": [asdict(finding) for finding in findings]}


def verdict(findings: list[Finding]) -> Status:
    """Return the worst status among findings: ``wrong``, ``note`` or, if there are no problems, ``ok``."""
    statuses = {finding.status for finding in findings}
    return "wrong" if "wrong" in statuses else "note" if "note" in statuses else "ok"


def print_table(part: str, findings: list[Finding]) -> None:
    """Print the findings of one group of checks as a table with name, status, result and advice.

    Args:
        part: name of the group, which is the title of the table.
        findings: findings of the group.
    """
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=False, title=part, title_justify="left", pad_edge=False)
    for column in ("name", "status", "found"):
        table.add_column(column, no_wrap=column == "status", overflow="fold")
    for finding in findings:
        text = escape(finding.found) + (f"\n[bold]{escape(finding.advice)}[/]" if finding.advice else "")
        table.add_row(escape(finding.name), SIGNS[finding.status], text)
    Console(highlight=False).print(table)
