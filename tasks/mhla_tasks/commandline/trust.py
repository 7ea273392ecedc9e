"""Check of the classes that configurations and checkpoints may name, so that reading a file cannot run arbitrary code.

jsonargparse imports and calls any class or function that a value names. This module therefore restricts it to a list of
permitted import paths. The list contains a class only if an option names it and the parameter of this option accepts its
instances. Functions, private names, and classes for parameters of any type (``dict[str, Any]``, ``Callable``) are rejected.
Classes in packages that ``--allow`` names on the command line are permitted without these checks.
"""

# Longer than other modules because the rules for permitted classes must be readable together.

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
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
"""Packages whose classes any configuration may name. Importing a module runs its code, so other packages need ``--allow``."""

LOADABLE = (*PACKAGES, "transformers")
"""Packages whose classes checkpoints of the suite name."""

MODEL_CONFIG = re.compile(r"transformers\.\w+Config")
"""Pattern of transformers' model configurations. They hold only plain values, so any source may name one, even in a mapping for
which no parameter declares a class."""

DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")

BUILT_IN = ("lightning.pytorch.loggers.TensorBoardLogger", "lightning.pytorch.loggers.tensorboard.TensorBoardLogger")
"""Import paths of classes that the suite itself adds to a configuration."""

CLASS_OPTIONS = ("class_path", "init_args", "dict_kwargs", "help")


class AllowError(ValueError):
    """Error for a class or package that a configuration or a checkpoint names although this is not permitted."""


_trusted: list[str] = []
"""Packages that the user of the current command allows with ``--allow``."""

_classes: list[str] = list(BUILT_IN)
"""Import paths of the classes that the parser may import for the current command."""


def allow_imports(sources: Sequence[Source]) -> None:
    """Import the modules and packages that ``--allow`` names, and permit configurations to name classes in them.

    Args:
        sources: configuration files and command-line options.

    Raises:
        AllowError: if a configuration file sets ``allow`` to packages that ``--allow`` does not name on the command line.
        UnknownModuleError: if a module or package does not exist.
    """
    allowed_names = {name for source in sources if source.typed for name in _names(source.values.get("allow"))}
    for source in sources:
        if foreign := set(_names(source.values.get("allow"))) - allowed_names:
            raise AllowError(
                f"{source.origin}: allow works only on the command line: --allow={','.join(sorted(foreign))}"
            )
    _trusted[:], _classes[:] = sorted(allowed_names), BUILT_IN
    _tell_parser()
    import_own(_trusted)


