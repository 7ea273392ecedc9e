"""The processes that share a command, as torchrun or srun started them."""

from __future__ import annotations

import os


def process_place() -> tuple[int, int, int]:
    """Rank, number of processes and local rank, as torchrun or srun say; (0, 1, 0) on its own.

    SLURM's numbers count inside a step that srun started; a batch script or a shell of salloc is one process.
    """
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID") if "SLURM_STEP_ID" in os.environ else ("", "", "")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK") if "RANK" in os.environ else names
    rank, world, local = (int(os.environ.get(name, default)) for name, default in zip(names, "010", strict=True))
    return rank, world, local
