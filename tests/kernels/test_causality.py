"""No finite value that stands later changes what stands earlier by a bit: outputs and gradients, in every form and state."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from implementations import IMPLEMENTATIONS, SPANNING, TORCH, TRITON, attend, small_tiles
from mhla_kernels import ExponentialMixing, mhla_attention, mhla_prefill, mhla_step
from mhla_kernels.forms import chunked
from mhla_kernels.mixing import exponential
from mhla_kernels.normalizer import divide
from mhla_kernels.state import MHLAState
from toeplitz import Toeplitz
from torch import Tensor

FACTORS = ({"qkv": 1e5}, {"qkv": 1e15}, {"v": 3e37})
"""Factors of later queries, keys and values. Gradients are those of finite outputs, as the later ones are."""

SIZES = {"small blocks": (61, 7), "long blocks": (150, 60), "one block": (75, 80)}
INTERPRETED_SIZES = {"triton parallel": ("small blocks",), "triton chunked": ("small blocks", "long blocks")}
CASES = [
    (implementation, kind, size, normalize)
    for implementation, kind, size, normalize in product(
        IMPLEMENTATIONS, ("dense", "exponential", "toeplitz"), SIZES, (True, False)
    )
    if (implementation in TORCH and (kind != "toeplitz" or normalize))
    or (implementation in TRITON and kind != "toeplitz" and size in INTERPRETED_SIZES[implementation])
]
CASES += [
    (implementation, "exponential", "small blocks", normalize)
    for implementation, normalize in product(SPANNING, (True, False))
]
PACKED = [0, 0, 20, 33, 61]


def problem(kind: str, tokens: int, blocks: int, signed: bool) -> tuple[Tensor, ...]:
    q, k = (torch.rand(1, tokens, 2, 5) + 0.1 for _ in range(2))
    if signed:
        q, k = q - 0.6, k - 0.6
    v = torch.randn(1, tokens, 2, 3)
    if kind == "dense":
        return q, k, v, torch.rand(2, blocks, blocks) + 0.05
    if kind == "toeplitz":
        return q, k, v, torch.rand(2, blocks) + 0.05
    return q, k, v, torch.rand(2, 3) + 0.05, torch.rand(2, 3) + 0.02


def make_mixing(kind: str, tensors: Sequence[Tensor]) -> Any:
    return {"dense": lambda matrix: matrix, "exponential": ExponentialMixing, "toeplitz": Toeplitz}[kind](*tensors)


def spoilt(tensors: tuple[Tensor, ...], last: int, factors: dict[str, float]) -> tuple[Tensor, ...]:
    """Return the inputs with queries, keys or values after token ``last`` multiplied by a large factor."""
    by_letter = {letter: factor for letters, factor in factors.items() for letter in letters}
    tokens = dict(zip("qkv", tensors, strict=False))
    later = {name: x[:, last + 1 :] * by_letter.get(name, 1.0) for name, x in tokens.items()}
    return (*(torch.cat([x[:, : last + 1], later[name]], 1) for name, x in tokens.items()), *tensors[3:])


def earlier(run: Any, tensors: tuple[Tensor, ...], last: int, cotangent: Tensor) -> list[Tensor]:
    """Return the outputs up to token ``last``, and their gradients for the tokens up to there and for the mixing."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = run(*leaves)[:, : last + 1]
    q, k, v, *mixing = torch.autograd.grad(out, leaves, cotangent[:, : last + 1])
    return [out.detach(), *(x[:, : last + 1] for x in (q, k, v)), *mixing]


def check(
    run: Any, tensors: tuple[Tensor, ...], lasts: list[int], factors: tuple[dict[str, float], ...] = FACTORS
) -> None:
    cotangent = torch.randn(*tensors[2].shape)
    names = ["outputs", "gradient of q", "gradient of k", "gradient of v", "gradient of mixing", "gradient of decay"]
    for last in lasts:
        want = earlier(run, tensors, last, cotangent)
        largest = run(*spoilt(tensors, last, {"qkv": 3e37}))[:, : last + 1]
        assert torch.equal(largest, want[0]), (
            f"outputs up to token {last} changed with later ones near the largest number"
        )
        for factor in factors:
            got = earlier(run, spoilt(tensors, last, factor), last, cotangent)
            for name, a, b in zip(names, got, want, strict=False):
                assert torch.isfinite(b).all()
                assert torch.equal(a, b), f"{name} up to token {last} changed with later ones times {factor}"


