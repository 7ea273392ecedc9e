"""Results by class in the report of a classifier: the same counts as the metrics, and pictures of the worst mistakes."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger
from mhla_tasks.classification import Digits, ImageClassifier, ImageNetShards, VisionShape
from mhla_tasks.classification.results import MISTAKES, SIDE, encoded_picture
from mhla_tasks.commandline import registry
from PIL import Image
from torch import nn

from lightning_mhla import AttentionConfig
from lightning_mhla.callbacks import RunReport
from lightning_mhla.training.optim import OptimizerConfig
from lightning_mhla.training.options import TrainingOptions
from lightning_mhla.vision.preprocessing import Preprocessing


def picture(text: str) -> Image.Image:
    """Decode a PNG file in base64."""
    return Image.open(io.BytesIO(base64.b64decode(text)))


def test_counts_and_mistakes_are_those_of_the_last_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ImageClassifier(
        AttentionConfig(block_grid=[2, 2]), num_classes=10, image_size=8, channels=1,
        shape=VisionShape(patch_size=2, dim=32, depth=1, heads=2), class_names=[f"digit {index}" for index in range(10)],
        training=TrainingOptions(optimizer=OptimizerConfig(lr=1e-3)),
    )  # fmt: skip
    nn.init.normal_(model.network.head.weight, std=3.0)  # untrained, but with all kinds of predictions
    data = Digits(batch_size=50)
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, limit_train_batches=3, num_sanity_val_steps=1, logger=CSVLogger(tmp_path),
        enable_progress_bar=False, enable_model_summary=False, callbacks=[RunReport()],
    )  # fmt: skip
    trainer.fit(model, data)
    folder = Path(str(trainer.log_dir))
    content = json.loads((folder / "classes.json").read_text())
    images, labels, probabilities = predictions(model, data)
    confusion = np.zeros((10, 10), int)
    np.add.at(confusion, (labels, probabilities.argmax(-1)), 1)
    counted = np.zeros((10, 10), int)
    for label, predicted, count in content["confusion"]:
        counted[label, predicted] = count
    assert (counted == confusion).all()
    assert content["step"] == trainer.global_step == 6
    assert content["names"][3] == "digit 3"
    true = probabilities[np.arange(len(labels)), labels]
    wrong = np.flatnonzero(probabilities.argmax(-1) != labels)
    worst = wrong[np.argsort(true[wrong], kind="stable")][:MISTAKES]
    assert [mistake["label_probability"] for mistake in content["mistakes"]] == pytest.approx(true[worst], abs=1e-4)
    first = content["mistakes"][0]
    assert (first["label"], first["predicted"]) == (labels[worst[0]], probabilities[worst[0]].argmax())
    shown = np.asarray(picture(first["picture"]))
    assert np.abs(shown / 255 - images[worst[0], 0]).max() <= 1 / 255, "the image itself"
    accuracy = json.loads((folder / "run.json").read_text())["metrics"]["val/accuracy"][-1][1]
    assert accuracy == pytest.approx(confusion.trace() / len(labels), abs=1e-6)
    assert (confusion.sum(0) > 0).sum() > 1, "the predictions are not all of one class"
    page = (folder / "report.html").read_text()
    assert f"{confusion.trace()} of 360 validation samples right at step 6." in page
    assert page.count('src="data:image/png;base64,') >= MISTAKES


@pytest.mark.parametrize("shards", [False, True], ids=["class folders", "shards"])
def test_mistakes_name_the_file(shards: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    for label in ("ape", "bee"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(4):
            pixels = np.random.default_rng(number).integers(0, 255, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"Foto {label} #{number}.PNG")
    where = str(tmp_path / "photos")
    if shards:
        registry.run("prepare images", [where, str(tmp_path / "shards"), "--per_shard", "3"])
        where = str(tmp_path / "shards")
    model = ImageClassifier(
        AttentionConfig(block_grid=[2, 2]), num_classes=2, image_size=8,
        shape=VisionShape(patch_size=2, dim=32, depth=1, heads=2),
    )  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=CSVLogger(tmp_path), enable_progress_bar=False,
        enable_model_summary=False, callbacks=[RunReport()],
    )  # fmt: skip
    trainer.fit(model, ImageNetShards(where, where, batch_size=4, image_size=8))
    mistakes = json.loads((Path(str(trainer.log_dir)) / "classes.json").read_text())["mistakes"]
    assert mistakes
    for mistake in mistakes:
        label = ("ape", "bee")[mistake["label"]]
        assert re.fullmatch(r"train-\d+\.tar: sample .*" if shards else f"Foto {label} #[0-3].PNG", mistake["name"])


def predictions(model: ImageClassifier, data: Digits) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute images, labels and float64 probabilities of all validation samples, in one batch."""
    source = data.source("validate")
    samples = [source[index] for index in range(len(source))]
    images = torch.stack([sample["image"] for sample in samples])
    with torch.no_grad():
        scores = model.eval()(images).double()
    labels = np.array([int(sample["label"]) for sample in samples])
    return images.numpy(), labels, scores.softmax(-1).numpy()


def test_normalized_images_are_shown_with_their_colors() -> None:
    class Data:
        preprocessing = Preprocessing(64)

    colors = torch.tensor([0.2, 0.5, 0.8])
    mean, std = (torch.tensor(values) for values in (Data.preprocessing.mean, Data.preprocessing.std))
    image = ((colors - mean) / std).view(3, 1, 1).expand(3, 400, 200)
    shown = picture(encoded_picture(image, Data()))
    assert shown.size == (SIDE // 2, SIDE)
    assert shown.getpixel((5, 5)) == (51, 128, 204)
    gray = picture(encoded_picture(torch.tensor([[[-1.0, 3.0]]]), None))
    assert [gray.getpixel((x, 0)) for x in (0, 1)] == [0, 255], "without preprocessing, values are stretched"
    assert picture(encoded_picture(torch.rand(5, 4, 4), None)).mode == "L"


def test_predictions_of_nan_are_named_and_the_file_is_valid(tmp_path: Path) -> None:
    model = ImageClassifier(
        AttentionConfig(block_grid=[2, 2]), num_classes=10, image_size=8, channels=1,
        shape=VisionShape(patch_size=4, dim=8, depth=1, heads=1),
    )  # fmt: skip

    def overflow(network: nn.Module, inputs: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores if network.training else scores.index_fill(0, torch.tensor([1]), torch.nan)

    model.network.register_forward_hook(overflow)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, limit_train_batches=1, logger=CSVLogger(tmp_path), callbacks=[RunReport()],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, Digits())
    folder = Path(str(trainer.log_dir))
    text = (folder / "classes.json").read_text()
    assert "NaN" not in text
    assert None in {mistake["probability"] for mistake in json.loads(text)["mistakes"]}
    losses = json.loads((folder / "run.json").read_text())["metrics"]["val/loss"]
    assert [value for _, value in losses] == [None], "one batch of several is not NaN, but the mean is"
    assert re.search(r"taken for <b>\w+</b><br>\w+: NaN<br>\w+: NaN", (folder / "report.html").read_text())


def test_without_a_report_no_results_are_written(tmp_path: Path) -> None:
    model = ImageClassifier(
        AttentionConfig(block_grid=[2, 2]), num_classes=10, image_size=8, channels=1,
        shape=VisionShape(patch_size=4, dim=8, depth=1, heads=1),
    )  # fmt: skip
    options = {
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_train_batches": 1,
    }
    Trainer(max_epochs=1, logger=CSVLogger(tmp_path), **options).fit(model, Digits())
    assert not list(tmp_path.rglob("classes.json"))
