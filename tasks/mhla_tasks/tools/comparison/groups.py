"""Groups of runs that differ only in their seed, and the mean and standard deviation of their metrics.

A group averages only runs that are comparable: they have the same options except the seed, trained the same number of steps,
have the same number of parameters, and finished. Any other run, such as one without a configuration, is a group of its own. If
several runs of a group have the same seed, only one of them stays, and the others form further groups. A mean therefore never
mixes runs that were trained differently, and never counts a seed twice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from lightning_mhla.checkpoints.runs import CONFIG
from lightning_mhla.system.numbers import plural
from mhla_tasks.tools.comparison.options import SEED, option_text, plain, short_names
from mhla_tasks.tools.comparison.runs import Run, compared_keys, differences, folder_names

LOWER = {"loss", "perplexity", "bits", "error", "distance", "fid", "sfid", "kid", "mse", "mae", "rmse", "kl", "nll"}
HIGHER = {
    "accuracy",
    "precision",
    "recall",
    "cosine",
    "similarity",
    "inception",
    "f1",
    "auc",
    "psnr",
    "ssim",
    "agreement",
}
"""Words in the names of metrics for which lower (``LOWER``) or higher (``HIGHER``) values are better."""

UNKNOWN = "?"
"""Seed of a run whose configuration does not have one."""

COUNTED = "val/samples"
"""Name under which the number of validation samples is recorded among the metrics."""


@dataclass(frozen=True)
class Summary:
    """Mean and standard deviation of a metric over the runs of a group.

    Attributes:
        mean: mean over the runs; None if it is not defined, because the value of a run is missing or not finite.
        spread: sample standard deviation; None for a single run, or if the mean is not defined.
        problem: reason why the mean is not defined, such as ``not finite in 1 of 3``; empty if no run recorded the metric.
    """

    mean: float | None
    spread: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Group:
    """Runs that form one row of a comparison.

    Attributes:
        runs: runs that differ only in their seed.
        name: name of the run's folder, or the common parts of the folder names with ``*`` where they differ.
        label: values of the options that differ between groups, such as ``kind=mhla, lr=0.001``, or the name if none differs.
        notes: remarks that a reader needs to interpret the numbers of this group, such as ``not finished``.
    """

    runs: tuple[Run, ...]
    name: str
    label: str
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Run:
        """First run of the group, which represents it where one run has to be shown."""
        return self.runs[0]

    @property
    def seeds(self) -> list[str]:
        """Seeds of the runs as strings; ``UNKNOWN`` for a run whose configuration does not have one."""
        return [option_text(run.options.get(SEED)) or UNKNOWN for run in self.runs]

    def final(self, metric: str) -> Summary:
        """Return the mean and standard deviation of the runs' last recorded values of a metric."""
        return summarize([run.final(metric) for run in self.runs], [bool(run.points(metric)) for run in self.runs])

    def best(self, metric: str) -> Summary:
        """Return the mean and standard deviation of the runs' best values of a metric by which checkpoints were chosen."""
        chosen = [run.record["best"].get("metric") == metric for run in self.runs]
        return summarize([run.record["best"].get("value") for run in self.runs], chosen)