def allow_classes(sources: Sequence[Source]) -> None:
    """Permit the parser to import the classes that options name, if the parameters of these options accept them.

    Args:
        sources: options from a checkpoint, from configuration files and from the command line.

    Raises:
        AllowError: if an option names a function, a class that its parameter does not accept, or a class for a parameter that
            accepts only plain values. The message contains the full name of the option, the class, and the file or
            command-line argument that names the class.
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
    # The list of the parser is global: a class permitted for one parameter must not be named by a file for any other one.
    for source, path, text in check.plain:
        if _is_within(text, check.found) and not source.typed:
            raise AllowError(f"{source.origin}: {path} accepts no class or function, got {text}")
    _classes.extend(sorted(check.found))
    _tell_parser()


def allow_model_config(values: object) -> None:
    """Permit the parser to import the transformers configuration class that a checkpoint names.

    Args:
        values: the model's option ``network`` in the checkpoint: a mapping with ``class_path``, or None.

    Raises:
        AllowError: if ``class_path`` does not name a configuration class of transformers, such as ``transformers.LlamaConfig``.
    """
    check = _Check()
    check.value(Source("the checkpoint", {}), "model.network", values, ())
    _classes.extend(sorted(check.found))
    _tell_parser()


def permit_loading() -> None:
    """Lift the restrictions of a command, so that jsonargparse may import every class that checkpoints of this project name.

    A command restricts jsonargparse in its process to the classes that the command names. Lightning's ``load_from_checkpoint``
    also uses jsonargparse. Without a call of this function, code that runs after a command, such as the next cell of a
    notebook, could load only checkpoints with the classes of that command.
    """
    set_parsing_settings(import_path_allowlist=list(LOADABLE))


def find_class(class_path: str, bases: tuple[type, ...] = (object,), typed: bool = False) -> type:
    """Import a class that a configuration or the command line names, if this is permitted.

    Args:
        class_path: import path of the class, such as ``lightning.pytorch.callbacks.Timer``.
        bases: base classes. The class must be a subclass of at least one of them.
        typed: whether the command line names the class, which may then be in any installed package.

    Returns:
        The class.

    Raises:
        AllowError: if the package is not permitted, if the module cannot be imported, or if the name is private, unknown, not a
            class, or not a subclass of any of ``bases``.
    """
    if (refused := refusal(class_path)) and not (typed and _is_installed(class_path)):
        raise AllowError(refused)
    module, _, name = class_path.rpartition(".")
    try:
        names = vars(import_module(module))
        kind = getattr(sys.modules[module], name, None)  # some packages import their classes on access
    except ImportError as error:
        raise AllowError(f"cannot import {module} ({error})") from error
    if kind is None:
        close = get_close_matches(
            name, [item_name for item_name, item in names.items() if isinstance(item, type)], 1, 0.5
        )
        raise AllowError(f"there is no such class{f'; did you mean {close[0]}?' if close else ''}")
    if not isinstance(kind, type):
        raise AllowError("is not a class")
    # A public name may be an alias of a class that is defined in a package that is not allowed.
    if not typed and (refused := refusal(f"{kind.__module__}.{kind.__qualname__}")):
        raise AllowError(refused)
    if not issubclass(kind, bases):
        raise AllowError(f"is not a {' or '.join(sorted({base.__name__ for base in bases}))}")
    return kind


def refusal(class_path: str) -> str | None:
    """Return an error message if configurations must not name a class; None if they may name it.

    Args:
        class_path: import path of the class, such as ``lightning.pytorch.callbacks.Timer``. A name without a module is
            accepted, because the parser finds only imported classes by such a name.
    """
    if not NAME.fullmatch(class_path) or len(class_path) > 500:
        return "is not the name of a class"
    if "." not in class_path or _is_within(class_path, [*_trusted, *allowed]) or class_path in _classes:
        return None
    if any(part.startswith("_") for part in class_path.split(".")):
        return "is private, and configurations may name only public classes"
    if _is_within(class_path, PACKAGES):
        return None
    package = class_path.split(".")[0]
    if close := get_close_matches(package, PACKAGES, 1, 0.8):
        return f"cannot import {class_path.rpartition('.')[0]}; did you mean {close[0]}?"
    return f"{package} is not a package that configurations may import; if you trust it: --allow={package}"


class _Check:
    """Collector of the classes that options name, which rejects classes that the parameter of an option does not accept.

    Attributes:
        found: import paths of the permitted classes. If a class has several import paths, all of them are included.
        plain: source, key and text of each value that looks like an import path although its parameter does not accept classes.
    """

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.plain: list[tuple[Source, str, str]] = []
        self._named: dict[str, list[type]] = {}

    def value(self, source: Source, path: str, value: Any, bases: tuple[type, ...]) -> None:
        """Check that an option's value, with all values nested in it, names only classes that the parameters accept.

        Args:
            source: configuration file or command-line option that sets the value.
            path: full name of the option, for messages.
            value: value of the option.
            bases: classes whose instances the parameter accepts; empty if it accepts only plain values.

        Raises:
            AllowError: if a class is not accepted.
        """
        if isinstance(value, list):
            for item in value:
                self.value(source, path, item, bases)
        elif isinstance(value, str):
            self._text(source, path, value, bases)
            if isinstance(meaning := literal(value), dict | list):  # the parser parses such a text
                self.value(source, path, meaning, bases)
        elif isinstance(value, dict):
            for key in ("class_path", "help"):
                if key in value and (key == "class_path" or bases):
                    self._named_class(source, path, value[key], bases)
            if "class_path" not in value:  # the parser then uses the base itself as the class
                named_classes = [
                    base for base in bases if dataclasses.is_dataclass(base) and refusal(next(_paths(base))) is None
                ]
                self.found |= {name for base in named_classes for name in _paths(base)}
            kinds = self._named.get(path) or list(bases)
            self.arguments(source, path, value.get("init_args"), kinds)
            self.arguments(source, path, {k: v for k, v in value.items() if k not in CLASS_OPTIONS}, kinds)
            self.arguments(source, path, value.get("dict_kwargs"), [])

    def arguments(self, source: Source, path: str, values: Any, kinds: Sequence[type]) -> None:
        """Check that the arguments of a class name only classes that its parameters accept.

        Args:
            source: configuration file or command-line option that sets the arguments.
            path: full name of the option that contains the arguments, for messages.
            values: mapping from argument name to value. Any other value is checked as a plain value.
            kinds: classes that may have these arguments.

        Raises:
            AllowError: if a class is not accepted.
        """
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
        # The parser would read the file, whose classes are not checked.
        if bases and os.path.exists(text) and not os.path.isdir(text):
            raise AllowError(
                f"{source.origin}: {path}: {text[:100]} is a file; options are read from files that end in .yaml"
            )
        if bases and "." not in text:
            for kind in _classes_named(text, bases):  # a class that is named without its module
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
                raise AllowError("is not the name of a class")
            if _is_within(name, [*_trusted, *allowed]):
                with suppress(ImportError):  # the parser reports the error
                    import_module(name.rpartition(".")[0])
                return
            if MODEL_CONFIG.fullmatch(name):
                kind = _model_config(name)
            elif not bases:
                raise AllowError("a class is not accepted here")
            else:
                kind = find_class(name, bases, source.typed)
        except AllowError as error:
            raise AllowError(f"{source.origin}: {path}: {str(name)[:100]}: {error}") from error
        self._add(path, kind, name)

    def _add_options(self, kind: type) -> None:
        """Permit the dataclasses that a class accepts as arguments, and the dataclasses nested in them.

        The parser imports these dataclasses even if no configuration names them.
        """
        for base in {base for bases in parameter_bases(kind).values() for base in bases}:
            paths = set(_paths(base))
            if dataclasses.is_dataclass(base) and not paths <= self.found and refusal(next(_paths(base))) is None:
                self.found |= paths
                self._add_options(base)

    def _add(self, path: str, kind: type, name: str) -> None:
        self._named.setdefault(path, []).append(kind)
        self.found |= {import_path for import_path in (name, *_paths(kind)) if DOTTED.fullmatch(import_path)}


def subclass_named(name: Any, bases: tuple[type, ...]) -> type | None:
    """Find a class by name among base classes and their imported subclasses.

    Args:
        name: name of the class, with or without its module. A value that is not a string matches no class.
        bases: the base classes.

    Returns:
        The class; None if no class has this name.
    """
    if not isinstance(name, str):
        return None
    if "." not in name:
        return next(_classes_named(name, bases), None)
    module, _, last = name.rpartition(".")
    kind = getattr(sys.modules.get(module), last, None)
    return kind if isinstance(kind, type) and issubclass(kind, bases) else None


def _classes_named(name: str, bases: tuple[type, ...]) -> Iterator[type]:
    """Yield the classes called ``name`` that configurations may name, among base classes and their imported subclasses."""
    for kind in bases:
        if kind.__name__ == name and refusal(f"{kind.__module__}.{kind.__qualname__}") is None:
            yield kind
        yield from _classes_named(name, tuple(type.__subclasses__(kind)))


def _paths(kind: type) -> Iterator[str]:
    """Yield the import paths of a class: first that in the module that defines it, then those in enclosing packages.

    The parser may replace the path in a configuration with a shorter one, so all of them have to be permitted.
    """
    module = kind.__module__
    while module:
        if module == kind.__module__ or getattr(sys.modules.get(module), kind.__name__, None) is kind:
            yield f"{module}.{kind.__qualname__}"
        module = module.rpartition(".")[0]


def _model_config(path: str) -> type:
    import transformers

    kind = getattr(transformers, path.rpartition(".")[2], None)
    base = transformers.PretrainedConfig
    if not (isinstance(kind, type) and issubclass(kind, base)) or kind is base:
        raise AllowError("is not a configuration of transformers, such as transformers.LlamaConfig")
    return kind


def _is_installed(class_path: str) -> bool:
    """Return whether the package of a class is installed in a place other than the current working folder.

    For modules in the working folder, the user must pass ``--allow`` instead.
    """
    if not DOTTED.fullmatch(class_path):
        return False
    try:
        spec = find_spec(class_path.split(".")[0])
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    locations = [Path(location) for location in spec.submodule_search_locations or [spec.origin or ""]]
    return all(location.parent.resolve() != Path.cwd().resolve() for location in locations)


def _is_within(path: str, names: Collection[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _tell_parser() -> None:
    # The most specific entry counts, so the packages that `permit_loading` permitted are denied by name.
    set_parsing_settings(
        import_path_denylist=["*", *LOADABLE],
        import_path_allowlist=[*_trusted, *_classes],
        instantiate_subclass_spec_in_any=False,
    )


def _names(value: object) -> list[str]:
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return [str(name) for name in value] if isinstance(value, list) else []
