"""Loading of lm-eval's tasks from local copies of their data sets.

A local copy is a folder with the same contents and the same name as the data set on the hub: ``DATA/cais/mmlu/`` for MMLU and
``DATA/Xnhyacinth/LongBench/`` for LongBench. It holds the data files and the ``README.md`` whose ``configs:`` block assigns the
files to subsets and splits.
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
"""Names of file formats, which ``datasets`` accepts in place of a data set's name."""


@contextmanager
def local_data(folder: str | Path | None) -> Iterator[None]:
    """Context manager that lets lm-eval's tasks load their data sets from a folder of local copies.

    Data sets without a copy in the folder are loaded from the Hugging Face Hub.

    Args:
        folder: folder with local copies of data sets, under their names on the Hub; None changes nothing.

    Raises:
        FileNotFoundError: if the folder does not exist, or if a task inside the context needs data that is neither in the
            folder nor available from the Hub.
    """
    if folder is None:
        yield
        return
    root = Path(folder).resolve()
    if not root.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder; it must hold data sets under their names on the hub (cais/mmlu)"
        )
    original = datasets.load_dataset  # lm-eval's tasks load their data through this function

    def load(path: str, *args: Any, **options: Any) -> Any:
        local_copy = root / path
        if local_copy.is_dir():
            return original(str(local_copy), *args, **{"cache_dir": str(_cache_of(local_copy)), **options})
        # A task that names a file format brings its own files, so a failure is not about a missing copy.
        if path in BUILDERS:
            return original(path, *args, **options)
        try:
            return original(path, *args, **options)
        except Exception as error:
            raise FileNotFoundError(
                f"the data set {path} is neither at {local_copy} nor available from the hub ({type(error).__name__}); put "
                "a copy there, or leave the task out"
            ) from error

    datasets.load_dataset = load
    try:
        yield
    finally:
        datasets.load_dataset = original


def _cache_of(folder: Path) -> Path:
    """Return the folder in which the library ``datasets`` caches its converted copy of a local data set.

    The name of the folder depends on the sizes and modification times of the files, because ``datasets`` would otherwise
    reuse an outdated conversion.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    state = [str(folder), *((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files)]
    digest = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
    return own_folder(default_cache() / "tasks" / digest, default_cache())


def check_tasks(names: Sequence[str], available: Sequence[str]) -> None:
    """Check that all requested tasks of lm-evaluation-harness exist.

    Args:
        names: names of the requested tasks, or paths of task files.
        available: names of all tasks that the harness has.

    Raises:
        ValueError: if a task is unknown; the message suggests similar names.
    """
    for name in names:
        if name not in available and not Path(name).is_file():
            close = get_close_matches(name, available, 3)
            hint = f"did you mean {', '.join(close)}?" if close else "lm_eval ls tasks lists them"
            raise ValueError(f"lm-eval has no task {name!r}; {hint}")
