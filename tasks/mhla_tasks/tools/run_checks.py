"""Check of the options of all runs of a sweep before the first run starts, in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PROGRAM = "mhla_tasks.tools.dry_runs"
"""Module that checks the runs. It is not imported here, because it imports all libraries that training needs."""


@dataclass(frozen=True)
class CheckedRun:
    """Run of a sweep whose options are checked.

    Attributes:
        folder: folder of the run.
        words: command-line arguments of the run after ``fit``, without ``--run_dir``.
    """

    folder: str
    words: list[str]


def find_problem(runs: Sequence[CheckedRun], here: bool) -> str | None:
    """Check runs in a separate process, and return a message about the first one that cannot start.

    Args:
        runs: runs of a sweep, in the order in which they will be trained.
        here: whether the runs train on this machine, so that their devices and local files must exist.

    Returns:
        Error message that names the run; None if no error was found, or if the check itself did not finish.
    """
    request = json.dumps({"here": here, "runs": [asdict(run) for run in runs]})
    command = [sys.executable, "-m", PROGRAM]
    done = subprocess.run(command, input=request, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:  # the process was killed, for example; the runs report what is wrong
        return None
    problem: str | None = answer["problem"]
    return problem
