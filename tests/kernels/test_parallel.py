"""The parallel form in parts: parts as small as one head of one row, against the definition in float64."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from mhla_kernels import mhla_attention
from mhla_kernels.forms import parallel as module
from mhla_kernels.forms.parallel_parts import ParallelParts
from oracle import relative_error
from torch import Tensor
from torch.autograd import forward_ad


@pytest.fixture(params=[1, 2000, 5000], ids=["one head", "some heads", "some rows"], autouse=True)
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a part hold one head of 12 x 12 float32 numbers (576 bytes), three of four heads, or two rows of them."""
    monkeypatch.setattr("mhla_kernels.forms.parts.PART", request.param)


def inputs(rows: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    torch.manual_seed(rows)
    q, v = torch.rand(rows, 12, 4, 3, dtype=dtype), torch.randn(rows, 12, 2, 5, dtype=dtype)
    return q.requires_grad_(), torch.rand(rows, 12, 2, 3, dtype=dtype).requires_grad_(), v.requires_grad_()


CASES: dict[str, dict[str, Any]] = {
    "bidirectional": {"block_offsets": (0, 1, 5, 12)},
    "causal": {"block_size": 4, "causal": True},
    "block-causal": {"block_offsets": (0, 1, 5, 12), "causal": "block"},
    "not normalized": {"block_size": 4, "causal": True, "normalize": False, "scale": 0.3},
    "packed": {"block_size": 2, "cu_seqlens": (0, 6, 12)},
    "packed and causal": {"block_size": 4, "cu_seqlens": (0, 5, 12), "causal": True},
    "hidden keys": {"block_size": 4, "key_mask": True},
    "feature map": {"block_offsets": (0, 1, 5, 12), "feature_map": "relu"},
    "feature map, causal, not normalized": {"block_size": 4, "causal": True, "normalize": False, "feature_map": "relu"},
    "feature map, packed": {"block_size": 4, "cu_seqlens": (0, 5, 12), "causal": True, "feature_map": "relu"},
    "feature map, hidden keys": {"block_size": 4, "key_mask": True, "feature_map": "relu"},
}


@pytest.mark.parametrize("heads", [None, 4], ids=["shared", "by head"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_definition(case: str, heads: int | None) -> None:
    options = dict(CASES[case])
    q, k, v = inputs(1 if "cu_seqlens" in options else 5)
    if "feature_map" in options:  # negative numbers too
        q, k = q.detach() - 0.5, k.detach() - 0.5
    mixing = torch.rand(*([] if heads is None else [heads]), 3, 3, dtype=torch.float64).requires_grad_()
    if "key_mask" in options:
        options["key_mask"] = torch.rand(5, 12) > 0.3
    results = []
    for dtype, form in ((torch.float64, "reference"), (torch.float32, "parallel")):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, mixing)]
        out = mhla_attention(*leaves, form=form, **options)  # type: ignore[arg-type]
        results.append([out, *torch.autograd.grad((out * torch.arange(5.0)).sum(), leaves)])
    for want, got in zip(*results, strict=True):
        assert relative_error("", got.double(), want) < 2e-5
    with torch.no_grad():
        again = mhla_attention(*(x.float() for x in (q, k, v, mixing)), form="parallel", **options)
    assert torch.equal(again, results[1][0]), "without gradients, the same numbers"


@pytest.mark.parametrize("form", ["parallel", "chunked"])
def test_the_feature_map_of_nan_and_of_zero_is_the_same_in_every_form(form: Literal["parallel", "chunked"]) -> None:
    q, k, v = (x.detach().float() - 0.5 for x in inputs(5))
    q[0, 2, 1, 0], q[1, 3, 2], k[2, 1, 0] = torch.nan, 0, -0.0
    leaves = [x.requires_grad_() for x in (q, k, v, torch.rand(3, 3))]
    out = mhla_attention(*leaves, block_size=4, form=form, feature_map="relu")  # type: ignore[arg-type]
    assert out.isnan().nonzero()[:, :3].unique(dim=0).tolist() == [[0, 2, 1]]
    of_q, of_k, _, _ = torch.autograd.grad(out[1:].sum() + out[0, 2, 1].sum(), leaves)
    assert of_q[0, 2, 1, 0].isnan(), "as the gradient of torch.relu"
    assert not of_q[1, 3, 2].any()
    assert not of_k[2, 1, 0].any()
    assert (of_q[1:][q[1:] < 0] == 0).all()
    assert (of_q[1:][q[1:] > 0] != 0).any()


def test_only_the_gradients_that_are_needed() -> None:
    tensors = [x.detach().float() - 0.5 for x in (*inputs(5), torch.rand(3, 3))]

    def gradients(needed: set[int]) -> dict[int, Tensor]:
        leaves = [x.clone().requires_grad_(index in needed) for index, x in enumerate(tensors)]
        out = mhla_attention(*leaves, block_size=4, form="parallel", feature_map="relu")  # type: ignore[arg-type]
        chosen = sorted(needed)
        return dict(zip(chosen, torch.autograd.grad(out.sum(), [leaves[i] for i in chosen]), strict=True))

    expected = gradients({0, 1, 2, 3})
    for needed in ({0}, {1}, {2}, {3}, {0, 3}, {1, 2}):
        for index, gradient in gradients(needed).items():
            assert torch.equal(gradient, expected[index])


def test_the_gradient_may_have_a_tangent() -> None:
    leaves = [x.detach().requires_grad_() for x in (*inputs(5), torch.rand(3, 3, dtype=torch.float64))]
    out = call(*leaves)
    gradient, tangent = torch.randn_like(out), torch.randn_like(out)
    want = torch.autograd.grad(out, leaves, tangent, retain_graph=True)
    with forward_ad.dual_level():
        got = torch.autograd.grad(out, leaves, forward_ad.make_dual(gradient, tangent))
        for dual, expected in zip(got, want, strict=True):
            torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, expected)


