"""Several runs from one ``fit`` line: ``lightning fit ... --sweep KEY=VALUE,VALUE [--sweep KEY=VALUE,VALUE]``.

Every combination of values is a run in a folder of its own below ``--run_dir`` (``runs/sweep`` if none is given), named by
its values. Runs go one after the other, or each as a job of SLURM:

    lightning fit --config configs/classification/mnist.yaml --run_dir runs/kinds \\
      --sweep model.attention.kind=mhla,linear,softmax --sweep seed_everything=0,1,2
    lightning fit ... --sweep seed_everything=0,1 --sweep_sbatch "--gpus-per-node=8 docker/slurm/train.sbatch"

What a run prints goes into ``output.txt`` in its folder; the sweep prints a line for each run. The same line again resumes:
finished runs are passed over, a stopped one continues (jobs of SLURM: once they have ended). At the end all are compared, as
by ``lightning compare``.
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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from lightning_mhla.callbacks.page import duration
from lightning_mhla.callbacks.report import RECORD
from lightning_mhla.checkpoints.runs import in_use
from lightning_mhla.system.files import write_whole
from lightning_mhla.system.redaction import redact
from mhla_tasks.commandline.arguments import HELP, CommandLine, Option, UsageError, read_words
from mhla_tasks.commandline.console import harmless
from mhla_tasks.commandline.registry import LIGHTNING
from mhla_tasks.tools.compare import common_metrics, draw, print_table, read_runs, short_names

KEPT = "sweep.json"
"""File in the folder of a run: the words that it was trained with."""

JOB = "slurm-job.txt"
"""File in the folder of a run: the number of the job that it was submitted as."""

OUTPUT = "output.txt"
"""File in the folder of a run: what it printed."""

DEFAULT, PICTURE = "runs/sweep", "compared.png"
LONGEST = 150
"""Characters of a folder's name."""


@dataclass(frozen=True)
class Sweep:
    """A sweep as the command line asks for it.

    Attributes:
        line: options of every run.
        values: values by key.
        folder: folder for the runs.
        sbatch: arguments for ``sbatch``; None to train here.
    """

    line: CommandLine
    values: dict[str, list[str]]
    folder: Path
    sbatch: list[str] | None

    def runs(self) -> list[tuple[Path, CommandLine]]:
        """Folder and options of each combination of values."""
        found = []
        for chosen in itertools.product(*self.values.values()):
            options = [
                Option(key, value, (f"--{key}={value}",)) for key, value in zip(self.values, chosen, strict=True)
            ]
            folder = self.folder / name_of(dict(zip(self.values, chosen, strict=True)))
            found.append((folder, replace(self.line, options=(*self.line.options, *options))))
        return found


@dataclass
class SweepProgress:
    """Lines about the runs of a sweep, on standard error; a terminal also shows what is running and the time left.

    Attributes:
        count: number of runs.
        console: where the lines go.
        seconds: times of the runs that were trained.
        done: number of runs that are over.
    """

    count: int
    console: Console
    seconds: list[float] = field(default_factory=list)
    done: int = 0

    @contextmanager
    def running(self, folder: Path) -> Iterator[None]:
        """Show that a run is trained, and measure its time."""
        start = time.monotonic()
        text = f"[{self.done + 1}/{self.count}] {harmless(str(folder))}{self.left()}"
        with Live(Spinner("dots", Text(text)), console=self.console, transient=True, refresh_per_second=4):
            yield
        self.seconds.append(time.monotonic() - start)

    def left(self) -> str:
        """The time that the runs that are not over take, if they take what the others took."""
        remaining = self.count - self.done
        if not self.seconds or not remaining:
            return ""
        return f"; {remaining} left, about {duration(remaining * sum(self.seconds) / len(self.seconds))}"

    def end(self, folder: Path, what: str) -> None:
        """Print the line of a run that is over."""
        self.done += 1
        self.say(f"[{self.done}/{self.count}] {folder}: {what}{self.left()}")

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(Text(harmless(text)), soft_wrap=True)


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


def read_sweep(line: CommandLine) -> Sweep:
    """Read what a command line sweeps over.

    Raises:
        UsageError: for a command that does not train, a sweep without values, of one key twice, or of one value twice.
    """
    if line.command != "fit":
        raise UsageError(f"--sweep trains several runs: write lightning fit, not lightning {line.command}")
    values: dict[str, list[str]] = {}
    for text in line.values("sweep"):
        key, _, listed = text.partition("=")
        if not key or not listed or not all(split_values(listed)):
            raise UsageError(f"--sweep {text}: write KEY=VALUE,VALUE")
        if key in values:
            raise UsageError(f"--sweep {key} is given twice")
        values[key] = split_values(listed)
    for key, several in values.items():
        if len(set(several)) < len(several):
            raise UsageError(f"--sweep {key} has a value twice")
    sbatch = line.last("sweep_sbatch")
    rest = line.without("sweep", "sweep_sbatch", "run_dir")
    return Sweep(rest, values, Path(line.last("run_dir") or DEFAULT), None if sbatch is None else shlex.split(sbatch))


