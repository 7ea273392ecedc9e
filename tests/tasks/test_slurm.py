"""Training on a real SLURM of two nodes resumes from where it was; ``python -m benchmarks.slurm`` tries every fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import run_cli

from benchmarks.slurm.cluster import Cluster
from benchmarks.slurm.installation import SlurmUnavailable, find_or_unpack
from benchmarks.slurm.job import ROOT, Job, curve, write_config
from lightning_mhla.data.tables import default_cache

STEPS = 300


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        with Cluster(tmp_path_factory.mktemp("slurm"), find_or_unpack(default_cache() / "slurm")) as running:
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
    job = Job(cluster, tmp_path / "disturbed", STEPS)
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
