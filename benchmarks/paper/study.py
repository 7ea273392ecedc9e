"""Studies: variants of one configuration, trained with several seeds, and the results of each run."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule, Trainer

from benchmarks.machine import describe
from benchmarks.paper import full_runs
from benchmarks.paper.runs import newest_checkpoint, slug, train
from lightning_mhla.system.files import write_json

Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """Variants of one configuration, to be trained with several seeds and compared.

    Attributes:
        name: name of the study on the command line, and of its file.
        title: title of the section.
        config: path of the configuration for ``lightning fit``.
        variants: options of ``lightning fit`` by the name of the variant.
        measure: function that computes the results of a run, a row, from its last checkpoint.
        section: function that returns the section, without its title, as Markdown from rows, and writes pictures into the
            folder of the page.
        options: options of ``lightning fit`` for all variants.
        needs: study and variant whose runs supply the initial weights, which options name as ``{pretrained}``. A run starts
            from the run with the same seed, or from the only one. None for random weights.
        setting: Markdown before the results: data, model, and options that all variants share.
        reading: Markdown after the results: their interpretation and its limits.
        printed: Markdown of the corresponding table of the paper; empty if there is none.
        full: paths of configurations for models of the sizes in ``printed``.
        seeds: only seeds to train, for a study whose single run supplies the initial weights of all runs of another study; None
            for any seed.
        after: function that returns a final part of the section as Markdown from results of other programs, and writes
            pictures into the folder of the page; None for no such part.
        beside: whether the section begins with the rows of ``needs``.
        prepare: function that makes the data of the study unless they exist, called before each run by one process at a time;
            None for data that need no preparation.
    """

    name: str
    title: str
    config: str
    variants: Mapping[str, Sequence[str]]
    measure: Callable[[Path], Row]
    section: Callable[[list[Row], Path], str]
    options: Sequence[str] = field(default_factory=tuple)
    needs: tuple[Study, str] | None = None
    setting: str = ""
    reading: str = ""
    printed: str = ""
    full: Sequence[str] = field(default_factory=tuple)
    seeds: Sequence[int] | None = None
    after: Callable[[Path], str] | None = None
    beside: bool = False
    prepare: Callable[[], object] | None = None

    def rows(self, results: Path) -> list[Row]:
        """Read the results of all runs of the study, in the order of the variants.

        Args:
            results: folder of the results.
        """
        file = self._file(results)
        if not file.exists():
            return []
        order = list(self.variants)
        rows = [row for row in json.loads(file.read_text())["rows"] if row["variant"] in order]
        return sorted(rows, key=lambda row: (order.index(row["variant"]), row["seed"]))

    def run(self, variant: str, seed: int, folder: Path, results: Path, more: Sequence[str] = ()) -> None:
        """Train and measure one run of the study, unless its result exists.

        Args:
            variant: name of the variant.
            seed: seed of the run.
            folder: folder of the runs.
            results: folder of the results.
            more: additional options of ``lightning fit``, the same for all runs of the study.

        Raises:
            SystemExit: if existing results were obtained with different options.
        """
        file, rows = self._file(results), self.rows(results)
        if rows and (shared_options := [*self.options, *more]) != (
            earlier_options := json.loads(file.read_text())["options"]
        ):
            raise SystemExit(
                f"error: {file} has rows of options {earlier_options}, not {shared_options}; "
                f"choose another --results, or delete it"
            )
        if self.has(variant, seed, results):
            return
        if self.prepare is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with alone_in(folder):
                self.prepare()
        name = f"{self.name}-{slug(variant)}-seed{seed}"
        options = [*self.options, *self.variants[variant], *more, f"--seed_everything={seed}"]
        if self.needs is not None:
            first, start = self.needs
            origin = self.origin(seed)
            first.run(start, origin, folder, results, more)
            path = newest(folder / f"{first.name}-{slug(start)}-seed{origin}")
            options = [option.replace("{pretrained}", str(path)) for option in options]
        checkpoint, seconds = train(self.config, name, folder, options)
        row = {"variant": variant, "seed": seed, **self.measure(checkpoint), "seconds": round(seconds)}
        row["machine"] = describe(torch.device("cpu"))
        results.mkdir(parents=True, exist_ok=True)
        with alone_in(results):
            if self.has(variant, seed, results):  # a second process may have added it in the meantime
                return
            result: Row = {"study": self.name, "config": self.config, "options": [*self.options, *more]}
            result["variants"] = {key: list(value) for key, value in self.variants.items()}
            result["rows"] = [*self.rows(results), row]
            write_json(file, result, indent=1)

    def has(self, variant: str, seed: int, results: Path) -> bool:
        """Return whether the result of a run exists.

        Args:
            variant: name of the variant.
            seed: seed of the run.
            results: folder of the results.
        """
        return any(row["variant"] == variant and row["seed"] == seed for row in self.rows(results))

    def origin(self, seed: int) -> int:
        """Return the seed of the earlier run from whose weights the run with ``seed`` starts."""
        assert self.needs is not None
        first, _ = self.needs
        return seed if first.seeds is None else first.seeds[0]

    def _file(self, results: Path) -> Path:
        return results / f"{self.name}.json"

    def part(self, rows: list[Row], folder: Path) -> str:
        """Return the study's complete section as Markdown, and write its pictures.

        Args:
            rows: results of the runs.
            folder: folder of the results page and its pictures.
        """
        parts = [f"## {self.title}", self.setting, self.section(rows, folder), self._command(), self.reading]
        if self.printed:
            parts.append(
                f"**In the paper** (arXiv 2601.07832):\n\n{self.printed}\n\nThese commands train models of that size. They "
                f"were not run here.\n\n{full_runs.table(full_runs.read_counts(self.full))}"
            )
        if self.after is not None:
            parts.append(self.after(folder))
        return "\n\n".join(part for part in parts if part) + "\n"

    def _command(self) -> str:
        name, options = next(iter(self.variants.items()))
        words = [
            word.replace("{pretrained}", "CHECKPOINT") for word in ["--config", self.config, *self.options, *options]
        ]
        origin = "" if self.needs is None else f"; CHECKPOINT is a checkpoint of `{self.needs[0].name}`"
        return (
            f"`lightning paper --only {self.name}` trains and scores these rows. One row (here {name}) is `lightning fit "
            f"{shlex.join(words)}` with `--seed_everything`{origin}."
        )


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Context manager that holds an exclusive lock on a folder. The operating system releases the lock if the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def newest(run: Path) -> Path:
    """Return the path of the last checkpoint of a run.

    Raises:
        SystemExit: if the run has no checkpoint.
    """
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        raise SystemExit(
            f"error: {run} holds no checkpoint; its row is in the results, but its run is gone: train it again"
        )
    return checkpoint


def attention(**options: object) -> list[str]:
    """Return options of the model's attention as arguments of ``lightning fit``."""
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()}
    return [f"--model.init_args.attention.{name}={value}" for name, value in values.items()]


