"""Sweeps, which train several runs with one command: ``lightning fit ... --sweep KEY=VALUE,VALUE [--sweep KEY=VALUE,VALUE]``.

Each combination of values is trained as a run of its own. The folder of a run lies below ``--run_dir`` (default:
``runs/sweep``) and is named after the values. The runs are trained one after the other, or each as a SLURM job:

    lightning fit --config configs/classification/mnist.yaml --run_dir runs/kinds \\
      --sweep model.attention.kind=mhla,linear,softmax --sweep seed_everything=0,1,2
    lightning fit ... --sweep seed_everything=0,1 --sweep_sbatch "--gpus-per-node=8 docker/slurm/train.sbatch"

Before the first run starts, the options of all runs are checked, so that an error in any of them is reported at once. The
output of a run is written to ``output.txt`` in its folder, and the sweep prints one line for each run. The same command resumes
a sweep: it skips finished runs and resumes interrupted ones. SLURM jobs are resumed only after they have ended. At the end, all
runs are compared as with ``lightning compare``, in the order of the sweep, and ``compared.html`` and ``compared.png`` are
written to the folder of the sweep. A sweep of SLURM jobs does so when all of its jobs have finished.
"""

# Longer than other modules because it runs, submits, resumes and reports a sweep.

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from lightning_mhla.callbacks.report import RECORD
from lightning_mhla.checkpoints.runs import in_use
from lightning_mhla.system.files import write_json, write_whole
from lightning_mhla.system.numbers import duration, metric_text
from lightning_mhla.system.redaction import redact
from lightning_mhla.system.untrusted import read_json
from mhla_tasks.commandline.arguments import HELP, CommandLine, Option, UsageError, read_words
from mhla_tasks.commandline.console import harmless
from mhla_tasks.commandline.moved_keys import present_word
from mhla_tasks.commandline.registry import LIGHTNING
from mhla_tasks.tools.compare import write_comparison
from mhla_tasks.tools.comparison.options import short_names
from mhla_tasks.tools.comparison.runs import ORDER, STARTED, write_order
from mhla_tasks.tools.processes import describe_status, ended_by_signal, exit_status, run_command
from mhla_tasks.tools.run_checks import CheckedRun, find_problem

JOB = "slurm-job.txt"
"""Name of the file in a run's folder that stores the number of its SLURM job."""

OUTPUT = "output.txt"
"""Name of the file in a run's folder to which the output of the run is written."""

FINISHED = "finished before"
"""State of a run that finished in an earlier start of the sweep."""

BUSY = "in use by another process"
"""State of a run that another process trains."""

UNSWEPT = ("help", "print_config", "sweep", "sweep_sbatch")
"""Options that do not belong to a single run."""

DEFAULT = "runs/sweep"
LONGEST, MOST_BYTES = 150, 240
"""Maximum length of a run's folder name in characters and in bytes, without the hash. File systems allow 255 bytes."""

VALUE_PART = re.compile(r"""(?<![^\s,\[{(:=])(?:"(?:\\.|[^"\\])*"|'(?:''|[^'])*')|.""", re.DOTALL)
"""Quoted text or a single character in a list of values. As in YAML, quotation marks inside a word belong to the word."""


@dataclass(frozen=True)
class Sweep:
    """Hyperparameter sweep: one training run for each combination of option values.

    Attributes:
        line: parsed command line with the options that all runs share.
        values: values of each option that varies, by option name.
        folder: folder that contains one folder for each run.
        sbatch: arguments with which ``sbatch`` submits each run to SLURM; None to train on this machine.
    """

    line: CommandLine
    values: dict[str, list[str]]
    folder: Path
    sbatch: list[str] | None

    def runs(self) -> list[tuple[Path, CommandLine]]:
        """Return the folder and the parsed command line of each run, one for each combination of values."""
        combinations = []
        for combination in itertools.product(*self.values.values()):
            chosen = dict(zip(self.values, combination, strict=True))
            options = [Option(key, value, (f"--{key}={value}",)) for key, value in chosen.items()]
            run_line = replace(self.line, options=(*self.line.options, *options))
            combinations.append((self.folder / name_of(chosen), run_line))
        return combinations


