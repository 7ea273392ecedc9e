"""Options out of range are errors of the constructor, which name the option and its value."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mhla_tasks.classification.data import AugmentConfig, Digits, ImageNetShards
from mhla_tasks.classification.predict import PredictionTable
from mhla_tasks.diffusion.data import LatentShards
from mhla_tasks.language.callbacks import TokenThroughput
from mhla_tasks.language.data import HubText, PythonSource
from mhla_tasks.language.passages import TextPassages
from mhla_tasks.language.recall import Needle
from mhla_tasks.text_to_image.data import CaptionedImageShards, DigitScenes, ImageLatentShards
from mhla_tasks.video.bouncing import BouncingDigits
from mhla_tasks.video.data import MovingDigits, VideoFolders

from lightning_mhla.callbacks import AttentionPictures
from lightning_mhla.callbacks.averaging import ExponentialMovingAverage
from lightning_mhla.vision.preprocessing import Preprocessing


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Preprocessing, {"crop_share": 0}, "crop_share=0 must be above 0"),
        (Preprocessing, {"crop_share": 1.5}, "crop_share=1.5 must be above 0 and at most 1"),
        (Preprocessing, {"crop_share": float("nan")}, "crop_share=nan must be above 0"),
        (Preprocessing, {"channels": 4}, "channels=4 must be 3, or 1"),
        (Preprocessing, {"std": (1.0, 0.0, 1.0)}, r"std=\[1.0, 0.0, 1.0\] must be positive"),
        (Preprocessing, {"mean": (0.5, 0.5)}, r"mean=\[0.5, 0.5\] must have one value"),
        (ImageNetShards, {"crop_share": 0.0}, "crop_share=0.0 must be above 0"),
        (ImageNetShards, {"image_size": 0}, "image_size=0 must be at least 1"),
        (ImageNetShards, {"channels": 2}, "channels=2 must be 3, or 1"),
        (AugmentConfig, {"min_scale": 0.0}, "min_scale=0.0 must be above 0"),
        (AugmentConfig, {"horizontal_flip": 50.0}, "horizontal_flip=50.0 is a probability"),
        (AugmentConfig, {"random_erasing": -0.1}, "random_erasing=-0.1 is a probability"),
        (AugmentConfig, {"color_jitter": -1.0}, "color_jitter=-1.0 must not be negative"),
        (AugmentConfig, {"interpolation": "cubic"}, "'cubic' is not one of random, bilinear, bicubic"),
        (AttentionPictures, {"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        (ExponentialMovingAverage, {"decay": 1.5}, "decay=1.5 must be a number from 0 to 1"),
        (TokenThroughput, {"peak_flops": 0.0}, "peak_flops=0.0 must be positive"),
    ],
    ids=lambda value: (
        value.__name__ if isinstance(value, type) else next(iter(value)) if isinstance(value, dict) else ""
    ),
)
def test_values_out_of_range(kind: Any, options: dict[str, Any], message: str) -> None:
    required: dict[Any, dict[str, Any]] = {Preprocessing: {"image_size": 8}, ImageNetShards: {"train": "a", "val": "b"}}
    with pytest.raises(ValueError, match=message):
        kind(**{**required.get(kind, {}), **options})


@pytest.mark.parametrize("batch", [{"image": torch.zeros(4, 1, 8, 8)}, [torch.zeros(4, 8)], torch.zeros(4, 8)])
def test_a_sample_beyond_the_batch_is_named_in_the_sanity_check(batch: Any) -> None:
    trainer: Any = SimpleNamespace(sanity_checking=True, current_epoch=0, state=SimpleNamespace(fn="fit"))
    AttentionPictures(sample=3).on_validation_batch_start(trainer, torch.nn.Module(), batch, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sample=4 of AttentionPictures: .* 4 samples; choose 0 to 3"):
        AttentionPictures(sample=4).on_validation_batch_start(trainer, torch.nn.Module(), batch, 0)  # type: ignore[arg-type]


def test_classes_of_one_name_have_columns_of_their_own(tmp_path: Path) -> None:
    trainer: Any = SimpleNamespace(
        predict_dataloaders=SimpleNamespace(source=None), is_global_zero=True, world_size=1, fast_dev_run=False,
        log_dir=str(tmp_path), limit_predict_batches=1.0,
    )  # fmt: skip
    module: Any = SimpleNamespace(class_names=["crane", "path", "owl", "crane"])
    table = PredictionTable()
    outputs = {"index": torch.tensor([0]), "probability": torch.tensor([[0.125, 0.25, 0.125, 0.5]])}
    table.on_predict_batch_end(trainer, module, outputs)
    table.on_predict_end(trainer, module)
    with (tmp_path / "predictions.csv").open(newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert row == {
        "path": "0", "predicted": "crane (3)", "crane (0)": "0.125000", "path (1)": "0.250000", "owl": "0.125000",
        "crane (3)": "0.500000",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Digits, {"batch_size": 0}, "batch_size=0 must be at least 1"),
        (Digits, {"num_workers": -1}, "num_workers=-1 must be at least 0"),
        (ImageNetShards, {"train": "a", "val": "b", "num_workers": -1}, "num_workers=-1 must be at least 0"),
        (LatentShards, {"train": "a", "val": "b", "sample_size": 0}, "sample_size=0 must be at least 1"),
        (PythonSource, {"seed": -1}, "seed=-1 must be at least 0"),
        (Needle, {"num_workers": -2}, "num_workers=-2 must be at least 0"),
        (Needle, {"lengths": [1, 0]}, "lengths=0 must be at least 1"),
        (HubText, {"tokenizer": "t", "shuffle_buffer": -1}, "shuffle_buffer=-1 must be at least 0"),
        (TextPassages, {"train": "a", "val": "b", "tokenizer": "t", "min_characters": -1}, "min_characters=-1 must be"),
        (DigitScenes, {"batch_size": -4}, "batch_size=-4 must be at least 1"),
        (ImageLatentShards, {"train": "a", "val": "b", "text_length": 0}, "text_length=0 must be at least 1"),
        (CaptionedImageShards, {"train": "a", "val": "b", "height": -1}, "height=-1 must be at least 1"),
        (MovingDigits, {"frames": 0}, "frames=0 must be at least 1"),
        (BouncingDigits, {"speed": 0}, "speed=0 must be at least 1"),
        (VideoFolders, {"train": "a", "val": "b", "clips": -1}, "clips=-1 must be at least 1"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_sizes_of_data_modules_are_checked_when_they_are_built(
    kind: type, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)
