"""FSDP2 in every domain, sequence parallelism: several processes train as one; checkpoints do not depend on their number."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import fork_server, run_cli
from worker import DOMAINS, SAVED, SHARED, STEPS

from lightning_mhla.checkpoints.sharded import is_sharded

WORKER = Path(__file__).with_name("worker.py")
ROOT = Path(__file__).parents[3]


def run(folder: Path, cache: Path, processes: int, *options: str) -> Path:
    """Train domains on a number of processes; 0 for one process without sharding."""
    alone = {} if processes != 1 else {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    status, text = fork_server().run(
        str(folder), str(cache), *options, module="worker", processes=max(1, processes), PATH_OF_TESTS=str(WORKER.parent),
        **({**alone, "MASTER_PORT": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests"} if alone else {}),
    )  # fmt: skip
    assert status == 0, text[-4000:]
    return folder


@pytest.fixture(scope="module")
def runs(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of one process without sharding, and of two processes with sharding."""
    folder = tmp_path_factory.mktemp("sharding")
    return {
        "cache": cache_dir,
        "alone": run(folder / "alone", cache_dir, 0, "--domains", *DOMAINS, "hybrid"),
        "two": run(folder / "two", cache_dir, 2),
    }


def result(folder: Path, domain: str) -> dict[str, Any]:
    return torch.load(folder / domain / "result.pt", weights_only=True)


def compare(alone_folder: Path, folder: Path, domain: str) -> None:
    """Compare the gradients of the first step to 1e-5, and the losses of ten steps to 1e-4."""
    alone, two = result(alone_folder, domain), result(folder, domain)
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
def test_two_processes_train_as_one_does(runs: dict[str, Path], domain: str) -> None:
    compare(runs["alone"], runs["two"], domain)


@pytest.mark.timeout(600)
def test_processes_that_share_sequences_train_as_one_does(runs: dict[str, Path], tmp_path: Path) -> None:
    """Two groups of two, sharded over all four."""
    four = run(tmp_path / "four", runs["cache"], 4, "--sequence", "2", "--domains", *SHARED)
    for domain in SHARED:
        compare(runs["alone"], four, domain)
        alone, shared = (torch.load(each / domain / "validation.pt") for each in (runs["alone"], four))
        assert alone == pytest.approx(shared, rel=1e-5), domain


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
    share = ("--sequence", "2") if processes == 4 else ()  # the language model then resumes with shared sequences
    resumed = run(tmp_path, runs["cache"], processes, "--resume", str(runs["two"]), *share)
    for domain in DOMAINS:
        assert is_sharded(runs["two"] / domain / "saved.ckpt")
        expected, found = result(runs["two"], domain), result(resumed, domain)
        assert sorted(found["losses"]) == list(range(SAVED + 1, STEPS + 1)), domain
        for step, loss in found["losses"].items():
            assert loss == pytest.approx(expected["losses"][step], abs=1e-4), (domain, step)
        for name, average in found["average"].items():
            torch.testing.assert_close(average, found["expected"][name], rtol=1e-6, atol=1e-7, msg=f"{domain} {name}")


def test_the_default_configuration_shares_sequences(runs: dict[str, Path], tmp_path: Path) -> None:
    """With everything that it logs, in half precision; its validation is that of one process with whole weights."""
    sizes = {"model.init_args": {"vocab_size": 300, "context": 64}, "model.shape": {"dim": 32, "depth": 2, "heads": 2}}
    sizes["model.shape"]["mlp_width"] = 64
    sizes["data.init_args"] = {"vocab_size": 300, "context": 64, "cache_dir": str(runs["cache"])}
    small = [f"--{part}.{name}={value}" for part, values in sizes.items() for name, value in values.items()]
    steps = {"max_steps": 4, "val_check_interval": 8, "limit_val_batches": 2, "accumulate_grad_batches": 2}
    small += [f"--trainer.{name}={value}" for name, value in steps.items()] + ["--trainer.accelerator=cpu"]
    language = ("--config", str(ROOT / "configs/language/stdlib.yaml"))
    strategy = "--trainer.strategy.init_args"
    shared = (
        "--config",
        str(ROOT / "configs/trainer/fsdp.yaml"),
        "--trainer.devices=2",
        f"{strategy}.gather_dtype=bfloat16",
    )
    shared += (f"{strategy}.sequence_parallel_size=2", "--trainer.precision=bf16-mixed")
    run_cli("fit", *language, *shared, *small, folder=tmp_path)
    (checkpoint,) = (tmp_path / "runs").rglob("step*-bpb*.ckpt")
    half = checkpoint.stem.partition("bpb")[2]
    printed = run_cli(
        "validate", *language, *small, f"--ckpt_path={checkpoint}", "--trainer.logger=false", folder=tmp_path
    )
    (alone,) = re.findall(r"val/bits_per_byte\s+\S\s+([\d.]+)", printed)
    assert float(alone) == pytest.approx(float(half), rel=2e-3)


