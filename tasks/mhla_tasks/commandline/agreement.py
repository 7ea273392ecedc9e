"""Options that model and data share: what is said of one is taken for both."""

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
    """Take what is said of model or data for both, where both have the option; the stronger source wins.

    Args:
        options: options of the command, changed in place.
        sources: options that the user gave, the weakest first; all typed options are equally strong.

    Raises:
        ValueError: when one source says two things.
    """
    parts = {part: (options.get(part) or {}).get("init_args", {}) for part in ("model", "data")}
    _count_classes(options, parts, sources)
    for name in shared_options(parts["model"]):
        values = {part: arguments[name] for part, arguments in parts.items() if name in arguments}
        if len(values) < 2 or values["model"] == values["data"]:
            continue
        if None in values.values():  # one of them says it
            for arguments in parts.values():
                arguments[name] = next(value for value in values.values() if value is not None)
            continue
        ranks = {part: _rank(part, name, sources) for part in parts}
        if min(ranks.values()) >= 0 and agrees(name, values["model"], values["data"]):
            continue
        if max(ranks.values()) < 0:  # a checkpoint remembers the model, or both are defaults
            parts["data"][name] = values["model"]
            continue
        if ranks["model"] == ranks["data"]:
            raise ValueError(disagreement(name, values["model"], values["data"]))
        stronger, weaker = sorted(ranks, key=lambda part: ranks[part], reverse=True)
        parts[weaker][name] = values[stronger]
        log.info("%s.%s=%s is taken for the %s too", stronger, name, values[stronger], weaker)


def _rank(part: str, name: str, sources: Sequence[Source]) -> int:
    """Place of the strongest source that gives an option of model or data; -1 if none does."""
    files = [source for source in sources if not source.typed]
    ranks = [
        len(files) if source.typed else files.index(source)
        for source in sources
        if name in _arguments(source.values.get(part))
    ]
    return max(ranks, default=-1)


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
