"""The findings of the doctor: one for each thing that was checked, as a table or as JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "note", "wrong"]

SIGNS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "wrong": "[bold red]wrong[/]"}


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
        part: part of the examination.
        name: name of the thing.
        status: ``"ok"``; ``"note"`` for what training can do without; ``"wrong"`` for what it needs.
        found: a short description of the finding.
        advice: remedy, if the finding is not ok.
        values: the figures behind ``found``, with their units in the names.
    """

    part: str
    name: str
    status: Status
    found: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)


Examination = Callable[[], Iterator[Finding]]


def examine(part: str, examination: Examination) -> Iterator[Finding]:
    """The findings of a part; an error that ends it is one of them, and so is the time it took."""
    start = time.perf_counter()
    try:
        yield from examination()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        yield Finding(part, "examination", "wrong", text[:500], "the examination itself failed: please report it")
    yield Finding(part, "time", "ok", f"{time.perf_counter() - start:.1f} s")


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """All findings, and the worst of them as ``verdict``."""
    return {"verdict": verdict(findings), "findings": [_without_nan(asdict(finding)) for finding in findings]}


def _without_nan(value: Any) -> Any:
    """JSON knows no NaN and no infinity: null instead."""
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def verdict(findings: list[Finding]) -> Status:
    """The worst of all."""
    found = {finding.status for finding in findings}
    return "wrong" if "wrong" in found else "note" if "note" in found else "ok"


def print_table(part: str, findings: list[Finding]) -> None:
    """One part, its lines as they are read: what, how, and what to do."""
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
