"""Runs of the command line in separate processes."""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
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
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            check=False,
            cwd=folder,
        )
        status, text = done.returncode, done.stdout + done.stderr
    else:
        devices = [match[1] for word in arguments if (match := re.fullmatch(r"--trainer\.devices=(\d+)", word))]
        status, text = fork_server().run(*arguments, folder=folder, processes=int(devices[-1]) if devices else 1)
    assert status == 0, text[-6000:]
    return text
