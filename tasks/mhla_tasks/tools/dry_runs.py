"""Check of the options of all runs of a sweep before the first run starts.

A wrong value of a later run would otherwise be noticed only when the earlier runs have been trained. For each run, the options
are read and merged as in ``lightning fit``. Then the callbacks, the data module and the model are built, the model without
memory for its weights unless a constructor reads the values of a tensor. The Trainer is also built, unless the run is submitted
to another machine. No run folder is created, no weights are read, and only what the constructors need is downloaded.

The check runs in a separate process (``python -m mhla_tasks.tools.dry_runs``), because it imports the modules that ``--allow``
names, and sets the random seed of each run. Its input and its output are JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from typing_extensions import override

from lightning_mhla.checkpoints.runs import check_folder
from lightning_mhla.data import ShardSets
from lightning_mhla.data.remote import url_scheme
from lightning_mhla.data.shards import expand_braces, find_shards
from mhla_tasks.commandline import shipped
from mhla_tasks.commandline.arguments import UsageError, read_words
from mhla_tasks.commandline.errors import CommandFailed, explain
from mhla_tasks.commandline.failures import chain
from mhla_tasks.commandline.parser import SuiteCLI, short_type_errors
from mhla_tasks.commandline.plan import make_plan
from mhla_tasks.commandline.registry import LIGHTNING
from mhla_tasks.tools.run_checks import CheckedRun

LOCATIONS = ("train", "val")
"""Options of the suite's data modules that name files or folders."""

HUB = "hub:"
"""Beginning of a location of texts that names a data set on the Hugging Face Hub."""


class DryCLI(SuiteCLI):
    """Command line that builds callbacks, data module and model without loggers and weights, and runs nothing.

    Attributes:
        options: text of all parsed options, which is equal for two runs that would train the same model.
    """

    @override
    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        self.options = repr(self.config.as_dict())
        self.config.trainer.logger = False  # some loggers contact their service as soon as they are built

    @override
    def instantiate_classes(self) -> None:
        try:
            with torch.device("meta"):  # the weights of a large model would take minutes and memory
                self.config_init = self.parser.instantiate_classes(self.config)
        except Exception as error:
            if not any("meta" in str(link).lower() for link in chain(error)):
                raise
            # A constructor may read the values of a tensor, which has none on this device.
            self.config_init = self.parser.instantiate_classes(self.config)


def check_runs(runs: Sequence[CheckedRun], here: bool) -> str | None:
    """Check runs in this process, and return a message about the first one that cannot start.

    Args:
        runs: runs of a sweep, in the order in which they will be trained.
        here: whether the runs train on this machine, so that their devices and local files must exist.

    Returns:
        Error message that names the run; None if no error was found. Errors that look like a bug are not reported, because a
        model without weights may cause them; if a run has such an error, it reports the error itself.
    """
    problems: list[tuple[int, str]] = []
    folders: dict[str, int] = {}
    options: dict[str, int] = {}
    for number, run in enumerate(runs):
        same = folders.setdefault(os.path.realpath(run.folder), number)
        if same != number:
            problems.append((number, f"is also the folder of the run with {' '.join(runs[same].words)}"))
            continue
        try:
            parsed = _build(run, here)
        except (Exception, CommandFailed) as error:
            text = str(error) if isinstance(error, UsageError | CommandFailed) else explain(error)
            # The parser turns an error of a constructor into a ValueError, so a missing file may be the cause of any error.
            missing = any(isinstance(link, OSError) for link in chain(error))
            if text is not None and (here or not missing):
                problems.append((number, text))
        else:
            same = options.setdefault(parsed, number)
            if same != number:
                problems.append(
                    (number, f"has the same options as {Path(runs[same].folder).name}; leave one of them out")
                )
    if not problems:
        return None
    number, text = problems[0]
    others = f"; {len(problems)} of {len(runs)} runs have an error" if len(problems) > 1 else ""
    return f"{runs[number].folder}: {text}{others}"


def _build(run: CheckedRun, here: bool) -> str:
    """Build the objects of a run, such as the model and the data module, and return the text of all its options.

    Args:
        run: run to check.
        here: whether the run trains on this machine. If so, the Trainer is built, too, and the data files must exist.

    Raises:
        Exception: if the run cannot start. The type depends on the cause.
    """
    words = shipped.resolve(["fit", *run.words, f"--run_dir={run.folder}"])
    plan = make_plan(read_words(words, LIGHTNING))
    if os.path.isdir(run.folder):
        check_folder(Path(run.folder))
    plan.configuration.pop("run_dir", None)  # the folder would be created and locked
    with short_type_errors(plan.sources):
        command_line = DryCLI(plan)
    if here:
        command_line.instantiate_trainer()
        _check_files(command_line)
    return command_line.options


def _check_files(command_line: DryCLI) -> None:
    """Check that the local files and folders exist that a data module of the suite reads.

    A location is looked up as the data module does it: as shards if the module reads shards, otherwise as a file or folder.

    Args:
        command_line: command line whose data module has been built.

    Raises:
        FileNotFoundError: if a file or folder does not exist. The message names it.
    """
    data = command_line.config.get("data")
    if data is None or not str(data.class_path).startswith("mhla_tasks."):
        return
    shards = getattr(command_line.config_init.data, "shards", None)
    for name in LOCATIONS:
        value = data.init_args.get(name)
        locations = [
            location for location in (value if isinstance(value, list) else [value]) if isinstance(location, str)
        ]
        try:
            if isinstance(shards, ShardSets):
                _check_shards(locations)
            elif name == "train" or command_line.config.trainer.limit_val_batches != 0:  # otherwise, val is never read
                _check_paths(locations)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"data.{name}: {error}") from None


def _check_shards(locations: Sequence[str]) -> None:
    for path in (path for location in locations for path in expand_braces(location)):
        if not url_scheme(path) and not Path(path).is_dir():
            find_shards(path)


def _check_paths(locations: Sequence[str]) -> None:
    for location in locations:
        if not location.startswith(HUB) and not Path(location).exists():
            raise FileNotFoundError(f"{location} is neither a file nor a folder")


def main() -> None:
    """Read runs from standard input, check them, and write the message about the first problem to standard output."""
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)  # libraries print to standard output, too
        request = json.load(sys.stdin)
        problem = check_runs([CheckedRun(**run) for run in request["runs"]], request["here"])
        json.dump({"problem": problem}, answer)


if __name__ == "__main__":
    main()
