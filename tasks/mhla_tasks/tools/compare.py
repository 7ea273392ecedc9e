"""Comparison of training runs by configuration, metrics, time and number of parameters, for ``lightning compare``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_mhla.callbacks.page import duration
from lightning_mhla.callbacks.report import RECORD
from lightning_mhla.system.figures import make_panels
from lightning_mhla.system.redaction import redacted
from lightning_mhla.system.untrusted import read_json, read_yaml
from mhla_tasks.commandline.console import harmless
from mhla_tasks.commandline.moved_keys import move_keys
from mhla_tasks.commandline.sources import Source, mapping

CONFIG = "config.yaml"
PLACES = ("run_dir", "ckpt_path", "trainer.default_root_dir")
"""Configuration keys with the location of a run. They do not count as differences between runs."""


@dataclass(frozen=True)
class Run:
    """Completed or unfinished training run: its folder, recorded results and options.

    Attributes:
        folder: path of the run's folder, which contains ``run.json`` and usually ``config.yaml``.
        record: content of ``run.json``, which the callback :class:`lightning_mhla.callbacks.RunReport` writes.
        options: values of ``config.yaml`` by their dotted keys, such as ``model.attention.kind``; empty if the file is missing.
    """

    folder: Path
    record: dict[str, Any]
    options: dict[str, Any]

    def final(self, metric: str) -> float | None:
        """Return the last recorded value of a metric; None if the run did not record the metric."""
        points = self.record["metrics"].get(metric)
        return points[-1][1] if points else None


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read all training runs in the given folders and their subfolders.

    Args:
        folders: folders of runs, or folders that contain such folders at any depth. A run is read only once, even if several of
            the folders contain it.

    Returns:
        The runs, in the order of the given folders.

    Raises:
        FileNotFoundError: if a folder does not contain any run.
        ValueError: if the ``run.json`` of a run is invalid.
    """
    runs: dict[Path, Run] = {}
    for folder in folders:
        records = sorted(folder.rglob(RECORD), key=lambda path: [_number_or_word(part) for part in path.parts])
        if not records:
            raise FileNotFoundError(
                f"{folder} contains no {RECORD}; it is written by runs with the callback lightning_mhla.callbacks.RunReport"
            )
        for path in records:
            runs.setdefault(path.parent.resolve(), _read(path))
    return list(runs.values())


def _number_or_word(part: str) -> tuple[str, int]:
    word = part.rstrip("0123456789")
    return word, int(part[len(word) :] or -1)


def _read(path: Path) -> Run:
    config = path.parent / CONFIG
    record = read_json(path)
    if not isinstance(record.get("metrics"), dict) or not isinstance(record.get("seconds"), int | float):
        raise ValueError(f"{path} is not a record of a run: it has no metrics or no seconds")
    if not config.exists():
        return Run(path.parent, record, {})
    (source,), _ = move_keys([Source(str(config), mapping(read_yaml(config)))])
    return Run(path.parent, record, flat(redacted(source.values)))


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a nested configuration to one dict with dotted keys, such as ``model.attention.kind``.

    In a list of objects with ``class_path``, such as callbacks, the class name becomes the key of each object.

    Args:
        values: nested mappings, lists and plain values.
        prefix: dotted key that precedes all keys of the result; empty at the top level.
    """
    if isinstance(values, Mapping) and values:
        parts = (flat(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in values.items())
        return {key: value for part in parts for key, value in part.items()}
    if (
        isinstance(values, list)
        and values
        and all(isinstance(value, Mapping) and "class_path" in value for value in values)
    ):
        by_class: dict[str, Any] = {}
        for value in values:
            name = str(value["class_path"]).rpartition(".")[2]
            number = sum(key == name or key.startswith(f"{name}-") for key in by_class)
            by_class[f"{name}-{number + 1}" if number else name] = value.get("init_args")
        return {
            key: value for name, options in by_class.items() for key, value in flat(options, f"{prefix}.{name}").items()
        }
    return {prefix: values}


def differences(runs: Sequence[Run]) -> list[str]:
    """List the configuration keys whose values differ between runs, except options of loggers and paths of run folders.

    Args:
        runs: runs to compare. Runs without a configuration are ignored.

    Returns:
        Dotted keys, such as ``model.attention.kind``.
    """
    configured = [run for run in runs if run.options]
    keys = list(dict.fromkeys(key for run in configured for key in run.options))
    candidates = (key for key in keys if key not in PLACES and not key.startswith("trainer.logger"))
    return [key for key in candidates if len({json.dumps(run.options.get(key), default=str) for run in configured}) > 1]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Shorten dotted configuration keys to the fewest last parts that are unique among them.

    Args:
        keys: dotted keys, such as ``model.optimizer.lr``.

    Returns:
        The short name of each key, such as ``lr`` for ``model.optimizer.lr`` if no other key ends in ``lr``.
    """
    names = {}
    for key in keys:
        parts = key.replace(".init_args", "").split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[-count:])
            if sum(f".{other.replace('.init_args', '')}".endswith(f".{name}") for other in keys) == 1:
                break
        names[key] = name
    return names


