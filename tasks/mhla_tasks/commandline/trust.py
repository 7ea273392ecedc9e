"""Which classes a configuration or a checkpoint may name, and where.

Nothing that a file holds may run code. jsonargparse imports and calls whatever a value names, so it is told in advance which
names it may import: each class that a source names where a parameter takes a class of that base, and nothing else. Functions,
private names, and classes under parameters that take anything (``dict[str, Any]``, ``Callable``) are refused. Packages that
``--allow`` names on the command line are trusted as they are.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jsonargparse import set_parsing_settings

from mhla_tasks.commandline.signatures import parameter_bases
from mhla_tasks.commandline.sources import Source, literal
from mhla_tasks.commandline.user_modules import allowed, import_own

PACKAGES = ("lightning", "lightning_mhla", "mhla_kernels", "mhla_tasks")
"""Packages whose classes a configuration may name; importing a module runs it, so others have to be allowed."""

MODEL_CONFIG = re.compile(r"transformers\.\w+Config")
"""Configurations of models, which are plain values: any source may name one, also inside a plain mapping."""

DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")

BUILT_IN = ("lightning.pytorch.loggers.TensorBoardLogger", "lightning.pytorch.loggers.tensorboard.TensorBoardLogger")
"""Classes that the suite itself puts into a configuration."""

CLASS_OPTIONS = ("class_path", "init_args", "dict_kwargs", "help")


class AllowError(ValueError):
    """A source names what it may not name."""


_trusted: list[str] = []
"""Packages that ``--allow`` named for the present command."""

_classes: list[str] = list(BUILT_IN)
"""Classes that sources name at the right place, by every path that leads to them."""


def allow_imports(sources: Sequence[Source]) -> None:
    """Import the modules and packages that ``--allow`` names, and let configurations name what is in them.

    Raises:
        AllowError: when a file allows packages that the command line does not.
        UnknownModuleError: when an allowed package does not exist.
    """
    given = {name for source in sources if source.typed for name in _names(source.values.get("allow"))}
    for source in sources:
        if foreign := set(_names(source.values.get("allow"))) - given:
            raise AllowError(f"{source.origin}: allow is for the command line: --allow={','.join(sorted(foreign))}")
    _trusted[:], _classes[:] = sorted(given), BUILT_IN
    _tell_parser()
    import_own(_trusted)


def allow_classes(sources: Sequence[Source]) -> None:
    """Let the parser import the classes that sources name, each where a parameter takes one of its base.

    Args:
        sources: what a checkpoint remembers, files, and typed options.

    Raises:
        AllowError: naming the source, the key and the class, for any other class, for a function, and for a class where no
            parameter takes one.
    """
    from lightning import LightningDataModule, LightningModule, Trainer

    check = _Check()
    for source in sources:
        for name, value in source.values.items():
            bases = {"model": (LightningModule,), "data": (LightningDataModule,)}.get(str(name), ())
            if name == "trainer":
                check.arguments(source, "trainer", value, [Trainer])
            elif name not in ("allow", "config"):
                check.value(source, str(name), value, bases)
    for source, path, text in check.plain:
        if any(text == name or text.startswith(f"{name}.") for name in check.found) and not source.typed:
            raise AllowError(f"{source.origin}: {path} takes no class or function, got {text}")
    _classes.extend(sorted(check.found))
    _tell_parser()


def allow_model_config(values: object) -> None:
    """Let the parser import the configuration of a model (:data:`MODEL_CONFIG`) that plain values name by ``class_path``.

    Raises:
        AllowError: when they name anything else.
    """
    check = _Check()
    check.value(Source("the checkpoint", {}), "model.network", values, ())
    _classes.extend(sorted(check.found))
    _tell_parser()


def find_class(class_path: str, bases: tuple[type, ...] = (object,), typed: bool = False) -> type:
    """Import the class that a source names.

    Args:
        class_path: module and name, such as ``lightning.pytorch.callbacks.Timer``.
        bases: classes of which it must be a subclass.
        typed: whether the user typed it, so that it may be of any installed package.

    Raises:
        AllowError: when it is of a package that is not allowed, is private, is no class, or is no subclass of the bases.
    """
    if (refused := refusal(class_path)) and not (typed and _is_installed(class_path)):
        raise AllowError(refused)
    module, _, name = class_path.rpartition(".")
    try:
        names = vars(import_module(module))
        found = getattr(sys.modules[module], name, None)  # some packages import their classes when asked
    except ImportError as error:
        raise AllowError(f"cannot import {module} ({error})") from error
    if found is None:
        close = get_close_matches(name, [other for other, item in names.items() if isinstance(item, type)], 1, 0.5)
        raise AllowError(f"there is no such class{f'; did you mean {close[0]}?' if close else ''}")
    if not isinstance(found, type):
        raise AllowError("is no class")
    if not typed and (refused := refusal(f"{found.__module__}.{found.__qualname__}")):
        raise AllowError(refused)
    if not issubclass(found, bases):
        raise AllowError(f"is no {' or '.join(sorted({base.__name__ for base in bases}))}")
    return found


def refusal(class_path: str) -> str | None:
    """Why a class may not be imported, with the way out; None if it may."""
    if not NAME.fullmatch(class_path) or len(class_path) > 500:
        return "is no name of a class"
    if "." not in class_path or _is_within(class_path, [*_trusted, *allowed]) or class_path in _classes:
        return None
    if any(part.startswith("_") for part in class_path.split(".")):
        return "is private, and configurations may name public classes alone"
    if _is_within(class_path, PACKAGES):
        return None
    package = class_path.split(".")[0]
    if close := get_close_matches(package, PACKAGES, 1, 0.8):
        return f"cannot import {class_path.rpartition('.')[0]}; did you mean {close[0]}?"
    return f"{package} is no package that configurations may import; if you trust it: --allow={package}"


class _Check:
    """Walks through the values of sources, with the bases that each parameter takes.

    Attributes:
        found: paths of the classes that may be imported: as named, and where they are defined.
        plain: source, key and text of each value that looks like a path where no class is taken.
    """

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.plain: list[tuple[Source, str, str]] = []
        self._named: dict[str, list[type]] = {}

    def value(self, source: Source, path: str, value: Any, bases: tuple[type, ...]) -> None:
        """Check what a source gives for a parameter that takes instances of ``bases``, and other values."""
        if isinstance(value, list):
            for item in value:
                self.value(source, path, item, bases)
        elif isinstance(value, str):
            self._text(source, path, value, bases)
            if isinstance(meaning := literal(value), dict | list):  # the parser reads such a text as what it means
                self.value(source, path, meaning, bases)
        elif isinstance(value, dict):
            for key in ("class_path", "help"):
                if key in value and (key == "class_path" or bases):
                    self._named_class(source, path, value[key], bases)
            if "class_path" not in value:  # the parser takes the base itself for the class of such options
                named = [
                    base for base in bases if dataclasses.is_dataclass(base) and refusal(next(_paths(base))) is None
                ]
                self.found |= {name for base in named for name in _paths(base)}
            kinds = self._named.get(path) or list(bases)
            inner = value.get("init_args") if "class_path" in value or "init_args" in value else None
            self.arguments(source, path, inner, kinds)
            self.arguments(source, path, {k: v for k, v in value.items() if k not in CLASS_OPTIONS}, kinds)
            self.arguments(source, path, value.get("dict_kwargs"), [])

    def arguments(self, source: Source, path: str, values: Any, kinds: Sequence[type]) -> None:
        """Check arguments of a class, by name; ``kinds`` are the classes that it may be."""
        if not isinstance(values, dict):
            self.value(source, path, values, ())
            return
        for kind in kinds:
            self._add_options(kind)
        for key, value in values.items():
            name = str(key).removesuffix("+")
            bases = tuple({base for kind in kinds for base in parameter_bases(kind).get(name, ())})
            self.value(source, f"{path}.{name}", value, bases)

    def _text(self, source: Source, path: str, text: str, bases: tuple[type, ...]) -> None:
        if bases and _is_file(text):  # the parser would read it
            raise AllowError(
                f"{source.origin}: {path}: {text[:100]} is a file; options are read from files that end in .yaml"
            )
        if bases and "." not in text:
            for kind in _called(text, bases):  # a class may be named without its module
                self._add(path, kind, f"{kind.__module__}.{kind.__qualname__}")
        elif bases and DOTTED.fullmatch(text) and (_is_within(text, PACKAGES) or source.typed):
            self._named_class(source, path, text, bases)
        elif DOTTED.fullmatch(text):
            self.plain.append((source, path, text))

    def _named_class(self, source: Source, path: str, name: Any, bases: tuple[type, ...]) -> None:
        if isinstance(name, str) and "." not in name and bases:
            self._text(source, path, name, bases)
            return
        try:
            if not isinstance(name, str):
                raise AllowError("is no name of a class")
            if _is_within(name, [*_trusted, *allowed]):  # trusted as it is
                with suppress(ImportError):  # the parser says what is wrong
                    import_module(name.rpartition(".")[0])
                return
            if MODEL_CONFIG.fullmatch(name):
                kind = _model_config(name)
            elif not bases:
                raise AllowError("no class can be given here")
            else:
                kind = find_class(name, bases, source.typed)
        except AllowError as error:
            raise AllowError(f"{source.origin}: {path}: {str(name)[:100]}: {error}") from error
        self._add(path, kind, name)

    def _add_options(self, kind: type) -> None:
        """Add the dataclasses that a class takes as groups of options: the parser names them by itself."""
        for base in {base for bases in parameter_bases(kind).values() for base in bases}:
            paths = set(_paths(base))
            if dataclasses.is_dataclass(base) and not paths <= self.found and refusal(next(_paths(base))) is None:
                self.found |= paths
                self._add_options(base)

    def _add(self, path: str, kind: type, name: str) -> None:
        self._named.setdefault(path, []).append(kind)
        self.found |= {each for each in (name, *_paths(kind)) if DOTTED.fullmatch(each)}


def subclass_named(name: Any, bases: tuple[type, ...]) -> type | None:
    """The class of a name, with its module or without, that is imported and a subclass of one of ``bases``; None if none is."""
    if not isinstance(name, str):
        return None
    if "." not in name:
        return next(_called(name, bases), None)
    module, _, last = name.rpartition(".")
    found = getattr(sys.modules.get(module), last, None)
    return found if isinstance(found, type) and issubclass(found, bases) else None


def _called(name: str, bases: tuple[type, ...]) -> Iterator[type]:
    """Classes of a name, among the bases and their subclasses that are imported and may be named."""
    for kind in bases:
        if kind.__name__ == name and refusal(f"{kind.__module__}.{kind.__qualname__}") is None:
            yield kind
        yield from _called(name, tuple(type.__subclasses__(kind)))


def _paths(kind: type) -> Iterator[str]:
    """Where a class is defined, and the packages around that which import it: the parser names it by the shortest path."""
    module = kind.__module__
    while module:
        if module == kind.__module__ or getattr(sys.modules.get(module), kind.__name__, None) is kind:
            yield f"{module}.{kind.__qualname__}"
        module = module.rpartition(".")[0]


def _model_config(path: str) -> type:
    import transformers

    found = getattr(transformers, path.rpartition(".")[2], None)
    base = transformers.PretrainedConfig
    if not (isinstance(found, type) and issubclass(found, base)) or found is base:
        raise AllowError("is no configuration of transformers, such as transformers.LlamaConfig")
    return found


def _is_installed(class_path: str) -> bool:
    """Whether the package of a class is found outside of the working folder, whose modules only ``--allow`` lets in."""
    if not DOTTED.fullmatch(class_path):
        return False
    try:
        spec = find_spec(class_path.split(".")[0])
    except (ImportError, ValueError):
        return False
    places = [Path(place) for place in (spec.submodule_search_locations or [spec.origin or ""] if spec else [])]
    return spec is not None and all(place.parent.resolve() != Path.cwd().resolve() for place in places)


def _is_file(text: str) -> bool:
    try:
        return os.path.exists(text) and not os.path.isdir(text)
    except ValueError:  # with a zero byte
        return False


def _is_within(path: str, names: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _tell_parser() -> None:
    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=[*_trusted, *_classes],
        instantiate_subclass_spec_in_any=False,
    )


def _names(value: object) -> list[str]:
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return [str(name) for name in value] if isinstance(value, list) else []
