"""Cross-attention under torch.func, torch.compile, torch.export and ONNX, and as a registered operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from implementations import DEVICE, TRITON
from mhla_kernels import ExponentialMixing, mhla_attention
from mhla_kernels.blocks import TokenLayout
from mhla_kernels.cross.layout import CrossLayout
from mhla_kernels.triton_backend.cross import ops  # noqa: F401  registers the operator
from mhla_kernels.triton_backend.cross.call import CrossArguments
from mhla_kernels.triton_backend.cross.tables import cross_tables
from torch import Tensor, func, nn

FORMS = ("chunked", "parallel", "reference")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"query_mask": torch.arange(7)[None] < 6, "key_mask": torch.arange(5)[None] > 0},
    "packed": {"cu_seqlens": torch.tensor([0, 3, 3, 7]), "key_cu_seqlens": torch.tensor([0, 2, 5, 5])},
}


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) + 0.1


def function(form: str, name: str) -> Any:
    """Return cross-attention of 7 queries to 5 keys, with exponential mixing, as a function of all its tensors."""

    def call(q: Tensor, k: Tensor, v: Tensor, amplitude: Tensor, decay: Tensor) -> Tensor:
        mixing = ExponentialMixing(amplitude, decay)
        return mhla_attention(q, k, v, mixing, block_size=2, key_block_size=3, form=form, **OPTIONS[name])

    return call


def arguments() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return rand(1, 7, 2, 3), rand(1, 5, 2, 3), rand(1, 5, 2, 2), rand(2, 3), rand(2, 3)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_derivatives(form: str, name: str) -> None:
    leaves = [x.requires_grad_() for x in arguments()]
    assert torch.autograd.gradcheck(function(form, name), leaves)
    assert torch.autograd.gradgradcheck(function(form, name), leaves, atol=1e-4, fast_mode=True)  # random directions


def test_derivatives_of_dense_coefficients() -> None:
    q, k, v = arguments()[:3]
    leaves = [x.requires_grad_() for x in (q, k, v, rand(4, 2))]

    def call(*x: Tensor) -> Tensor:
        return mhla_attention(*x, block_size=2, key_block_size=3, normalize=False, form="chunked")

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_torch_func(form: str, name: str) -> None:
    call, given = function(form, name), arguments()
    batch = tuple(torch.stack([x, 1.1 * x]) for x in given)
    rows = torch.stack([call(*(x[i] for x in batch)) for i in range(2)])
    torch.testing.assert_close(func.vmap(call)(*batch), rows)
    mixing_alone = func.vmap(call, in_dims=(None, None, None, 0, 0))(*given[:3], *batch[3:])
    torch.testing.assert_close(
        mixing_alone, torch.stack([call(*given[:3], *(x[i] for x in batch[3:])) for i in range(2)])
    )
    every = tuple(range(5))
    jacobians = func.jacrev(call, argnums=every)(*given)
    for a, b in zip(func.jacfwd(call, argnums=every)(*given), jacobians, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("form", "kind"), [("chunked", "dense"), ("auto", "exponential"), ("parallel", "exponential")])
def test_compiled_lengths_need_no_new_graph_each(form: Any, kind: str) -> None:
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, v: Tensor, *mixing: Tensor) -> Tensor:
        coefficients = mixing[0] if kind == "dense" else ExponentialMixing(*mixing)
        return mhla_attention(q, k, v, coefficients, block_size=8, key_block_size=3, form=form)

    compiled = torch.compile(
        call, fullgraph=True, dynamic=True, backend=(counter := torch._dynamo.testing.CompileCounter())
    )
    for queries, keys in ((30, 11), (25, 12), (32, 10)) if kind == "dense" else ((30, 11), (70, 12), (9, 40)):
        q, k, v = torch.rand(1, queries, 2, 3), torch.rand(1, keys, 2, 3), torch.randn(1, keys, 2, 3)
        mixing = [torch.rand(4, 4)] if kind == "dense" else [torch.rand(3), torch.rand(3)]
        torch.testing.assert_close(compiled(q, k, v, *mixing), call(q, k, v, *mixing), rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("form", ["chunked", "parallel"])
def test_a_graph_trains(form: Any) -> None:
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in arguments()]
    graph = torch.compile(function(form, "masked"), fullgraph=True, backend="aot_eager")
    got, want = graph(*leaves), function(form, "masked")(*leaves)
    torch.testing.assert_close(got, want)
    gradients = (torch.autograd.grad(x.square().sum(), leaves) for x in (got, want))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


class Layer(nn.Module):
    """Cross-attention as a model to be exported."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mixing: Any, key_mask: Tensor) -> Tensor:
        return mhla_attention(q, k, v, mixing, block_size=8, key_block_size=4, key_mask=key_mask)