@pytest.fixture
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use tiles and groups so short that a small problem has many of them."""
    monkeypatch.setattr(chunked, "TILE", 16)
    monkeypatch.setattr(exponential, "GROUP", 4)


@pytest.mark.usefixtures("_short_runs")
@pytest.mark.parametrize(("implementation", "kind", "size", "normalize"), CASES)
def test_the_future_does_not_change_the_past(implementation: str, kind: str, size: str, normalize: bool) -> None:
    tokens, block_size = SIZES[size]
    interpreted = implementation.startswith("triton")
    if interpreted and size == "long blocks":
        tokens = 100
    tensors = problem(kind, tokens, -(-tokens // block_size), signed=not normalize)
    options: dict[str, Any] = {
        "causal": True,
        "normalize": normalize,
        "block_size": block_size,
        "toeplitz": kind == "toeplitz",
    }
    with small_tiles():
        check(
            lambda *x: attend(implementation, *x, **options),
            tensors,
            [tokens - 2] if interpreted else [0, block_size // 2, tokens // 2, tokens - 2],
            FACTORS[1:2] if interpreted else FACTORS,
        )


@pytest.mark.usefixtures("_short_runs")
@pytest.mark.parametrize(
    ("implementation", "kind"),
    [*product(IMPLEMENTATIONS, ("dense", "exponential")), *product(SPANNING, ("exponential",))],
)
def test_neither_in_packed_sequences_nor_behind_a_mask(implementation: str, kind: str) -> None:
    tensors = problem(kind, 61, 5, signed=False)
    mask = torch.rand(1, 61) > 0.2
    lasts = [45] if implementation.startswith("triton") else [5, 19, 25, 45, 59]
    with small_tiles():
        for options in ({"cu_seqlens": PACKED}, {"key_mask": mask, "block_size": 13}):
            asked: dict[str, Any] = {"causal": True, "block_size": 8, **options}
            check(lambda *x, asked=asked: attend(implementation, *x, **asked), tensors, lasts, FACTORS[2:])


def test_nor_at_the_size_at_which_long_blocks_are_walked_in_tiles() -> None:
    q, k, v = (torch.rand(1, 512, 2, 16) for _ in range(3))
    mixing = torch.rand(2, 2)
    check(
        lambda *x: mhla_attention(*x, block_size=256, causal=True, form="chunked"), (q, k, v, mixing), [510, 255, 130]
    )


@pytest.mark.usefixtures("_short_runs")
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
@pytest.mark.parametrize("kind", ["dense", "exponential", "toeplitz"])
def test_nor_through_a_state(kind: str, normalize: bool) -> None:
    """Cut anywhere: a prefill, a prefill that goes on inside a block, and one with rows of their own lengths."""

    def run(q: Tensor, k: Tensor, v: Tensor, *mixing: Tensor, cut: int) -> Tensor:
        coefficients = make_mixing(kind, mixing)
        options: dict[str, Any] = {"block_size": 40, "normalize": normalize}
        first, state = mhla_prefill(*(x[:, :cut] for x in (q, k, v)), coefficients, **options)
        rest, _ = mhla_prefill(*(x[:, cut:] for x in (q, k, v)), coefficients, state=state, **options)
        return torch.cat([first, rest], 1)

    tensors = problem(kind, 150, 4, signed=not normalize)
    for cut in (1, 30, 80, 149):
        check(lambda *x, cut=cut: run(*x, cut=cut), tensors, [20, 85, 100, 148], FACTORS[1:])


@pytest.mark.parametrize("kind", ["dense", "exponential", "toeplitz"])
def test_nor_what_a_state_handed_in_goes_on_to_be(kind: str) -> None:
    q, k, v, *mixing = problem(kind, 30, 8, signed=False)
    coefficients = make_mixing(kind, mixing)
    _, state = mhla_prefill(q[:, :20], k[:, :20], v[:, :20], coefficients, block_size=5)
    kept = [x.clone() for x in (state.finished, state.open, state.mixture)]
    branch: MHLAState = state
    for t in range(20, 30):
        _, branch = mhla_step(q[:, t], k[:, t] * 1e15, v[:, t] * 1e15, coefficients, branch, block_size=5)
    assert all(torch.equal(a, b) for a, b in zip(kept, (state.finished, state.open, state.mixture), strict=True))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_shows_in_its_own_row(value: float) -> None:
    """A value that is not finite may spoil further rows, depending on the form: see :func:`mhla_kernels.mhla_attention`."""
    for form in ("parallel", "chunked", "auto"):
        q, k, v, mixing = problem("dense", 512, 8, signed=False)
        k[:, 300] = value
        out = mhla_attention(q, k, v, mixing, block_size=64, causal=True, form=form)
        assert not torch.isfinite(out[:, 300]).any()
        if form == "parallel" or value == float("inf"):
            assert torch.isfinite(out[:, :300]).all()


@pytest.mark.parametrize("tokens", [16, 300])
def test_a_masked_score_that_overflows_makes_no_gradient_of_coefficients_nan(tokens: int) -> None:
    """Later keys near the largest number, whose outputs are finite since their queries are zero."""
    q, k, v, *mixing = problem("exponential", tokens, 1, signed=False)
    late = slice(tokens // 2, None)

    def gradients(form: Any, q: Tensor, k: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in mixing]
        out = mhla_attention(q, k, v, ExponentialMixing(*leaves), block_size=4, causal=True, form=form)
        return list(torch.autograd.grad(out[:, : tokens // 2].sum(), leaves))

    spoilt_q, spoilt_k = q.clone(), k.clone()
    spoilt_q[:, late], spoilt_k[:, late] = 0, 3e38
    for form in ("chunked", "spanning"):
        for got, want in zip(gradients(form, spoilt_q, spoilt_k), gradients(form, q, k), strict=True):
            assert torch.equal(got, want), form


@pytest.mark.parametrize("causal", [True, "block"])
@pytest.mark.parametrize("form", ["parallel", "chunked", "reference"])
def test_a_later_score_that_overflows_makes_no_gradient_of_a_matrix_nan(form: Any, causal: Any) -> None:
    """The product of a query and a later key is infinite; every output is finite."""
    q, k, v = (torch.rand(1, 8, 1, 2) for _ in range(3))
    q[:, 3:] *= 1e-20
    q[:, 2], k[:, 5] = 1e12, 1e28
    mixing = torch.rand(2, 2, requires_grad=True)
    out = mhla_attention(q, k, v, mixing, block_size=4, causal=causal, normalize=False, form=form)
    assert out.isfinite().all()
    (got,) = torch.autograd.grad(out[:, :4].sum(), mixing)
    (want,) = torch.autograd.grad(
        mhla_attention(q[:, :4], k[:, :4], v[:, :4], mixing, block_size=4, causal=causal, normalize=False).sum(), mixing
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("causal", [True, False, "block"])
@pytest.mark.parametrize("form", ["parallel", "chunked", "reference"])
def test_a_score_across_packed_sequences_that_overflows_changes_nothing(form: Any, causal: Any) -> None:
    q, k, v = (torch.rand(1, 16, 1, 2) for _ in range(3))
    mixing = torch.rand(2, 2, requires_grad=True)
    options: dict[str, Any] = {"block_size": 4, "causal": causal, "normalize": False}
    (want,) = torch.autograd.grad(mhla_attention(q[:, 8:], k[:, 8:], v[:, 8:], mixing, **options).sum(), mixing)
    k[:, 2], q[:, :8] = 1e28, 1e-20
    q[:, 8:] *= 1e12
    out = mhla_attention(q, k, v, mixing, cu_seqlens=[0, 8, 16], form=form, **options)
    alone = mhla_attention(q[:, 8:], k[:, 8:], v[:, 8:], mixing, **options)
    torch.testing.assert_close(out[:, 8:], alone)
    (got,) = torch.autograd.grad(out[:, 8:].sum(), mixing)
    torch.testing.assert_close(got, 1e12 * want, rtol=1e-4, atol=0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_division_whose_output_is_not_read_has_gradients_of_zero(compiled: bool) -> None:
    """Rows that are NaN or infinite, in a sum of values or in the sum of the weights."""
    nan, inf = float("nan"), float("inf")
    out = torch.tensor([[nan, 2.0], [3.0, 4.0], [inf, 1.0], [5.0, nan], [6.0, 8.0]], requires_grad=True)
    total = torch.tensor([[nan], [inf], [2.0], [4.0], [2.0]], requires_grad=True)
    run = torch.compile(divide, fullgraph=True, backend="aot_eager") if compiled else divide
    divided = run(out, total, 1e-6)
    of_out, of_total = torch.autograd.grad(divided[2, 1] + divided[3, 0] + divided[4].sum(), (out, total))
    torch.testing.assert_close(of_out, torch.tensor([[0, 0], [0, 0], [0, 0.5], [0.25, 0], [0.5, 0.5]]))
    torch.testing.assert_close(of_total, torch.tensor([[0], [0], [-0.25], [-5 / 16], [-14 / 4]]))


def test_a_gradient_of_zero_has_derivatives() -> None:
    """The weight of an output that starts at zero: second derivatives by it are those of the division itself."""
    out, total = torch.rand(4, 3, dtype=torch.float64) - 0.5, torch.rand(4, 1, dtype=torch.float64) + 0.5
    out.requires_grad_(), total.requires_grad_()

    def second(run: Any) -> tuple[Tensor, ...]:
        weight = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
        of_out, of_total = torch.autograd.grad((weight * run(out, total)).sum(), (out, total), create_graph=True)
        return torch.autograd.grad(of_out.sum() + 2 * of_total.sum(), (weight, out, total))

    got, want = second(lambda out, total: divide(out, total, 1e-6)), second(lambda out, total: out / (total + 1e-6))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("form", ["parallel", "chunked", "spanning", "reference"])
def test_second_derivatives_of_attention_by_a_weight_that_starts_at_zero(form: Any) -> None:
    q, k, v, *mixing = (x.double() for x in problem("exponential", 12, 3, signed=False))

    def second(form: Any, q: Tensor) -> Tensor:
        weight = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        out = mhla_attention(q, k, v, ExponentialMixing(*mixing), block_size=4, causal=True, form=form)
        (of_q,) = torch.autograd.grad((out @ weight).sum(), q, create_graph=True)
        (of_weight,) = torch.autograd.grad(of_q.square().sum() + of_q.sum(), weight)
        return of_weight

    q.requires_grad_()
    direction = torch.ones_like(q)
    _, want = torch.func.jvp(
        lambda q: mhla_attention(q, k, v, ExponentialMixing(*mixing), block_size=4, causal=True),
        (q.detach(),),
        (direction,),
    )
    torch.testing.assert_close(second(form, q), want.sum((0, 1, 2)))
