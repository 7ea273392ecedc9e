"""Reader of run folders: the results of each run, its options, and the options that differ between runs."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_mhla.callbacks.points import LARGEST
from lightning_mhla.callbacks.report import RECORD
from lightning_mhla.checkpoints.runs import CONFIG, is_run
from lightning_mhla.system.listing import files_named, shown
from lightning_mhla.system.redaction import redacted
from lightning_mhla.system.untrusted import read_json, read_yaml
from mhla_tasks.commandline.moved_keys import move_keys
from mhla_tasks.commandline.sources import Source
from mhla_tasks.tools.comparison.options import PLACES, flat, plain

STARTED = "sweep.json"
"""Name of the file in a run's folder in which a sweep stores the arguments of the run and hashes of its configurations."""

ORDER = "runs.json"
"""Name of the file in the folder of a sweep that lists the folders of its runs in the order of the sweep."""

NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", re.IGNORECASE)
"""Number in the name of a folder, such as 0.001 or 1e-05."""


@dataclass(frozen=True)
class Run:
    """Completed or unfinished training run: its folder, recorded results and options.

    Attributes:
        folder: path of the run's folder, which contains ``run.json`` and usually ``config.yaml``.
        record: content of ``run.json``, such as metrics, steps and seconds. The callback
            :class:`lightning_mhla.callbacks.RunReport` writes this file.
        options: values of ``config.yaml`` by their dotted keys, such as ``model.attention.kind``; empty if the file is missing.
    """

    folder: Path
    record: dict[str, Any]
    options: dict[str, Any]

    def points(self, metric: str) -> list[tuple[int, float | None]]:
        """Return the recorded points of a metric, each an optimizer step and a value.

        A value that is not finite is None. The list is empty if the run did not record the metric.
        """
        return [(step, value) for step, value in self.record["metrics"].get(metric, ())]

    def final(self, metric: str) -> float | None:
        """Return the last recorded value of a metric; None if it is not finite, or if the run did not record the metric."""
        points = self.points(metric)
        return points[-1][1] if points else None


def read_runs(folders: Sequence[Path], unreadable: dict[Path, str] | None = None) -> list[Run]:
    """Read all training runs in the given folders and their subfolders.

    Args:
        folders: folders of runs, or folders that contain such folders at any depth. A run is read only once, even if several of
            the folders contain it.
        unreadable: dict to which the folder and the error message of each run whose ``run.json`` or ``config.yaml`` is invalid
            are added. If it is None, or if no run is valid, such a run is an error.

    Returns:
        The runs, in the order of the given folders. Runs of a sweep have the order of the sweep; other runs in a folder are
        sorted by name.

    Raises:
        FileNotFoundError: if a folder does not exist, or if none of the folders contains a run with a ``run.json``.
        ValueError: if the ``run.json`` or ``config.yaml`` of a run is invalid.
    """
    runs: dict[Path, Run] = {}
    errors: list[Exception] = []
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder; give the folder of a run, or of several runs")
        records = files_named(folder, RECORD)
        orders = {parent: _sweep_order(parent) for parent in dict.fromkeys(path.parent.parent for path in records)}
        places = {
            parent / name: place for parent, names in orders.items() for place, name in enumerate(dict.fromkeys(names))
        }
        records.sort(
            key=lambda path: (
                [_words_and_numbers(part) for part in path.parent.parent.parts],
                places.get(path.parent, len(places)),
                _words_and_numbers(path.parent.name),
            )
        )
        for path in records:
            try:
                runs.setdefault(path.parent.resolve(), _read(path))
            except (ValueError, OSError) as error:
                if unreadable is None:
                    raise
                errors.append(error)
                unreadable[path.parent] = str(error)
    if not runs and errors:
        raise errors[0]
    if not runs:
        raise FileNotFoundError(
            f"{', '.join(map(str, folders))} contains no {RECORD}; it is written by runs with the callback "
            "lightning_mhla.callbacks.RunReport after each validation"
        )
    return list(runs.values())


def _sweep_order(folder: Path) -> list[str]:
    """Return the names of the runs that a sweep listed in its folder; empty if the folder is not that of a sweep.

    Raises:
        ValueError: if the file that stores the order does not list runs.
    """
    if not (folder / ORDER).is_file():
        return []
    names = read_json(folder / ORDER).get("runs")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{folder / ORDER} does not list runs of a sweep; remove it to sort the runs by name")
    return names


def write_order(folder: Path, names: Sequence[str]) -> str:
    """Compose the content of the file in which a sweep stores the order of its runs. The caller writes the file.

    Args:
        folder: folder of the sweep. Runs of an earlier sweep in this folder are listed after those of the current one.
        names: names of the folders of the runs, in the order of the sweep.

    Raises:
        ValueError: if the folder has such a file, but it does not list runs.
    """
    return json.dumps({"runs": list(dict.fromkeys([*names, *_sweep_order(folder)]))}, indent=1) + "\n"


def unrecorded(folders: Sequence[Path]) -> list[Path]:
    """List the folders of runs that cannot be compared, because they have no ``run.json``.

    A folder counts as a run if it contains the configuration of a run, or if a sweep started a run in it. A folder in
    ``folders`` that contains no run at all is also listed.

    Args:
        folders: folders of runs, or folders that contain such folders at any depth.
    """
    without_record: list[Path] = []
    for folder in folders:
        started = [path.parent for path in files_named(folder, STARTED)]
        configured = [path.parent for path in files_named(folder, CONFIG) if is_run(path.parent)]
        runs = [run for run in (*configured, *started) if not (run / RECORD).exists()]
        without_record += runs or ([] if files_named(folder, RECORD) else [folder])
    return list(dict.fromkeys(without_record))


