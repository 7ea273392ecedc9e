"""Defaults of all options that users set: a changed default changes runs that do not name the option.

    PYTHONPATH=.:kernels:tasks python tests/tasks/test_defaults.py    writes tests/defaults.yaml again, after a deliberate change

Options count by their own names, whether a class takes them itself or in a dataclass. Tools of the command line are included.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from mhla_tasks.commandline import registry

TABLE = Path(__file__).parents[1] / "defaults.yaml"
PACKAGES = (
    "mhla_tasks.classification", "mhla_tasks.diffusion", "mhla_tasks.language", "mhla_tasks.text_to_image", "mhla_tasks.video",
    "lightning_mhla", "lightning_mhla.attention", "lightning_mhla.callbacks", "lightning_mhla.strategies", "lightning_mhla.vision",
    "lightning_mhla.vision.vlt", "lightning_mhla.training.optim", "lightning_mhla.swap", "mhla_kernels",
)  # fmt: skip
"""Packages whose public names configurations and programs use."""
TOOLS = [name for tools in registry.TOOLS.values() for name in tools]
"""Tools of the command line, with options of their own."""
FLOORS = ("mhla_tasks", "lightning_mhla", "mhla_kernels")


def parameters(target: Any) -> Iterator[inspect.Parameter]:
    """Parameters of a function, or of a class and of the bases that it passes its other options to."""
    if not inspect.isclass(target):
        yield from inspect.signature(target).parameters.values()
        return
    names: set[str] = set()
    for base in target.__mro__:
        if base.__module__.split(".")[0] not in FLOORS:
            return
        if "__init__" not in vars(base):
            continue
        found = list(inspect.signature(base.__init__).parameters.values())[1:]
        yield from (each for each in found if each.name not in names)
        names |= {each.name for each in found}
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in found):
            return


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Plain values below a default, by their own names."""
    if is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from leaves(entry.name, getattr(value, entry.name))
    elif isinstance(value, list | tuple) and any(map(is_dataclass, value)):
        for item in value:
            yield from leaves(name, item)
    elif isinstance(value, list | tuple):
        yield name, list(value)
    else:
        yield name, value if isinstance(value, int | float | str | bool | dict | None) else type(value).__name__


def defaults_of(target: Any) -> dict[str, Any]:
    """Defaults by name; all values of a name that occurs several times."""
    found: dict[str, list[Any]] = {}
    for parameter in parameters(target):
        if parameter.default is not inspect.Parameter.empty:
            for name, value in leaves(parameter.name, parameter.default):
                values = found.setdefault(name, [])
                values += [] if value in values and type(value) is type(values[values.index(value)]) else [value]
    return {
        name: values[0] if len(values) == 1 else {"several": sorted(values, key=repr)}
        for name, values in sorted(found.items())
    }


def public() -> dict[str, Any]:
    """Public classes and functions of the product, by the name of the module that defines them."""
    found = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in dir(module):
            target = getattr(module, name)
            defined = getattr(target, "__module__", "")
            if name[0] != "_" and callable(target) and str(defined).split(".")[0] in FLOORS:
                found[target.__qualname__] = target
    return dict(sorted(found.items()))


def defaults_of_tool(name: str) -> dict[str, Any]:
    """Defaults of the options of a tool; none if the tool leaves its arguments to another program."""
    if getattr(registry.function_of(name), "passes_on", False):
        return {}
    options = [option for option in registry.parser_of(name)[0]._actions if option.default is not argparse.SUPPRESS]
    return dict(
        sorted(leaf for option in options if option.option_strings for leaf in leaves(option.dest, option.default))
    )


def table() -> dict[str, dict[str, Any]]:
    """Defaults of everything public that has any, and of the options of tools."""
    of_names = {name: defaults for name, target in public().items() if (defaults := defaults_of(target))}
    return of_names | {f"lightning {name}": defaults for name in sorted(TOOLS) if (defaults := defaults_of_tool(name))}


EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load(TABLE.read_text()) if TABLE.exists() else {}


@pytest.fixture(scope="module")
def present() -> dict[str, dict[str, Any]]:
    return table()


@pytest.mark.parametrize("name", EXPECTED)
def test_defaults_are_those_of_the_table(name: str, present: dict[str, dict[str, Any]]) -> None:
    changed = {
        option: (value, present.get(name, {}).get(option, "no such option"))
        for option, value in EXPECTED[name].items()
        if repr(present.get(name, {}).get(option, "no such option")) != repr(value)
    }
    assert not changed, f"defaults of {name}, before and now; if they changed on purpose, run {Path(__file__).name}"


def test_every_public_name_with_defaults_is_in_the_table(present: dict[str, dict[str, Any]]) -> None:
    assert not set(present) - set(EXPECTED), f"run {Path(__file__).name}"


if __name__ == "__main__":
    text = yaml.safe_dump(table(), default_flow_style=None, width=128, allow_unicode=True)
    TABLE.write_text(f"# Defaults of everything public; tests/tasks/test_defaults.py compares and writes them.\n{text}")
    sys.stdout.write(f"{TABLE}\n")
