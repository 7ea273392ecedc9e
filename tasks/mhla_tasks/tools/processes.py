"""Functions that run commands in child processes, and interpret their exit statuses."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

KILLED = 128 + signal.SIGKILL
"""Exit status of a command that was killed by SIGKILL, which Linux sends if memory runs out."""


def exit_status(returncode: int) -> int:
    """Convert a return code of :mod:`subprocess`, which is -n after signal n, to a shell's exit status, which is 128 + n."""
    return returncode if returncode >= 0 else 128 - returncode


def ended_by_signal(status: int) -> bool:
    """Return whether an exit status means that a signal ended the command, such as 137 for SIGKILL."""
    return 128 < status < 128 + signal.NSIG  # NSIG is one more than the largest number of a signal


def describe_status(status: int) -> str:
    """Describe how a command with a nonzero exit status ended, for example as ``ended with status 1``."""
    return "killed by signal 9, as if memory ran out" if status == KILLED else f"ended with status {status}"


def run_command(command: list[str], output: Path | None = None, inherited: Sequence[int] = ()) -> int:
    """Run a command and wait until it ends.

    The signals SIGTERM and SIGUSR1 are forwarded to the command, which decides how to react. The command is
    never killed.

    Args:
        command: program and arguments.
        output: file to which the command's standard output and standard error are appended; None to show them on the terminal.
        inherited: file descriptors that stay open in the command.

    Returns:
        The exit status of the command; 130 after Ctrl+C, and 128 + n if signal n ended it.
    """
    with open(output, "ab") if output is not None else nullcontext() as stream:
        errors = None if stream is None else subprocess.STDOUT
        child = subprocess.Popen(command, stdout=stream, stderr=errors, pass_fds=inherited)
    interrupts: list[int] = []
    # The command decides what to do, such as saving its state, so the parent waits for it and does not kill it.
    previous_handlers = {
        number: signal.signal(number, lambda n, _: child.send_signal(n)) for number in (signal.SIGTERM, signal.SIGUSR1)
    }
    # A terminal sends SIGINT to both processes, so it is not forwarded. In background jobs it is ignored and stays so.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        previous_handlers[signal.SIGINT] = signal.signal(signal.SIGINT, lambda n, _: interrupts.append(n))
    try:
        status = child.wait()
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
    if interrupts:
        return 130
    return exit_status(status)
