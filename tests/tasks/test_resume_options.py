"""Options changed on resume are obeyed, or rejected, and logged; no row of the log is lost; copies resume where they stood.

Longer than other files: every change that a resumed run may meet.
"""

from __future__ import annotations

import csv
import logging
import math
import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fork_server import ForkServer
from grouped import grouped
from mhla_tasks.classification import Digits, ImageClassifier, VisionShape
from mhla_tasks.commandline.parser import main
from torch import nn

from lightning_mhla import AttentionConfig
from lightning_mhla.checkpoints.io import find_checkpoints, resolve_checkpoint
from lightning_mhla.training.optim import OptimizerConfig, Schedule, asked_options, build_optimizer, take_over

ROOT = Path(__file__).parents[2]


def write_config(folder: Path, schedule: str = "cosine", **trainer: Any) -> Path:
    """Write a smaller digits configuration with its own logger and callbacks, and a CSV table."""
    config = yaml.safe_load((ROOT / "configs/classification/digits.yaml").read_text())
    optimizer = {"lr": 2e-3, "min_lr": 1e-4, "schedule": schedule}
    config["model"]["init_args"] = grouped(config["model"]["init_args"], dim=16, depth=2, heads=2, optimizer=optimizer)
    config["data"]["init_args"] = {"batch_size": 240}
    table = {"class_path": "CSVLogger", "init_args": {"save_dir": "elsewhere"}}
    config["trainer"] |= {"accelerator": "cpu", "log_every_n_steps": 1, "max_epochs": -1, "limit_val_batches": 0}
    config["trainer"] |= {
        "logger": [*config["trainer"]["logger"], table],
        "callbacks": [{"class_path": "LearningRateMonitor"}],
    }
    config["trainer"]["callbacks"].append(
        {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 2, "save_top_k": -1}}
    )
    config["trainer"] |= trainer
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


def table(run: Path, column: str) -> dict[int, float]:
    """Return the logged values by step; for a repeated step, those of the later start."""
    found: dict[int, float] = {}
    for path in sorted(run.glob("metrics*.csv"), key=lambda path: (path.name == "metrics.csv", path.name)):
        for row in csv.DictReader(path.open()):
            if row.get(column):
                found[int(row["step"])] = float(row[column])
    return found


def fit(run: Path, config: Path, *options: str) -> None:
    main(["fit", "--config", str(config), f"--run_dir={run}", *options])


