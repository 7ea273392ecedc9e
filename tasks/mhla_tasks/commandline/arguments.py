"""Parsing of the command line into a command and a list of options, whose values stay uninterpreted strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

ABBREVIATIONS = {"c": "config", "h": "help", "frames": "model.sampling.frames"}
"""Full names of options by short name. ``--frames`` sets the number of frames in each clip that a video model generates."""

WITHOUT_VALUE = ("help", "print_config")
"""Options that never take the next argument as their value."""

WITH_ANY_VALUE = ("sweep_sbatch",)
"""Options whose value may look like an option: ``--sweep_sbatch --nodes=2``."""

HELP = ".help"
"""Suffix of options that print the help of a class, such as ``--model.help``."""


class UsageError(ValueError):
    """Error for an invalid command line or configuration, with a message for the user."""


@dataclass(frozen=True)
class Option:
    """Command-line option before its value is interpreted.

    Attributes:
        name: name without leading dashes, such as ``config``, ``trainer.max_epochs`` or ``trainer.callbacks+``.
        value: text of the value; None if the option has no value.
        words: command-line arguments that the option consists of: ``--name=value``, ``--name`` and its value, or only
            ``--name``.
    """

    name: str
    value: str | None
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """Option as the user typed it, for messages."""
        return " ".join(self.words)

    @property
    def is_request(self) -> bool:
        """Whether the option only prints a text, such as ``--help``, and is not part of a run's configuration."""
        return self.name in WITHOUT_VALUE or self.name.endswith(HELP)


@dataclass(frozen=True)
class CommandLine:
    """Parsed command line of ``fit``, ``validate``, ``test`` or ``predict``.

    Attributes:
        command: name of the command.
        options: options in the order in which they were given.
    """

    command: str
    options: tuple[Option, ...] = ()

    def values(self, name: str) -> list[str]:
        """Return the values of all occurrences of an option, in the order in which they were given."""
        return [option.value for option in self.options if option.name == name and option.value is not None]

    def last(self, name: str) -> str | None:
        """Return the last value of an option, which overrides earlier ones; None if the option is absent or has no value."""
        return next(reversed(self.values(name)), None)

    def asks_for(self, name: str) -> bool:
        """Return whether an option is present, with or without a value."""
        return any(option.name == name for option in self.options)

    def without(self, *names: str) -> CommandLine:
        """Return a copy of the command line without the named options."""
        return replace(self, options=tuple(option for option in self.options if option.name not in names))

    @property
    def words(self) -> list[str]:
        """Command-line arguments of all options, without the name of the command."""
        return [word for option in self.options for word in option.words]


def read_words(arguments: Sequence[str], commands: Collection[str]) -> CommandLine:
    """Parse command-line arguments into a command and its options.

    The value of an option follows an equals sign. Without an equals sign, the next argument is the value unless it is an
    option. ``--help`` and ``--print_config`` never take the next argument as their value; ``--sweep_sbatch`` always does.

    Args:
        arguments: command-line arguments without the name of the program.
        commands: names of all commands.

    Returns:
        The command and its options.

    Raises:
        UsageError: if no command is given, if an option lacks its value, or if an argument is not the command, an option or
            the value of an option.
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
        if option.value is None and not option.is_request:
            raise UsageError(f"{option.text} needs a value: {option.text}=VALUE")
    return CommandLine(command, tuple(options))


def _read_option(word: str, remaining: list[str]) -> Option:
    """Parse one option.

    Args:
        word: argument that begins the option, such as ``--name=value`` or ``--name``.
        remaining: arguments after ``word``. If the first one is the value of the option, it is removed from the list.
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
    """Return whether an argument is an option. Values such as ``-1`` and ``-`` are not."""
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
