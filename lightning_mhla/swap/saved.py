"""Folders of swapped models: classes that build the swap again, and a ``config.json`` that other classes reject.

The library's own ``save_pretrained`` and ``from_pretrained`` do the work, so its rules for indexes, shards, variants and
dtypes hold. A class that does not know the swap would build softmax attention from the same folder and only warn about
unexpected weights. The saved ``config.json`` therefore holds one value that the library rejects, with :data:`NOTICE` in it;
the classes here put the right value back before anything is built.
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
"""Value that no library accepts where it is found in a saved ``config.json``."""

REMOTE = "modeling_swapped"
"""Name of the module beside a saved model that its ``auto_map`` refers to."""

MODULE = '''"""The classes of this model come with the package lightning-mhla."""

from {source} import {names}

__all__ = [{quoted}]
'''

ORIGINAL = "original"
"""Entry of the saved record that holds the values that :data:`NOTICE` and its like replace."""

_derived: dict[tuple[type, type], type] = {}


def derive(mixin: type, host: type, name: str, **attributes: Any) -> type:
    """A class of ``mixin`` over ``host``, one and the same at every call.

    Args:
        mixin: knows the swap; attribute ``derive_from`` makes the class of a host.
        host: class of the library.
        name: of the new class, which its module finds again.
        attributes: of the new class.
    """
    if (mixin, host) not in _derived:
        own = {"__module__": mixin.__module__, "mixin": mixin, "host": host}
        _derived[mixin, host] = type(name, (mixin, host), {**own, **attributes})
    return _derived[mixin, host]


class SwappedClass:
    """Base of the classes that know the swap and that :func:`derive` puts over a class of the library.

    Attributes:
        host: class of the library.
        mixin: class that knows the swap.
    """

    host: type
    mixin: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        """See Python; a copy or a pickle finds the class again by what it is derived from."""
        parts: Any = super().__reduce_ex__(protocol)
        return (blank, (self.mixin, self.host), *parts[2:])


def blank(mixin: Any, host: type) -> Any:
    """An empty instance of the class that ``mixin`` derives from ``host``, for copies and pickles."""
    kind = mixin.derive_from(host)
    return kind.__new__(kind)


def write_module(folder: str | Path, source: str, names: Sequence[str]) -> None:
    """Write the module that ``auto_map`` refers to.

    Args:
        folder: of the saved model.
        source: module that the classes come from.
        names: of the classes.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    quoted = ", ".join(f'"{name}"' for name in names)
    text = MODULE.format(source=source, names=", ".join(names), quoted=quoted)
    (path / f"{REMOTE}.py").write_text(text, encoding="utf-8")


def guarded(config: Mapping[str, Any], replaced: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` with some values replaced; :func:`restored` puts them back.

    Args:
        config: to be saved.
        replaced: new values by name.
    """
    original = {name: config[name] for name in replaced if name in config}
    return {**config, **replaced, SAVED: {**config[SAVED], ORIGINAL: {"names": sorted(replaced), "values": original}}}


def restored(config: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` before :func:`guarded`; one that was not guarded stays as it is."""
    record = config.get(SAVED)
    if not isinstance(record, Mapping) or ORIGINAL not in record:
        return dict(config)
    original = record[ORIGINAL]
    kept = {name: value for name, value in config.items() if name not in original["names"]}
    record = {name: value for name, value in record.items() if name != ORIGINAL}
    return {**kept, **original["values"], SAVED: record}


def remove_stale(folder: str | Path, stem: str, variant: str | None, suffix: str) -> None:
    """Remove weights of an earlier save that the library would read in place of those just saved.

    The libraries remove old shards, but not an index without shards, a single file beside new shards, or safetensors
    beside a new ``.bin``.

    Args:
        folder: folder of the model.
        stem: beginning of the names of files with weights.
        variant: the variant that was saved.
        suffix: end of the names of those that were saved, ``safetensors`` or ``bin``.
    """
    path, marked = Path(folder), f".{variant}" if variant else ""
    for kind in ("safetensors", "bin"):
        whole, index = path / f"{stem}{marked}.{kind}", path / f"{stem}.{kind}.index{marked}.json"
        listed = {Path(name).name for name in read_json(index)["weight_map"].values()} if index.is_file() else set()
        shards = {name for name in listed if re.fullmatch(rf"{re.escape(stem)}.*-\d{{5}}-of-\d{{5}}.*\.{kind}", name)}
        if kind != suffix and suffix == "bin":
            stale = [whole, index, *(path / shard for shard in shards)]
        elif shards and all((path / shard).is_file() for shard in shards):
            stale = [whole]
        else:
            stale = [index]
        for file in stale:
            file.unlink(missing_ok=True)


def check_complete(name: str, source: Any, info: Mapping[str, Any], all_weights: bool = False) -> None:
    """Refuse a model whose weights were not all found.

    Args:
        name: of its class.
        source: where it was loaded from.
        info: what the library says about the weights: ``missing_keys`` and others.
        all_weights: also those that the library would initialise, or leave unused, with a warning.

    Raises:
        ValueError: naming the first of them.
    """
    missing = sorted(info.get("missing_keys", ()))
    wrong = [f"{key} is missing" for key in missing if all_weights or ".swapped." in key or ".processor." in key]
    if all_weights:
        wrong += [f"{key} is unknown" for key in sorted(info.get("unexpected_keys", ()))]
    if wrong:
        raise ValueError(
            f"{source}: the weights are not those of the config.json beside them, for a {name}: "
            f"{', '.join(wrong[:3])} ({len(wrong)} in all)"
        )