@dataclass
class SweepProgress:
    """Progress display of a sweep, which prints a line for each run that has ended.

    On a terminal, it also shows the current run and the estimated remaining time.

    Attributes:
        count: number of runs in the sweep.
        console: rich console on standard error.
        seconds: durations in seconds of the runs that this process trained. :meth:`running` appends to it.
        done: number of runs that have ended.
        ready: number of runs that had finished before this sweep started, and are not yet included in ``done``.
    """

    count: int
    console: Console
    seconds: list[float] = field(default_factory=list)
    done: int = 0
    ready: int = 0

    @contextmanager
    def running(self, folder: Path) -> Iterator[None]:
        """Context manager that shows a run as the current one, and appends the duration of the ``with`` block to ``seconds``.

        Args:
            folder: folder of the run.
        """
        start = time.monotonic()
        text = f"[{self.done + 1}/{self.count}] {harmless(str(folder))}{self.left()}"
        spinner = Spinner("dots")

        def current() -> Spinner:
            spinner.update(text=Text(f"{text}; {duration(time.monotonic() - start)}{_position(folder)}"))
            return spinner

        with Live(get_renderable=current, console=self.console, transient=True, refresh_per_second=4):
            yield
        self.seconds.append(time.monotonic() - start)

    def left(self) -> str:
        """Describe the number of remaining runs and their estimated duration; empty if none remain or there is no estimate."""
        remaining = self.count - self.done - self.ready
        if not self.seconds or not remaining:
            return ""
        return f"; {remaining} left, about {duration(remaining * sum(self.seconds) / len(self.seconds))}"

    def end(self, folder: Path, what: str) -> None:
        """Count a run as ended, and print a line about it.

        Args:
            folder: folder of the run.
            what: text that describes the result of the run, such as its duration.
        """
        self.done += 1
        self.say(f"[{self.done}/{self.count}] {folder}: {what}{self.left()}")

    def say(self, text: str) -> None:
        """Print a line above the progress display."""
        self.console.print(Text(harmless(text)), soft_wrap=True)


def _position(folder: Path) -> str:
    """Describe the latest validation of a run, such as ``, step 600: val/loss 0.31``; empty before the first validation."""
    record = _stored(folder / RECORD)
    try:
        metric = record["best"]["metric"]
        step, value = record["metrics"][metric][-1]
        return f", step {step:,}: {harmless(metric)} {metric_text(metric, value)}"
    except (ValueError, KeyError, TypeError, IndexError):  # not validated yet
        return ""


