"""Guards of a run: values that are not finite, processes that hang, memory and speed."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from mhla_tasks.classification import Digits
from processes import fork_server
from test_resume import small_classifier

from lightning_mhla.callbacks import FiniteWatch, Forecast, StallWatch
from lightning_mhla.callbacks.periodic import PeriodicEvaluation
from lightning_mhla.system.numbers import duration

STEP = 2


class Poison(Callback):
    """Callback that puts a NaN somewhere at one step."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.before: list[torch.Tensor] = []
        self.after: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.handle: Any = None
        if trainer.global_step != STEP:
            return
        self.before = [parameter.detach().clone() for parameter in pl_module.parameters()]
        block = pl_module.network.backbone.blocks[1]
        if self.where == "batch":
            batch["image"][0] = float("nan")
        elif self.where == "weights":
            block.mlp.fc1.weight.data[0] = float("inf")
        elif self.where == "output":
            self.handle = block.attn.register_forward_hook(lambda _, __, out: out * float("nan"))
        elif self.where == "gradient":
            self.handle = block.mlp.register_forward_hook(lambda _, __, out: _poisoned(out))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.handle is not None:
            self.handle.remove()
        if self.before and not self.after:
            self.after = [parameter.detach().clone() for parameter in pl_module.parameters()]


def _poisoned(out: torch.Tensor) -> torch.Tensor:
    out.register_hook(lambda gradient: gradient * float("nan"))
    return out


def fit(poison: Poison, *callbacks: Callback, accumulate: int = 1) -> tuple[Trainer, LightningModule]:
    trainer = Trainer(
        accelerator="cpu", max_steps=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[poison, *callbacks], accumulate_grad_batches=accumulate,
        limit_val_batches=0,
    )  # fmt: skip
    model = small_classifier()
    trainer.fit(model, datamodule=Digits(batch_size=120))
    return trainer, model


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("batch", "the loss is nan at step 2: the batch itself holds such numbers (image)"),
        ("weights", "the weights hold such numbers already (network.backbone.blocks.1.mlp.fc1.weight)"),
        ("output", "the loss is nan at step 2: first in the output of network.backbone.blocks.1.attn"),
        (
            "gradient",
            "the gradient is not finite at step 2: first in the gradient inside network.backbone.blocks.1.mlp",
        ),
    ],
)
def test_a_step_that_is_not_finite_stops_before_the_weights(where: str, message: str) -> None:
    poison = Poison(where)
    with pytest.raises(ValueError, match=re.escape(message)):
        fit(poison)
    assert not poison.after, "the step went on"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_such_a_step_is_left_out(caplog: pytest.LogCaptureFixture, accumulate: int) -> None:
    poison, watch = Poison("batch"), FiniteWatch("skip", max_skipped=1)
    with caplog.at_level(logging.WARNING):
        trainer, model = fit(poison, watch, accumulate=accumulate)
    assert trainer.global_step == 4
    assert watch.skipped == 1
    assert "skipped a step (1 of at most 1): the loss is nan at step 2: the batch itself" in caplog.text
    if accumulate == 1:
        assert all(torch.equal(a, b) for a, b in zip(poison.before, poison.after, strict=True)), "AdamW moved weights"
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    with pytest.raises(ValueError, match="1 steps were skipped, more than max_skipped=0"):
        fit(Poison("batch"), FiniteWatch("skip", max_skipped=0))


def test_a_run_says_what_it_needs_and_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    fit(Poison("nowhere"), Forecast(warm_up_steps=1, measured_steps=2))
    said = capsys.readouterr().err
    assert re.search(
        r"9\.\d+k parameters, .* on 1 process: 0\.18\d+ MiB each for weights, gradients, AdamW, average", said
    )
    assert "11 steps per epoch, 4 in all" in said
    assert re.search(r"[\d.]+ (s per step|steps per second), \d+ s remaining, without validation", said)
    assert [duration(s) for s in (5, 250, 4800, 183600)] == ["5 s", "4 min 10 s", "1 h 20 min", "2 d 3 h"]


STALLED = """
import os, re, signal, subprocess, sys, time
from pathlib import Path
import torch
from lightning import Callback, Trainer
from lightning_mhla.callbacks import StallWatch
from mhla_tasks.classification import Digits
from test_resume import small_classifier

class Wait(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2 and trainer.global_rank == 1:
            print("FROM HERE ON", flush=True)
            slow_reading()
        if trainer.global_step == 3 and trainer.global_rank == 1:
            waiting = f"until grep -q 'no sign of life' {LOG}; do sleep 0.1; done; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", waiting])
            os.kill(os.getpid(), signal.SIGSTOP)

LOG = Path("log.txt").resolve()

def slow_reading():
    while not {"slow_reading", "holds up the others"} <= set(re.findall("slow_reading|holds up the others", LOG.read_text())):
        time.sleep(0.05)

torch.set_num_threads(1)
Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=5, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        callbacks=[Wait(), StallWatch(seconds=4, interval=0.25)]).fit(small_classifier(), datamodule=Digits(batch_size=240))
print("done", flush=True)
"""


