"""Training on a real SLURM of two nodes resumes from where it was; ``python -m benchmarks.slurm`` tries every fault."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import run_cli

from benchmarks.slurm.cluster import Cluster
from benchmarks.slurm.installation import SlurmUnavailable, find_or_unpack
from benchmarks.slurm.job import ROOT, TEMPLATE, SlurmJob, curve, write_config
from lightning_mhla.data.tables import default_cache

pytestmark = pytest.mark.long  # the first use fetches SLURM
STEPS = 300

TASK = """\
#!/bin/bash
# Stands for an interpreter that has the package; says what a task sees.
[ "$1 $2" = "-P -c" ] && exit 0
echo "task $SLURM_PROCID sees GPUs ${CUDA_VISIBLE_DEVICES-none}, is told of ${!#}, has ${SLURM_CPUS_PER_TASK-1} CPUs, FOO=${FOO-}"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        with Cluster(
            tmp_path_factory.mktemp("slurm"), find_or_unpack(default_cache() / "slurm"), cpus=4, gpus=2
        ) as running:
            yield running
    except SlurmUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.timeout(300)
def test_a_signal_and_a_killed_rank_lose_nothing(cluster: Cluster, tmp_path: Path) -> None:
    two = ["--config", str(ROOT / "configs/trainer/ddp.yaml"), "--trainer.devices=2"]
    run_cli(
        "fit",
        "--config",
        str(write_config(tmp_path / "undisturbed", STEPS)),
        *two,
        f"--run_dir={tmp_path / 'undisturbed/run'}",
    )
    undisturbed = curve(tmp_path / "undisturbed/run")
    job = SlurmJob(cluster, tmp_path / "disturbed", STEPS)
    job.wait_for_start(1, steps=30)
    cluster.signal(job.number, "USR1")
    job.wait_for_start(2, steps=30)
    assert "stopped on" in job.output()
    assert job.repeated() == 0, "a signal lost a step"
    cluster.kill_rank(job.number, 1)
    assert job.finish()["JobState"] == "COMPLETED", job.output()[-3000:]
    assert job.starts() == 3
    assert job.curve() == undisturbed, "two nodes, stopped twice, against two processes left alone"
    assert sorted(job.curve()) == list(range(STEPS))


def ask(
    cluster: Cluster, folder: Path, export: str = "ALL,PYTHON={task},RUN_DIR={folder}/run", **options: str | int | bool
) -> list[str]:
    """Submit the script with a stand-in for the interpreter, and return the sorted output of the script and its tasks."""
    task, out = folder / "task", folder / "out.txt"
    task.write_text(TASK)
    task.chmod(0o755)
    number = cluster.submit(
        TEMPLATE, chdir=str(ROOT), output=str(out), export=export.format(task=task, folder=folder), **options
    )
    cluster.wait(number)
    return sorted(line for line in out.read_text().splitlines() if not line.endswith("ended with status 0"))


@pytest.mark.parametrize(
    "asked",
    [
        {"nodes": 1, "ntasks_per_node": 2, "gpus_per_node": 2},
        {"nodes": 1, "ntasks": 2, "gpus_per_task": 1},
        {"nodes": 1, "ntasks": 2, "gpus": 2},
        {"nodes": 1, "ntasks_per_gpu": 1, "gpus": 2},
        {"ntasks_per_node": 2, "gres": "gpu:2", "gpu_bind": "single:1"},
        {"ntasks_per_node": 2, "exclusive": True},
    ],
    ids=lambda asked: " ".join(asked),
)
def test_the_tasks_of_a_node_share_its_gpus(cluster: Cluster, tmp_path: Path, asked: dict[str, str | int]) -> None:
    said = ask(cluster, tmp_path, **asked)
    assert said == [f"task {rank} sees GPUs 0,1, is told of 2, has 1 CPUs, FOO=" for rank in (0, 1)]


@pytest.mark.parametrize(
    ("asked", "tasks", "devices"),
    [
        ({}, 1, 1),
        ({"nodes": 2}, 2, 1),
        ({"ntasks": 2, "nodes": 1}, 2, 2),
        ({"ntasks": 2, "nodes": 2}, 2, 1),
        ({"exclusive": True}, 1, 1),
    ],
    ids=["nothing", "nodes", "ntasks", "ntasks nodes", "exclusive"],
)
def test_tasks_may_be_asked_for_in_several_ways(
    cluster: Cluster, tmp_path: Path, asked: dict[str, int], tasks: int, devices: int
) -> None:
    said = [line for line in ask(cluster, tmp_path, **asked) if line.startswith("task ")]
    assert [int(re.findall(r"told of (\d+)", line)[0]) for line in said] == [devices] * tasks


def test_a_task_has_the_cpus_that_were_asked_for(cluster: Cluster, tmp_path: Path) -> None:
    assert "has 3 CPUs" in ask(cluster, tmp_path, cpus_per_task=3)[0]


def test_tasks_that_differ_between_nodes_are_one_clear_line(cluster: Cluster, tmp_path: Path) -> None:
    (said,) = ask(cluster, tmp_path, nodes=2, ntasks=3)
    assert "3 tasks on 2 nodes are 2,1" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="SLURM asks su for the environment of a login, which wants a password")
@pytest.mark.parametrize("export", ["NONE", "FOO=1"])
def test_a_job_starts_without_the_environment_of_sbatch(cluster: Cluster, tmp_path: Path, export: str) -> None:
    """The environment is that of SBATCH_EXPORT=NONE: PATH and all other variables come from the file SETUP alone."""
    needed = {
        name: cluster.environment[name]
        for name in ("PATH", "LD_LIBRARY_PATH", "SLURM_CONF")
        if name in cluster.environment
    }
    lines = [f"export {name}='{value}'" for name, value in needed.items()]
    setup = tmp_path / "setup.sh"
    setup.write_text("\n".join([*lines, f"RUN_DIR={tmp_path}/run", f"PYTHON={tmp_path}/task", "export FOO=from-setup"]))
    script = tmp_path / "train.sbatch"
    script.write_text(TEMPLATE.read_text().replace("~/.config/lightning-mhla/setup.sh", str(setup)))
    (tmp_path / "task").write_text(TASK)
    (tmp_path / "task").chmod(0o755)
    number = cluster.submit(script, chdir=str(ROOT), output=str(tmp_path / "out.txt"), nodes=2, export=export)
    assert cluster.wait(number)["JobState"] == "COMPLETED", (tmp_path / "out.txt").read_text()
    assert (tmp_path / "out.txt").read_text().count("has 1 CPUs, FOO=from-setup") == 2
