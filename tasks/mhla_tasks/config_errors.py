"""Short messages for wrong configurations: the key, where it came from, and the nearest valid one.

jsonargparse's own error for a misspelt key names neither the file nor a valid key, and comes after two pages of usage.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from mhla_tasks.own_modules import name_the_extra
from mhla_tasks.signatures import Signature, imported_signature, written_signature
from mhla_tasks.sources import Source

SHORT_NAMES = {
    "callbacks": ("lightning.pytorch.callbacks",),
    "logger": ("lightning.pytorch.loggers",),
    "strategy": ("lightning.pytorch.strategies",),
}
"""Where the trainer's options look for a class that is named without its module, as LightningCLI does."""

CLASS_KEYS = ("class_path", "init_args", "dict_kwargs", "help")

NOISE = re.compile(
    r"^-?\s*(Does not validate against any|Subtypes:|Errors:|Given value|Expected a <class 'NoneType'>"
    r"|Not a valid subclass of|Subclass types expect|- a (class path|dict))"
)


def find_unknown_key(sources: Sequence[Source], options: Collection[str]) -> str | None:
    """A message for the first key that nothing accepts, or None.

    Args:
        sources: in order of precedence, weakest first.
        options: options that the subcommand accepts, dotted (``trainer.max_epochs``, ``model``, ``ckpt_path``).
    """
    roots = {option.split(".")[0] for option in options}
    trainer = {option.split(".")[1] for option in options if option.startswith("trainer.")}
    classes: dict[str, Signature] = {}
    for source in sources:
        for name, value in source.values.items():
            key = str(name)
            if key not in roots:
                problem: str | None = _message(source.origin, key, roots, "")
            elif (key in ("trainer", "model", "data") and isinstance(value, list | int | float)) or (key, value) == (
                "trainer",
                None,
            ):
                problem = f"{source.origin}: {key} is not a value, got {value}; it needs options (KEY: VALUE) below it"
            elif key == "trainer" and isinstance(value, dict):
                problem = _check_trainer(source.origin, value, trainer)
            elif key in ("model", "data"):
                problem = _check_class(source.origin, key, value, classes)
            else:
                problem = None
            if problem:
                return problem + _line_named_by(problem, source)
    return None


def _line_named_by(problem: str, source: Source) -> str:
    """The line of the key that a message is about, for a source that has lines."""
    line = next((line for path, line in source.lines.items() if f": {_dotted(path)} is not" in problem), None)
    return f" (line {line})" if line else ""


def find_repeated_option(arguments: Sequence[str]) -> str | None:
    """A message for the first data option with several values, or None.

    A shell that expands the braces of ``--data.train=train-{0000..0002}.tar`` gives the option three times; the
    last value alone would count, and two thirds of the data be lost.
    """
    given: dict[str, list[str]] = {}
    for word in arguments:
        key, equals, value = word.partition("=")
        if equals and key.startswith("--data.") and not key.endswith("+"):
            given.setdefault(key, []).append(value)
    for key, values in given.items():
        if len(set(values)) > 1:
            return (
                f"{key} is given {len(values)} times: {', '.join(values[:3])}{' ..' if len(values) > 3 else ''}. Quote braces, "
                f"so that the shell leaves them alone ({key}='shards/train-{{0000..0099}}.tar'), or give a list: "
                f"'{key}=[{','.join(values[:2])}]'"
            )
    return None


def _message(origin: str, path: str, valid: Collection[str], owner: str) -> str:
    leaf = path.rsplit(".", 1)[-1]
    close = get_close_matches(leaf, sorted(valid), 1, 0.5)
    hint = f"did you mean {path[: -len(leaf)]}{close[0]}?" if close else f"valid are {', '.join(sorted(valid))}"
    return f"{origin}: {path} is not an option{f' of {owner}' if owner else ''}; {hint}"


def _check_trainer(origin: str, values: dict[str, Any], valid: set[str]) -> str | None:
    for key, value in values.items():
        name = str(key).rstrip("+")
        if name not in valid:
            return _message(origin, f"trainer.{key}", valid, "the trainer")
        for index, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, dict) and "class_path" in item:
                problem = _check_class(origin, f"trainer.{name}[{index}]", item, {}, SHORT_NAMES.get(name, ()))
                if problem:
                    return problem
    return None