def test_a_checkpoint_is_never_newer_than_its_log(server: ForkServer, tmp_path: Path) -> None:
    """Killed as soon as a checkpoint of step 4 is written: its row is there after the resume, in the table and for TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = write_config(tmp_path)
    command = ("fit", "--config", str(config), "--run_dir=run", "--trainer.max_steps=8")
    assert server.run(*command, folder=tmp_path, kill_after_save=4)[0] == -9
    status, text = server.run(*command, folder=tmp_path)
    assert status == 0, text[-3000:]
    fit(tmp_path / "whole", config, "--trainer.max_steps=8")
    whole, killed = (table(tmp_path / name, "train/loss") for name in ("whole", "run"))
    assert sorted(killed) == list(range(8))
    assert killed == whole
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(8))


def test_optimiser_options_are_obeyed_on_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, run = write_config(tmp_path), tmp_path / "run"
    fit(run, config, "--trainer.max_steps=4")
    with caplog.at_level(logging.INFO, "lightning_mhla"):
        optimizer = "--model.training.optimizer"
        fit(run, config, "--trainer.max_steps=8", f"{optimizer}.lr=1e-3", f"{optimizer}.weight_decay=0.3")
    state = torch.load(resolve_checkpoint(run), weights_only=True)["optimizer_states"][0]
    groups = {group["name"]: group for group in state["param_groups"]}
    assert {group["initial_lr"] for group in groups.values()} == {1e-3}
    assert groups["decay"]["weight_decay"] == 0.3
    assert groups["no_decay"]["weight_decay"] == groups["mixing"]["weight_decay"] == 0
    assert "initial_lr of decay 0.002 -> 0.001" in caplog.text
    assert "end of the schedule 4 -> 8" in caplog.text
    assert "model.training.optimizer.lr 0.002 -> 0.001" in caplog.text
    rates = table(run, "lr/decay")
    assert rates[0] == 2e-3
    assert max(rates[step] for step in range(4, 8)) <= 1e-3


def test_a_longer_run_does_not_jump_up_the_cosine(tmp_path: Path) -> None:
    config, run = write_config(tmp_path), tmp_path / "run"
    fit(run, config, "--trainer.max_steps=6")
    fit(run, config, "--trainer.max_steps=12")
    rates = table(run, "lr/decay")
    assert sorted(rates) == list(range(12))
    assert all(rates[step + 1] <= rates[step] for step in range(11)), rates
    assert rates[11] == pytest.approx(1e-4)


def test_a_run_without_a_change_keeps_its_rates_to_the_bit(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    fit(tmp_path / "whole", config, "--trainer.max_steps=8")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for path in find_checkpoints(tmp_path / "cut"):
        if torch.load(path, weights_only=True)["global_step"] > 4:
            path.unlink()
    fit(tmp_path / "cut", config, "--trainer.max_steps=8")
    assert table(tmp_path / "cut", "lr/decay") == table(tmp_path / "whole", "lr/decay")
    assert table(tmp_path / "cut", "train/loss") == table(tmp_path / "whole", "train/loss")


def test_what_may_not_change_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, run = write_config(tmp_path), tmp_path / "run"
    fit(run, config, "--trainer.max_steps=4")
    for option, message in (
        ("--model.training.optimizer.layer_decay=0.5", "optimizer has groups of"),
        ("--data.batch_size=120", "trained with batch_size=240"),
        ("--seed_everything=7", "trained with seed=0"),
        ("--model.shape.dim=32", "model with different sizes"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            fit(run, config, "--trainer.max_steps=8", option)
        assert message in capsys.readouterr().err, option


def test_a_finished_run_whose_rate_is_zero_says_what_to_do() -> None:
    schedule = Schedule(OptimizerConfig(lr=1.0), steps=10, warmup=0)
    assert schedule(10) == 0
    with pytest.raises(ValueError, match=r"ended at a learning rate of 0, and 10 more steps.*min_lr.*pretrained"):
        schedule.follow(Schedule(OptimizerConfig(lr=1.0), steps=20, warmup=0), 10)


@pytest.mark.parametrize("step", [0, 3, 5, 17, 40])
def test_a_schedule_goes_over_to_another_without_a_jump(step: int) -> None:
    """Wherever it is changed: in the warm-up, inside the cosine, at its end."""
    old = Schedule(OptimizerConfig(lr=1.0, min_lr=0.1), steps=40, warmup=5)
    before = old(step)
    changed = old.follow(Schedule(OptimizerConfig(lr=1.0, min_lr=0.1), steps=80, warmup=5), step)
    assert changed == ["end of the schedule 40 -> 80"]
    assert old(step) == pytest.approx(before)
    rates = [old(at) for at in range(max(step, 5), 81)]
    assert all(b <= a for a, b in pairwise(rates))
    assert rates[-1] == pytest.approx(0.1)
    assert old.follow(Schedule(OptimizerConfig(lr=1.0, min_lr=0.1), steps=80, warmup=5), step) == []


def test_a_schedule_past_its_end_stays_at_its_floor() -> None:
    schedule = Schedule(OptimizerConfig(lr=2.0, min_lr=0.5), steps=10, warmup=2)
    assert [schedule(step) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert schedule(6) == pytest.approx(0.25 + 0.75 / 2)
    assert schedule(10) == schedule(11) == schedule(1000) == 0.25


def test_taking_over_changes_what_was_asked_and_nothing_else() -> None:
    layer = nn.Linear(3, 3)
    config = OptimizerConfig(lr=0.1, warmup_steps=2)
    optimizer, schedule = build_optimizer(layer, config, 10, 5)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    before = [dict(group, params=None) for group in optimizer.param_groups]
    assert take_over(optimizer, schedule, asked_options(layer, config, 10, 5), 3) == []
    assert [dict(group, params=None) for group in optimizer.param_groups] == before
    config = OptimizerConfig(lr=0.2, warmup_steps=2, betas=(0.8, 0.99), eps=1e-6)
    changed = take_over(optimizer, schedule, asked_options(layer, config, 10, 5), 3)
    assert {text.split()[0] for text in changed} == {"initial_lr", "betas", "eps"}
    for group, old in zip(optimizer.param_groups, before, strict=True):
        assert group["lr"] == pytest.approx(2 * old["lr"])
        assert (group["betas"], group["eps"]) == ((0.8, 0.99), 1e-6)
        assert group["weight_decay"] == old["weight_decay"]
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2 * schedule.lr_lambdas[0](4))


def test_a_warm_up_longer_than_the_run_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lightning_mhla"):
        build_optimizer(nn.Linear(2, 2), OptimizerConfig(warmup_steps=20), 10, 5)
    assert "warm-up of 20 steps is longer than the run of 10" in caplog.text


def test_the_furthest_checkpoint_is_taken_whatever_the_times_of_files(tmp_path: Path) -> None:
    config, run = write_config(tmp_path), tmp_path / "run"
    fit(run, config, "--trainer.max_steps=4")
    for path in find_checkpoints(run):
        if torch.load(path, weights_only=True)["global_step"] < 4:
            os.utime(path, (2e9, 2e9))  # as a copy, or a restored backup, may leave it
    assert torch.load(resolve_checkpoint(run), weights_only=True)["global_step"] == 4
    assert resolve_checkpoint(run).parent.name == "recovery", "of one step, the one that a longer run can resume"


def test_a_failed_start_uses_up_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path)
    for _ in range(2):
        with pytest.raises(SystemExit):
            main(["fit", "--config", str(config), "--trainer.max_steps=2", "--data.batch_size=100000"])
    main(["fit", "--config", str(config), "--trainer.max_steps=2"])
    assert [path.name for path in (tmp_path / "runs/digits").iterdir()] == ["version_0"]


def test_predictions_go_to_the_run_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One unreadable image costs a warning and leaves its row empty; a second call writes beside the first."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    fit(run, write_config(tmp_path), "--trainer.max_steps=2")
    (tmp_path / "photos").mkdir()
    for number in range(2):
        Image.new("L", (30, 20), 50 * number).save(tmp_path / f"photos/{number}.png")
    (tmp_path / "photos/bad.png").write_bytes(b"nothing")
    checkpoint = next((run / "checkpoints/recovery").glob("*.ckpt"))
    main(["predict", f"--ckpt_path={checkpoint}", "--data.predict_dir=photos"])
    main(["predict", f"--run_dir={run}", "--data.predict_dir=photos"])
    rows = list(csv.reader((run / "predict/predictions.csv").open()))
    assert rows[0][:3] == ["path", "predicted", "0"]
    assert [row[0].rpartition("/")[2] for row in rows[1:]] == ["0.png", "1.png", "bad.png"]
    assert rows[3][1:] == [""] * 11
    assert sum(map(float, rows[1][2:])) == pytest.approx(1, abs=1e-4)
    assert (run / "predict-2/predictions.csv").read_text() == (run / "predict/predictions.csv").read_text()
    assert not (tmp_path / "lightning_logs").exists()
    assert not (tmp_path / "runs").exists()


def test_any_logger_and_none_go_with_a_run_folder_and_the_files_callbacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path, callbacks=[{"class_path": "LearningRateMonitor"}])
    for number, logger in enumerate(("CSVLogger", "TensorBoardLogger", "false", "true")):
        fit(tmp_path / f"run{number}", config, "--trainer.max_steps=1", f"--trainer.logger={logger}")
    assert (tmp_path / "run0/metrics.csv").exists()
    assert list((tmp_path / "run1").glob("events*"))


def test_names_of_two_meanings_and_a_logger(tmp_path: Path) -> None:
    """Model and data may have options of one name and different values, whatever logger is on."""
    from lightning import Trainer
    from lightning.pytorch.loggers import TensorBoardLogger

    class Named(Digits):
        def __init__(self, training: str = "of the data", **options: Any) -> None:
            super().__init__(**options)
            self.save_hyperparameters()

    module = ImageClassifier(
        AttentionConfig(block_grid=[2, 2]), 10, image_size=8, channels=1, shape=VisionShape(16, 1, 2, patch_size=2)
    )
    logger = TensorBoardLogger(tmp_path, name="", version="")
    trainer = Trainer(
        accelerator="cpu", max_steps=1, logger=logger, enable_progress_bar=False, default_root_dir=tmp_path
    )
    trainer.fit(module, Named(batch_size=240))
    text = (tmp_path / "hparams.yaml").read_text()
    assert "data/training: of the data" in text
    assert "model/training" in text


def test_data_of_another_size_than_the_models_is_one_line() -> None:
    from types import SimpleNamespace

    module = ImageClassifier(
        AttentionConfig(block_grid=[2, 2]), 10, image_size=8, channels=1, shape=VisionShape(16, 1, 2, patch_size=2)
    )
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(hparams={"num_classes": 7}))  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"model\.num_classes=10 and data\.num_classes=7 must be equal"):
        module.setup("fit")


def test_lightnings_search_for_a_learning_rate_works(tmp_path: Path) -> None:
    from lightning import Trainer
    from lightning.pytorch.tuner import Tuner

    module = ImageClassifier(
        AttentionConfig(block_grid=[2, 2]), 10, image_size=8, channels=1, shape=VisionShape(16, 1, 2, patch_size=2)
    )
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, default_root_dir=tmp_path
    )
    found = Tuner(trainer).lr_find(module, datamodule=Digits(batch_size=240), num_training=12)
    assert found is not None
    suggested = found.suggestion()
    assert suggested is None or (math.isfinite(suggested) and module.optimizer_config.lr == suggested)


def test_class_folders_grey_pictures_and_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of class folders is a data set as it stands: of grey and of oblong pictures, for both image domains."""
    import numpy as np
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(8):
                shape = (20, 34) if number % 2 else (31, 18, 3)
                Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8)).save(
                    tmp_path / part / name / f"{number}.png"
                )
    data = {"train": "train", "val": "val", "batch_size": 8, "num_workers": 0, "image_size": 16}
    trainer = {"accelerator": "cpu", "max_steps": 2, "enable_progress_bar": False, "logger": False}
    sizes = {"num_classes": 2, "channels": 1, "shape": {"patch_size": 4, "dim": 16, "depth": 1, "heads": 2}}
    configs = {
        "classification": {
            "model": {"class_path": "mhla_tasks.classification.ImageClassifier",
                      "init_args": {"attention": {"block_grid": [2, 2]}, "image_size": 16, **sizes}},
            "data": {"class_path": "mhla_tasks.classification.ImageNetShards", "init_args": data},
        },
        "diffusion": {
            "model": {"class_path": "mhla_tasks.diffusion.ClassToImage",
                      "init_args": {"attention": {"block_grid": [2, 2]}, "sample_size": 16, **sizes}},
            "data": {"class_path": "mhla_tasks.diffusion.ImageShards", "init_args": data},
        },
    }  # fmt: skip
    for domain, config in configs.items():
        Path(f"{domain}.yaml").write_text(yaml.safe_dump({**config, "trainer": trainer}))
        main(["fit", "--config", f"{domain}.yaml", f"--run_dir={domain}"])  # num_classes and channels are given once
    main(["predict", "--run_dir=classification", "--data.predict_dir=val"])
    rows = list(csv.DictReader((tmp_path / "classification/predict/predictions.csv").open()))
    assert len(rows) == 16
    assert list(rows[0]) == ["path", "predicted", "cat", "dog"]
    assert {row["predicted"] for row in rows} <= {"cat", "dog"}
    (tmp_path / "train/eel").mkdir()
    Image.new("L", (20, 20)).save(tmp_path / "train/eel/0.png")
    with pytest.raises(SystemExit):
        main(["fit", "--config", "classification.yaml", "--run_dir=few"])
    assert (
        "train holds 3 classes (cat, dog, eel), but model num_classes=2 (classification.yaml) is given"
        in capsys.readouterr().err
    )


def test_options_that_a_kind_does_not_use_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    from lightning_mhla import Backbone

    config = AttentionConfig(kind="softmax", block_grid=[2, 2], mixing_terms=7)
    with caplog.at_level(logging.INFO, "lightning_mhla"):
        Backbone(16, 3, 2, (4, 4), config)
    assert caplog.text.count("attention kind softmax does not use block_grid, mixing_terms") == 1


def test_options_are_compared_as_plain_values() -> None:
    from lightning_mhla.system.hyperparameters import plain

    ours = plain({"optimizer": OptimizerConfig(betas=(0.9, 0.99)), "attention": AttentionConfig(block_grid=[2, 2])})
    assert ours["optimizer.betas"] == plain({"optimizer": {"betas": [0.9, 0.99]}})["optimizer.betas"] == [0.9, 0.99]
    assert ours["attention.block_grid"] == plain({"attention": {"block_grid": (2, 2)}})["attention.block_grid"]
