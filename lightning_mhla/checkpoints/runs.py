"""One folder for each run, whoever restarts it: found checkpoints, and a lock against a second process at work there."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import shutil
import time
from pathlib import Path
from typing import Any, TextIO

from lightning_mhla.system.processes import process_ranks

log = logging.getLogger(__name__)

WAIT_AFTER_REQUEUE = 120.0
"""Seconds that a requeued job waits for the lock: file servers let go of a dead node's locks after 90."""


class RunFolder:
    """The folder of a run, taken by this process.

    Args:
        path: path of the folder; made if it is not there.

    Raises:
        ValueError: when another process trains there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: TextIO | None = None
        path.mkdir(parents=True, exist_ok=True)
        if is_first_process():
            self._take(WAIT_AFTER_REQUEUE if int(os.environ.get("SLURM_RESTART_COUNT", "0")) else 0.0)

    @property
    def taken(self) -> bool:
        """Whether this is the process that looks after the folder."""
        return is_first_process()

    def keep(self, name: str) -> None:
        """Rename a file of an earlier start that a new one would delete: ``metrics.csv`` to ``metrics-1.csv`` and so on."""
        file = self.path / name
        if file.is_file():
            stem, suffix = file.stem, file.suffix
            file.rename(self.path / f"{stem}-{len(list(self.path.glob(f'{stem}-*{suffix}'))) + 1}{suffix}")

    def _take(self, patience: float) -> None:
        stream = (self.path / "lock").open("a+")
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process alone: workers do not inherit it
                break
            except BlockingIOError as error:
                if time.monotonic() < until:
                    time.sleep(1)
                    continue
                stream.seek(0)
                raise ValueError(
                    f"{self.path} is in use by {_owner(stream.read())}; stop that one, or give another --run_dir"
                ) from error
            except OSError as error:
                log.warning("%s keeps no locks (%s): make sure that no two jobs use it", self.path, error)
                break
        stream.truncate(0)
        owner = {"host": platform.node(), "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID")}
        stream.write(json.dumps(owner))
        stream.flush()
        self._lock = stream  # held until the process ends
        self._tidy()

    def _tidy(self) -> None:
        """Remove what a killed process had begun to write; put a checkpoint back that it was about to replace."""
        for old in self.path.rglob("*.ckpt.old"):
            target = old.with_suffix("")
            if target.exists():
                shutil.rmtree(old)
            else:
                old.rename(target)
        for begun in self.path.rglob("*.part"):
            shutil.rmtree(begun) if begun.is_dir() else begun.unlink()


def in_use(path: Path) -> bool:
    """Whether a process trains in the folder of a run."""
    try:
        with (path / "lock").open("r+") as stream:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def is_first_process() -> bool:
    """Whether this is the first process of a run, before any process group is there."""
    return process_ranks()[0] == 0 and not int(os.environ.get("LOCAL_RANK", "0")) + int(
        os.environ.get("NODE_RANK", "0")
    )


def _owner(text: str) -> str:
    try:
        owner: dict[str, Any] = json.loads(text)
    except ValueError:
        return "another process"
    job = f", job {owner['job']}" if owner.get("job") else ""
    return f"process {owner.get('pid')} on {owner.get('host')}{job}"
