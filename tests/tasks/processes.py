"""Runs of the command line in separate processes."""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from fork_server import ForkServer


@cache
def fork_server() -> ForkServer:
    """Return the fork server that all tests of this process share."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def run_cli(*arguments: str, folder: Path | None = None, launch: bool = False) -> str:
    """Run ``lightning`` in a separate process, check that it succeeds, and return its output.

    Args:
        arguments: arguments of the command; ``--trainer.devices=N`` starts N processes.
        folder: working folder; None for the current one.
        launch: whether Lightning starts the processes, from a new interpreter, as in a user's command.
    """
    if launch:
        done = subprocess.run(
            [sys.executable, "-m", "mhla_tasks.commandline.parser", *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "COLUMNS": "200"},
            check=False,
            cwd=folder,
        )
        status, text = done.returncode, done.stdout + done.stderr
    else:
        devices = [match[1] for word in arguments if (match := re.fullmatch(r"--trainer\.devices=(\d+)", word))]
        status, text = fork_server().run(*arguments, folder=folder, processes=int(devices[-1]) if devices else 1)
    assert status == 0, text[-6000:]
    return text


APART = """
import os
os.dup2(os.open("standard-error.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
from mhla_tasks.commandline.main import main
main()
"""


def run_apart(server: ForkServer, *arguments: str, folder: Path) -> tuple[int, str, str]:
    """Run ``lightning``, and return its exit status, standard output and standard error."""
    status, text = server.program(APART, *arguments, folder=folder)
    return status, text, (folder / "standard-error.txt").read_text()


END = "\x1e"
IN_TURN = f"""
import json, sys
from mhla_tasks.commandline.main import main
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    status = 0
    try:
        main()
    except SystemExit as stop:
        status = stop.code or 0
    sys.stdout.flush()
    sys.stderr.write(f"{END}{{status}}{END}")
    sys.stderr.flush()
"""
"""Runs command lines one after another; the exit status of each follows what it printed."""


def run_in_turn(*calls: Sequence[str], folder: Path, **environment: str) -> list[tuple[int, str]]:
    """Run several command lines in one process, and return the exit status and output of each.

    A command on a small model spends most of its time on the imports of its process.
    """
    status, text = fork_server().program(IN_TURN, json.dumps(calls), folder=folder, **environment)
    assert status == 0, text[-6000:]
    parts = text.split(END)
    return [(int(status), said) for said, status in zip(parts[:-1:2], parts[1::2], strict=True)]