def _words_and_numbers(part: str) -> list[tuple[str, float]]:
    """Split a name into words and numbers, as a key that sorts version_9 before version_10 and lr=1e-05 before lr=0.001."""
    words = NUMBER.split(part)
    return list(zip(words[::2], [*map(float, words[1::2]), -1.0], strict=True))


def _read(path: Path) -> Run:
    config = path.parent / CONFIG
    try:
        record = _checked(read_json(path))
    except (KeyError, TypeError, AttributeError, OverflowError, _BrokenRecordError) as error:
        reason = str(error) if isinstance(error, _BrokenRecordError) else "an entry is missing or has a wrong type"
        raise ValueError(f"{path} is not a record of a run: {reason}") from error
    if not config.exists():
        return Run(path.parent, record, {})
    values = read_yaml(config)
    if not isinstance(values, dict | None):
        raise ValueError(f"{config} has no options; remove it to compare the run without them")
    (source,), _ = move_keys([Source(str(config), values or {})])
    return Run(path.parent, record, flat(redacted(source.values)) if source.values else {})


class _BrokenRecordError(Exception):
    """Error for an entry of a ``run.json`` that is missing or has a wrong type; the message names the entry."""


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    """Check the entries of a ``run.json`` that comparisons use, and replace numbers that are not finite by None.

    Runs may come from other people, so the types of all these entries are checked.

    Raises:
        _BrokenRecordError: if an entry is missing or has a wrong type.
        KeyError: if the best metric has no name.
    """
    if not isinstance(record.get("metrics"), dict) or not _is_count(record.get("seconds")):
        raise _BrokenRecordError("it has no metrics or no seconds")
    for name in ("steps", "parameters"):
        if not _is_count(record.get(name)) or record[name] != int(record[name]):
            raise _BrokenRecordError(f"{name} is not a whole number")
    if not isinstance(record.get("finished"), bool):
        raise _BrokenRecordError("finished is neither true nor false")
    metrics = {}
    for metric, points in record["metrics"].items():
        if not isinstance(points, list) or not all(map(_is_point, points)):
            raise _BrokenRecordError(f"the points of {shown(metric)} are not steps with values")
        metrics[metric] = [[int(step), _finite(value)] for step, value in sorted(points, key=lambda point: point[0])]
    if best := record.get("best") or {}:
        if not isinstance(best["metric"], str):
            raise _BrokenRecordError("the metric of best is not a name")
        if not isinstance(best.get("mode"), str | None):
            raise _BrokenRecordError("the mode of best is not a name")
        best = {**best, "value": _finite(best.get("value"))}
    versions = record.get("versions") if isinstance(record.get("versions"), dict) else {}
    return {**record, "metrics": metrics, "best": best, "versions": versions}


def _is_point(point: Any) -> bool:
    if not isinstance(point, list) or len(point) != 2 or not _is_number(point[0]):
        return False
    return point[1] is None or (isinstance(point[1], int | float) and not isinstance(point[1], bool))


def _is_count(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1e15  # no run has as many steps, parameters or seconds


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _finite(value: float | None) -> float | None:
    """Return a value as a float; None if it is not finite, or so large that a mean could overflow."""
    return float(value) if value is not None and abs(value) < LARGEST else None


def differences(runs: Sequence[Run]) -> list[str]:
    """List the configuration keys whose values differ between runs, except options of loggers and paths to which runs write.

    Args:
        runs: runs to compare. Runs without a configuration are ignored.

    Returns:
        Dotted keys, such as ``model.attention.kind``.
    """
    configured = [run for run in runs if run.options]
    return [key for key in compared_keys(runs) if len({plain(run.options.get(key)) for run in configured}) > 1]


def compared_keys(runs: Sequence[Run]) -> list[str]:
    """List all configuration keys of runs, except options of loggers and paths to which runs write."""
    keys = dict.fromkeys(key for run in runs for key in run.options)
    return [key for key in keys if not PLACES.fullmatch(key)]


def folder_names(runs: Sequence[Run]) -> list[str]:
    """Return the path of each run's folder, relative to the deepest folder that contains all runs.

    Last folders that all paths share, such as ``version_0``, are left out. The path of a single run is returned unchanged.
    """
    paths = [str(run.folder) for run in runs]
    if len(set(paths)) == 1:
        return paths
    common = os.path.commonpath([os.path.abspath(path) for path in paths])
    parts = [Path(os.path.relpath(path, common)).parts for path in paths]
    while min(map(len, parts)) > 1 and len({names[-1] for names in parts}) == 1:
        parts = [names[:-1] for names in parts]
    return [str(Path(*names)) for names in parts]


def as_json(runs: Sequence[Run], metrics: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Convert the comparison of runs to a list that JSON can represent.

    Args:
        runs: runs to convert.
        metrics: metrics to keep, in this order; None for all.

    Returns:
        A dict for each run: ``folder``, the path of its folder; ``options``, the values of the configuration keys whose values
        differ between the runs; and all entries of its ``run.json``.
    """
    keys = differences(runs)
    entries = []
    for run in runs:
        of_run = run.record["metrics"]
        chosen = of_run if metrics is None else {name: of_run[name] for name in metrics if name in of_run}
        options = {key: run.options.get(key) for key in keys}
        entries.append({"folder": str(run.folder), "options": options, **run.record, "metrics": chosen})
    return entries
