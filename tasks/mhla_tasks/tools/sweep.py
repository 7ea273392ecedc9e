"""Several runs from one ``fit`` line: ``lightning fit ... --sweep KEY=VALUE,VALUE [--sweep KEY=VALUE,VALUE]``.

Every combination of values is a run in a folder of its own below ``--run_dir`` (``runs/sweep`` if none is given), named by
its values. Runs go one after the other, or each as a job of SLURM:

    lightning fit --config configs/classification/mnist.yaml --run_dir runs/kinds \\
      --sweep model.attention.kind=mhla,linear,softmax --sweep seed_everything=0,1,2
    lightning fit ... --sweep seed_everything=0,1 --sweep_sbatch "--gpus-per-node=8 docker/slurm/train.sbatch"

The same line again resumes: finished runs are passed over, a stopped one continues (jobs of SLURM: once they have ended). At
the end all are compared, as by ``lightning compare``.
"""

from __future__ import annotations

import hashlib
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

from lightning_mhla.callbacks.report import RECORD
from lightning_mhla.checkpoints.runs import in_use
from lightning_mhla.system.files import write_whole
from lightning_mhla.system.redaction import redact
from mhla_tasks.tools.compare import common_metrics, draw, print_table, read_runs, short_names

KEPT = "sweep.json"
"""File in the folder of a run: the words that it was trained with."""

JOB = "slurm-job.txt"
"""File in the folder of a run: the number of the job that it was submitted as."""

DEFAULT, PICTURE = "runs/sweep", "compared.png"
LONGEST = 150
"""Characters of a folder's name."""


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
    for key, several in values.items():
        if len(set(several)) < len(several):
            raise SweepError(f"--sweep {key} has a value twice")
    folder = Path(taken["--run_dir"][-1] if taken["--run_dir"] else DEFAULT)
    return rest, values, folder, shlex.split(taken["--sweep_sbatch"][-1]) if taken["--sweep_sbatch"] else None


def combinations(values: dict[str, list[str]]) -> list[dict[str, str]]:
    """Every combination of values, by key."""
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def name_of(chosen: dict[str, str]) -> str:
    """Name of the folder of a combination; with a hash where the values themselves are no name."""
    names = short_names(list(chosen))
    text = ",".join(f"{names[key]}={value}" for key, value in chosen.items())
    name = re.sub(r"[^\w=,.+-]+", "-", redact(text))[:LONGEST]
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


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
    fit = [sys.executable, "-m", "mhla_tasks", "fit"]
    if any(word.partition("=")[0] in ("--help", "-h", "--print_config") for word in rest):
        return _wait([*fit, *rest], {})
    failed, runs = [], combinations(values)
    for number, chosen in enumerate(runs, 1):
        own = folder / name_of(chosen)
        asked = [*rest, *(f"--{key}={value}" for key, value in chosen.items())]
        state = _state(own, asked, sbatch is not None)
        sys.stderr.write(f"[{number}/{len(runs)}] {own}{state and f': {state}'}\n")
        if state:
            continue
        _begin(own, asked)
        status = _wait([*fit, *asked, f"--run_dir={own}"], {}) if sbatch is None else _submit(own, [*sbatch, *asked])
        if status in (2, 75, 130) or status < 0:  # a wrong command, or a stop: the others would end alike
            return abs(status) if status > 0 else 128 - status
        failed += [own.name] if status else []
    if sbatch is None:
        _compare(folder, [folder / name_of(chosen) for chosen in runs])
    if failed:
        sys.stderr.write(f"failed: {', '.join(failed)}\n")
    return int(bool(failed))


def _state(own: Path, words: Sequence[str], queues: bool) -> str:
    """The reason not to start a run; empty if it has to start."""
    if _finished(own, words):
        return "finished before"
    if in_use(own):
        return "in use by another process"
    if queues and (own / JOB).exists():
        number = (own / JOB).read_text().strip()
        asked = subprocess.run(
            ["squeue", "--noheader", f"--jobs={number}", "--format=%T"], capture_output=True, text=True
        )
        if asked.returncode == 0 and asked.stdout.strip():  # an error for jobs that SLURM has forgotten
            return f"job {number} is {asked.stdout.strip().lower()}"
    return ""


def _submit(own: Path, words: Sequence[str]) -> int:
    """Submit a run and note its job; the exit status of ``sbatch``."""
    command = ["sbatch", "--parsable", f"--job-name={own.name}", *words]
    try:
        done = subprocess.run(command, env={**os.environ, "RUN_DIR": str(own)}, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        sys.stderr.write("error: there is no program sbatch here\n")
        return 2
    if done.returncode == 0:
        number = done.stdout.strip().partition(";")[0]  # a cluster's name may follow
        write_whole(own / JOB, f"{number}\n")
        sys.stderr.write(f"submitted as job {number}\n")
    return done.returncode


def _compare(folder: Path, runs: Sequence[Path]) -> None:
    """Print the table of the runs that have a record, and draw their curves."""
    trained = [own for own in runs if (own / RECORD).exists()]
    if without := [own.name for own in runs if own not in trained]:
        sys.stderr.write(f"without {RECORD}, which RunReport writes where there is a logger: {', '.join(without)}\n")
    if not trained:
        return
    found = read_runs(trained)
    print_table(found)
    if common_metrics(found):
        draw(found, folder / PICTURE)
        sys.stderr.write(f"curves: {folder / PICTURE}\n")


def _kept(words: Sequence[str]) -> dict[str, Any]:
    """The words of a run, and hashes of the configurations that they name."""
    pairs = itertools.pairwise([*words, ""])
    paths = [word.partition("=")[2] or after for word, after in pairs if word.split("=")[0] == "--config"]
    files = {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths if Path(path).is_file()}
    return {
        "words": [redact(word) for word in words],
        "configs": {redact(path): digest for path, digest in files.items()},
    }


def _begin(folder: Path, words: Sequence[str]) -> None:
    """Note what a run is trained with; a record of another one is not finished any more."""
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / RECORD
    if record.exists():
        write_whole(record, json.dumps({**json.loads(record.read_text()), "finished": False}, indent=1) + "\n")
    write_whole(folder / KEPT, json.dumps(_kept(words)) + "\n")


def _finished(folder: Path, words: Sequence[str]) -> bool:
    """Whether a run with these words and configurations has ended."""
    try:
        record, kept = (json.loads((folder / name).read_text()) for name in (RECORD, KEPT))
    except (OSError, ValueError):
        return False
    return bool(record.get("finished")) and kept == _kept(words)


def _wait(command: list[str], environment: dict[str, str]) -> int:
    """Exit status of a command; 130 after Ctrl+C. Signals reach it, and it has the time that it needs to save."""
    try:
        child = subprocess.Popen(command, env={**os.environ, **environment})
    except FileNotFoundError:
        sys.stderr.write(f"error: there is no program {command[0]} here\n")
        return 2
    noted: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: child.send_signal(n)) for number in (signal.SIGTERM, signal.SIGUSR1)
    }
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as it is in the background; a terminal sends it to both
        before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda n, _: noted.append(n))
    try:
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 130 if noted else status
