"""Parser that reads the arguments of a command once into one object, without interpreting their values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

ABBREVIATIONS = {"c": "config", "h": "help"}
"""Long names of options by their short names."""

WITHOUT_VALUE = ("help", "print_config")
"""Options that never take the next argument as their value."""

WITH_ANY_VALUE = ("sweep_sbatch",)
"""Options whose value may look like an option: ``--sweep_sbatch --nodes=2``."""

HELP = ".help"
"""Suffix of options that print the help of a class, such as ``--model.help``."""


class UsageError(ValueError):
    """Error for an invalid command line, with a message for the user."""


@dataclass(frozen=True)
class Option:
    """Option as typed on the command line, before its value is interpreted.

    Attributes:
        name: name without dashes: ``config``, ``trainer.max_epochs``, ``trainer.callbacks+``.
        value: text after the equals sign, or the next argument; None if there is neither.
        words: the one or two command-line arguments that spell the option and its value.
    """

    name: str
    value: str | None
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """Text of the option as typed on the command line, for messages."""
        return " ".join(self.words)


@dataclass(frozen=True)
class CommandLine:
    """Lightning command, such as ``fit``, and its options, as parsed from the command line.

    Attributes:
        command: ``fit``, ``validate``, ``test`` or ``predict``.
        options: options in the order of the command line.
    """

    command: str
    options: tuple[Option, ...] = ()

    def values(self, name: str) -> list[str]:
        """Return the values of all occurrences of the option ``name``, in the order of the command line."""
        return [option.value for option in self.options if option.name == name and option.value is not None]

    def last(self, name: str) -> str | None:
        """Return the last value of the option ``name``, which overrides earlier ones; None if it has no value."""
        return next(reversed(self.values(name)), None)

    def asks_for(self, name: str) -> bool:
        """Return whether the option ``name`` is on the command line, with or without a value."""
        return any(option.name == name for option in self.options)

    def without(self, *names: str) -> CommandLine:
        """Return a copy of the command line without the options whose names are in ``names``."""
        return replace(self, options=tuple(option for option in self.options if option.name not in names))

    @property
    def words(self) -> list[str]:
        """Command-line arguments that spell all options, without the name of the command."""
        return [word for option in self.options for word in option.words]


def read_words(arguments: Sequence[str], commands: Collection[str]) -> CommandLine:
    """Parse command-line arguments into a command and its options.

    The value of an option follows an equals sign, or is the next argument unless that is itself an option.

    Args:
        arguments: arguments after the name of the program.
        commands: names of all commands.

    Raises:
        UsageError: if there is no command, an option lacks its value, or an argument is not the command, an option or a value.
    """
    command: str | None = None
    options: list[Option] = []
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        if _is_option(word):
            options.append(_read_option(word, remaining))
        elif command is None and word in commands:
            command = word
        else:
            raise UsageError(_unexpected(word, options, command, commands))
    if command is None:
        raise UsageError(f"no command is given; the commands are {', '.join(commands)}")
    for option in options:
        if option.value is None and option.name not in WITHOUT_VALUE and not option.name.endswith(HELP):
            raise UsageError(f"{option.text} needs a value: {option.text}=VALUE")
    return CommandLine(command, tuple(options))


def _read_option(word: str, remaining: list[str]) -> Option:
    """Parse one option.

    Args:
        word: argument that holds the option, with or without its value.
        remaining: arguments after ``word``. The first one is removed if it is the value of the option.
    """
    name, equals, value = word.partition("=")
    name = name.lstrip("-")
    name = ABBREVIATIONS.get(name, name)
    if equals:
        return Option(name, value, (word,))
    if name in WITHOUT_VALUE or not remaining or (_is_option(remaining[0]) and name not in WITH_ANY_VALUE):
        return Option(name, None, (word,))
    value = remaining.pop(0)
    return Option(name, value, (word, value))


def _is_option(word: str) -> bool:
    """Return whether an argument is an option rather than a value such as ``-1`` or ``-``."""
    return (word.startswith("--") and word != "--") or word.partition("=")[0] in ("-c", "-h")


def _unexpected(word: str, options: Sequence[Option], command: str | None, commands: Collection[str]) -> str:
    if command is None and not options:
        return f"{word} is not a command; the commands are {', '.join(commands)}"
    last = next((option for option in reversed(options) if option.value is not None), None)
    if last is None:
        return f"unexpected argument {word!r}; options are written --name=value"
    name = last.words[0].partition("=")[0]
    return (
        f"unexpected argument {word!r} after {last.text}; options are written --name=value. For several values, quote them "
        f"as a list: '{name}=[{last.value},{word}]'"
    )