def name_of(chosen: dict[str, str]) -> str:
    """Name of the folder of a combination; with a hash where the values themselves are no name."""
    names = short_names(list(chosen))
    text = ",".join(f"{names[key]}={value}" for key, value in chosen.items())
    name = re.sub(r"[^\w=,.+-]+", "-", redact(text))[:LONGEST]
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def run(words: Sequence[str]) -> int:
    """Train all runs and compare them; the exit status, 1 if a run failed.

    Args:
        words: arguments after the name of the program.
    """
    try:
        line = read_words(words, LIGHTNING)
        sweep = read_sweep(line)
    except UsageError as error:
        sys.stderr.write(f"error: {harmless(str(error))}\nhelp: lightning fit --help\n")
        return 2
    fit = [sys.executable, "-m", "mhla_tasks", "fit"]
    if any(option.name in ("help", "print_config") or option.name.endswith(HELP) for option in line.options):
        return _wait([*fit, *sweep.line.words])
    runs, failed = sweep.runs(), []
    progress = SweepProgress(len(runs), Console(file=sys.stderr, highlight=False))
    if sweep.sbatch is None:
        progress.say(f"{len(runs)} runs in {sweep.folder}; what each prints is in its {OUTPUT}")
    for folder, asked in runs:
        if state := _state(folder, asked, sweep.sbatch is not None):
            progress.end(folder, state)
            continue
        _begin(folder, asked)
        if sweep.sbatch is not None:
            status = _submit(folder, [*sweep.sbatch, *asked.words], progress)
        else:
            printed = (folder / OUTPUT).stat().st_size if (folder / OUTPUT).exists() else 0  # by earlier starts
            with progress.running(folder):
                status = _wait([*fit, *asked.words, f"--run_dir={folder}"], folder / OUTPUT)
            progress.end(folder, _outcome(folder, status, progress.seconds[-1], printed))
        if status in (2, 75, 130) or status < 0:  # a wrong command, or a stop: the others would end alike
            return abs(status) if status > 0 else 128 - status
        failed += [folder.name] if status else []
    if sweep.sbatch is None:
        _compare(sweep.folder, [folder for folder, _ in runs])
    if failed:
        progress.say(f"failed: {', '.join(failed)}")
    return int(bool(failed))


def _outcome(folder: Path, status: int, seconds: float, printed: int) -> str:
    """How a run ended: its best metric, or its error."""
    if status:
        output = (folder / OUTPUT).read_bytes()[printed:].decode(errors="replace") if (folder / OUTPUT).exists() else ""
        errors = [line for line in output.splitlines() if line.startswith("error: ")]
        return f"ended with status {status} ({errors[-1] if errors else f'see {OUTPUT}'})"
    try:
        best = json.loads((folder / RECORD).read_text())["best"]
        metric = f", best {best['metric']} {best['value']:.4g}"
    except (OSError, ValueError, KeyError, TypeError):  # a run without RunReport, or without a metric
        metric = ""
    return f"{duration(seconds)}{metric}"


def _state(own: Path, line: CommandLine, queues: bool) -> str:
    """The reason not to start a run; empty if it has to start."""
    if _finished(own, line):
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


def _submit(own: Path, words: Sequence[str], progress: SweepProgress) -> int:
    """Submit a run and note its job; the exit status of ``sbatch``."""
    command = [
        "sbatch",
        "--parsable",
        "--export=ALL",
        f"--job-name={own.name}",
        *words,
    ]  # else SBATCH_EXPORT=NONE loses RUN_DIR
    try:
        done = subprocess.run(command, env={**os.environ, "RUN_DIR": str(own)}, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        sys.stderr.write("error: there is no program sbatch here\n")
        return 2
    if done.returncode == 0:
        number = done.stdout.strip().partition(";")[0]  # a cluster's name may follow
        write_whole(own / JOB, f"{number}\n")
        progress.end(own, f"submitted as job {number}")
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


def _kept(line: CommandLine) -> dict[str, Any]:
    """The words of a run, and hashes of the configurations that they name."""
    files = {
        path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in line.values("config") if _is_file(path)
    }
    return {
        "words": [redact(word) for word in line.words],
        "configs": {redact(path): digest for path, digest in files.items()},
    }


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except OSError:  # options that stand where a file could, longer than a name may be
        return False


def _begin(folder: Path, line: CommandLine) -> None:
    """Note what a run is trained with; a record of another one is not finished any more."""
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / RECORD
    if record.exists():
        write_whole(record, json.dumps({**json.loads(record.read_text()), "finished": False}, indent=1) + "\n")
    write_whole(folder / KEPT, json.dumps(_kept(line)) + "\n")


def _finished(folder: Path, line: CommandLine) -> bool:
    """Whether a run with these words and configurations has ended."""
    try:
        record, kept = (json.loads((folder / name).read_text()) for name in (RECORD, KEPT))
    except (OSError, ValueError):
        return False
    return bool(record.get("finished")) and kept == _kept(line)


def _wait(command: list[str], output: Path | None = None) -> int:
    """Exit status of a command; 130 after Ctrl+C. Signals reach it, and it has the time that it needs to save.

    Args:
        command: program and arguments.
        output: file that what it prints is appended to; None to print it here.
    """
    with open(output, "ab") if output is not None else nullcontext() as stream:
        child = subprocess.Popen(command, stdout=stream, stderr=None if stream is None else subprocess.STDOUT)
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
