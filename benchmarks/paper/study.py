"""A study: variants of one configuration, trained with several seeds, and the figures of each."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule, Trainer

from benchmarks.machine import describe
from benchmarks.paper.runs import newest_checkpoint, slug, train
from lightning_mhla.system.files import write_whole

Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """Variants of one configuration.

    Attributes:
        name: name of the study, on the command line and of its file.
        title: title of its section.
        config: config of ``lightning fit``.
        variants: options of ``lightning fit`` by the variant's name.
        measure: figures of a run, from its last checkpoint.
        section: Markdown from the rows, without the title; may write pictures into the folder it is given.
        options: options of ``lightning fit``, for all variants.
        needs: a study whose run a variant starts from, of the same seed or its only one; ``{pretrained}`` in options.
        setting: Markdown that stands before the figures: data, model, what is the same for all.
        reading: Markdown that stands after them: what they say, and what they do not.
        printed: Markdown of the table that the paper printed; empty where it has none.
        full: configurations of the size of that table.
        seeds: the only seeds that there are runs of, of one that variants of any seed start from; None for any.
        after: more of the section, from other results; may write pictures like ``section``.
        beside: whether the rows of ``needs`` stand first in the section.
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

    def rows(self, results: Path) -> list[Row]:
        """The rows in the folder of results, in the order of the variants."""
        file = self._file(results)
        if not file.exists():
            return []
        order = list(self.variants)
        rows = [row for row in json.loads(file.read_text())["rows"] if row["variant"] in order]
        return sorted(rows, key=lambda row: (order.index(row["variant"]), row["seed"]))

    def run(self, variant: str, seed: int, folder: Path, results: Path, more: Sequence[str] = ()) -> None:
        """Train and measure one row, unless it is there.

        Args:
            variant: its name.
            seed: seed of the run.
            folder: for runs.
            results: for rows.
            more: options of ``lightning fit``, the same for all rows of a file.

        Raises:
            SystemExit: when the rows that are there were trained with other options.
        """
        file, rows = self._file(results), self.rows(results)
        if rows and (asked := [*self.options, *more]) != (kept := json.loads(file.read_text())["options"]):
            raise SystemExit(
                f"error: {file} has rows of options {kept}, not {asked}; choose another --results, or delete it"
            )
        if self.has(variant, seed, results):
            return
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
            if self.has(variant, seed, results):
                return
            result: Row = {"study": self.name, "config": self.config, "options": [*self.options, *more]}
            result["variants"] = {key: list(value) for key, value in self.variants.items()}
            result["rows"] = [*self.rows(results), row]
            write_whole(file, json.dumps(result, indent=1) + "\n")

    def has(self, variant: str, seed: int, results: Path) -> bool:
        """Whether a row is there."""
        return any(row["variant"] == variant and row["seed"] == seed for row in self.rows(results))

    def origin(self, seed: int) -> int:
        """Seed of the run of :attr:`needs` that a run of ``seed`` starts from."""
        assert self.needs is not None
        first, _ = self.needs
        return seed if first.seeds is None else first.seeds[0]

    def _file(self, results: Path) -> Path:
        return results / f"{self.name}.json"

    def part(self, rows: list[Row], folder: Path) -> str:
        """Markdown of the whole section; pictures go into ``folder``."""
        parts = [f"## {self.title}", self.setting, self.section(rows, folder), self._command(), self.reading]
        if self.printed:
            runs = ", ".join(f"`lightning fit --config {config}`" for config in self.full)
            parts.append(
                f"**In the paper** (arXiv 2601.07832):\n\n{self.printed}\n\nIn that size, not run here: {runs}."
            )
        if self.after is not None:
            parts.append(self.after(folder))
        return "\n\n".join(part for part in parts if part) + "\n"

    def _command(self) -> str:
        name, options = next(iter(self.variants.items()))
        words = "".join(f" {word}" for word in [*self.options, *options]).replace("{pretrained}", "CHECKPOINT")
        origin = "" if self.needs is None else f"; CHECKPOINT is of `{self.needs[0].name}`"
        return (
            f"`lightning paper --only {self.name}` trains and scores them; a row is `lightning fit --config "
            f"{self.config}{words}` (here {name}) with `--seed_everything`{origin}."
        )


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold other processes back that want the same; the system ends it with the process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def newest(run: Path) -> Path:
    """The last checkpoint of a run."""
    found = newest_checkpoint(run)
    if found is None:
        raise SystemExit(
            f"error: {run} holds no checkpoint; its row is in the results, but its run is gone: train it again"
        )
    return found


def attention(**options: object) -> list[str]:
    """Options of the attention, for ``lightning fit``."""
    words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()}
    return [f"--model.init_args.attention.{name}={value}" for name, value in words.items()]


def remembered(checkpoint: Path) -> Row:
    """Options of the data that a checkpoint was trained on."""
    content = torch.load(checkpoint, weights_only=True, map_location="cpu", mmap=True)
    return {name: value for name, value in content["datamodule_hyper_parameters"].items() if not name.startswith("_")}


def validated(module: LightningModule, data: LightningDataModule) -> dict[str, float]:
    """Metrics of a validation, by name without ``val/``."""
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    (found,) = trainer.validate(module, data, verbose=False)
    return {name.removeprefix("val/"): value for name, value in found.items()}


def spread(values: Sequence[float], digits: int = 1, factor: float = 1.0) -> str:
    """Mean and standard deviation over seeds: ``92.1 ± 0.4``; a single value has no spread."""
    scaled = [value * factor for value in values]
    if not scaled:
        return ""
    text = f"{mean(scaled):.{digits}f}"
    return text if len(scaled) == 1 else f"{text} ± {stdev(scaled):.{digits}f}"


def by_variant(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each variant."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["variant"], []).append(row)
    return found


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; all but the first column to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines))


def conditions(rows: Sequence[Row]) -> str:
    """Machine, versions, dates and seeds of rows, and the processor time that they took."""
    machines = {(row["machine"]["device"], row["machine"]["threads"], row["machine"]["torch"]) for row in rows}
    days = sorted({row["machine"]["date"] for row in rows})
    seeds = sorted({row["seed"] for row in rows})
    where = "; ".join(
        f"{device}, {threads} thread{'s' * (threads > 1)}, torch {version}"
        for device, threads, version in sorted(machines)
    )
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    hours = sum(row["seconds"] for row in rows) / 3600
    return f"Seeds {', '.join(map(str, seeds))}; {len(rows)} runs, {hours:.1f} processor hours; {where}; {when}."