REFUSED = """
import sys
from pathlib import Path
from lightning import Trainer
from mhla_tasks.language import PythonSource
from worker import build
from lightning_mhla.training.strategies import FullyShardedStrategy

def fit(name, model, data, size=2):
    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    strategy = FullyShardedStrategy(sequence_parallel_size=size)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=1, limit_val_batches=0, **options)
    try:
        trainer.fit(model, datamodule=data)
    except ValueError as error:
        sys.stdout.write(f"{name}: {error}\\n")

cache = Path(sys.argv[1])
fit("three", *build("language", cache), size=3)
fit("domain", *build("classification", cache))
sizes = dict(batch_size=12, vocab_size=300, cache_dir=str(cache))
fit("packed", build("language", cache)[0], PythonSource(context=64, separate_documents=True, **sizes))
fit("short", build("language", cache)[0], PythonSource(context=16, **sizes))
"""


def test_what_cannot_share_sequences_says_so(cache_dir: Path) -> None:
    status, said = fork_server().program(REFUSED, cache_dir, processes=2, PATH_OF_TESTS=str(WORKER.parent))
    assert status == 0, said[-4000:]
    assert said.count("three: sequence_parallel_size=3 does not divide the 2 processes\n") == 2
    assert said.count("domain: ImageClassifier does not share sequences; leave sequence_parallel_size at 1\n") == 2
    assert said.count("packed: documents that are packed (separate_documents: true) cannot be spread") == 2
    assert said.count("short: 16 tokens in blocks of 16 are 1 blocks, too few for 2 processes") == 2


CONTINUED = """
import sys
import torch
from lightning import Trainer
from mhla_tasks.video import BouncingDigits, VideoContinuation
from mhla_tasks.video.continuation import ContinuationSampling, FrameShape
from lightning_mhla import AttentionConfig
from lightning_mhla.training.strategies import FullyShardedStrategy

torch.manual_seed(0)
model = VideoContinuation(
    AttentionConfig(kind="mhla", mixing="exponential"), 16, 16, frames=6, shape=FrameShape(dim=24, depth=2, heads=3),
    sampling=ContinuationSampling(frames=9), output=sys.argv[1],
)
sharded = int(sys.argv[2])
trainer = Trainer(
    accelerator="cpu", devices=2 if sharded else 1, strategy=FullyShardedStrategy() if sharded else "auto", logger=False,
    enable_progress_bar=False, enable_checkpointing=False, default_root_dir=sys.argv[1],
)
trainer.predict(model, BouncingDigits(frames=6, clips=1, batch_size=4), return_predictions=False)
"""


@pytest.mark.timeout(300)
def test_clips_are_continued_with_sharded_weights_also_by_a_process_without_a_clip(tmp_path: Path) -> None:
    for name, processes in (("alone", 0), ("two", 2)):
        status, said = fork_server().program(CONTINUED, tmp_path / name, processes, processes=max(1, processes))
        assert status == 0, said[-4000:]
    alone, two = (json.loads((tmp_path / name / "videos.jsonl").read_text()) for name in ("alone", "two"))
    assert alone["error"] == two["error"]
    assert len(alone["error"]) > 0
