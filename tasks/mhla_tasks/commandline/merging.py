"""One configuration from all sources: a stronger source overrides a weaker one, option by option.

Options of classes stand under ``init_args`` in the result, however short they were written. A source that names a different
class keeps those options that both classes have. Lists and mappings of the user's own keys are replaced; ``KEY+`` appends to
a list. An option below a list belongs to its last item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning import LightningDataModule, LightningModule, Trainer

from mhla_tasks.commandline.arguments import UsageError
from mhla_tasks.commandline.signatures import option_classes, parameter_hints
from mhla_tasks.commandline.sources import Source
from mhla_tasks.commandline.trust import CLASS_OPTIONS, subclass_named

Classes = tuple[type, ...]

REQUESTS = ("print_config", "help")
"""Options that ask for a text and are no options of a run."""

ROOTS: Mapping[str, Classes] = {
    "model": (LightningModule,),
    "data": (LightningDataModule,),
    "trainer": (Trainer,),
}
"""Classes whose options stand below the options of a command."""


def merge(sources: Sequence[Source]) -> dict[str, Any]:
    """The options of all sources in one nested mapping.

    Args:
        sources: the weakest first, their classes imported by :func:`mhla_tasks.commandline.trust.allow_classes`.
    """
    configuration: dict[str, Any] = {}
    for source in sources:
        if source.option is None:
            for name, value in source.values.items():
                _put_argument(configuration, str(name), [], value, ROOTS)
            continue
        path = source.option.name.split(".")
        value = _typed_value(source, path)
        if value is not None and source.option.name not in REQUESTS and path[-1] != "help":
            _put_argument(configuration, path[0], path[1:], value, ROOTS)
    plain: dict[str, Any] = _plain(configuration)
    return plain


def _plain(value: Any) -> Any:
    """A value with texts as they were typed."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, _Typed) else value


class _Typed(str):
    """Text of a typed option, which is a mapping, a list or null only where classes or their options can stand.

    Attributes:
        meaning: its value as YAML.
    """

    meaning: Any

    def at(self, classes: Classes) -> Any:
        """The value at a place."""
        if classes and (self.meaning is None or isinstance(self.meaning, dict | list)):
            braces = isinstance(self.meaning, dict) and all(item is None for item in self.meaning.values())
            return self if braces and self.meaning else self.meaning
        return self


def _typed_value(source: Source, path: Sequence[str]) -> _Typed | None:
    """The text of a typed option; None where a file has its options."""
    value: Any = source.values
    for key in path:
        if key not in value:
            return None
        value = value[key]
    assert source.option is not None
    text = _Typed(source.option.value)
    text.meaning = value
    return text


def _put_argument(
    arguments: dict[str, Any], key: str, path: Sequence[str], value: Any, classes: Mapping[str, Classes]
) -> None:
    """Put a value into the arguments of a class, at ``key`` or below it at ``path``.

    Args:
        arguments: changed in place.
        key: name of the argument; with a plus sign at its end, values are appended to its list.
        path: keys below it.
        value: what a source gives.
        classes: those whose options may stand below each argument.
    """
    name = key.removesuffix("+")
    below = classes.get(name, ())
    if key != name and not path:
        value = value.at(below) if isinstance(value, _Typed) else value
        stored = name if name in arguments else key  # jsonargparse appends to the default
        items = [_put(None, [], item, below) for item in (value if isinstance(value, list) else [value])]
        arguments[stored] = [*_as_list(arguments.get(stored)), *items]
        return
    stored = f"{name}+" if f"{name}+" in arguments and path else name
    arguments[stored] = _put(arguments.get(stored), path, value, below)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _put(old: Any, path: Sequence[str], value: Any, classes: Classes) -> Any:
    """The new value of a place, after a source gives ``value`` for it or for the option below it at ``path``.

    Args:
        old: what weaker sources give; None if they give nothing.
        path: keys below the place.
        value: what the source gives.
        classes: those whose options may stand there; none for plain values and mappings of the user's own keys.
    """
    if not path:
        return _replace(old, value, classes)
    if isinstance(old, list) and old and classes:
        return [*old[:-1], _put(old[-1], path, value, classes)]
    options = _as_options(old, classes)
    key, *rest = path
    if not classes:
        _put_argument(options, key, rest, value, {})
        return options
    if key == "class_path" and not rest:
        return _with_class(options, str(value), classes)
    if "class_path" in options and key not in CLASS_OPTIONS:
        key, rest = "init_args", [key, *rest]
    if key == "init_args":
        arguments = dict(options.get("init_args") or {})
        value = value.at(classes) if isinstance(value, _Typed) and not rest else value
        if rest:
            _put_argument(arguments, rest[0], rest[1:], value, _below(options, classes))
        elif isinstance(value, dict):
            for name, item in _in_order(value):
                _put_argument(arguments, name, [], item, _below(options, classes))
        elif value is not None:
            raise UsageError(f"init_args takes options by name (KEY: VALUE), got {str(value)[:100]}")
        return {**options, "init_args": arguments}
    if key in CLASS_OPTIONS:
        options[key] = _put(options.get(key), rest, value, ())
        return options
    _put_argument(options, key, rest, value, _below(options, classes))
    return options


def _replace(old: Any, value: Any, classes: Classes) -> Any:
    """The new value of a place, after a source gives ``value`` for it."""
    value = value.at(classes) if isinstance(value, _Typed) else value
    if isinstance(value, list):
        return [_replace(None, item, classes) for item in value]
    if isinstance(value, dict) and classes:
        options = _as_options(old, classes)
        for key, item in _in_order(value):
            options = _put(options, [key], item, classes)
        return options
    if isinstance(value, str) and isinstance(old, dict) and subclass_named(value, classes) is not None:
        return _with_class(old, value, classes)
    return value


def _in_order(values: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """Options of one source: the class first, which settles what the others mean, and what is appended to lists last."""
    keyed = [(str(key), value) for key, value in values.items()]
    return sorted(keyed, key=lambda item: (item[0] != "class_path", item[0].endswith("+")))


def _as_options(value: Any, classes: Classes) -> dict[str, Any]:
    """A copy of the options at a place; a class that is named alone has none yet."""
    value = value.meaning if isinstance(value, _Typed) and isinstance(value.meaning, dict) else value
    if isinstance(value, dict):
        return dict(value)
    return {"class_path": value} if subclass_named(value, classes) is not None else {}


def _with_class(options: dict[str, Any], class_path: Any, classes: Classes) -> dict[str, Any]:
    """Options with a class; arguments stay that the class before it takes in the same way."""
    arguments = {**(options.get("init_args") or {}), **{k: v for k, v in options.items() if k not in CLASS_OPTIONS}}
    new, old = (subclass_named(name, classes) for name in (class_path, options.get("class_path")))
    kept = {key: value for key, value in options.items() if key in CLASS_OPTIONS}
    if "class_path" in options and (new is None or new is not old):
        kept.pop("dict_kwargs", None)
        before, after = (parameter_hints(each) if each else {} for each in (old, new))
        arguments = {
            key: value
            for key, value in arguments.items()
            if (name := key.removesuffix("+")) in after and before.get(name) == after[name]
        }
    return {**kept, "class_path": class_path, **({"init_args": arguments} if arguments else {})}


def _below(options: Mapping[str, Any], classes: Classes) -> dict[str, Classes]:
    """Classes whose options may stand below each argument of the class at a place."""
    named = subclass_named(options["class_path"], classes) if "class_path" in options else None
    kinds = (named,) if named is not None else classes if "class_path" not in options else ()
    return {name: found for kind in kinds for name, found in option_classes(kind).items()}
