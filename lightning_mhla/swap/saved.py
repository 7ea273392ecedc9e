"""Shared parts of saving swapped models: derived classes that repeat the swap, and a ``config.json`` that others reject.

The library's own ``save_pretrained`` and ``from_pretrained`` write and read the files, so its rules for indexes, shards,
variants and dtypes hold. The library's original class would build softmax attention from the same folder and only warn about
unexpected weights. The saved ``config.json`` therefore holds a value that the library rejects with a message that quotes
:data:`NOTICE`. The derived classes restore the right value before anything is built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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

ORIGINAL = "original"
"""Key in the saved record of a swap for the configuration values that :data:`NOTICE` and other guards replace."""

_derived: dict[tuple[type, type], type] = {}


def derive(mixin: type, host: type, name: str, **attributes: Any) -> type:
    """Return a class derived from ``mixin`` and ``host``. Every call with the same arguments returns the same class.

    Args:
        mixin: mixin that replaces the attention; its ``derive_from`` calls this function.
        host: model or configuration class of a library.
        name: name of the derived class, under which it can be imported from the module of ``mixin``.
        attributes: class attributes of the derived class.
    """
    if (mixin, host) not in _derived:
        base_attributes = {"__module__": mixin.__module__, "mixin": mixin, "host": host}
        _derived[mixin, host] = type(name, (mixin, host), {**base_attributes, **attributes})
    return _derived[mixin, host]


class SwappedClass:
    """Base class of mixins that add replaced attention to a library's model or configuration class; see :func:`derive`.

    Attributes:
        host: class of the library that is extended, such as ``LlamaForCausalLM``.
        mixin: subclass of this class that :func:`derive` combined with ``host``.
    """

    host: type
    mixin: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle or copy an instance by its mixin and host, since not every derived class can be imported by its name."""
        parts: Any = super().__reduce_ex__(protocol)
        return (blank, (self.mixin, self.host), *parts[2:])


def blank(mixin: Any, host: type) -> Any:
    """Create an uninitialized instance of the class derived from ``mixin`` and ``host``, for copying and unpickling."""
    kind = mixin.derive_from(host)
    return kind.__new__(kind)


def write_module(folder: str | Path, source: str, names: Sequence[str]) -> None:
    """Write the Python module that ``auto_map`` in a saved model's ``config.json`` refers to.

    Args:
        folder: folder of the saved model.
        source: name of the module that the written module imports the classes from.
        names: names of the classes.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    quoted = ", ".join(f'"{name}"' for name in names)
    text = MODULE.format(source=source, names=", ".join(names), quoted=quoted)
    (path / f"{REMOTE}.py").write_text(text, encoding="utf-8")


def guarded(config: Mapping[str, Any], replaced: Mapping[str, Any]) -> dict[str, Any]:
    """Replace values of a configuration so that the library's own classes reject it. :func:`restored` undoes this.

    Args:
        config: configuration to save.
        replaced: new values by the names of the entries to replace.

    Returns:
        A copy of the configuration with the new values. Its entry ``swapped_attention`` also holds the original values.
    """
    original = {name: config[name] for name in replaced if name in config}
    return {**config, **replaced, SAVED: {**config[SAVED], ORIGINAL: {"names": sorted(replaced), "values": original}}}


def restored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a saved configuration with the original values that :func:`guarded` replaced, if it replaced any."""
    record = config.get(SAVED)
    if not isinstance(record, Mapping) or ORIGINAL not in record:
        return dict(config)
    original = record[ORIGINAL]
    unchanged = {name: value for name, value in config.items() if name not in original["names"]}
    record = {name: value for name, value in record.items() if name != ORIGINAL}
    return {**unchanged, **original["values"], SAVED: record}


def remove_stale(folder: str | Path, stem: str, variant: str | None, suffix: str) -> None:
    """Remove weight files of an earlier save that the library would read in place of those just saved.

    The libraries themselves remove old shards, but not an index whose shards are gone, a single file beside new shards, or
    safetensors files beside a new ``.bin`` file.

    Args:
        folder: folder of the model.
        stem: beginning of the names of weight files, such as ``model``.
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


def check_complete(name: str, source: Any, info: Mapping[str, Any], all_weights: bool = False) -> None:
    """Check that all weights of a loaded model were read from its saved files.

    Args:
        name: name of the model's class, for the error message.
        source: folder or name that the model was loaded from, for the error message.
        info: loading information that the library returned, with the entries ``missing_keys`` and ``unexpected_keys``.
        all_weights: whether to check every weight. If false, only weights of the new attention are checked; the library
            initializes other missing weights, and ignores unknown ones, with a warning.

    Raises:
        ValueError: if a weight is missing or, with ``all_weights``, not part of the model.
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
