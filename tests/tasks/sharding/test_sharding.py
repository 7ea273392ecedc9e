"""FSDP2 in every domain: several processes train as one does, and checkpoints and averages do not depend on their number."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from worker import DOMAINS, SAVED, STEPS

from lightning_mhla.sharded import is_sharded

WORKER = Path(__file__).with_name("worker.py")


def run(folder: Path, cache: Path, processes: int, resume: Path | None = None) -> Path:
    """All domains on so many processes; 0 for one without sharding."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes else []
    command = [sys.executable, *launcher, str(WORKER), str(folder), str(cache), *([str(resume)] if resume else [])]
    roots = [str(Path(__file__).parents[3] / each) for each in ("", "kernels", "tasks")]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(roots)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=variables, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One process without sharding, and two with."""
    folder = tmp_path_factory.mktemp("sharding")
    cache = folder / "cache"
    return {
        "cache": cache,
        "alone": run(folder / "alone", cache, 0),
        "two": run(folder / "two", cache, 2),
    }


def result(folder: Path, domain: str) -> dict[str, Any]:
    return torch.load(folder / domain / "result.pt", weights_only=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("domain", DOMAINS)
def test_two_processes_train_as_one_does(runs: dict[str, Path], domain: str) -> None:
    alone, two = result(runs["alone"], domain), result(runs["two"], domain)
    assert alone["gradients"].keys() == two["gradients"].keys()
    difference = sum((alone["gradients"][n] - g).square().sum() for n, g in two["gradients"].items()).sqrt()
    size = sum(g.square().sum() for g in alone["gradients"].values()).sqrt()
    assert difference <= 1e-5 * size
    assert size > 0.1, "gradient clipping at 0.1 does nothing here"
    assert len(alone["losses"]) == STEPS
    for step, loss in alone["losses"].items():
        assert two["losses"][step] == pytest.approx(loss, abs=1e-4), step


@pytest.mark.timeout(600)
@pytest.mark.parametrize("domain", DOMAINS)
def test_the_sharded_average_is_that_of_whole_weights(runs: dict[str, Path], domain: str) -> None:
    for name in ("alone", "two"):
        found = result(runs[name], domain)
        for parameter, expected in found["expected"].items():
            torch.testing.assert_close(found["average"][parameter], expected, rtol=1e-6, atol=1e-7, msg=parameter)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [1, 3, 4])
def test_a_checkpoint_of_two_processes_goes_on_with(runs: dict[str, Path], tmp_path: Path, processes: int) -> None:
    resumed = run(tmp_path, runs["cache"], processes, resume=runs["two"])
    for domain in DOMAINS:
        assert is_sharded(runs["two"] / domain / "saved.ckpt")
        expected, found = result(runs["two"], domain), result(resumed, domain)
        assert sorted(found["losses"]) == list(range(SAVED + 1, STEPS + 1)), domain
        for step, loss in found["losses"].items():
            assert loss == pytest.approx(expected["losses"][step], abs=1e-4), (domain, step)
        for name, average in found["average"].items():
            torch.testing.assert_close(average, found["expected"][name], rtol=1e-6, atol=1e-7, msg=f"{domain} {name}")
