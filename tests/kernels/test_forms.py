"""Every form of both backends against the definition: values and gradients of q, k, v and mixing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Case, build, check_against_definition, definition, gradients, random_cases, spans
from hypothesis import HealthCheck, given, settings
from implementations import DEVICE, IMPLEMENTATIONS, SHORT_CHUNKS, SPANNING, TORCH, TRITON, attend, small_tiles
from mhla_kernels import ExponentialMixing, attention_matrix, mhla_attention
from mhla_kernels.blocks import TokenBlocks, TokenLayout
from mhla_kernels.forms import attend as forms_attend
from mhla_kernels.forms import spanning
from mhla_kernels.forms.cost import numbers_held
from mhla_kernels.forms.weights import expand_pairs
from mhla_kernels.mixing import Mixing
from mhla_kernels.mixing.dense import DenseMixing
from mhla_kernels.problem import Weighting
from oracle import equal_starts, exponential_matrix, oracle, packed_starts, relative_error
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(case=random_cases(tokens=40, heads=3))
def test_torch_forms_agree_with_the_definition(case: Case) -> None:
    torch.manual_seed(case.seed)
    with mock.patch.dict(spanning.CHUNK, SHORT_CHUNKS):
        check_against_definition(TORCH + SPANNING[:1] * spans(case), *build(case))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(case=random_cases(tokens=36, heads=2))
def test_triton_forms_agree_with_the_definition(case: Case) -> None:
    torch.manual_seed(case.seed)
    # In a thread: at hypothesis' depth of calls CPython 3.11 maps and unmaps a piece of its stack at every call.
    with small_tiles(), ThreadPoolExecutor(1) as pool:
        pool.submit(check_against_definition, TRITON + SPANNING[1:] * spans(case), *build(case)).result()


@pytest.mark.parametrize("implementation", SPANNING)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_chunks_that_span_blocks(implementation: str, causal: bool) -> None:
    """Several chunks of the shipped size, sums that do not fade, and ones that are gone after a block."""
    n, check = 600, {"causal": causal, "normalize": False}
    q, k, v = torch.rand(1, n, 1, 4), torch.rand(1, n, 1, 4), torch.randn(1, n, 1, 3)
    check_against_definition(
        (implementation,),
        (q, k, v, torch.rand(4), torch.tensor([0.0, 0.02, 0.1, 90.0])),
        {"block_size": 11, **check},
        equal_starts(n, 11),
        check,
    )


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_chunks_of_sequences_whose_bounds_only_the_device_knows(causal: bool) -> None:
    """Sequence bounds are not read by the CPU, which would have to wait for a GPU."""
    q, k, v = (torch.rand(1, 300, 2, 4) for _ in range(3))
    span = ExponentialMixing(torch.rand(2, 3), torch.rand(2, 3)).span(4, causal)
    chunks = TokenLayout(300, 32, cu_seqlens=torch.tensor([0, 10, 140, 140, 300])).partition(q.device)
    assert chunks.sequences is not None
    weighting = Weighting(causal, scale=None, eps=1e-6)
    want, got = (
        each.merge(spanning.spanning(*(each.split(x) for x in (q, k, v)), span, 8, each, weighting))
        for each in (chunks, chunks._replace(sequences=None))
    )
    assert relative_error("output", got, want) < 1e-6


@pytest.mark.parametrize("form", ["chunked", "spanning"])
@pytest.mark.parametrize("rows", [1, 2, 6], ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per head"])
def test_long_sequences_are_computed_some_rows_at_a_time(
    form: str, rows: int, per_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of one pass, but for the coefficients' gradients, which are sums over rows."""
    tensors = [torch.rand(3, 64, 3, 4) for _ in range(3)]
    tensors += [torch.rand(3, 2) if per_head else torch.rand(2) for _ in range(2)]

    def run() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        mixing = ExponentialMixing(*leaves[3:])
        out = mhla_attention(*leaves[:3], mixing, block_size=4, causal=True, form=form)  # type: ignore[arg-type]
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    want = run()
    held = 4 * numbers_held(form, 64, 16, 4, 4, 2)  # type: ignore[arg-type]
    monkeypatch.setattr(forms_attend, "PART", rows * held)
    seen = []
    partition = TokenLayout.partition
    monkeypatch.setattr(TokenLayout, "partition", lambda *x: seen.append(x) or partition(*x))
    got = run()
    assert len(seen) == {1: 9, 2: 6, 6: 2}[rows]
    for name, a, b in zip(("out", "q", "k", "v"), got, want, strict=False):
        assert torch.equal(a, b), name
    for a, b in zip(got[4:], want[4:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per head"])
def test_heads_of_one_sequence_are_computed_some_at_a_time(per_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense coefficients of each head go with its head."""
    tensors = [torch.rand(1, 64, 3, 4) for _ in range(3)] + [torch.rand(3, 16, 16) if per_head else torch.rand(16, 16)]

    def run() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = mhla_attention(*leaves, block_size=4, causal=True, form="chunked")
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    want = run()
    monkeypatch.setattr(forms_attend, "PART", 4 * numbers_held("chunked", 64, 16, 4, 4, 0))
    parts = []
    of_heads = DenseMixing.of_heads
    monkeypatch.setattr(DenseMixing, "of_heads", lambda *x: parts.append(x[1]) or of_heads(*x))
    for a, b in zip(run(), want, strict=True):
        torch.testing.assert_close(a, b)
    assert parts == [slice(head, head + 1) for head in range(3)]


@pytest.mark.parametrize("implementation", TRITON)
@pytest.mark.parametrize(("key_width", "value_width"), [(72, 72), (20, 130), (136, 40)])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_triton_tiles_as_they_are(implementation: str, key_width: int, value_width: int, causal: bool) -> None:
    """Full-size tiles, several of them, widths that are not powers of two, a packed qkv projection, strided gradients."""
    n, c, heads = 100, 37, 1
    widths = (key_width, key_width, value_width)
    packed = torch.rand(1, n, heads, sum(widths))
    tensors = (packed, torch.rand(3, 3) + 0.05)

    def run(implementation: str, packed: Tensor, mixing: Tensor) -> Tensor:
        q, k, v = packed.split(widths, -1)
        return attend(implementation, q, k, v - 0.5, mixing, block_size=c, causal=causal).transpose(1, 2)

    cotangent = torch.randn(1, n, heads, value_width).transpose(1, 2)
    want, want_grads = gradients(partial(run, "torch reference"), tuple(x.double() for x in tensors), cotangent)
    got, grads = gradients(partial(run, implementation), tensors, cotangent)
    assert relative_error("output", got, want) < 1e-5
    for name, grad, exact in zip(("qkv", "mixing"), grads, want_grads, strict=True):
        assert relative_error(f"gradient of {name}", grad, exact) < 1e-5


@pytest.mark.parametrize("implementation", ["torch chunked", "triton chunked"])
@pytest.mark.parametrize("block_size", [130, 257, 270], ids=lambda c: f"C{c}")
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_blocks_longer_than_a_tile(implementation: str, block_size: int, normalize: bool, causal: bool) -> None:
    n, blocks, heads = 270, -(-270 // block_size), 2 if block_size == 130 and causal else 1
    q, k, v = torch.rand(1, n, heads, 8), torch.rand(1, n, heads, 8), torch.randn(1, n, heads, 5)
    check: dict[str, Any] = {"causal": causal, "normalize": normalize}
    with small_tiles():
        check_against_definition(
            (implementation,),
            (q, k, v, torch.rand(heads, blocks, blocks)),
            {"block_size": block_size, **check},
            equal_starts(n, block_size),
            check,
        )


@dataclass(frozen=True)
class Scaled(Mixing):
    """A kind from outside that keeps one matrix for all heads, and a gain for each."""

    learned = ("gain", "base")
    gain: Tensor
    base: Tensor

    @property
    def heads(self) -> int:
        return len(self.gain)

    def matrix(self, blocks: int) -> Tensor:
        return 1 + self.gain[:, None, None] * self.base


@pytest.mark.parametrize("batch", [1, 2])
def test_kinds_that_keep_heads_otherwise_are_not_cut(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms_attend, "PART", 1)
    q, k, v = (torch.rand(batch, 64, 2, 4) for _ in range(3))
    mixing = Scaled(torch.rand(2), torch.rand(8, 8))
    want = mhla_attention(q, k, v, mixing, block_size=8, form="reference")
    torch.testing.assert_close(mhla_attention(q, k, v, mixing, block_size=8, form="chunked"), want)


@pytest.mark.parametrize("implementation", ["torch chunked", "triton chunked"])
def test_exponential_mixing_over_many_groups(implementation: str) -> None:
    """More blocks than the running sums take at once."""
    n, check = 150, {"causal": True, "normalize": True}
    q, k, v = torch.rand(1, n, 2, 4), torch.rand(1, n, 2, 4), torch.randn(1, n, 2, 3)
    check_against_definition(
        (implementation,),
        (q, k, v, torch.rand(2, 4), torch.rand(2, 4)),
        {"block_size": 2, **check},
        equal_starts(n, 2),
        check,
    )


@pytest.mark.parametrize("blocks", [33, 64, 1100])
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per head"])
def test_exponential_mixing_over_a_sequence_is_its_matrix(blocks: int, per_head: bool) -> None:
    """In groups, and in groups of groups."""
    shape = (2, 3) if per_head else (3,)
    mixing = ExponentialMixing(torch.rand(shape, dtype=torch.float64), torch.rand(shape, dtype=torch.float64) / 20)
    summary = torch.randn(2, 2, blocks, 5, dtype=torch.float64)
    dense = mixing.dense(blocks)
    assert relative_error("both ways", mixing.mix(summary, causal=False), dense @ summary) < 1e-12
    assert relative_error("earlier", mixing.mix(summary, causal=True), dense.tril(-1) @ summary) < 1e-12


class CountNumbers(TorchDispatchMode):
    """Adds up how many numbers torch's functions give back."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numbers += sum(x.numel() for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
        return out


@pytest.mark.parametrize("form", ["chunked", "spanning"])
@pytest.mark.parametrize("causal", [False, True, "block"])
def test_exponential_mixing_works_in_linear_time_backwards_too(causal: Any, form: Any) -> None:
    """Twice the tokens are at most a little more than twice the work."""
    counts = []
    for tokens in (4096, 8192):
        q, k, v = (torch.rand(1, tokens, 1, 4, requires_grad=True) for _ in range(3))
        mixing = ExponentialMixing(torch.rand(2, requires_grad=True), torch.rand(2, requires_grad=True))
        with CountNumbers() as count:
            mhla_attention(q, k, v, mixing, block_size=4, causal=causal, form=form, backend="torch").sum().backward()
        counts.append(count.numbers)
    assert counts[1] < 2.2 * counts[0]


@pytest.mark.parametrize("grid", [(12,), (6, 7), (2, 3, 4), (17, 16)], ids=str)
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per head"])
def test_exponential_mixing_over_a_grid_is_its_matrix(grid: tuple[int, ...], per_head: bool) -> None:
    shape = (2, 3) if per_head else (3,)
    mixing = ExponentialMixing(torch.rand(shape), torch.rand(*shape, len(grid)), grid)
    place = torch.cartesian_prod(*(torch.arange(float(n)) for n in grid)).view(-1, len(grid))
    rates = mixing.decay.double()[..., None, None, :]
    weighted = (rates * (place[:, None] - place[None]).abs().double()).sum(-1)
    dense = (mixing.amplitude.double()[..., None, None] * (-weighted).exp()).sum(-3)
    assert relative_error("dense", mixing.dense(), dense) < 1e-6
    summary = torch.randn(2, 2, len(place), 5)
    want = dense.expand(2, -1, -1)[None] @ summary.double()
    assert relative_error("mixed", mixing.mix(summary, causal=False), want) < 1e-6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_all_ones_is_linear_attention(implementation: str, causal: bool) -> None:
    q, k, v = torch.rand(2, 50, 2, 6), torch.rand(2, 50, 2, 6), torch.randn(2, 50, 2, 7)
    got = attend(implementation, q, k, v, torch.ones(7, 7), block_size=8, causal=causal)
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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_masked_tokens_leak_nothing(implementation: str) -> None:
    q, k = (torch.rand(2, 20, 2, 4, requires_grad=True) for _ in range(2))
    v = torch.randn(2, 20, 2, 4, requires_grad=True)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, 3:9] = False
    mask[1] = False
    poisoned = [
        x.detach().clone().masked_fill(~mask[..., None, None], float("nan")).requires_grad_() for x in (q, k, v)
    ]
    out = attend(implementation, *poisoned, torch.rand(5, 5), block_size=4, key_mask=mask)
    assert torch.isfinite(out).all(), "a masked token's NaN came through"
    assert (out[1] == 0).all(), "rows that see no key must be zero"
    assert (out[0, 3:9] == 0).all()
    for name, grad in zip("qkv", torch.autograd.grad(out.sum(), poisoned), strict=True):
        assert (grad[~mask] == 0).all(), f"a masked token got a gradient through {name}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_right_or_cutting_is_the_same(implementation: str) -> None:
    q, k, v = torch.rand(1, 30, 1, 4), torch.rand(1, 30, 1, 4), torch.randn(1, 30, 1, 4)
    mixing, mask = torch.rand(8, 8), torch.arange(30)[None] < 19
    padded = attend(implementation, q, k, v, mixing, block_size=4, causal=True, key_mask=mask)
    cut = attend(implementation, q[:, :19], k[:, :19], v[:, :19], mixing, block_size=4, causal=True)
    torch.testing.assert_close(padded[:, :19], cut, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packed_sequences_equal_each_alone(implementation: str) -> None:
    q, k, v = torch.rand(1, 33, 2, 4), torch.rand(1, 33, 2, 4), torch.randn(1, 33, 2, 4)
    mixing, bounds = torch.rand(4, 4), [0, 5, 5, 21, 33]
    options: dict[str, Any] = {"block_size": 5, "causal": True, "normalize": False}
    packed = attend(implementation, q, k, v, mixing, cu_seqlens=bounds, **options)
    parts = [
        attend(implementation, q[:, a:b], k[:, a:b], v[:, a:b], mixing, **options) for a, b in pairwise(bounds) if b > a
    ]
    torch.testing.assert_close(packed, torch.cat(parts, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packed_sequences_of_any_length_with_exponential_mixing(implementation: str) -> None:
    """Bidirectional: no sequence needs the number of blocks of another."""
    q, k, v = torch.rand(1, 33, 2, 4), torch.rand(1, 33, 2, 4), torch.randn(1, 33, 2, 4)
    mixing, bounds = (torch.rand(3) + 0.05, torch.rand(3)), [0, 5, 5, 21, 33]
    packed = attend(implementation, q, k, v, *mixing, block_size=5, cu_seqlens=bounds)
    starts = packed_starts(bounds, 5)
    dense = exponential_matrix(*(x.double() for x in mixing), 4)
    assert relative_error("packed", packed, oracle(q, k, v, dense, starts, causal=False, normalize=True)) < 1e-5


@pytest.mark.parametrize("implementation", [*TORCH, *TRITON])
@pytest.mark.parametrize(
    "layout", ["slices of one parameter", "transposed", "one decay for all heads", "every other", "one term for all"]
)
def test_exponential_mixing_of_any_strides(implementation: str, layout: str) -> None:
    both = torch.rand(2, 4, 2) + 0.05
    amplitude, decay = {
        "slices of one parameter": (both[..., 0], both[..., 1]),
        "transposed": (both[..., 0].T.contiguous().T, both[..., 1].T.contiguous().T),
        "one decay for all heads": (both[..., 0], both[0, :, 1].expand(2, 4)),
        "every other": (both[0, ::2, 0], both[0, ::2, 1]),
        "one term for all": (both[0, 0, :1].expand(4), both[0, :, 1]),
    }[layout]
    q, k, v = torch.rand(1, 30, 2, 4), torch.rand(1, 30, 2, 4), torch.randn(1, 30, 2, 3)
    dense = exponential_matrix(amplitude.double(), decay.double(), 8)
    want = oracle(q, k, v, dense, equal_starts(30, 4), causal=True, normalize=True)
    got = attend(implementation, q, k, v, amplitude, decay, block_size=4, causal=True)
    assert relative_error("output", got, want) < 1e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_strides(implementation: str) -> None:
    """Features of an image as convolutions leave them, an expanded batch, features that are not next to each other."""
    images = torch.rand(2, 3 * 12, 5, 6)
    q, k, v = images.flatten(2).transpose(1, 2).unflatten(-1, (3, 3, 4)).unbind(2)
    k = k[:1].expand(2, -1, -1, -1)
    v = v.repeat_interleave(2, -1)[..., ::2]
    mixing, mask = torch.rand(8, 8).T, (torch.rand(1, 30) > 0.2).expand(2, 30)
    plain = [x.contiguous() for x in (q, k, v, mixing, mask)]
    got = attend(implementation, q, k, v, mixing, block_size=4, key_mask=mask)
    want = attend("torch reference", *plain[:4], block_size=4, key_mask=plain[4])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_queries_and_values_of_different_dtypes(implementation: str, causal: bool) -> None:
    q, k, v = torch.rand(1, 30, 2, 4).bfloat16(), torch.rand(1, 30, 2, 4), torch.randn(1, 30, 2, 3).bfloat16()
    mixing = torch.rand(4, 4)
    got = attend(implementation, q, k, v, mixing, block_size=8, causal=causal)
    assert got.dtype == torch.bfloat16
    want = oracle(q, k, v, mixing, equal_starts(30, 8), causal=causal, normalize=True)
    assert relative_error("output", got, want) < 3e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mean", [0.0, 2.0], ids=["mean0", "mean2"])
@pytest.mark.parametrize(
    ("causal", "normalize", "signed"),
    [(False, True, False), (True, False, False), (True, False, True)],
    ids=["normalized", "causal", "causal, signed"],
)
def test_bfloat16_stays_close(implementation: str, mean: float, causal: bool, normalize: bool, signed: bool) -> None:
    """Within the limits for bfloat16, and no worse than 1.2 times the chunked form in PyTorch, whose sums are float32."""
    n, c = 256, 32
    q, k = ((torch.randn if signed else torch.rand)(1, n, 1, 32).bfloat16() for _ in range(2))
    v = (torch.randn(1, n, 1, 32) + mean).bfloat16()
    tensors, starts, cotangent = (q, k, v, torch.rand(8, 8)), equal_starts(n, c), torch.randn(v.shape).bfloat16()
    check = {"causal": causal, "normalize": normalize}
    exact = tuple(x.double() for x in tensors)
    want, want_grads = gradients(lambda *x: oracle(*x, starts, **check), exact, cotangent)

    def errors(implementation: str) -> dict[str, float]:
        out, grads = gradients(partial(attend, implementation, block_size=c, **check), tensors, cotangent)
        assert out.dtype == torch.bfloat16
        names = ("q", "k", "v", "mixing")
        by_name = {n: relative_error(n, g, w) for n, g, w in zip(names, grads, want_grads, strict=True)}
        return {"output": relative_error("output", out, want), **by_name}

    got, chunked = errors(implementation), errors("torch chunked")
    for name, limit in {"output": 5e-3, "q": 1e-2, "k": 1e-2, "v": 1e-2, "mixing": 1e-4}.items():
        assert got[name] < limit, f"{name} is off by {got[name]:.1e}"
        if name != "mixing":  # which is float32: its own limit is far below any rounding to bfloat16
            assert got[name] < 1.2 * chunked[name], (
                f"{name}: {got[name]:.1e} against {chunked[name]:.1e} of the torch form"
            )


def test_summaries_of_the_gradient_are_float32() -> None:
    """With values of mean 2 and many tokens the normalized gradients cancel to a hundredth of their terms."""
    n, c = 1024, 64
    q, k = (torch.rand(1, n, 1, 16).bfloat16() for _ in range(2))
    tensors = (q, k, (torch.randn(1, n, 1, 16) + 2).bfloat16(), torch.rand(16, 16))
    cotangent = torch.randn(tensors[2].shape).bfloat16()
    exact = tuple(x.double() for x in tensors)
    _, want = gradients(lambda *x: oracle(*x, equal_starts(n, c), causal=False, normalize=True), exact, cotangent)
    errors = {}
    for implementation in ("torch chunked", "triton chunked"):
        _, grads = gradients(partial(attend, implementation, block_size=c), tensors, cotangent)
        errors[implementation] = [relative_error(x, g, w) for x, g, w in zip("qkv", grads, want, strict=False)]
    for ours, torchs in zip(errors["triton chunked"], errors["torch chunked"], strict=True):
        assert ours < 1.2 * torchs


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_gradient_of_mixing_is_the_same_in_two_runs(implementation: str) -> None:
    tensors = torch.rand(2, 60, 2, 8), torch.rand(2, 60, 2, 8), torch.randn(2, 60, 2, 8), torch.rand(9, 9)
    runs = [gradients(partial(attend, implementation, block_size=7), tensors, tensors[2])[1] for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_relu_is_applied_to_q_and_k(implementation: str) -> None:
    q, k, v, mixing = torch.randn(1, 12, 1, 4), torch.randn(1, 12, 1, 4), torch.randn(1, 12, 1, 4), torch.rand(3, 3)
    inside = attend(implementation, q, k, v, mixing, block_size=4, feature_map="relu")
    outside = attend(implementation, q.relu() + 1e-6, k.relu() + 1e-6, v, mixing, block_size=4)
    torch.testing.assert_close(inside, outside)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_autocast_does_not_lower_the_sums(implementation: str) -> None:
    q, k, v, mixing = torch.rand(1, 64, 2, 8), torch.rand(1, 64, 2, 8), torch.randn(1, 64, 2, 8), torch.rand(4, 4)
    plain = attend(implementation, q, k, v, mixing, block_size=16)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(attend(implementation, q, k, v, mixing, block_size=16), plain)


def test_attention_matrix_times_values_is_the_output() -> None:
    q, k, v, mixing = torch.rand(2, 18, 2, 4), torch.rand(2, 18, 2, 4), torch.randn(2, 18, 2, 3), torch.rand(2, 5, 5)
    for options in ({"causal": True}, {"normalize": False, "scale": 0.3}, {"key_mask": torch.rand(2, 18) > 0.2}):
        weights = attention_matrix(q, k, mixing, block_size=4, **options)
        got = mhla_attention(q, k, v, mixing, block_size=4, **options)
        value = v if "key_mask" not in options else v * options["key_mask"][..., None, None]
        torch.testing.assert_close(torch.einsum("bhtj,bjhd->bthd", weights, value), got, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("what", ["causal", "bidirectional", "exponential", "packed", "no rows"])
def test_nothing_gives_nothing(implementation: str, what: str) -> None:
    empty = torch.zeros(1, 0, 3, 4) if what != "no rows" else torch.zeros(0, 9, 3, 4)
    mixing = [torch.ones(3), torch.ones(3)] if what == "exponential" else [torch.ones(3, 3)]
    options: dict[str, Any] = {"block_size": 4, "causal": what == "causal"}
    if what == "packed":
        options["cu_seqlens"] = [0, 0]
    assert attend(implementation, empty, empty, empty, *mixing, **options).shape == empty.shape


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fewer_key_heads_serve_neighbouring_query_heads(implementation: str) -> None:
    """Head h reads key head h // 2: values and gradients of the heads written out, which repeat in that order alone."""
    q, k, v = torch.rand(1, 40, 4, 5), torch.rand(1, 40, 2, 5), torch.randn(1, 40, 2, 3)
    mixing = torch.rand(4, 5, 5)
    pairs = [0, 0, 1, 1]
    options: dict[str, Any] = {"causal": True, "normalize": True}
    cotangent = torch.randn(1, 40, 4, 3)

    def want(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor) -> Tensor:
        return oracle(q, k[:, :, pairs], v[:, :, pairs], mixing, equal_starts(40, 8), **options)

    expected, expected_grads = gradients(want, (q, k, v, mixing), cotangent)
    with small_tiles():
        got, grads = gradients(
            lambda *x: attend(implementation, *x, block_size=8, **options), (q, k, v, mixing), cotangent
        )
    assert relative_error("output", got, expected) < 1e-5
    for name, a, b in zip(("q", "k", "v", "mixing"), grads, expected_grads, strict=True):
        assert relative_error(f"gradient of {name}", a, b) < 1e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_outputs_are_contiguous_whatever_the_inputs(implementation: str) -> None:
    q, k, v = (torch.rand(3, 2, 19, 4).transpose(1, 2) for _ in range(3))
    for options in ({"block_size": 8}, {"block_size": 8, "causal": True}, {"block_offsets": (0, 5, 9, 19)}):
        with small_tiles():
            out = attend(implementation, q, k, v, torch.rand(3, 3), **options)
        assert out.is_contiguous()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("terms", [0, 3], ids=["dense", "exponential"])
def test_packed_documents_keep_to_themselves(implementation: str, terms: int) -> None:
    """Values and gradients; the last block of each document is short, and there are more documents than one tile holds."""
    bounds = [0, 20, 33, 34, 61]
    q, k, v = torch.rand(1, 61, 2, 5), torch.rand(1, 61, 2, 5), torch.randn(1, 61, 2, 3)
    mixing = [torch.rand(2, terms) + 0.1, torch.rand(2, terms) * 0.2] if terms else [torch.rand(2, 4, 4) + 0.1]
    starts, cotangent = packed_starts(bounds, 8), torch.randn(1, 61, 2, 3)
    check: dict[str, Any] = {"causal": True, "normalize": False}
    expected, expected_grads = gradients(
        partial(definition, starts=starts, relu=False, **check), (q, k, v, *mixing), cotangent
    )
    with small_tiles():
        got, grads = gradients(
            lambda *x: attend(implementation, *x, block_size=8, cu_seqlens=bounds, **check),
            (q, k, v, *mixing),
            cotangent,
        )
    assert relative_error("output", got, expected) < 1e-5
    for name, a, b in zip(("q", "k", "v", "mixing", "decay"), grads, expected_grads, strict=False):
        assert relative_error(f"gradient of {name}", a, b) < 1e-5


def test_coefficients_are_expanded_without_atomic_sums_away_from_a_cpu() -> None:
    """The gradient of the coefficients is the same in each run on a GPU: nothing is added by index_add or scatter_add."""
    operations: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations.append(str(function))
            return function(*args, **(kwargs or {}))

    mixing = torch.rand(3, 3, device="meta", requires_grad=True)
    where = TokenBlocks(torch.arange(12, device="meta") // 4)
    with Record():
        expand_pairs(mixing, where, where).sum().backward()
    assert any("index_put" in name for name in operations)
    assert not any("index_add" in name or "scatter_add" in name for name in operations)
