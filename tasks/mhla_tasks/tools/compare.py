"""Runs side by side: what their configurations differ in, metrics, time and parameters."""

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
"""Keys of a configuration that say where a run is, not what it is."""


@dataclass(frozen=True)
class Run:
    """A run that was trained.

    Attributes:
        folder: with ``run.json`` and ``config.yaml``.
        record: written by :class:`lightning_mhla.callbacks.RunReport`.
        options: values of the configuration by their whole keys.
    """

    folder: Path
    record: dict[str, Any]
    options: dict[str, Any]

    def final(self, metric: str) -> float | None:
        """Last value of a metric."""
        points = self.record["metrics"].get(metric)
        return points[-1][1] if points else None


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """All runs in some folders.

    Raises:
        FileNotFoundError: for a folder without runs.
        ValueError: for a record that cannot be read.
    """
    found: dict[Path, Run] = {}
    for folder in folders:
        records = sorted(folder.rglob(RECORD), key=lambda path: [_number_or_word(part) for part in path.parts])
        if not records:
            raise FileNotFoundError(
                f"{folder} holds no {RECORD}; runs write it whose callbacks name lightning_mhla.callbacks.RunReport"
            )
        for path in records:
            found.setdefault(path.parent.resolve(), _read(path))
    return list(found.values())


def _number_or_word(part: str) -> tuple[str, int]:
    word = part.rstrip("0123456789")
    return word, int(part[len(word) :] or -1)


def _read(path: Path) -> Run:
    config = path.parent / CONFIG
    record = read_json(path)
    if not isinstance(record.get("metrics"), dict) or not isinstance(record.get("seconds"), int | float):
        raise ValueError(f"{path} is no record of a run: it names no metrics or no seconds")
    if not config.exists():
        return Run(path.parent, record, {})
    (source,), _ = move_keys([Source(str(config), mapping(read_yaml(config)))])
    return Run(path.parent, record, flat(redacted(source.values)))


def flat(values: Any, before: str = "") -> dict[str, Any]:
    """Nested mappings as one, with keys joined by dots; lists of classes by the names of these."""
    if isinstance(values, Mapping) and values:
        parts = (flat(value, f"{before}.{key}" if before else str(key)) for key, value in values.items())
        return {key: value for part in parts for key, value in part.items()}
    if (
        isinstance(values, list)
        and values
        and all(isinstance(value, Mapping) and "class_path" in value for value in values)
    ):
        found: dict[str, Any] = {}
        for value in values:
            name = str(value["class_path"]).rpartition(".")[2]
            number = sum(key == name or key.startswith(f"{name}-") for key in found)
            found[f"{name}-{number + 1}" if number else name] = value.get("init_args")
        return {
            key: value for name, options in found.items() for key, value in flat(options, f"{before}.{name}").items()
        }
    return {before: values}


def differences(runs: Sequence[Run]) -> list[str]:
    """Keys that some runs have other values for, places left out."""
    known = [run for run in runs if run.options]
    keys = list(dict.fromkeys(key for run in known for key in run.options))
    wanted = (key for key in keys if key not in PLACES and not key.startswith("trainer.logger"))
    return [key for key in wanted if len({json.dumps(run.options.get(key), default=str) for run in known}) > 1]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last parts of keys, as many as tell them apart."""
    found = {}
    for key in keys:
        parts = key.replace(".init_args", "").split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[-count:])
            if sum(f".{other.replace('.init_args', '')}".endswith(f".{name}") for other in keys) == 1:
                break
        found[key] = name
    return found


def common_metrics(runs: Sequence[Run]) -> list[str]:
    """Metrics that every run has, those that differ first; without the count of samples where it is the same."""
    first = [name for name in runs[0].record["metrics"] if all(name in run.record["metrics"] for run in runs)]
    still = [name for name in first if len({run.final(name) for run in runs}) == 1]
    return [name for name in first if name not in still] + [name for name in still if name != "val/samples"]


def table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Header and a row for each run, as text."""
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
        chosen = run.record["best"]
        cells += [_figure(chosen["value"] if chosen.get("metric") == metric else None) for metric in best]
        steps = f"{run.record['steps']:,}" + ("" if run.record["finished"] else ", unfinished")
        rows.append([*cells, steps, duration(run.record["seconds"]), f"{run.record['parameters']:,}"])
    return header, rows


def _folders(runs: Sequence[Run]) -> list[str]:
    """The folder of each run, without what all have in common."""
    paths = [str(run.folder) for run in runs]
    common = os.path.commonpath(paths) if len(set(paths)) > 1 else ""
    return [os.path.relpath(path, common) if common else path for path in paths]


def print_table(runs: Sequence[Run]) -> None:
    """Print the table, as wide as it needs to be."""
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
    """A name for each run, of what it differs in."""
    names = short_names(differences(runs))
    return [
        ", ".join(f"{name}={_text(run.options.get(key))}" for key, name in names.items()) or str(run.folder)
        for run in runs
    ]


def draw(runs: Sequence[Run], path: Path) -> None:
    """Every common metric by step, a curve for each run.

    Raises:
        ValueError: when there is none.
    """
    metrics = common_metrics(runs)
    if not metrics:
        raise ValueError("the runs have no metric in common, so there is no picture of them")
    figure, axes = make_panels(len(metrics), 3, (4.6, 3.2), (0, 0.24 * len(runs)))
    for axis, metric in zip(axes, metrics, strict=True):
        for run, label in zip(runs, labels(runs), strict=True):
            axis.plot(*zip(*run.record["metrics"][metric], strict=True), label=label, marker=".", linewidth=1.2)
        axis.set_title(metric, parse_math=False)
        axis.set_xlabel("optimiser step")
        axis.grid(alpha=0.3)
    legend = figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", fontsize=8)
    for text in legend.get_texts():
        text.set_parse_math(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def as_json(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The table as numbers, and the curves."""
    keys = differences(runs)
    return [
        {"folder": str(run.folder), "options": {key: run.options.get(key) for key in keys}, **run.record}
        for run in runs
    ]


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
