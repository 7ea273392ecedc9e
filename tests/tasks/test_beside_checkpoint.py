"""Options of the trainer that a command changes: folders beside a checkpoint, and values that cannot work."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jsonargparse import Namespace
from mhla_tasks.commandline.options import check_trainer, leave_out_monitors, use_run_folder, write_beside_checkpoint
from mhla_tasks.commandline.sources import Source


def options_with(checkpoint: Path | str | None, **trainer: Any) -> Any:
    return Namespace(ckpt_path=checkpoint, trainer=Namespace(logger=None, default_root_dir="runs", **trainer))


def folder_of(checkpoint: Path | str | None, command: str = "validate", **trainer: Any) -> str | None:
    """The folder that a command writes to; None where nothing changes."""
    options = options_with(None if checkpoint is None else str(checkpoint))
    write_beside_checkpoint(options, command, [Source("a.yaml", {"trainer": trainer}), Source("b.yaml", {})])
    if options.trainer.logger is None:
        assert options.trainer.default_root_dir == "runs"
        return None
    assert options.trainer.logger is False
    return str(options.trainer.default_root_dir)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints in each of its places, one of them sharded."""
    for name in ("checkpoints/recovery/step=00000004.ckpt", "checkpoints/last.ckpt"):
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({}, path)
    sharded = tmp_path / "run/checkpoints/sharded.ckpt"
    sharded.mkdir()
    (sharded / "meta.pt").touch()
    return tmp_path / "run"


@pytest.mark.parametrize(
    "name", ["", "checkpoints/last.ckpt", "checkpoints/recovery/step=00000004.ckpt", "checkpoints/sharded.ckpt"]
)
@pytest.mark.parametrize("command", ["validate", "test"])
def test_results_go_to_the_folder_of_the_checkpoints_run(run: Path, name: str, command: str) -> None:
    assert folder_of(run / name, command) == str(run)


def test_a_checkpoint_without_a_run_has_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").touch()
    assert folder_of(tmp_path / "model.ckpt") == str(tmp_path)


def test_each_prediction_has_a_new_folder(run: Path) -> None:
    for name in ("predict", "predict-2", "predict-3"):
        assert folder_of(run / "checkpoints/last.ckpt", "predict") == str(run / name)
        (run / name).mkdir()
    assert folder_of(run / "checkpoints/last.ckpt", "validate") == str(run)


def test_what_the_user_sets_stays(run: Path) -> None:
    assert folder_of(run, max_epochs=3) == str(run)
    assert folder_of(run, logger=True) is None
    assert folder_of(run, default_root_dir="mine") is None
    assert folder_of(None) is None
    assert folder_of(run / "checkpoints/missing.ckpt") is None


@pytest.mark.parametrize("name", ["accumulate_grad_batches", "check_val_every_n_epoch"])
def test_intervals_are_at_least_one(name: str) -> None:
    for value in (None, 1, 2):
        check_trainer({name: value})
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"--trainer.{name}={value} must be at least 1"):
            check_trainer({name: value})


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_monitors_go_where_there_is_no_logger(command: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mhla_tasks")
    monitor, other = (SimpleNamespace(class_path=f"a.{name}") for name in ("LearningRateMonitor", "Other"))
    disabled = ["LearningRateMonitor is disabled, because there is no logger"] if command == "fit" else []
    for callbacks, remaining, messages in (
        ([monitor, other, monitor], [other], disabled), (monitor, [], disabled),
        ([other], [other], []), ([], [], []), (None, None, []), (other, other, []),
    ):  # fmt: skip
        trainer = SimpleNamespace(callbacks=callbacks)
        leave_out_monitors(trainer, command)
        assert trainer.callbacks == remaining
        assert caplog.messages == messages
        caplog.clear()


def logger(class_path: str, /, **arguments: Any) -> Namespace:
    return Namespace(class_path=class_path, init_args=Namespace(**arguments))


def placed(run: Path, logger: Any) -> Any:
    options = Namespace(run_dir=str(run), trainer=Namespace(logger=logger, default_root_dir="runs"))
    use_run_folder(options)
    assert (run / "lock").exists()
    assert options.trainer.default_root_dir == str(run)
    return options.trainer.logger


@pytest.mark.parametrize("given", [None, True])
def test_a_run_is_logged_in_its_folder(tmp_path: Path, given: bool | None) -> None:
    (made,) = placed(tmp_path / "run", given)
    assert made.class_path == "lightning.pytorch.loggers.TensorBoardLogger"
    assert vars(made.init_args) == {"save_dir": str(tmp_path / "run"), "name": "", "version": ""}
    assert (tmp_path / "run/lock").exists()


def test_every_logger_writes_into_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert placed(run, False) is False
    ours = [
        logger(f"lightning.pytorch.loggers.{name}", save_dir="elsewhere", name="x")
        for name in ("TensorBoardLogger", "CSVLogger")
    ]
    others = [logger("WandbLogger", save_dir=value) for value in (".", "", None, "mine")] + [
        logger("MLFlowLogger", project="x")
    ]
    found = placed(run, [*ours, *others])
    for one in found[:2]:
        assert vars(one.init_args) == {"save_dir": str(run), "name": "", "version": ""}
    assert [one.init_args.get("save_dir") for one in found[2:]] == [str(run), str(run), str(run), "mine", None]
    alone = placed(run, logger("TensorBoardLogger", save_dir="elsewhere"))
    assert alone.init_args.save_dir == str(run)
