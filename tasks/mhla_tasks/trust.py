"""Names that a configuration or a checkpoint may use: classes of known packages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

from jsonargparse import set_parsing_settings

from mhla_tasks.own_modules import allowed, find_in_working_folder, import_own
from mhla_tasks.sources import Source

PACKAGES = ("lightning", "lightning_mhla", "mhla_kernels", "mhla_tasks", "torchmetrics")
"""Packages whose classes a configuration may name; importing a module runs it, so others have to be allowed."""

SHAPES = re.compile(r"transformers(\.\w+)*\.\w+Config")
"""Configurations of models: plain values, which any file may name."""

_allowed = list(PACKAGES)


class AllowError(ValueError):
    """A file says what only the command line may say."""


def allow_imports(sources: Sequence[Source]) -> None:
    """Let configurations name classes of :data:`PACKAGES`, of those that ``--allow`` names, and what was typed itself.

    Modules and packages of these names are found in the working folder too. Those of ``--allow`` are imported, so that
    attention kinds that they define are known.

    Raises:
        AllowError: when a file allows packages that the command line does not.
        UnknownModuleError: when an allowed package does not exist.
    """
    typed = [source for source in sources if source.origin.startswith("-")]
    given = {name for source in typed for name in _names(source.values.get("allow"))}
    for source in sources:
        if foreign := set(_names(source.values.get("allow"))) - given:
            raise AllowError(f"{source.origin}: allow is for the command line: --allow={','.join(sorted(foreign))}")
    paths = {text for source in typed for text in _strings(source.values) if re.fullmatch(r"\w+(\.\w+)+", text)}
    _allowed[:] = [*PACKAGES, *sorted(given | paths)]
    find_in_working_folder(paths)
    allow_shapes([source.values for source in sources])
    import_own(sorted(given))


def allow_shapes(values: object) -> None:
    """Let the values of a configuration or a checkpoint name the configurations of models (:data:`SHAPES`) that they name."""
    shapes = {name for text in _strings(values) if SHAPES.fullmatch(text) for name in _both_names(text)}
    _allowed.extend(sorted(shapes))
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=list(_allowed))


def _both_names(path: str) -> set[str]:
    """A configuration's name in transformers, and that of the module that defines it."""
    import transformers

    found = getattr(transformers, path.rpartition(".")[2], None)
    return {path} if found is None else {path, f"{found.__module__}.{found.__qualname__}"}


def _names(value: object) -> list[str]:
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return [str(name) for name in value] if isinstance(value, list) else []


def _strings(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in _strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return [value] if isinstance(value, str) else []


def refusal(class_path: str) -> str | None:
    """Why a class may not be imported, with the way out; None if it may."""
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", class_path) or len(class_path) > 500:
        return "is no name of a class"
    known = [*_allowed, *allowed]
    if "." not in class_path or any(class_path == name or class_path.startswith(f"{name}.") for name in known):
        return None
    package = class_path.split(".")[0]
    if close := get_close_matches(package, PACKAGES, 1, 0.8):
        return f"cannot import {class_path.rpartition('.')[0]}; did you mean {close[0]}?"
    return f"{package} is no package that configurations may import; if you trust it: --allow={package}"