def summarize(values: Sequence[float | None], recorded: Sequence[bool]) -> Summary:
    """Compute the mean and standard deviation of a metric over several runs.

    Args:
        values: value of the metric in each run; None if it is not finite.
        recorded: whether each run recorded the metric.

    Returns:
        The mean and standard deviation, or the reason why they are not defined.
    """
    if not any(recorded):
        return Summary(None)
    count = len(values)
    if not all(recorded):
        return Summary(None, problem=f"missing in {recorded.count(False)} of {count}")
    numbers = [value for value in values if value is not None]
    if len(numbers) < count:
        return Summary(None, problem="not finite" + (f" in {count - len(numbers)} of {count}" if count > 1 else ""))
    return Summary(fmean(numbers), stdev(numbers) if count > 1 else None)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ only in their seed, trained the same number of steps, and finished.

    Args:
        runs: runs to group, at least one. A run that fits no other run is a group of its own.

    Returns:
        The groups, in the order of their first runs.
    """
    keys = [key for key in compared_keys(runs) if key != SEED]
    members: dict[Any, list[Run]] = {}
    repeats: Counter[Any] = Counter()
    for position, run in enumerate(runs):
        identity: Any = position  # a group of its own
        repeat = 0
        # Without options, runs cannot be told apart, and an unfinished run stopped at an arbitrary place of its schedule.
        if run.options and run.record["finished"]:
            options = tuple(plain(run.options.get(key)) for key in keys)
            identity = (run.record["steps"], run.record["parameters"], options)
            seed = option_text(run.options.get(SEED))
            # A second run with the same seed is the same run again, which would make the spread look smaller than it is.
            repeat = repeats[identity, seed] if seed.isdigit() else 0
            repeats[identity, seed] += 1
        members.setdefault((identity, repeat), []).append(run)
    names = short_names([key for key in differences(runs) if key != SEED])
    folders = dict(zip(map(id, runs), folder_names(runs), strict=True))
    longest = max(run.record["steps"] for run in runs)
    groups = []
    for (_, repeat), group in members.items():
        run = group[0]
        name = common_name([folders[id(member)] for member in group])
        texts = {short: option_text(run.options.get(key)) for key, short in names.items()} if run.options else {}
        values = [f"{short}={text}" for short, text in texts.items() if text] or [f"no {short}" for short in texts]
        notes = {
            "not finished": not run.record["finished"],
            f"{plural(run.record['steps'], 'step')}, the longest run {longest:,}": run.record["steps"] != longest,
            f"options unknown, {CONFIG} is missing or empty": not run.options,
            "repeats a seed": repeat > 0,
        }
        label = ", ".join(values) or name
        groups.append(Group(tuple(group), name, label, tuple(note for note, applies in notes.items() if applies)))
    return [_with_distinct_label(group, groups) for group in groups]


def _with_distinct_label(group: Group, groups: Sequence[Group]) -> Group:
    """Return a group with a label that distinguishes it from all other groups.

    If several groups have the same label, the notes of the group are appended to its label. If two of these groups also have
    the same notes, the name of the group is appended instead.
    """
    same = [other for other in groups if other.label == group.label]
    if len(same) == 1:
        return group
    by_notes = len({other.notes for other in same}) == len(same)
    detail = "; ".join(group.notes) if by_notes else group.name
    return replace(group, label=f"{group.label} ({detail})" if detail else group.label)


def common_name(names: Sequence[str]) -> str:
    """Return the part that names have in common, with ``*`` in place of the part that differs, such as ``kind=mhla,seed=*``."""
    if len(set(names)) == 1:
        return names[0]
    shortest = min(names, key=len)
    start = 0
    while start < len(shortest) and len({name[start] for name in names}) == 1:
        start += 1
    end = 0
    while end < len(shortest) - start and len({name[-1 - end] for name in names}) == 1:
        end += 1
    # Digits that several seeds share belong to the seed: 10 and 11 become *, not 1*.
    prefix = names[0][:start].rstrip("0123456789")
    suffix = names[0][len(names[0]) - end :].lstrip("0123456789") if end else ""
    return f"{prefix}*{suffix}"


def all_metrics(groups: Sequence[Group]) -> list[str]:
    """List the recorded metrics, most informative first.

    Metrics by which checkpoints were chosen come first, then metrics that differ between runs, then all others. The number of
    validation samples, ``val/samples``, is omitted if it is the same in all runs.
    """
    runs = [run for group in groups for run in group.runs]
    names = list(dict.fromkeys(name for run in runs for name in run.record["metrics"]))
    monitored = {run.record["best"].get("metric") for run in runs}
    equal = {name for name in names if len({run.final(name) for run in runs}) == 1}
    chosen = [name for name in names if name != COUNTED or name not in equal]
    return sorted(chosen, key=lambda name: (name not in monitored, name in equal and len(runs) > 1))


def direction(metric: str, groups: Sequence[Group]) -> str | None:
    """Return whether lower or higher values of a metric are better: ``min`` or ``max``; None if this is not known.

    If runs chose checkpoints by this metric, the mode of this choice decides. Otherwise, words in the metric's name decide.

    Args:
        metric: name of the metric, such as ``val/accuracy``.
        groups: compared groups.
    """
    bests = [run.record["best"] for group in groups for run in group.runs]
    modes = {best.get("mode") for best in bests if best.get("metric") == metric}
    if modes:
        (mode,) = modes if len(modes) == 1 else (None,)
        return mode if mode in ("min", "max") else None
    words = set(re.split(r"[_/.\W]+", metric.lower()))
    # A spread has no better direction, and a name with words of both kinds, or of neither, does not tell.
    if "std" in words or bool(words & LOWER) == bool(words & HIGHER):
        return None
    return "min" if words & LOWER else "max"


def remarks(groups: Sequence[Group]) -> list[str]:
    """Return sentences about differences that make groups hard to compare: software, seeds, and numbers of runs and samples."""
    runs = [run for group in groups for run in group.runs]
    sentences = []
    if len(runs) == 1:
        sentences.append("There is one run, so there is nothing to compare it with.")
    elif len(groups) == 1:
        sentences.append("All runs differ only in their seed, so there is one row.")
    if len({tuple(sorted(group.seeds)) for group in groups if UNKNOWN not in group.seeds}) > 1:
        sentences.append("The rows do not have the same seeds.")
    elif len(groups) > 1 and all(len(group.runs) == 1 for group in groups):
        sentences.append("Each row is a single run, so the numbers do not say how much they depend on the seed.")
    for name in dict.fromkeys(name for run in runs for name in run.record["versions"]):
        versions = sorted({str(run.record["versions"].get(name, "unknown")) for run in runs})
        if len(versions) > 1:
            sentences.append(f"The runs were trained with different versions of {name}: {', '.join(versions)}.")
    if len({run.final(COUNTED) for run in runs if run.points(COUNTED)}) > 1:
        sentences.append("The runs were validated on different numbers of samples.")
    return sentences
