"""Completion of commands, tools, options and configuration names in bash and zsh."""

from __future__ import annotations

from collections.abc import Sequence

from mhla_tasks.commandline import registry, shipped

REQUEST = "--complete"
"""First argument with which the shell's completion script asks this program for candidates."""

SCRIPT = """\
_lightning_mhla() {
    local IFS=$'\\n'
    COMPREPLY=($("$1" --complete "$COMP_WORDBREAKS" "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null
}
complete -o default -F _lightning_mhla lightning mhla lightning-mhla
"""
SHELLS = {"bash": SCRIPT, "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{SCRIPT}"}

OPTIONS = {
    "fit": ("--config", "--run_dir=", "--ckpt_path=", "--sweep", "--sweep_sbatch", "--allow=", "--print_config",
            "--seed_everything=", "--model.help", "--data.help", "--help"),
    "validate": ("--config", "--ckpt_path=", "--run_dir=", "--allow=", "--print_config", "--help"),
}  # fmt: skip
OPTIONS |= dict.fromkeys(("test", "predict"), OPTIONS["validate"])


def answer(breaks: str, line: str) -> list[str]:
    """Return the possible completions of the word before the cursor, in the form that the shell expects.

    When the shell inserts a completion, it replaces only the text after the last word-break character. The completions
    therefore omit the text before it.

    Args:
        breaks: word-break characters of the shell, the value of ``COMP_WORDBREAKS``.
        line: text of the command line up to the cursor.
    """
    arguments = line.split(" ")[1:]
    last = arguments[-1] if arguments else ""
    start = max((last.rfind(letter) + 1 for letter in breaks), default=0)
    return [word[start:] for word in complete([*(word for word in arguments[:-1] if word), last])]


def complete(arguments: Sequence[str]) -> list[str]:
    """Return the possible completions of the last argument on a command line.

    Args:
        arguments: command-line arguments without the name of the program. The last one may be incomplete or empty.
    """
    *previous, last = arguments or [""]
    if last.startswith((shipped.PREFIX, f"--config={shipped.PREFIX}")) or (previous[-1:] == ["--config"] and not last):
        start = "--config=" if last.startswith("--") else ""
        candidates = [f"{start}{shipped.PREFIX}{name}" for name in shipped.names()]
    elif tool := registry.tool_named(previous):
        candidates = _options(tool)
    elif previous and previous[0] in OPTIONS:
        candidates = list(OPTIONS[previous[0]])
    elif previous and previous[0] in registry.families():
        candidates = [name.split(" ")[1] for name in registry.LOCATIONS if name.startswith(f"{previous[0]} ")]
    elif not previous:
        names = [name.split(" ")[0] for name in registry.LOCATIONS]
        candidates = list(dict.fromkeys([*registry.LIGHTNING, *names, "--help", "--version"]))
    else:
        candidates = []
    return [word for word in candidates if word.startswith(last)]


def _options(tool: str) -> list[str]:
    if getattr(registry.function_of(tool), "passes_on", False):
        return ["--help"]
    parser, _ = registry.parser_of(tool)
    return [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