def on_two_processes(tmp_path: Path, program: str) -> str:
    """Run a program as torchrun does, and return its output."""
    options = {"folder": tmp_path, "output": tmp_path / "log.txt", "processes": 2}
    status, said = fork_server().program(program, **options, PATH_OF_TESTS=str(Path(__file__).parent))
    assert status == 0, said[-3000:]
    return said


def test_a_process_that_stands_still_is_named(tmp_path: Path) -> None:
    """First it is busy elsewhere; then it is stopped altogether, and gives no sign of life."""
    _, _, said = on_two_processes(tmp_path, STALLED).partition(
        "FROM HERE ON"
    )  # before, a loaded machine may be slow itself
    assert re.search(r"no step for \d+ s: process 1 on .* holds up the others at batch 1: it computes it", said), said
    assert re.search(r"stack of process 1:\n(.*\n)*.*slow_reading", said), said
    assert "stack of process 0" not in said
    assert re.search(
        r"no step for \d+ s: process 1 on .* has given no sign of life for \d+ s \(last at batch [12]\)", said
    ), said


def test_a_long_evaluation_is_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []

    class Long(PeriodicEvaluation):
        def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
            start = len(caplog.records)
            while not (found := [record.getMessage() for record in caplog.records[start:]]):
                time.sleep(0.01)
            said.append(found[0])

    caplog.set_level(logging.INFO, "lightning_mhla.callbacks.stalls")
    trainer = Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0,
        callbacks=[Long(every_n_steps=1, at_end=True), StallWatch(seconds=0.5, interval=0.05)],
    )  # fmt: skip
    trainer.fit(small_classifier(), datamodule=Digits(batch_size=8))
    assert len(said) == 2
    assert all(re.fullmatch(r"evaluating for \d+ s so far", each) for each in said)


POISONED = """
import os, sys
import torch
from lightning import Trainer
from lightning_mhla.callbacks import FiniteWatch
from lightning_mhla.training.strategies import FullyShardedStrategy
from mhla_tasks.classification import Digits
from test_guards import Poison
from test_resume import small_classifier

class OnOne(Poison):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        where, self.where = self.where, self.where if trainer.global_rank == 1 else "nowhere"
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        self.where = where

torch.set_num_threads(1)
for sharded in (False, True):
    for where, action in (("batch", "skip"), ("output", "stop"), ("gradient", "stop")):
        poison = OnOne(where)
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=FullyShardedStrategy() if sharded else "ddp", max_steps=4,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            limit_val_batches=0, callbacks=[poison, FiniteWatch(action)])
        name = f"CASE {'fsdp' if sharded else 'ddp'} {where} on {os.environ['RANK']}:"
        model = small_classifier(checkpointing=sharded)
        try:
            trainer.fit(model, datamodule=Digits(batch_size=240))
        except ValueError as error:
            sys.stdout.write(f"{name} {error}\\n")
        else:
            before, after = ([getattr(x, "_local_tensor", x) for x in each] for each in (poison.before, poison.after))
            same = len(after) > 0 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            sys.stdout.write(f"{name} went on to {trainer.global_step}, weights the same: {same}\\n")
"""


def test_all_processes_stop_or_skip_for_one(tmp_path: Path) -> None:
    """The numbers of one process are not finite; both say where it began, both stop or leave the step out."""
    said = on_two_processes(tmp_path, POISONED)
    found = dict(re.findall(r"CASE (.*?): (.*)", said))
    expected = {
        "batch": r"went on to 4, weights the same: True",
        "output": r"first in the output of network\.backbone\.blocks\.1\.attn \(process 1\)",
        "gradient": r"first in the gradient inside network\.backbone\.blocks\.1\.mlp.* \(process 1\)",
    }
    for where, message in expected.items():
        for process in ("ddp {} on 0", "ddp {} on 1", "fsdp {} on 0", "fsdp {} on 1"):
            assert re.search(message, found[process.format(where)]), found


def test_progress_never_moves_back() -> None:
    """A process that validates after a batch is ahead of one that computes the batch, and behind one that computes the next."""
    watch, progress = StallWatch(), []

    class Look(Callback):
        def look(self, *_: object) -> None:
            progress.append((watch._step, watch._phase))

        on_train_batch_start = on_train_batch_end = on_validation_batch_end = look

    Trainer(
        accelerator="cpu", max_steps=4, val_check_interval=2, limit_val_batches=2, num_sanity_val_steps=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[watch, Look()],
    ).fit(small_classifier(), datamodule=Digits(batch_size=8))  # fmt: skip
    assert progress == [
        (0, 2), (1, 0), (1, 2), (2, 0), (2, 1), (2, 1), (2, 2), (3, 0), (3, 2), (4, 0), (4, 1), (4, 1),
    ]  # fmt: skip


def test_the_process_to_look_at_is_named_first() -> None:
    watch = StallWatch(seconds=100)
    silent = {"silent": 60.0, "waits": True, "at": [9, 0]}
    busy = {"silent": 40.0, "waits": False, "at": [9, 0]}
    behind = {"silent": 40.0, "waits": True, "at": [8, 0]}
    waiting = {"silent": 0.0, "waits": True, "at": [9, 0]}
    states = [silent, busy, behind, waiting]
    assert sorted([waiting, behind, busy, silent], key=watch._order) == states
