"""Command-line tools that check the machine and set up the shell."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from mhla_tasks.commandline.registry import Run, passes_on


@passes_on
def doctor(arguments: Sequence[str]) -> int:
    """Check versions, devices, the operator and a short training run on this machine; --json prints JSON.

    Args:
        arguments: command-line arguments after ``lightning doctor``.

    Returns:
        The exit status: 1 if a check finds a problem that prevents training, otherwise 0.
    """
    from mhla_tasks.tools.doctor import main

    return main(arguments)


def completion(parser: ArgumentParser) -> Run:
    """Print a shell script that lets the shell complete commands, options and configuration names.

        lightning completion bash >> ~/.bashrc

    The argument is the name of the shell, bash or zsh.
    """
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell")

    def run(args: Namespace) -> None:
        from mhla_tasks.commandline.completion import SHELLS

        sys.stdout.write(SHELLS[args.shell])

    return run
