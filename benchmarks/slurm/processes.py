"""The processes of this machine, their families, and killing such a family as if its machine had died."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """One process as /proc describes it: its parent, its command line and the variables it was started with."""

    pid: int
    parent: int
    command: str
    variables: dict[str, str]


def running_processes() -> dict[int, Process]:
    """All processes of this user but this one; those that vanish while being read are left out."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            parent, state = _parent_and_state(entry)
            block = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if state in "ZX":
            continue
        pairs = (item.partition("=") for item in block.decode(errors="replace").split("\0") if "=" in item)
        variables = {name: value for name, _, value in pairs}
        found[int(entry.name)] = Process(int(entry.name), parent, command.decode(errors="replace"), variables)
    return found


def _parent_and_state(entry: Path) -> tuple[int, str]:
    after_name = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return int(after_name[1]), after_name[0]


def with_descendants(roots: set[int], processes: dict[int, Process]) -> list[int]:
    """`roots` and all below them, each parent before its children."""
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
    """SIGKILL as at one instant: stopped first, parents leading, so that none reports another's end.

    Then children die before parents: the kernel wakes stopped processes whose parents die, and srun would kill the job.
    """
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    for pid in reversed(family):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
