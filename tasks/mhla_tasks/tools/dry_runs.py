"""Check of the options of all runs of a sweep before the first run starts.

A wrong option of a later run would otherwise be noticed only after the earlier runs have been trained. For each run, the
options are read and merged as in ``lightning fit``. Then the callbacks, the data module and the model are built. The weights of
the model take no memory, unless a constructor reads the values of a tensor. The Trainer is also built, unless the run is
submitted to another machine. No run folder is created, no weights are read, and only what the constructors need is downloaded.

The check runs in a separate process (``python -m mhla_tasks.tools.dry_runs``), because it imports the modules that ``--allow``
names, and sets the random seed of each run. Its input and its output are JSON.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from lightning_mhla.checkpoints.runs import CONFIG, check_folder
from lightning_mhla.data import ShardSets
from lightning_mhla.data.remote import url_scheme
from lightning_mhla.data.shards import expand_braces, find_shards
from lightning_mhla.system.redaction import redacted
from lightning_mhla.system.untrusted import parse_yaml, read_yaml
from mhla_tasks.commandline import shipped
from mhla_tasks.commandline.arguments import UsageError, read_words
from mhla_tasks.commandline.errors import CommandFailed, explain
from mhla_tasks.commandline.failures import chain
from mhla_tasks.commandline.moved_keys import move_keys
from mhla_tasks.commandline.parser import SuiteCLI, short_type_errors
from mhla_tasks.commandline.plan import make_plan
from mhla_tasks.commandline.registry import LIGHTNING
from mhla_tasks.commandline.sources import Source, mapping
from mhla_tasks.tools.comparison.options import SEED, flat, option_text, plain
from mhla_tasks.tools.run_checks import CheckedRun

LOCATIONS = ("train", "val")
"""Options of the suite's data modules that name files or folders."""

DECISIVE = re.compile(
    r"seed_everything|(model|data)\..*"
    r"|trainer\.(precision|accumulate_grad_batches|gradient_clip_\w+|limit_(train|val)_batches|overfit_batches|sync_batchnorm)"
)
"""Options that decide what a run trains, on which data, and how it is validated."""

LIMITS = ("trainer.max_epochs", "trainer.max_steps")
"""Options that may grow, so that a run continues, but not shrink: it has trained for longer then. -1 and null mean no limit."""

FREE = re.compile(r"model\.init_args\.(pretrained|network)\b.*|data\.init_args\.(num_workers|predict_dir|prompts)\b.*")
"""Exceptions from :data:`DECISIVE`: weights to start from, which a resumed run does not read, and options without effect."""

HUB = "hub:"
"""Beginning of a location of texts that names a data set on the Hugging Face Hub."""


class DryCLI(SuiteCLI):
    """Command line that builds callbacks, data module and model without loggers and weights, and runs nothing.

    Attributes:
        options: text of all parsed options, which is equal for two runs that would train the same model.
        saved: text of the options as a run saves them in ``config.yaml``.
    """

    @override
    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        self.options = repr(self.config.as_dict())
        self.saved = self.parser.dump(redacted(self.config.clone()), skip_none=False)
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
        model without weights may cause them; a run with a real error of this kind fails when it starts.
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
            command_line = _build(run, here)
        except (Exception, CommandFailed) as error:
            text = str(error) if isinstance(error, UsageError | CommandFailed) else explain(error)
            # The parser turns an error of a constructor into a ValueError, so a missing file may be the cause of any error.
            missing = any(isinstance(link, OSError) for link in chain(error))
            if text is not None and (here or not missing):
                problems.append((number, text))
        else:
            same = options.setdefault(command_line.options, number)
            if changes := changed_options(run, command_line):
                problems.append(
                    (
                        number,
                        f"was trained with {changes}; choose another --run_dir for other options, or delete the folder",
                    )
                )
            elif same != number:
                problems.append(
                    (number, f"has the same options as {Path(runs[same].folder).name}; leave one of them out")
                )
    if not problems:
        return None
    number, text = problems[0]
    others = f"; {len(problems)} of {len(runs)} runs have an error" if len(problems) > 1 else ""
    return f"{runs[number].folder}: {text}{others}"


def changed_options(run: CheckedRun, command_line: DryCLI) -> str:
    """Describe how the options of a run that would resume differ from those with which it was trained before.

    Only options that affect the results are compared. A larger ``max_epochs`` continues a run; a smaller one is a change.

    Args:
        run: run of a sweep.
        command_line: command line of the run with its present options.

    Returns:
        Text with the earlier and the present values, such as ``model.training.optimizer.lr 0.002, not 0.5``; empty if the run
        has not been trained, or nothing changed.
    """
    path = Path(run.folder, CONFIG)
    if command_line.plan.checkpoint is None or not path.exists():
        return ""
    (source,), _ = move_keys([Source(str(path), mapping(read_yaml(path)))])
    trained, present = flat(source.values), flat(parse_yaml(command_line.saved))
    if command_line.plan.configuration.get(SEED) is True:  # a new random seed for every start
        present.pop(SEED, None)
    changes = [
        f"{key.replace('.init_args', '')} {option_text(trained[key]) or 'null'}, not {option_text(present[key]) or 'null'}"
        for key in trained
        if key in present and _differs(key, trained[key], present[key])
    ]
    return "; ".join(changes[:3]) + ("; and other differences" if len(changes) > 3 else "")


def _differs(key: str, trained: Any, present: Any) -> bool:
    if key in LIMITS:
        earlier, now = (math.inf if limit in (None, -1) else limit for limit in (trained, present))
        return bool(now < earlier)
    return bool(DECISIVE.fullmatch(key)) and not FREE.fullmatch(key) and plain(trained) != plain(present)


def _build(run: CheckedRun, here: bool) -> DryCLI:
    """Build the objects of a run, such as the model and the data module, and return its command line.

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
    return command_line


def _check_files(command_line: DryCLI) -> None:
    """Check that all local files and folders that the data module reads exist, if the module belongs to this package.

    Locations are treated as shards if the data module reads shards, and otherwise as files or folders.

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
    """Read runs as JSON from standard input, check them, and write the first problem as JSON to standard output."""
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)  # libraries print to standard output, too
        request = json.load(sys.stdin)
        problem = check_runs([CheckedRun(**run) for run in request["runs"]], request["here"])
        json.dump({"problem": problem}, answer)


if __name__ == "__main__":
    main()
