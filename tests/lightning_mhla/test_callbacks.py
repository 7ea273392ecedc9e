"""Callbacks outside of one undisturbed fit: exceptions, a second fit, other commands, loss scales, other encodings."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mhla.callbacks.averaging import ExponentialMovingAverage
from lightning_mhla.callbacks.curves import LearningCurves
from lightning_mhla.callbacks.finite import FiniteWatch
from lightning_mhla.callbacks.forecast import Forecast
from lightning_mhla.callbacks.periodic import PeriodicEvaluation
from lightning_mhla.callbacks.pictures import AttentionPictures
from lightning_mhla.callbacks.recovery import Recovery, RunStopped
from lightning_mhla.callbacks.report import RunReport
from lightning_mhla.checkpoints.io import check_entries
from lightning_mhla.checkpoints.weights import LIVE
from lightning_mhla.system.files import write_json


class Line(LightningModule):
    """One weight, trained with a learning rate of 0.1; validation fails if ``broken`` is set."""

    def __init__(self, broken: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.broken, self.factor = broken, factor

    def training_step(self, batch: Tensor) -> Tensor:
        return (self.layer(batch) * self.factor).sum()

    def validation_step(self, batch: Tensor) -> None:
        if self.broken:
            raise RuntimeError("no validation today")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def loader() -> DataLoader[Tensor]:
    return DataLoader(torch.ones(4, 1), 1)  # type: ignore[arg-type]


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "num_sanity_val_steps": 0, "max_epochs": 1,
    }  # fmt: skip
    return Trainer(callbacks=list(callbacks), default_root_dir=folder, **defaults | options)


def test_a_checkpoint_after_a_failed_validation_has_the_average_and_the_trained_weights(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, filename="failed", save_on_exception=True, save_top_k=0)
    fit = trainer(tmp_path, ExponentialMovingAverage(0.5), saving, enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="no validation today"):
        fit.fit(Line(broken=True), loader(), loader())
    (file,) = tmp_path.glob("*.ckpt")
    saved = torch.load(file, weights_only=True)
    trained, average = saved[LIVE]["layer.weight"].item(), saved["state_dict"]["layer.weight"].item()
    assert trained == pytest.approx(0.6)  # 1 - 4 * 0.1
    assert average == pytest.approx(0.6875)  # from 0.9, halfway to 0.8, 0.7 and 0.6


@pytest.mark.parametrize("callback", [Forecast, FiniteWatch, lambda: ExponentialMovingAverage(0.5)])
def test_a_validation_without_training(callback: Any, tmp_path: Path) -> None:
    assert trainer(tmp_path, callback()).validate(Line(), loader(), verbose=False) == [{}]


class Counted(PeriodicEvaluation):
    """Evaluation that counts its calls."""

    calls = 0

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.calls += 1


def test_a_second_fit_is_evaluated_like_the_first(tmp_path: Path) -> None:
    counted = Counted(None, at_end=True)
    for fits in (1, 2, 3):
        trainer(tmp_path, counted).fit(Line(), loader())
        assert counted.calls == fits


class Slow(PeriodicEvaluation):
    """Evaluation that takes a while."""

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        time.sleep(0.5)


def test_the_time_of_evaluations_is_not_that_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, Slow(1, at_end=True), Forecast(1, 2)).fit(Line(), loader())
    assert "steps per second" in capsys.readouterr().err, "with the evaluations, a step takes half a second at least"


@pytest.mark.parametrize(("steps", "calls"), [(2, 2), (4, 1), (3, 1), (5, 0)])
def test_the_last_step_is_evaluated_like_the_others(steps: int, calls: int, tmp_path: Path) -> None:
    counted = Counted(steps, at_end=False)
    trainer(tmp_path, counted).fit(Line(), loader())
    assert counted.calls == calls


class Signalled(Callback):
    """Callback that acts like a signal in the last step."""

    def __init__(self, recovery: Recovery) -> None:
        self.recovery = recovery

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.recovery.signals.received = "SIGTERM" if trainer.global_step == 3 else None


def test_a_signal_in_the_last_step_leaves_the_final_evaluation_to_a_resumed_run(tmp_path: Path) -> None:
    counted, recovery = Counted(None, at_end=True), Recovery(signals=())
    fit = trainer(tmp_path, counted, recovery, Signalled(recovery), enable_checkpointing=True)
    with pytest.raises(RunStopped):
        fit.fit(Line(), loader())
    assert counted.calls == 0
    again = trainer(tmp_path, counted, Recovery(signals=()), enable_checkpointing=True)
    again.fit(Line(), loader(), ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    assert counted.calls == 1


def test_a_finished_run_that_resumes_ends_with_the_average(tmp_path: Path) -> None:
    weights = []
    for start in (None, tmp_path / "checkpoints" / "last.ckpt"):
        model, average = Line(), ExponentialMovingAverage(0.5)
        fit = trainer(tmp_path, average, Recovery(signals=()), enable_checkpointing=True)
        fit.fit(model, loader(), ckpt_path=start)
        weights.append(model.layer.weight.item())
    assert weights == pytest.approx([0.6875, 0.6875])


class Thawing(BaseFinetuning):
    """Callback that trains the layer only from the second epoch on."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.layer)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layer, optimizer, lr=0.1, initial_denom_lr=1)


