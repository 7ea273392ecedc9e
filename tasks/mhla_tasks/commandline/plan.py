"""Preparation of a command before any model is built: its options are read, checked and merged, and its checkpoint is found."""

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
from mhla_tasks.commandline.nulls import find_null
from mhla_tasks.commandline.problems import (
    find_options_of_another_command,
    find_repeated_option,
    find_unknown_key,
)
from mhla_tasks.commandline.sources import Source, class_path_of, mapping, read_sources
from mhla_tasks.commandline.trust import AllowError, allow_classes, allow_imports, subclass_named
from mhla_tasks.commandline.user_modules import UnknownModuleError

OBJECTS = {"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders"}
"""Arguments of the Trainer's methods that are objects, and therefore not options of the command line."""

OWN = ("config", "seed_everything", "run_dir", "allow", "print_config", "help")
"""Options of every command that are not arguments of the Trainer's methods."""

PLAN = "LIGHTNING_MHLA_PLAN"
"""Environment variable with the process id of the first process of a run and a digest of its configuration."""


@dataclass(frozen=True)
class Plan:
    """Command with its merged configuration, ready to run.

    Attributes:
        command: ``fit``, ``validate``, ``test`` or ``predict``.
        sources: configuration files and command-line options, from lowest to highest priority.
        configuration: nested options merged from all sources, in the form that LightningCLI accepts.
        checkpoint: path of the checkpoint to start from; None without a checkpoint.
        replaced: for each configuration file with options that a later source overrides, the merged configuration in which the
            values of this file are used instead; only for checking the types of these values.
        request: parser argument, such as ``--help``, that prints text instead of running the command; None to run the command.
        moves: options that were set under their former names. ``sources`` contains their new names.
    """

    command: str
    sources: tuple[Source, ...]
    configuration: dict[str, Any]
    checkpoint: str | None = None
    replaced: tuple[dict[str, Any], ...] = ()
    request: str | None = None
    moves: tuple[Move, ...] = ()


def method_options(command: str) -> list[str]:
    """Return the names of the options that a command passes to its Trainer method, such as ``ckpt_path`` for ``fit``."""
    parameters = inspect.signature(getattr(Trainer, command)).parameters
    return [name for name in parameters if name != "self" and name not in OBJECTS]


def make_plan(line: CommandLine) -> Plan:
    """Read the options of a command from the checkpoint, the configuration files and the command line; check and merge them.

    Args:
        line: the parsed command line.

    Returns:
        The command with its merged configuration.

    Raises:
        UsageError: if the command line, a configuration file or the checkpoint has an error. The message describes the first
            error that was found.
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
    requested = _requested_checkpoint(sources, run)
    try:
        checkpoint = choose_checkpoint(Path(run) if run else None, requested, line.command == "fit")
        remembered = []
        # A run folder without ckpt_path needs no options of the checkpoint, because its config.yaml is among the sources.
        if checkpoint is not None and requested is not None:
            remembered = [Source(checkpoint, remembered_options(checkpoint, sources))]
        all_sources, remembered_moves = move_keys([*remembered, *sources])
        allow_classes(all_sources)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    remembered, sources = all_sources[: len(remembered)], all_sources[len(remembered) :]
    configuration = _completed(merge(all_sources))
    replaced = tuple(_replaced(remembered, sources, configuration))
    if problem := next(filter(None, (find_null(values, all_sources) for values in (configuration, *replaced))), None):
        raise UsageError(problem)
    request = _request(line, configuration)
    return Plan(line.command, tuple(sources), configuration, checkpoint, replaced, request, (*moves, *remembered_moves))


def _replaced(
    remembered: Sequence[Source], sources: Sequence[Source], configuration: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield configurations with the values that later sources override, so that their types can be checked, too.

    There is one result for each configuration file with overridden values: the merged configuration, but with the values of
    this file in place of those that override them. If a later source chooses a different class of model or data module, the
    file's options for the overridden class are omitted.

    Args:
        remembered: options stored in a checkpoint, which have the lowest priority.
        sources: configuration files and command-line options, from lowest to highest priority.
        configuration: merged options of all sources.
    """
    for index, source in enumerate(sources):
        if source.typed:
            continue
        up_to_file = merge([*remembered, *sources[: index + 1]])
        changed = _completed(merge([*remembered, *sources, source]))
        for root in ("model", "data"):
            class_path = class_path_of(up_to_file.get(root))
            if class_path is not None and class_path != class_path_of(configuration.get(root)):
                changed[root] = configuration[root]
        if changed != configuration:
            yield changed


