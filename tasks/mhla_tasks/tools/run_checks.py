"""Check of the options of all runs of a sweep before the first run starts, in a separate process."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mhla_tasks.commandline.console import harmless
from mhla_tasks.tools.processes import describe_status, exit_status

log = logging.getLogger(__name__)

PROGRAM = "mhla_tasks.tools.dry_runs"
"""Module that checks the runs. It is not imported here, because it imports all libraries that training needs."""

LONGEST_CAUSE = 500
"""Maximum number of characters that a warning quotes from the output of a check that failed."""


@dataclass(frozen=True)
class CheckedRun:
    """Folder and command-line arguments of a run of a sweep, whose options are to be checked.

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
        Error message that names the run; None if no error was found. If the check itself does not finish, a warning is logged
        and None is returned, because the runs report their errors themselves.
    """
    request = json.dumps({"here": here, "runs": [asdict(run) for run in runs]})
    command = [sys.executable, "-m", PROGRAM]
    done = subprocess.run(command, input=request, capture_output=True, text=True, errors="replace")
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.split("\n")
        cause = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
        status = describe_status(exit_status(done.returncode))
        log.warning("the options of the runs could not be checked (%s: %s)", status, harmless(cause)[:LONGEST_CAUSE])
        return None
    return answer["problem"]
