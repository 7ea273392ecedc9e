"""Softmax near by joined with MHLA far away: values and gradients against every pair of tokens in float64, and the state."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from mhla_kernels import (
    ExponentialMixing,
    MHLAWindowState,
    mhla_window_attention,
    mhla_window_prefill,
    mhla_window_step,
    near_far,
    windowed_all,
)
from mhla_kernels.blocks import TokenLayout
from mhla_kernels.forms import parts
from mhla_kernels.mixing import MixingLike
from mhla_kernels.windowed_pairs import Forms, cheapest_forms
from torch import Tensor

SIZE = 4
SHIPPED = {name: getattr(near_far, name) for name in ("FEWEST_QUERIES", "FEWEST_TRAINED")}
WIDTH = {"value": 5}
"""Width of a value in this test; with 6, as wide as a key, flash attention of torch computes the near part."""


@pytest.fixture(autouse=True, params=["by scores", "by flash attention"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with both computations of the near part."""
    if request.param == "by flash attention":
        monkeypatch.setitem(WIDTH, "value", 6)
        monkeypatch.setattr(near_far, "FEWEST_QUERIES", 1)
        monkeypatch.setattr(near_far, "FEWEST_TRAINED", 1)
        monkeypatch.setattr(windowed_all, "GATHERED", 100)


