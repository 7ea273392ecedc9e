"""timm's vision transformers in our training: as they are, linearized, exported, and loaded by timm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from grouped import grouped
from lightning import LightningDataModule, Trainer
from mhla_tasks.classification import TimmClassifier
from mhla_tasks.classification.export import loading, write
from PIL import Image
from torch.utils.data import DataLoader

from lightning_mhla import AttentionConfig, load_swapped
from lightning_mhla.swap import layer_costs, swapped_layers
from lightning_mhla.swap.adapters import LoraOptions
from lightning_mhla.training.linearize import TransferOptions
from lightning_mhla.training.loading import load_module
from lightning_mhla.training.optim import OptimizerConfig
from lightning_mhla.vision.preprocessing import Preprocessing

SIZES: dict[str, Any] = {
    "model": "vit_tiny_patch16_224",
    "model_args": {
        "patch_size": 4,
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 2,
        "global_pool": "avg",
        "class_token": False,
    },
    "num_classes": 4,
    "image_size": 24,
    "channels": 1,
}
LEARNED = AttentionConfig(block_grid=[3, 3], feature_map="learned")


class Squares(LightningDataModule):
    """Data module of noise images with a bright square in one of four corners."""

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        images, labels = 0.3 * torch.randn(400, 1, 24, 24, generator=generator), torch.arange(400) % 4
        for image, label in zip(images, labels.tolist(), strict=True):
            top, left = 14 * (label // 2), 14 * (label % 2)
            image[:, top : top + 8, left : left + 8] += 2
        return DataLoader([{"image": i, "label": n} for i, n in zip(images, labels, strict=True)], batch_size=20)


def classifier(**options: Any) -> TimmClassifier:
    torch.manual_seed(0)
    return TimmClassifier(**grouped(**{**SIZES, "optimizer": OptimizerConfig(lr=0.005), **options}))


def fit(model: Any, steps: int, folder: Path) -> Path:
    """Train a model, and return the path of a checkpoint."""
    trainer = Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, Squares())
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(classifier(), 60, tmp_path_factory.mktemp("trained"))


def images() -> Any:
    return next(iter(Squares().train_dataloader()))


def accuracy(model: Any) -> float:
    batch = images()
    with torch.no_grad():
        return float((model.eval()(batch["image"]).argmax(-1) == batch["label"]).float().mean())


def test_trained_linearised_exported_and_loaded(trained: Path, tmp_path: Path) -> None:
    original = load_module(TimmClassifier, trained)
    assert accuracy(original) > 0.9
    write(original, tmp_path / "plain")
    plain = timm.create_model(f"local-dir:{tmp_path / 'plain'}", pretrained=True).eval()
    torch.testing.assert_close(plain(images()["image"]), original(images()["image"]))
    options = {"distillation": TransferOptions(layer_steps=20), "optimizer": OptimizerConfig(lr=0.003)}
    model = classifier(attention=LEARNED, pretrained=str(trained), **options)
    path = fit(model, 40, tmp_path)
    assert accuracy(model) > 0.9
    assert len(swapped_layers(model.network)) == 2
    loaded = load_module(TimmClassifier, path)
    write(loaded, tmp_path / "exported")
    assert "load_swapped" in loading(loaded)
    again = load_swapped(tmp_path / "exported")
    torch.testing.assert_close(again(images()["image"]), model(images()["image"]))


@pytest.mark.parametrize("train", ["new", "lora"])
def test_only_what_is_asked_for_is_trained(train: Any, trained: Path, tmp_path: Path) -> None:
    options = {"attention": LEARNED, "train": train, "lora": LoraOptions(2, 2), "pretrained": str(trained)}
    model = classifier(**options)
    path = fit(model, 3, tmp_path)
    original = torch.load(trained, weights_only=True)["state_dict"]
    saved = {n.replace(".base_layer.", "."): t for n, t in torch.load(path, weights_only=True)["state_dict"].items()}
    assert all(torch.equal(tensor, saved[name]) for name, tensor in original.items() if name.startswith("network."))
    assert any(".lora_" in name for name in saved) == (train == "lora")
    batch = images()["image"]
    expected = model.eval()(batch)
    write(load_module(TimmClassifier, path), tmp_path / "exported")
    torch.testing.assert_close(load_swapped(tmp_path / "exported")(batch), expected, rtol=1e-4, atol=1e-5)


def test_a_teachers_predictions_are_matched(trained: Path, tmp_path: Path) -> None:
    distillation = TransferOptions(teacher=str(trained), loss_weight=0.0)
    model = classifier(attention=LEARNED, distillation=distillation)
    losses, calls = [], []
    model.network.register_forward_hook(lambda *_: calls.append(1))
    model.log_loss = lambda loss, size: losses.append(float(loss.detach())) or loss  # type: ignore[method-assign]
    path = fit(model, 30, tmp_path)
    assert losses[-1] < 0.5 * losses[0]
    assert len(calls) == 30
    assert not any("teacher" in name for name in torch.load(path, weights_only=True)["state_dict"])


def test_layers_are_measured_one_by_one(trained: Path) -> None:
    model = classifier(attention=LEARNED, pretrained=str(trained))
    model.configure_model()
    batch = images()

    def loss() -> float:
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(model.eval()(batch["image"]), batch["label"]))

    costs = layer_costs(model.network, loss)
    assert costs.original == float(
        torch.nn.functional.cross_entropy(load_module(TimmClassifier, trained)(batch["image"]), batch["label"])
    )
    assert set(costs.alone) == {0, 1}
    assert costs.replaced == loss()
    assert costs.worst(1) == [max(costs.alone, key=lambda index: costs.alone[index])]


def test_what_does_not_fit_is_said_in_one_line(trained: Path) -> None:
    for options in ({"train": "lora"}, {"lora": LoraOptions(2, 2)}):
        with pytest.raises(ValueError, match="are for a model whose attention is replaced: give attention"):
            classifier(**options)
    with pytest.raises(ValueError, match="timm builds no model 'vit_nowhere' with"):
        classifier(model="vit_nowhere")
    with pytest.raises(ValueError, match="timm builds no model 'vit_tiny_patch16_224' with"):
        classifier(model_args={"widths": 3})
    with pytest.raises(
        ValueError, match=r"timm builds no model 'vit_tiny_patch16_224' with .*'norm_layer': 'none such'"
    ):
        classifier(model_args={"norm_layer": "none such"})
    windows = {"embed_dim": 16, "depths": [1, 1], "num_heads": [1, 1]}
    with pytest.raises(ValueError, match="model=swin_tiny_patch4_window7_224 has no list of blocks"):
        classifier(model="swin_tiny_patch4_window7_224", image_size=56, model_args=windows).layers()
    other = classifier(pretrained=str(trained), model_args={**SIZES["model_args"], "embed_dim": 64})
    with pytest.raises(ValueError, match="does not match the model or its attention: pos_embed is"):
        other.configure_model()
    with pytest.raises(FileNotFoundError, match="nowhere is no checkpoint, no run and no folder with safetensors"):
        classifier(pretrained="nowhere").configure_model()


def test_pixels_beyond_the_last_patch_are_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    fit(classifier(), 1, tmp_path)
    assert "patches" not in caplog.text
    fit(classifier(model_args={**SIZES["model_args"], "patch_size": 10}), 1, tmp_path)
    assert (
        "images of 24 x 24 pixels are not divided into patches of 10 x 10: the model does not read the last 4"
        in caplog.text
    )


@pytest.mark.parametrize(
    "preprocessing",
    [
        Preprocessing(24, channels=1, crop_share=None, mean=(0.1,), std=(0.3,)),
        Preprocessing(24, crop_share=0.8, std=(0.2, 0.3, 0.4)),
    ],
    ids=["stretched", "cropped"],
)
def test_timm_transforms_images_as_the_export_was_trained(preprocessing: Preprocessing, tmp_path: Path) -> None:
    model = classifier(channels=preprocessing.channels)
    model.preprocessing = preprocessing
    write(model, tmp_path)
    exported = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_data_config(model=exported))
    pixels = np.random.default_rng(0).integers(0, 256, (30, 50, 3), np.uint8)
    image = Image.fromarray(pixels).convert(preprocessing.mode)
    torch.testing.assert_close(transform(image), preprocessing(image))


def test_adapters_of_eva_take_part(trained: Path) -> None:
    sizes = {
        "model": "eva02_tiny_patch14_224",
        "model_args": {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2},
    }
    model = classifier(**sizes, attention=LEARNED, train="lora", lora=LoraOptions(2, 2))
    model.network.train()
    model(images()["image"]).square().mean().backward()
    assert all(p.grad is not None for p in model.network.parameters() if p.requires_grad)
