"""A checked command before any model is built: one configuration, and the checkpoint to start from."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.strategies import Strategy

from lightning_mhla.checkpoints.choice import choose_checkpoint
from mhla_tasks.commandline.arguments import HELP, CommandLine, UsageError
from mhla_tasks.commandline.memory import remembered_options
from mhla_tasks.commandline.merging import ROOTS, merge
from mhla_tasks.commandline.moved_keys import Move, move_keys
from mhla_tasks.commandline.problems import (
    find_options_of_another_command,
    find_repeated_option,
    find_unknown_key,
)
from mhla_tasks.commandline.registry import LIGHTNING
from mhla_tasks.commandline.sources import Source, mapping, read_sources
from mhla_tasks.commandline.trust import AllowError, allow_classes, allow_imports, subclass_named
from mhla_tasks.commandline.user_modules import UnknownModuleError

OBJECTS = {"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders"}
"""Arguments of the Trainer's methods that are no options: objects that are built from other options."""

OWN = ("config", "seed_everything", "run_dir", "allow", "print_config", "help")
"""Options of every command that are not the Trainer's."""

PLAN = "LIGHTNING_MHLA_PLAN"
"""Environment variable: the first process of a run, and a digest of its configuration."""


@dataclass(frozen=True)
class Plan:
    """A command that is ready to run.

    Attributes:
        command: ``fit``, ``validate``, ``test`` or ``predict``.
        sources: the options' origins, the weakest first.
        configuration: nested options of all sources, as LightningCLI takes them.
        checkpoint: path of the checkpoint to start from; None for none.
        replaced: configurations with the values of a file that a stronger source replaces; their types are checked too.
        request: an argument that only prints something: help, or the configuration; None to run.
        moves: options that the sources gave by former names; ``sources`` have them by their present ones.
    """

    command: str
    sources: tuple[Source, ...]
    configuration: dict[str, Any]
    checkpoint: str | None = None
    replaced: tuple[dict[str, Any], ...] = ()
    request: str | None = None
    moves: tuple[Move, ...] = ()


def method_options(command: str) -> list[str]:
    """Options that the Trainer's method of a command takes: ``ckpt_path``, ``weights_only`` and others."""
    parameters = inspect.signature(getattr(Trainer, command)).parameters
    return [name for name in parameters if name != "self" and name not in OBJECTS]


def make_plan(line: CommandLine) -> Plan:
    """Read and check everything that a command line names.

    Raises:
        UsageError: for the first thing that is wrong.
    """
    if line.asks_for("help"):
        return Plan(line.command, (), {}, request="--help")
    sources = read_sources(line)
    try:
        allow_imports(sources)
    except (AllowError, UnknownModuleError) as error:
        raise UsageError(str(error)) from None
    sources, moves = move_keys(sources)
    if problem := _find_problem(line, sources):
        raise UsageError(problem)
    run = _strongest(sources, "run_dir")
    try:
        checkpoint = choose_checkpoint(Path(run) if run else None, _start(sources, run), line.command == "fit")
        remembered = []
        if checkpoint is not None and _start(sources, run) is not None:
            remembered = [Source(checkpoint, remembered_options(checkpoint, sources))]
        every, remembered_moves = move_keys([*remembered, *sources])
        allow_classes(every)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    remembered, sources = every[: len(remembered)], every[len(remembered) :]
    configuration = _completed(merge(every))
    replaced = tuple(_replaced(remembered, sources, configuration))
    request = _request(line, configuration)
    return Plan(line.command, tuple(sources), configuration, checkpoint, replaced, request, (*moves, *remembered_moves))