def remembered(checkpoint: Path) -> Row:
    """Read the options of a run's data module, by name, from a checkpoint of the run."""
    content = torch.load(checkpoint, weights_only=True, map_location="cpu", mmap=True)
    return {name: value for name, value in content["datamodule_hyper_parameters"].items() if not name.startswith("_")}


def validated(module: LightningModule, data: LightningDataModule) -> dict[str, float]:
    """Validate a module on a CPU.

    Args:
        module: module to validate.
        data: data module with the validation data.

    Returns:
        Metrics by name, without the prefix ``val/``.
    """
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    (metrics,) = trainer.validate(module, data, verbose=False)
    return {name.removeprefix("val/"): value for name, value in metrics.items()}


def spread(values: Sequence[float], digits: int = 1, factor: float = 1.0) -> str:
    """Format the mean and the standard deviation of values as ``92.1 ± 0.4``. A single value has no standard deviation.

    Args:
        values: values to average.
        digits: number of digits after the decimal point.
        factor: factor by which the values are multiplied, such as 100 for percentages.

    Returns:
        The text; an empty string if there are no values.
    """
    scaled = [value * factor for value in values]
    if not scaled:
        return ""
    text = f"{mean(scaled):.{digits}f}"
    return text if len(scaled) == 1 else f"{text} ± {stdev(scaled):.{digits}f}"


def by_variant(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group the results of runs by variant."""
    rows_by_variant: dict[str, list[Row]] = {}
    for row in rows:
        rows_by_variant.setdefault(row["variant"], []).append(row)
    return rows_by_variant


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table. All columns except the first are aligned to the right.

    Args:
        header: titles of the columns.
        lines: cells of each line.
    """
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines))


def conditions(rows: Sequence[Row]) -> str:
    """Describe under which conditions runs were trained, in one sentence: seeds, time, machines, versions and dates."""
    machines = {(row["machine"]["device"], row["machine"]["threads"], row["machine"]["torch"]) for row in rows}
    days = sorted({row["machine"]["date"] for row in rows})
    seeds = sorted({row["seed"] for row in rows})
    where = "; ".join(
        f"{device}, {threads} thread{'s' * (threads > 1)}, torch {version}"
        for device, threads, version in sorted(machines)
    )
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    hours = sum(row["seconds"] for row in rows) / 3600
    runs = f"{len(rows)} run{'s' * (len(rows) > 1)}"
    return f"Seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}; {runs}, {hours:.1f} processor hours; {where}; {when}."
