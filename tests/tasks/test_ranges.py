"""Options out of range are errors of the constructor, which name the option and its value."""

from __future__ import annotations

import csv
import inspect
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from mhla_tasks.captioned.requests import PromptRequest
from mhla_tasks.classification import ImageClassifier
from mhla_tasks.classification.base import MixupConfig
from mhla_tasks.classification.data import AugmentConfig, Digits, ImageNetShards
from mhla_tasks.classification.module import VisionShape
from mhla_tasks.classification.predict import PredictionTable
from mhla_tasks.diffusion.callbacks import SampleGrid
from mhla_tasks.diffusion.data import ImageShards, LatentShards, SampleRequest
from mhla_tasks.diffusion.dig import DiGConfig
from mhla_tasks.diffusion.module import DiTShape
from mhla_tasks.diffusion.process import ProcessConfig
from mhla_tasks.diffusion.sampling import DiTSamplingConfig
from mhla_tasks.language.callbacks import TokenThroughput
from mhla_tasks.language.data import HubText, PythonSource
from mhla_tasks.language.module import DecoderShape
from mhla_tasks.language.passages import TextPassages
from mhla_tasks.language.prompts import GenerationOptions
from mhla_tasks.language.recall import AssociativeRecall, Needle
from mhla_tasks.text_to_image import ImagePictures
from mhla_tasks.text_to_image.data import CaptionedImageShards, DigitScenes, ImageLatentShards
from mhla_tasks.text_to_image.sampling import SanaSamplingConfig
from mhla_tasks.video.bouncing import BouncingDigits
from mhla_tasks.video.continuation import ContinuationSampling, ErrorsConfig, FrameShape
from mhla_tasks.video.data import MovingDigits, VideoFolders, VideoShards
from mhla_tasks.video.sampling import WanSamplingConfig

from lightning_mhla import AttentionConfig
from lightning_mhla.callbacks import AttentionPictures
from lightning_mhla.callbacks.averaging import ExponentialMovingAverage
from lightning_mhla.callbacks.recovery import Recovery
from lightning_mhla.generative.distillation import DistillationConfig
from lightning_mhla.generative.fidelity.features import DigitFeatures, RandomFeatures
from lightning_mhla.generative.flow import FlowConfig
from lightning_mhla.system.processes import process_device
from lightning_mhla.system.ranges import check_seed
from lightning_mhla.training.encoders import EncoderDistillation
from lightning_mhla.training.linearize import TransferOptions
from lightning_mhla.training.optim import OptimizerConfig
from lightning_mhla.training.options import TrainingOptions
from lightning_mhla.vision.preprocessing import Preprocessing


@pytest.mark.parametrize("name", ["cuda", "cuda:3", "mps", "xpu", "meta", "hpu", "gpu", "cpu:x", "nonsense"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_devices_that_are_not_there(name: str) -> None:
    with pytest.raises(ValueError, match=f"^device='{name}' is not (available|a device of torch)"):
        process_device(name)


def test_devices_that_are_there() -> None:
    assert process_device("cpu").type == "cpu"
    assert process_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("seed", [1.5, -1, 2**63, float("nan"), "1"])
def test_seeds_are_integers(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"^seed=.* must be"):
        check_seed(seed=seed)


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
        (AugmentConfig, {"horizontal_flip": 50.0}, "horizontal_flip=50.0 must be at least 0 and at most 1"),
        (AugmentConfig, {"random_erasing": -0.1}, "random_erasing=-0.1 must be at least 0"),
        (AugmentConfig, {"color_jitter": -1.0}, "color_jitter=-1.0 must be at least 0"),
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


FOLDERS = {"train": "a", "val": "b"}

REQUIRED: dict[Any, dict[str, Any]] = {
    AssociativeRecall: {}, AttentionConfig: {}, AugmentConfig: {}, ContinuationSampling: {}, DecoderShape: {}, DiGConfig: {},
    DiTSamplingConfig: {}, DiTShape: {}, DistillationConfig: {}, EncoderDistillation: {}, ErrorsConfig: {}, FlowConfig: {}, FrameShape: {},
    GenerationOptions: {}, ImageClassifier: {"attention": AttentionConfig(kind="linear"), "num_classes": 2, "size": "tiny"},
    ImageShards: FOLDERS, LatentShards: FOLDERS, MixupConfig: {}, OptimizerConfig: {}, ProcessConfig: {}, Recovery: {},
    SanaSamplingConfig: {}, TrainingOptions: {}, TransferOptions: {}, VideoFolders: FOLDERS, VideoShards: FOLDERS,
    VisionShape: {}, WanSamplingConfig: {},
}  # fmt: skip
"""Classes with options that are fractions, and the options that they need."""


@pytest.mark.parametrize("kind", REQUIRED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_no_option_is_nan_infinite_or_negative(kind: Any, value: float) -> None:
    hints = get_type_hints(kind.__init__)
    names = [name for name in inspect.signature(kind).parameters if float in (hints[name], *get_args(hints[name]))]
    assert names
    for name in names:
        with pytest.raises(ValueError, match=f"{name}={value} must "):
            kind(**REQUIRED[kind], **{name: value})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (LatentShards, {**FOLDERS, "flip": -0.5}, "flip=-0.5 must be at least 0 and at most 1"),
        (ImageShards, {**FOLDERS, "flip": 2.0}, "flip=2.0 must be at least 0 and at most 1"),
        (ImageShards, {**FOLDERS, "image_size": -1}, "image_size=-1 must be at least 1"),
        (VideoShards, {**FOLDERS, "fps": -16.0}, "fps=-16.0 must be above 0"),
        (VideoFolders, {**FOLDERS, "fps": 0.0}, "fps=0.0 must be above 0"),
        (AssociativeRecall, {"power": -0.01}, "power=-0.01 must be at least 0"),
        (AssociativeRecall, {"power": 1e9}, "power=1000000000.0 must be at least 0 and at most 10"),
        (DiTShape, {"depth": 0}, "depth=0 must be at least 1"),
        (VisionShape, {"patch_size": 0}, "patch_size=0 must be at least 1"),
        (FrameShape, {"heads": -1}, "heads=-1 must be at least 1"),
        (DecoderShape, {"dim": 0}, "dim=0 must be at least 1"),
        (OptimizerConfig, {"betas": (0.9, 1.0)}, "betas=1.0 must be at least 0 and below 1"),
        (OptimizerConfig, {"lr": math.nan}, "lr=nan must be at least 0 and finite"),
        (PromptRequest, {"seed": -1}, "seed=-1 must be at least 0"),
        (PromptRequest, {"seed": 2**63}, "seed=9223372036854775808 must be at least 0 and at most 9223372036854775807"),
        (SampleRequest, {"seed": -1}, "seed=-1 must be at least 0"),
        (Digits, {"seed": 2**64}, "seed=18446744073709551616 must be at least 0 and at most"),
        (SampleGrid, {"seed": -2}, "seed=-2 must be at least 0"),
        (ImagePictures, {"prompts": ["a cat"], "seed": -1}, "seed=-1 must be at least 0"),
        (DigitFeatures, {"seed": -1}, "seed=-1 must be at least 0"),
        (DigitFeatures, {"epochs": 0}, "epochs=0 must be at least 1"),
        (RandomFeatures, {"seed": -1}, "seed=-1 must be at least 0"),
    ],
    ids=lambda value: f"{value.__name__}" if isinstance(value, type) else None,
)  # fmt: skip
def test_bounds_name_the_option_and_its_value(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)
