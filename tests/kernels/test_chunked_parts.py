"""The chunked form in parts: parts as small as one head, and pieces as small as a part of a block, against the definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from mhla_kernels import mhla_attention
from mhla_kernels.blocks import TokenLayout
from mhla_kernels.forms import attend as module
from mhla_kernels.forms.chunked_parts import _Call, pieces
from mhla_kernels.mixing import DenseMixing
from oracle import relative_error
from torch import Tensor
from torch.autograd import forward_ad


@pytest.fixture(params=[(1, 1), (1500, 30), (4000, 100), (10**6, 10**6)], ids=["one head", "heads", "rows", "all"])
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a part hold one head, some heads, some rows or all, and a piece one token, some tokens, some blocks or all."""
    for name, value in zip(("PART", "PIECE", "LEAST"), (*request.param, 1), strict=True):
        monkeypatch.setattr(f"mhla_kernels.forms.chunked_parts.{name}", value)
    monkeypatch.setattr(module, "SHORTEST", 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """List with an entry for each call of the form in parts."""
    calls: list[None] = []
    original = module.chunked_in_parts
    monkeypatch.setattr(module, "chunked_in_parts", lambda *arguments: calls.append(None) or original(*arguments))
    return calls


CASES: dict[str, dict[str, Any]] = {
    "equal blocks": {"block_size": 7},
    "shorter last block": {"block_size": 4},
    "class token": {"block_offsets": (0, 1, 7, 14)},
    "uneven blocks": {"block_offsets": (0, 2, 4, 9, 10, 14)},
    "one block": {"block_size": 20},
    "not normalized": {"block_size": 4, "normalize": False, "scale": 0.3},
    "hidden keys": {"block_size": 4, "key_mask": True},
    "feature map": {"block_offsets": (0, 1, 7, 14), "feature_map": "relu"},
    "feature map, not normalized": {"block_size": 4, "normalize": False, "feature_map": "relu"},
    "feature map, hidden keys": {"block_size": 4, "key_mask": True, "feature_map": "relu"},
}


@pytest.mark.parametrize("heads", [None, 4], ids=["shared", "by head"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_are_those_of_the_definition(
    case: str, heads: int | None, dtype: torch.dtype, part: None, calls: list[None]
) -> None:
    torch.manual_seed(0)
    options = dict(CASES[case])
    lowest = -0.5 if "feature_map" in options else 0.0
    q, k = torch.rand(5, 14, 4, 3) + lowest, torch.rand(5, 14, 2, 3) + lowest
    v = torch.randn(5, 14, 2, 5)
    offsets = options.get("block_offsets")
    blocks = len(offsets) - 1 if offsets else -(-14 // options["block_size"])
    mixing = torch.rand(*([] if heads is None else [heads]), blocks, blocks)
    if "key_mask" in options:
        options["key_mask"] = torch.rand(5, 14) > 0.3
    tensors = [x.to(dtype) for x in (q, k, v)]
    got = mhla_attention(*tensors, mixing, form="chunked", **options)
    want = mhla_attention(*(x.double() for x in (*tensors, mixing)), form="reference", **options)
    assert len(calls) == 1
    assert got.dtype == dtype
    bounds = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 5e-3}
    assert relative_error("", got.double(), want) < bounds[dtype]


def test_calls_that_it_computes(calls: list[None]) -> None:
    def computes(size: int, blocks: int, trained: bool = False, **options: Any) -> bool:
        q = torch.rand(1, size * blocks, 2, 4, requires_grad=trained)
        calls.clear()
        mhla_attention(q, q, q, torch.rand(blocks, blocks), block_size=size, form="chunked", **options)
        return bool(calls)

    assert computes(8, 4)
    assert computes(8, 16, feature_map="relu")
    assert computes(8, 4, normalize=False)
    assert not computes(7, 4)
    assert not computes(8, 4, trained=True)
    assert not computes(8, 4, causal=True)
    assert not computes(8, 4, causal="block")
    assert not computes(8, 4, cu_seqlens=(0, 32))
    with torch.no_grad():
        assert computes(8, 4, trained=True)


def test_with_and_without_gradients_the_outputs_agree() -> None:
    q, mixing = torch.randn(2, 64, 2, 16, requires_grad=True), torch.rand(4, 4)
    options: dict[str, Any] = {"block_size": 16, "form": "chunked", "feature_map": "relu"}
    out = mhla_attention(q, q, q, mixing, **options)
    with torch.no_grad():
        torch.testing.assert_close(mhla_attention(q, q, q, mixing, **options), out.detach())


def test_transformations_do_not_enter_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor) -> Tensor:
        return mhla_attention(q, k, v, mixing, block_size=8, form="chunked", feature_map="relu")

    leaves = [torch.randn(3, 32, 2, 4, dtype=torch.float64) for _ in range(3)] + [torch.rand(4, 4, dtype=torch.float64)]
    want = call(*leaves)
    monkeypatch.setattr(module, "chunked_in_parts", lambda *_: pytest.fail("in parts"))
    torch.testing.assert_close(torch.vmap(lambda *x: call(*(y[None] for y in x), leaves[3])[0])(*leaves[:3]), want)
    torch.testing.assert_close(torch.func.vjp(call, *leaves)[0], want)
    with forward_ad.dual_level():
        torch.testing.assert_close(
            forward_ad.unpack_dual(call(forward_ad.make_dual(leaves[0], leaves[0]), *leaves[1:]))[0], want
        )
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(*leaves), want)


def test_pieces_cover_every_token_once_and_in_order() -> None:
    for tokens, size, offsets in ((14, 4, None), (14, 20, None), (9, 0, (0, 1, 3, 5, 9)), (30, 0, (0, 10, 20, 30))):
        for most in (1, 3, 4, 7, 100):
            count, blocks = 0, list[int]()
            for piece in pieces(tokens, size, offsets, most):
                assert piece.start == count
                assert piece.size * (piece.last - piece.first) <= most
                assert piece.continues == (piece.first in blocks)
                blocks += [block for block in range(piece.first, piece.last) if block not in blocks]
                count += piece.size * (piece.last - piece.first)
            assert count == tokens
            assert blocks == list(range(len(offsets) - 1 if offsets else -(-tokens // size)))


def test_many_narrow_heads_leave_room_for_tokens() -> None:
    q = torch.rand(512, 128, 8, 8)
    assert min(piece.size for piece in _Call(q, q, TokenLayout(128, 64), normalize=True).pieces) == 64


def test_other_mixing_is_not_taken_for_a_matrix() -> None:
    @dataclass(frozen=True)
    class Halved(DenseMixing):
        def mix(self, summary: Tensor, causal: bool) -> Tensor:
            return super().mix(summary, causal) / 2

    q, mixing = torch.rand(1, 32, 2, 4), torch.rand(4, 4)
    options: dict[str, Any] = {"block_size": 8, "form": "chunked", "normalize": False}
    torch.testing.assert_close(
        mhla_attention(q, q, q, Halved(mixing), **options), mhla_attention(q, q, q, mixing / 2, **options)
    )
