"""Block-causal attention: a token attends to all tokens of its own block and of all blocks before it.

Random calls and states are compared with the definition in float64, which uses no code of the package.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Case, build, check_against_definition, random_cases, spans
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from implementations import IMPLEMENTATIONS, SHORT_CHUNKS, SPANNING, TORCH, TRITON, attend, small_tiles
from mhla_kernels import (
    ExponentialMixing,
    attention_matrix,
    mhla_attention,
    mhla_prefill,
    mhla_step,
    mhla_window_attention,
)
from mhla_kernels.forms import spanning
from mhla_kernels.forms.cost import cheapest_form
from oracle import equal_starts, exponential_matrix, oracle, relative_error
from toeplitz import Toeplitz, toeplitz_matrix
from torch import Tensor
from torch.utils import _pytree as pytree


def block_causal_cases(tokens: int, heads: int, dtypes: Sequence[str]) -> st.SearchStrategy[Case]:
    return random_cases(
        tokens, heads, least=0, causal=st.just("block"), groups=st.integers(1, 2), dtype=st.sampled_from(dtypes)
    )


def check_case(implementations: tuple[str, ...], case: Case) -> None:
    torch.manual_seed(case.seed)
    tensors, options, starts, check = build(case)
    if tensors[0].numel():
        check_against_definition(implementations, tensors, options, starts, check)
        return
    for implementation in implementations:  # without tokens
        leaves = [x.requires_grad_() for x in tensors]
        out = attend(implementation, *leaves, **options)
        assert out.shape == (*tensors[0].shape[:3], tensors[2].shape[-1])
        assert all(not x.any() for x in torch.autograd.grad(out.sum(), leaves))


@fuzz(150)
@given(case=block_causal_cases(tokens=40, heads=2, dtypes=["float32", "float32", "float64", "bfloat16"]))
def test_random_calls_agree_with_the_definition(case: Case) -> None:
    with mock.patch.dict(spanning.CHUNK, SHORT_CHUNKS):
        check_case(TORCH + SPANNING[:1] * spans(case), case)


@fuzz(12)
@given(case=block_causal_cases(tokens=36, heads=1, dtypes=["float32"]))
def test_random_calls_of_the_kernels_agree_with_the_definition(case: Case) -> None:
    # in a thread: at hypothesis' depth of calls CPython 3.11 maps and unmaps a piece of its stack at every call
    with small_tiles(), ThreadPoolExecutor(1) as pool:
        pool.submit(check_case, TRITON + SPANNING[1:] * spans(case), case).result()


# States


@dataclass(frozen=True)
class Generation:
    """A random sequence of calls that each pass blocks: for each row the number of blocks, or a step of one block each."""

    mixing: str
    per_head: bool
    block_size: int
    calls: list[tuple[int, int, int] | None]
    short: int
    groups: int
    normalize: bool
    relu: bool
    donate: bool
    dtype: str
    seed: int


GENERATIONS = st.builds(
    Generation,
    mixing=st.sampled_from(["dense", "exponential", "toeplitz"]),
    per_head=st.booleans(),
    block_size=st.integers(1, 7),
    calls=st.lists(st.one_of(st.none(), st.tuples(*[st.integers(0, 3)] * 3)), min_size=1, max_size=5),
    short=st.integers(0, 6),
    groups=st.integers(1, 2),
    normalize=st.booleans(),
    relu=st.booleans(),
    donate=st.booleans(),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 2**16),
)


def make_mixing(kind: str, tensors: Sequence[Tensor]) -> Any:
    return {"dense": lambda matrix: matrix, "exponential": ExponentialMixing, "toeplitz": Toeplitz}[kind](*tensors)


def matrix_of(kind: str, tensors: Sequence[Tensor], size: int) -> Tensor:
    if kind == "exponential":
        return exponential_matrix(*tensors, size)
    return tensors[0] if kind == "dense" else toeplitz_matrix(tensors[0], size)


@fuzz(120)
@given(case=GENERATIONS)
def test_random_states_agree_with_the_definition(case: Generation) -> None:
    """Rows of their own numbers of blocks, padded with NaN; the last call may end with a short block."""
    torch.manual_seed(case.seed)
    size, heads, dtype, rows = case.block_size, 2 * case.groups, getattr(torch, case.dtype), 3
    counts = [(size,) * rows if call is None else tuple(size * blocks for blocks in call) for call in case.calls]
    if case.short and case.calls[-1] is not None:
        counts[-1] = tuple(max(0, count - case.short % size) for count in counts[-1])
    lengths = [sum(call[row] for call in counts) for row in range(rows)]
    most = max(-(-length // size) for length in lengths) + 3
    per_head = [heads] if case.per_head else []
    shapes = {"dense": [(most, most)], "exponential": [(3,), (3,)], "toeplitz": [(most // 2,)]}[case.mixing]
    learned = [(torch.rand(*per_head, *shape, dtype=dtype) + 0.05).requires_grad_() for shape in shapes]
    longest = max(*lengths, 1)
    q = torch.rand(rows, longest, heads, 4, dtype=dtype) - 0.5 * case.relu
    k, v = torch.rand(rows, longest, 2, 4, dtype=dtype) - 0.5 * case.relu, torch.randn(rows, longest, 2, 3, dtype=dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mixing = make_mixing(case.mixing, learned)
    options: dict[str, Any] = {
        "block_size": size,
        "causal": "block",
        "normalize": case.normalize,
        "feature_map": "relu" if case.relu else "identity",
    }
    state, places, parts = None, [0] * rows, [[], [], []]
    for call, count in zip(case.calls, counts, strict=True):
        width = max(count)
        padded = []
        for x in leaves:
            pieces = [x[row, places[row] : places[row] + count[row]] for row in range(rows)]
            padding = [x.new_full((width - len(piece), *x.shape[2:]), torch.nan) for piece in pieces]
            padded.append(torch.stack([torch.cat(pair) for pair in zip(pieces, padding, strict=True)]))
        if call is None and state is not None:
            out, state = mhla_step(*padded, mixing, state, donate_state=case.donate, **options)
        else:
            out, state = mhla_prefill(*padded, mixing, lengths=torch.tensor(count), state=state, **options)
        for row in range(rows):
            assert not out[row, count[row] :].any(), "padding must give zeros"
            parts[row].append(out[row, : count[row]])
            places[row] += count[row]
    assert state is not None
    assert state.lengths == tuple(lengths)

    exact = [x.detach().double().requires_grad_() for x in (*leaves, *learned)]
    bound, cotangent = 1e-5 if dtype == torch.float32 else 1e-11, torch.randn(rows, longest, heads, 3, dtype=dtype)
    got = want = torch.zeros(())
    for row in range(rows):
        if lengths[row]:
            q, k, v = (x[row : row + 1, : lengths[row]] for x in exact[:3])
            q, k = (x.relu() + 1e-6 if case.relu else x for x in (q, k))
            k, v = (x.repeat_interleave(case.groups, 2) for x in (k, v))
            matrix = matrix_of(case.mixing, exact[3:], most)
            starts = equal_starts(lengths[row], size)
            expected = oracle(q, k, v, matrix, starts, causal="block", normalize=case.normalize)
            out = torch.cat(parts[row])[None]
            sums = oracle(q, k, v.abs(), matrix, starts, causal="block", normalize=case.normalize).detach()
            assert relative_error(f"row {row}", out.detach(), expected.detach(), sums) < bound
            along = cotangent[row : row + 1, : lengths[row]]
            got, want = got + (out * along).sum(), want + (expected * along.double()).sum()
    if dtype == torch.float64 and any(lengths):  # gradients may cancel beyond what float32 resolves
        gradients = torch.autograd.grad(got, [*leaves, *learned], materialize_grads=True)
        expected_gradients = torch.autograd.grad(want, exact, materialize_grads=True)
        for name, a, b in zip(("q", "k", "v", "mixing", "decay"), gradients, expected_gradients, strict=False):
            assert float((a - b).norm()) < 1e-9 * max(1.0, float(b.norm())), f"gradient of {name}"


def blocks(count: int, batch: int = 2, size: int = 4) -> list[Tensor]:
    return [torch.rand(batch, count * size, 2, width) for width in (5, 5, 3)]


def cut(tensors: Sequence[Tensor], first: int, last: int, size: int = 4) -> list[Tensor]:
    return [x[:, first * size : last * size] for x in tensors]


MIXINGS: dict[str, Any] = {
    "dense": torch.rand(16, 16, generator=torch.Generator().manual_seed(1)),
    "exponential": ExponentialMixing(torch.tensor([0.5, 0.3]), torch.tensor([0.1, 1.0])),
}
CALL: dict[str, Any] = {"block_size": 4, "causal": "block"}


@pytest.mark.parametrize("mixing", MIXINGS.values(), ids=MIXINGS)
def test_states_follow_the_rules_of_states(mixing: Any, tmp_path: Path) -> None:
    """A state that is not donated stays; copies, files and selected rows resume as the original does."""
    tensors = blocks(8)
    want = mhla_attention(*tensors, mixing, **CALL)
    _, state = mhla_prefill(*cut(tensors, 0, 3), mixing, **CALL)
    torch.save(state, tmp_path / "state.pt")
    others = {
        "copy": copy.copy(state),
        "tree": pytree.tree_map(lambda x: x, state),
        "leaves": pytree.tree_unflatten(pytree.tree_leaves(state), pytree.tree_structure(state)),
        "file": torch.load(tmp_path / "state.pt", weights_only=True),
        "select": state.select([0, 1]),
        "original": state,
    }
    values = {name: x.clone() for name, x in state.tensors.items()}
    for name, other in others.items():
        for block in range(3, 8):
            out, other = mhla_step(*cut(tensors, block, block + 1), mixing, other, donate_state=block > 3, **CALL)
            torch.testing.assert_close(out, want[:, 4 * block : 4 * block + 4], msg=lambda text, name=name: name + text)
        assert all(torch.equal(x, values[key]) for key, x in state.tensors.items()), name
    swapped = [x.flip(0) for x in cut(tensors, 3, 4)]
    out, after = mhla_step(*swapped, mixing, state.select([1, 0]), donate_state=True, **CALL)
    torch.testing.assert_close(out, want[:, 12:16].flip(0))
    mhla_step(*cut(tensors, 4, 5), mixing, after, donate_state=True, **CALL)
    with pytest.raises(ValueError, match="was donated to an earlier step"):
        mhla_step(*cut(tensors, 4, 5), mixing, after, **CALL)


def test_a_state_of_exponential_mixing_stays_as_large_as_it_is() -> None:
    mixing, tensors = MIXINGS["exponential"], blocks(16)
    _, state = mhla_prefill(*cut(tensors, 0, 1), mixing, **CALL)
    memory = state.bytes
    for block in range(1, 16):
        _, state = mhla_step(*cut(tensors, block, block + 1), mixing, state, donate_state=True, **CALL)
    assert state.bytes == memory == 2 * 2 * (2 + 2) * (5 * 3 + 5) * 4


def test_a_short_block_is_the_last_one() -> None:
    tensors, mixing = blocks(4), MIXINGS["dense"]
    short = [x[:, :6] for x in tensors]
    out, state = mhla_prefill(*short, mixing, **CALL)
    torch.testing.assert_close(out, mhla_attention(*short, mixing, **CALL))
    for call in (mhla_prefill, mhla_step):
        with pytest.raises(ValueError, match=r"row 0 has 6 tokens, .* 2 of block_size=4 tokens and is final"):
            call(*cut(tensors, 0, 1), mixing, state=state, **CALL)
    _, state = mhla_prefill(*cut(tensors, 0, 2), mixing, lengths=[8, 5], **CALL)
    with pytest.raises(ValueError, match=r"row 1 has 5 tokens"):
        mhla_step(*cut(tensors, 2, 3), mixing, state, **CALL)
    out, state = mhla_prefill(*cut(tensors, 2, 3), mixing, state=state, lengths=[4, 0], **CALL)
    assert state.lengths == (12, 5)
    torch.testing.assert_close(out[:1], mhla_attention(*(x[:1] for x in cut(tensors, 0, 3)), mixing, **CALL)[:, 8:])


# Equal to other kinds of attention


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_between_causal_and_bidirectional(implementation: str) -> None:
    """Blocks of one token are causal; a single block is bidirectional; coefficients beyond the blocks do not matter."""
    q, k, v = torch.rand(1, 20, 2, 4), torch.rand(1, 20, 2, 4), torch.randn(1, 20, 2, 3)
    mixing = torch.rand(20, 20)
    with small_tiles():
        got, want = (
            attend(implementation, q, k, v, mixing, block_size=1, causal=causal, normalize=False)
            for causal in ("block", True)
        )
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        got = attend(implementation, q, k, v, mixing, block_size=20, causal="block")
        want = attend(implementation, q, k, v, mixing[:1, :1], block_size=20)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["dense", "exponential"])
def test_frames_of_different_lengths(implementation: str, kind: str) -> None:
    """Blocks of one token beside blocks that are longer than a tile."""
    check: dict[str, Any] = {"causal": "block", "normalize": True}
    mixing = [torch.rand(2, 6, 6)] if kind == "dense" else [torch.rand(2, 3) + 0.05, torch.rand(2, 3) + 0.05]
    tensors = torch.rand(1, 70, 2, 4), torch.rand(1, 70, 2, 4), torch.randn(1, 70, 2, 3), *mixing
    offsets = [0, 1, 34, 35, 66, 70]
    with small_tiles():
        check_against_definition((implementation,), tensors, {"block_offsets": offsets, **check}, [offsets], check)


def test_the_matrix_of_weights_is_zero_above_the_blocks() -> None:
    q, k, v = blocks(3, batch=1)
    weights = attention_matrix(q, k, MIXINGS["dense"], **CALL)
    block = torch.arange(12) // 4
    assert ((weights > 0) == (block[:, None] >= block)).all()
    torch.testing.assert_close(
        torch.einsum("bhtj,bjhd->bthd", weights, v), mhla_attention(q, k, v, MIXINGS["dense"], **CALL)
    )


def test_no_pairs_inside_a_block_are_counted_in_the_choice_of_a_form() -> None:
    assert cheapest_form(128, 1, 64, 64, True) == "parallel"
    assert cheapest_form(128, 1, 64, 64, "block") == "chunked"


# Causality between blocks

FACTORS = ({"qkv": 1e5}, {"qkv": 1e15}, {"v": 3e37}, {"kv": 3e20})
"""Factors of later queries, keys and values. With the last one, the summaries of later blocks overflow."""
KINDS = ("dense", "exponential", "packed", "uneven")
SPANNED = ("exponential", "packed exponential")


def earlier(
    implementation: str, tensors: list[Tensor], last: int, cotangent: Tensor, options: dict[str, Any]
) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = attend(implementation, *leaves, **options)[:, :last]
    q, k, v, *mixing = torch.autograd.grad(out, leaves, cotangent[:, :last])
    return [out.detach(), *(x[:, :last] for x in (q, k, v)), *mixing]


def check_exact(implementation: str, kind: str, normalize: bool, factors: Sequence[dict[str, float]]) -> None:
    """Check outputs with finite later values of any size, and gradients of outputs even if a later summary overflows."""
    tokens, last = 36, 24
    q, k = (torch.rand(1, tokens, 2, 5) + 0.1 - 0.6 * (not normalize) for _ in range(2))
    mixing = [torch.rand(2, 6, 6) + 0.05]
    if "exponential" in kind:
        mixing = [torch.rand(2, 3) + 0.05, torch.rand(2, 3) + 0.02]
    tensors = [q, k, torch.randn(1, tokens, 2, 3), *mixing]
    options: dict[str, Any] = {"causal": "block", "normalize": normalize, "block_size": 8}
    if kind.startswith("packed"):
        options["cu_seqlens"] = [0, 8, 8, 36]
    if kind == "uneven":
        options |= {"block_size": None, "block_offsets": (0, 3, 20, 24, 33, 36)}
    cotangent = torch.randn(1, tokens, 2, 3)
    names = ["outputs", "gradient of q", "gradient of k", "gradient of v", "gradient of mixing", "gradient of decay"]
    with small_tiles():
        want = earlier(implementation, tensors, last, cotangent, options)
        for factor in factors:
            spoilt = list(tensors)
            for letters, number in factor.items():
                for letter in letters:
                    x = tensors["qkv".index(letter)]
                    spoilt["qkv".index(letter)] = torch.cat([x[:, :last], x[:, last:] * number], 1)
            got = earlier(implementation, spoilt, last, cotangent, options)
            for name, a, b in zip(names, got, want, strict=False):
                assert torch.isfinite(b).all()
                assert torch.equal(a, b), f"{name} changed with later tokens times {factor}"
        largest = [*(torch.cat([x[:, :last], torch.full_like(x[:, last:], 3e38)], 1) for x in tensors[:3]), *mixing]
        out = attend(implementation, *largest, **options)
        assert torch.equal(out[:, :last], want[0])


@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
@pytest.mark.parametrize(("implementation", "kind"), [*product(TORCH, KINDS), *product(SPANNING[:1], SPANNED)])
def test_later_blocks_do_not_change_earlier_ones_by_a_bit(implementation: str, kind: str, normalize: bool) -> None:
    check_exact(implementation, kind, normalize, FACTORS)


@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
@pytest.mark.parametrize(("implementation", "kind"), [*product(TRITON, KINDS), *product(SPANNING[1:], SPANNED)])
def test_later_blocks_do_not_change_earlier_ones_in_the_kernels(
    implementation: str, kind: str, normalize: bool
) -> None:
    check_exact(implementation, kind, normalize, FACTORS[2:])


MIXTURES_THAT_OVERFLOW: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "a key": (("k",), {}),
    "a value": (("v",), {}),
    "a query": (("q",), {}),
    "all of them": (("q", "k", "v"), {}),
    "float64": (("k",), {"dtype": torch.float64}),
    "dense": (("k",), {"kind": "dense"}),
    "packed": (("k",), {"cu_seqlens": [0, 20, 44]}),
    "without a sum": (("k",), {"normalize": False}),
}


@pytest.mark.parametrize(
    ("implementation", "name"),
    [
        (implementation, name)
        for implementation, name in product(("torch chunked", "triton chunked"), MIXTURES_THAT_OVERFLOW)
        if (implementation, name) != ("triton chunked", "float64")  # the kernels do not take it
    ],
)
def test_a_number_near_the_largest_in_a_short_later_block_changes_no_gradient(implementation: str, name: str) -> None:
    """The summary is finite, its mixture overflows, and the empty slots of the short block have queries of zero."""
    letters, changes = MIXTURES_THAT_OVERFLOW[name]
    options = {"block_size": 8, "causal": "block", **changes}
    dtype, kind = options.pop("dtype", torch.float32), options.pop("kind", "exponential")
    tensors = [torch.rand(1, 44, 1, 4, dtype=dtype) for _ in range(3)]
    mixing = [torch.tensor([2.0]), torch.tensor([0.1])] if kind == "exponential" else [torch.rand(6, 6) + 1]
    tensors += [x.to(dtype) for x in mixing]
    cotangent, spoilt = torch.randn(1, 44, 1, 4, dtype=dtype), [x.clone() for x in tensors]
    for letter in letters:
        spoilt["qkv".index(letter)][:, 42] = 0.9 * torch.finfo(dtype).max
    with small_tiles():
        want, got = (earlier(implementation, x, 16, cotangent, options) for x in (tensors, spoilt))
        assert not attend(implementation, *spoilt, **options)[:, 42].isfinite().all()
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert b.isfinite().all()
        assert torch.equal(a, b), f"result {number}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
def test_what_is_not_finite_shows_in_all_rows_of_its_block(implementation: str, name: str, value: float) -> None:
    tensors = blocks(5, batch=1)
    tensors["qkv".index(name)][:, 9] = value
    with small_tiles():
        out = attend(implementation, *tensors, MIXINGS["dense"], **CALL)
    assert not torch.isfinite(out[:, 8:12]).any()
    if implementation.endswith("chunked") or name == "k":  # the other forms multiply later values by zero
        assert torch.isfinite(out[:, :8]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sums_of_finite_numbers_that_overflow_become_no_wrong_numbers(implementation: str) -> None:
    q, k, v = blocks(5, batch=1)
    k[:, 9:11] *= 3e20
    v[:, 9:11] *= 3e20
    with small_tiles():
        out = attend(implementation, q, k, v, MIXINGS["dense"], **CALL)[:, :12]
    want = oracle(q, k, v, MIXINGS["dense"], equal_starts(20, 4), causal="block", normalize=True)[:, :12]
    finite = torch.isfinite(out)
    assert finite[:, :8].all()
    torch.testing.assert_close(out[finite].double(), want[finite], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
def test_kernels_show_what_is_not_finite_in_long_blocks(value: float) -> None:
    """Blocks that the kernels sum in pieces; infinite values of both signs do not cancel."""
    q, k, v = torch.rand(1, 180, 1, 4), torch.rand(1, 180, 1, 4), torch.rand(1, 180, 1, 3)
    v[:, 100], v[:, 170] = value, -value
    with small_tiles():
        out = attend("triton chunked", q, k, v, torch.rand(2, 2), block_size=90, causal="block")
    assert not torch.isfinite(out[:, 90:]).any()
    assert torch.isfinite(out[:, :90]).all()


# Arguments


GRID = ExponentialMixing(torch.ones(2), torch.ones(2, 2), (2, 2))
WRONG: dict[str, tuple[Any, str]] = {
    "other text": (lambda q, m: mhla_attention(q, q, q, m, block_size=4, causal="blocks"), "'blocks' is not one of False, True, 'block'"),
    "grid": (lambda q, m: mhla_attention(q, q, q, GRID, block_size=4, causal="block"), "needs a sequence of blocks"),
    "too few coefficients": (lambda q, m: mhla_attention(q, q, q, m[:2, :2], block_size=4, causal="block"), "make 4 blocks, but mixing is for 2 at most"),
    "too few for offsets": (
        lambda q, m: mhla_attention(q, q, q, m[:2, :2], block_offsets=(0, 3, 9, 16), causal="block"),
        "block_offsets for N=16 tokens make 3 blocks, but mixing is for 2 at most: use fewer blocks",
    ),
    "offsets of tokens": (lambda q, m: mhla_attention(q, q, q, m, block_offsets=(0, 16), causal=True), "bidirectional attention and causal='block'"),
    "packed offsets": (
        lambda q, m: mhla_attention(q, q, q, m, block_offsets=(0, 16), causal="block", cu_seqlens=[0, 16]),
        "cannot be combined",
    ),
    "spanning of uneven blocks": (
        lambda q, m: mhla_attention(q, q, q, MIXINGS["exponential"], block_offsets=(0, 3, 16), causal="block", form="spanning"),
        "takes blocks of equal size",
    ),
    "window": (lambda q, m: mhla_window_attention(q, q, q, q, q, m, block_size=4, causal="block"), "causal='block' is for mhla_attention"),
    "prefill of everything": (lambda q, m: mhla_prefill(q, q, q, m, block_size=4, causal=False), "causal=False is not one of True, 'block'"),
    "step of several blocks": (lambda q, m: step(q, q[:, :5], m), r"takes one block, \[B, C, H, D\] with C from 1 to block_size=4"),
    "step of no token": (lambda q, m: step(q, q[:, :0], m), "takes one block"),
    "step of a token": (lambda q, m: step(q, q[:, 0], m), "takes one block"),
    "step of a token after blocks": (lambda q, m: step(q, q[:, 0], m, causal=True), "causal='block', but the call is with"),
    "step of a block after tokens": (
        lambda q, m: mhla_step(*[q[:, :4]] * 3, m, mhla_prefill(q, q, q, m, block_size=4)[1], **CALL),
        "but the call is with .*causal='block'",
    ),
    "mixing too small for a step": (lambda q, m: step(q, q[:, :4], m[:4, :4]), "20 tokens with block_size=4 make 5 blocks"),
}  # fmt: skip


def step(q: Tensor, x: Tensor, mixing: Tensor, **options: Any) -> Any:
    state = mhla_prefill(q, q, q, mixing, **CALL)[1]
    return mhla_step(x, x, x, mixing, state, **CALL | options)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call(torch.rand(1, 16, 2, 4), torch.rand(6, 6))


@pytest.mark.parametrize("form", ["parallel", "chunked"])
@pytest.mark.parametrize("normalize", [True, False])
def test_tokens_that_no_output_reads_have_gradients_of_zero_even_if_they_overflow(form: Any, normalize: bool) -> None:
    q, k, v = (torch.rand(1, 12, 1, 4) for _ in range(3))
    k[:, 8:], v[:, 8:] = 1e25, 1e25
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = mhla_attention(*leaves, torch.rand(3, 3), block_size=4, causal="block", form=form, normalize=normalize)
    assert not out[:, 8:].isfinite().any()
    for gradient in torch.autograd.grad(out[:, :8].sum(), leaves):
        assert gradient.isfinite().all()
        assert not gradient[:, 8:].any()
