"""Ranks and devices of the processes of a run, and votes among these processes."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def process_ranks() -> tuple[int, int, int]:
    """Return the rank, the number of processes and the local rank of this process, as set by torchrun or srun.

    SLURM's environment variables are used only in processes that srun started. A batch script or a shell that salloc opened
    counts as a single process.

    Returns:
        Rank, number of processes and local rank; (0, 1, 0) for a process that neither torchrun nor srun started.
    """
    if "RANK" in os.environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif "SLURM_STEP_ID" in os.environ:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    else:
        return 0, 1, 0
    rank, world, local = (int(os.environ.get(name, default)) for name, default in zip(names, "010", strict=True))
    return rank, world, local


def process_device(name: str | None) -> torch.device:
    """Return the requested device or, by default, the GPU of this process.

    Args:
        name: name of the requested device, such as ``cuda:0``. The name ``cuda`` stands for the GPU with the local rank of this
            process. None also stands for this GPU, or for the CPU if there is no GPU.

    Raises:
        ValueError: if torch does not know the name, or this machine does not have the device.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"device={name!r} is not a device of torch, such as cpu, cuda or cuda:0") from None
    if device.type == "cpu":
        return device
    module = None if device.type == "meta" else getattr(torch, device.type, None)
    count = module.device_count() if module is not None and module.is_available() else 0
    if (device.index or 0) >= count:
        raise ValueError(
            f"device={name!r} is not available: torch sees {count} devices of this type; the device cpu always works"
        )
    return torch.device(device.type, process_ranks()[2] % count) if device.index is None else device


class Agreement:
    """Vote among all processes of a run on yes-or-no questions. A vote does not wait for pending work on the GPU.

    Every process must create an instance after the process group is initialized. With a single process, the result of a vote is
    the answer of this process.
    """

    def __init__(self) -> None:
        self.shared = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group: Any = None
        if self.shared:
            # NCCL would enqueue the vote behind the kernels of the step, and reading it would wait for all of them.
            self._group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def any(self, *answers: bool) -> tuple[bool, ...]:
        """Return, for each of several yes-or-no questions, whether any process answers yes.

        Every process must call this method with the same number of answers.

        Args:
            answers: this process's answer to each question.
        """
        if not self.shared:
            return answers
        votes = torch.tensor(answers, dtype=torch.int32)
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._group)
        return tuple(bool(vote) for vote in votes)


def check_open_files(workers: int) -> None:
    """Check that the system's limit on open files is high enough for a number of worker processes.

    Without this check, the data loader would wait forever for a batch from a worker that cannot open a file.

    Args:
        workers: number of worker processes to start.

    Raises:
        OSError: if the limit is too low; the message says what to do.
    """
    folder = Path("/proc/self/fd")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = (len(list(folder.iterdir())) if folder.is_dir() else 16) + 6 * workers + 8
    if workers and limit != resource.RLIM_INFINITY and needed > limit:
        raise OSError(
            f"too many open files: the limit is {limit}, but {workers} worker processes need at least {needed}; "
            "raise the limit of this process (ulimit -n 65536), or use fewer worker processes (--data.num_workers)"
        )
