"""States of layers in generation: gradients through them, inference mode, and states of different kinds of attention.

Bounds of packed sequences are here too: each kind that takes them rejects those that are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_mhla.attention import Attention, AttentionConfig, BlockLayout, build_attention
from lightning_mhla.attention.inputs import AttentionInputs
from lightning_mhla.attention.positions import sequence_positions
from lightning_mhla.recurrence import gated_delta_rule, gated_linear_attention

LAYERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax with rotary positions": {"rotary": True, "key_value_heads": 1},
    "mhla": {},
    "mhla of exponentials": {"mixing": "exponential"},
    "linear": {},
    "mhla_window": {"options": {"sinks": 1}},
    "retention": {},
    "gla": {},
    "gated_deltanet": {},
    "mamba2": {},
    "gated_conv": {},
}
"""Options of a layer by a name that begins with its kind."""


def layer_of(name: str, causal: Any = True) -> Attention:
    torch.manual_seed(0)
    options = dict(LAYERS[name])
    heads = {"key_value_heads": options.pop("key_value_heads")} if "key_value_heads" in options else {}
    config = AttentionConfig(kind=name.split()[0], **options)
    return build_attention(config, 16, 2, BlockLayout((24,), block_size=4), causal=causal, **heads)


def in_pieces(layer: Attention, x: Tensor, pieces: Sequence[int], modes: str) -> Tensor:
    """Generate pieces one after the other: i in inference mode, n without and g with gradients."""
    scopes = {"i": torch.inference_mode, "n": torch.no_grad, "g": torch.enable_grad}
    state, parts = None, []
    for part, mode in zip(x.split(pieces, 1), modes, strict=True):
        with scopes[mode]():
            out, state = layer.next_tokens(part, state, [part.shape[1]] * len(x))
        parts.append(out)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("modes", ["iinnnn", "niniin", "ininin", "iiiggg", "nngiin"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_state_of_inference_mode_is_continued_outside_it(name: str, modes: str) -> None:
    layer, x = layer_of(name).requires_grad_(requires_grad=False), torch.randn(2, 20, 16)
    torch.testing.assert_close(in_pieces(layer, x, [8, 1, 1, 5, 1, 4], modes), layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pieces", [[8, 1, 1, 1, 1], [4, 4, 4], [1] * 12, [5, 7]], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_through_a_state_are_those_of_one_pass(name: str, pieces: list[int]) -> None:
    layer, x = layer_of(name).double(), torch.randn(2, 12, 16, dtype=torch.float64, requires_grad=True)
    cotangent, leaves = torch.randn(2, 12, 16, dtype=torch.float64), [x, *layer.parameters()]
    want = torch.autograd.grad(layer(x), leaves, cotangent)
    got = torch.autograd.grad(in_pieces(layer, x, pieces, "g" * len(pieces)), leaves, cotangent)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_through_rows_of_different_lengths(name: str) -> None:
    layer, x = layer_of(name).double(), torch.randn(2, 12, 16, dtype=torch.float64, requires_grad=True)
    first, state = layer.next_tokens(x[:, :7], None, [7, 3])
    rest = torch.stack([x[0, 7:12], x[1, 3:8]])
    second, _ = layer.next_tokens(rest, state, [5, 5])
    (got,) = torch.autograd.grad(first[0].sum() + first[1, :3].sum() + second.sum(), x)
    (want,) = torch.autograd.grad(layer(x[:1]).sum() + layer(x[1:, :8]).sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_steps_without_gradients_do_not_change_what_a_backward_pass_needs() -> None:
    layer, x = layer_of("softmax"), torch.randn(1, 12, 16)
    first, state = layer.next_tokens(x[:, :8], None, [8])
    out, state = layer.next_tokens(x[:, 8:9], state, [1])
    with torch.no_grad():
        for t in range(9, 12):
            _, state = layer.next_tokens(x[:, t : t + 1], state, [1])
    (got,) = torch.autograd.grad(first.sum() + out.sum(), layer.qkv.weight)
    (want,) = torch.autograd.grad(layer(x[:, :9]).sum(), layer.qkv.weight)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_queries_have_gradients_if_keys_and_values_have_none() -> None:
    """The buffers need no gradient, but a backward pass reads them."""
    layer, x, state, outs = layer_of("softmax"), torch.randn(1, 12, 16), None, []
    q, k, v = torch.randn(3, 1, 12, 2, 8).unbind()
    q.requires_grad_()
    for first, last in ((0, 8), (8, 9), (9, 10), (10, 12)):
        part = slice(first, last)
        inputs = AttentionInputs(x[:, part], q[:, part], k[:, part], v[:, part])
        out, state = layer.continue_from(inputs, state, [last - first])
        outs.append(out)
    (got,) = torch.autograd.grad(torch.cat(outs, 1).sum(), q)
    (want,) = torch.autograd.grad(layer.attend(AttentionInputs(x, q, k, v)).sum(), q)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_steps_without_gradients_write_into_the_same_buffers() -> None:
    layer, x = layer_of("softmax"), torch.randn(1, 24, 16)
    with torch.no_grad():
        _, state = layer.next_tokens(x[:, :8], None, [8])
        _, state = layer.next_tokens(x[:, 8:9], state, [1])
        for t in range(9, 16):
            _, after = layer.next_tokens(x[:, t : t + 1], state, [1])
            assert after.keys.data_ptr() == state.keys.data_ptr()
            assert after.values.data_ptr() == state.values.data_ptr()
            state = after


PAIRS = [(a, b) for a in LAYERS for b in LAYERS if a.split()[0] != b.split()[0]]


@pytest.mark.parametrize(("name", "other"), PAIRS, ids="-".join)
def test_a_state_of_another_kind_is_rejected(name: str, other: str) -> None:
    layer, x = layer_of(name), torch.randn(2, 5, 16)
    _, state = layer_of(other).next_tokens(x[:, :4], None, [4, 4])
    with pytest.raises(ValueError, match=r"the state is of (kind|MHLA)|state is \w+, not MHLA|the state was made with"):
        layer.next_tokens(x[:, 4:], state, [1, 1])


@pytest.mark.parametrize("counts", [[4.0, 4], [True, 4], [None, 4], 4, None, torch.tensor([4.0, 4.0]), "44"], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_numbers_of_new_tokens_are_integers(name: str, counts: Any) -> None:
    with pytest.raises(ValueError, match=r"counts=.* must be 2 numbers from 0 to 4"):
        layer_of(name).next_tokens(torch.randn(2, 4, 16), None, counts)


@pytest.mark.parametrize("name", LAYERS)
def test_numbers_of_new_tokens_may_be_those_of_torch_and_numpy(name: str) -> None:
    layer, x = layer_of(name), torch.randn(2, 5, 16)
    want, states = layer.next_tokens(x[:, :4], None, [4, 3])
    for counts in (torch.tensor([4, 3]), np.array([4, 3]), (np.int64(4), torch.tensor(3))):
        out, state = layer.next_tokens(x[:, :4], None, counts)
        assert torch.equal(out, want)
        assert state.lengths == states.lengths
        assert all(type(length) is int for length in state.lengths)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("causal", [1, np.True_], ids=repr)
def test_whatever_equals_true_is_causal(name: str, causal: Any) -> None:
    layer, x = layer_of(name, causal=causal), torch.randn(1, 12, 16)
    assert layer.causal is True
    torch.testing.assert_close(layer(x)[:, :6], layer(x[:, :6]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [[[True] * 8], np.ones((1, 8), bool)], ids=["list", "array"])
@pytest.mark.parametrize("name", LAYERS)
def test_masks_and_tokens_are_tensors(name: str, mask: Any) -> None:
    with pytest.raises(TypeError, match=r"key_mask is \w+; it must be a tensor"):
        layer_of(name)(torch.randn(1, 8, 16), mask)
    with pytest.raises(TypeError, match=r"x is \w+; it must be a tensor"):
        layer_of(name)(mask)


# Bounds of packed sequences

WRONG_BOUNDS: dict[str, Any] = {
    "falling": [0, 5, 3, 8],
    "short": [0, 5],
    "late": [1, 8],
    "long": [0, 3, 99],
    "negative": [0, -1, 8],
    "halves": torch.tensor([0, 2.5, 8]),
    "floats": [0, 2.0, 8],
    "none": [0, None, 8],
    "booleans": torch.tensor([False, True]),
    "two axes": torch.tensor([[0, 8]]),
    "one": [8],
    "a number": 8,
    "a tensor without axes": torch.tensor(8),
}


@pytest.mark.parametrize("bounds", WRONG_BOUNDS)
@pytest.mark.parametrize("name", LAYERS)
def test_bounds_of_packed_sequences_are_checked(name: str, bounds: str) -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        layer_of(name)(torch.randn(1, 8, 16), cu_seqlens=WRONG_BOUNDS[bounds])


@pytest.mark.parametrize("name", LAYERS)
def test_packed_sequences_are_in_one_row(name: str) -> None:
    layer, x = layer_of(name), torch.randn(1, 8, 16)
    with pytest.raises(ValueError, match="cu_seqlens"):
        layer(x.expand(2, 8, 16), cu_seqlens=[0, 3, 8])
    want = torch.cat([layer(x[:, :3]), layer(x[:, 3:])], 1)
    for bounds in ([0, 3, 8], (0, 3, 3, 8), torch.tensor([0, 3, 8]), torch.tensor([0, 3, 8], dtype=torch.int32)):
        torch.testing.assert_close(layer(x, cu_seqlens=bounds), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(x, cu_seqlens=np.array([0, 3, 8])), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bounds", WRONG_BOUNDS)
def test_recurrences_check_bounds(bounds: str) -> None:
    q, beta = torch.randn(1, 8, 2, 4), torch.rand(1, 8, 2)
    with pytest.raises(ValueError, match="cu_seqlens"):
        gated_linear_attention(q, q, q, -torch.rand(1, 8, 2, 4), cu_seqlens=WRONG_BOUNDS[bounds])
    with pytest.raises(ValueError, match="cu_seqlens"):
        gated_delta_rule(q, q, q, -beta, beta, cu_seqlens=WRONG_BOUNDS[bounds])


@pytest.mark.parametrize("bounds", ["halves", "floats", "booleans", "two axes", "a number"])
def test_positions_in_packed_sequences_take_integers(bounds: str) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens must be (a one-dimensional tensor of|at least two) integers"):
        sequence_positions(torch.randn(1, 8, 16), WRONG_BOUNDS[bounds])


def test_a_packed_convolution_compiles_into_one_graph() -> None:
    layer, x = layer_of("gated_conv"), torch.randn(1, 8, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for bounds in ([0, 3, 8], torch.tensor([0, 3, 8])):
        torch.testing.assert_close(compiled(x, cu_seqlens=bounds), layer(x, cu_seqlens=bounds))
