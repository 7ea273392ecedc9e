"""Agreement of the model and the data module on the values of options that both have, such as ``num_classes``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from lightning_mhla.data.labelled import LabelledShards, contradiction
from lightning_mhla.training.agreement import agrees, disagreement, shared_options
from mhla_tasks.commandline.sources import Source, mapping

log = logging.getLogger(__name__)


def agree(options: Any, sources: Sequence[Source]) -> None:
    """Give the model and the data module the same value for options that must agree, such as ``num_classes``.

    If one of the two values is None, the other is used for both. If they differ, the one with the higher priority is used for
    both. Command-line options have priority over configuration files, and later files over earlier ones. If no source sets
    either value, that of the model is used. There is one exception: if sources set ``context`` (the number of tokens in a
    sequence) for both, the data module keeps a value that is smaller than that of the model. If ``num_classes`` of the data
    module is None, and the data module can count the classes in its training data, their number is used for both.

    Args:
        options: parsed options of the command (a jsonargparse Namespace), changed in place.
        sources: configuration files and command-line options, from lowest to highest priority.

    Raises:
        FileNotFoundError: if classes must be counted, and the training data does not exist.
        ValueError: if two values contradict each other and have the same priority, because both are in the same file or on the
            command line; or if ``num_classes`` of the model differs from the number of classes in the data.
    """
    parts = {part: (options.get(part) or {}).get("init_args", {}) for part in ("model", "data")}
    _count_classes(options, parts, sources)
    for name in shared_options(parts["model"]):
        values = {part: arguments[name] for part, arguments in parts.items() if name in arguments}
        if len(values) < 2 or values["model"] == values["data"]:
            continue
        if None in values.values():  # only one of them has a value
            for arguments in parts.values():
                arguments[name] = next(value for value in values.values() if value is not None)
            continue
        ranks = {part: _rank(part, name, sources) for part in parts}
        if min(ranks.values()) >= 0 and agrees(name, values["model"], values["data"]):
            continue
        if max(ranks.values()) < 0:  # the value of the model comes from a checkpoint, or both are defaults
            parts["data"][name] = values["model"]
            continue
        if ranks["model"] == ranks["data"]:
            raise ValueError(disagreement(name, values["model"], values["data"]))
        stronger, weaker = sorted(ranks, key=lambda part: ranks[part], reverse=True)
        parts[weaker][name] = values[stronger]
        log.info("%s.%s=%s is also used for the %s", stronger, name, values[stronger], weaker)


def _rank(part: str, name: str, sources: Sequence[Source]) -> int:
    """Return the priority of an option's value as a number, which is larger for a higher priority.

    Args:
        part: ``model`` or ``data``, the object that has the option.
        name: name of the option.
        sources: configuration files and command-line options, from lowest to highest priority.

    Returns:
        The number of sources if the option is on the command line. Otherwise the index of the last configuration file that sets
        the option; -1 if no source does.
    """
    ranks = [
        len(sources) if source.typed else index
        for index, source in enumerate(sources)
        if name in _arguments(source.values.get(part))
    ]
    return max(ranks, default=-1)


def _count_classes(options: Any, parts: Mapping[str, Any], sources: Sequence[Source]) -> None:
    """Set ``num_classes`` of model and data to the number of classes in the training data, if it is None for the data.

    Nothing changes if the model or the data module does not have this option, if the data module cannot count classes, or if
    the training data does not exist and ``num_classes`` of the model is set.

    Args:
        options: parsed options of the command (a jsonargparse Namespace).
        parts: constructor arguments under the keys ``model`` and ``data``, changed in place.
        sources: configuration files and command-line options, from lowest to highest priority.

    Raises:
        FileNotFoundError: if the training data does not exist, and ``num_classes`` of the model is not set either.
        ValueError: if a source sets ``num_classes`` of the model to a different number, or the data has fewer classes than the
            model needs.
    """
    data = parts["data"]
    if data.get("num_classes", 0) is not None or "num_classes" not in parts["model"]:
        return
    module, _, name = str(options.data.class_path).rpartition(".")
    kind = getattr(import_module(module), name)
    try:
        names = kind.count_classes(data) if issubclass(kind, LabelledShards) else None
    except FileNotFoundError:
        if parts["model"]["num_classes"] is None:
            raise
        return  # validation does not need the training data; if it is needed, the data module raises the error
    if names is None:
        return
    setting_sources = [
        source for source in sources if _arguments(source.values.get("model")).get("num_classes") is not None
    ]
    number = parts["model"]["num_classes"]
    model_module, _, model_name = str(options.model.class_path).rpartition(".")
    least = getattr(getattr(import_module(model_module), model_name), "least_classes", 1)
    if len(names) < least:
        raise ValueError(
            f"the training data {data['train']} has {len(names)} class ({', '.join(names)}), and {model_name} needs at least "
            f"{least}; name the folder that has one subfolder for each class, or shards of several classes (--data.train)"
        )
    if setting_sources and number != len(names):
        raise ValueError(
            contradiction(data["train"], names, f"model num_classes={number} ({setting_sources[-1].origin})")
        )
    data["num_classes"] = parts["model"]["num_classes"] = len(names)


def _arguments(value: Any) -> dict[str, Any]:
    """Return the constructor arguments in the options of a model or data module.

    Arguments may be at the top level, as after ``--data.batch_size=8``, or below ``init_args``. The result contains both.

    Args:
        value: the options. Any value that is not a dict gives an empty dict.
    """
    options = mapping(value)
    return {**options, **mapping(options.get("init_args"))}
