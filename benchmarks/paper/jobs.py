"""Training of the variants of studies with several seeds, one run after the other or several at a time."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import NamedTuple

from benchmarks.paper.study import Study


class Job(NamedTuple):
    """Run to train and measure: one variant of a study with one seed."""

    study: Study
    variant: str
    seed: int


def in_two_parts(jobs: Sequence[Job], results: Path) -> tuple[list[Job], list[Job]]:
    """Split jobs into those whose weights other jobs start from, and all others.

    Args:
        jobs: requested jobs.
        results: folder of the results.

    Returns:
        Jobs to train first, which include required jobs that were not requested, and all other requested jobs.
    """
    origins = []
    for study, _, seed in jobs:
        if study.needs is not None:
            first, start = study.needs
            origin = Job(first, start, study.origin(seed))
            if origin not in origins and not first.has(start, origin.seed, results):
                origins.append(origin)
    return origins, [job for job in jobs if job not in origins]


def run_jobs(
    jobs: Sequence[Job],
    at_once: int,
    runs: Path,
    results: Path,
    options: Sequence[str],
    after_each: Callable[[], object],
) -> None:
    """Train and measure the runs of all jobs.

    Args:
        jobs: runs to train; those with a result are skipped.
        at_once: number of runs to train at the same time. If there are several, each has one thread.
        runs: folder of the runs.
        results: folder of the results.
        options: options of ``lightning fit`` for all runs.
        after_each: function to call after each run.
    """
    if at_once == 1:
        for study, variant, seed in jobs:
            study.run(variant, seed, runs, results, options)
            after_each()
        return
    # Spawned processes read this variable when they import torch.
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    pool = ProcessPoolExecutor(at_once, mp_context=get_context("spawn"), initializer=lead_group)
    try:
        for part in in_two_parts(jobs, results):  # a run must have ended before others start from its weights
            rows = [pool.submit(study.run, variant, seed, runs, results, options) for study, variant, seed in part]
            for row in as_completed(rows):
                row.result()
                after_each()
    except BaseException:
        for process in active_children():  # otherwise they would go on training, and begin the next jobs
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def lead_group() -> None:
    """Make this process the leader of a process group that ends completely if the process receives SIGTERM."""
    os.setpgrp()
    signal.signal(signal.SIGTERM, end_group)


def end_group(number: int, _: object) -> None:
    """Send a signal to all processes of this process's group, wait for its children, and end this process."""
    signal.signal(number, signal.SIG_IGN)
    os.killpg(0, number)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(128 + number)  # an exception would only end the current job, and the process would begin the next one
