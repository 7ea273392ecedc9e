"""Writing of the page ``docs/results.md`` from the results of all studies."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from benchmarks.paper.full_runs import ASSUMED
from benchmarks.paper.study import Row, Study
from lightning_mhla.system.files import write_whole

HEAD = """# Small-scale results

This page compares kinds of attention on data that ship with packages of Python and Debian, trained on CPU cores. Each model
is scored after its last step. Figures are means and standard deviations over the seeds named below each table; a figure of one
seed has no deviation. `lightning paper` trains and scores all models, writes this page, and resumes after a stop.
"""


SEEDS = 3
"""Number of runs of each variant, with different seeds, unless a study names its seeds."""


def write_page(studies: Collection[Study], results: Path, folder: Path) -> Path:
    """Write the results page and its pictures. Studies without results are omitted.

    Args:
        studies: studies in the order of the page.
        results: folder of the results.
        folder: folder to write the page to.

    Returns:
        Path of the page.
    """
    parts = [HEAD]
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    done = sum(len(study.rows(results)) for study in studies)
    expected = sum(len(study.variants) * (SEEDS if study.seeds is None else len(study.seeds)) for study in studies)
    hours = sum(row["seconds"] for row in _distinct_rows(studies, results)) / 3600
    whole = (
        f", so `lightning paper --jobs 2` trains about {hours / 2:.0f} hours on two cores" if done >= expected else ""
    )
    parts.append(f"Training of all rows below took {hours:.1f} hours on one core{whole}.\n\n{ASSUMED}\n")
    if done < expected:
        missing = ", ".join(f"`{study.name}`" for study in studies if not study.rows(results))
        parts.append(f"**{done} of {expected} runs are done so far{f', none of {missing}' if missing else ''}.**\n")
    for study in studies:
        if rows := study.rows(results):
            origins = study.needs[0].rows(results) if study.beside and study.needs is not None else []
            parts.append(study.part([*origins, *rows], folder))
    path = folder / "results.md"
    write_whole(path, "\n".join(parts))
    return path


def _distinct_rows(studies: Collection[Study], results: Path) -> list[Row]:
    """Return the rows of all studies. A row that two studies share, with other names of its variant, is returned once."""
    rows = {
        json.dumps({key: value for key, value in row.items() if key != "variant"}): row
        for study in studies
        for row in study.rows(results)
    }
    return list(rows.values())
