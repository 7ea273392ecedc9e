"""Training of the variants of studies with several seeds, one run after the other or several at a time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
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
    previous = signal.signal(signal.SIGTERM, end_jobs)
    try:
        if at_once == 1:
            for job in jobs:
                run_job(job, runs, results, options)
                after_each()
            return
        # Spawned processes read this variable when they import torch.
        os.environ["OMP_NUM_THREADS"] = "1"
        pool = ProcessPoolExecutor(at_once, get_context("spawn"), signal.signal, (signal.SIGTERM, end_jobs))
        try:
            for part in in_two_parts(jobs, results):  # a run must have ended before others start from its weights
                rows = [pool.submit(run_job, job, runs, results, options) for job in part]
                for row in as_completed(rows):
                    row.result()
                    after_each()
        except KeyboardInterrupt:
            end_workers()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    finally:
        signal.signal(signal.SIGTERM, previous)


def run_job(job: Job, runs: Path, results: Path, options: Sequence[str]) -> None:
    """Train and measure one run, unless a signal has told this process to end."""
    if _ended:  # a pool gives its workers jobs in advance
        raise SystemExit(_ended[0])
    job.study.run(job.variant, job.seed, runs, results, options)


_ended: list[int] = []
"""Exit status of this process after a signal; empty before."""


def end_jobs(number: int, _: object) -> None:
    """Signal handler that ends the workers of this process, and raises SystemExit, which ends the command that it runs."""
    _ended.append(128 + number)
    end_workers()
    raise SystemExit(_ended[0])


def end_workers() -> None:
    """Send SIGTERM to all workers of this process; otherwise they would go on training, and begin the next runs."""
    for process in active_children():
        process.terminate()