def _stored(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; an empty dict if the file is missing or cannot be read."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def split_values(text: str) -> list[str]:
    """Split a text at commas that are not inside brackets or quotes: ``[4,4],[8,8]`` into ``[4,4]`` and ``[8,8]``.

    Spaces around the values are removed.
    """
    parts, depth = [""], 0
    for part in VALUE_PART.findall(text):
        depth += (part in "[{(") - (part in "]})")
        if part == "," and not depth:
            parts.append("")
        else:
            parts[-1] += part
    return [part.strip() for part in parts]


def read_sweep(line: CommandLine) -> Sweep:
    """Build a sweep from a parsed command line with ``--sweep`` options.

    Raises:
        UsageError: if the command is not ``fit``, a ``--sweep`` has no values, a key or a value occurs twice, a key is not an
            option that a sweep can vary, or the arguments for ``sbatch`` have unbalanced quotation marks.
    """
    if line.command != "fit":
        raise UsageError(f"--sweep trains several runs: use lightning fit, not lightning {line.command}")
    values: dict[str, list[str]] = {}
    for text in line.values("sweep"):
        key, _, listed = text.partition("=")
        if not key or not listed or not all(split_values(listed)):
            raise UsageError(f"--sweep {text}: write KEY=VALUE,VALUE")
        if key in values:
            raise UsageError(f"--sweep {key} is given twice")
        if key == "run_dir":
            raise UsageError(
                "--sweep run_dir: a sweep makes a folder for each run itself, in the folder that --run_dir names"
            )
        if key in UNSWEPT or key.endswith(HELP):
            raise UsageError(f"--sweep {key}: {key} is not an option of a run, so a sweep cannot vary it")
        values[key] = split_values(listed)
    for key, several in values.items():
        if len(set(several)) < len(several):
            raise UsageError(f"--sweep {key} has a value twice")
    submission = line.last("sweep_sbatch")
    try:
        sbatch = None if submission is None else shlex.split(submission)
    except ValueError as error:  # a quotation mark is missing
        raise UsageError(f"--sweep_sbatch {submission}: {error}") from None
    shared_options = line.without("sweep", "sweep_sbatch", "run_dir")
    return Sweep(shared_options, values, Path(line.last("run_dir") or DEFAULT), sbatch)


def name_of(chosen: dict[str, str]) -> str:
    """Return the name of a run's folder, made of its option values, such as ``lr=0.001,depth=12``.

    Characters that are unsuitable for a file name are replaced, secrets are removed, and long names are truncated. In these
    cases a hash is appended, so that different values have different names.

    Args:
        chosen: value of each option that the sweep varies, by option name.
    """
    names = short_names(list(chosen))
    text = ",".join(f"{names[key]}={value}" for key, value in chosen.items())
    name = re.sub(r"[^\w=,.+-]+", "-", redact(text))[:LONGEST].encode()[:MOST_BYTES].decode(errors="ignore")
    digest = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
    return name if name == text else f"{name}-{digest[:6]}"


def run(arguments: Sequence[str]) -> int:
    """Train all runs of a sweep one after the other and compare them, or submit them to SLURM.

    Args:
        arguments: command-line arguments after the name of the program.

    Returns:
        The exit status: 0 if all runs succeeded, 1 if a run failed or another process trains it, or 2 if the options of the
        sweep are invalid. If a run ends with a usage error, by a signal, or with status 75 after a signal made it save its
        state, the sweep stops early and returns the status of that run.
    """
    try:
        line = read_words(arguments, LIGHTNING)
        sweep = read_sweep(line)
    except UsageError as error:
        sys.stderr.write(f"error: {harmless(str(error))}\nhelp: lightning fit --help\n")
        return 2
    fit = [sys.executable, "-m", "mhla_tasks", "fit"]
    if any(option.is_request for option in line.options):
        return run_command([*fit, *sweep.line.words])
    runs, failed = sweep.runs(), []
    progress = SweepProgress(len(runs), Console(file=sys.stderr, highlight=False))
    unchecked = [
        CheckedRun(str(folder), run_line.words) for folder, run_line in runs if not _finished(folder, run_line)
    ]
    progress.ready = len(runs) - len(unchecked)
    with progress.console.status(f"checking the options of {len(unchecked)} runs"):
        problem = find_problem(unchecked, here=sweep.sbatch is None) if unchecked else None
    if problem is not None:
        sys.stderr.write(f"error: {harmless(problem)}; no run was started\nhelp: lightning fit --help\n")
        return 2
    write_whole(sweep.folder / ORDER, write_order(sweep.folder, [folder.name for folder, _ in runs]))
    finished, busy = 0, list[str]()
    if sweep.sbatch is None:
        progress.say(f"{len(runs)} runs in {sweep.folder}; what each prints is in its {OUTPUT}")
    for folder, run_line in runs:
        if state := _state(folder, run_line, sweep.sbatch is not None):
            if state == FINISHED:
                finished, progress.ready = finished + 1, progress.ready - 1
            elif state == BUSY:
                busy.append(folder.name)
            progress.end(folder, state)
            continue
        _begin(folder, run_line)
        if sweep.sbatch is not None:
            status = _submit(folder, [*sweep.sbatch, *run_line.words], progress)
        else:
            printed = (folder / OUTPUT).stat().st_size if (folder / OUTPUT).exists() else 0  # output of earlier starts
            with progress.running(folder):
                status = run_command([*fit, *run_line.words, f"--run_dir={folder}"], folder / OUTPUT)
            outcome = _outcome(folder, status, progress.seconds[-1], printed)
            if status == 2:
                progress.say(f"{folder}: {outcome}; the sweep is stopped, since its command is wrong")
                return status
            progress.end(folder, outcome)
        if status in (2, 75) or ended_by_signal(status):  # a usage error or a stop, which ends all other runs too
            if status != 2:
                progress.say(f"stopped at run {progress.done} of {len(runs)}; the same command resumes the sweep")
            return status
        failed += [folder.name] if status else []
    if sweep.sbatch is None or finished == len(runs):
        write_comparison(sweep.folder, [folder for folder, _ in runs], failed)
    if failed:
        progress.say(f"failed: {', '.join(failed)}; the same command tries them again")
    if busy:
        progress.say(f"{BUSY}: {', '.join(busy)}; the table has their earlier results, if any")
    return int(bool(failed or busy))


def _outcome(folder: Path, status: int, seconds: float, printed: int) -> str:
    """Describe the result of a run: its duration and best metric, or its error.

    Args:
        folder: folder of the run.
        status: exit status of the run.
        seconds: duration in seconds.
        printed: number of bytes at the beginning of the output file that earlier starts of the run wrote. They are not searched
            for errors.
    """
    if status:
        output = (folder / OUTPUT).read_bytes()[printed:].decode(errors="replace") if (folder / OUTPUT).exists() else ""
        errors = [line for line in output.splitlines() if line.startswith("error: ")]
        return f"{describe_status(status)} ({errors[-1] if errors else f'see {OUTPUT}'})"
    try:
        best = _stored(folder / RECORD)["best"]
        metric = f", best {best['metric']} {metric_text(best['metric'], best['value'])}"
    except (KeyError, TypeError):  # a run without RunReport, or without a metric
        metric = ""
    return f"{duration(seconds)}{metric}"


def _state(folder: Path, line: CommandLine, queues: bool) -> str:
    """Return the reason why a run must not be started now, such as :data:`FINISHED`; empty if it can be started.

    Args:
        folder: folder of the run.
        line: parsed command line of the run.
        queues: whether runs are submitted to SLURM, so that queued and running jobs must not be submitted again.
    """
    if _finished(folder, line):
        return FINISHED
    if in_use(folder):
        return BUSY
    if queues and (folder / JOB).exists():
        number = (folder / JOB).read_text().strip()
        query = subprocess.run(
            ["squeue", "--noheader", f"--jobs={number}", "--format=%T"], capture_output=True, text=True
        )
        if query.returncode == 0 and query.stdout.strip():  # squeue fails for jobs that SLURM no longer lists
            return f"job {number} is {query.stdout.strip().lower()}"
    return ""


def _submit(folder: Path, arguments: Sequence[str], progress: SweepProgress) -> int:
    """Submit a run to SLURM with ``sbatch``, and store the job number in its folder.

    Args:
        folder: folder of the run.
        arguments: arguments for ``sbatch``: its options, the script and the options of the run.
        progress: progress display of the sweep.

    Returns:
        The exit status of ``sbatch``, 128 + n if signal n ended it; 2 if the program is not installed.
    """
    # The script reads RUN_DIR from the environment, which SBATCH_EXPORT=NONE would drop without --export=ALL.
    command = ["sbatch", "--parsable", "--export=ALL", f"--job-name={folder.name}", *arguments]
    try:
        done = subprocess.run(command, env={**os.environ, "RUN_DIR": str(folder)}, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        sys.stderr.write("error: the program sbatch is not installed\n")
        return 2
    status = exit_status(done.returncode)
    if status:
        progress.end(folder, f"not submitted: sbatch {describe_status(status)}")
    else:
        number = done.stdout.strip().partition(";")[0]  # the name of the cluster may follow
        write_whole(folder / JOB, f"{number}\n")
        progress.end(folder, f"submitted as job {number}")
    return status


def _saved_arguments(line: CommandLine) -> dict[str, Any]:
    """Return the arguments of a run without secrets (``words``), and the SHA-256 of each configuration file (``configs``)."""
    # Path.is_file raises an error for a mapping in place of a file if the mapping is too long for a file name.
    paths = [path for path in line.values("config") if os.path.isfile(Path(path))]
    files = {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths}
    return {
        "words": [present_word(redact(word)) for word in line.words],
        "configs": {redact(path): digest for path, digest in files.items()},
    }


def _begin(folder: Path, line: CommandLine) -> None:
    """Store the arguments of a run in its folder, and mark an existing ``run.json`` there as unfinished."""
    folder.mkdir(parents=True, exist_ok=True)
    if record := _stored(folder / RECORD):
        # Otherwise a run that is trained again with other options would count as finished if it is interrupted.
        write_json(folder / RECORD, {**record, "finished": False}, indent=1)
    write_json(folder / STARTED, _saved_arguments(line))


def _finished(folder: Path, line: CommandLine) -> bool:
    """Return whether a run with the same arguments and configuration files has already finished in this folder."""
    record, arguments = _stored(folder / RECORD), _stored(folder / STARTED)
    previous = {**arguments, "words": [present_word(word) for word in arguments.get("words", ())]}
    return bool(record.get("finished")) and previous == _saved_arguments(line)
