"""Cross-attention: every form of both backends against the definition, and the promises of its arguments."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from cases import check_passes
from cross_cases import CrossCall, CrossCase, build_cross, cross_cases
from fuzzing import fuzz
from hypothesis import given
from implementations import DEVICE, IMPLEMENTATIONS, TORCH, TRITON, attend, small_tiles
from mhla_kernels import ExponentialMixing, attention_matrix, limit_memory, mhla_attention
from mhla_kernels.forms.cost import cheapest_cross_form
from mhla_kernels.mixing import BlockPairs, Mixing
from mhla_kernels.triton_backend import launch
from mhla_kernels.triton_backend.cross.call import CrossArguments
from mhla_kernels.triton_backend.cross.trial import CrossKind, try_cross_kernels
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

DTYPES = torch.float32, torch.float32, torch.float64, torch.bfloat16


def check_against_definition(implementations: tuple[str, ...], call: CrossCall) -> None:
    check_passes(implementations, call.tensors, call.options, call.definition)


@fuzz(250)
@given(case=cross_cases(tokens=30, heads=4, dtypes=DTYPES))
def test_torch_forms_agree_with_the_definition(case: CrossCase) -> None:
    torch.manual_seed(case.seed)
    check_against_definition(TORCH, build_cross(case))


@fuzz(30)
@given(case=cross_cases(tokens=36, heads=2, dtypes=(torch.float32,)))
def test_triton_forms_agree_with_the_definition(case: CrossCase) -> None:
    torch.manual_seed(case.seed)
    # in a thread: at hypothesis' depth of calls CPython 3.11 maps and unmaps a piece of its stack at every call
    with small_tiles(), ThreadPoolExecutor(1) as pool:
        pool.submit(check_against_definition, TRITON, build_cross(case)).result()


EXAMPLES = {
    "packed, exponential": {"packed": 4, "exponential": True},
    "packed, one matrix": {"packed": 4, "per_head": True},
    "masked, fewer key heads": {"masks": "qk", "heads": 2, "shared": 2, "relu": True},
    "uneven, plain": {"query_layout": "uneven", "key_layout": "uneven", "normalize": False},
}


@pytest.mark.parametrize("implementation", TRITON)
@pytest.mark.parametrize("name", EXAMPLES)
def test_triton_examples(implementation: str, name: str) -> None:
    plain = CrossCase(
        batch=1, queries=20, keys=37, heads=1, shared=1, key_width=5, value_width=3, block_size=6, key_block_size=9,
        query_layout="equal", key_layout="equal", packed=0, masks="", normalize=True, relu=False, exponential=False,
        per_head=False, dtype=torch.float32, seed=3,
    )  # fmt: skip
    with small_tiles():
        check_against_definition((implementation,), build_cross(CrossCase(**{**vars(plain), **EXAMPLES[name]})))


def tensors(queries: int = 20, keys: int = 13, batch: int = 1, heads: int = 2) -> list[Tensor]:
    """Return random q, k, v with nonnegative features."""
    return [
        torch.rand(batch, queries, heads, 4),
        torch.rand(batch, keys, heads, 4),
        torch.randn(batch, keys, heads, 3),
    ]


def passes(implementation: str, inputs: list[Tensor], rows: slice, **options: Any) -> list[Tensor]:
    """Return the outputs of some queries, and their gradients for all tensors."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(implementation, *leaves, **options)[:, rows]
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
def test_masked_tokens_change_no_bit(implementation: str, poison: float) -> None:
    """A masked key or query may hold anything. The output of a masked query is zero, and it gets no gradient."""
    q, k, v = tensors()
    query_mask, key_mask = torch.rand(1, 20) > 0.3, torch.rand(1, 13) > 0.3
    options: dict[str, Any] = {"block_size": 8, "key_block_size": 5, "query_mask": query_mask, "key_mask": key_mask}
    mixing = torch.rand(3, 3)
    want = passes(implementation, [q, k, v, mixing], slice(None), **options)
    hidden = [
        x.masked_fill(~mask[..., None, None], poison) for x, mask in ((q, query_mask), (k, key_mask), (v, key_mask))
    ]
    got = passes(implementation, [*hidden, mixing], slice(None), **options)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert (got[0][~query_mask] == 0).all()
    for gradient, mask in ((got[1], query_mask), (got[2], key_mask), (got[3], key_mask)):
        assert (gradient[~mask] == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("factor", [1e30, float("nan")])
@pytest.mark.parametrize("terms", [0, 3], ids=["dense", "exponential"])
def test_keys_of_a_different_sequence_change_no_bit(implementation: str, factor: float, terms: int) -> None:
    inputs = tensors()
    mixing = [torch.rand(2, terms), torch.rand(2, terms)] if terms else [torch.rand(2, 2, 2)]
    options: dict[str, Any] = {"block_size": 5, "key_block_size": 4}
    options |= {"cu_seqlens": [0, 8, 8, 8, 14, 20], "key_cu_seqlens": [0, 5, 5, 5, 5, 13]}
    want = passes(implementation, [*inputs, *mixing], slice(8), **options)
    spoilt = [inputs[0], *(torch.cat([x[:, :5], x[:, 5:] * factor], 1) for x in inputs[1:])]
    got = passes(implementation, [*spoilt, *mixing], slice(8), **options)
    assert torch.isfinite(want[0]).all()
    for a, b in zip([got[0], got[1][:, :8], got[2][:, :5], got[3][:, :5]], [want[0], want[1][:, :8], want[2][:, :5], want[3][:, :5]], strict=True):  # fmt: skip
        assert torch.equal(a, b)
    assert (attend(implementation, *spoilt, *mixing, **options)[:, 8:14] == 0).all(), "queries without keys are zero"


@pytest.mark.parametrize("form", ["chunked", "parallel", "reference"])
def test_keys_of_a_different_sequence_change_no_bit_of_a_graph(form: Any) -> None:
    """Bounds that torch traces are not read, and one matrix holds zeros between sequences."""
    torch._dynamo.reset()
    q, k, v = tensors()
    bounds, key_bounds = torch.tensor([0, 8, 8, 20]), torch.tensor([0, 5, 7, 13])

    def call(k: Tensor, v: Tensor, *bounds: Tensor) -> Tensor:
        options = {"cu_seqlens": bounds[0], "key_cu_seqlens": bounds[1]}
        return mhla_attention(q, k, v, mixing, block_size=5, key_block_size=3, form=form, **options)

    mixing = ExponentialMixing(torch.rand(3), torch.rand(3))
    graph = torch.compile(call, fullgraph=True, backend="eager")
    want = graph(k, v, bounds, key_bounds)
    torch.testing.assert_close(want, call(k, v, bounds, key_bounds))
    large = [torch.cat([x[:, :5], x[:, 5:] * 1e30], 1) for x in (k, v)]
    assert torch.equal(graph(*large, bounds, key_bounds)[:, :8], want[:, :8])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("what", ["no keys", "no queries", "all keys masked", "no sequence has both"])
def test_queries_without_keys_give_zeros_and_everything_gets_a_gradient(implementation: str, what: str) -> None:
    """Else the next step of DDP waits for gradients that never come."""
    q, k, v = tensors(0 if what == "no queries" else 20, 0 if what == "no keys" else 13)
    options: dict[str, Any] = {"block_size": 8, "key_block_size": 8}
    if what == "all keys masked":
        options["key_mask"] = torch.zeros(1, 13, dtype=torch.bool)
    if what == "no sequence has both":
        options |= {"cu_seqlens": [0, 20, 20], "key_cu_seqlens": [0, 0, 13]}
    out, *grads = passes(implementation, [q, k, v, torch.rand(3, 2)], slice(None), **options)
    assert out.shape == (1, len(q[0]), 2, 3)
    for x in (out, *grads):
        assert (x == 0).all()


@pytest.mark.parametrize("implementation", TORCH)
@pytest.mark.parametrize("terms", [0, 3], ids=["dense", "exponential"])
def test_with_its_own_blocks_it_is_self_attention(implementation: str, terms: int) -> None:
    q, k, v = tensors(20, 20)
    mixing = [torch.rand(terms), torch.rand(terms)] if terms else [torch.rand(3, 3)]
    want = attend(implementation, q, k, v, *mixing, block_size=8)
    torch.testing.assert_close(attend(implementation, q, k, v, *mixing, block_size=8, key_block_size=8), want)
    mask = torch.arange(20)[None] < 11
    both = attend(implementation, q, k, v, *mixing, block_size=8, query_mask=mask, key_mask=mask)
    torch.testing.assert_close(both, attend(implementation, q, k, v, *mixing, block_size=8, key_mask=mask))
    keys_alone = attend(implementation, q, k, v, *mixing, block_size=8, key_block_size=8, key_mask=mask)
    assert (keys_alone[:, 11:] != 0).all(), "a key mask does not mask queries"


def test_blocks_are_placed_by_their_centers() -> None:
    """In key blocks: two query blocks reach over four key blocks; equal numbers of blocks have whole distances."""
    like = torch.zeros(())
    assert BlockPairs(2, 4, 2.0).distance(like).tolist() == [[0.5, 0.5, 1.5, 2.5], [2.5, 1.5, 0.5, 0.5]]
    assert BlockPairs(3, 3, 1.0).distance(like).tolist() == [[0, 1, 2], [1, 0, 1], [2, 1, 0]]


@pytest.mark.parametrize("packed", [False, True])
def test_attention_matrix_times_values_is_the_output(packed: bool) -> None:
    q, k, v = tensors()
    options: dict[str, Any] = {"block_size": 5, "key_block_size": 4}
    options |= {"query_mask": torch.rand(1, 20) > 0.3, "key_mask": torch.rand(1, 13) > 0.3}
    mixing: Any = torch.rand(2, 4, 4)
    if packed:
        mixing = ExponentialMixing(torch.rand(3), torch.rand(3))
        options |= {"cu_seqlens": [0, 8, 9, 20], "key_cu_seqlens": [0, 5, 5, 13]}
    for more in ({}, {"normalize": False, "scale": 0.3}):
        weights = attention_matrix(q, k, mixing, **options, **more)
        assert weights.shape == (1, 2, 20, 13)
        got = mhla_attention(q, k, v, mixing, **options, **more)
        torch.testing.assert_close(torch.einsum("bhtj,bjhd->bthd", weights, v), got, rtol=1e-4, atol=1e-6)


@dataclass(frozen=True)
class Shares(Mixing):
    """A kind of mixing from outside the package: what a query block keeps for each key block falls with its index."""

    learned = ("rate",)
    rate: Tensor

    def matrix(self, blocks: int) -> Tensor:
        return self.rate ** torch.arange(blocks, device=self.rate.device).expand(blocks, blocks)


class CrossShares(Shares):
    def cross_matrix(self, pairs: BlockPairs) -> Tensor:
        index = pairs.key_index
        if index is None:
            index = torch.arange(pairs.key_blocks, device=self.rate.device)
        return (self.rate**index).expand(pairs.query_blocks, -1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_kind_of_mixing_from_outside(implementation: str) -> None:
    q, k, v = (x.to(DEVICE) for x in tensors())
    backend, form = implementation.split()
    options: dict[str, Any] = {"block_size": 5, "key_block_size": 4, "form": form, "backend": backend}
    rate = torch.tensor(0.7, device=DEVICE)
    matrix = (rate ** torch.arange(4, device=DEVICE)).expand(4, 4)
    want = mhla_attention(q, k, v, matrix, **options)
    torch.testing.assert_close(mhla_attention(q, k, v, CrossShares(rate), **options), want)
    bounds: dict[str, Any] = {"cu_seqlens": [0, 9, 20], "key_cu_seqlens": [0, 5, 13]}
    parts = [
        mhla_attention(q[:, a:b], k[:, c:d], v[:, c:d], CrossShares(rate), **options)
        for (a, b), (c, d) in zip(*(pairwise(x) for x in bounds.values()), strict=True)
    ]
    torch.testing.assert_close(mhla_attention(q, k, v, CrossShares(rate), **options, **bounds), torch.cat(parts, 1))
    with pytest.raises(ValueError, match="define the method cross_matrix in Shares"):
        mhla_attention(q, k, v, Shares(rate), **options)


Q, K, V = torch.rand(1, 20, 2, 4), torch.rand(1, 13, 2, 4), torch.rand(1, 13, 2, 3)
TRUE = torch.ones(1, 20, dtype=torch.bool)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "causal": ({"causal": True}, ValueError, "causal=True is for self-attention, .* Nq=20 .* Nk=13"),
    "spanning": ({"form": "spanning"}, ValueError, "form='spanning' is for self-attention"),
    "batch": ({"k": K.repeat(2, 1, 1, 1)}, ValueError, r"\[B, Nq, H, Dk\] and \[B, Nk, Hkv, Dk\]"),
    "widths": ({"k": K[..., :3]}, ValueError, r"\[B, Nk, Hkv, Dk\]"),
    "key heads": ({"k": K.repeat(1, 1, 2, 1), "v": V.repeat(1, 1, 2, 1)}, ValueError, "Hkv a divisor of H"),
    "values": ({"v": V[:, :12]}, ValueError, "must share B, Nk and heads with k"),
    "half": ({"v": V.half()}, TypeError, "float16 is not supported"),
    "key mask alone": ({"key_mask": TRUE[:, :13], "key_block_size": None}, ValueError, "pass key_block_size"),
    "key mask of queries": ({"key_mask": TRUE}, ValueError, r"key_mask .* must be bool \[B, Nk\] = \[1, 13\]"),
    "query mask of keys": ({"query_mask": TRUE[:, :13]}, ValueError, r"query_mask .* \[B, Nq\] = \[1, 20\]"),
    "query mask dtype": ({"query_mask": torch.ones(1, 20)}, ValueError, "query_mask is torch.float32"),
    "query blocks": ({"block_size": 5}, ValueError, "Nq=20 queries with block_size=5 make 4 blocks, but mixing is for Mq=3"),
    "key blocks": ({"key_block_size": 5}, ValueError, "Nk=13 keys with block_size=5 make 3 blocks, but mixing is for Mk=2"),
    "key block size": ({"key_block_size": 0}, ValueError, "key_block_size=0 must be a positive integer"),
    "both key blocks": ({"key_block_offsets": [0, 13]}, ValueError, "only one of key_block_size"),
    "no blocks": ({"block_size": None}, ValueError, "exactly one of block_size"),
    "key offsets": ({"key_block_size": None, "key_block_offsets": [0, 5, 12]}, ValueError, "key_block_offsets must .* N=13"),
    "offsets of queries": ({"block_size": None, "block_offsets": [0, 9, 20], "key_block_size": None}, ValueError, "cannot divide Nk=13"),
    "bounds of one side": ({"cu_seqlens": [0, 20]}, ValueError, "key_cu_seqlens is missing"),
    "bounds of keys": ({"key_cu_seqlens": [0, 13]}, ValueError, "cu_seqlens is missing"),
    "number of sequences": ({"cu_seqlens": [0, 20], "key_cu_seqlens": [0, 6, 13]}, ValueError, "1 sequences and key_cu_seqlens 2"),
    "end of keys": ({"cu_seqlens": [0, 20], "key_cu_seqlens": [0, 12]}, ValueError, "key_cu_seqlens must .* N=13"),
    "packed blocks": ({"cu_seqlens": [0, 4, 20], "key_cu_seqlens": [0, 9, 13]}, ValueError, "Nq=4 queries .* make 1 blocks"),
    "packed, uneven": ({"key_block_size": None, "key_block_offsets": [0, 5, 13], "cu_seqlens": [0, 20], "key_cu_seqlens": [0, 13]}, ValueError, "uneven blocks cannot be combined"),
    "mixing heads": ({"mixing": torch.rand(3, 3, 2)}, ValueError, r"\[H, Mq, Mk\] .* with H = 2"),
    "integer mixing": ({"mixing": torch.ones(3, 2, dtype=torch.long)}, TypeError, "floating point"),
    "decay": ({"mixing": ExponentialMixing(torch.ones(1), -torch.ones(1))}, ValueError, "finite and not negative"),
    "grid": ({"mixing": ExponentialMixing(torch.ones(1), torch.ones(1, 2), (2, 2))}, ValueError, "mixing is for Mq=4 blocks"),
    "scale": ({"scale": 0.5}, ValueError, "has no effect with normalize=True"),
    "negative keys": ({"k": K - 1}, ValueError, "k holds negative features"),
    "device": ({"query_mask": TRUE.to("meta")}, ValueError, "query_mask is on 'meta'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument(name: str) -> None:
    changed, error, message = WRONG[name]
    call: dict[str, Any] = {"q": Q, "k": K, "v": V, "mixing": torch.rand(3, 2), "block_size": 8, "key_block_size": 8}
    with pytest.raises(error, match=message):
        mhla_attention(**{**call, **changed})


def test_negative_features_may_be_masked() -> None:
    out = mhla_attention(Q, torch.cat([K[:, :12], -K[:, 12:]], 1), V, torch.rand(3, 2), block_size=8, key_block_size=8, key_mask=torch.arange(13)[None] < 12)  # fmt: skip
    assert torch.isfinite(out).all()


def test_autocast_does_not_lower_the_sums() -> None:
    q, k, v = (x.to(DEVICE) for x in tensors())
    mixing = torch.rand(3, 2, device=DEVICE)
    for form in ("chunked", "parallel"):
        plain = mhla_attention(q, k, v, mixing, block_size=8, form=form)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            assert torch.equal(mhla_attention(q, k, v, mixing, block_size=8, form=form), plain)


def test_the_cheaper_form_is_chosen() -> None:
    """Few keys are read pair by pair. Many are summarized, and then the work grows with the sum of the lengths."""
    assert cheapest_cross_form((64, 16), (4, 1), 64, 64) == "parallel"
    assert cheapest_cross_form((4096, 1024), (64, 16), 64, 64) == "chunked"
    assert cheapest_cross_form((64, 4096), (4, 64), 64, 64, backend="triton") == "parallel"
    assert cheapest_cross_form((32768, 32768), (128, 128), 64, 64, backend="triton") == "chunked"
    limit_memory(1000)
    try:
        assert cheapest_cross_form((64, 16), (4, 1), 4, 4) == "chunked"
    finally:
        limit_memory(None)


KIND = CrossKind("chunked", "float32", 5, 3, True, True, True, True, "equal", "uneven", 16, 8, False)


@pytest.mark.parametrize("changed", [{}, {"form": "parallel", "layout": "packed", "key_layout": "packed"}], ids=str)
def test_trial_of_the_kernels(changed: dict[str, Any]) -> None:
    assert try_cross_kernels(KIND._replace(**changed), torch.device(DEVICE)).startswith("errors ")


@pytest.mark.parametrize(("chip", "dtype", "counts"), [(90, "bfloat16", [34, 66]), (80, "float32", [34])])
def test_every_set_of_mixing_tiles_has_a_trial(
    chip: int, dtype: str, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []

    def note(problem: CrossArguments, *_: Any) -> str:
        shapes.append(problem.coefficients[0].shape)
        return ""

    monkeypatch.setattr("mhla_kernels.triton_backend.cross.trial.chip_of", lambda _: chip)
    monkeypatch.setattr("mhla_kernels.triton_backend.cross.trial.compare_problem", note)
    try_cross_kernels(KIND._replace(dtype=dtype, many=True, block_size=1, key_block_size=1), torch.device(DEVICE))
    assert [max(shape) for shape in shapes] == counts


@pytest.mark.parametrize("terms", [0, 3], ids=["dense", "exponential"])
def test_pytorch_takes_over_from_kernels_that_fail(terms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from mhla_kernels.triton_backend.cross import fused

    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(fused, "sound_cross_kernels", lambda *_: f"cross-test-{terms}")
    monkeypatch.setattr("mhla_kernels.cross_attention.choose_backend", lambda *_: "triton")
    monkeypatch.setattr(launch, "forward", fail)
    monkeypatch.setattr(launch, "backward", fail)
    mixing = [torch.rand(2, terms), torch.rand(2, terms)] if terms else [torch.rand(2, 2, 2)]
    options: dict[str, Any] = {"block_size": 5, "key_block_size": 4, "query_mask": torch.arange(20)[None] != 3}
    options |= {"cu_seqlens": [0, 8, 8, 14, 20], "key_cu_seqlens": [0, 5, 5, 5, 13]}
    inputs = [*tensors(), *mixing]
    with pytest.warns(RuntimeWarning, match="no such kernel"):
        got = passes("auto chunked", inputs, slice(None), **options)
    monkeypatch.undo()
    for a, b in zip(got, passes("torch chunked", inputs, slice(None), **options), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_packed_sequences_on_a_grid_of_blocks() -> None:
    mixing = ExponentialMixing(torch.rand(3), torch.rand(3, 2), (2, 2))
    q, k, v = torch.rand(1, 32, 2, 4), torch.rand(1, 48, 2, 4), torch.randn(1, 48, 2, 3)
    options: dict[str, Any] = {
        "block_size": 4, "key_block_size": 6, "cu_seqlens": [0, 16, 32], "key_cu_seqlens": [0, 24, 48]
    }  # fmt: skip
    weights = attention_matrix(q, k, mixing, **options)
    assert not weights[..., :16, 24:].any()
    torch.testing.assert_close(
        torch.einsum("bhtj,bjhv->bthv", weights, v), mhla_attention(q, k, v, mixing, **options), rtol=1e-4, atol=1e-5
    )


def test_no_queries_have_no_weights() -> None:
    q, k, mixing = torch.rand(1, 0, 2, 4), torch.rand(1, 12, 2, 4), ExponentialMixing(torch.rand(2), torch.rand(2))
    assert attention_matrix(q, k, mixing, block_size=4, key_block_size=6).shape == (1, 2, 0, 12)


@pytest.mark.parametrize("causal", ["block", None])
def test_only_attention_to_all_keys(causal: Any) -> None:
    q, k = torch.rand(1, 8, 2, 4), torch.rand(1, 12, 2, 4)
    with pytest.raises(ValueError, match=f"causal={causal!r} is for self-attention"):
        mhla_attention(q, k, k, torch.rand(2, 2), block_size=4, key_block_size=6, causal=causal)


def test_bounds_without_an_axis_are_an_error() -> None:
    q, k = torch.rand(1, 8, 2, 4), torch.rand(1, 12, 2, 4)
    bounds = {"cu_seqlens": torch.tensor(8), "key_cu_seqlens": torch.tensor([0, 12])}
    with pytest.raises(ValueError, match="cu_seqlens must be a one-dimensional tensor of integers"):
        mhla_attention(q, k, k, torch.rand(2, 2), block_size=4, key_block_size=6, **bounds)


@pytest.mark.parametrize(
    ("form", "products"), [("parallel", 20 * 13 * (4 + 3)), ("chunked", (20 + 13 + 4 * 4) * 4 * 3)]
)
def test_operations_of_cross_kernels_are_counted(form: str, products: int) -> None:
    """Queries in four blocks, keys in four, two heads of widths 4 and 3."""
    inputs = [*tensors(), torch.rand(2, 4, 4)]
    with FlopCounterMode(display=False) as counter:
        mhla_attention(*inputs, block_size=5, key_block_size=4, form=form, backend="triton")
    assert counter.get_total_flops() == 2 * 2 * products