class Headed(Line):
    """The same with one more weight, so that something is trained from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor) -> Tensor:
        return super().training_step(batch) + self.head

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.head], 0.1)


def test_weights_that_are_unfrozen_later_are_averaged(tmp_path: Path) -> None:
    model = Headed()
    trainer(tmp_path, Thawing(), ExponentialMovingAverage(0.5), max_epochs=2).fit(model, loader())
    assert model.layer.weight.item() == pytest.approx(0.6875)  # trained to 0.6


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_an_overflow_of_the_loss_scale_is_left_to_the_scaler(action: Any, tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)  # 8 times it is more than a float16 holds
    watch, model = FiniteWatch(action), Line(factor=8.0)
    fit = trainer(tmp_path, watch, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    fit.fit(model, loader())
    assert watch.skipped == 0
    assert model.layer.weight.item() == pytest.approx(1 - 3 * 0.8, abs=0.01), "the first of four steps is skipped"
    assert scaler.get_scale() == 2.0**12


def test_a_loss_that_is_nan_stops_with_a_scaler_too(tmp_path: Path) -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="the loss is nan"):
        trainer(tmp_path, FiniteWatch(), plugins=[plugin]).fit(Line(factor=torch.nan), loader())


@pytest.mark.parametrize("options", [{"every_n_epochs": 0}, {"every_n_epochs": -1}, {"sample": -1}])
def test_pictures_at_impossible_times_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1, and sample"):
        AttentionPictures(**options)


@pytest.mark.parametrize("name", ["state_dict", LIVE])
def test_weights_that_are_no_table_are_an_error_of_the_file(name: str) -> None:
    checkpoint: dict[str, Any] = {"state_dict": {}, "epoch": 0, "global_step": 0, "pytorch-lightning_version": "2.6.0"}
    with pytest.raises(ValueError, match=name):
        check_entries(Path("broken.ckpt"), {**checkpoint, name: [1]})


def test_files_are_utf8_in_any_locale(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from lightning_mhla.system.files import write_whole;"
        "write_whole(Path('page.html'), 'caf\\u00e9')"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment, timeout=120)
    assert (tmp_path / "page.html").read_bytes() == "café".encode()


def test_numbers_that_json_lacks_are_null_in_files(tmp_path: Path) -> None:
    write_json(tmp_path / "new/results.json", {"fid": math.nan, "curve": [(1, math.inf), (2, 0.5)]}, indent=1)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = (tmp_path / "new/results.json").read_text()
    assert json.loads(text, parse_constant=refuse) == {"fid": None, "curve": [[1, None], [2, 0.5]]}
    with pytest.raises(TypeError):
        write_json(tmp_path / "new/results.json", {"path": tmp_path})
    assert (tmp_path / "new/results.json").read_text() == text


class Manual(Line):
    """The same with two optimizers that it steps itself."""

    automatic_optimization = False

    def training_step(self, batch: Tensor) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch).sum())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1) for _ in range(2)]


def test_manual_optimization_is_not_checked_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Manual()
    trainer(tmp_path, FiniteWatch()).fit(model, loader())
    assert "Manual optimizes manually: losses and gradients are not checked" in caplog.text
    assert model.layer.weight.item() == pytest.approx(1 - 8 * 0.1)


class Lbfgs(Line):
    """The same with an optimizer that computes the loss several times for one step."""

    def training_step(self, batch: Tensor) -> Tensor:
        return (self.layer(batch) ** 2).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), 0.1)


class OneNumber(Line):
    """The same with a loss of shape [1]."""

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layer(batch).reshape(1)


@pytest.mark.parametrize("model", [Lbfgs, OneNumber])
def test_the_watch_does_not_change_what_training_does(model: type[Line], tmp_path: Path) -> None:
    watched, alone = model(), model()
    trainer(tmp_path, FiniteWatch("skip")).fit(watched, loader())
    trainer(tmp_path).fit(alone, loader())
    assert torch.equal(watched.layer.weight, alone.layer.weight)


class Partial(Line):
    """The same without a loss for every first of two batches, and with NaN in the second batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss: Tensor | None = super().training_step(batch) if batch_idx % 2 else None
        return None if loss is None else loss * (torch.nan if batch_idx == 1 else 1)