def inputs(batch: int, queries: int, keys: int) -> tuple[Tensor, ...]:
    return torch.rand(batch, queries, 2, 4), torch.rand(batch, keys, 2, 4), torch.randn(batch, keys, 2, 4)


def test_both_lengths_stay_open_in_an_exported_graph() -> None:
    queries, keys = torch.export.Dim("queries", min=2, max=512), torch.export.Dim("keys", min=2, max=512)
    mixing = ExponentialMixing(torch.rand(3), torch.rand(3))
    shapes = ({1: queries}, {1: keys}, {1: keys}, [None, None], {1: keys})
    example = (*inputs(1, 30, 19), mixing, torch.rand(1, 19) > 0.2)
    exported = torch.export.export(Layer(), example, dynamic_shapes=shapes).module()
    for n, m in ((9, 40), (33, 33), (64, 3)):
        call = (*inputs(1, n, m), mixing, torch.rand(1, m) > 0.2)
        torch.testing.assert_close(exported(*call), Layer()(*call), rtol=1e-4, atol=1e-5)


def test_onnx_with_an_open_batch(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    batch = torch.export.Dim("batch", min=1, max=64)
    mixing = torch.rand(3, 5)
    example = (*inputs(2, 20, 19), mixing, torch.rand(2, 19) > 0.2)
    shapes = (*[{0: batch}] * 3, None, {0: batch})
    program = torch.onnx.export(Layer(), example, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    program.save(str(tmp_path / "layer.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "layer.onnx"))
    call = (*inputs(3, 20, 19), mixing, torch.rand(3, 19) > 0.2)
    names = (x.name for x in session.get_inputs())
    (got,) = session.run(None, {name: x.numpy() for name, x in zip(names, call, strict=True)})
    torch.testing.assert_close(torch.from_numpy(got), Layer()(*call), rtol=1e-4, atol=1e-5)


def operator_inputs() -> list[Tensor]:
    shapes = (1, 20, 2, 8), (1, 13, 2, 8), (1, 13, 2, 8), (2, 3, 2)
    return [torch.rand(shape, device=DEVICE).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("form", ["chunked", "parallel"])
def test_opcheck(form: str) -> None:
    q, k, v, matrix = operator_inputs()
    layout = CrossLayout(TokenLayout(20, 8), TokenLayout(13, 8))
    mask = (torch.arange(13, device=DEVICE) < 9)[None]
    call = CrossArguments(
        q, k, v, [matrix], *cross_tables(layout, form, True, q.device), None, mask, None, None, 8, 8, None, None, True,
        1e-6, form, "",
    )  # fmt: skip
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.mhla.cross_attention, tuple(call), test_utils=utilities)


@pytest.mark.parametrize("implementation", TRITON)
def test_kernels_compile_as_one_graph(implementation: str) -> None:
    torch._dynamo.reset()
    backend, form = implementation.split()
    q, k, v, matrix = operator_inputs()

    def call(*x: Tensor) -> Tensor:
        return mhla_attention(*x, block_size=8, key_block_size=7, form=form, backend=backend)  # type: ignore[arg-type]

    graph = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(graph(q, k, v, matrix), call(q, k, v, matrix))


@pytest.mark.parametrize("implementation", TRITON)
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,)], ids=str)
def test_only_gradients_that_are_asked_for(implementation: str, wanted: tuple[int, ...]) -> None:
    """A gradient that is computed alone is bit-identical to the one computed with all others."""
    backend, form = implementation.split()
    for normalize in (True, False):
        options: dict[str, Any] = {"block_size": 8, "form": form, "backend": backend, "normalize": normalize}
        leaves = operator_inputs()
        out = mhla_attention(*leaves, **options)
        cotangent = torch.rand_like(out)
        every = torch.autograd.grad(out, leaves, cotangent)
        leaves = [x.detach().requires_grad_(number in wanted) for number, x in enumerate(leaves)]
        out = mhla_attention(*leaves, **options)
        for got, number in zip(torch.autograd.grad(out, [leaves[n] for n in wanted], cotangent), wanted, strict=True):
            assert torch.equal(got, every[number])
