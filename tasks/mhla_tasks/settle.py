"""Options as a command takes them: the folder of a run, what a checkpoint remembers, what model and data must agree on."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lightning_mhla.checkpoints.io import RECOVERY, find_checkpoints, read_header, resolve_checkpoint
from lightning_mhla.checkpoints.runs import RunFolder
from lightning_mhla.checkpoints.sharded import is_sharded
from lightning_mhla.data.labelled import LabelledShards, contradiction
from mhla_tasks.shipped import PREFIX, names
from mhla_tasks.sources import Source, mapping, read_sources
from mhla_tasks.trust import refusal

log = logging.getLogger(__name__)

MEMORY = (("model", "hyper_parameters"), ("data", "datamodule_hyper_parameters"))


def with_config_of_run(words: list[str]) -> list[str]:
    """The command line, with the configuration that a run was started with where it names a run folder and none."""
    folders = [value for source in read_sources(words) if isinstance(value := source.values.get("run_dir"), str)]
    if any(word.split("=")[0] in ("--config", "-c") for word in words) or not folders:
        return words
    kept = Path(folders[-1]) / "config.yaml"
    return [words[0], f"--config={kept}", *words[1:]] if kept.is_file() else words


def with_folder_of_logger(words: list[str]) -> list[str]:
    """The command line, with a folder for a logger that is named by its class alone."""
    named = [word for word in words if re.fullmatch(r"--trainer\.logger=[\w.]*(CSV|TensorBoard)Logger", word)]
    if not named or any(word.startswith("--trainer.logger.") for word in words):
        return words
    after = words.index(named[-1]) + 1
    return [*words[:after], "--trainer.logger.save_dir=runs", *words[after:]]


def with_class_of_strategy(words: list[str]) -> list[str]:
    """The command line, with a strategy that is named by its class given as a class: the parser takes any text for a name."""
    option = "--trainer.strategy"
    found: list[str] = []
    for word in words:
        if found and found[-1] == option and not word.startswith("-"):
            word = f"{found.pop()}={word}"
        key, _, value = word.partition("=")
        found.append(f"{option}.class_path={value}" if key == option and _is_class(value) else word)
    return found


def _is_class(value: str) -> bool:
    return re.fullmatch(r"(\w+\.)+\w+|\w+Strategy", value) is not None


def settle(options: Any, subcommand: str) -> RunFolder | None:
    """Point a command at the folder of a run: its files go there.

    Args:
        options: options of the command, changed in place.
        subcommand: only ``fit`` writes there, and locks it.
    """
    path = Path(options.run_dir)
    if subcommand != "fit":
        return None
    folder = RunFolder(path)
    options.trainer.default_root_dir = str(path)
    own = {"save_dir": str(path), "name": "", "version": ""}
    if options.trainer.logger in (None, True):
        options.trainer.logger = [
            Namespace(class_path="lightning.pytorch.loggers.TensorBoardLogger", init_args=Namespace(own))
        ]
    loggers = options.trainer.logger or []
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        if logger.class_path.rsplit(".", 1)[-1] in ("TensorBoardLogger", "CSVLogger"):
            logger.init_args.update(Namespace(own))
            if folder.taken and logger.class_path.endswith("CSVLogger"):
                folder.keep("metrics.csv")  # Lightning deletes the table of an earlier start
        elif logger.init_args.get("save_dir", path) in (None, "", "."):  # W&B and others write into the working folder
            logger.init_args["save_dir"] = str(path)
    return folder


def write_beside_checkpoint(options: Any, subcommand: str, sources: Sequence[Source]) -> None:
    """Have predictions go into a folder of their checkpoint's run, ``predict``, ``predict-2`` and so on, unless told otherwise.

    Args:
        options: options of the command, changed in place.
        subcommand: validate, test or predict; only predict writes.
        sources: options that the user gave.
    """
    said = {name for source in sources for name in mapping(source.values.get("trainer"))}
    checkpoint = options.get("ckpt_path")
    if not checkpoint or said & {"logger", "default_root_dir"} or not Path(checkpoint).exists():
        return
    folder = Path(checkpoint)
    if folder.is_file() or is_sharded(folder):
        folder = next(
            (parent for parent in folder.parents if parent.name not in ("checkpoints", RECOVERY)), folder.parent
        )
    if subcommand == "predict":
        names = (f"predict-{number}" if number > 1 else "predict" for number in itertools.count(1))
        folder = next(folder / name for name in names if not (folder / name).exists())
    options.trainer.logger, options.trainer.default_root_dir = False, str(folder)


AGREE = ("num_classes", "image_size", "sample_size", "channels", "context")
"""Options that model and data have under one name, and that mean one thing."""


def agree(options: Any, sources: Sequence[Source]) -> None:
    """Take what is said of model or data for both, where both have the option; the stronger source wins.

    Args:
        options: options of the command, changed in place.
        sources: options that the user gave, the weakest first; all words of the command line are equally strong.

    Raises:
        ValueError: when one source says two things.
    """
    parts = {part: options.get(part, {}).get("init_args", {}) for part in ("model", "data")}
    _count_classes(options, parts, sources)
    files = [source for source in sources if not source.typed]
    for name in AGREE:
        values = {part: given[name] for part, given in parts.items() if name in given}
        if len(values) < 2 or values["model"] == values["data"]:
            continue
        if None in values.values():  # one of them says it
            for given in parts.values():
                given[name] = next(value for value in values.values() if value is not None)
            continue
        rank = {}
        for part in parts:
            said = [
                len(files) if source.typed else files.index(source)
                for source in sources
                if name in _arguments(source.values.get(part))
            ]
            rank[part] = max(said, default=-1)
        if name == "context" and min(rank.values()) >= 0 and values["data"] < values["model"]:
            continue  # shorter samples will do
        if max(rank.values()) < 0:  # a checkpoint remembers the model, or both are defaults
            parts["data"][name] = values["model"]
            continue
        if rank["model"] == rank["data"]:
            raise ValueError(
                f"model.{name}={values['model']} and data.{name}={values['data']} must be equal; "
                "give one of them, and it is taken for both"
            )
        stronger, weaker = sorted(rank, key=lambda part: rank[part], reverse=True)
        parts[weaker][name] = values[stronger]
        log.info("%s.%s=%s is taken for the %s too", stronger, name, values[stronger], weaker)


def _count_classes(options: Any, parts: Mapping[str, Any], sources: Sequence[Source]) -> None:
    """Take the number of classes from data that names them, where no option of the data says it.

    Raises:
        ValueError: when an option of the model says another.
    """
    data = parts["data"]
    if data.get("num_classes", 0) is not None or "num_classes" not in parts["model"]:
        return
    module, _, name = str(options.data.class_path).rpartition(".")
    kind = getattr(import_module(module), name)
    names = kind.count_classes(data) if issubclass(kind, LabelledShards) else None
    if names is None:
        return
    said = [source for source in sources if _arguments(source.values.get("model")).get("num_classes") is not None]
    number = parts["model"]["num_classes"]
    if said and number != len(names):
        raise ValueError(contradiction(data["train"], names, f"model num_classes={number} ({said[-1].origin})"))
    data["num_classes"] = parts["model"]["num_classes"] = len(names)


def _arguments(value: Any) -> dict[str, Any]:
    """Arguments of a class that a source gives; short forms (``--data.batch_size=8``) included."""
    options = mapping(value)
    return {**options, **mapping(options.get("init_args"))}


def find_missing(words: Sequence[str], subcommand: str) -> str:
    """An error message for a configuration, or a run to evaluate, that does not exist; empty if there is none."""
    pairs = [
        (word.partition("=")[0], word.partition("=")[2] or after) for word, after in itertools.pairwise([*words, ""])
    ]
    for name, path in pairs:
        if name not in ("--run_dir", "--config", "-c") or "://" in path or path.lstrip().startswith(("{", "[")):
            continue
        if not path or Path(path).exists():
            continue
        if name != "--run_dir":
            near = path.partition("configs/")[2]
            hint = (
                f"; the package brings it as {PREFIX}{near}"
                if near in names()
                else f"; {PREFIX} lists those of the package"
            )
            return f"--config={path}: the file does not exist{hint}"
        if subcommand != "fit":
            return f"--run_dir={path}: the folder does not exist"
    return ""


def check_trainer(trainer: Any) -> None:
    """Reject numbers that Lightning would divide by.

    Raises:
        ValueError: naming the option.
    """
    for name in ("accumulate_grad_batches", "check_val_every_n_epoch"):
        value = trainer.get(name)
        if value is not None and value < 1:
            raise ValueError(f"--trainer.{name}={value} must be at least 1")


def leave_out_monitors(trainer: Any, subcommand: str) -> None:
    """Without a logger there is nothing that a LearningRateMonitor could write to; Lightning would stop."""
    callbacks = trainer.callbacks if isinstance(trainer.callbacks, list) else []
    kept = [callback for callback in callbacks if not callback.class_path.endswith("LearningRateMonitor")]
    if len(kept) < len(callbacks):
        if subcommand == "fit":
            log.info("LearningRateMonitor is left out: there is no logger")
        trainer.callbacks = kept


def inside(source: Source, subcommand: str) -> Source:
    """The options of a subcommand, where a file keeps them under its name."""
    own = source.values.get(subcommand)
    if set(source.values) != {subcommand} or not isinstance(own, dict):
        return source
    lines = {path[1:]: line for path, line in source.lines.items() if len(path) > 1}
    return replace(source, values=own, lines=lines)


def of_another_command(sources: Sequence[Source], subcommand: str, commands: Collection[str]) -> str:
    """An error message for the first file that holds the options of another command; empty if there is none."""
    for source in sources:
        others = [name for name in commands if name != subcommand and isinstance(source.values.get(name), dict)]
        if others and not source.typed:
            return (
                f"{source.origin} holds options of `lightning {others[0]}`, and this is `lightning {subcommand}`; run that "
                f"command, or take the options out from under `{others[0]}:`"
            )
    return ""


def network_of(checkpoint: str) -> dict[str, Any] | None:
    """The configuration of transformers that the model of a checkpoint was built from; None where it has none."""
    path = Path(checkpoint)
    memory = (read_header(resolve_checkpoint(path)).get("hyper_parameters") or {}) if path.exists() else {}
    return memory.get("network")


def defaults_from(checkpoint: str, sources: Sequence[Source]) -> dict[str, Any]:
    """Model and data options that a checkpoint remembers, except where a source names another class.

    Args:
        checkpoint: a file, the folder of a sharded checkpoint or of a run, or one of Lightning's words such as ``last``.
        sources: all other options.

    Raises:
        ValueError: when it looks like a path, but holds no checkpoint that can be read.
    """
    path = Path(checkpoint)
    if not path.exists():
        if "://" in checkpoint or ("/" not in checkpoint and not path.suffix):
            return {}
        raise ValueError(f"ckpt_path {checkpoint} does not exist")
    if path.is_dir() and not is_sharded(path):
        below = find_checkpoints(path)
        if not below:
            return {}
        path = below[0]
    try:
        content = read_header(path)
        found = [(root, content.get(key, {})) for root, key in MEMORY]
    except Exception as error:
        raise ValueError(f"ckpt_path {checkpoint} is no checkpoint that can be read safely ({error})") from error
    options = {}
    for root, memory in found:
        named = [s.values[root]["class_path"] for s in sources if "class_path" in mapping(s.values.get(root))]
        if not isinstance(memory, dict) or not all(isinstance(name, str) for name in memory):
            raise ValueError(f"ckpt_path {checkpoint}: its options of the {root} are no named values")
        class_path = memory.get("_class_path")
        if class_path and (refused := refusal(str(class_path))):
            raise ValueError(f"ckpt_path {checkpoint} was trained with the class {str(class_path)[:80]}: {refused}")
        if class_path and (not named or named[-1] == class_path):
            known = {name: value for name, value in memory.items() if not name.startswith("_")}
            options[root] = {"class_path": class_path, "init_args": known}
    return options