def test_a_batch_without_a_loss_is_not_blamed(tmp_path: Path) -> None:
    watch, model = FiniteWatch("skip"), Partial()
    trainer(tmp_path, watch, accumulate_grad_batches=2).fit(model, loader())
    assert watch.skipped == 1
    assert model.layer.weight.item() == pytest.approx(0.95)


class Normed(Line):
    """The same with a batch norm, to which the second batch gives NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # type: ignore[override]
        inputs = torch.stack([batch[0], batch[0] + 2]) * (torch.nan if batch_idx == 1 else 1)
        return self.layer(self.norm(inputs)).square().sum()


def test_a_skipped_step_leaves_running_statistics_as_they_were(tmp_path: Path) -> None:
    model = Normed()
    trainer(tmp_path, FiniteWatch("skip")).fit(model, loader())
    assert model.norm.running_mean.item() == pytest.approx(2 * (1 - 0.9**3))  # type: ignore[union-attr]
    assert model.norm.num_batches_tracked == 3


class Named(Line):
    """The same with metrics of the user's own names: the validation metric rises in later epochs."""

    def training_step(self, batch: Tensor) -> Tensor:
        loss = super().training_step(batch)
        self.log("train_loss", loss)
        self.log("both", loss)
        return loss

    def validation_step(self, batch: Tensor) -> None:
        self.log("val_loss", float(self.current_epoch))
        self.log("both", 7.0 + self.current_epoch)


@pytest.mark.parametrize("first", [True, False])
def test_the_best_checkpoint_by_a_metric_of_any_name(first: bool, tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path / "best", filename="{step}", monitor="val_loss", mode="max", save_top_k=-1)
    callbacks = [Recovery(), best] if first else [best, Recovery()]
    trainer(tmp_path, *callbacks, enable_checkpointing=True, max_epochs=2).fit(Named(), loader(), loader())
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["step=4.ckpt", "step=8.ckpt"]
    assert Path(best.best_model_path).name == "step=8.ckpt"


def test_a_metric_of_an_earlier_validation_does_not_judge_later_weights(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path / "best", filename="{step}", monitor="val_loss", save_top_k=-1)
    fit = trainer(tmp_path, best, Recovery(), enable_checkpointing=True, max_epochs=2, max_steps=6)
    fit.fit(Named(), loader(), loader())
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step=4.ckpt"]


def test_curves_and_report_show_metrics_of_any_name(tmp_path: Path) -> None:
    curves, best = LearningCurves(), ModelCheckpoint(monitor="val_loss", mode="max")
    options: dict[str, Any] = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 2, "max_epochs": 2}
    fit = trainer(tmp_path, curves, RunReport(), best, Recovery(), enable_checkpointing=True, **options)
    fit.fit(Named(), loader(), loader())
    assert [step for step, _ in curves.points["train_loss"]] == [2, 4, 6, 8]
    assert curves.points["both"] == [(4, 7.0), (8, 8.0)], "validation and training must not be mixed"
    assert list(tmp_path.rglob("learning_curves.png"))
    record = json.loads(next(tmp_path.rglob("run.json")).read_text())
    assert record["metrics"] == {"val_loss": [[4, 0.0], [8, 1.0]], "both": [[4, 7.0], [8, 8.0]]}
    assert record["best"]["metric"] == "val_loss"
    assert record["best"]["step"] == 8
    assert record["skipped"] == []


def test_curves_of_a_resumed_run_keep_a_metric_that_training_and_validation_log(tmp_path: Path) -> None:
    first, second = LearningCurves(), LearningCurves()
    fit = trainer(tmp_path, first, log_every_n_steps=1, max_epochs=2)
    fit.fit(Named(), loader(), loader())
    fit.save_checkpoint(tmp_path / "last.ckpt")
    resumed = trainer(tmp_path, second, log_every_n_steps=1, max_epochs=3)
    resumed.fit(Named(), loader(), loader(), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert second.points["both"] == [(4, 7.0), (8, 8.0), (12, 9.0)]
    earlier_version = LearningCurves()
    earlier_version.load_state_dict({"val/loss": [[4, 7.0]]})
    assert earlier_version.points == {"val/loss": [(4, 7.0)]}


def test_a_run_outside_the_main_thread(tmp_path: Path) -> None:
    fit, model = trainer(tmp_path, Recovery(), enable_checkpointing=True), Line()
    thread = threading.Thread(target=lambda: fit.fit(model, loader()))
    thread.start()
    thread.join()
    assert fit.global_step == 4
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
