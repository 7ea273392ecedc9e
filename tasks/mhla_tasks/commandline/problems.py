"""Short error messages for wrong configurations, with the key, the file or option that sets it, and a similar valid key.

jsonargparse's own message for a misspelled key follows two pages of usage, and names neither the file nor a valid key.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from mhla_tasks.commandline.arguments import CommandLine
from mhla_tasks.commandline.extras import name_the_extra
from mhla_tasks.commandline.registry import LIGHTNING
from mhla_tasks.commandline.signatures import option_dataclasses, option_names, takes_options_alone
from mhla_tasks.commandline.sources import Source
from mhla_tasks.commandline.trust import CLASS_OPTIONS, AllowError, find_class

SHORT_NAMES = {
    "callbacks": "lightning.pytorch.callbacks",
    "logger": "lightning.pytorch.loggers",
    "strategy": "lightning.pytorch.strategies",
}
"""Options of the trainer whose classes may be named without a module, as in LightningCLI, each with the module."""

NOISE = re.compile(
    r"^-?\s*(Does not validate against any|Subtypes:|Errors:|Given value|Expected a <class 'NoneType'>"
    r"|Not a valid subclass of|Subclass types expect|- a (class path|dict))"
)


def find_unknown_key(sources: Sequence[Source], roots: Collection[str], trainer: Collection[str]) -> str | None:
    """Find the first key in configuration files and on the command line that is not a valid option.

    Args:
        sources: configuration files and command-line options, from lowest to highest priority.
        roots: names of the command's top-level options, such as ``model``, ``data``, ``trainer`` and ``ckpt_path``.
        trainer: names of the Trainer's options.

    Returns:
        Error message with the file or command-line option, the line number and a suggestion; None if all keys are valid.
    """
    classes: dict[str, type] = {}
    for source in sources:
        for name, value in source.values.items():
            key = str(name)
            if key not in roots:
                problem: str | None = _message(source.origin, key, roots, "")
            elif key == "config":  # an existing file was moved to a source of its own before
                problem = f"{source.origin}: config must be the path of a file; there is no file {str(value)[:100]}"
            elif (key in ("model", "data") and isinstance(value, list | int | float)) or (
                key == "trainer" and not isinstance(value, dict)
            ):
                problem = f"{source.origin}: {key} must contain options (KEY: VALUE), got {value}"
            elif key == "trainer":
                problem = _check_trainer(source, value, trainer)
            elif key in ("model", "data"):
                problem = _check_class(source, key, value, classes)
            else:
                problem = None
            if problem:
                return problem + _line_named_by(problem, source)
    return None


def _line_named_by(problem: str, source: Source) -> str:
    """Find the line that sets the key named in an error message; return its number as text to append to the message.

    Args:
        problem: error message such as ``run.yaml: model.dept is not an option of LanguageModel``.
        source: configuration file or command-line option that sets the key.

    Returns:
        Text such as `` (line 12)``. Empty if the message has a different form or ``source`` is a command-line option.
    """
    line = next((line for path, line in source.lines.items() if f": {dotted(path)} is not" in problem), None)
    return f" (line {line})" if line else ""


def find_repeated_option(line: CommandLine) -> str | None:
    """Find the first option of the data module that the command line sets to several different values.

    Shells expand braces: ``--data.train=train-{0000..0002}.tar`` becomes three options. Only the last one would be used, and
    two thirds of the data would be ignored.

    Args:
        line: the parsed command line.

    Returns:
        Error message; None if there is no such option.
    """
    for name in dict.fromkeys(option.name for option in line.options):
        values = line.values(name)
        if name.startswith("data.") and not name.endswith("+") and len(set(values)) > 1:
            key = f"--{name}"
            return (
                f"{key} is given {len(values)} times: {', '.join(values[:3])}{' ..' if len(values) > 3 else ''}. Quote braces, "
                f"so that the shell leaves them alone ({key}='shards/train-{{0000..0099}}.tar'), or give a list: "
                f"'{key}=[{','.join(values[:2])}]'"
            )
    return None


def find_options_of_another_command(sources: Sequence[Source], command: str) -> str | None:
    """Return an error message for the first file that has a section for a different command; None if no file does.

    Args:
        sources: configuration files and command-line options, from lowest to highest priority.
        command: command that runs, such as ``fit``.
    """
    for source in sources:
        other_commands = [name for name in LIGHTNING if name != command and isinstance(source.values.get(name), dict)]
        if other_commands and not source.typed:
            return (
                f"{source.origin} contains options of `lightning {other_commands[0]}`, but this is `lightning {command}`; "
                f"run that command, or move the options out of `{other_commands[0]}:`"
            )
    return None


def _message(origin: str, path: str, valid: Collection[str], owner: str, inner: Mapping[str, str] | None = None) -> str:
    """Return the error message for an unknown option, with a similar valid name or a list of all valid names.

    Args:
        origin: file or command-line option that sets the unknown option.
        path: full name of the unknown option, such as ``model.dept``.
        valid: names of the valid options.
        owner: name of the class that has these options; empty for top-level options of a command.
        inner: further valid options, which belong to a group: mapping from the last part of the name to the full name. None
            without groups.
    """
    leaf = path.rsplit(".", 1)[-1]
    close = get_close_matches(leaf, sorted(valid), 1, 0.5)
    close = close or [name for name in sorted(valid) if name.startswith(f"{leaf}_")]  # seed for seed_everything
    close = close or [inner[name] for name in get_close_matches(leaf, sorted(inner or {}), 1, 0.75) if inner]
    hint = f"did you mean {path[: -len(leaf)]}{close[0]}?" if close else f"valid are {', '.join(sorted(valid))}"
    return f"{origin}: {path} is not an option{f' of {owner}' if owner else ''}; {hint}"


def _check_trainer(source: Source, values: dict[str, Any], valid: Collection[str]) -> str | None:
    for key, value in values.items():
        name = str(key).removesuffix("+")
        if name not in valid:
            return _message(source.origin, f"trainer.{key}", valid, "the trainer")
        if (
            isinstance(value, dict)
            and (number := next((key_below for key_below in value if str(key_below).isdigit()), None)) is not None
        ):
            return (
                f"{source.origin}: items of a list have no numbers; trainer.{name}.OPTION is an option of the last item of "
                f"trainer.{name}, got trainer.{name}.{number}"
            )
        for index, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, dict) and "class_path" in item:
                problem = _check_class(source, f"trainer.{name}[{index}]", item, {}, SHORT_NAMES.get(name))
                if problem:
                    return problem
    return None


def _check_class(
    source: Source, path: str, value: Any, classes: dict[str, type], module: str | None = None
) -> str | None:
    """Check that a value in a configuration names an existing class, and that this class accepts the options in the value.

    Args:
        source: configuration file or command-line option that sets the value.
        path: full name of the option with this value, for messages.
        value: class path, mapping with ``class_path`` and ``init_args``, or mapping with only the options of a class that a
            source of lower priority names.
        classes: mapping from the full name of an option to the class that sources of lower priority choose for it; updated in
            place.
        module: module that class names without a module refer to; None to leave such names to the parser.

    Returns:
        Error message; None if there is no problem.
    """
    origin = source.origin
    if isinstance(value, str) and value.endswith((".yaml", ".yml")):  # an existing one was replaced before
        return f"{origin}: {path}: there is no file {value}; paths in a configuration are relative to its own folder"
    if isinstance(value, str):
        value = {"class_path": value}
    if not isinstance(value, dict):
        return None
    if "class_path" in value:
        class_path = str(value["class_path"])
        # If this class cannot be found here, its options must not be compared with those of an earlier class.
        classes.pop(path, None)
        if "." not in class_path and module is None:
            return None  # the parser looks for a class of this name
        try:
            classes[path] = find_class(
                class_path if "." in class_path else f"{module}.{class_path}", typed=source.typed
            )
        except AllowError as error:
            return f"{origin}: {path}.class_path {class_path[:100]!r}: {error}"
    if path not in classes:
        return None
    if value.get("dict_kwargs") and option_names(classes[path]) is not None:
        kind = classes[path].__name__
        return f"{origin}: {path}.dict_kwargs: {kind} accepts only its own options; write them under init_args"
    arguments = value.get("init_args") or {key: item for key, item in value.items() if key not in CLASS_OPTIONS}
    prefix = f"{path}.init_args" if "init_args" in value else path
    return next(_unknown(origin, prefix, arguments, classes[path]), None)


def _unknown(origin: str, path: str, options: Any, kind: type) -> Iterator[str]:
    """Yield error messages for options that a class does not accept, including options of nested dataclasses.

    Args:
        origin: file or command-line option that sets the options, for messages.
        path: full name of the option that contains them, for messages.
        options: mapping from option name to value.
        kind: class that should accept the options.
    """
    valid = option_names(kind)
    if valid is None or not isinstance(options, dict):
        return
    for key, value in options.items():
        name = str(key).removesuffix("+")
        if name not in valid:
            groups = [(group, inner) for group in sorted(valid) for inner in option_dataclasses(kind, group)]
            options_inside = {
                field.name: f"{group}.{field.name}" for group, inner in groups for field in dataclasses.fields(inner)
            }
            yield _message(origin, f"{path}.{key}", valid, kind.__name__, options_inside)
            continue
        if isinstance(value, str | int | float) and takes_options_alone(kind, name):
            first = dataclasses.fields(option_dataclasses(kind, name)[0])[0].name
            yield f"{origin}: {path}.{key} takes options by name, such as {path}.{key}.{first}={value}"
        for inner in option_dataclasses(kind, name):
            yield from _unknown(origin, f"{path}.{key}", value, inner)


def shorten(message: str, sources: Sequence[Source]) -> str:
    """Shorten an error message of jsonargparse to one line with the problem, the key, and the file or option that sets it.

    Args:
        message: error message of jsonargparse, which usually has many lines.
        sources: configuration files and command-line options, from lowest to highest priority.
    """
    lines = [line.strip() for line in message.splitlines()]
    relevant = [re.sub(r"^- ", "", line) for line in lines if line and not NOISE.match(line)]
    keys = [key for line in relevant for key in re.findall(r'Parser key "([^"]+)"', line)]
    detail = [
        line for line in relevant if not re.match(r'^(Parser key "[^"]+":|Problem with given class_path .*:)$', line)
    ]
    detail = [re.sub(r'^Parser key "[^"]+":\s*', "", line) for line in detail]
    text = "; ".join(dict.fromkeys(detail)) or "; ".join(relevant)
    text = re.sub(r"Expected an? <class '(?:\w+\.)*(\w+)'>", r"expected \1", text)
    if text.endswith("required: model"):
        return "no model is given; name a configuration: --config FILE, for example configs/classification/digits.yaml"
    quoted = re.search(r"Given value: (.*)", message)
    text = name_the_extra(text.replace(". Got value: ", ", got "))
    unfit = re.search(r"Group '\w+' does not accept option '([\w.]+)'|Option '([\w.]+)' is not accepted", text)
    if unfit:
        keys, text = [unfit[1] or unfit[2]], "this value does not fit the option"
    if len(keys) == 1 and quoted and ", got " not in text and len(quoted[1]) < 60:
        text += f", got {quoted[1]}"
    if not keys:
        return text
    places = [
        (source, path) for source in reversed(sources) for path in located(source.values, keys[-1].split("."), ())
    ]
    rejected_value = re.search(r", got (.*)$", text)
    wrong = [
        (source, path)
        for source, path in places
        if rejected_value and rejected_value[1] in _spellings(value_at(source.values, path))
    ]
    if unfit:  # the message quotes no value; the wrong one is most likely a text
        wrong = [(source, path) for source, path in places if isinstance(value_at(source.values, path), str)]
    for source, path in wrong or places:  # a stronger source may have the same key with a valid value
        return message_at(source, path, text)
    return f"{'.'.join(keys)}: {text}"


def message_at(source: Source, path: tuple[str | int, ...], text: str) -> str:
    """Return an error message that names a source, the option in it, and the line if the source is a file.

    Args:
        source: configuration file or command-line option that sets the option.
        path: keys and list indices that lead to the option in the source.
        text: description of the problem.
    """
    line = source.lines.get(path)
    return f"{source.origin}: {dotted(path)}: {text}{f' (line {line})' if line else ''}"


def located(values: Any, tail: list[str], path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Search nested options and lists, and yield each path of keys that ends with ``tail``.

    Args:
        values: nested options and lists.
        tail: last keys of the paths to find.
        path: keys that lead to ``values``, with which each yielded path begins.
    """
    items: Iterable[tuple[str | int, Any]] = ()
    if isinstance(values, dict):
        items = values.items()
    elif isinstance(values, list):
        items = enumerate(values)
    for key, value in items:
        inner = (*path, key)
        if [str(part).removesuffix("+") if isinstance(part, str) else part for part in inner[-len(tail) :]] == tail:
            yield inner
        yield from located(value, tail, inner)


def value_at(values: Any, path: tuple[str | int, ...]) -> Any:
    """Return the value to which a sequence of keys and list indices leads in nested options."""
    for key in path:
        values = values[key]
    return values


def _spellings(value: Any) -> tuple[str, ...]:
    return str(value), repr(value), str(value).lower()


def dotted(path: tuple[str | int, ...]) -> str:
    """Format a sequence of keys and list indices for messages, such as ``trainer.callbacks[0].init_args.keep``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")