def common_metrics(runs: Sequence[Run]) -> list[str]:
    """List the names of the metrics that all runs recorded. Metrics whose final values differ between runs come first.

    The number of validation samples, ``val/samples``, is omitted if it is the same in all runs.
    """
    common = [name for name in runs[0].record["metrics"] if all(name in run.record["metrics"] for run in runs)]
    equal = [name for name in common if len({run.final(name) for run in runs}) == 1]
    return [name for name in common if name not in equal] + [name for name in equal if name != "val/samples"]


def table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return the comparison of runs as a table with one row for each run.

    Returns:
        A list of column names; and for each run, a list with the text of each cell.
    """
    names = short_names(differences(runs))
    metrics = common_metrics(runs)
    best = list(dict.fromkeys(run.record["best"]["metric"] for run in runs if run.record["best"]))
    header = ["run", *names.values(), *metrics]
    header += [f"best {metric}" for metric in best]
    header += ["steps", "time", "parameters"]
    rows = []
    for run, folder in zip(runs, _folders(runs), strict=True):
        cells = [folder, *(_text(run.options.get(key)) for key in names)]
        cells += [_figure(run.final(name)) for name in metrics]
        best_point = run.record["best"]
        cells += [_figure(best_point["value"] if best_point.get("metric") == metric else None) for metric in best]
        steps = f"{run.record['steps']:,}" + ("" if run.record["finished"] else ", unfinished")
        rows.append([*cells, steps, duration(run.record["seconds"]), f"{run.record['parameters']:,}"])
    return header, rows


def _folders(runs: Sequence[Run]) -> list[str]:
    """Return the path of each run's folder, relative to the parent folder that all runs have in common."""
    paths = [str(run.folder) for run in runs]
    common = os.path.commonpath(paths) if len(set(paths)) > 1 else ""
    return [os.path.relpath(path, common) if common else path for path in paths]


def print_table(runs: Sequence[Run]) -> None:
    """Print the comparison of runs as a table, which adapts to the width of the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    header, rows = table(runs)
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    options = 1 + len(short_names(differences(runs)))
    for index, name in enumerate(header):
        shown.add_column(Text(harmless(name)), justify="left" if index < options else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(harmless(cell)) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=1000)
    console.print(shown)


def labels(runs: Sequence[Run]) -> list[str]:
    """Return, for each run, a text that identifies it in a plot.

    The text lists the values of the options that differ between the runs, or is the path of the run's folder if none differ.
    """
    names = short_names(differences(runs))
    return [
        ", ".join(f"{name}={_text(run.options.get(key))}" for key, name in names.items()) or str(run.folder)
        for run in runs
    ]


def draw(runs: Sequence[Run], path: Path) -> None:
    """Plot the metrics that all runs have in common against the optimizer step, with a curve for each run.

    Args:
        runs: runs to plot.
        path: path of the picture file to write.

    Raises:
        ValueError: if the runs have no metric in common.
    """
    metrics = common_metrics(runs)
    if not metrics:
        raise ValueError("the runs have no metric in common, so no picture can be drawn")
    figure, axes = make_panels(len(metrics), 3, (4.6, 3.2), (0, 0.24 * len(runs)))
    for axis, metric in zip(axes, metrics, strict=True):
        for run, label in zip(runs, labels(runs), strict=True):
            axis.plot(*zip(*run.record["metrics"][metric], strict=True), label=label, marker=".", linewidth=1.2)
        axis.set_title(metric, parse_math=False)
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
    legend = figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", fontsize=8)
    for text in legend.get_texts():
        text.set_parse_math(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def as_json(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Convert the comparison of runs to a list that JSON can represent.

    Returns:
        A dict for each run: ``folder``, the path of its folder; ``options``, the values of the configuration keys whose values
        differ between the runs; and all entries of its ``run.json``.
    """
    keys = differences(runs)
    return [
        {"folder": str(run.folder), "options": {key: run.options.get(key) for key in keys}, **run.record}
        for run in runs
    ]


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
