"""Vision models on their way into other programs: torch.compile, ONNX, int8; DeiT, VLT and DiT with mhla."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer, seed_everything
from mhla_tasks.classification import Digits, ImageClassifier, VisionShape
from mhla_tasks.diffusion.model import DiT
from torch import Tensor, nn

from lightning_mhla import AttentionConfig
from lightning_mhla.training.optim import OptimizerConfig
from lightning_mhla.training.options import TrainingOptions
from lightning_mhla.vision import VLT, StageConfig, VisionTransformer
from lightning_mhla.vision.stages import RAVLT

STAGES = StageConfig(
    dims=[16, 32], depths=[1, 1], heads=[2, 2], linear_stages=1, block_grids=[[3, 3]], patch_size=2, head_width=32
)


def made(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Build a model with random weights, and inputs; blocks do not divide its grid."""
    torch.manual_seed(0)
    blocks = AttentionConfig(block_grid=[3, 3], lepe=3, gate=True)
    model: nn.Module
    inputs: tuple[Tensor, ...] = (torch.randn(2, 3, 32, 32),)
    if name == "deit":
        model = VisionTransformer(32, 5, blocks, dim=32, depth=2, heads=2, patch_size=4)
    elif name == "vlt":
        model = VLT(32, 5, AttentionConfig(**{**RAVLT, "kind": "mhla"}), STAGES)
    else:
        model = DiT(16, 4, 5, blocks, dim=32, depth=2, heads=2)
        inputs = (torch.randn(2, 4, 16, 16), torch.tensor([3.0, 700.0]), torch.tensor([1, 5]))
    for parameter_name, parameter in model.named_parameters():
        if ".mixing." not in parameter_name:  # weights of a sum stay positive
            nn.init.normal_(parameter, std=0.1)
    return model.eval(), inputs


@pytest.mark.parametrize("name", ["deit", "vlt", "dit"])
def test_compiled_it_is_the_same(name: str) -> None:
    model, inputs = made(name)
    with torch.no_grad():
        expected = model(*inputs)
        found = torch.compile(model)(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["deit", "vlt", "dit"])
def test_exported_to_onnx_it_is_the_same(name: str, tmp_path: Path) -> None:
    import onnxruntime

    model, inputs = made(name)
    with torch.no_grad():
        expected = model(*inputs)
    torch.onnx.export(model, inputs, tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    given = {taken.name: value.numpy() for taken, value in zip(session.get_inputs(), inputs, strict=True)}
    other = {key: value + 1 if value.dtype.kind == "f" else value for key, value in given.items()}
    torch.testing.assert_close(torch.tensor(session.run(None, given)[0]), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():  # the inputs are inputs, and no constants
        shifted = model(*(torch.tensor(value) for value in other.values()))
    torch.testing.assert_close(torch.tensor(session.run(None, other)[0]), shifted, rtol=1e-4, atol=1e-4)


def int8(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize("name", ["deit", "vlt"])
def test_int8_keeps_the_top_class(name: str) -> None:
    seed_everything(0, verbose=False)
    network: dict[str, Any] = {"shape": VisionShape(dim=32, depth=2, heads=2, patch_size=1, stem="conv")}
    attention = AttentionConfig(block_grid=[2, 2], lepe=3)
    if name == "vlt":
        attention = AttentionConfig(**{**RAVLT, "kind": "mhla"})
        network = {"vlt": {"dims": [16, 32], "depths": [1, 1], "heads": [2, 2], "linear_stages": 1,
                           "block_grids": [[4, 4]], "patch_size": 1, "head_width": 32}}  # fmt: skip
    optimizer = OptimizerConfig(lr=4e-3, weight_decay=0.05, warmup_steps=10)
    module = ImageClassifier(attention, 10, 8, channels=1, training=TrainingOptions(optimizer), **network)
    data = Digits(batch_size=64, augment=False)
    trainer = Trainer(max_epochs=12, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, limit_val_batches=0)  # fmt: skip
    trainer.fit(module, data)
    network = module.network.eval()
    small = int8(network)
    quantized = [module for module in small.modules() if "quantized.dynamic" in type(module).__module__]
    assert len(quantized) >= 4
    images = torch.cat([batch["image"] for batch in data.val_dataloader()])
    labels = torch.cat([batch["label"] for batch in data.val_dataloader()])
    with torch.no_grad():
        before, after = network(images).argmax(-1), small(images).argmax(-1)
    assert (before == labels).float().mean() > 0.9, "it has learned, so that its top class says something"
    assert (before == after).float().mean() >= 0.95


def test_int8_denoises() -> None:
    model, inputs = made("dit")
    with torch.no_grad():
        expected, found = model(*inputs), int8(model)(*inputs)
    assert (found - expected).norm() < 0.05 * expected.norm()
