"""Commands that a report suggests: those that use the model of a finished run, or the one that resumes an unfinished run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

USAGE = {
    "Score it on the validation data": "lightning validate {run}",
    "Export it for other programs": "lightning export {folder} exported",
}
"""Commands for the model of any run, by purpose.

``{run}`` stands for the option that names the run, and ``{folder}`` for its folder.
"""


class NextStep(NamedTuple):
    """Command that a report suggests.

    Attributes:
        purpose: what the command does.
        command: command line.
    """

    purpose: str
    command: str


def next_steps(folder: Path, checkpoints: Path, record: Mapping[str, Any]) -> list[NextStep]:
    """Return the commands that use the model of a finished run, or the command that resumes an unfinished run.

    Args:
        folder: folder of the run.
        checkpoints: folder of the run's checkpoints.
        record: content of the run's ``run.json``. Its entry ``finished`` says whether the run is finished. Its entry
            ``usage``, if any, maps purposes to commands for this kind of model, in which ``{run}`` and ``{folder}`` are
            replaced as in :data:`USAGE`.

    Returns:
        Commands, the most useful first. The list is empty if no command can use or resume the run, because the run has no
        ``config.yaml``.
    """
    name = _quoted(folder)
    has_run_dir = checkpoints.parent == folder and (folder / "lock").exists()
    if record["finished"]:
        last = checkpoints / "last.ckpt"
        run = f"--run_dir {name}" if has_run_dir else f"--ckpt_path {_quoted(last if last.exists() else checkpoints)}"
        usage = {**record.get("usage", {}), **USAGE}
        if not (folder / "config.yaml").exists():  # a run in Python, whose model the command line does not know
            return []
        return [
            NextStep(purpose, command.replace("{run}", run).replace("{folder}", name))
            for purpose, command in usage.items()
        ]
    if has_run_dir:
        return [NextStep("Resume it", f"lightning fit --run_dir {name}")]
    if (folder / "config.yaml").exists():
        config = _quoted(folder / "config.yaml")
        return [NextStep("Resume it", f"lightning fit --config {config} --ckpt_path {name}")]
    return []


def _quoted(path: Path) -> str:
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
