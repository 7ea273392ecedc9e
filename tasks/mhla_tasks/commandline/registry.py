"""The tools of the command line, beside the commands of Lightning: ``lightning NAME [options]``.

A tool is a function that adds its options to a parser and returns what runs them. Its docstring is its help, the first
line its summary. The modules here import what they need when they run, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from typing_extensions import override

from mhla_tasks.commandline.console import harmless, ignore_noise, set_levels, show_log
from mhla_tasks.commandline.errors import reported

Run = Callable[[argparse.Namespace], int | None]

LIGHTNING = {
    "fit": "Train and validate; --run_dir=FOLDER resumes, --sweep KEY=VALUE,VALUE trains several runs.",
    "validate": "Evaluate weights on the validation data.",
    "test": "Evaluate weights on the test data.",
    "predict": "Write what a model makes: samples, classes, clips, text.",
}
"""Lightning's own commands."""

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
"""Places of the tools' functions, by group and name."""


def passes_on(function: Callable[[Sequence[str]], int | None]) -> Callable[[Sequence[str]], int | None]:
    """Mark a tool that takes the words after its name as they are, for a parser of its own."""
    function.passes_on = True  # type: ignore[attr-defined]
    return function


class Parser(argparse.ArgumentParser):
    """A parser whose errors are two lines, and whose options may be written with a dash for every underscore."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and leave with status 2."""
        sys.stderr.write(f"error: {harmless(message)}\nhelp: {self.prog} --help\n")
        sys.exit(2)

    @override
    def parse_known_args(self, args: Sequence[str] | None = None, namespace: object = None) -> object:  # type: ignore[override]
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_underscores(word) for word in words], namespace)


def _with_underscores(word: str) -> str:
    if not word.startswith("--") or word == "--":
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def tool_named(words: Sequence[str]) -> str | None:
    """The tool that the first words name, of one word or two."""
    names = {name for tools in TOOLS.values() for name in tools}
    return next((name for count in (2, 1) if (name := " ".join(words[:count])) in names), None)


def families() -> set[str]:
    """First words of the tools of two words."""
    return {name.partition(" ")[0] for tools in TOOLS.values() for name in tools if " " in name}


def function_of(name: str) -> Callable[..., object]:
    """The function of a tool."""
    (place,) = (tools[name] for tools in TOOLS.values() if name in tools)
    module, _, function = place.partition(":")
    return getattr(import_module(f"mhla_tasks.tools.{module}"), function)


def parser_of(name: str) -> tuple[Parser, Run]:
    """Parser of a tool, and what runs what it parsed."""
    function = function_of(name)
    parser = Parser(
        prog=f"lightning {name}",
        description=help_text(function),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser, function(parser)  # type: ignore[return-value]


def run(name: str, words: Sequence[str]) -> int | None:
    """Run a tool; the exit status.

    Args:
        name: name of the tool.
        words: after its name.
    """
    function = function_of(name)
    ignore_noise()
    if getattr(function, "passes_on", False):
        set_levels()  # its own parser's program says where messages go
        with reported():
            return function(words)  # type: ignore[return-value]
    parser, do = parser_of(name)
    asked = parser.parse_args(words)
    show_log(sys.stderr)  # results alone go to standard output
    with reported():
        return do(asked)


def listing(start: str = "") -> str:
    """All commands and tools by group, or those whose name starts with a word."""
    groups = {"training": LIGHTNING} if not start else {}
    for group, tools in TOOLS.items():
        found = {name: help_text(function_of(name)).partition("\n")[0] for name in tools if name.startswith(start)}
        groups |= {group: found} if found else {}
    width = max(len(name) for found in groups.values() for name in found)
    parts = [
        "\n".join([f"{group}:", *(f"  {name:<{width}}  {summary}" for name, summary in found.items())])
        for group, found in groups.items()
    ]
    return "\n\n".join(parts)


def nearest(word: str) -> str:
    """A suggestion for a mistyped command; empty if no command is similar."""
    names = [*LIGHTNING, *{name.partition(" ")[0] for tools in TOOLS.values() for name in tools}]
    found = difflib.get_close_matches(word, names, 1)
    return f"; did you mean {found[0]}?" if found else ""


def help_text(function: Callable[..., object]) -> str:
    """The docstring of a tool, for a terminal."""
    lines = (function.__doc__ or "").strip().split("\n")
    return "\n".join(line.removeprefix("    ") for line in lines).replace("``", "`")
