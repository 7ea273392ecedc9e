"""List of the command-line tools ``lightning NAME [options]``, such as ``export``, and functions to look them up and run them.

A tool is a function that adds its options to a parser and returns the function to run. If it is marked with :func:`passes_on`,
it takes the command-line arguments instead and parses them itself. Its docstring is the help text, whose first line appears in
the list of tools. A tool imports other packages only when it runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import NoReturn

from typing_extensions import override

from mhla_tasks.commandline.console import ignore_noise, set_levels, show_log
from mhla_tasks.commandline.errors import report_usage_error, reported

Run = Callable[[argparse.Namespace], int | None]

LIGHTNING = {
    "fit": "Train and validate; --run_dir=FOLDER resumes, --sweep KEY=VALUE,VALUE trains several runs.",
    "validate": "Evaluate weights on the validation data.",
    "test": "Evaluate weights on the test data.",
    "predict": "Write the outputs of a model: samples, classes, clips (--frames=N sets their length), text.",
}
"""Lightning's own commands, each with its summary in the list of commands."""

TOOLS: dict[str, dict[str, str]] = {
    "data": {
        "prepare images": "prepare:images",
        "prepare latents": "prepare:latents",
        "prepare tokenizer": "prepare:tokenizer",
        "prepare text": "prepare:text",
        "prepare captions": "prepare:captions",
        "prepare caption-latents": "prepare:caption_latents",
        "prepare clips": "prepare:clips",
        "prepare clip-latents": "prepare:clip_latents",
    },
    "models": {
        "export": "models:export",
        "import": "models:import_published",
        "linearize": "models:linearize",
        "consolidate": "models:consolidate",
        "generate": "models:generate",
        "chat": "models:chat",
        "timm": "models:timm_script",
    },
    "measuring": {
        "evaluate": "measuring:evaluate",
        "score": "measuring:score",
        "arrange": "measuring:arrange",
        "compare": "measuring:compare",
        "layers": "measuring:layers",
        "bench": "measuring:bench",
        "paper": "measuring:paper",
    },
    "machine": {
        "doctor": "machine:doctor",
        "completion": "machine:completion",
    },
}
"""Tools by group and name, each as ``module:function``."""

LOCATIONS = {name: location for tools in TOOLS.values() for name, location in tools.items()}
"""Tools of all groups by name, each as ``module:function``."""


def passes_on(function: Callable[[Sequence[str]], int | None]) -> Callable[[Sequence[str]], int | None]:
    """Decorator that marks a tool as parsing its own command-line arguments, which it receives as a list of strings."""
    function.passes_on = True  # type: ignore[attr-defined]
    return function


class Parser(argparse.ArgumentParser):
    """Argument parser that reports errors in two lines, and accepts dashes instead of underscores in option names."""

    def error(self, message: str) -> NoReturn:
        """Print the error and the command that shows the help, and exit with status 2."""
        report_usage_error(message, self.prog)

    @override
    def parse_known_args(self, args: Sequence[str] | None = None, namespace: object = None) -> object:  # type: ignore[override]
        arguments = list(sys.argv[1:] if args is None else args)
        end = arguments.index("--") if "--" in arguments else len(arguments)  # what follows are values, not options
        return super().parse_known_args([*map(_with_underscores, arguments[:end]), *arguments[end:]], namespace)


def _with_underscores(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def tool_named(arguments: Sequence[str]) -> str | None:
    """Return the tool name at the beginning of a list of command-line arguments; None if the arguments do not name a tool.

    Names consist of one or two words, such as ``export`` and ``prepare images``.
    """
    return next((name for count in (2, 1) if (name := " ".join(arguments[:count])) in LOCATIONS), None)


def families() -> set[str]:
    """Return the first words of all two-word tool names, such as ``prepare`` for ``prepare images``."""
    return {name.partition(" ")[0] for name in LOCATIONS if " " in name}


def function_of(name: str) -> Callable[..., object]:
    """Import and return the function that implements a tool.

    Args:
        name: name of the tool, such as ``prepare images``.
    """
    return resolve_name(f"mhla_tasks.tools.{LOCATIONS[name]}")


def parser_of(name: str) -> tuple[Parser, Run]:
    """Create the argument parser of a tool.

    Args:
        name: name of the tool, such as ``prepare images``.

    Returns:
        The parser, and the function that runs the tool with the parsed options.
    """
    function = function_of(name)
    parser = Parser(
        prog=f"lightning {name}",
        description=help_text(function),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser, function(parser)  # type: ignore[return-value]


def run(name: str, arguments: Sequence[str]) -> int | None:
    """Run a command-line tool.

    Args:
        name: name of the tool, such as ``prepare images``.
        arguments: command-line arguments after the name of the tool.

    Returns:
        Exit status; None for success.
    """
    function = function_of(name)
    ignore_noise()
    if getattr(function, "passes_on", False):
        set_levels()  # the program with its own parser determines the stream of log messages
        with reported():
            return function(arguments)  # type: ignore[return-value]
    parser, do = parser_of(name)
    # options may stand between positional arguments; after "--", argparse would lose the mark
    options = parser.parse_args(arguments) if "--" in arguments else parser.parse_intermixed_args(arguments)
    show_log(sys.stderr)  # standard output is reserved for results
    with reported():
        return do(options)


def listing(start: str = "") -> str:
    """Return a list of Lightning's commands, such as ``fit``, and of all tools, with a one-line summary of each, as text.

    Args:
        start: beginning of the names of the tools to list, such as ``prepare``; Lightning's commands are then omitted. Empty
            to list all commands and tools.
    """
    groups = {"training": LIGHTNING} if not start else {}
    for group, tools in TOOLS.items():
        summaries = {name: help_text(function_of(name)).partition("\n")[0] for name in tools if name.startswith(start)}
        groups |= {group: summaries} if summaries else {}
    width = max(len(name) for summaries in groups.values() for name in summaries)
    parts = [
        "\n".join([f"{group}:", *(f"  {name:<{width}}  {summary}" for name, summary in summaries.items())])
        for group, summaries in groups.items()
    ]
    return "\n\n".join(parts)


def nearest(word: str) -> str:
    """Return the text ``; did you mean NAME?`` for an unknown command, to append to an error message.

    Args:
        word: name that the user typed. If no command or tool has a similar name, the result is empty.
    """
    names = [*LIGHTNING, *{name.partition(" ")[0] for name in LOCATIONS}]
    matches = difflib.get_close_matches(word, names, 1)
    return f"; did you mean {matches[0]}?" if matches else ""


def help_text(function: Callable[..., object]) -> str:
    """Return the docstring of a tool's function, formatted for the terminal."""
    lines = (function.__doc__ or "").strip().split("\n")
    return "\n".join(line.removeprefix("    ") for line in lines).replace("``", "`")
