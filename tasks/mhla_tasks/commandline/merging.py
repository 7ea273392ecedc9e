"""Merging of options from configuration files, the command line and a checkpoint into one configuration.

Options are merged one by one; the value with the highest priority is used. In the result, arguments of a class are always below
``init_args``, even if they were given without this key. If a source chooses a different class, arguments that both classes
declare with the same type are kept. If it chooses a different kind of attention, the ``options`` of the former kind are
dropped. A kind that is named without ``options`` starts from its own defaults; ``options`` in the default value of the
parameter are ignored. Lists, and mappings with arbitrary keys, are replaced completely. ``KEY+`` appends to a list instead.
``LIST.OPTION`` sets an option of the last item in the list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning import LightningDataModule, LightningModule, Trainer

from lightning_mhla import AttentionConfig
from mhla_tasks.commandline.arguments import UsageError
from mhla_tasks.commandline.signatures import option_classes, parameter_hints
from mhla_tasks.commandline.sources import Source
from mhla_tasks.commandline.trust import CLASS_OPTIONS, subclass_named

Classes = tuple[type, ...]

KIND = "kind"
"""Key of an :class:`AttentionConfig` whose value determines which ``options`` the attention accepts."""

ROOTS: Mapping[str, Classes] = {
    "model": (LightningModule,),
    "data": (LightningDataModule,),
    "trainer": (Trainer,),
}
"""Options of a command whose value is an object with options, each with the base classes of that object."""


def merge(sources: Sequence[Source]) -> dict[str, Any]:
    """Merge options from several sources into one nested mapping, in which values of higher priority override others.

    Args:
        sources: configuration files and command-line options, from lowest to highest priority. The classes that they name
            must have been imported by :func:`mhla_tasks.commandline.trust.allow_classes`.

    Raises:
        UsageError: if ``init_args`` of a class is not a mapping.
    """
    configuration: dict[str, Any] = {}
    for source in _kinds_first(sources):
        if source.option is None:
            for name, value in source.values.items():
                _put_argument(configuration, str(name), [], value, ROOTS)
            continue
        path = source.option.name.split(".")
        value = _typed_value(source, path)
        if value is not None and not source.option.is_request:
            _put_argument(configuration, path[0], path[1:], value, ROOTS)
    return _plain(configuration)


def _kinds_first(sources: Sequence[Source]) -> list[Source]:
    """Return the sources in an order in which an attention kind from the command line precedes the ``options`` for that kind.

    On the command line, ``--model.attention.kind`` may follow ``--model.attention.options.NAME``, but must be merged before it.
    """
    ordered = list(sources)
    for source in sources:
        name = source.option.name if source.option is not None else ""
        if not name.endswith(f".{KIND}"):
            continue
        options = name.removesuffix(KIND) + "options"
        place = next(index for index, other in enumerate(ordered) if other is source)
        names = [other.option.name if other.option is not None else "" for other in ordered[:place]]
        first = next((i for i, other in enumerate(names) if other == options or other.startswith(f"{options}.")), None)
        if first is not None:
            ordered.insert(first, ordered.pop(place))
    return ordered


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, _Typed) else value


class _Typed(str):
    """String with the text of a command-line value, which also stores the result of parsing it as YAML.

    The parsed value is used for parameters that accept instances of classes, and the text for all others.

    Attributes:
        meaning: the parsed value.
    """

    meaning: Any

    def at(self, classes: Classes) -> Any:
        """Return this command-line value in the form that a parameter accepts: as text, or parsed as YAML.

        Args:
            classes: classes whose instances the parameter accepts; empty if it accepts only plain values, such as numbers and
                text.

        Returns:
            The parsed value if it is a mapping, a list or None and ``classes`` is not empty; otherwise the text. Text in braces
            without values, such as ``{a,b}``, is also returned as text.
        """
        if classes and (self.meaning is None or isinstance(self.meaning, dict | list)):
            # `{a,b}` is a mapping with null values in YAML, but the user means a text, such as a pattern of shard names.
            braces = isinstance(self.meaning, dict) and all(item is None for item in self.meaning.values())
            return self if braces and self.meaning else self.meaning
        return self


def _typed_value(source: Source, path: Sequence[str]) -> _Typed | None:
    """Return the value of a command-line option, as text and as parsed YAML.

    Args:
        source: the command-line option.
        path: keys that lead to the value in ``source.values``.

    Returns:
        The value; None if it is the path of a configuration file, because the file's options are a separate source.
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
    """Set an argument of a class, or an option inside the argument.

    Args:
        arguments: arguments of the class, changed in place.
        key: name of the argument. With a plus sign at the end, the value is appended to the argument's list.
        path: keys that lead from the argument to the option; empty to set the argument itself.
        value: the new value.
        classes: mapping from argument name to the classes whose options the argument may contain.
    """
    name = key.removesuffix("+")
    below = classes.get(name, ())
    if key != name and not path:
        value = value.at(below) if isinstance(value, _Typed) else value
        stored = name if name in arguments else key  # keep the plus sign, so that jsonargparse appends to the default
        items = [_put(None, [], item, below) for item in (value if isinstance(value, list) else [value])]
        arguments[stored] = [*_as_list(arguments.get(stored)), *items]
        return
    # An option of the last item belongs to the items that are to be appended, if there are any.
    stored = f"{name}+" if f"{name}+" in arguments and path else name
    arguments[stored] = _put(arguments.get(stored), path, value, below)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _put(old: Any, path: Sequence[str], value: Any, classes: Classes) -> Any:
    """Merge a new value into the current value of an argument, and return the result.

    Args:
        old: value from sources of lower priority; None if there is none.
        path: keys that lead from the argument to the option to set; empty to set the argument itself.
        value: value from the source of higher priority.
        classes: classes whose instances the argument accepts; empty for plain values and mappings with arbitrary keys.
    """
    if not path:
        return _replace(old, value, classes)
    if isinstance(old, list) and old and classes:
        return [*old[:-1], _put(old[-1], path, value, classes)]
    options = _as_options(old, classes)
    key, *remaining = path
    if key == KIND and not remaining and AttentionConfig in classes:
        if options.get(KIND, value) != value:
            options.pop("options", None)  # they belong to the former kind
        options.setdefault("options", None)  # in place of those of the kind that is the default of the parameter
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
    """Merge a complete new value of an argument into its current value, and return the result.

    Mappings with options of a class are merged option by option. The name of a class replaces only the class, and keeps the
    arguments that both classes declare with the same type. All other values are replaced.

    Args:
        old: value from sources of lower priority; None if there is none.
        value: value from the source of higher priority.
        classes: classes whose instances the argument accepts; empty for plain values and mappings with arbitrary keys.
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
    """Sort options into the order in which they must be merged.

    ``class_path`` and ``kind`` are first, because they determine which other options exist. Options that end in a plus sign,
    which append to lists, are last.
    """
    keyed = [(str(key), value) for key, value in values.items()]
    return sorted(keyed, key=lambda item: (item[0] not in ("class_path", KIND), item[0].endswith("+")))


def _as_options(value: Any, classes: Classes) -> dict[str, Any]:
    """Convert the value of an argument to a mapping of class options, such as ``class_path``.

    Args:
        value: mapping of options, or the name of a class. Any other value gives an empty mapping.
        classes: classes whose instances the argument accepts.
    """
    value = value.meaning if isinstance(value, _Typed) and isinstance(value.meaning, dict) else value
    if isinstance(value, dict):
        return dict(value)
    return {"class_path": value} if subclass_named(value, classes) is not None else {}


def _with_class(options: dict[str, Any], class_path: Any, classes: Classes) -> dict[str, Any]:
    """Change the class in a mapping of class options. Arguments are kept if both classes declare them with the same type.

    Args:
        options: options of the previous class.
        class_path: name of the new class.
        classes: base classes, of which both classes are subclasses.

    Returns:
        A new mapping with ``class_path`` and, if arguments remain, ``init_args``.
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
    """Return, for each argument of a class, the classes whose options the argument may contain.

    Args:
        options: mapping whose ``class_path`` names the class.
        classes: classes to use if ``options`` has no ``class_path``.

    Returns:
        Mapping from argument name to classes.
    """
    return {name: bases for kind in chosen_classes(options, classes) for name, bases in option_classes(kind).items()}


def chosen_classes(options: Mapping[str, Any], classes: Classes) -> Classes:
    """Return the classes that may receive the options in a mapping: the class that the mapping names, or else ``classes``.

    Args:
        options: mapping whose ``class_path`` names the class.
        classes: classes to return if ``options`` has no ``class_path``.

    Returns:
        The classes; empty if ``class_path`` is not one of ``classes`` or a subclass of them.
    """
    if "class_path" not in options:
        return classes
    named_class = subclass_named(options["class_path"], classes)
    return () if named_class is None else (named_class,)
