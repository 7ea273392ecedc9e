"""Processes of this machine and their descendants, and a way to kill them as if their machine had failed."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """Process as described by ``/proc``: its id, its parent's id, command line, and initial environment variables."""

    pid: int
    parent: int
    command: str
    variables: dict[str, str]


def running_processes() -> dict[int, Process]:
    """Return the readable processes by id, except this one and those that end while they are read."""
    processes = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            parent, state = _parent_and_state(entry)
            block = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        # Zombies and dead processes have ended; only their parents have not read their status yet.
        if state in "ZX":
            continue
        pairs = (item.partition("=") for item in block.decode(errors="replace").split("\0") if "=" in item)
        variables = {name: value for name, _, value in pairs}
        processes[int(entry.name)] = Process(int(entry.name), parent, command.decode(errors="replace"), variables)
    return processes


def _parent_and_state(entry: Path) -> tuple[int, str]:
    # The name of the program stands in parentheses and may contain spaces and parentheses itself.
    after_name = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return int(after_name[1]), after_name[0]


def with_descendants(roots: set[int], processes: dict[int, Process]) -> list[int]:
    """Return the ids of processes and of all their descendants, each parent before its children.

    Args:
        roots: ids of the processes.
        processes: all processes of the machine by id.
    """
    family = {pid: _depth(pid, processes) for pid in roots if pid in processes}
    while grown := {p.pid for p in processes.values() if p.parent in family and p.pid not in family}:
        family.update((pid, _depth(pid, processes)) for pid in grown)
    return sorted(family, key=family.__getitem__)


def _depth(pid: int, processes: dict[int, Process]) -> int:
    depth = 0
    while (process := processes.get(pid)) is not None:
        pid = process.parent
        depth += 1
    return depth


def kill_together(family: list[int]) -> None:
    """Kill processes as if at the same instant.

    Args:
        family: process ids, each parent before its children.
    """
    # stop all processes first, parents before children, so that none can report the end of another
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    # then kill children before parents: the kernel wakes stopped processes whose parents end, and srun would kill the job
    for pid in reversed(family):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