@pytest.mark.parametrize("normalize", [True, False])
def test_outputs_may_be_changed_in_place(normalize: bool) -> None:
    leaves = [x.detach().float().requires_grad_() for x in (*inputs(5), torch.rand(3, 3))]
    want, got = (
        mhla_attention(*leaves, block_size=4, form="parallel", feature_map="relu", normalize=normalize)  # type: ignore[arg-type]
        for _ in range(2)
    )
    expected = torch.autograd.grad((want * 2 + 1).sum(), leaves)
    got.mul_(2).add_(1)
    for gradient, correct in zip(torch.autograd.grad(got.sum(), leaves), expected, strict=True):
        assert torch.equal(gradient, correct)


class Outside(ParallelParts):
    def in_parts(self, *_: Any) -> Any:
        pytest.fail("in parts")


def call(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor) -> Tensor:
    return mhla_attention(q, k, v, mixing, block_size=4, form="parallel", causal=True)


@pytest.mark.parametrize("frozen", [False, True])
def test_first_and_second_derivatives(frozen: bool) -> None:
    mixing = torch.rand(3, 3, dtype=torch.float64).requires_grad_(not frozen)
    leaves = [x[:2, :9, :, :2].detach().requires_grad_() for x in inputs()]
    torch.autograd.gradcheck(call, (*leaves, mixing), check_forward_ad=True)
    torch.autograd.gradcheck(call, (*leaves, mixing), check_batched_grad=True)
    torch.autograd.gradgradcheck(call, (*leaves, mixing), fast_mode=True)  # along random directions


def test_derivatives_of_the_feature_map() -> None:
    def mapped(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor) -> Tensor:
        return mhla_attention(q, k, v, mixing, block_size=4, form="parallel", feature_map="relu")

    torch.manual_seed(1)
    leaves = [(x[:2, :9].detach() - 0.5).requires_grad_() for x in inputs()]
    mixing = torch.rand(3, 3, dtype=torch.float64).requires_grad_()
    torch.autograd.gradcheck(mapped, (*leaves, mixing), check_batched_grad=True, fast_mode=True)
    torch.autograd.gradgradcheck(mapped, (*leaves, mixing), fast_mode=True)
    x = (torch.rand(5, 12, 4, 3) - 0.5).requires_grad_()
    shared = torch.autograd.grad(mapped(x, x, x, mixing.float()).sum(), x)[0]
    each = [x.detach().clone().requires_grad_() for _ in range(3)]
    torch.testing.assert_close(shared, sum(torch.autograd.grad(mapped(*each, mixing.float()).sum(), each)))


def test_the_same_tensor_may_be_queries_and_keys() -> None:
    x, mixing = torch.rand(5, 12, 4, 3).requires_grad_(), torch.rand(3, 3)
    (got,) = torch.autograd.grad(call(x, x, x, mixing).square().sum(), x, create_graph=True)
    one, two, three = (x.detach().clone().requires_grad_() for _ in range(3))
    want = torch.autograd.grad(call(one, two, three, mixing).square().sum(), (one, two, three))
    torch.testing.assert_close(got, sum(want))
    (second,) = torch.autograd.grad(got.square().sum(), x)
    assert second.isfinite().all()


def test_transformations_do_not_enter_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = [x.detach() for x in (*inputs(), torch.rand(3, 3, dtype=torch.float64))]
    want = call(*leaves)
    monkeypatch.setattr(module, "ParallelParts", Outside)
    torch.testing.assert_close(torch.vmap(lambda *x: call(*(y[None] for y in x), leaves[3])[0])(*leaves[:3]), want)
    torch.testing.assert_close(torch.func.vjp(call, *leaves)[0], want)
    with forward_ad.dual_level():
        torch.testing.assert_close(
            forward_ad.unpack_dual(call(forward_ad.make_dual(leaves[0], leaves[0]), *leaves[1:]))[0], want
        )
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(*leaves), want)


def test_a_row_that_overflows_and_does_not_count_spoils_no_gradient() -> None:
    q, k, v = (x.detach().float() for x in inputs(5))
    q[2, 3] = 3e38
    leaves = [x.requires_grad_() for x in (q, k * 0.3, v, torch.rand(3, 3))]  # products are finite, their sum is not
    out = call(*leaves)
    assert not out[2, 3].isfinite().all()
    counted = torch.ones(5, 12, dtype=torch.bool)
    counted[2, 3] = False
    for gradient in torch.autograd.grad(out[counted].sum(), leaves):
        assert gradient.isfinite().all()


def test_nothing_of_the_size_of_all_pairs_is_saved() -> None:
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        call(*(torch.rand(40, 60, 4, 3).requires_grad_() for _ in range(3)), torch.rand(15, 15))
    assert max(saved) < 40 * 4 * 60 * 60 / 4
