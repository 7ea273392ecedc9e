"""Several batches for one optimizer step: every callback counts steps, not batches, and the schedule has the steps there are."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from grouped import grouped
from lightning import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from mhla_tasks.classification import Digits, ImageClassifier
from mhla_tasks.commandline.parser import main
from processes import fork_server

from lightning_mhla import AttentionConfig
from lightning_mhla.system.steps import steps_of_epochs, steps_of_run
from lightning_mhla.training.optim import OptimizerConfig

ROOT = Path(__file__).parents[2]
SCHEDULE = {0: 1, 1: 2, 3: 3}


def classifier(**options: Any) -> ImageClassifier:
    sizes: dict[str, Any] = {
        "num_classes": 10,
        "image_size": 8,
        "channels": 1,
        "patch_size": 2,
        "dim": 8,
        "depth": 1,
        "heads": 1,
    }
    return ImageClassifier(AttentionConfig(block_grid=[2, 2]), **grouped(**sizes, **options))


def fit(module: ImageClassifier, folder: Path, **options: Any) -> Trainer:
    """Train with five batches per epoch."""
    trainer = Trainer(
        accelerator="cpu", default_root_dir=folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0, **options,
    )  # fmt: skip
    trainer.fit(module, Digits(batch_size=240))
    return trainer


def write_config(folder: Path, config: str, callbacks: list[Any] | None = None, **trainer: Any) -> Path:
    content = yaml.safe_load((ROOT / "configs" / config).read_text())
    content["trainer"] |= {"accelerator": "cpu", "enable_progress_bar": False, "limit_val_batches": 1, **trainer}
    content["trainer"]["callbacks"] += callbacks or []
    content["trainer"]["logger"] = [{"class_path": "CSVLogger", "init_args": {"save_dir": "."}}]
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder / "config.yaml"


def rows(run: Path, name: str) -> dict[int, float]:
    with (run / "metrics.csv").open() as stream:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(stream) if row.get(name)}


@pytest.mark.parametrize("accumulate", [1, 2, 3, "schedule"])
def test_the_steps_of_a_run_are_those_it_makes(tmp_path: Path, accumulate: int | str) -> None:
    """The cosine ends where training does, and the warm-up is as long as the epochs that it names."""
    optimizer = OptimizerConfig(lr=1.0, min_lr=0.25, warmup_epochs=2)
    callbacks = [GradientAccumulationScheduler(dict(SCHEDULE))] if accumulate == "schedule" else []
    factor = {} if accumulate == "schedule" else {"accumulate_grad_batches": accumulate}
    module = classifier(optimizer=optimizer)
    trainer = fit(module, tmp_path, max_epochs=4, callbacks=callbacks, **factor)
    want = {1: 20, 2: 12, 3: 8, "schedule": 5 + 3 + 3 + 2}[accumulate]
    assert trainer.global_step == steps_of_run(trainer) == want
    assert steps_of_epochs(trainer, 2) == {1: 10, 2: 6, 3: 4, "schedule": 8}[accumulate]
    schedule = module.lr_schedulers()
    assert schedule.lr_lambdas[0].warmup == steps_of_epochs(trainer, 2)
    assert schedule.get_last_lr()[0] == pytest.approx(0.25)


def test_steps_without_an_end_and_with_a_limit(tmp_path: Path) -> None:
    module = classifier(optimizer=OptimizerConfig(schedule="constant"))
    trainer = fit(module, tmp_path, max_epochs=3, max_steps=7, accumulate_grad_batches=2)
    assert steps_of_run(trainer) == 7
    assert steps_of_epochs(trainer, 1.5) == 4.5


@pytest.mark.parametrize(
    ("config", "accumulate"),
    [("classification/digits.yaml", 3), ("language/mqar.yaml", 3), ("diffusion/digits.yaml", 2)],
)
def test_every_callback_of_a_shipped_run_lasts(tmp_path: Path, config: str, accumulate: int) -> None:
    """Past the 25th step, where the speed is printed, with everything that the configuration brings."""
    path = write_config(tmp_path, config, accumulate_grad_batches=accumulate, max_steps=30, log_every_n_steps=5)
    status, text = fork_server().run("fit", "--config", str(path), "--run_dir=run", folder=tmp_path)
    assert status == 0, text[-3000:]
    assert len(re.findall(r"steps per second|s per step", text)) == 1, "the speed is printed once"
    curves = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["callbacks"]["LearningCurves"]
    assert [step for step, _ in curves["points"]["train/loss"]] == [5, 10, 15, 20, 25, 30], (
        "a point for each logged step, none at 0"
    )
    assert list(rows(tmp_path / "run", "train/loss")) == [4, 9, 14, 19, 24, 29]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_speed_of_tokens_is_in_the_rows_of_the_log(tmp_path: Path, cache_dir: Path, accumulate: int) -> None:
    small = {"shape": "{dim: 16, depth: 1, heads: 2, mlp_width: 16}", "vocab_size": 300, "context": 32}
    path = write_config(
        tmp_path, "language/stdlib.yaml", accumulate_grad_batches=accumulate, max_steps=12, log_every_n_steps=4
    )
    words = [f"--model.{name}={value}" for name, value in small.items()]
    words += [
        "--data.vocab_size=300",
        f"--data.cache_dir={cache_dir}",
        "--trainer.val_check_interval=60",
    ]
    main(["fit", "--config", str(path), f"--run_dir={tmp_path / 'run'}", *words])
    assert list(rows(tmp_path / "run", "train/tokens_per_second")) == [3, 7, 11]


def test_the_decay_of_the_average_follows_the_accumulation(tmp_path: Path) -> None:
    """ema_batch is for the images of a step: 240 at first, 480 from the second epoch on."""
    module = classifier(ema_decay=0.5, ema_batch=240)
    decays: list[tuple[int, float]] = []
    average_decay = module.average_decay

    def recorded(decay: float) -> float:
        value = average_decay(decay)
        decays.append((module.trainer.current_epoch, value))
        return value

    module.average_decay = recorded  # type: ignore[method-assign]
    fit(module, tmp_path, max_epochs=2, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])
    assert {value for epoch, value in decays if epoch == 0} == {0.5}
    assert {value for epoch, value in decays if epoch == 1} == {0.25}


def test_a_checkpoint_inside_an_accumulation_is_not_resumed_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A validation may come between two halves of a step; its best weights are kept, but not the gradients of the first half."""
    best = {
        "class_path": "ModelCheckpoint",
        "init_args": {"monitor": "val/loss", "save_top_k": -1, "filename": "{step}-{epoch}"},
    }
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "check_val_every_n_epoch": None, "max_steps": 4}
    path = write_config(tmp_path, "classification/digits.yaml", [best], **options)
    run = tmp_path / "run"
    words = ["fit", "--config", str(path), "--model.shape.depth=1", "--data.batch_size=240"]
    main([*words, f"--run_dir={run}"])
    inside = next(iter((run / "checkpoints").glob("step=1-*.ckpt")))
    main(["validate", "--config", str(path), "--model.shape.depth=1", f"--ckpt_path={inside}"])
    capsys.readouterr()
    state = torch.load(inside, weights_only=True)
    done = state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["completed"]
    assert done == 3
    with pytest.raises(SystemExit):
        main([*words, f"--run_dir={tmp_path / 'other'}", f"--ckpt_path={inside}"])
    said = capsys.readouterr().err
    assert "after 3 batches of its epoch, and gradients of 2 batches are accumulated" in said
    assert "last.ckpt" in said


def test_another_accumulation_is_rejected_where_it_would_lose_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three batches done are one step of three, or one and a half of two."""
    path = write_config(tmp_path, "classification/digits.yaml")
    words = [
        "fit",
        "--config",
        str(path),
        "--model.shape.depth=1",
        "--data.batch_size=240",
        f"--run_dir={tmp_path / 'run'}",
    ]
    main([*words, "--trainer.accumulate_grad_batches=3", "--trainer.max_steps=1"])
    with pytest.raises(SystemExit):
        main([*words, "--trainer.accumulate_grad_batches=2", "--trainer.max_steps=4"])
    assert "after 3 batches of its epoch, and gradients of 2 batches are accumulated" in capsys.readouterr().err
    main([*words, "--trainer.accumulate_grad_batches=1", "--trainer.max_steps=3"])