def _replaced(
    remembered: Sequence[Source], sources: Sequence[Source], configuration: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The configuration with the values of each file that stronger sources replace.

    Options of a model or data module of a class that is itself replaced are left out: they are for that class.
    """
    for index, source in enumerate(sources):
        if source.typed:
            continue
        here = merge([*remembered, *sources[: index + 1]])
        changed = _completed(merge([*remembered, *sources, source]))
        for root in ("model", "data"):
            named = _class_of(here.get(root))
            if named is not None and named != _class_of(configuration.get(root)):
                changed[root] = configuration[root]
        if changed != configuration:
            yield changed


def _class_of(value: Any) -> Any:
    """The class that a model or data module is given by; None if it is not named."""
    return value if isinstance(value, str) else mapping(value).get("class_path")


def check_same(plan: Plan) -> None:
    """Reject a configuration that was edited while the processes of a run were started: they would train different models.

    The first process notes its configuration in the environment, which Lightning hands down to those that it starts.

    Raises:
        UsageError: when this process was started by one with a different configuration.
    """
    parent, _, noted = os.environ.get(PLAN, "").partition(":")
    digest = hashlib.sha256(repr(plan.configuration).encode(errors="surrogateescape")).hexdigest()
    if parent != str(os.getppid()) or "LOCAL_RANK" not in os.environ:
        os.environ[PLAN] = f"{os.getpid()}:{digest}"
    elif noted != digest:
        raise UsageError("a configuration was changed while the processes of the run were started; start it again")


def _find_problem(line: CommandLine, sources: Sequence[Source]) -> str | None:
    folder = line.last("run_dir")
    if folder and line.command != "fit" and not Path(folder).exists():
        return f"--run_dir={folder}: the folder does not exist"
    for source in sources:
        if source.problem:
            return source.problem
        if source.values.get("weights_only") not in (None, True, "true", "null"):
            return (
                f"{source.origin}: checkpoints are read as plain data, so that they run no code; leave weights_only out"
            )
    roots = {*OWN, *ROOTS, *method_options(line.command)}
    trainer = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    return (
        find_options_of_another_command(sources, line.command, LIGHTNING)
        or find_unknown_key(sources, roots, trainer)
        or find_repeated_option(line)
    )


def _start(sources: Sequence[Source], run: str | None) -> str | None:
    """The checkpoint that is asked for; not one that an earlier version wrote into the run's own configuration."""
    written = str(Path(run or "") / "config.yaml")
    return _strongest([source for source in sources if source.origin != written], "ckpt_path")


def _strongest(sources: Sequence[Source], name: str) -> str | None:
    """The text that the strongest source gives for an option; None where no source does."""
    texts = [value for source in sources if isinstance(value := source.values.get(name), str)]
    return texts[-1] if texts else None


def _completed(configuration: dict[str, Any]) -> dict[str, Any]:
    """A configuration whose trainer has the classes that were named alone, with the arguments that Lightning demands."""
    trainer = mapping(configuration.get("trainer"))
    strategy, loggers = trainer.get("strategy"), trainer.get("logger")
    if subclass_named(strategy, (Strategy,)) is not None:
        trainer["strategy"] = {"class_path": strategy}  # Lightning takes any text for the name of a registered one
    if isinstance(loggers, list):
        trainer["logger"] = [_with_folder(logger) for logger in loggers]
    elif loggers is not None:
        trainer["logger"] = _with_folder(loggers)
    return configuration


def _with_folder(logger: Any) -> Any:
    """A logger that writes files, with a folder for them."""
    options = {"class_path": logger} if isinstance(logger, str) else mapping(logger)
    if not str(options.get("class_path")).endswith(("CSVLogger", "TensorBoardLogger")):
        return logger
    return {**options, "init_args": {"save_dir": "runs", **mapping(options.get("init_args"))}}


def _request(line: CommandLine, configuration: dict[str, Any]) -> str | None:
    """The argument for the parser where the user asks for help on a class, or for the configuration."""
    for option in line.options:
        if option.name.endswith(HELP):
            class_path = mapping(configuration.get(option.name.removesuffix(HELP))).get("class_path")
            return f"--{option.name}={option.value or class_path}" if option.value or class_path else f"--{option.name}"
    return f"--print_config={line.last('print_config') or ''}" if line.asks_for("print_config") else None