@pytest.fixture(params=["in blocks", "near tokens by pairs", "by pairs"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute attention to all tokens in all forms, one batch row at a time."""
    forms = Forms(near=request.param != "in blocks", far=request.param == "by pairs")
    monkeypatch.setattr(windowed_all, "cheapest_forms", lambda *_: forms)
    monkeypatch.setattr(parts, "PART", 1)


def tensors(
    tokens: int, batch: int = 2, heads: int = 4, groups: int = 2, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Draw q, k, v, features of q and of k, and far weights."""
    torch.manual_seed(tokens)
    shapes = [(heads, 6), (groups, 6), (groups, WIDTH["value"]), (heads, 3), (heads, 3)]
    q, k, v, f, g = (torch.randn(batch, tokens, *shape, dtype=dtype) for shape in shapes)
    return [2 * q, k, v, f.exp(), g.exp(), torch.randn(batch, tokens, heads, dtype=dtype)]


def mixings(heads: int = 4, dtype: torch.dtype = torch.float64) -> dict[str, MixingLike]:
    torch.manual_seed(0)
    dense, per_head, amplitude = (
        torch.rand(*shape, dtype=torch.float64) for shape in ((32, 32), (heads, 32, 32), (2,))
    )
    decay = torch.tensor([0.05, 1.0], dtype=dtype)
    return {
        "dense": dense.to(dtype),
        "dense per head": per_head.to(dtype),
        "exponential": ExponentialMixing((amplitude + 0.1).to(dtype), decay),
    }


def by_pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    g: Tensor,
    far: Tensor,
    matrix: Tensor,
    sinks: int = 0,
    sink_q: Tensor | None = None,
) -> Tensor:
    """Compute the definition with a weight for each pair of tokens, by logarithms, so that no score overflows."""
    heads, tokens = q.shape[2], q.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    position = torch.arange(tokens)
    block = position // SIZE
    near = torch.einsum("bthd,bjhd->bhtj", q, k) * max(1, q.shape[-1]) ** -0.5
    if sink_q is not None:
        of_sinks = torch.einsum("bthd,bjhd->bhtj", sink_q, k) * q.shape[-1] ** -0.5
        near = torch.where(position < sinks, of_sinks, near)
    m = matrix[..., (block - 1).clamp(min=0)[:, None], block[None]]
    distant = far.transpose(1, 2)[..., None] + (m * torch.einsum("bthd,bjhd->bhtj", f, g)).log()
    logs = torch.where((block[None] >= block[:, None] - 1) | (position[None] < sinks), near, distant)
    logs = logs.masked_fill(position[None] > position[:, None], -torch.inf)
    return torch.einsum("bhtj,bjhv->bthv", logs.softmax(-1), v)


def matrix_of(mixing: MixingLike) -> Tensor:
    return mixing if isinstance(mixing, Tensor) else mixing.matrix(32)


@pytest.mark.parametrize("kind", mixings())
@pytest.mark.parametrize("tokens", [1, 3, 4, 7, 8, 9, 23, 64])
@pytest.mark.parametrize("sinks", [0, 1, 3, 4])
def test_every_pair_of_tokens(kind: str, tokens: int, sinks: int) -> None:
    mixing, inputs = mixings()[kind], tensors(tokens)
    options: dict[str, Any] = {"block_size": SIZE, "sinks": sinks}
    out = mhla_window_attention(*inputs[:5], mixing, far=inputs[5], **options)
    torch.testing.assert_close(out, by_pairs(*inputs, matrix_of(mixing), sinks), rtol=1e-10, atol=1e-10)
    single = [x.float() for x in inputs]
    narrow = mhla_window_attention(*single[:5], mixings(dtype=torch.float32)[kind], far=single[5], **options)
    torch.testing.assert_close(narrow.double(), out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", mixings())
@pytest.mark.parametrize("sinks", [0, 2])
def test_gradients(kind: str, sinks: int) -> None:
    mixing, inputs = mixings()[kind], tensors(19)
    learned = [
        x.requires_grad_() for x in (*inputs, *([mixing] if isinstance(mixing, Tensor) else mixing.tensors.values()))
    ]
    weight = torch.randn(2, 19, 4, WIDTH["value"], dtype=torch.float64)
    out = mhla_window_attention(*inputs[:5], mixing, block_size=SIZE, sinks=sinks, far=inputs[5])
    own = torch.autograd.grad((out * weight).sum(), learned)
    pairs = torch.autograd.grad((by_pairs(*inputs, matrix_of(mixing), sinks) * weight).sum(), learned)
    for mine, theirs in zip(own, pairs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


def test_scores_and_weights_that_overflow_alone() -> None:
    """Scores of several hundred, of either part, are joined by their logarithms, forward and backward."""
    for near, far in ((900.0, 0.0), (1.0, 800.0), (-900.0, -800.0), (900.0, 900.0)):
        inputs = [x.float() for x in tensors(23)]
        inputs[0], inputs[5] = inputs[0].abs() * near, inputs[5] + far
        mixing = mixings(dtype=torch.float32)["dense"]
        leaves = [x.requires_grad_() for x in inputs]
        out = mhla_window_attention(*leaves[:5], mixing, block_size=SIZE, far=leaves[5])
        exact = by_pairs(*(x.double() for x in leaves), mixing.double())
        torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)
        for gradient in torch.autograd.grad(out.sum(), leaves):
            assert gradient.isfinite().all()


def test_later_tokens_change_nothing() -> None:
    inputs, mixing = [x.float() for x in tensors(23)], mixings(dtype=torch.float32)["dense"]
    out = mhla_window_attention(*inputs[:5], mixing, block_size=SIZE, far=inputs[5])
    for token in (0, 3, 4, 11, 22):
        changed = [x.clone() for x in inputs]
        for x in changed[:5]:
            x[:, token:] = 1e30
        again = mhla_window_attention(*changed[:5], mixing, block_size=SIZE, far=inputs[5])
        assert torch.equal(again[:, :token], out[:, :token])


def test_keys_whose_scores_overflow_are_exact_for_those_that_see_them() -> None:
    inputs, mixing = [x.float() for x in tensors(23)], mixings(dtype=torch.float32)["dense"]
    inputs[1][:, 9] *= 1e37 / inputs[1][:, 9].abs().amax()
    inputs[0][:, 9:] = inputs[0][:, 9:].sign() * 1e-3
    out = mhla_window_attention(*inputs[:5], mixing, block_size=SIZE, far=inputs[5])
    exact = by_pairs(*(x.double() for x in inputs), mixing.double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)


def test_far_weights_that_almost_vanish_have_a_large_factor() -> None:
    inputs = [x.float() for x in tensors(23)]
    inputs[4] = inputs[4] * 1e-37
    matrix = torch.full((6, 6), 1e-2)
    far = torch.full_like(inputs[5], 100.0)
    out = mhla_window_attention(*inputs[:5], matrix, block_size=SIZE, far=far)
    exact = by_pairs(*(x.double() for x in (*inputs[:5], far)), matrix.double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_features_that_are_not_contiguous(sinks: int, causal: bool) -> None:
    inputs = tensors(23)
    strided = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in inputs[:5]]
    assert all(x.stride(-1) != 1 for x in strided)
    matrix = torch.rand(6, 6, dtype=torch.float64)
    out, plain = (
        mhla_window_attention(*x, matrix, block_size=SIZE, sinks=sinks, causal=causal) for x in (strided, inputs[:5])
    )
    torch.testing.assert_close(out, plain, rtol=1e-12, atol=1e-12)


def test_scores_are_stored_only_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in SHIPPED.items():
        monkeypatch.setattr(near_far, name, number)
    computed: list[bool] = []
    for name, with_flash in (("combine_scores", False), ("_with_flash", True)):
        function = getattr(near_far, name)
        monkeypatch.setattr(
            near_far, name, lambda *args, f=function, flash=with_flash: (computed.append(flash), f(*args))[1]
        )
    suits = WIDTH["value"] == 6
    for size, learned, flash in ((8, False, suits), (7, False, False), (64, True, suits), (63, True, False)):
        inputs = [x.float() for x in tensors(128)]
        computed.clear()
        mhla_window_attention(*[x.requires_grad_(learned) for x in inputs[:5]], torch.ones(19, 19), block_size=size)
        assert computed == [flash], size


@pytest.mark.parametrize("kind", mixings())
@pytest.mark.parametrize("sinks", [0, 3])
def test_packed_sequences_do_not_see_each_other(kind: str, sinks: int) -> None:
    bounds, mixing = [0, 9, 10, 10, 31], mixings()[kind]
    inputs = tensors(31, batch=1)
    options: dict[str, Any] = {"block_size": SIZE, "sinks": sinks, "cu_seqlens": bounds}
    out = mhla_window_attention(*inputs[:5], mixing, far=inputs[5], **options)
    for first, last in pairwise(bounds):
        part = [x[:, first:last] for x in inputs]
        exact = by_pairs(*part, matrix_of(mixing), sinks)
        torch.testing.assert_close(out[:, first:last], exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sinks", [0, 4])
def test_hidden_tokens_are_not_seen(sinks: int) -> None:
    inputs, mixing = tensors(23), mixings()["dense"]
    mask = torch.rand(2, 23) > 0.4
    mask[0, :6] = False
    mask[1, :4] = torch.tensor([True, False, True, False])
    options: dict[str, Any] = {"block_size": SIZE, "sinks": sinks, "key_mask": mask}
    out = mhla_window_attention(*inputs[:5], mixing, far=inputs[5], **options)
    spoiled = [torch.where(mask.view(2, 23, *[1] * (x.dim() - 2)), x, torch.nan) for x in inputs[:5]]
    again = mhla_window_attention(*spoiled[:1], *spoiled[1:5], mixing, far=inputs[5], **options)
    assert torch.equal(again, out)
    assert not out[~mask].any()
    q, k, v, f, g, far = inputs
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    block = torch.arange(23) // SIZE
    logs = torch.where(
        (block[None] >= block[:, None] - 1) | (torch.arange(23) < sinks),
        torch.einsum("bthd,bjhd->bhtj", q, k) * 6**-0.5,
        far.transpose(1, 2)[..., None]
        + (mixing[(block - 1).clamp(min=0)[:, None], block[None]] * torch.einsum("bthd,bjhd->bhtj", f, g)).log(),
    )
    seen = torch.ones(23, 23, dtype=torch.bool).tril() & mask[:, None, None]
    exact = torch.einsum("bhtj,bjhv->bthv", logs.masked_fill(~seen, -torch.inf).softmax(-1), v)
    torch.testing.assert_close(out[mask], exact[mask], rtol=1e-9, atol=1e-9)


def sink_queries(q: Tensor) -> Tensor:
    """Draw other queries of the shape of ``q``, for the sinks."""
    return torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", mixings())
@pytest.mark.parametrize("tokens", [3, 4, 8, 23])
@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_sinks_are_read_by_queries_of_their_own(kind: str, tokens: int, sinks: int) -> None:
    mixing, inputs = mixings()[kind], tensors(tokens)
    own = sink_queries(inputs[0])
    learned = [x.requires_grad_() for x in (*inputs, own)]
    out = mhla_window_attention(*inputs[:5], mixing, block_size=SIZE, sinks=sinks, far=inputs[5], sink_q=own)
    exact = by_pairs(*inputs, matrix_of(mixing), sinks, own)
    torch.testing.assert_close(out, exact, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(out)
    options: dict[str, Any] = {"materialize_grads": True}
    gradients = [torch.autograd.grad((x * weight).sum(), learned, **options) for x in (out, exact)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("sinks", [0, 2])
def test_second_derivatives_with_queries_for_the_sinks(sinks: int) -> None:
    mixing, inputs = mixings()["dense"], tensors(11, batch=1, heads=2, groups=1)
    own = sink_queries(inputs[0])

    def attend(q: Tensor, own: Tensor, k: Tensor) -> Tensor:
        rest = (k, *inputs[2:5])
        return mhla_window_attention(q, *rest, mixing, block_size=SIZE, sinks=sinks, far=inputs[5], sink_q=own)

    learned = tuple(x.requires_grad_() for x in (inputs[0], own, inputs[1]))
    assert torch.autograd.gradgradcheck(attend, learned, atol=1e-6, fast_mode=True)  # along random directions


def test_queries_for_the_sinks_of_packed_and_hidden_tokens() -> None:
    mixing, inputs = mixings()["dense"], tensors(31, batch=1)
    own, bounds = sink_queries(inputs[0]), [0, 9, 10, 31]
    options: dict[str, Any] = {"block_size": SIZE, "sinks": 3, "far": inputs[5], "sink_q": own}
    out = mhla_window_attention(*inputs[:5], mixing, **options, cu_seqlens=bounds)
    for first, last in pairwise(bounds):
        part, part_own = [x[:, first:last] for x in inputs], own[:, first:last]
        exact = by_pairs(*part, matrix_of(mixing), 3, part_own)
        torch.testing.assert_close(out[:, first:last], exact, rtol=1e-9, atol=1e-9)
    mask = torch.arange(31)[None] < 20
    spoiled = {**options, "sink_q": own.masked_fill(~mask[..., None, None], torch.nan).requires_grad_()}
    hidden = mhla_window_attention(*inputs[:5], mixing, **spoiled, key_mask=mask)
    exact = by_pairs(*(x[:, :20] for x in inputs), matrix_of(mixing), 3, own[:, :20])
    torch.testing.assert_close(hidden[:, :20], exact, rtol=1e-9, atol=1e-9)
    assert torch.autograd.grad(hidden.sum(), spoiled["sink_q"])[0].isfinite().all()


def test_queries_for_the_sinks_with_very_large_numbers() -> None:
    """Flash attention cannot compute these rows; the others stay as they are, to the last bit."""
    mixing, inputs = mixings(dtype=torch.float32)["dense"], [x.float() for x in tensors(23)]
    own = sink_queries(inputs[0])
    options: dict[str, Any] = {"block_size": SIZE, "sinks": 2, "far": inputs[5]}
    usual = mhla_window_attention(*inputs[:5], mixing, **options, sink_q=own)
    large = own.clone()
    large[:, 20] *= 1e30
    out = mhla_window_attention(*inputs[:5], mixing, **options, sink_q=large)
    others = torch.arange(23) != 20
    assert torch.equal(out[:, others], usual[:, others])
    exact = by_pairs(*(x.double() for x in inputs), mixing.double(), 2, large.double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-4)


def run(
    inputs: list[Tensor], mixing: MixingLike, cuts: list[Any], sinks: int = 0, own: Tensor | None = None
) -> tuple[Tensor, MHLAWindowState]:
    """Compute outputs ``[B, N, H, V]`` of a sequence that is read in parts, each a number of tokens or a list of them."""
    inputs = inputs if own is None else [*inputs, own]
    batch = len(inputs[0])
    done, state, outs = [0] * batch, None, [[] for _ in range(batch)]
    options: dict[str, Any] = {"block_size": SIZE, "sinks": sinks}
    for cut in cuts:
        counts = cut if isinstance(cut, list) else [cut] * batch
        width = max(counts)
        part = [torch.full((batch, width, *x.shape[2:]), torch.nan, dtype=x.dtype) for x in inputs]
        for row, count in enumerate(counts):
            for x, whole in zip(part, inputs, strict=True):
                x[row, :count] = whole[row, done[row] : done[row] + count]
        if state is not None and counts == [1] * batch:
            options["sink_q"] = None if own is None else part[6][:, 0]
            step, state = mhla_window_step(*(x[:, 0] for x in part[:5]), mixing, state, far=part[5][:, 0], **options)
            out = step[:, None]
        else:
            part[5] = part[5].nan_to_num()
            options["sink_q"] = None if own is None else part[6]
            out, state = mhla_window_prefill(*part[:5], mixing, far=part[5], lengths=counts, state=state, **options)
        for row, count in enumerate(counts):
            outs[row].append(out[row, :count])
            assert not out[row, count:].any()
            done[row] += count
    assert state is not None
    assert list(state.lengths) == done
    return torch.nn.utils.rnn.pad_sequence([torch.cat(row) for row in outs], batch_first=True), state


CUTS: list[list[Any]] = [
    [23],
    [1] * 23,
    [4, 4, 4, 4, 7],
    [5, 1, 1, 1, 8, 7],
    [9, 14],
    [3, 1, 1, 1, 1, 16],
    [[3, 8], [1, 1], [5, 0], [0, 9], [14, 5]],
    [[0, 4], [9, 1], [1, 1], [1, 1], [12, 16]],
    [[4, 8], [0, 1], [1, 0], [18, 14]],
]


@pytest.mark.parametrize("kind", mixings())
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_a_sequence_may_be_cut_anywhere(kind: str, cuts: list[Any], sinks: int) -> None:
    inputs, mixing = tensors(23), mixings()[kind]
    out, state = run(inputs, mixing, cuts, sinks)
    torch.testing.assert_close(out, by_pairs(*inputs, matrix_of(mixing), sinks), rtol=1e-9, atol=1e-9)
    for name, tensor in run(inputs, mixing, [23], sinks)[1].tensors.items():
        kept = state.tensors[name]
        if name == "finished":  # with room for more, perhaps
            kept, tensor = (x[:, :, : min(kept.shape[2], tensor.shape[2])] for x in (kept, tensor))
        torch.testing.assert_close(kept, tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_queries_for_the_sinks_of_a_sequence_in_parts(cuts: list[Any], sinks: int) -> None:
    inputs, mixing = tensors(23), mixings()["exponential"]
    own = sink_queries(inputs[0])
    out, _ = run(inputs, mixing, cuts, sinks, own)
    torch.testing.assert_close(out, by_pairs(*inputs, matrix_of(mixing), sinks, own), rtol=1e-9, atol=1e-9)


def test_a_step_changes_the_old_state_only_if_it_may() -> None:
    inputs, mixing = tensors(9), mixings()["exponential"]
    _, state = mhla_window_prefill(*(x[:, :8] for x in inputs[:5]), mixing, block_size=SIZE, far=inputs[5][:, :8])
    kept = {name: x.clone() for name, x in state.tensors.items()}
    last = [x[:, 8] for x in inputs]
    first, _ = mhla_window_step(*last[:5], mixing, state, block_size=SIZE, far=last[5])
    assert all(torch.equal(state.tensors[name], x) for name, x in kept.items())
    again, _ = mhla_window_step(*last[:5], mixing, state, block_size=SIZE, far=last[5], donate_state=True)
    assert torch.equal(first, again)
    other = mhla_window_prefill(
        *(x[[1, 0, 1], :8] for x in inputs[:5]), mixing, block_size=SIZE, far=inputs[5][[1, 0, 1], :8]
    )
    chosen = mhla_window_prefill(*(x[:, :8] for x in inputs[:5]), mixing, block_size=SIZE, far=inputs[5][:, :8])[
        1
    ].select([1, 0, 1])
    assert all(torch.equal(other[1].tensors[name], x) for name, x in chosen.tensors.items())


def test_steps_fill_the_last_block_that_mixing_covers() -> None:
    inputs, mixing = tensors(25), mixings()["dense"][:6, :6]
    covered = [x[:, :24] for x in inputs]
    want = mhla_window_attention(*covered[:5], mixing, block_size=SIZE, far=covered[5])
    _, state = mhla_window_prefill(*(x[:, :23] for x in inputs[:5]), mixing, block_size=SIZE, far=inputs[5][:, :23])
    out, state = mhla_window_step(*(x[:, 23] for x in inputs[:5]), mixing, state, block_size=SIZE, far=inputs[5][:, 23])
    torch.testing.assert_close(out, want[:, 23])
    with pytest.raises(ValueError, match="25 tokens with block_size=4 make 7 blocks, but mixing is for 6 at most"):
        mhla_window_step(*(x[:, 24] for x in inputs[:5]), mixing, state, block_size=SIZE)


def test_the_state_does_not_grow() -> None:
    inputs, mixing = tensors(64), mixings()["exponential"]
    sizes = {run([x[:, :n] for x in inputs], mixing, [n])[1].bytes for n in (9, 23, 64)}
    assert len(sizes) == 1


def test_nothing_to_attend_to() -> None:
    for shape in ((0, 5), (2, 0)):
        inputs = [x[: shape[0], : shape[1]].requires_grad_() for x in tensors(5)]
        assert mhla_window_attention(*inputs[:5], mixings()["dense"], block_size=SIZE).shape == (
            *shape,
            4,
            WIDTH["value"],
        )


@pytest.mark.parametrize("empty", ["keys", "features", "keys and features"])
@pytest.mark.parametrize("kind", mixings())
@pytest.mark.parametrize("sinks", [0, 2])
def test_keys_and_features_without_entries(empty: str, kind: str, sinks: int) -> None:
    """Without keys, all near tokens have the same weight; without features, far tokens have none."""
    mixing, inputs = mixings()[kind], tensors(19)
    if "keys" in empty:
        inputs[:2] = [x[..., :0] for x in inputs[:2]]
    if "features" in empty:
        inputs[3:5] = [x[..., :0] for x in inputs[3:5]]
    options: dict[str, Any] = {"block_size": SIZE, "sinks": sinks}
    want = by_pairs(*inputs, matrix_of(mixing), sinks)
    out = mhla_window_attention(*inputs[:5], mixing, far=inputs[5], **options)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(run(inputs, mixing, [6, 1, 5, 1, 1, 5], sinks)[0], want, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        matrix = mixing[..., :5, :5] if isinstance(mixing, Tensor) else mixing
        all_tokens = mhla_window_attention(*inputs[:5], matrix, far=inputs[5], causal=False, **options)
    assert all_tokens.isfinite().all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_features": torch.ones(2, 9, 4)}, "q_features has shape"),
        ({"k_features": torch.ones(2, 9, 2, 3)}, "k_features has shape"),
        ({"k": torch.ones(2, 9, 3, 6)}, "a divisor of H"),
        ({"mixing": torch.rand(2, 2)}, "mixing"),
        ({"block_size": 0}, "block_size"),
        ({"sinks": SIZE + 1}, "sinks=5 must be an integer from 0 to the size of the first block, 4"),
        ({"sinks": -1}, "sinks=-1"),
        ({"sinks": 1.5}, "sinks=1.5"),
        ({"block_grid": (3,)}, "is for attention to all tokens"),
        ({"block_grid": (2, 2), "causal": False}, "3 blocks, which are not the 4"),
        ({"block_grid": (3,), "causal": False, "sinks": 1}, "3 blocks, which are not the 3 of .* and one of sinks"),
        ({"block_size": None, "block_offsets": (0, 2, 9), "causal": False, "sinks": 3}, "sinks=3"),
        (
            {"block_size": None, "block_offsets": (0, 2, 9), "causal": False, "sinks": 1, "block_grid": (1,)},
            "the first block has 2 tokens",
        ),
        ({"cu_seqlens": (0, 9), "causal": False}, "cu_seqlens is for causal attention"),
        ({"sink_q": torch.ones(2, 9, 4, 6), "causal": False}, "sink_q is for causal attention"),
        ({"sink_q": torch.ones(2, 8, 4, 6)}, r"sink_q is torch.float32 \[2, 8, 4, 6\] on cpu; it must be like q"),
        ({"sink_q": torch.ones(2, 9, 4, 6, dtype=torch.float64)}, "sink_q is torch.float64"),
        ({"k_features": torch.ones(2, 9, 4, 3, device="meta")}, "k_features is on 'meta'"),
        (
            {"block_size": 2, "block_grid": (2, 2), "sinks": 1, "causal": False, "mixing": torch.rand(5, 5)},
            "mixing is for 5 blocks; .*, it must be for the 4",
        ),
        ({"block_size": 2, "block_grid": (2, 2), "sinks": 1, "causal": False, "mixing": torch.rand(4)}, "mixing"),
        (
            {
                "block_size": 2,
                "block_grid": (2, 2),
                "sinks": 1,
                "causal": False,
                "mixing": ExponentialMixing(torch.ones(1), -torch.ones(1)),
            },
            "decay",
        ),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], words: str) -> None:
    q, k, v, f, g, _ = (x.float() for x in tensors(9))
    mixing = mixings(dtype=torch.float32)["exponential" if "causal" in change else "dense"]
    options = {"q": q, "k": k, "v": v, "q_features": f, "k_features": g, "mixing": mixing, "block_size": SIZE}
    with pytest.raises(ValueError, match=words):
        mhla_window_attention(**options | change)


def test_a_state_of_other_blocks_is_refused() -> None:
    inputs, mixing = tensors(9), mixings()["exponential"]
    _, state = mhla_window_prefill(*inputs[:5], mixing, block_size=SIZE)
    with pytest.raises(ValueError, match="was made with"):
        mhla_window_prefill(*inputs[:5], mixing, block_size=8, state=state)
    with pytest.raises(ValueError, match="sinks=2"):
        mhla_window_prefill(*inputs[:5], mixing, block_size=SIZE, sinks=2, state=state)
    with pytest.raises(ValueError, match="blocks, but mixing is for 2"):
        mhla_window_prefill(*(x.float() for x in inputs[:5]), torch.rand(2, 2), block_size=SIZE)


def test_far_tokens_that_weigh_next_to_nothing_have_gradients() -> None:
    """Sums below the smallest normal number, whose inverse overflows."""
    for size in (1e-15, 1e-19, 1e-20, 1e-22):
        leaves = [x.float() for x in tensors(24)]
        for feature in leaves[3:5]:
            feature.fill_(size)
        leaves = [x.requires_grad_() for x in leaves]
        out = mhla_window_attention(*leaves[:5], torch.ones(6, 6), block_size=SIZE)
        for gradient in torch.autograd.grad(out.square().sum(), leaves[:5]):
            assert gradient.isfinite().all()


def by_weights(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, g: Tensor, far: Tensor, matrix: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Compute the definition without logarithms, for weights of zero."""
    tokens = q.shape[1]
    position = torch.arange(tokens)
    block = position // SIZE
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    near = (torch.einsum("bthd,bjhd->bhtj", q, k) * q.shape[-1] ** -0.5).exp()
    m = matrix[..., (block - 1).clamp(min=0)[:, None], block[None]]
    distant = far.transpose(1, 2)[..., None].exp() * m * torch.einsum("bthd,bjhd->bhtj", f, g)
    weights = torch.where(block[None] >= block[:, None] - 1, near, distant).tril()
    if mask is not None:
        weights = weights * mask[:, None, None]
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bhtj,bjhv->bthv", weights / total.masked_fill(total == 0, 1), v)
    return out if mask is None else out * mask[..., None, None]


def derivatives(function: Any, leaves: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the first derivatives of a sum of squares, and the derivatives of the sum of the first ones."""
    first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(x.sum() for x in first), leaves, allow_unused=True)
    return [x.detach() for x in first], [
        torch.zeros_like(leaf) if x is None else x for leaf, x in zip(leaves, second, strict=True)
    ]


ZEROS: dict[str, Any] = {
    "all": lambda m: torch.zeros_like(m),
    "one": lambda m: torch.where(torch.arange(32)[:, None] * 32 + torch.arange(32) == 64, 0, m),
    "a row": lambda m: torch.where(torch.arange(32)[:, None] == 3, 0, m),
    "a column": lambda m: torch.where(torch.arange(32) == 1, 0, m),
    "none": lambda m: m,
}


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("far", [-3.0, 0.0, 5.0])
def test_coefficients_of_zero_have_gradients(zeros: str, far: float) -> None:
    inputs, matrix = tensors(23), ZEROS[zeros](mixings()["dense"])
    inputs[5] = inputs[5] + far
    leaves = [x.requires_grad_() for x in (*inputs, matrix)]
    own = derivatives(lambda *x: mhla_window_attention(*x[:5], x[6], block_size=SIZE, far=x[5]), leaves)
    wanted = derivatives(by_weights, leaves)
    for mine, theirs in zip(own, wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)
    assert own[0][6][2, 1] != 0


def test_exponentials_of_amplitude_zero_and_features_of_zero_have_gradients() -> None:
    inputs = tensors(23)
    for feature in inputs[3:5]:
        feature[:, ::3] = 0
    amplitude, decay = torch.zeros(2, dtype=torch.float64), torch.rand(2, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (*inputs, amplitude, decay)]
    own = derivatives(
        lambda *x: mhla_window_attention(*x[:5], ExponentialMixing(*x[6:]), block_size=SIZE, far=x[5]), leaves
    )
    wanted = derivatives(lambda *x: by_weights(*x[:6], ExponentialMixing(*x[6:]).matrix(32)), leaves)
    for mine, theirs in zip(own, wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)
    assert own[0][6].all()


@pytest.mark.parametrize("hidden", [False, True], ids=["near tokens", "no near tokens"])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e-9, 1e-11, 1e-13])
def test_second_derivatives_of_small_features(size: float, hidden: bool) -> None:
    """In float32 against float64; where near tokens are hidden far ones are all there is, whatever they weigh."""
    inputs = tensors(24)
    inputs[3:5] = [x * size for x in inputs[3:5]]
    mask = torch.arange(24).expand(2, -1) // SIZE % 3 == 0 if hidden else None
    matrix = mixings()["dense"]
    leaves = [x.requires_grad_() for x in (*inputs, matrix)]
    narrow = [x.detach().float().requires_grad_() for x in leaves]
    own = derivatives(lambda *x: mhla_window_attention(*x[:5], x[6], block_size=SIZE, far=x[5], key_mask=mask), narrow)
    wanted = derivatives(lambda *x: by_weights(*x, mask), leaves)
    for index, (mine, theirs) in enumerate(zip(own, wanted, strict=True)):
        for a, b in zip(mine, theirs, strict=True):
            assert a.isfinite().all()
            if index == 0 or not hidden:
                torch.testing.assert_close(a.double(), b, rtol=2e-3, atol=2e-4 * float(b.abs().max()) + 1e-12)


def test_far_weights_that_overflow_beside_coefficients_of_zero() -> None:
    leaves = [x.float() for x in tensors(24)]
    leaves[5] = leaves[5] + 800
    leaves = [x.requires_grad_() for x in leaves]
    matrix = torch.zeros(6, 6, requires_grad=True)
    out = mhla_window_attention(*leaves[:5], matrix, block_size=SIZE, far=leaves[5])
    near = by_weights(*(x.double() for x in leaves[:5]), torch.zeros_like(leaves[5]), torch.zeros(6, 6))
    torch.testing.assert_close(out.double(), near, rtol=1e-4, atol=1e-4)
    for gradient in torch.autograd.grad(out.square().sum(), [*leaves, matrix]):
        assert gradient.isfinite().all()


GRIDS: dict[str, dict[str, Any]] = {
    "sequence": {"block_size": 4, "tokens": 23},
    "one block": {"block_size": 4, "tokens": 3},
    "two blocks": {"block_size": 4, "tokens": 8},
    "sequence with a sink": {"block_size": 4, "tokens": 23, "sinks": 1},
    "sequence with a block of sinks": {"block_size": 4, "tokens": 30, "sinks": 4},
    "uneven sequence": {"block_offsets": (0, 2, 7, 8, 12, 13), "sinks": 2},
    "image": {"block_size": 3, "tokens": 36, "block_grid": (3, 4)},
    "uneven image": {"block_offsets": (0, *range(2, 34, 3), 37), "block_grid": (3, 4)},
    "image with class token": {"block_offsets": (0, *range(1, 36, 3), 36), "block_grid": (3, 4), "sinks": 1},
    "image with class token and registers": {"block_size": 2, "tokens": 32, "block_grid": (5, 3), "sinks": 2},
    "bands": {"block_size": 3, "tokens": 18, "block_grid": (6, 1)},
    "video": {"block_size": 2, "tokens": 54, "block_grid": (3, 3, 3)},
}


def both_ways(
    inputs: list[Tensor], mixing: MixingLike, case: dict[str, Any], mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention to all tokens by the operator, and by its definition with a weight for each pair of tokens."""
    options = {name: value for name, value in case.items() if name != "tokens"}
    q, k, v, f, g, far = inputs
    tokens, sinks = q.shape[1], case.get("sinks", 0)
    offsets = case.get("block_offsets") or (*range(0, tokens, case["block_size"]), tokens)
    has_lead = "block_grid" in case and sinks > 0
    number = len(offsets) - 1 - has_lead
    if isinstance(mixing, Tensor):
        mixing = mixing[..., :number, :number]
    out = mhla_window_attention(*inputs[:5], mixing, far=far, causal=False, key_mask=mask, **options)
    block = torch.cat([torch.full((last - first,), i) for i, (first, last) in enumerate(pairwise(offsets))])
    if "block_grid" in case:  # the block of sinks is far from all others
        axes = torch.meshgrid(*(torch.arange(length) for length in case["block_grid"]), indexing="ij")
        places = torch.stack([axis.flatten() for axis in axes], -1)
        place = torch.cat([places[:1] - 9, places])[block] if sinks else places[block]
    else:
        place = block[:, None]
    near = ((place[:, None] - place[None]).abs() <= 1).all(-1)
    near |= (torch.arange(tokens) < sinks) | (torch.arange(tokens) < sinks)[:, None]
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    m = torch.nn.functional.pad(
        matrix_of(mixing)[..., :number, :number], (int(has_lead), 0, int(has_lead), 0), value=1.0
    )
    m = m[..., block[:, None], block[None]]
    distant = far.transpose(1, 2)[..., None] + (m * torch.einsum("bthd,bjhd->bhtj", f, g)).log()
    logs = torch.where(near, torch.einsum("bthd,bjhd->bhtj", q, k) * q.shape[-1] ** -0.5, distant)
    if mask is not None:
        logs = logs.masked_fill(~mask[:, None, None], -torch.inf)
    exact = torch.einsum("bhtj,bjhv->bthv", logs.softmax(-1), v)
    return out, exact if mask is None else torch.where(mask[..., None, None], exact, 0)


def tokens_of(case: dict[str, Any]) -> int:
    return case["tokens"] if "tokens" in case else case["block_offsets"][-1]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("kind", mixings())
@pytest.mark.parametrize("case", GRIDS)
def test_attention_to_all_tokens(kind: str, case: str) -> None:
    mixing, inputs = mixings()[kind], tensors(tokens_of(GRIDS[case]))
    out, exact = both_ways(inputs, mixing, GRIDS[case])
    torch.testing.assert_close(out, exact, rtol=1e-10, atol=1e-10)
    mask = torch.rand(2, len(inputs[0][0])) > 0.4
    mask[:, 1] = True
    with torch.no_grad():
        out, exact = both_ways(inputs, mixing, GRIDS[case], mask)
    torch.testing.assert_close(out, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("kind", mixings())
@pytest.mark.parametrize("case", ["sequence with a sink", "image with class token", "uneven image"])
def test_gradients_of_attention_to_all_tokens(kind: str, case: str) -> None:
    mixing, inputs = mixings()[kind], tensors(tokens_of(GRIDS[case]))
    learned = [*inputs, *([mixing] if isinstance(mixing, Tensor) else mixing.tensors.values())]
    for x in learned:
        x.requires_grad_()
    out, exact = both_ways(inputs, mixing, GRIDS[case])
    weight = torch.randn_like(out)
    own, pairs = (torch.autograd.grad((x * weight).sum(), learned) for x in (out, exact))
    for mine, theirs in zip(own, pairs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.usefixtures("form")
def test_all_tokens_in_half_precision_and_hidden_completely() -> None:
    inputs = [x.to(torch.bfloat16) for x in tensors(23)]
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[0] = False
    options: dict[str, Any] = {"block_size": SIZE, "sinks": 2, "causal": False, "key_mask": mask}
    leaves = [x.requires_grad_() for x in inputs]
    mixing = mixings(dtype=torch.float32)["exponential"]
    out = mhla_window_attention(*leaves[:5], mixing, far=leaves[5], **options)
    assert out.dtype == torch.bfloat16
    assert not out[0].any()
    for gradient in torch.autograd.grad(out.float().square().sum(), leaves):
        assert gradient.isfinite().all()


def test_pairs_of_tokens_are_computed_where_they_cost_less() -> None:
    """Images of 257, 1,370 and 5,330 tokens with a class token."""
    for tokens, blocks, *expected in ((257, 4, True, True), (1370, 4, True, False), (5330, 8, False, False)):
        offsets = (0, *range(1, tokens, -(-(tokens - 1) // blocks**2)), tokens)
        layout = TokenLayout(tokens, 0, offsets)
        assert list(cheapest_forms(layout, (blocks, blocks), 64, 128, 64)) == expected, tokens


@pytest.mark.usefixtures("form")
def test_features_of_near_tokens_that_overflow_together_do_not_matter() -> None:
    """The product of the features of two neighbors is infinite, and that of all others is not."""
    inputs = [x.float() for x in tensors(23)]
    options: dict[str, Any] = {"block_size": SIZE, "causal": False}
    mixing = torch.ones(6, 6)
    features, keys = inputs[3].clone(), inputs[4].clone()
    features[:, 9], keys[:, 9] = 1e25, 1e25
    inputs[3:5] = features, keys
    out = mhla_window_attention(*inputs[:5], mixing, far=inputs[5], **options)
    near_nine = torch.arange(23) // SIZE
    sees = (near_nine - 2).abs() <= 1
    keys[:, 9] = 1
    exact = mhla_window_attention(*inputs[:3], features, keys, mixing, far=inputs[5], **options)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, sees], exact[:, sees], rtol=1e-4, atol=1e-4)


def test_a_query_in_padding_that_is_nan_spoils_no_gradient() -> None:
    inputs = [x.float() for x in tensors(11)]
    mixing = mixings(dtype=torch.float32)["exponential"]

    def gradients() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out, _ = mhla_window_prefill(
            *leaves[:5],
            mixing,
            block_size=SIZE,
            far=leaves[5],
            lengths=torch.tensor([11, 6]),
            sinks=1,
            sink_q=leaves[0],
        )
        return list(torch.autograd.grad(out[0].square().sum() + out[1, :6].square().sum(), leaves))

    want = gradients()
    for x in inputs:
        x[1, 6:] = torch.nan
    for got, expected in zip(gradients(), want, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("causal", [True, False])
def test_a_hidden_query_that_is_nan_spoils_no_gradient(causal: bool) -> None:
    inputs = [x.float() for x in tensors(23)]
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[:, 7] = False
    options: dict[str, Any] = {"block_size": SIZE, "causal": causal, "key_mask": mask}

    def gradients() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = mhla_window_attention(*leaves[:5], torch.ones(6, 6), far=leaves[5], **options)
        return list(torch.autograd.grad(out.square().sum(), leaves))

    want = gradients()
    for x in inputs:
        x[:, 7] = torch.nan
    for got, expected in zip(gradients(), want, strict=True):
        torch.testing.assert_close(got, expected)
