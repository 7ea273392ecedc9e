"""A run that is stopped and resumed ends bit-identical to an undisturbed run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from mhla_tasks.classification import Digits, ImageClassifier, VisionShape
from mhla_tasks.classification.base import MixupConfig

from lightning_mhla import AttentionConfig
from lightning_mhla.training.optim import OptimizerConfig
from lightning_mhla.training.options import TrainingOptions

STEPS = 5  # of an epoch, in batches of 32 digits
EPOCHS = 3


class Record(Callback):
    """Callback that records logged losses and the images of each step."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.seen: dict[int, float] = {}
        self.validated: dict[int, float] = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses[trainer.global_step] = float(trainer.callback_metrics["train/loss"])
        self.seen[trainer.global_step] = float(batch["image"].double().sum())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validated[trainer.global_step] = float(trainer.callback_metrics["val/loss"])


def small_classifier(checkpointing: bool = False, **options: Any) -> ImageClassifier:
    return ImageClassifier(
        AttentionConfig(kind="mhla", block_grid=[4, 4], lepe=3),
        num_classes=10,
        image_size=8,
        channels=1,
        shape=VisionShape(dim=16, depth=2, heads=2, patch_size=1, stem="conv"),
        drop_path=0.2,
        mixup=MixupConfig(mixup=0.2, cutmix=0.5),
        training=TrainingOptions(OptimizerConfig(lr=2e-3, warmup_epochs=1), ema_decay=0.9, checkpointing=checkpointing),
        **options,
    )


def fit(folder: Path, workers: int, record: Record, resume: Path | None = None) -> None:
    seed_everything(3 if resume is None else 99, verbose=False)
    keep = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False
    )
    ends = ModelCheckpoint(
        folder, filename="end-{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        limit_train_batches=STEPS,
        limit_val_batches=2,
        callbacks=[record, keep, ends],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        gradient_clip_val=1.0,
    )
    model = small_classifier()
    os.environ["PL_GLOBAL_SEED"] = "3"  # the same run, whatever the weights that it was made with before the resume
    trainer.fit(model, datamodule=Digits(batch_size=32, num_workers=workers), ckpt_path=resume, weights_only=True)


def same_tensors(a: Any, b: Any, path: str = "") -> list[str]:
    """Return the paths of all entries in which two checkpoints differ."""
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) else [path]
    if isinstance(a, dict):
        return [w for key in a for w in same_tensors(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, list | tuple):
        return [w for i, (x, y) in enumerate(zip(a, b, strict=True)) for w in same_tensors(x, y, f"{path}/{i}")]
    return [] if a == b else [path]


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_bitwise_exact(tmp_path: Path, workers: int) -> None:
    whole = Record()
    fit(tmp_path / "whole", workers, whole)
    end = torch.load(tmp_path / "whole" / f"step={STEPS * EPOCHS}.ckpt", weights_only=True)
    assert len(set(whole.seen.values())) == STEPS * EPOCHS, "some batch came twice"

    stops = {
        "step=3": 3,
        f"step={STEPS}": STEPS,
        "end-epoch=0": STEPS,
        f"step={STEPS + 2}": STEPS + 2,
        "end-epoch=1": 10,
    }
    for name, step in stops.items():
        part = Record()
        fit(tmp_path / name, workers, part, resume=tmp_path / "whole" / f"{name}.ckpt")
        first = min(part.losses)
        assert first == step + 1, f"resumed {name} at step {first}"
        assert part.losses == {k: v for k, v in whole.losses.items() if k >= first}, f"losses differ after {name}"
        assert part.seen == {k: v for k, v in whole.seen.items() if k >= first}, f"samples differ after {name}"
        again = torch.load(tmp_path / name / f"step={STEPS * EPOCHS}.ckpt", weights_only=True)
        for key in ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers"):
            assert not same_tensors(end[key], again[key]), f"{key} differs after {name}"
        for step, value in part.validated.items():
            assert value == whole.validated[step], f"validation at step {step} differs after {name}"
