"""Merging of all sources into one configuration: a stronger source overrides a weaker one, option by option.

In the result, options of classes are always under ``init_args``, even if they were given in short form. If a source names a
different class, the options that both classes have stay. Lists, and mappings with free keys, are replaced; ``KEY+`` appends to
a list. An option below a list applies to its last item.
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
"""Options that only print a text, and are not part of a run's configuration."""

ROOTS: Mapping[str, Classes] = {
    "model": (LightningModule,),
    "data": (LightningDataModule,),
    "trainer": (Trainer,),
}
"""Options of a command whose value is an object with options, each with the base classes of that object."""


def merge(sources: Sequence[Source]) -> dict[str, Any]:
    """Merge the options of all sources into one nested mapping, where stronger sources override weaker ones.

    Args:
        sources: configuration files and command-line options, the weakest first. The classes that they name must have been
            imported by :func:`mhla_tasks.commandline.trust.allow_classes`.
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
    """Convert all :class:`_Typed` strings in nested dicts and lists to plain strings."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, _Typed) else value


class _Typed(str):
    """String subclass for the value of a command-line option, which also holds the value parsed as YAML.

    Parameters that take classes or their options use the parsed value. Other parameters use the text, which the parser
    interprets by the parameter's type.

    Attributes:
        meaning: the text parsed as YAML.
    """

    meaning: Any

    def at(self, classes: Classes) -> Any:
        """Return the value in the form that a parameter needs: parsed from YAML, or as text.

        Args:
            classes: classes whose instances the parameter accepts; empty for a parameter that accepts only plain values,
                which needs the text.
        """
        if classes and (self.meaning is None or isinstance(self.meaning, dict | list)):
            # `{a,b}` is a mapping with null values in YAML, but the user means a text, such as a pattern of shard names.
            braces = isinstance(self.meaning, dict) and all(item is None for item in self.meaning.values())
            return self if braces and self.meaning else self.meaning
        return self


def _typed_value(source: Source, path: Sequence[str]) -> _Typed | None:
    """Return the value of a command-line option, as text and as parsed YAML.

    Args:
        source: source that holds the option.
        path: keys that lead to the option in the nested values of the source.

    Returns:
        The value; None if the text is the path of a configuration file, whose options are a separate source.
    """
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
    """Set an argument of a class, or an option nested below the argument.

    Args:
        arguments: arguments of the class, changed in place.
        key: name of the argument. A plus sign at its end appends the value to the argument's list.
        path: keys from the argument to the option to set; empty to set the argument itself.
        value: the new value.
        classes: for each argument by name, the classes whose options may be nested below it.
    """
    name = key.removesuffix("+")
    below = classes.get(name, ())
    if key != name and not path:
        value = value.at(below) if isinstance(value, _Typed) else value
        stored = name if name in arguments else key  # keep the plus sign, so that jsonargparse appends to the default
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
    """Merge a value of a stronger source into the value of an argument.

    Args:
        old: merged value of the weaker sources; None if they set nothing.
        path: keys from the argument to the option to set; empty to set the argument itself.
        value: value from the stronger source.
        classes: classes that the argument takes; empty if it takes plain values or a mapping with arbitrary keys.

    Returns:
        The new value of the argument.
    """
    if not path:
        return _replace(old, value, classes)
    if isinstance(old, list) and old and classes:
        return [*old[:-1], _put(old[-1], path, value, classes)]
    options = _as_options(old, classes)
    key, *remaining = path
    if not classes:
        _put_argument(options, key, remaining, value, {})
        return options
    if key == "class_path" and not remaining:
        return _with_class(options, str(value), classes)
    if "class_path" in options and key not in CLASS_OPTIONS:
        key, remaining = "init_args", [key, *remaining]
    if key == "init_args":
        arguments = dict(options.get("init_args") or {})
        value = value.at(classes) if isinstance(value, _Typed) and not remaining else value
        if remaining:
            _put_argument(arguments, remaining[0], remaining[1:], value, _below(options, classes))
        elif isinstance(value, dict):
            for name, item in _in_order(value):
                _put_argument(arguments, name, [], item, _below(options, classes))
        elif value is not None:
            raise UsageError(f"init_args takes options by name (KEY: VALUE), got {str(value)[:100]}")
        return {**options, "init_args": arguments}
    if key in CLASS_OPTIONS:
        options[key] = _put(options.get(key), remaining, value, ())
        return options
    _put_argument(options, key, remaining, value, _below(options, classes))
    return options


def _replace(old: Any, value: Any, classes: Classes) -> Any:
    """Merge a stronger source's value for an argument as a whole into the merged value of the weaker sources.

    Args:
        old: merged value of the weaker sources; None if they set nothing.
        value: value from the stronger source.
        classes: classes that the argument takes; empty if it takes plain values or a mapping with arbitrary keys.

    Returns:
        The new value of the argument.
    """
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
    """Sort the options of one source into the order in which they are merged.

    ``class_path`` comes first, since the class determines which other options exist. Options with a plus sign, which append
    to lists, come last.
    """
    keyed = [(str(key), value) for key, value in values.items()]
    return sorted(keyed, key=lambda item: (item[0] != "class_path", item[0].endswith("+")))


def _as_options(value: Any, classes: Classes) -> dict[str, Any]:
    """Convert the value of an argument that accepts instances of classes to a mapping with options such as ``class_path``.

    Args:
        value: mapping of options, or the name of a class. Any other value gives an empty mapping.
        classes: base classes that the object may have.
    """
    value = value.meaning if isinstance(value, _Typed) and isinstance(value.meaning, dict) else value
    if isinstance(value, dict):
        return dict(value)
    return {"class_path": value} if subclass_named(value, classes) is not None else {}


def _with_class(options: dict[str, Any], class_path: Any, classes: Classes) -> dict[str, Any]:
    """Return an object's options with a different class, and with the arguments that both classes declare with the same type.

    Args:
        options: options of the object with its previous class.
        class_path: name of the new class.
        classes: base classes that the object may have.
    """
    arguments = {**(options.get("init_args") or {}), **{k: v for k, v in options.items() if k not in CLASS_OPTIONS}}
    new, old = (subclass_named(name, classes) for name in (class_path, options.get("class_path")))
    class_options = {key: value for key, value in options.items() if key in CLASS_OPTIONS}
    if "class_path" in options and (new is None or new is not old):
        class_options.pop("dict_kwargs", None)
        old_hints, new_hints = (parameter_hints(kind) if kind else {} for kind in (old, new))
        arguments = {
            key: value
            for key, value in arguments.items()
            if (name := key.removesuffix("+")) in new_hints and old_hints.get(name) == new_hints[name]
        }
    return {**class_options, "class_path": class_path, **({"init_args": arguments} if arguments else {})}


def _below(options: Mapping[str, Any], classes: Classes) -> dict[str, Classes]:
    """Return, for each argument of an object's class, the classes whose options may be nested below the argument.

    Args:
        options: options of the object; their ``class_path`` names its class.
        classes: base classes that the object may have. Their arguments are used if ``options`` has no ``class_path``.

    Returns:
        Classes by the name of the argument.
    """
    named_class = subclass_named(options["class_path"], classes) if "class_path" in options else None
    kinds = (named_class,) if named_class is not None else classes if "class_path" not in options else ()
    return {name: bases for kind in kinds for name, bases in option_classes(kind).items()}
