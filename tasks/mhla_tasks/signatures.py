"""Options of the suite's own classes, read from their text: a wrong key is reported before the class is imported.

A class that the text alone does not settle (one from elsewhere, or with options of any name) is imported by whoever asks.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
import typing
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

OWN = ("mhla_kernels", "lightning_mhla", "mhla_tasks")


@dataclass(frozen=True)
class Signature:
    """The parameters of a class.

    Attributes:
        name: name of the class.
        options: names of its parameters; for those that take dataclasses, the signatures of these.
    """

    name: str
    options: dict[str, list[Signature]]


def written_signature(class_path: str) -> Signature | None:
    """The signature of a class of the suite from its text; None where that does not settle it."""
    module, _, name = class_path.rpartition(".")
    found = _find(module, name)
    return None if found is None else _signature(*found, ())


def imported_signature(of: type, above: tuple[type, ...] = ()) -> Signature | None:
    """The signature of a class that is imported; None if it takes options of any name.

    Not that of a class ``above``, whose options it is among: a class may name itself.
    """
    parameters = inspect.signature(of.__init__).parameters  # type: ignore[misc]
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return None
    try:
        hints = typing.get_type_hints(of.__init__)  # type: ignore[misc]
    except NameError:  # of a module that imports types for checkers alone
        hints = {}
    options = {}
    for name in [name for name in parameters if name != "self"]:
        hint = hints.get(name)
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        taken = [each for each in (typing.get_args(hint) if union else (hint,)) if _is_dataclass(each)]
        known = [imported_signature(each, (*above, of)) for each in taken if each not in (*above, of)]
        options[name] = [each for each in known if each is not None]
    return Signature(of.__name__, options)


def _is_dataclass(hint: object) -> typing.TypeGuard[type]:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


@lru_cache
def _parse(module: str) -> tuple[dict[str, ast.ClassDef], dict[str, tuple[str, str]]]:
    """Classes of a module, and what it imports by name: the module and the name there; nothing if it is not the suite's."""
    root, *parts = module.split(".")
    spec = find_spec(root) if root in OWN and all(part.isidentifier() for part in parts) else None
    for folder in spec.submodule_search_locations or [] if spec else []:
        place = Path(folder, *parts)
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                body = ast.parse(file.read_text(encoding="utf-8")).body
                imports = [node for node in body if isinstance(node, ast.ImportFrom) and not node.level]
                return (
                    {node.name: node for node in body if isinstance(node, ast.ClassDef)},
                    {alias.asname or alias.name: (str(n.module), alias.name) for n in imports for alias in n.names},
                )
    return {}, {}


def _find(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """A class by the name that it has in a module, and the module that it is written in."""
    seen: set[tuple[str, str]] = set()
    while (module, name) not in seen:  # a package may import its own modules
        seen.add((module, name))
        classes, imports = _parse(module)
        if name in classes:
            return module, classes[name]
        module, name = imports.get(name, (module, name))
    return None


def _signature(module: str, node: ast.ClassDef, above: tuple[ast.ClassDef, ...]) -> Signature | None:
    options = _options(module, node)
    if options is None:
        return None
    inside = {name: _dataclasses(where, hint, (*above, node)) for name, (where, hint) in options.items()}
    return Signature(node.name, inside)


def _options(module: str, node: ast.ClassDef) -> dict[str, tuple[str, ast.expr | None]] | None:
    """Parameters of a class, each with its annotation and the module that this is written in."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            given = item.args
            if given.kwarg is not None:
                return None
            return {
                each.arg: (module, each.annotation) for each in [*given.posonlyargs, *given.args, *given.kwonlyargs][1:]
            }
    options: dict[str, tuple[str, ast.expr | None]] = {}
    for base in node.bases:
        found = _find(module, base.id) if isinstance(base, ast.Name) else None
        known = None if found is None else _options(*found)
        if known is None or not _is_written_dataclass(node):
            return known  # that of the first base, as Python looks for it
        options |= known
    if not _is_written_dataclass(node):
        return None
    for item in node.body:
        kept = "ClassVar", "keyword(arg='init', value=Constant(value=False))"
        if not isinstance(item, ast.AnnAssign) or any(word in ast.dump(item) for word in kept):
            continue
        if isinstance(item.target, ast.Name):
            options[item.target.id] = (module, item.annotation)
    return options


def _dataclasses(module: str, hint: ast.expr | None, above: tuple[ast.ClassDef, ...]) -> list[Signature]:
    """Signatures of the dataclasses that an annotation names, alone or in a union."""
    found = [_find(module, each.id) for each in _alternatives(hint) if isinstance(each, ast.Name)]
    taken = [each for each in found if each is not None and _is_written_dataclass(each[1]) and each[1] not in above]
    known = [_signature(*each, above) for each in taken]
    return [each for each in known if each is not None]


def _alternatives(hint: ast.expr | None) -> list[ast.expr | None]:
    """``A | B | C`` by parts."""
    if isinstance(hint, ast.BinOp) and isinstance(hint.op, ast.BitOr):
        return _alternatives(hint.left) + _alternatives(hint.right)
    return [hint]


def _is_written_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.dump(decorator) for decorator in node.decorator_list)
