"""The page ``docs/results.md``, from the rows of all studies."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.paper.study import Study
from lightning_mhla.system.files import write_whole

HEAD = """# Results in small

Comparisons of attention on data that ship with Python packages, each trained on two CPU cores with several seeds; figures are
means and standard deviations over the seeds. `python -m benchmarks.paper` trains, scores and writes all of it, and resumes
where it was stopped.
"""


def write_page(studies: Iterable[Study], results: Path, folder: Path) -> Path:
    """Write the page and its pictures; studies without rows are left out."""
    parts = [HEAD]
    folder.mkdir(parents=True, exist_ok=True)
    for study in studies:
        if rows := study.rows(results):
            parts.append(f"## {study.title}\n\n{study.section(rows, folder)}\n\n{study.command()}\n")
    path = folder / "results.md"
    write_whole(path, "\n".join(parts))
    return path
