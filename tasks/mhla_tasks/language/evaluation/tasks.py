"""lm-eval's own tasks on local copies of their data.

A local copy is a folder that holds, under the name that the hub has for it, what the hub holds: for MMLU
``DATA/cais/mmlu/`` and for LongBench ``DATA/Xnhyacinth/LongBench/``, each with the data files and the ``README.md`` whose
``configs:`` block says which file is which subset and split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import datasets
from mhla_kernels.own_files import own_folder

from lightning_mhla.data.tables import default_cache

BUILDERS = ("json", "csv", "parquet", "text", "arrow")
"""Names that ``datasets`` has for kinds of files, not for data sets."""


@contextmanager
def local_data(folder: str | Path | None) -> Iterator[None]:
    """Tasks that are loaded inside take the data sets that ``folder`` holds from there; None changes nothing.

    Raises:
        FileNotFoundError: when there is no such folder, or inside when a task's data is neither there nor to be had.
    """
    if folder is None:
        yield
        return
    root = Path(folder).resolve()
    if not root.is_dir():
        raise FileNotFoundError(
            f"{folder} is no folder; it must hold data sets under their names on the hub (cais/mmlu)"
        )
    original = datasets.load_dataset

    def load(path: str, *args: Any, **options: Any) -> Any:
        here = root / path
        if here.is_dir():
            return original(str(here), *args, **{"cache_dir": str(_cache_of(here)), **options})
        if path in BUILDERS:
            return original(path, *args, **options)
        try:
            return original(path, *args, **options)
        except Exception as error:
            raise FileNotFoundError(
                f"the data set {path} is not at {here}, nor to be had from the hub ({type(error).__name__}); put a copy "
                "there, or leave the task out"
            ) from error

    datasets.load_dataset = load
    try:
        yield
    finally:
        datasets.load_dataset = original


def _cache_of(folder: Path) -> Path:
    """Where the data set of a folder is kept converted; ``datasets`` itself would take an older copy of equal layout."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    state = [str(folder), *((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files)]
    digest = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
    return own_folder(default_cache() / "tasks" / digest, default_cache())


def check_tasks(names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a task that lm-eval does not have.

    Raises:
        ValueError: naming the nearest ones.
    """
    for name in names:
        if name not in known and not Path(name).is_file():
            close = get_close_matches(name, known, 3)
            hint = f"did you mean {', '.join(close)}?" if close else "lm_eval ls tasks lists them"
            raise ValueError(f"lm-eval has no task {name!r}; {hint}")