def check_same(plan: Plan) -> None:
    """Check, if another process of the same run started this one, that both processes have the same configuration.

    Without this check, processes would train different models if a configuration file changed while they were starting. The
    first process stores a digest of its configuration in an environment variable, which the processes that it starts inherit.

    Args:
        plan: the command and its merged configuration.

    Raises:
        UsageError: if the configurations differ.
    """
    parent, _, noted = os.environ.get(PLAN, "").partition(":")
    digest = hashlib.sha256(repr(plan.configuration).encode(errors="surrogateescape")).hexdigest()
    # The process that set the variable, if any, did not start this process as a part of its run.
    if parent != str(os.getppid()) or "LOCAL_RANK" not in os.environ:
        os.environ[PLAN] = f"{os.getpid()}:{digest}"
    elif noted != digest:
        raise UsageError(
            "a configuration file was changed while the processes of the run were started; start the run again"
        )


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
        find_options_of_another_command(sources, line.command)
        or find_unknown_key(sources, roots, trainer)
        or find_repeated_option(line)
    )


def _requested_checkpoint(sources: Sequence[Source], run: str | None) -> str | None:
    """Return the value of the option ``ckpt_path``; None if it is not set.

    A value in the ``config.yaml`` of the run folder is ignored, because only old versions of this program wrote it there.

    Args:
        sources: configuration files and command-line options, from lowest to highest priority.
        run: path of the run folder; None without ``--run_dir``.
    """
    run_configuration = str(Path(run or "") / "config.yaml")
    return _strongest([source for source in sources if source.origin != run_configuration], "ckpt_path")


def _strongest(sources: Sequence[Source], name: str) -> str | None:
    """Return the value of an option as text, from the last source that sets it; None if no source does."""
    texts: list[str] = []
    for source in sources:
        value = source.values.get(name)
        if isinstance(value, str):
            texts.append(value)
        elif value is not None and source.option is not None and source.option.value is not None:
            texts.append(source.option.value)  # a folder may be called 2024, which YAML reads as a number
    return texts[-1] if texts else None


def _completed(configuration: dict[str, Any]) -> dict[str, Any]:
    """Convert the strategy and the loggers in a configuration to the form that Lightning requires; return the configuration.

    The configuration is changed in place. The class name of a strategy is replaced by ``{"class_path": NAME}``. Loggers that
    write files get a default folder.
    """
    trainer = mapping(configuration.get("trainer"))
    strategy, loggers = trainer.get("strategy"), trainer.get("logger")
    if subclass_named(strategy, (Strategy,)) is not None:
        trainer["strategy"] = {"class_path": strategy}  # Lightning would look up a text as a registered name
    if isinstance(loggers, list):
        trainer["logger"] = [_with_folder(logger) for logger in loggers]
    elif loggers is not None:
        trainer["logger"] = _with_folder(loggers)
    return configuration


def _with_folder(logger: Any) -> Any:
    """Return a logger's options, with ``runs`` as the default folder if the logger requires a folder."""
    options = {"class_path": logger} if isinstance(logger, str) else mapping(logger)
    if not str(options.get("class_path")).endswith(("CSVLogger", "TensorBoardLogger")):
        return logger
    return {**options, "init_args": {"save_dir": "runs", **mapping(options.get("init_args"))}}


def _request(line: CommandLine, configuration: dict[str, Any]) -> str | None:
    """Return the argument that makes the parser print help or the configuration; None if the user requests neither.

    Args:
        line: the parsed command line.
        configuration: merged options of all sources.
    """
    for option in line.options:
        if option.name.endswith(HELP):
            class_path = mapping(configuration.get(option.name.removesuffix(HELP))).get("class_path")
            return f"--{option.name}={option.value or class_path}" if option.value or class_path else f"--{option.name}"
    return f"--print_config={line.last('print_config') or ''}" if line.asks_for("print_config") else None
