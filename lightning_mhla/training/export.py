"""The commands that write the trained model of a checkpoint for use anywhere."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from lightning_mhla.system.commands import add_allow, command_parser, short_errors
from lightning_mhla.training.loading import load_module
from lightning_mhla.training.module import TrainingModule

Module = TypeVar("Module", bound=TrainingModule)


def export_parser(module: str, text: str | None) -> argparse.ArgumentParser:
    """The parser of such a command: ``checkpoint``, ``folder``, ``--live`` and ``--allow``."""
    parser = command_parser(module, text)
    parser.add_argument("checkpoint", type=Path, help="file that training wrote, or the folder of a run")
    parser.add_argument("folder", type=Path, help="where the model goes")
    parser.add_argument("--live", action="store_true", help="the weights as trained, not their moving average")
    add_allow(parser)
    return parser


def export_module(
    kind: type[Module], parser: argparse.ArgumentParser, write: Callable[[Module, argparse.Namespace], None]
) -> None:
    """Load what the command line names, write it, and print the files.

    Args:
        kind: class of the module.
        parser: of :func:`export_parser`, with the options of the domain.
        write: writes the module to ``args.folder``.
    """
    args = parser.parse_args()
    with short_errors():
        write(load_module(kind, args.checkpoint, args.live), args)
    Console(soft_wrap=True).print(f"{args.folder}: {', '.join(sorted(path.name for path in args.folder.iterdir()))}")
