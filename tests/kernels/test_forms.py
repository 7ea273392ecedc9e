"""Every PyTorch form against the definition: values and gradients of q, k, v and mixing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mhla_kernels import attention_matrix, mhla_attention
from oracle import equal_starts, oracle, packed_starts, relative_error
from torch import Tensor

FORMS = ("reference", "parallel", "chunked", "auto")


@dataclass(frozen=True)
class Case:
    """A random problem."""

    batch: int
    tokens: int
    heads: int
    key_width: int
    value_width: int
    block_size: int
    causal: bool
    normalize: bool
    per_head: bool
    masked: bool
    layout: str
    seed: int


cases = st.builds(
    Case,
    batch=st.integers(1, 2),
    tokens=st.integers(1, 40),
    heads=st.integers(1, 3),
    key_width=st.integers(1, 9),
    value_width=st.integers(1, 9),
    block_size=st.integers(1, 45),
    causal=st.booleans(),
    normalize=st.booleans(),
    per_head=st.booleans(),
    masked=st.booleans(),
    layout=st.sampled_from(["equal", "equal", "uneven", "packed"]),
    seed=st.integers(0, 2**16),
)


def build(case: Case) -> tuple[tuple[Tensor, ...], dict[str, Any], list[list[int]], dict[str, Any]]:
    """Tensors, the operator's options, block starts, and the oracle's options."""
    draw = torch.Generator().manual_seed(case.seed)
    packed = case.layout == "packed"
    batch, n, c = 1 if packed else case.batch, case.tokens, case.block_size
    options: dict[str, Any] = {"causal": case.causal, "normalize": case.normalize}
    if case.layout == "uneven" and not case.causal:
        cuts = torch.randperm(max(n - 1, 1), generator=draw)[: torch.randint(0, n, (1,), generator=draw)] + 1
        starts = [sorted({0, n, *(int(cut) for cut in cuts if cut < n)})]
        options["block_offsets"] = starts[0]
        blocks = len(starts[0]) - 1
    elif packed and case.causal:
        bounds = sorted([0, n, *torch.randint(0, n + 1, (3,), generator=draw).tolist()])
        starts = packed_starts(bounds, c)
        options |= {"block_size": c, "cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
        blocks = max(len(s) - 1 for s in starts)
    elif packed:
        blocks = max(1, min(3, n // 2))
        c = max(1, n // (2 * blocks))
        short = (blocks - 1) * c + 1
        n = blocks * c + short
        starts = packed_starts([0, blocks * c, n], c)
        options |= {"block_size": c, "cu_seqlens": [0, blocks * c, n]}
    else:
        starts = equal_starts(n, c)
        options["block_size"] = c
        blocks = len(starts[0]) - 1
    size = blocks + int(case.causal) * 2
    mixing = torch.rand(*([case.heads] if case.per_head else []), size, size, generator=draw) + 0.05
    q, k = (torch.rand(batch, n, case.heads, case.key_width, generator=draw) + 0.05 for _ in range(2))
    v = torch.randn(batch, n, case.heads, case.value_width, generator=draw)
    check = {"causal": case.causal, "normalize": case.normalize}
    if case.masked:
        mask = torch.rand(batch, n, generator=draw) > 0.3
        mask[:, 0] = True
        options["key_mask"] = check["key_mask"] = mask
    return (q, k, v, mixing), options, starts, check


def gradients(run: Any, tensors: tuple[Tensor, ...], cotangent: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = run(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, cotangent.to(out.dtype))


def gradient_scales(
    exact: tuple[Tensor, ...],
    starts: list[list[int]],
    check: dict[str, Any],
    cotangent: Tensor,
    want_grads: tuple[Tensor, ...],
) -> list[float]:
    """What the error of each gradient is divided by: its norm, or a thirtieth of the terms that it is summed from.

    Where the terms cancel further (a row that sees a single block or key does not depend on its weights: all but nothing
    is left), float32 has no five digits to give.
    """
    magnitudes = tuple(x.abs() for x in exact)
    _, terms = gradients(lambda *x: oracle(*x, starts, constant_normalizer=True, **check), magnitudes, cotangent.abs())
    return [max(float(w.norm()), float(t.norm()) / 30) for w, t in zip(want_grads, terms, strict=True)]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(case=cases)
def test_forms_agree_with_the_definition(case: Case) -> None:
    tensors, options, starts, check = build(case)
    cotangent = torch.randn(tensors[2].shape, generator=torch.Generator().manual_seed(case.seed + 1))
    exact = tuple(x.double() for x in tensors)
    want, want_grads = gradients(lambda *x: oracle(*x, starts, **check), exact, cotangent)
    scales = gradient_scales(exact, starts, check, cotangent, want_grads)
    for form in FORMS:
        got, got_grads = gradients(lambda *x, form=form: mhla_attention(*x, form=form, **options), tensors, cotangent)
        assert relative_error(f"{form} output", got, want) < 1e-5
        for name, grad, exact_grad, scale in zip(("q", "k", "v", "mixing"), got_grads, want_grads, scales, strict=True):
            error = float((grad.double() - exact_grad).norm()) / max(scale, 1e-12)
            assert error < 1e-5, f"{form}: gradient of {name} is off by {error:.1e}"


@pytest.mark.parametrize("block_size", [100, 130, 257, 400], ids=lambda c: f"C{c}")
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
def test_blocks_longer_than_a_tile(block_size: int, normalize: bool) -> None:
    n, blocks = 400, -(-400 // block_size)
    q, k, v = torch.rand(1, n, 2, 8), torch.rand(1, n, 2, 8), torch.randn(1, n, 2, 5)
    tensors = (q, k, v, torch.rand(2, blocks, blocks))
    cotangent = torch.randn_like(v)
    options: dict[str, Any] = {"causal": True, "normalize": normalize}
    starts = equal_starts(n, block_size)
    exact = tuple(x.double() for x in tensors)
    want, want_grads = gradients(lambda *x: oracle(*x, starts, **options), exact, cotangent)
    scales = gradient_scales(exact, starts, options, cotangent, want_grads)
    got, grads = gradients(
        lambda *x: mhla_attention(*x, block_size=block_size, form="chunked", **options), tensors, cotangent
    )
    assert relative_error("output", got, want) < 1e-5
    for name, grad, exact_grad, scale in zip(("q", "k", "v", "mixing"), grads, want_grads, scales, strict=True):
        error = float((grad.double() - exact_grad).norm()) / scale
        assert error < 1e-5, f"gradient of {name} is off by {error:.1e}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_all_ones_is_linear_attention(form: str, causal: bool) -> None:
    q, k, v = torch.rand(2, 50, 2, 6), torch.rand(2, 50, 2, 6), torch.randn(2, 50, 2, 7)
    got = mhla_attention(q, k, v, torch.ones(7, 7), block_size=8, causal=causal, form=form)
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    summary, total = k[..., None] * v[..., None, :], k
    if causal:
        summary, total = summary.cumsum(2), total.cumsum(2)
    else:
        summary, total = summary.sum(2, keepdim=True), total.sum(2, keepdim=True)
    want = (q[..., None, :] @ summary).squeeze(-2) / ((q * total).sum(-1, keepdim=True) + 1e-6)
    assert relative_error("output", got, want.transpose(1, 2)) < 1e-5


def test_rank_exceeds_the_bound_of_linear_attention() -> None:
    q, k = (torch.rand(1, 64, 1, 4, dtype=torch.float64) for _ in range(2))
    linear = attention_matrix(q, k, torch.ones(1, 1, dtype=torch.float64), block_size=64)
    mixed = attention_matrix(q, k, torch.rand(8, 8, dtype=torch.float64), block_size=8)
    assert torch.linalg.matrix_rank(linear[0, 0]) == 4
    assert torch.linalg.matrix_rank(mixed[0, 0]) == 8 * 4


@pytest.mark.parametrize("form", FORMS)
def test_masked_tokens_leak_nothing(form: str) -> None:
    q, k = (torch.rand(2, 20, 2, 4, requires_grad=True) for _ in range(2))
    v = torch.randn(2, 20, 2, 4, requires_grad=True)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, 3:9] = False
    mask[1] = False
    poisoned = [
        x.detach().clone().masked_fill(~mask[..., None, None], float("nan")).requires_grad_() for x in (q, k, v)
    ]
    out = mhla_attention(*poisoned, torch.rand(5, 5), block_size=4, key_mask=mask, form=form)
    assert torch.isfinite(out).all(), "a masked token's NaN came through"
    assert (out[1] == 0).all(), "rows that see no key must be zero"
    assert (out[0, 3:9] == 0).all()
    for name, grad in zip("qkv", torch.autograd.grad(out.sum(), poisoned), strict=True):
        assert (grad[~mask] == 0).all(), f"a masked token got a gradient through {name}"


@pytest.mark.parametrize("form", ["parallel", "chunked"])
def test_padding_right_or_cutting_is_the_same(form: str) -> None:
    q, k, v = torch.rand(1, 30, 1, 4), torch.rand(1, 30, 1, 4), torch.randn(1, 30, 1, 4)
    mixing, mask = torch.rand(8, 8), torch.arange(30)[None] < 19
    padded = mhla_attention(q, k, v, mixing, block_size=4, causal=True, key_mask=mask, form=form)
    cut = mhla_attention(q[:, :19], k[:, :19], v[:, :19], mixing, block_size=4, causal=True, form=form)
    torch.testing.assert_close(padded[:, :19], cut, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences_equal_each_alone(form: str) -> None:
    q, k, v = torch.rand(1, 33, 2, 4), torch.rand(1, 33, 2, 4), torch.randn(1, 33, 2, 4)
    mixing, bounds = torch.rand(4, 4), [0, 5, 5, 21, 33]
    options: dict[str, Any] = {"block_size": 5, "causal": True, "normalize": False, "form": form}
    packed = mhla_attention(q, k, v, mixing, cu_seqlens=bounds, **options)
    parts = [mhla_attention(q[:, a:b], k[:, a:b], v[:, a:b], mixing, **options) for a, b in pairwise(bounds)]
    torch.testing.assert_close(packed, torch.cat(parts, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mean", [0.0, 2.0], ids=["mean0", "mean2"])
def test_bfloat16_stays_close(form: str, mean: float) -> None:
    q, k = (torch.rand(2, 96, 2, 16).bfloat16() for _ in range(2))
    v = (torch.randn(2, 96, 2, 16) + mean).bfloat16()
    tensors, starts, cotangent = (q, k, v, torch.rand(6, 6)), equal_starts(96, 16), torch.randn(v.shape).bfloat16()
    got, grads = gradients(lambda *x: mhla_attention(*x, block_size=16, form=form), tensors, cotangent)
    assert got.dtype == torch.bfloat16
    exact = tuple(x.double() for x in tensors)
    want, want_grads = gradients(lambda *x: oracle(*x, starts, causal=False, normalize=True), exact, cotangent)
    assert relative_error("output", got, want) < 5e-3
    for name, grad, exact_grad in zip(("q", "k", "v", "mixing"), grads, want_grads, strict=True):
        assert relative_error(f"gradient of {name}", grad, exact_grad) < 1e-2


def test_relu_is_applied_to_q_and_k() -> None:
    q, k, v, mixing = torch.randn(1, 12, 1, 4), torch.randn(1, 12, 1, 4), torch.randn(1, 12, 1, 4), torch.rand(3, 3)
    inside = mhla_attention(q, k, v, mixing, block_size=4, feature_map="relu")
    outside = mhla_attention(q.relu() + 1e-6, k.relu() + 1e-6, v, mixing, block_size=4)
    torch.testing.assert_close(inside, outside)


def test_autocast_does_not_lower_the_sums() -> None:
    q, k, v, mixing = torch.rand(1, 64, 2, 8), torch.rand(1, 64, 2, 8), torch.randn(1, 64, 2, 8), torch.rand(4, 4)
    plain = mhla_attention(q, k, v, mixing, block_size=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mhla_attention(q, k, v, mixing, block_size=16), plain)


def test_attention_matrix_times_values_is_the_output() -> None:
    q, k, v, mixing = torch.rand(2, 18, 2, 4), torch.rand(2, 18, 2, 4), torch.randn(2, 18, 2, 3), torch.rand(2, 5, 5)
    for options in ({"causal": True}, {"normalize": False, "scale": 0.3}, {"key_mask": torch.rand(2, 18) > 0.2}):
        weights = attention_matrix(q, k, mixing, block_size=4, **options)
        got = mhla_attention(q, k, v, mixing, block_size=4, **options)
        value = v if "key_mask" not in options else v * options["key_mask"][..., None, None]
        torch.testing.assert_close(torch.einsum("bhtj,bjhd->bthd", weights, value), got, rtol=1e-4, atol=1e-6)


def test_empty_sequence() -> None:
    empty = torch.zeros(2, 0, 3, 4)
    assert mhla_attention(empty, empty, empty, torch.ones(1, 1), block_size=4, causal=True).shape == (2, 0, 3, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_forms_on_the_gpu(form: str) -> None:
    q, k, v, mixing = torch.rand(1, 100, 2, 8), torch.rand(1, 100, 2, 8), torch.randn(1, 100, 2, 8), torch.rand(7, 7)
    want = oracle(q, k, v, mixing, packed_starts([0, 40, 100], 16), causal=True, normalize=True)
    bounds = torch.tensor([0, 40, 100], device="cuda")
    on_device = (x.cuda() for x in (q, k, v, mixing))
    got = mhla_attention(*on_device, block_size=16, causal=True, cu_seqlens=bounds, form=form)
    assert relative_error("output", got.cpu(), want) < 1e-5
