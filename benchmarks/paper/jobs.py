"""Training of the variants of studies with several seeds, one run after the other or several at a time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing import active_children, get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

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
    """Train and measure the runs of all jobs. If this process ends, also by SIGTERM, the runs end too.

    Args:
        jobs: runs to train; those with a result are skipped.
        at_once: number of runs to train at the same time. If there are several, each has a process with one thread.
        runs: folder of the runs.
        results: folder of the results.
        options: options of ``lightning fit`` for all runs.
        after_each: function to call after each run.

    Raises:
        SystemExit: if a run fails; the other ones are ended.
    """
    previous = signal.signal(signal.SIGTERM, end_process)
    try:
        if at_once == 1:
            for job in jobs:
                job.study.run(job.variant, job.seed, runs, results, options)
                after_each()
            return
        # Spawned processes read this variable when they import torch.
        os.environ["OMP_NUM_THREADS"] = "1"
        for part in in_two_parts(jobs, results):  # a run must have ended before others start from its weights
            run_beside(part, at_once, (runs, results, options), after_each)
    finally:
        for process in active_children():
            process.terminate()
            process.join()
        signal.signal(signal.SIGTERM, previous)


def run_beside(
    jobs: Sequence[Job],
    at_once: int,
    arguments: tuple[Path, Path, Sequence[str]],
    after_each: Callable[[], object],
) -> None:
    """Train and measure several runs at the same time, each in a process of its own.

    Args:
        jobs: runs to train.
        at_once: maximum number of processes.
        arguments: folder of the runs, folder of the results, and options of ``lightning fit``.
        after_each: function to call after each run.

    Raises:
        SystemExit: if a run fails.
    """
    waiting, running = list(jobs), dict[Any, BaseProcess]()
    process: BaseProcess
    while waiting or running:
        while waiting and len(running) < at_once:
            process = get_context("spawn").Process(target=run_job, args=(waiting.pop(0), *arguments))
            process.start()
            running[process.sentinel] = process
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:  # it has printed the reason
                raise SystemExit(process.exitcode if process.exitcode > 0 else 128 - process.exitcode)
            after_each()


def run_job(job: Job, runs: Path, results: Path, options: Sequence[str]) -> None:
    """Train and measure one run in a process of its own, which ends its command if it is told to end."""
    signal.signal(signal.SIGTERM, end_process)
    job.study.run(job.variant, job.seed, runs, results, options)


def end_process(number: int, _: object) -> None:
    """Signal handler that raises SystemExit, so that a process ends what it has started."""
    raise SystemExit(128 + number)
