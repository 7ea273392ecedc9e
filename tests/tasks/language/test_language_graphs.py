"""Graphs of the language model by tokens: exported with open sizes, in ONNX, and compiled as one."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from small import small_model
from torch import Tensor, nn
from torch.export import Dim


class Logits(nn.Module):
    """Module that returns only the logits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = small_model(kind, context=64).network

    def forward(self, ids: Tensor, mask: Tensor | None) -> Any:
        return self.model(ids, attention_mask=mask).logits


def batch(rows: int, columns: int, padded: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return a batch whose first row is padded left and whose last row is padded right."""
    ids = torch.randint(3, 300, (rows, columns), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    mask[0, :5], mask[-1, -4:] = 0, 0
    return ids, mask if padded else None


def assert_same(got: Tensor, want: Tensor, mask: Tensor | None, tolerance: float = 1e-4) -> None:
    """Compare the logits of non-padding tokens."""
    real = torch.ones(want.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(got[real], want[real], rtol=tolerance, atol=tolerance)


def open_sizes(padded: bool) -> Any:
    sizes = {0: Dim("rows", min=1, max=64), 1: Dim("columns", min=16, max=64)}  # a window needs two blocks or more
    return sizes, sizes if padded else None


@pytest.mark.parametrize(
    ("kind", "padded"),
    [
        *product(["dense", "exponential", "linear", "softmax", "window"], [True]),
        ("exponential", False),
        ("window", False),
    ],
)
def test_an_exported_graph_takes_other_batches_and_lengths(kind: str, padded: bool) -> None:
    model = Logits(kind)
    graph = torch.export.export(model, batch(2, 23, padded), dynamic_shapes=open_sizes(padded), strict=False)
    for other in (batch(2, 23, padded), batch(3, 17, padded), batch(5, 40, padded)):
        assert_same(graph.module()(*other), model(*other), other[1])


@pytest.mark.parametrize("kind", ["dense", "gla", "mamba2"])
def test_an_exported_graph_of_fixed_sizes_traces_strictly(kind: str) -> None:
    model, inputs = Logits(kind), batch(2, 23)
    graph = torch.export.export(model, inputs, strict=True)
    assert_same(graph.module()(*inputs), model(*inputs), inputs[1])


@pytest.mark.parametrize("kind", ["dense", "exponential", "softmax"])
def test_onnx_runs_other_batches_and_lengths(kind: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = Logits(kind)
    program = torch.onnx.export(model, batch(2, 23), dynamo=True, dynamic_shapes=open_sizes(True), verbose=False)
    assert program is not None
    program.save(str(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    names = [each.name for each in session.get_inputs()]
    for inputs in (batch(2, 23), batch(3, 17)):
        arrays = [tensor.numpy() for tensor in inputs if tensor is not None]
        got = torch.tensor(session.run(None, dict(zip(names, arrays, strict=True)))[0])
        assert_same(got, model(*inputs), inputs[1], 1e-3)


@pytest.mark.parametrize("kind", ["exponential", "softmax", "mamba2"])
def test_training_compiles_as_one_graph(kind: str) -> None:
    model = small_model(kind, context=64).network.train()
    ids, mask = batch(2, 23)
    assert mask is not None
    options = {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    torch.compiler.reset()
    torch.compile(model, fullgraph=True, backend="aot_eager")(ids, **options).loss.backward()
    compiled = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model(ids, **options).loss.backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(compiled[name], p.grad, msg=name)


def test_unknown_tokens_and_empty_rows_are_errors_outside_of_graphs() -> None:
    model = small_model().network
    with pytest.raises(ValueError, match="token 320 is not in the vocabulary of 320"):
        model(torch.tensor([[3, 320]]))
    with pytest.raises(ValueError, match="token -1 is not in the vocabulary"):
        model(torch.tensor([[3, -1]]), use_cache=False)
    with pytest.raises(ValueError, match="the prompt of row 1 is empty"):
        model(torch.tensor([[3], [4]]), attention_mask=torch.tensor([[1], [0]]), use_cache=False)
