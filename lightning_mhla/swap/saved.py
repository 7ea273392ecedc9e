"""Functions and classes for saving and loading diffusers and transformers models with replaced attention.

diffusers' and transformers' own ``save_pretrained`` and ``from_pretrained`` write and read the files, so features such as
sharding and variants work as usual. The original model classes would ignore the new attention and only warn about unexpected
weights. Therefore at least one value in the saved ``config.json`` is replaced by a text that makes the original class fail. The
error message quotes this text, which tells the user how to load the model. Subclasses of the original classes restore the
original values, and replace the attention again when a model is built.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from lightning_mhla.swap.host import SAVED
from lightning_mhla.system.untrusted import read_json

NOTICE = (
    "the attention of this model was replaced (lightning-mhla): load it with lightning_mhla.load_swapped, or with an Auto "
    "class and trust_remote_code=True"
)
"""Text saved in ``config.json`` in place of a value, so that the libraries reject the file and their error quotes it."""

REMOTE = "modeling_swapped"
"""Name of the Python module, saved in a model's folder, that ``auto_map`` in its ``config.json`` refers to."""

MODULE = '''"""The classes of this model come with the package lightning-mhla."""

from {source} import {names}

__all__ = [{quoted}]
'''
"""Template of the Python module that :func:`write_module` writes."""

ORIGINAL = "original"
"""Key in the saved record of a swap for the configuration values that :data:`NOTICE` and other guards replace."""

_derived: dict[tuple[type, type], type] = {}


def derive(mixin: type, host: type, name: str, **attributes: Any) -> type:
    """Return the class that is derived from a mixin and a diffusers or transformers class.

    The first call for each pair of classes creates the derived class.

    Args:
        mixin: subclass of :class:`SwappedClass` that saves and loads replaced attention.
        host: model or configuration class from diffusers or transformers. A class that was derived from ``mixin`` before is
            returned unchanged.
        name: name of the derived class, which can be imported under this name from the module of ``mixin``.
        attributes: class attributes of the derived class.
    """
    if issubclass(host, mixin):
        return host
    # One class for each pair, so that all models of a kind share it.
    if (mixin, host) not in _derived:
        base_attributes = {"__module__": mixin.__module__, "mixin": mixin, "host": host}
        _derived[mixin, host] = type(name, (mixin, host), {**base_attributes, **attributes})
    return _derived[mixin, host]


class SwappedClass:
    """Base class of mixins that add replaced attention to model and configuration classes from diffusers and transformers.

    :func:`derive` combines a mixin with such a class, and sets the attributes of the resulting class.

    Attributes:
        host: original class, such as ``LlamaForCausalLM``.
        mixin: mixin that was combined with ``host``.
    """

    host: type
    mixin: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the data for pickling or copying an instance, which is rebuilt from its mixin and its original class.

        Classes that :func:`derive` creates cannot always be imported by name, so pickle cannot refer to the class itself.
        """
        parts: Any = super().__reduce_ex__(protocol)
        return (blank, (self.mixin, self.host), *parts[2:])


class SwappedModel(SwappedClass):
    """Base class of the mixins for model classes, with methods to load and save weights."""

    _all_weights: ClassVar[bool] = False
    """Whether files must contain exactly the weights of the model. Weights of the new attention are always required."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any = None, *args: Any, output_loading_info: bool = False, **options: Any
    ) -> Any:
        """Load a saved model with replaced attention.

        Args:
            pretrained_model_name_or_path: folder of the model, or its name on the Hugging Face Hub.
            args: further positional arguments of ``from_pretrained`` in diffusers or transformers.
            output_loading_info: whether to also return which weights were missing or unexpected.
            options: further keyword arguments of ``from_pretrained`` in diffusers or transformers.

        Returns:
            The model; with ``output_loading_info``, a tuple of the model and a dict with loading information, such as
            ``missing_keys``.

        Raises:
            ValueError: if the weights in the files do not fit the model.
        """
        source = pretrained_model_name_or_path
        model, info = super().from_pretrained(source, *args, output_loading_info=True, **options)  # type: ignore[misc]
        check_complete(cls.__name__, source, info, cls._all_weights)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, *args: Any, **options: Any) -> None:
        """Save the model, and remove older weight files that would be loaded in place of the new ones.

        The arguments are the same as for ``save_pretrained`` in diffusers or transformers.
        """
        signature = inspect.signature(self.host.save_pretrained)  # type: ignore[attr-defined]
        arguments = signature.bind(self, *args, **options).arguments
        super().save_pretrained(*args, **options)  # type: ignore[misc]
        if arguments.get("is_main_process", True):
            self._remove_older(arguments)

    def _remove_older(self, arguments: Mapping[str, Any]) -> None:
        """Remove older weight files that diffusers or transformers would load in place of those just saved.

        Args:
            arguments: arguments with which ``save_pretrained`` was called, by name.
        """
        raise NotImplementedError


