"""The command line in processes of its own."""

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
    """One for all tests of this process."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def run_cli(*arguments: str, folder: Path | None = None, launch: bool = False) -> str:
    """Run ``lightning`` with these arguments, in ``folder``; what it printed.

    Args:
        arguments: with ``--trainer.devices=N`` on N processes.
        folder: where.
        launch: leave it to Lightning to start the processes, from a new interpreter, as a user's command does.
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
