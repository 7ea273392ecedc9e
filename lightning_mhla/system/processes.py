"""The processes that share a command: their ranks, as torchrun or srun gave them, and what they agree on."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def process_ranks() -> tuple[int, int, int]:
    """Rank, number of processes and local rank, as torchrun or srun say; (0, 1, 0) on its own.

    SLURM's numbers count inside a step that srun started; a batch script or a shell of salloc is one process.
    """
    names: tuple[str, ...] = ()
    if "RANK" in os.environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif "SLURM_STEP_ID" in os.environ:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    if not names:
        return 0, 1, 0
    rank, world, local = (int(os.environ.get(name, default)) for name, default in zip(names, "010", strict=True))
    return rank, world, local


def process_device(asked: str | None) -> torch.device:
    """The device that a command was asked to use, or the GPU of this process, or the CPU."""
    device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", process_ranks()[2] % torch.cuda.device_count())
    return device


class Agreement:
    """Votes of all processes, on every process, without waiting for an accelerator.

    Made on every process at once, after the process group is there; on its own, a process agrees with itself.
    """

    def __init__(self) -> None:
        self.shared = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group: Any = None
        if self.shared:
            self._group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def any(self, *said: bool) -> tuple[bool, ...]:
        """For each question whether any process said yes; every process calls it, with equally many."""
        if not self.shared:
            return said
        votes = torch.tensor(said, dtype=torch.int32)
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._group)
        return tuple(bool(vote) for vote in votes)


def check_open_files(workers: int) -> None:
    """Reject worker processes for which a process may not open enough files: a batch that cannot be sent is waited for.

    Args:
        workers: number of worker processes to start.

    Raises:
        OSError: saying what to do.
    """
    folder = Path("/proc/self/fd")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = (len(list(folder.iterdir())) if folder.is_dir() else 16) + 6 * workers + 8
    if workers and limit != resource.RLIM_INFINITY and needed > limit:
        raise OSError(
            f"too many open files: the limit is {limit}, and {workers} worker processes need {needed} or more; raise the limit "
            "of this process (ulimit -n 65536), or use fewer worker processes (--data.num_workers)"
        )