def _check_class(
    origin: str, path: str, value: Any, classes: dict[str, Signature], modules: Sequence[str] = ()
) -> str | None:
    """Check one ``{class_path, init_args}`` or class path; ``classes`` remembers that of weaker sources."""
    if isinstance(value, str) and value.endswith((".yaml", ".yml")):  # one that exists is a source of its own
        return (
            f"{origin}: {path}: there is no file {value}; a file in a configuration is looked for in the folder of that"
        )
    if isinstance(value, str):
        value = {"class_path": value}
    if not isinstance(value, dict):
        return None
    if "class_path" in value:
        class_path = str(value["class_path"])
        if "." not in class_path and not modules:
            classes.pop(path, None)  # the parser looks for a class of this name
            return None
        signature = written_signature(class_path)
        if signature is None:
            found = _resolve(class_path, modules)
            if isinstance(found, str):
                return f"{origin}: {path}.class_path {class_path[:100]!r}: {found}"
            signature = imported_signature(found)
        classes.pop(path, None)
        if signature is not None:
            classes[path] = signature
    if path not in classes:
        return None
    arguments = value.get("init_args") or {key: item for key, item in value.items() if key not in CLASS_KEYS}
    prefix = f"{path}.init_args" if "init_args" in value else path
    return next(_unknown(origin, prefix, arguments, classes[path]), None)


def _unknown(origin: str, path: str, given: Any, signature: Signature) -> Iterator[str]:
    valid = signature.options
    for name, value in given.items() if isinstance(given, dict) else ():
        key = str(name)
        if key.rstrip("+") not in valid:
            yield _message(origin, f"{path}.{key}", valid, signature.name)
            continue
        for inner in valid[key.rstrip("+")]:
            yield from _unknown(origin, f"{path}.{key}", value, inner)


def _resolve(class_path: str, modules: Sequence[str]) -> type | str:
    """The class, looked for in ``modules`` if its path names none, or what is wrong with its path."""
    from mhla_tasks.trust import refusal

    if refused := refusal(class_path):
        return refused
    module_name, _, name = class_path.rpartition(".")
    names: list[str] = []
    for each in [module_name] if module_name else modules:
        try:
            module = importlib.import_module(each)
        except ImportError as error:
            return f"cannot import {each} ({error})"
        if isinstance(found := getattr(module, name, None), type):
            return found
        names += [other for other, item in vars(module).items() if isinstance(item, type)]
    close = get_close_matches(name, names, 1, 0.5)
    return f"there is no such class{f'; did you mean {close[0]}?' if close else ''}"


def shorten(message: str, sources: Sequence[Source]) -> str:
    """The part of a message of jsonargparse that matters: keys, what was wrong, and where the value came from."""
    lines = [line.strip() for line in message.splitlines()]
    kept = [re.sub(r"^- ", "", line) for line in lines if line and not NOISE.match(line)]
    keys = [key for line in kept for key in re.findall(r'Parser key "([^"]+)"', line)]
    detail = [line for line in kept if not re.match(r'^(Parser key "[^"]+":|Problem with given class_path .*:)$', line)]
    detail = [re.sub(r'^Parser key "[^"]+":\s*', "", line) for line in detail]
    text = "; ".join(dict.fromkeys(detail)) or "; ".join(kept)
    text = re.sub(r"Expected an? <class '(?:\w+\.)*(\w+)'>", r"expected \1", text)
    if "required: " in text and ".model" in text:
        return "no model is given; name a configuration: --config FILE, for example configs/classification/digits.yaml"
    given = re.search(r"Given value: (.*)", message)
    text = name_the_extra(text.replace(". Got value: ", ", got "))
    unfit = re.search(r"Group '\w+' does not accept option '([\w.]+)'|Option '([\w.]+)' is not accepted", text)
    if unfit:
        keys, text = [unfit[1] or unfit[2]], "this value does not fit the option"
    if len(keys) == 1 and given and ", got " not in text and len(given[1]) < 60:
        text += f", got {given[1]}"
    if not keys:
        return text
    places = [
        (source, path) for source in reversed(sources) for path in _located(source.values, keys[-1].split("."), ())
    ]
    got = re.search(r", got (.*)$", text)
    wrong = [(source, path) for source, path in places if got and got[1] in _spellings(_value_at(source.values, path))]
    if unfit:  # the message quotes no value, and a text is what fits the fewest options
        wrong = [(source, path) for source, path in places if isinstance(_value_at(source.values, path), str)]
    for source, path in wrong or places:  # a stronger source may have the key, too, with a right value
        line = source.lines.get(path)
        return f"{source.origin}: {_dotted(path)}: {text}{f' (line {line})' if line else ''}"
    return f"{'.'.join(keys)}: {text}"


def _located(values: Any, tail: list[str], path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Paths of the keys in nested options and lists that end in ``tail``."""
    items: Iterable[tuple[str | int, Any]] = ()
    if isinstance(values, dict):
        items = values.items()
    elif isinstance(values, list):
        items = enumerate(values)
    for key, value in items:
        here = (*path, key)
        if list(here[-len(tail) :]) == tail:
            yield here
        yield from _located(value, tail, here)


def _value_at(values: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


def _spellings(value: Any) -> tuple[str, ...]:
    """Texts by which an error message may quote a value."""
    return str(value), repr(value), str(value).lower()


def _dotted(path: tuple[str | int, ...]) -> str:
    """A path as messages write it: ``trainer.callbacks[0].init_args.keep``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")
