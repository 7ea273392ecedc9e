"""Import of the user's own modules, which the command-line option ``--allow`` names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

allowed: list[str] = []
"""Names of the modules that the option ``--allow`` of a tool lists."""


def add_allow(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--allow`` to an argument parser. The option imports modules, for example to register attention kinds."""
    parser.add_argument(
        "--allow",
        action=_Import,
        metavar="MODULE",
        help="modules to import, separated by commas: your own attention kinds",
    )


class UnknownModuleError(ValueError):
    """Error for a name in the command-line option ``--allow`` that does not belong to an existing module."""


def find_in_working_folder(names: Iterable[str]) -> None:
    """Append the working folder to ``sys.path`` if it contains one of the named modules or packages."""
    folder, packages = Path.cwd(), {name.split(".")[0] for name in names}
    is_present = any((folder / f"{name}.py").is_file() or (folder / name).is_dir() for name in packages)
    if is_present and str(folder) not in sys.path:
        sys.path.append(str(folder))  # last, so that it hides no package


def import_own(names: Iterable[str]) -> None:
    """Import the user's own modules that the option ``--allow`` names, for example to register attention kinds.

    Args:
        names: names of modules or packages, installed or in the working folder.

    Raises:
        UnknownModuleError: if a module does not exist. Errors raised while a module is imported are not caught.
    """
    names = list(names)
    find_in_working_folder(names)
    for name in names:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            # The module exists, but a module that it imports does not.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise UnknownModuleError(
                f"--allow={name}: there is no module {error.name!r}, installed or in the working folder"
            ) from None


class _Import(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        names = [name.strip() for name in values.split(",") if name.strip()]
        try:
            import_own(names)
            allowed.extend(names)
        except UnknownModuleError as error:
            raise argparse.ArgumentError(self, str(error)) from None
