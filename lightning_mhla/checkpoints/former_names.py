"""Renaming of options that have moved into groups: configurations and checkpoints may use the former names for one release."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Self

from lightning import LightningModule

from lightning_mhla.checkpoints.io import read_header
from lightning_mhla.system.lightning_private import restricted_classmethod

log = logging.getLogger(__name__)

TRAINING = ("optimizer", "ema_decay", "ema_batch", "checkpointing", "compile", "compile_options")

SHAPE = (
    "dim", "depth", "heads", "key_value_heads", "key_width", "value_width", "mlp_width", "mlp_ratio", "patch_size", "stem",
    "pad_to", "frequency_shift", "mlp_norm_eps", "tie_embeddings", "initializer_range",
)  # fmt: skip

SHARDS = ("max_skipped", "shuffle_window", "cache_dir", "cache_bytes")

MOVED: Mapping[str, Mapping[str, str]] = {
    "model": {**{name: f"training.{name}" for name in TRAINING}, **{name: f"shape.{name}" for name in SHAPE}},
    "data": {name: f"shards.{name}" for name in SHARDS},
}
"""Current name ``GROUP.NAME`` of each moved option of models and of data modules, by former name.

:func:`moved_options` selects the options that have moved in a particular class. The option ``cache_dir`` of ``PythonSource``,
for example, has not moved.
"""


def moved_options(root: str, kind: type) -> dict[str, str]:
    """Map former option names of a class to their current names, such as ``compile`` to ``training.compile``.

    Some constructor arguments became fields of an options dataclass, which is now passed to the constructor as one argument,
    such as ``training``. An option counts as moved if the constructor does not accept its former name, and the default value of
    the dataclass argument has a field with this name.

    Args:
        root: ``"model"`` if ``kind`` is a model class, or ``"data"`` if it is a data module class.
        kind: class of the model or data module.

    Returns:
        Dict from former name to current name. A current name has the form ``ARGUMENT.FIELD``.
    """
    defaults = _defaults(kind)
    moved = {}
    for old, new in MOVED[root].items():
        group, name = new.split(".")
        # The fields of the default value tell what the group accepts, without evaluating type annotations.
        if old not in defaults and hasattr(defaults.get(group), name):
            moved[old] = new
    return moved


def present_options(root: str, kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the options that a checkpoint stores under former names, and leave all other options unchanged.

    Args:
        root: ``"model"`` if ``kind`` is a model class, or ``"data"`` if it is a data module class.
        kind: class of the model or data module.
        options: options of the class in the checkpoint.

    Returns:
        Options by current names. For example, ``{"compile": True}`` becomes ``{"training": {"compile": True}}``.
    """
    return in_groups(options, moved_options(root, kind))


def stored_options(root: str, kind: type, options: Mapping[str, Any], origin: object) -> dict[str, Any]:
    """Rename the options that a checkpoint stores under former names, and log a warning that lists the renamed ones.

    Args:
        root: ``"model"`` if ``kind`` is a model class, or ``"data"`` if it is a data module class.
        kind: class of the model or data module.
        options: options of the class in the checkpoint.
        origin: path of the checkpoint, for the warning.

    Returns:
        Options by current names. For example, ``{"compile": True}`` becomes ``{"training": {"compile": True}}``.
    """
    names = {old: new for old, new in moved_options(root, kind).items() if old in options}
    if names:
        moved = ", ".join(f"{root}.{old} is now {root}.{new}" for old, new in names.items())
        log.warning("%s (from %s)", moved, origin)
    return in_groups(options, names)


def in_groups(options: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a copy of nested options in which each option with a former name has its current name.

    For example, ``{"compile": True}`` becomes ``{"training": {"compile": True}}``.

    Args:
        options: options by former or current names.
        names: dict from former name to current name, such as ``{"compile": "training.compile"}``.
    """
    result = {name: value for name, value in options.items() if name not in names}
    for old, new in names.items():
        if old in options:
            group, name = new.split(".")
            present = result.get(group)
            result[group] = {**(present if isinstance(present, dict) else {}), name: options[old]}
    return result


def _defaults(kind: type) -> dict[str, Any]:
    """Return the default value of each constructor argument of a class, by name.

    For an argument without a default, the value is ``inspect.Parameter.empty``. If the constructor takes ``**kwargs``, the
    arguments of the base classes are included.
    """
    defaults: dict[str, Any] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        parameters = inspect.signature(base.__init__).parameters  # type: ignore[misc]
        # Entries of subclasses come last, because they override those of base classes.
        defaults = {**{name: parameter.default for name, parameter in parameters.items()}, **defaults}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return defaults


class TakesFormerNames(LightningModule):
    """Mixin for training modules whose options were renamed, so that they load checkpoints with the former names.

    If a former name is used as a constructor argument, the error message gives the current name.
    """

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Create the module, unless a constructor argument has a former option name.

        Raises:
            TypeError: if an argument has a former name. The message gives the current name of the option.
        """
        _reject_former_names(cls, options)
        return super().__new__(cls)

    @restricted_classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *arguments: Any, **options: Any) -> Self:  # noqa: N805  a classmethod
        """Load a module as Lightning does, but also accept local checkpoints that store options under former names.

        Args:
            checkpoint_path: path, URL or open file of the checkpoint.
            *arguments: further arguments of Lightning's method.
            **options: further arguments of Lightning's method, and module options that override those in the checkpoint.

        Raises:
            TypeError: if a module option is given by its former name.
        """
        _reject_former_names(cls, options)
        memory: Mapping[str, Any] = {}
        if isinstance(checkpoint_path, str | Path) and Path(checkpoint_path).is_file():
            memory = read_header(Path(checkpoint_path)).get("hyper_parameters") or {}
        # Lightning drops stored options that the constructor does not take, so they are given as arguments.
        present = stored_options("model", cls, memory, checkpoint_path)
        groups = {name: value for name, value in present.items() if name not in memory}
        if (
            "_instantiator" in memory
        ):  # Lightning's instantiator takes plain options, and replaces dataclasses by defaults
            options = {name: _plain(value) for name, value in options.items()}
        return super().load_from_checkpoint(checkpoint_path, *arguments, **{**groups, **options})


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _reject_former_names(kind: type, options: Mapping[str, Any]) -> None:
    for old, new in moved_options("model", kind).items() if options else ():
        if old in options:
            group, name = new.split(".")
            takes = type(_defaults(kind)[group]).__name__
            raise TypeError(f"{kind.__name__} takes {old} as an option of {group}: {group}={takes}({name}=...)")
