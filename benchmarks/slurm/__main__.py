"""Faults that a training job on two nodes must survive, caused on a real SLURM cluster on this machine.

    python -m benchmarks.slurm --out benchmarks/results
    python -m benchmarks.slurm --faults "20 signals" "killed rank 0"

SLURM is taken from the PATH, or unpacked from Debian's packages (nothing is installed). Each fault happens to a separate job,
submitted with docker/slurm/train.sbatch. The losses of all starts of the job must be those of an undisturbed job.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.slurm.cluster import Cluster
from benchmarks.slurm.installation import SlurmUnavailable, find_or_unpack
from benchmarks.slurm.job import SlurmJob
from lightning_mhla.data.tables import default_cache
from lightning_mhla.system.files import write_json

STEPS = 1200

Make = Callable[..., SlurmJob]


def signals(cluster: Cluster, make: Make) -> SlurmJob:
    """Train a job and send it 20 signals, alternately USR1 to the batch script, as SLURM does, and TERM to one process.

    Args:
        cluster: cluster that runs the job.
        make: function that submits a training job.
    """
    job = make()
    for number in range(1, 21):
        job.wait_for_start(number, steps=10)
        if number % 2:
            cluster.signal(job.number, "USR1")
        else:
            # Alternates between the two processes of the job.
            os.kill(cluster.task_pids(job.number)[number // 2 % 2], signal.SIGTERM)
    return job


def time_limit(cluster: Cluster, make: Make) -> SlurmJob:
    """Train a job with a time limit of two minutes, which SLURM announces by a signal 30 to 90 s earlier.

    The limit is removed when the run has resumed.

    Args:
        cluster: cluster that runs the job.
        make: function that submits a training job.
    """
    job = make(time=2, signal="B:USR1@30", pace=0.12)
    job.wait_for_start(1)
    _wait_for_restart(job)
    job.wait_for_start(2)
    cluster.run("scontrol", "update", f"job={job.number}", "TimeLimit=60")
    return job


def preempted(cluster: Cluster, make: Make, warned: bool) -> SlurmJob:
    """Preempt both nodes of a training job by a job in a partition of higher priority.

    Args:
        cluster: cluster that runs the jobs.
        make: function that submits a training job.
        warned: whether SLURM sends the first job a signal before it ends the job.
    """
    # The batch script asks for a signal before the end of the job. CONT, which it ignores, replaces this signal.
    job = make(signal="B:USR1@30" if warned else "B:CONT@1")
    job.wait_for_start(1, steps=40)
    script = job.folder / "urgent.sh"
    script.write_text("#!/bin/bash\nsrun sleep 3\n")
    urgent = cluster.submit(script, partition="high", nodes=2, output=str(job.folder / "urgent.txt"))
    cluster.wait(urgent, timeout=90)
    return job


def requeued(cluster: Cluster, make: Make) -> SlurmJob:
    """Train a job and put it back into the queue by ``scontrol requeue``.

    Args:
        cluster: cluster that runs the job.
        make: function that submits a training job.
    """
    job = make()
    job.wait_for_start(1, steps=40)
    cluster.requeue(job.number)
    return job


def killed_rank(cluster: Cluster, make: Make, rank: int) -> SlurmJob:
    """Train a job and kill the process of one rank by SIGKILL.

    Args:
        cluster: cluster that runs the job.
        make: function that submits a training job.
        rank: rank of the process to kill.
    """
    job = make()
    job.wait_for_start(1, steps=40)
    cluster.kill_rank(job.number, rank)
    return job


def dead_node(cluster: Cluster, make: Make, node: int) -> SlurmJob:
    """Train a job, kill a node's slurmd and all processes that it started, and restart the node after a second.

    Args:
        cluster: cluster that runs the job.
        make: function that submits a training job.
        node: index of the node, 0 or 1.
    """
    job = make()
    job.wait_for_start(1, steps=40)
    cluster.kill_node(cluster.nodes[node])
    time.sleep(1)
    cluster.start_node(cluster.nodes[node])
    return job


def dead_slurmd(cluster: Cluster, make: Make) -> SlurmJob:
    """Train a job, and kill and restart the slurmd of one node while the job runs.

    Args:
        cluster: cluster that runs the job.
        make: function that submits a training job.
    """
    job = make()
    job.wait_for_start(1, steps=20)
    cluster.kill_slurmd(cluster.nodes[1])
    _wait_for_steps(job, 40)
    cluster.start_node(cluster.nodes[1], wait=False)
    return job


def dead_controller(cluster: Cluster, make: Make) -> SlurmJob:
    """Train a job, and kill and restart slurmctld twice: while the job runs, and while it asks to be requeued.

    Args:
        cluster: cluster that runs the job.
        make: function that submits a training job.
    """
    job = make()
    job.wait_for_start(1, steps=20)
    cluster.kill_controller()
    _wait_for_steps(job, 40)
    cluster.start_controller()
    cluster.signal(job.number, "USR1")
    cluster.kill_controller()
    time.sleep(5)
    cluster.start_controller()
    return job


def _wait_for_restart(job: SlurmJob) -> None:
    until = time.monotonic() + 120
    while not int(job.cluster.show(job.number).get("Restarts", 0)):
        if time.monotonic() > until:
            raise TimeoutError(f"the job was not queued again:\n{job.output()[-3000:]}")
        time.sleep(0.5)


def _wait_for_steps(job: SlurmJob, count: int) -> None:
    first = job.step()
    while job.step() < first + count:
        time.sleep(0.1)


FAULTS: dict[str, tuple[Callable[[Cluster, Make], SlurmJob], int]] = {
    "20 signals in a row": (signals, 20),
    "time limit": (time_limit, 1),
    "preempted, with --signal": (lambda cluster, make: preempted(cluster, make, True), 1),
    "preempted, without": (lambda cluster, make: preempted(cluster, make, False), 1),
    "scontrol requeue": (requeued, 1),
    "killed rank 0": (lambda cluster, make: killed_rank(cluster, make, 0), 1),
    "killed rank 1": (lambda cluster, make: killed_rank(cluster, make, 1), 1),
    "dead first node": (lambda cluster, make: dead_node(cluster, make, 0), 1),
    "dead second node": (lambda cluster, make: dead_node(cluster, make, 1), 1),
    "dead slurmd": (dead_slurmd, 1),
    "dead controller": (dead_controller, 1),
}
"""Faults by name, each with the function that causes it in a new job and the number of faults that the job suffers."""


def measure(cluster: Cluster, folder: Path, name: str, curve: dict[int, str]) -> dict[str, Any]:
    """Cause a fault, wait for the end of the job, and compare its losses with those of an undisturbed job.

    Args:
        cluster: cluster that runs the job.
        folder: folder of the job.
        name: name of the fault.
        curve: loss of the undisturbed job by step.

    Returns:
        State of the job in the end, and numbers of starts, steps, repeated steps, different losses and seconds.
    """
    happen, times = FAULTS[name]
    begun = time.monotonic()
    job = happen(cluster, lambda **options: SlurmJob(cluster, folder / re.sub(r"\W+", "-", name), STEPS, **options))
    fields = job.finish(timeout=300)
    losses = job.curve()
    wrong = [step for step in {*curve, *losses} if curve.get(step) != losses.get(step)]
    return {
        "times": times,
        "state": fields["JobState"],
        "starts": job.starts(),
        "steps": len(losses),
        "steps_repeated": job.repeated(),
        "losses_that_differ": len(wrong),
        "seconds": round(time.monotonic() - begun),
        **({} if fields["JobState"] == "COMPLETED" else {"output": job.output()[-3000:]}),
    }


def show(rows: dict[str, dict[str, Any]]) -> None:
    """Print the results as a table with a row for each fault."""
    table = Table("fault", "times", "job in the end", "starts", "steps", "steps repeated", "losses that differ")
    for name, row in rows.items():
        keys = ("times", "state", "starts", "steps", "steps_repeated", "losses_that_differ")
        table.add_row(name, *(str(row[key]) for key in keys))
    Console(width=120).print(table)


def main() -> None:
    """Cause the chosen faults, print and write the results, and exit with an error if a job did not survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--out", type=Path, help="folder for slurm.json")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            installation = find_or_unpack(default_cache() / "slurm")
            with Cluster(Path(scratch) / "cluster", installation) as cluster:
                undisturbed = SlurmJob(cluster, Path(scratch) / "undisturbed", STEPS)
                if undisturbed.finish()["JobState"] != "COMPLETED":
                    raise SystemExit(f"error: the undisturbed job failed:\n{undisturbed.output()[-3000:]}")
                curve = undisturbed.curve()
                for name in options.faults:
                    rows[name] = measure(cluster, Path(scratch), name, curve)
                    show(rows)
                    if options.out:
                        result = {"machine": describe(torch.device("cpu")), "steps": STEPS, "faults": rows}
                        write_json(options.out / "slurm.json", result, indent=1)
        except SlurmUnavailable as error:
            raise SystemExit(f"error: {error}") from error
    if any(row["state"] != "COMPLETED" or row["losses_that_differ"] for row in rows.values()):
        raise SystemExit("error: a job did not end like the undisturbed one")


if __name__ == "__main__":
    main()
