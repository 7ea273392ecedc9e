"""Prefill and steps are one causal pass, wherever it is cut; one file for this one property, whatever its length."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mhla_kernels import ExponentialMixing, MHLAState, extend_mixing, mhla_attention, mhla_prefill, mhla_step
from oracle import relative_error
from toeplitz import Toeplitz
from torch import Tensor
from torch.utils import _pytree as pytree

KINDS = ("dense", "dense per head", "exponential", "exponential per head", "toeplitz", "toeplitz per head")


def make_mixing(kind: str, heads: int, blocks: int) -> Any:
    shape = (heads,) if "head" in kind else ()
    if kind.startswith("dense"):
        return torch.rand(*shape, blocks, blocks) + 0.05
    if kind.startswith("toeplitz"):
        return Toeplitz(torch.rand(*shape, blocks // 2 + 1) + 0.05)
    return ExponentialMixing(torch.rand(*shape, 3) + 0.05, torch.rand(*shape, 3))


def tokens(batch: int, n: int, heads: int = 2, key: int = 5, value: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return torch.rand(batch, n, heads, key), torch.rand(batch, n, heads, key), torch.randn(batch, n, heads, value)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS),
    block_size=st.integers(1, 12),
    pieces=st.lists(st.integers(0, 14), min_size=1, max_size=6),
    normalize=st.booleans(),
    donate=st.booleans(),
    relu=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_split_is_one_pass(
    kind: str, block_size: int, pieces: list[int], normalize: bool, donate: bool, relu: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    n = sum(pieces)
    q, k, v = tokens(2, n)
    if relu:
        q, k = q - 0.5, k - 0.5
    mixing = make_mixing(kind, 2, -(-n // block_size) + 1)
    options: dict[str, Any] = {
        "block_size": block_size,
        "normalize": normalize,
        "feature_map": "relu" if relu else "identity",
    }
    want = mhla_attention(
        *(x.double() for x in (q, k, v)), mixing.to(torch.float64), causal=True, form="reference", **options
    )
    state, parts, place = None, [], 0
    for index, piece in enumerate(pieces):
        cut = [x[:, place : place + piece] for x in (q, k, v)]
        if index % 2 and state is not None:
            for t in range(piece):
                out, state = mhla_step(*(x[:, t] for x in cut), mixing, state, donate_state=donate, **options)
                parts.append(out[:, None])
        else:
            out, state = mhla_prefill(*cut, mixing, state=state, **options)
            parts.append(out)
        place += piece
    assert state is not None
    assert state.lengths == (n, n)
    assert relative_error("output", torch.cat(parts, 1), want) < 1e-5


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS),
    block_size=st.integers(1, 9),
    pieces=st.lists(st.tuples(*[st.integers(0, 11)] * 3), min_size=1, max_size=4),
    steps=st.integers(0, 12),
    normalize=st.booleans(),
    donate=st.booleans(),
    seed=st.integers(0, 999),
)
def test_ragged_rows_are_each_alone(
    kind: str,
    block_size: int,
    pieces: list[tuple[int, int, int]],
    steps: int,
    normalize: bool,
    donate: bool,
    seed: int,
) -> None:
    """Rows of different lengths, padded with NaN, prefilled in pieces, then stepped."""
    torch.manual_seed(seed)
    totals = [sum(piece[row] for piece in pieces) for row in range(3)]
    longest = max(totals) + steps
    q, k, v = tokens(3, longest)
    mixing = make_mixing(kind, 2, sum(-(-max(piece) // block_size) + 1 for piece in pieces) + steps + 1)
    options: dict[str, Any] = {"block_size": block_size, "normalize": normalize}
    state, outs, place = None, [[], [], []], [0, 0, 0]
    for piece in pieces:
        width = max(piece)
        padded = []
        for x in (q, k, v):
            rows = x.new_full((3, width, *x.shape[2:]), float("nan"))
            for row, count in enumerate(piece):
                rows[row, :count] = x[row, place[row] : place[row] + count]
            padded.append(rows)
        out, state = mhla_prefill(*padded, mixing, lengths=torch.tensor(piece), state=state, **options)
        for row, count in enumerate(piece):
            assert (out[row, count:] == 0).all(), "padding must give zeros"
            outs[row].append(out[row, :count])
            place[row] += count
    for _ in range(steps):
        one = [torch.stack([x[row, place[row]] for row in range(3)]) for x in (q, k, v)]
        out, state = mhla_step(*one, mixing, state, donate_state=donate, **options)
        for row in range(3):
            outs[row].append(out[row : row + 1])
            place[row] += 1
    for row in range(3):
        if place[row]:
            alone = [x[row : row + 1, : place[row]].double() for x in (q, k, v)]
            want = mhla_attention(*alone, mixing.to(torch.float64), causal=True, form="reference", **options)
            assert relative_error(f"row {row}", torch.cat(outs[row])[None], want) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_stays_as_it_was_unless_donated(kind: str) -> None:
    q, k, v = tokens(2, 20)
    mixing = make_mixing(kind, 2, 9)
    _, state = mhla_prefill(q[:, :6], k[:, :6], v[:, :6], mixing, block_size=3)
    copy = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)
    first, _ = mhla_step(q[:, 6], k[:, 6], v[:, 6], mixing, state, block_size=3)
    mhla_prefill(q[:, 6:], k[:, 6:], v[:, 6:], mixing, block_size=3, state=state)
    again, _ = mhla_step(q[:, 6], k[:, 6], v[:, 6], mixing, state, block_size=3)
    for name in ("finished", "open", "mixture"):
        assert torch.equal(getattr(state, name), getattr(copy, name)), (
            f"a step changed {name} of a state it was not given"
        )
    assert torch.equal(first, again)
    donated, after = mhla_step(q[:, 6], k[:, 6], v[:, 6], mixing, state, block_size=3, donate_state=True)
    assert torch.equal(donated, first)
    assert after.open.data_ptr() == state.open.data_ptr(), "a donated state's memory must be taken over"


@pytest.mark.parametrize("kind", KINDS)
def test_donating_a_later_state_leaves_earlier_ones_alone(kind: str) -> None:
    """Two ways on from one state, across the end of a block, in either order of donation."""
    q, k, v = tokens(2, 20)
    mixing = make_mixing(kind, 2, 9)
    want = mhla_attention(q, k, v, mixing, block_size=3, causal=True)

    def step(t: int, state: MHLAState, donate: bool) -> tuple[Tensor, MHLAState]:
        return mhla_step(q[:, t], k[:, t], v[:, t], mixing, state, block_size=3, donate_state=donate)

    for donate_first in (False, True):
        _, start = mhla_prefill(q[:, :8], k[:, :8], v[:, :8], mixing, block_size=3)
        _, child = step(8, start, False)
        other, last = child, start
        for t in (9, 10, 11, 12):
            out, other = step(t, other, True)
            torch.testing.assert_close(out, want[:, t])
            if donate_first and t == 9:  # the parent goes on too, donated, and closes the same block
                _, last = step(8, start, True)
            if donate_first:
                out, last = step(t, last, True)
                torch.testing.assert_close(out, want[:, t])
        if not donate_first:
            again, _ = step(8, start, False)
            torch.testing.assert_close(again, want[:, 8])


def test_select_reorders_rows() -> None:
    q, k, v = tokens(3, 9)
    mixing = make_mixing("dense", 2, 4)
    _, state = mhla_prefill(q[:, :8], k[:, :8], v[:, :8], mixing, block_size=4, lengths=[8, 5, 2])
    chosen = state.select(torch.tensor([2, 0, 0]))
    assert chosen.lengths == (2, 8, 8)
    out, _ = mhla_step(q[:, 8], k[:, 8], v[:, 8], mixing, state, block_size=4)
    rows = [2, 0, 0]
    again, _ = mhla_step(q[rows, 8], k[rows, 8], v[rows, 8], mixing, chosen, block_size=4)
    torch.testing.assert_close(again, out[rows])


def test_an_exponential_step_costs_the_same_at_1000_and_at_32000() -> None:
    mixing = ExponentialMixing(torch.rand(4), torch.rand(4))
    q, k, v = tokens(1, 32000, heads=4, key=64, value=64)
    options: dict[str, Any] = {"block_size": 64, "normalize": False}
    states = {n: mhla_prefill(q[:, :n], k[:, :n], v[:, :n], mixing, **options)[1] for n in (1000, 32000)}
    times: dict[int, list[float]] = {n: [] for n in states}
    for _ in range(192):
        for n, state in states.items():  # in turn, so that both see the same machine
            start = time.perf_counter()
            _, states[n] = mhla_step(q[:, 0], k[:, 0], v[:, 0], mixing, state, donate_state=True, **options)
            times[n].append(time.perf_counter() - start)
    early, late = median(times[1000]), median(times[32000])
    assert states[1000].bytes == states[32000].bytes
    assert late < 1.3 * early, f"{late * 1e6:.0f} us at 32,000 tokens against {early * 1e6:.0f} us at 1,000"


def test_memory_against_a_key_value_cache() -> None:
    """Dense: K V / C numbers for each token against K + V; smaller from C = K V / (K + V) on."""
    key, value, block, n = 16, 16, 32, 1024
    q, k, v = tokens(1, n, 1, key, value)
    _, dense = mhla_prefill(q, k, v, torch.rand(32, 32), block_size=block)
    cache = n * (key + value) * 4
    assert dense.finished.shape[2] == n // block - 1
    assert dense.bytes == (n // block + 1) * (key * value + key) * 4 < cache
    _, constant = mhla_prefill(q, k, v, ExponentialMixing(torch.rand(4), torch.rand(4)), block_size=block)
    assert constant.bytes == (4 + 2) * (key * value + key) * 4


@pytest.mark.parametrize("long", ["extended", "exponential"])
def test_a_mixing_learned_for_2048_tokens_reaches_32768(long: str) -> None:
    learned = torch.rand(32, 32).tril() + 0.01
    if long == "extended":
        mixing = extend_mixing(learned, 512)
        assert torch.equal(mixing[:32, :32], learned)
    else:
        mixing = ExponentialMixing.fit(learned, causal=True, steps=50)[0]
    q, k, v = tokens(1, 32768, 1, 8, 8)
    out = mhla_attention(q, k, v, mixing, block_size=64, causal=True)
    state: MHLAState | None = None
    parts = []
    for start in range(0, 32768, 10000):
        part, state = mhla_prefill(
            *(x[:, start : start + 10000] for x in (q, k, v)), mixing, block_size=64, state=state
        )
        parts.append(part)
    assert relative_error("output", torch.cat(parts, 1), out.double()) < 1e-5


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "lengths": ({"lengths": [3, 9]}, "lengths must be 2 integers from 0 to N=4"),
    "lengths that are true or false": ({"lengths": [True, False]}, "lengths must be 2 integers"),
    "rows": ({"state": 3}, "the state has 3 rows, but q has B=2"),
    "kind": ({"mixing": ExponentialMixing(torch.ones(1), torch.ones(1)), "state": 2}, "with dense mixing, .* with exponential"),
    "block size": ({"state": 2, "block_size": 4}, "block_size=3.*block_size=4"),
    "widths": ({"state": 2, "v": torch.rand(2, 4, 2, 2)}, "Dv=3.*Dv=2"),
    "heads": ({"state": 2, **dict.fromkeys("qk", torch.rand(2, 4, 3, 5)), "v": torch.rand(2, 4, 3, 3)}, "2 heads, but q has H=3"),
    "precision": ({"state": 2, "q": torch.rand(2, 4, 2, 5).double()}, "torch.float32, .* torch.float64"),
    "form": ({"state": 2, "form": "fast"}, "'fast' is not one of"),
    "too long": ({"state": 2, "mixing": torch.ones(2, 2)}, "9 tokens with block_size=3 make 3 blocks"),
    "no tokens axis": ({"q": torch.rand(2, 2, 5)}, "one token goes to mhla_step"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument(name: str) -> None:
    changed, message = WRONG[name]
    call: dict[str, Any] = {
        **dict(zip("qkv", tokens(2, 4), strict=True)),
        "mixing": torch.rand(6, 6),
        "block_size": 3,
        **changed,
    }
    if "state" in call:
        call["state"] = mhla_prefill(*tokens(call["state"], 5), torch.rand(6, 6), block_size=3)[1]
    with pytest.raises(ValueError, match=message):
        mhla_prefill(**call)


def test_a_step_takes_one_token_and_select_takes_indices() -> None:
    q, k, v = tokens(2, 4)
    _, state = mhla_prefill(q, k, v, torch.rand(6, 6), block_size=3)
    with pytest.raises(ValueError, match="a step takes one token"):
        mhla_step(q, k, v, torch.rand(6, 6), state, block_size=3)
    with pytest.raises(ValueError, match=r"integer indices from 0 to 1, got \[True, False\]"):
        state.select(torch.tensor([True, False]))


def test_no_rows() -> None:
    q, k, v = tokens(0, 4)
    out, state = mhla_prefill(q, k, v, torch.rand(6, 6), block_size=3)
    assert out.shape == v.shape
    out, state = mhla_step(q[:, 0], k[:, 0], v[:, 0], torch.rand(6, 6), state, block_size=3)
    assert out.shape == (0, 2, 3)
    assert mhla_prefill(*tokens(2, 5), torch.rand(6, 6), block_size=3)[1].select([]).lengths == ()


@pytest.mark.parametrize("kind", KINDS)
def test_a_donated_state_is_not_used_again(kind: str) -> None:
    q, k, v = tokens(1, 12)
    mixing = make_mixing(kind, 2, 4)
    _, state = mhla_prefill(q[:, :10], k[:, :10], v[:, :10], mixing, block_size=4)
    step = [x[:, 10] for x in (q, k, v)]
    _, kept = mhla_step(*step, mixing, state, block_size=4)
    _, after = mhla_step(*step, mixing, state, block_size=4, donate_state=True)
    with pytest.raises(ValueError, match="was donated to an earlier step"):
        mhla_step(*step, mixing, state, block_size=4)
    with pytest.raises(ValueError, match="was donated to an earlier step"):
        mhla_prefill(q[:, 10:], k[:, 10:], v[:, 10:], mixing, block_size=4, state=state)
    assert torch.equal(kept.open, after.open)
    mhla_step(*step, mixing, after, block_size=4)


@pytest.mark.parametrize("kind", ["dense", "exponential"])
def test_fewer_key_heads_in_prefill_and_steps(kind: str) -> None:
    q, k, v = torch.rand(1, 14, 4, 5), torch.rand(1, 14, 2, 5), torch.randn(1, 14, 2, 3)
    mixing = make_mixing(kind, 4, 4)
    want = mhla_attention(q, k, v, mixing, block_size=4, causal=True)
    first, state = mhla_prefill(q[:, :9], k[:, :9], v[:, :9], mixing, block_size=4)
    parts = [first]
    for t in range(9, 14):
        out, state = mhla_step(q[:, t], k[:, t], v[:, t], mixing, state, block_size=4, donate_state=True)
        parts.append(out[:, None])
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_can_be_trained_through(kind: str) -> None:
    """Gradients of pieces after one another are those of one pass."""
    q, k, v = (x.requires_grad_() for x in tokens(1, 30))
    learned = [torch.rand(2, 3).requires_grad_(), torch.rand(2, 3).requires_grad_()]
    if kind.startswith("dense"):
        learned = [torch.rand(8, 8).requires_grad_()]
    mixing = ExponentialMixing(*learned) if len(learned) == 2 else learned[0]
    whole = mhla_attention(q, k, v, mixing, block_size=4, causal=True)
    parts, state = [], None
    for start, end in ((0, 9), (9, 12), (12, 25), (25, 30)):
        out, state = mhla_prefill(q[:, start:end], k[:, start:end], v[:, start:end], mixing, block_size=4, state=state)
        parts.append(out)
    cotangent = torch.randn(whole.shape)
    want = torch.autograd.grad(whole, (q, k, v, *learned), cotangent)
    got = torch.autograd.grad(torch.cat(parts, 1), (q, k, v, *learned), cotangent)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_two_ways_on_do_not_share_spare_room() -> None:
    """A donated state has room for more blocks, which a step that was not given it must not write to."""
    q, k, v = tokens(1, 12)
    mixing = make_mixing("dense", 2, 6)
    want = mhla_attention(q, k, v, mixing, block_size=2, causal=True)

    def step(t: int, state: MHLAState, donate: bool, sign: int = 1) -> tuple[Tensor, MHLAState]:
        return mhla_step(q[:, t], k[:, t], sign * v[:, t], mixing, state, block_size=2, donate_state=donate)

    _, state = mhla_prefill(q[:, :4], k[:, :4], v[:, :4], mixing, block_size=2)
    for t in (4, 5, 6):
        _, state = step(t, state, True)
    _, child = step(7, state, False)
    _, child = step(8, child, True)
    for t in (7, 8):
        _, state = step(t, state, True, -1)
    for t in (9, 10):
        out, child = step(t, child, True)
        torch.testing.assert_close(out, want[:, t])
