"""The command line in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_cli(*arguments: str, folder: Path | None = None) -> str:
    """Run ``lightning`` with these arguments, in ``folder``; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "mhla_tasks.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr
