"""Several runs from one ``fit`` line: ``lightning fit ... --sweep KEY=VALUE,VALUE [--sweep KEY=VALUE,VALUE]``.

Every combination of values is a run in a folder of its own below ``--run_dir`` (``runs/sweep`` if none is given), named by
its values. Runs go one after the other, or each as a job of SLURM:

    lightning fit --config configs/classification/mnist.yaml --run_dir runs/kinds \\
      --sweep model.init_args.attention.kind=mhla,linear,softmax --sweep seed_everything=0,1,2
    lightning fit ... --sweep seed_everything=0,1 --sweep_sbatch "--gpus-per-node=8 docker/slurm/train.sbatch"

The same line again resumes: finished runs are passed over, a stopped one continues. At the end all are compared, as by
``lightning compare``.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mhla_tasks.compare import RECORD, draw, print_table, read_runs, short_names

KEPT = "sweep.json"
"""File in the folder of a run: the words that it was trained with."""

DEFAULT = "runs/sweep"


class SweepError(ValueError):
    """A sweep that cannot be read from the command line."""


def split_values(text: str) -> list[str]:
    """Values between commas, those inside brackets and quotes left alone."""
    found, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        if letter == "," and not depth and not quote:
            found.append("")
        else:
            found[-1] += letter
    return found


def read_words(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]], Path, list[str] | None]:
    """Words for every run, values by key, the folder, and words for sbatch, if there are any.

    Raises:
        SweepError: for a sweep without values, of one key twice, or an option without a value.
    """
    rest: list[str] = []
    taken: dict[str, list[str]] = {"--sweep": [], "--sweep_sbatch": [], "--run_dir": []}
    following = iter(words)
    for word in following:
        name, equals, value = word.partition("=")
        if name not in taken:
            rest.append(word)
            continue
        if not equals and (value := next(following, "")) == "":
            raise SweepError(f"{name} needs a value")
        taken[name].append(value)
    values: dict[str, list[str]] = {}
    for text in taken["--sweep"]:
        key, _, listed = text.partition("=")
        if not key or not listed or not all(split_values(listed)):
            raise SweepError(f"--sweep {text}: write KEY=VALUE,VALUE")
        if key in values:
            raise SweepError(f"--sweep {key} is given twice")
        values[key] = split_values(listed)
    folder = Path(taken["--run_dir"][-1] if taken["--run_dir"] else DEFAULT)
    return rest, values, folder, shlex.split(taken["--sweep_sbatch"][-1]) if taken["--sweep_sbatch"] else None


def combinations(values: dict[str, list[str]]) -> list[dict[str, str]]:
    """Every combination of values, by key."""
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def name_of(chosen: dict[str, str]) -> str:
    """Name of the folder of a combination."""
    names = short_names(list(chosen))
    return re.sub(r"[^\w=,.+-]+", "-", ",".join(f"{names[key]}={value}" for key, value in chosen.items()))


def run(words: Sequence[str]) -> int:
    """Train all runs and compare them; the exit status, 1 if a run failed.

    Args:
        words: after ``fit``.
    """
    try:
        rest, values, folder, sbatch = read_words(words)
    except SweepError as error:
        sys.stderr.write(f"error: {error}\nhelp: lightning fit --help\n")
        return 2
    failed, runs = [], combinations(values)
    for number, chosen in enumerate(runs, 1):
        own = folder / name_of(chosen)
        asked = [*rest, *(f"--{key}={value}" for key, value in chosen.items())]
        if _finished(own, asked):
            sys.stderr.write(f"[{number}/{len(runs)}] {own}: finished before\n")
            continue
        sys.stderr.write(f"[{number}/{len(runs)}] {own}\n")
        if sbatch is not None:
            status = _wait(["sbatch", f"--job-name={own.name}", *sbatch, *asked], {"RUN_DIR": str(own)})
        else:
            status = _wait([sys.executable, "-m", "mhla_tasks", "fit", *asked, f"--run_dir={own}"], {})
            if not status:
                (own / KEPT).write_text(json.dumps({"words": asked}) + "\n")
        if status in (2, 75, 130) or status < 0:  # a wrong command, or a stop: the others would end alike
            return abs(status) if status > 0 else 128 - status
        failed += [own.name] if status else []
    trained = [own for chosen in runs if (own := folder / name_of(chosen)).is_dir() and any(own.rglob(RECORD))]
    if sbatch is None and trained:
        found = read_runs(trained)
        print_table(found)
        draw(found, folder / "compared.png")
        sys.stderr.write(f"curves: {folder / 'compared.png'}\n")
    if failed:
        sys.stderr.write(f"failed: {', '.join(failed)}\n")
    return int(bool(failed))


def _finished(folder: Path, words: list[str]) -> bool:
    """Whether a run with these words has ended."""
    try:
        record, kept = (json.loads((folder / name).read_text()) for name in (RECORD, KEPT))
    except (OSError, ValueError):
        return False
    return bool(record.get("finished")) and kept.get("words") == words


def _wait(command: list[str], environment: dict[str, str]) -> int:
    """Exit status of a command; signals are passed on to it, and it has the time that it needs to save."""
    child = subprocess.Popen(command, env={**os.environ, **environment})

    def forward(number: int, frame: Any) -> None:
        child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGUSR1)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the child too
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