def blank(mixin: Any, host: type) -> Any:
    """Create an instance of the class derived from ``mixin`` and ``host`` without calling its constructor, for unpickling."""
    kind = mixin.derive_from(host)
    return kind.__new__(kind)


def write_module(folder: str | Path, source: str, names: Sequence[str]) -> None:
    """Write the Python module from which Auto classes with ``trust_remote_code=True`` import a saved model's classes.

    The module is named ``modeling_swapped.py``. It only imports the classes from this package.

    Args:
        folder: folder of the saved model; created if it does not exist.
        source: name of the module in this package that defines the classes.
        names: names of the classes.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    quoted = ", ".join(f'"{name}"' for name in names)
    text = MODULE.format(source=source, names=", ".join(names), quoted=quoted)
    (path / f"{REMOTE}.py").write_text(text, encoding="utf-8")


def guarded(config: Mapping[str, Any], replaced: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration with replaced values, so that the original diffusers or transformers class rejects it.

    :func:`restored` reverses this.

    Args:
        config: configuration to save. Its entry ``swapped_attention`` is a mapping.
        replaced: new values by the names of the entries to replace.

    Returns:
        A copy of the configuration with the new values. Its entry ``swapped_attention`` also holds the original values.
    """
    original = {name: config[name] for name in replaced if name in config}
    return {**config, **replaced, SAVED: {**config[SAVED], ORIGINAL: {"names": sorted(replaced), "values": original}}}


def restored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a saved configuration with the original values of the entries that :func:`guarded` replaced.

    A configuration without replaced values is copied unchanged.
    """
    record = config.get(SAVED)
    if not isinstance(record, Mapping) or ORIGINAL not in record:
        return dict(config)
    original = record[ORIGINAL]
    unchanged = {name: value for name, value in config.items() if name not in original["names"]}
    record = {name: value for name, value in record.items() if name != ORIGINAL}
    return {**unchanged, **original["values"], SAVED: record}


def remove_stale(folder: str | Path, stem: str, variant: str | None, suffix: str) -> None:
    """Remove weight files of an earlier save that diffusers or transformers would load instead of those just saved.

    The libraries themselves remove old shards. They do not remove an index whose shards are gone, an unsharded file next to
    new shards, or safetensors files next to a new ``.bin`` file.

    Args:
        folder: folder of the model.
        stem: beginning of the names of the weight files, such as ``model``.
        variant: name of the variant that was just saved, such as ``fp16``; None for weights without a variant.
        suffix: suffix of the files that were just saved, ``safetensors`` or ``bin``.
    """
    path, marked = Path(folder), f".{variant}" if variant else ""
    for kind in ("safetensors", "bin"):
        single_file, index = path / f"{stem}{marked}.{kind}", path / f"{stem}.{kind}.index{marked}.json"
        listed = {Path(name).name for name in read_json(index)["weight_map"].values()} if index.is_file() else set()
        shards = {name for name in listed if re.fullmatch(rf"{re.escape(stem)}.*-\d{{5}}-of-\d{{5}}.*\.{kind}", name)}
        if kind != suffix and suffix == "bin":  # safetensors are read before .bin
            stale = [single_file, index, *(path / shard for shard in shards)]
        elif shards and all((path / shard).is_file() for shard in shards):  # a complete sharded save is the newest one
            stale = [single_file]
        else:
            stale = [index]
        for file in stale:
            file.unlink(missing_ok=True)


def check_complete(name: str, source: Any, info: Mapping[str, Any], all_weights: bool) -> None:
    """Check that the saved files of a loaded model contained its weights.

    Args:
        name: name of the model's class, for the error message.
        source: folder or hub name that the model was loaded from, for the error message.
        info: loading information from diffusers or transformers. ``missing_keys`` lists weights that the files lack, and
            ``unexpected_keys`` lists weights that the model does not have.
        all_weights: True to check all weights; False to check only that no weight of the new attention is missing.

    Raises:
        ValueError: if a checked weight is missing or, with ``all_weights``, if the files contain a weight that the model does
            not have.
    """
    missing = sorted(info.get("missing_keys", ()))
    wrong = [f"{key} is missing" for key in missing if all_weights or ".swapped." in key or ".processor." in key]
    if all_weights:
        wrong += [f"{key} is unknown" for key in sorted(info.get("unexpected_keys", ()))]
    if wrong:
        raise ValueError(
            f"{source}: the weights do not match the config.json next to them, of a {name}: "
            f"{', '.join(wrong[:3])} ({len(wrong)} in all)"
        )
