"""Block-causal models exported by torch.export and to ONNX, at lengths other than that of the export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from lightning_mhla import AttentionConfig, Backbone

OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {"mixing_per_head": True},
    "exponential": {"mixing": "exponential", "normalize": False, "rotary": True},
    "linear": {"kind": "linear"},
    "softmax": {"kind": "softmax", "rotary": True},
}


def build(name: str) -> Backbone:
    """Build two layers whose blocks have 5 tokens, with mixing coefficients that differ from their initial values."""
    torch.manual_seed(0)
    config = AttentionConfig(block_size=5, **OPTIONS[name])
    model = Backbone(16, 2, 2, (40,), config, causal="block").eval()
    for parameter_name, parameter in model.named_parameters():
        if "mixing.weight" in parameter_name:
            nn.init.uniform_(parameter, 0.1, 1.0)
    return model


def tokens(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, 16, generator=torch.Generator().manual_seed(columns))


SHAPES = {0: Dim("rows", min=1, max=64), 1: Dim("columns", min=6, max=40)}
OTHERS = ((2, 18), (3, 30), (1, 33))
"""Rows and tokens: the lengths of the first and the last one leave a last block of 3 tokens."""


@pytest.mark.parametrize("name", OPTIONS)
def test_an_exported_model_takes_other_lengths(name: str) -> None:
    model = build(name)
    graph = torch.export.export(model, (tokens(2, 23),), dynamic_shapes=(SHAPES,), strict=False).module()
    with torch.no_grad():
        for rows, columns in OTHERS:
            x = tokens(rows, columns)
            torch.testing.assert_close(graph(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_onnx_takes_other_lengths(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, file = build(name), str(tmp_path / "model.onnx")
    torch.onnx.export(model, (tokens(2, 23),), file, dynamo=True, dynamic_shapes=(SHAPES,), verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (entry,) = session.get_inputs()
    for rows, columns in OTHERS:
        x = tokens(rows, columns)
        (out,) = session.run(None, {entry.name: x.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(out), model(x), rtol=1e-4, atol=1e-5)
        changed = x.clone()
        changed[:, 12:] += 1
        (other,) = session.run(None, {entry.name: changed.numpy()})
        assert (other[:, :10] == out[:, :10]).all(), "later blocks change earlier outputs"
