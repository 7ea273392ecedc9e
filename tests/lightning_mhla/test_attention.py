"""Attention kinds behind one interface, alone and in the backbone."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from lightning_mhla import MHLA, AttentionConfig, Backbone, Block, BlockLayout
from lightning_mhla.attention import (
    Attention,
    AttentionInputs,
    BlockOrder,
    LinearAttention,
    RasterOrder,
    SoftmaxAttention,
    build_attention,
    layout_for,
)
from lightning_mhla.attention.positions import rotary_angles

KINDS = ("mhla", "linear", "softmax", "retention", "gla", "gated_deltanet", "mamba2")
RECURRENT = KINDS[3:]
GRIDS = {"1d": ((12,), [3]), "2d": ((5, 7), [2, 3]), "3d": ((3, 4, 4), [1, 2, 2])}


def config(kind: str, blocks: list[int], **options: Any) -> AttentionConfig:
    return AttentionConfig(kind=kind, block_grid=blocks, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("prefix", [0, 2], ids=["", "prefix"])
def test_alone_and_block_ordered_are_the_same_layer(kind: str, grid: str, prefix: int) -> None:
    size, blocks = GRIDS[grid]
    settings = config(kind, blocks, lepe=3, gate=True)
    layout = BlockLayout(size, tuple(blocks), prefix_tokens=prefix)
    alone = build_attention(settings, 16, 2, layout)
    ordered = build_attention(settings, 16, 2, layout, block_ordered=True)
    ordered.load_state_dict(alone.state_dict())
    x = torch.randn(2, layout.num_tokens, 16)
    mask = torch.rand(2, layout.num_tokens) > 0.3
    order, inverse = layout.order, layout.inverse
    torch.testing.assert_close(ordered(x[:, order], mask[:, order])[:, inverse], alone(x, mask))
    weights = ordered.attention_matrix(x[:, order], mask[:, order])
    torch.testing.assert_close(weights[:, :, inverse][:, :, :, inverse], alone.attention_matrix(x, mask))


@pytest.mark.parametrize(
    ("kind", "causal"),
    [*product(KINDS, (False, True)), ("learned", False), ("learned", True), *product(["mhla_window"], (False, True))],
)
def test_attention_matrix_is_what_the_layer_applies(kind: str, causal: bool) -> None:
    options = {"conv": 0} if kind in ("gated_deltanet", "mamba2") else None  # else the values pass a convolution first
    learned = {"kind": "mhla", "feature_map": "learned"} if kind == "learned" else {"kind": kind}
    layer = build_attention(
        AttentionConfig(block_size=4, options=options, **learned),
        16,
        2,
        BlockLayout((14,), block_size=4),
        causal=causal,
    )
    x, mask = torch.randn(2, 14, 16), torch.rand(2, 14) > 0.2
    q, k, v = layer._project(x)
    inputs = AttentionInputs(x, q, k, v, mask)
    weights = layer.weights(inputs)
    if causal:
        assert (weights.triu(1) == 0).all(), "a later token is seen"
    hidden = v.masked_fill(~mask[..., None, None], 0)
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", weights, hidden), layer.attend(inputs))
    torch.testing.assert_close(Attention.weights(layer, inputs), weights, rtol=1e-4, atol=1e-5)


def test_softmax_is_softmax() -> None:
    layer = build_attention(AttentionConfig(kind="softmax"), 16, 2, BlockLayout((9,), (1,)))
    x = torch.randn(2, 9, 16)
    q, k, v = (y.transpose(1, 2) for y in layer._project(x))
    want = layer.proj((torch.softmax(q @ k.transpose(-1, -2) * 8**-0.5, -1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), want)


def test_mhla_with_ones_is_linear_attention() -> None:
    layout = BlockLayout((4, 4), (2, 2))
    mhla, linear = (build_attention(config(kind, [2, 2]), 16, 2, layout) for kind in ("mhla", "linear"))
    linear.load_state_dict({k: v for k, v in mhla.state_dict().items() if k != "mixing.weight"})
    with torch.no_grad():
        mhla.mixing.weight.fill_(1.0)
    x = torch.randn(2, 16, 16)
    torch.testing.assert_close(mhla(x), linear(x), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("feature_map", ["relu", "elu", "softplus", "learned"])
def test_feature_maps_give_weights_that_sum_to_one(feature_map: Any) -> None:
    layer = MHLA(16, 2, BlockLayout((4, 4), (2, 2)), AttentionConfig(block_grid=[2, 2], feature_map=feature_map))
    weights = layer.attention_matrix(torch.randn(2, 16, 16))
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 16), rtol=1e-3, atol=1e-3)


def test_lepe_is_a_convolution_over_the_token_grid() -> None:
    layout = BlockLayout((5, 7), (2, 3), prefix_tokens=1)
    layer = build_attention(config("mhla", [2, 3], lepe=3), 8, 2, layout)
    v = torch.randn(2, 36, 8)
    grid = v[:, 1:].transpose(1, 2).unflatten(2, (5, 7))
    want = F.conv2d(grid, layer.lepe.conv.weight, layer.lepe.conv.bias, padding=1, groups=8).flatten(2).transpose(1, 2)
    got = layer.lepe(v[:, layout.order])[:, layout.inverse]
    torch.testing.assert_close(got[:, 1:], want)
    assert (got[:, 0] == 0).all(), "a prefix token has no neighbours"


def test_fewer_key_value_heads_and_other_widths() -> None:
    layer = MHLA(16, 4, BlockLayout((8,), (2,)), key_value_heads=2, key_width=6, value_width=10)
    assert layer.qkv.out_features == 4 * 6 + 2 * 6 + 2 * 10
    assert layer(torch.randn(2, 8, 16)).shape == (2, 8, 16)


def test_without_normaliser_the_output_has_a_norm() -> None:
    layer = MHLA(16, 2, BlockLayout((8,), (2,)), AttentionConfig(block_grid=[2], normalize=False))
    assert isinstance(layer.norm, nn.RMSNorm)
    assert torch.isfinite(layer(torch.randn(2, 8, 16) * 100)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_causal_layers_ignore_the_future(kind: str) -> None:
    layer = build_attention(
        AttentionConfig(kind=kind, block_size=4), 16, 2, BlockLayout((20,), block_size=4), causal=True
    )
    x = torch.randn(1, 18, 16)
    changed = x.clone()
    changed[:, 11:] += 1
    torch.testing.assert_close(layer(changed)[:, :11], layer(x)[:, :11])


@pytest.mark.parametrize("kind", KINDS)
def test_backbone_conditions_looks_and_recomputes(kind: str) -> None:
    options: dict[str, Any] = {"condition_dim": 6, "context_dim": 5, "prefix_tokens": 1}
    model = Backbone(16, 2, 2, (4, 6), config(kind, [2, 2], lepe=3), **options)
    for block in model.blocks:
        nn.init.normal_(block.modulation[-1].weight, std=0.1)
    x, condition, context = torch.randn(2, 25, 16), torch.randn(2, 6), torch.randn(2, 3, 5)
    out = model(x, condition, context)
    assert out.shape == x.shape
    assert not torch.allclose(out, model(x, condition + 1, context)), "the condition has no effect"
    assert not torch.allclose(out, model(x, condition, context + 1)), "the context has no effect"
    hidden = torch.tensor([[True, True, False]] * 2)
    torch.testing.assert_close(model(x, condition, context, context_mask=hidden), model(x, condition, context[:, :2]))
    want = torch.autograd.grad(out.square().sum(), list(model.parameters()))
    model.checkpointing = True
    got = torch.autograd.grad(model(x, condition, context).square().sum(), list(model.parameters()))
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two)


def test_adaln_zero_starts_as_the_identity() -> None:
    block = Backbone(16, 1, 2, (4,), config("mhla", [2]), condition_dim=6).blocks[0]
    x = torch.randn(2, 4, 16)
    torch.testing.assert_close(block(x, torch.randn(2, 6)), x)


def test_masked_tokens_change_nothing_in_the_backbone() -> None:
    model = Backbone(16, 2, 2, (4, 4), config("mhla", [2, 2]))
    x, mask = torch.randn(2, 16, 16), torch.ones(2, 16, dtype=torch.bool)
    mask[:, 5] = mask[:, 12] = False
    changed = x.masked_fill(~mask[..., None], 9.0)
    torch.testing.assert_close(model(changed, key_mask=mask)[mask], model(x, key_mask=mask)[mask])


@pytest.mark.parametrize("grid", [(4, 6), (5, 7)], ids=["equal blocks", "unequal blocks"])
def test_masked_tokens_change_nothing_in_a_layer_that_reorders_them(grid: tuple[int, int]) -> None:
    layer = MHLA(16, 2, BlockLayout(grid, (2, 2)))
    x = torch.randn(2, math.prod(grid), 16)
    mask = torch.rand(x.shape[:2]) > 0.3
    changed = x.masked_fill(~mask[..., None], 9.0)
    torch.testing.assert_close(layer(changed, mask)[mask], layer(x, mask)[mask])


def test_a_list_makes_a_hybrid() -> None:
    model = Backbone(16, len(KINDS), 2, (4, 4), [config(kind, [2, 2]) for kind in KINDS])
    assert [block.attn.config.kind for block in model.blocks] == list(KINDS)
    assert model(torch.randn(2, 16, 16)).shape == (2, 16, 16)
    with pytest.raises(ValueError, match="lists 2 layers, but depth=7"):
        Backbone(16, len(KINDS), 2, (4, 4), [config("mhla", [2, 2])] * 2)
    with pytest.raises(ValueError, match="same block_grid"):
        Backbone(16, 2, 2, (4, 4), [config("mhla", [2, 2]), config("mhla", [4, 4])])


def test_a_new_kind_is_one_class() -> None:
    class Mean(Attention, kind="mean-of-values"):
        def attend(self, inputs: AttentionInputs) -> torch.Tensor:
            return inputs.v.mean(1, keepdim=True).expand_as(inputs.v)

    try:
        assert Backbone(8, 1, 2, (4,), AttentionConfig(kind="mean-of-values"))(torch.randn(1, 4, 8)).shape == (1, 4, 8)
    finally:
        del Attention.kinds["mean-of-values"]


@pytest.mark.parametrize("prefix", [0, 1], ids=["rotary", "prefix"])
@pytest.mark.parametrize("kind", ["softmax", "linear", "rala", "mala"])
def test_a_kind_that_ignores_the_order_of_tokens_does_not_change_it(kind: str, prefix: int) -> None:
    """Neither alone nor in a backbone in block order; positions of ``lepe`` and of rotary embedding follow the tokens."""
    layout = BlockLayout((4, 6), (2, 3), prefix_tokens=prefix)
    before_rotary = kind == "linear" and not prefix
    settings = AttentionConfig(kind=kind, lepe=3, rotary=not prefix, normalize_before_rotary=before_rotary)
    for block_ordered in (False, True):
        layer = build_attention(settings, 24, 2, layout, block_ordered=block_ordered)
        placement = layer.token_order.placement
        assert placement.order is placement.inverse is None
    x, (raster, ordered) = torch.randn(2, layout.num_tokens, 24), (
        build_attention(settings, 24, 2, layout, block_ordered=block_ordered) for block_ordered in (False, True)
    )  # fmt: skip
    ordered.load_state_dict(raster.state_dict())
    torch.testing.assert_close(ordered(x[:, layout.order]), raster(x)[:, layout.order])
    torch.testing.assert_close(raster(x, layout=layout), raster(x))
    wider = BlockLayout((6, 4), (3, 2), prefix_tokens=prefix)
    for layer in (raster, ordered):
        layer.fit(wider)
    torch.testing.assert_close(ordered(x[:, wider.order]), raster(x)[:, wider.order])
    weights = raster.attention_matrix(x)
    of_ordered = ordered.attention_matrix(x[:, wider.order])
    torch.testing.assert_close(of_ordered, weights[:, :, wider.order][..., wider.order])


def test_a_kind_with_blocks_needs_their_order() -> None:
    for parent in (LinearAttention, SoftmaxAttention):
        with pytest.raises(ValueError, match="InBlocks divides tokens into blocks; write Order = BlockOrder"):
            type("InBlocks", (parent,), {"uses_blocks": True})
        assert type("InBlocks", (parent,), {"uses_blocks": True, "Order": BlockOrder}).uses_blocks


def test_a_kind_is_composed_of_other_parts() -> None:
    """Tokens in raster order, fewer key heads than query heads, a gate whatever the configuration says, and a stage of its own."""
    seen = []

    class Composed(Attention, kind="composed"):
        Order = RasterOrder
        unused = ("gate", "output_norm")

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, gate=True, **options)

        def operator_inputs(self, inputs: AttentionInputs) -> AttentionInputs:
            return inputs

        def attend(self, inputs: AttentionInputs) -> torch.Tensor:
            seen.append(inputs)
            return inputs.v.repeat_interleave(2, 2)

        def finish(self, out: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
            return super().finish(out, inputs) + 1

    try:
        layout = BlockLayout((4, 4), (2, 2))
        settings = AttentionConfig(kind="composed", normalize=False)
        layer = build_attention(settings, 16, 4, layout, key_value_heads=2, block_ordered=True)
        x = torch.randn(1, 16, 16)
        out = layer(x[:, layout.order])
        torch.testing.assert_close(seen[0].x, x)
        assert seen[0].k.shape[2] == 2
        assert layer.norm is None
        values = layer._project(x)[2].repeat_interleave(2, 2).flatten(2)
        torch.testing.assert_close(out, layer.proj(values * F.silu(layer.gate(x)) + 1)[:, layout.order])
    finally:
        del Attention.kinds["composed"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("repeats_heads", r"Former.repeats_heads no longer has an effect; define operator_inputs\(self, inputs\)"),
        ("scans", "write Order = RasterOrder"),
        ("always_gated", r"pass gate=True to super\(\).__init__"),
        ("uses_linear_options", "in unused"),
        ("_around", r"define finish\(self, out, inputs\)"),
    ],
)
def test_former_members_of_a_kind_are_errors(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        type("Former", (Attention,), {name: False})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mlha"}, "did you mean 'mhla'"),
        ({"block_grid": [2], "block_size": 2}, "not both"),
        ({"lepe": 4}, "odd width"),
        ({"feature_map": "identity"}, "nonnegative"),
    ],
)
def test_config_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**options)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_hidden_token_holds_reaches_nothing(kind: str) -> None:
    layer = build_attention(config(kind, [2, 2], lepe=3, gate=True), 16, 2, BlockLayout((5, 4), (2, 2)))
    nn.init.normal_(layer.proj.bias)
    mask = torch.rand(2, 20) > 0.3
    x = torch.randn(2, 20, 16).masked_fill(~mask[..., None], float("nan"))
    out = layer(x, mask)
    assert torch.isfinite(out).all()
    assert (out[~mask] == 0).all()
    gradients = torch.autograd.grad(out.sum(), [p for p in layer.parameters() if p.requires_grad])
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("blocks", [(4, 4), (3, 4)], ids=["even", "uneven"])
def test_layers_compile_into_one_graph(blocks: tuple[int, int]) -> None:
    layer = MHLA(16, 2, BlockLayout((8, 8), blocks), AttentionConfig(lepe=3))
    x = torch.randn(2, 64, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), layer(x))


def test_a_layer_first_used_without_gradients_can_train() -> None:
    layer = MHLA(16, 2, BlockLayout((5, 3), (2, 2)))
    x = torch.randn(2, 15, 16)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert layer.mixing.weight.grad is not None


def test_layers_refuse() -> None:
    layout = BlockLayout((4, 4), (2, 2))
    with pytest.raises(ValueError, match="needs block_grid"):
        layout_for([AttentionConfig()], (4, 4))
    with pytest.raises(ValueError, match="needs a 1-D grid"):
        MHLA(16, 2, layout, causal=True)
    with pytest.raises(ValueError, match="uneven ones"):
        MHLA(16, 2, BlockLayout((10,), (3,)), causal=True)
    with pytest.raises(ValueError, match=r"asks for blocks \[4, 4\], not those of"):
        MHLA(16, 2, layout, AttentionConfig(block_grid=[4, 4]))
    with pytest.raises(ValueError, match="later tokens"):
        MHLA(16, 2, BlockLayout((4,), (2,)), AttentionConfig(block_grid=[2], lepe=3), causal=True)
    with pytest.raises(ValueError, match="must divide heads"):
        MHLA(16, 4, layout, key_value_heads=3)
    with pytest.raises(ValueError, match="not divisible by heads"):
        MHLA(16, 3, layout)
    with pytest.raises(ValueError, match="9 tokens for a layout of 16"):
        MHLA(16, 2, layout)(torch.randn(1, 9, 16))
    for x in (torch.randn(16, 16), torch.randn(1, 2, 16, 16), torch.randn(16)):
        with pytest.raises(ValueError, match=r"x is \[.*16\]; it must be \[batch, tokens, width\]"):
            MHLA(16, 2, layout)(x)
    with pytest.raises(ValueError, match="norm='batch'"):
        Block(16, 2, layout, AttentionConfig(block_grid=[2, 2]), norm="batch")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS[:-1])  # mamba2 groups the heads of queries and keys instead
def test_grouped_keys_serve_neighbouring_query_heads(kind: str) -> None:
    """Grouped keys give the same outputs as a layer in which each key and value head is repeated for its two queries."""
    layout = BlockLayout((8,), (2,))
    settings = config(kind, [2], options={"conv": 0} if kind == "gated_deltanet" else None)
    grouped = build_attention(settings, 16, 4, layout, key_value_heads=2, bias=False)
    whole = build_attention(settings, 16, 4, layout, bias=False)
    q, k, v = grouped.qkv.weight.detach().split(grouped.sections)
    pairs = [x.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1) for x in (k, v)]
    whole.load_state_dict({**grouped.state_dict(), "qkv.weight": torch.cat([q, *pairs])})
    x = torch.randn(2, 8, 16)
    torch.testing.assert_close(grouped(x), whole(x))


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("prefix", [0, 1], ids=["", "prefix"])
def test_directions_of_recurrences(kind: str, prefix: int) -> None:
    """Backward is forward on the tokens from last to first; both is their sum; alternate changes from layer to layer."""
    grid = {"layout": BlockLayout((3, 5), (1, 1), prefix_tokens=prefix)}

    def layer(direction: str) -> Attention:
        torch.manual_seed(3)
        return build_attention(AttentionConfig(kind=kind, options={"direction": direction}), 16, 2, **grid).eval()

    x, mask = torch.randn(2, 15 + prefix, 16), torch.rand(2, 15 + prefix) > 0.2
    rows, turned = (layer(direction) for direction in ("forward", "backward"))
    torch.testing.assert_close(turned(x, mask), rows(x.flip(1), mask.flip(1)).flip(1))
    causal = rows.attention_matrix(x)
    assert (causal.triu(1) == 0).all()
    assert (turned.attention_matrix(x).tril(-1) == 0).all()
    if kind in ("retention", "gla"):  # both see the same values
        torch.testing.assert_close(layer("both").attention_matrix(x), causal + turned.attention_matrix(x))
    model = Backbone(16, 3, 2, (3, 5), AttentionConfig(kind=kind, options={"direction": "alternate"}))
    assert [block.attn.options.direction for block in model.layers] == ["forward", "backward", "forward"]
    with pytest.raises(ValueError, match="direction='sideways' is not one of 'both', 'alternate'"):
        AttentionConfig(kind=kind, options={"direction": "sideways"})


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("direction", ["both", "backward"])
def test_packed_sequences_are_alone_in_every_direction(kind: str, direction: str) -> None:
    settings = AttentionConfig(kind=kind, options={"direction": direction})
    layer = build_attention(settings, 16, 2, BlockLayout((20,), (1,)))
    x = torch.randn(1, 20, 16)
    parts = []
    for part in x.split([7, 13], 1):
        layer.fit(BlockLayout((part.shape[1],), (1,)))
        parts.append(layer(part))
    layer.fit(BlockLayout((20,), (1,)))
    torch.testing.assert_close(layer(x, cu_seqlens=[0, 7, 20]), torch.cat(parts, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [*RECURRENT, "gated_conv"])
def test_a_state_holds_no_more_than_it_says(kind: str) -> None:
    layer = build_attention(AttentionConfig(kind=kind), 16, 2, BlockLayout((500,), (1,)), causal=True)
    _, state = layer.next_tokens(torch.randn(1, 500, 16), None, [500])
    held = [x for x in vars(state).values() if isinstance(x, torch.Tensor)]
    assert sum(x.untyped_storage().nbytes() for x in held) == state.bytes


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_recurrences_in_half_precision(kind: str, dtype: torch.dtype) -> None:
    """Hidden tokens have no length to divide by; under autocast the operator is given what the projections give."""
    layer = build_attention(AttentionConfig(kind=kind), 16, 2, BlockLayout((12,), (1,)))
    x, mask = torch.randn(2, 12, 16), torch.ones(2, 12, dtype=torch.bool)
    mask[:, 5:8] = False
    with torch.autocast("cpu", torch.bfloat16):
        seen = layer._prepared(AttentionInputs(x, *layer._project(x)), None, None, None)
    assert {y.dtype for y in (seen.q, seen.k, seen.v)} == {torch.bfloat16}
    layer.to(dtype)
    half = x.to(dtype).requires_grad_()
    layer(half, mask).float().sum().backward()
    assert torch.isfinite(half.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


def test_a_layer_alone_has_no_number_to_alternate_by() -> None:
    config = AttentionConfig(kind="gla", options={"direction": "alternate"})
    with pytest.raises(ValueError, match=r"build layers with config.at_layer\(index\)"):
        build_attention(config, 16, 2, BlockLayout((8,), (1,)))
    assert build_attention(config.at_layer(3), 16, 2, BlockLayout((8,), (1,))).options.direction == "backward"


def test_gates_are_those_of_the_publications() -> None:
    """Written out token by token from the layers' own weights, in float64."""
    x = torch.randn(1, 7, 16, dtype=torch.float64)
    layout = BlockLayout((7,), (1,))
    for kind in RECURRENT:
        layer = build_attention(AttentionConfig(kind=kind), 16, 2, layout, causal=True, bias=False).double()
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.5)
        q, k, v = layer._project(x)
        if layer.conv is not None:
            channels = torch.cat([y.flatten(2) for y in (q, k, v)], -1)
            taps = F.pad(channels, (0, 0, 3, 0)).unfold(1, 4, 1)
            channels = torch.einsum("bnct,tc->bnc", taps, layer.conv.weight)
            channels = F.silu(channels if layer.conv.bias is None else channels + layer.conv.bias)
            widths = [y.shape[2] * y.shape[3] for y in (q, k, v)]
            q, k, v = (
                part.unflatten(-1, y.shape[2:]) for part, y in zip(channels.split(widths, -1), (q, k, v), strict=True)
            )
        q, k = (y.expand(-1, -1, 2, -1) for y in (q, k))
        state = torch.zeros(1, 2, 8, 8, dtype=torch.float64)
        outs = []
        for t in range(7):
            key, value, scale = k[:, t], v[:, t], 8**-0.5
            if kind == "retention":
                state = state * torch.tensor([1 - 2**-5, 1 - 2**-6], dtype=torch.float64)[:, None, None]
            elif kind == "gla":
                decay = F.logsigmoid(x[:, t] @ layer.reduce.weight.T @ layer.decay.weight.T + layer.decay.bias) / 16
                state = state * decay.exp().view(1, 2, 8, 1)
            else:
                step = F.softplus(x[:, t] @ layer.decay.proj.weight.T + layer.decay.bias)
                state = state * torch.exp(-layer.decay.rate.exp() * step)[..., None, None]
                if kind == "mamba2":
                    value, scale = value * step[..., None], 1.0
                else:
                    key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
                    beta = torch.sigmoid(x[:, t] @ layer.beta.weight.T)[..., None]
                    value = beta * (value - torch.einsum("bhk,bhkv->bhv", key, state))
            state = state + key[..., None] * value[..., None, :]
            query = q[:, t]
            if kind == "gated_deltanet":
                query = query / (query.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            outs.append(scale * torch.einsum("bhk,bhkv->bhv", query, state))
        out = torch.stack(outs, 1)
        gate = F.silu(x @ layer.gate.weight.T)
        if kind == "mamba2":
            out = (out + layer.through.weight[:, None] * v).flatten(2) * gate
            out = out * (out.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.norm.weight
        else:
            out = out * (out.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.norm.weight
            out = out.flatten(2) * gate
        torch.testing.assert_close(layer(x), out @ layer.proj.weight.T, rtol=1e-11, atol=1e-12)


def test_causal_linear_attention_forgets_nothing() -> None:
    """Over many more tokens than it works on at once."""
    layer = build_attention(AttentionConfig(kind="linear"), 16, 2, BlockLayout((300,), (1,)), causal=True)
    x = torch.randn(1, 300, 16)
    q, k, v = layer._project(x)
    weights = torch.einsum("bihd,bjhd->bhij", q.relu() + 1e-6, k.relu() + 1e-6).tril()
    want = torch.einsum("bhij,bjhd->bihd", weights / (weights.sum(-1, keepdim=True) + 1e-6), v)
    torch.testing.assert_close(layer.attend(AttentionInputs(x, q, k, v)), want, rtol=1e-4, atol=1e-5)


def test_rotary_tables_move_with_the_module_and_are_not_saved() -> None:
    layer = build_attention(AttentionConfig(rotary=True, normalize=False), 8, 2, BlockLayout((4, 4), (2, 2)))
    tables = {name for name, _ in layer.named_buffers() if name.rpartition(".")[2] in ("cos", "sin")}
    assert len(tables) == 2
    assert not tables & layer.state_dict().keys()


def test_rotary_angles_are_those_of_the_paper() -> None:
    """Pair i turns by position * base^(-2 i / D)."""
    turned = rotary_angles(torch.tensor([0, 3, 7]), 6, 1000.0)
    angles = torch.tensor([0.0, 3.0, 7.0])[:, None] * torch.tensor([1.0, 0.1, 0.01])
    torch.testing.assert_close(turned.cos, angles.cos())
    torch.testing.assert_close(turned.sin, angles.sin())


def test_drop_path_rises_from_zero_to_what_is_asked() -> None:
    model = Backbone(16, 5, 2, (4, 4), config("mhla", [2, 2]), drop_path=0.4)
    assert [block.drop_path.drop_prob for block in model.blocks] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert Backbone(16, 1, 2, (4, 4), config("mhla", [2, 2]), drop_path=0.4).blocks[0].drop_path.drop_prob == 0


def test_mamba2_is_the_mixer_of_transformers() -> None:
    """All weights carried over: C, B, x, the short convolution, steps, decays, D, and the gated norm."""
    dim, heads, state, width = 16, 4, 6, 8
    options = {"use_bias": False, "chunk_size": 16, "expand": heads * width // dim}
    config = Mamba2Config(hidden_size=dim, num_heads=heads, head_dim=width, state_size=state, n_groups=1, **options)
    theirs = Mamba2Mixer(config, 0).eval()
    sizes = {"key_width": state, "value_width": width, "bias": False}
    ours = build_attention(AttentionConfig(kind="mamba2"), dim, heads, BlockLayout((50,), (1,)), causal=True, **sizes)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        theirs.A_log.uniform_(-1, 1)
        z, x, b, c, steps = theirs.in_proj.weight.split([heads * width, heads * width, state, state, heads])
        turned = [
            tensor.split([heads * width, state, state])[::-1]
            for tensor in (theirs.conv1d.weight[:, 0], theirs.conv1d.bias)
        ]
        ours.load_state_dict({
            "qkv.weight": torch.cat([c, b, x]), "proj.weight": theirs.out_proj.weight, "gate.weight": z,
            "norm.weight": theirs.norm.weight,
            "conv.weight": torch.cat(turned[0]).T, "conv.bias": torch.cat(turned[1]), "decay.rate": theirs.A_log,
            "decay.bias": theirs.dt_bias, "decay.proj.weight": steps, "through.weight": theirs.D,
        })  # fmt: skip
        tokens = torch.randn(2, 50, dim)
        torch.testing.assert_close(ours(tokens), theirs(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["mhla", "mhla_window"])
def test_learned_features_of_outliers(kind: str) -> None:
    """Outputs and gradients stay finite, and the normalizer cancels what queries are divided by."""
    layout = BlockLayout((24,), block_size=4)
    layer = build_attention(AttentionConfig(kind=kind, block_size=4, feature_map="learned"), 16, 2, layout, causal=True)
    for scale in (1.0, 100.0, 1e4):
        x = (scale * torch.randn(2, 24, 16)).requires_grad_()
        out = layer(x)
        out.sum().backward()
        assert out.isfinite().all()
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in layer.parameters())
    q, k = torch.randn(2, 2, 5, 2, 8).unbind()
    f, largest, g = layer.features(q, k)
    exponents = torch.einsum("bnhd,hde->bnhe", q, layer.features.query)
    torch.testing.assert_close(f * largest[..., None].exp(), torch.cat([exponents, -exponents], -1).exp())
    torch.testing.assert_close(g[..., :8] * g[..., 8:], torch.ones(2, 5, 2, 8))
    large = layer.features(q, k.index_fill(3, torch.tensor(3), 150.0))[2]
    torch.testing.assert_close(large[..., 3], torch.full((2, 5, 2), math.exp(30)))
    layer.features.key.grad = None
    large[..., 3].log().sum().backward()
    torch.testing.assert_close(layer.features.key.grad[:, 3, 3], torch.full((2,), 150.0 * 10))


def test_a_window_as_long_as_the_sequence_is_softmax() -> None:
    layout = BlockLayout((20,), block_size=10)
    window = build_attention(AttentionConfig(kind="mhla_window", block_size=10), 16, 2, layout, causal=True)
    softmax = build_attention(AttentionConfig(kind="softmax"), 16, 2, layout, causal=True)
    softmax.load_state_dict(
        {name: x for name, x in window.state_dict().items() if not name.startswith(("mixing", "far"))}
    )
    x = torch.randn(2, 20, 16)
    torch.testing.assert_close(window(x), softmax(x), rtol=1e-5, atol=1e-6)


def test_sinks_stay_at_the_distance_of_the_context() -> None:
    """Beyond it, scores of sinks depend on what is near, not on the position; packed texts and steps agree."""
    options = {"sinks": 2, "far_init": -math.inf}
    config = AttentionConfig(kind="mhla_window", block_size=4, rotary=True, options=options, mixing="exponential")
    layer = build_attention(config, 16, 2, BlockLayout((24,), block_size=4), causal=True)
    x = torch.cat([torch.randn(1, 8, 16), torch.randn(1, 8, 16).repeat(1, 5, 1)], 1)
    out = layer(x)
    torch.testing.assert_close(out[:, 23::8], out[:, 23:24].expand(1, 4, 16), rtol=0, atol=1e-5)
    torch.testing.assert_close(out[:, 40:], out[:, 32:40], rtol=0, atol=1e-5)
    assert (out[:, 16:24] - out[:, 24:32]).abs().max() > 1e-4  # within the context, they are further away at each word
    packed = layer(torch.cat([x[:, :30], x], 1), cu_seqlens=[0, 30, 78])
    torch.testing.assert_close(packed, torch.cat([out[:, :30], out], 1))
    state, parts = None, []
    for part in x.split([21, 3, 1, 1, 1, 21], 1):
        y, state = layer.next_tokens(part, state, [part.shape[1]])
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), out, rtol=0, atol=1e-5)


@pytest.mark.parametrize("prefix", [0, 3])
def test_a_window_over_a_whole_image_is_softmax_and_a_narrow_one_is_not(prefix: int) -> None:
    layout, narrow = (
        BlockLayout((6, 8), (2, 2), prefix_tokens=prefix),
        BlockLayout((6, 8), (3, 4), prefix_tokens=prefix),
    )
    window = build_attention(AttentionConfig(kind="mhla_window"), 16, 2, layout)
    softmax = build_attention(AttentionConfig(kind="softmax"), 16, 2, layout)
    shared = {name: x for name, x in window.state_dict().items() if not name.startswith(("mixing", "far"))}
    softmax.load_state_dict(shared)
    x = torch.randn(2, 48 + prefix, 16)
    torch.testing.assert_close(window(x), softmax(x), rtol=1e-5, atol=1e-6)
    other = build_attention(AttentionConfig(kind="mhla_window"), 16, 2, narrow)
    other.load_state_dict(
        {name: value for name, value in window.state_dict().items() if "mixing" not in name}, strict=False
    )
    out = other(x)
    torch.testing.assert_close(out[:, :prefix], softmax(x)[:, :prefix], rtol=1e-5, atol=1e-6)  # sinks see every token
    assert not torch.allclose(out[:, prefix:], softmax(x)[:, prefix:], atol=1e-3)
    # a far weight of zero leaves the window, in which each token of a corner sees a quarter of the image and the prefix
    alone = build_attention(AttentionConfig(kind="mhla_window", options={"far_init": -math.inf}), 16, 2, narrow)
    seen = (alone.attention_matrix(x)[0, 0, prefix] > 0).sum()
    assert seen == 4 * 4 + prefix


def test_a_window_does_not_start_with_a_far_weight_that_is_infinite() -> None:
    for start in (math.inf, math.nan):
        with pytest.raises(ValueError, match=f"far_init={start}"):
            AttentionConfig(kind="mhla_window", options={"far_init": start})
    with pytest.raises(ValueError, match="sinks=-1"):
        AttentionConfig(kind="mhla_window", options={"sinks": -1})


@pytest.mark.parametrize("kind", ["softmax", "linear", "mhla_window", "gla"])
def test_a_layer_rejects_the_configuration_of_another_kind(kind: str) -> None:
    layout = BlockLayout((16,), block_size=4)
    with pytest.raises(ValueError, match=f"MHLA computes attention kind 'mhla', but .* '{kind}'; build_attention"):
        MHLA(16, 2, layout, AttentionConfig(kind=kind), causal=True)
    layer = build_attention(AttentionConfig(kind=kind), 16, 2, layout, causal=True)
    with pytest.raises(ValueError, match=f"{type(layer).__name__} computes attention kind '{kind}', but .* 'mhla'"):
        type(layer)(16, 2, layout, AttentionConfig(), causal=True)


def test_a_kind_derived_from_mhla_is_configured_by_its_own_name() -> None:
    class Doubled(MHLA, kind="doubled"):
        def attend(self, inputs: AttentionInputs) -> torch.Tensor:
            return 2 * super().attend(inputs)

    layout = BlockLayout((16,), block_size=4)
    try:
        assert Doubled(16, 2, layout).config.kind == "doubled"
        with pytest.raises(ValueError, match="Doubled computes attention kind 'doubled'"):
            Doubled(16, 2, layout, AttentionConfig())
        with pytest.raises(ValueError, match=r"MHLA computes attention kind 'mhla', but .* 'doubled'"):
            MHLA(16, 2, layout, AttentionConfig(kind="doubled"))
    finally:
        del Attention.kinds["doubled"]


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({}, "DenseCoefficients(weight=[5, 5])"),
        ({"mixing_per_head": True}, "DenseCoefficients(weight=[2, 5, 5])"),
        ({"mixing": "exponential", "mixing_terms": 3}, "ExponentialCoefficients(amplitude=[3], decay=[3])"),
    ],
)
def test_a_printed_layer_shows_its_coefficients(options: dict[str, Any], shapes: str) -> None:
    text = str(MHLA(16, 2, BlockLayout((20,), block_size=4), AttentionConfig(**options), causal=True))
    assert shapes in text
    assert "heads=2, causal=True, layout=BlockLayout(grid=(20,)" in text


def test_operations_of_a_window_grow_with_its_blocks_and_not_with_the_sequence() -> None:
    """A token sees its own block up to itself and the block before: one and a half blocks, in the products of keys and values."""

    def counted(tokens: int, block_size: int) -> float:
        layout = BlockLayout((tokens,), block_size=block_size)
        config = AttentionConfig(kind="mhla_window", block_size=block_size, mixing="exponential")
        layer = build_attention(config, 32, 2, layout, causal=True)
        return layer.operator_flops(tokens) - layer.summary_flops(tokens, None, layer.summaries_mixed(tokens))

    assert counted(64, 8) == 2 * 64 * 1.5 * 8 * 2 * (16 + 16)
    assert counted(128, 8) == 2 * counted(64, 8)
    assert counted(64, 16) == 2 * counted(64, 8)
    image = BlockLayout((8, 8), (4, 2), prefix_tokens=1)  # 8 tokens in most blocks, of which 3 x 2 are near
    layer = build_attention(AttentionConfig(kind="mhla_window"), 32, 2, image)
    near = layer.operator_flops(65) - layer.summary_flops(65, None, layer.summaries_mixed(65))
    assert near == pytest.approx(2 * 2 * 65 * (6 * 65 / 9 + 2) * (16 + 16))


@pytest.mark.parametrize("kind", ["mhla", "mhla_window"])
def test_a_layer_built_with_a_number_of_blocks_is_extended_by_blocks_of_their_size(kind: str) -> None:
    config = AttentionConfig(kind=kind, mixing="exponential")
    layer = build_attention(config, 16, 2, BlockLayout((64,), (8,)), causal=True)
    x = torch.randn(1, 128, 16)
    short = layer(x[:, :64])
    layer.extend(128)
    assert layer.layout.block_sizes == (8,) * 16
    torch.testing.assert_close(layer(x)[:, :64], short)


@pytest.mark.parametrize("kind", ["softmax", "linear", "retention", "mhla"])
@pytest.mark.parametrize("blocks", [{"block_grid": [4]}, {"block_size": 4}], ids=str)
def test_an_extended_backbone_has_the_blocks_of_its_layers_whatever_its_first_layer_is(
    kind: str, blocks: dict[str, Any]
) -> None:
    configs = [AttentionConfig(kind=name, mixing="exponential", **blocks) for name in (kind, "mhla", kind)]
    model = Backbone(16, 3, 2, (16,), configs, causal=True)
    x = torch.randn(1, 32, 16)
    short = model(x[:, :16])
    model.extend(32)
    assert model.layout.operator_blocks == model.layers[1].attn.layout.operator_blocks == {"block_size": 4}
    torch.testing.assert_close(model(x)[:, :16], short)


BLOCK_CAUSAL: dict[str, dict[str, Any]] = {
    "dense": {"mixing_per_head": True},
    "exponential": {"mixing": "exponential", "normalize": False, "rotary": True},
    "linear": {"kind": "linear"},
    "softmax": {"kind": "softmax", "rotary": True},
}
"""Options of block-causal attention."""


def block_causal_layer(options: dict[str, Any]) -> Attention:
    layout = BlockLayout((20,), block_size=5)
    settings = AttentionConfig(**{"block_size": 5, "gate": True, **options})
    return build_attention(settings, 16, 2, layout, key_value_heads=1, causal="block").double()


@pytest.mark.parametrize("options", BLOCK_CAUSAL.values(), ids=BLOCK_CAUSAL)
def test_block_causal_tokens_see_their_block_and_those_before_it(options: dict[str, Any]) -> None:
    """The last block is short. A change of token 12 reaches all of its block and later blocks, and not one bit before."""
    layer, x = block_causal_layer(options), torch.randn(2, 18, 16, dtype=torch.float64)
    changed = x.clone()
    changed[:, 12] += 1
    out, other = layer(x), layer(changed)
    assert torch.equal(out[:, :10], other[:, :10])
    assert ((out - other)[:, 10:].abs().amax(-1) > 1e-9).all()
    weights = layer.attention_matrix(x)[0]
    blocks = torch.arange(18) // 5
    assert ((weights != 0) == (blocks <= blocks[:, None])).all()


@pytest.mark.parametrize("options", BLOCK_CAUSAL.values(), ids=BLOCK_CAUSAL)
def test_block_causal_layers_hide_and_pack_tokens(options: dict[str, Any]) -> None:
    layer, x = block_causal_layer(options), torch.randn(1, 18, 16, dtype=torch.float64)
    packed = layer(x, cu_seqlens=[0, 7, 18])  # blocks are counted from the start of each sequence
    torch.testing.assert_close(packed, torch.cat([layer(x[:, :7]), layer(x[:, 7:])], 1))
    mask = torch.ones(1, 18, dtype=torch.bool)
    mask[:, 15:] = False
    torch.testing.assert_close(layer(x, mask)[:, :15], layer(x[:, :15]))


@pytest.mark.parametrize("options", BLOCK_CAUSAL.values(), ids=BLOCK_CAUSAL)
def test_blocks_are_generated_one_after_the_other(options: dict[str, Any]) -> None:
    """Two blocks at once, then one at a time, equal one pass; only softmax stores more with every block."""
    layer, x = block_causal_layer(options), torch.randn(2, 20, 16, dtype=torch.float64)
    out, state = layer.next_tokens(x[:, :10], None, [10, 10])
    parts, sizes = [out], []
    for start in (10, 15):
        sizes.append(state.bytes)
        out, state = layer.next_tokens(x[:, start : start + 5], state, [5, 5])
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), layer(x))
    grows = layer.config.kind == "softmax" or "mixing_per_head" in options
    assert (state.bytes > sizes[0]) == grows
    assert grows or state.bytes == sizes[1] == sizes[0]


@pytest.mark.parametrize("options", BLOCK_CAUSAL.values(), ids=BLOCK_CAUSAL)
def test_rows_of_different_lengths_generate_blocks(options: dict[str, Any]) -> None:
    """Rows of one, two and no new blocks: padding on the right changes nothing."""
    layer, x = block_causal_layer(options), torch.randn(3, 20, 16, dtype=torch.float64)
    _, state = layer.next_tokens(x[:, :5], None, [5, 5, 5])
    out, state = layer.next_tokens(x[:, 5:15], state, [5, 10, 0])
    assert state.lengths == (10, 15, 5)
    torch.testing.assert_close(out[0, :5], layer(x[:1, :10])[0, 5:])
    torch.testing.assert_close(out[1], layer(x[1:2, :15])[0, 5:])
    order = [0, 2, 1]
    _, selected = layer.next_tokens(x[order, 15:], state.select(torch.tensor(order)), [5, 5, 5])
    assert selected.lengths == (15, 10, 20)


@pytest.mark.parametrize(
    ("options", "causal", "message"),
    [
        ({"kind": "gla"}, "block", "attention kind 'gla' is not block-causal; choose one of .*linear, mhla.*softmax"),
        ({"kind": "mhla_window"}, "block", "'mhla_window' is not block-causal"),
        ({"kind": "gated_conv"}, "block", "'gated_conv' is not block-causal"),
        ({"lepe": 3}, "block", "lepe sees later tokens too"),
        ({}, "blocks", "causal='blocks' must be True, False or 'block'"),
    ],
)
def test_block_causal_attention_rejects(options: dict[str, Any], causal: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_attention(
            AttentionConfig(block_size=5, **options), 16, 2, BlockLayout((20,), block_size=5), causal=causal
        )


def test_block_causal_generation_takes_complete_blocks() -> None:
    layer = block_causal_layer(BLOCK_CAUSAL["softmax"])
    with pytest.raises(ValueError, match=r"complete blocks of 5 tokens, but got 7"):
        layer.next_tokens(torch.randn(1, 7, 16, dtype=torch.float64), None, [7])
    with pytest.raises(ValueError, match="'linear' needs block_grid"):
        Backbone(16, 1, 2, (20,), AttentionConfig(kind="linear"), causal="block")


def test_coefficients_of_prefix_tokens_are_dropped_from_older_windows() -> None:
    layout = BlockLayout((8, 8), (4, 4), prefix_tokens=1)
    layer = build_attention(AttentionConfig(kind="mhla_window", block_grid=[4, 4]), 16, 2, layout)
    state = layer.state_dict()
    weight = torch.rand(17, 17)
    layer.load_state_dict({**state, "mixing.weight": weight})
    assert torch.equal(layer.mixing.weight, weight[1:, 1:])  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["mhla", "linear", "softmax", "rala"])
@pytest.mark.parametrize("grid", [(8, 4), (5, 7), (2, 9)])
def test_rotary_positions_of_a_layout_for_one_call_are_its_own(kind: str, grid: tuple[int, int]) -> None:
    layer = build_attention(
        AttentionConfig(kind=kind, block_grid=[2, 2], rotary=True, normalize_before_rotary=kind != "softmax"),
        16,
        2,
        BlockLayout((4, 8), (2, 2)),
    )
    layout, x = BlockLayout(grid, (2, 2)), torch.randn(2, grid[0] * grid[1], 16)
    out = layer(x, layout=layout)
    layer.fit(layout)
    torch.testing.assert_close(layer(x), out)


def test_a_layout_for_one_call_needs_raster_order() -> None:
    layout = BlockLayout((4, 8), (2, 2))
    layer = build_attention(AttentionConfig(block_grid=[2, 2]), 16, 2, layout, block_ordered=True)
    with pytest.raises(ValueError, match="raster order"):
        layer(torch.randn(1, 32, 16), layout=layout)


@pytest.mark.parametrize("bounds", [[0, 5], [0, 5, 3, 8], [1, 8]])
def test_softmax_refuses_bounds_that_are_not_those_of_the_row(bounds: list[int]) -> None:
    layer = build_attention(AttentionConfig(kind="softmax"), 16, 2, BlockLayout((8,), block_size=4), causal=True)
    with pytest.raises(ValueError, match="must rise from 0 to the number of tokens, 8"):
        layer(torch.randn(1, 8, 16), cu_seqlens=torch.tensor(bounds))
    with pytest.raises(ValueError, match="needs a batch of one row"):
        layer(torch.randn(2, 8, 16), cu_seqlens=torch.tensor([0, 3, 8]))


@pytest.mark.parametrize(("settings", "layout"), [
    (AttentionConfig(lepe=3), BlockLayout((8,), (1,))),
    (AttentionConfig(kind="softmax", lepe=3), BlockLayout((8,), (1,))),
    (AttentionConfig(kind="gla", lepe=3), BlockLayout((8,), (1,))),
    (AttentionConfig(kind="linear", key_weighting=True), BlockLayout((8,), (1,))),
    (AttentionConfig(kind="rala"), BlockLayout((8,), (1,))),
    (AttentionConfig(kind="linear"), BlockLayout((2, 4), (1, 2))),
    (AttentionConfig(kind="softmax"), BlockLayout((7,), (1,), prefix_tokens=1)),
])  # fmt: skip
def test_sequences_that_would_read_each_other_are_not_packed(settings: AttentionConfig, layout: BlockLayout) -> None:
    layer = build_attention(settings, 16, 2, layout)
    with pytest.raises(
        ValueError, match="cu_seqlens packs sequences into a row, and lepe, key_weighting, prefix tokens"
    ):
        layer(torch.randn(1, 8, 16), cu_seqlens=torch.tensor([0, 4, 8]))


@pytest.mark.parametrize("kind", ["mhla", "linear", "softmax", "gla", "gated_deltanet", "mamba2"])
def test_packed_sequences_of_bidirectional_layers_do_not_read_each_other(kind: str) -> None:
    layer = build_attention(AttentionConfig(kind=kind), 16, 2, BlockLayout((8,), (1,)))
    x, y = torch.randn(1, 8, 16), torch.randn(1, 8, 16)
    y[:, :4] = x[:, :4]
    packed, other = (layer(tokens, cu_seqlens=torch.tensor([0, 4, 8])) for tokens in (x, y))
    assert torch.equal(packed[:, :4], other[:, :4])
    assert not torch.allclose(packed[:, 4:], other[:, 4:])


def test_windows_of_all_tokens_do_not_take_packed_sequences() -> None:
    config = AttentionConfig(kind="mhla_window", block_size=4, feature_map="learned")
    layer = build_attention(config, 16, 2, BlockLayout((8,), block_size=4))
    with pytest.raises(ValueError, match="takes cu_seqlens only in causal attention"):
        layer(torch.randn(1, 8, 16), cu_seqlens=torch.tensor([0, 4, 8]))


def test_a_default_layer_of_rala_ignores_no_option(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        build_attention(AttentionConfig(kind="rala"), 16, 2, BlockLayout((12,), (3,)))
    assert "does not use" not in caplog.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AttentionConfig(block_grid=[]), "block_grid"),
        (lambda: AttentionConfig(rotary_base=0.0), "rotary_base=0.0 must be above 0"),
        (lambda: Block(16, 2, BlockLayout((8,), (2,)), AttentionConfig(), mlp="relu"), "mlp='relu' is not one of"),
        (lambda: causal_layer("softmax", rotary=True, dim=10), "rotary positions need an even head width, not 5"),
    ],
)
def test_options_without_a_meaning_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "options",
    [
        {"heads": 0},
        {"heads": 2, "key_value_heads": 0},
        {"heads": -1},
        {"heads": 2, "key_width": 0},
        {"heads": 2, "value_width": -4},
    ],
    ids=str,
)
def test_no_heads_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        MHLA(16, layout=BlockLayout((8,), (2,)), config=AttentionConfig(), **options)


def causal_layer(kind: str, tokens: int = 12, dim: int = 16, **options: Any) -> Attention:
    settings = AttentionConfig(kind=kind, block_size=4, **options)
    return build_attention(settings, dim, 2, BlockLayout((tokens,), block_size=4), causal=True)


@pytest.mark.parametrize("kind", ["softmax", "mhla", "mhla_window", "gla", "gated_conv"])
def test_hidden_tokens_of_packed_sequences_change_nothing(kind: str) -> None:
    layer, x = causal_layer(kind), torch.randn(1, 12, 16)
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[0, [1, 7]] = False
    packed = layer(x, mask, cu_seqlens=[0, 5, 5, 12])
    torch.testing.assert_close(packed[:, :5], layer(x[:, :5], mask[:, :5]))
    torch.testing.assert_close(packed[:, 5:], layer(x[:, 5:], mask[:, 5:]))
    assert layer(x[:, :0], cu_seqlens=[0, 0]).shape == (1, 0, 16)


@pytest.mark.parametrize("kind", ["softmax", "mhla", "gla"])
@pytest.mark.parametrize(
    "mask", [torch.ones(2, 12, dtype=torch.int64), torch.ones(1, 12) > 0, torch.ones(12) > 0, torch.ones(2, 11) > 0]
)
def test_masks_that_do_not_fit_are_refused(kind: str, mask: torch.Tensor) -> None:
    x, message = torch.randn(2, 12, 16), r"key_mask is \[.*; it must be bool \[2, 12\], True for tokens"
    with pytest.raises(ValueError, match=message):
        causal_layer(kind)(x, mask)
    with pytest.raises(ValueError, match=message):
        Backbone(16, 1, 2, (3, 4), AttentionConfig(kind=kind, block_grid=[3, 2]))(x, key_mask=mask)


@pytest.mark.parametrize("kind", ["softmax", "mhla", "gla", "gated_conv"])
def test_numbers_of_new_tokens_that_do_not_fit_are_refused(kind: str) -> None:
    layer, x = causal_layer(kind), torch.randn(2, 4, 16)
    for counts in ((4,), (4, 5), (-1, 4)):
        with pytest.raises(ValueError, match=r"counts=\[.*\] must be 2 numbers from 0 to 4"):
            layer.next_tokens(x, None, counts)
    state = layer.next_tokens(x, None, (4, 2))[1]
    with pytest.raises(ValueError, match="the state has 2 rows, but x has 3"):
        layer.next_tokens(torch.randn(3, 1, 16), state, (1, 1, 1))
    assert layer.next_tokens(x[:0], None, ())[0].shape == (0, 4, 16)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "mhla"},
        {"kind": "mhla", "mixing": "exponential"},
        {"kind": "mhla_window", "mixing": "exponential", "options": {"sinks": 4}},
    ],
    ids=str,
)
def test_a_layer_for_less_than_a_block_has_blocks_of_the_configured_size(options: dict[str, Any]) -> None:
    short, long = causal_layer(tokens=3, **options), causal_layer(tokens=12, **options)
    short.extend(12)
    assert short.max_tokens == long.max_tokens
    long.load_state_dict(short.state_dict())
    x = torch.randn(1, 12, 16)
    torch.testing.assert_close(short(x), long(x))


def test_a_layer_is_not_shortened_and_only_causal_layers_are_extended() -> None:
    layer = causal_layer("mhla")
    layer.extend(4)
    assert layer(torch.randn(1, 12, 16)).shape == (1, 12, 16)
    with pytest.raises(ValueError, match="only causal attention is extended"):
        MHLA(16, 2, BlockLayout((12,), block_size=4)).extend(24)


@pytest.mark.parametrize("name", ["condition", "context"])
def test_conditions_and_contexts_are_neither_ignored_nor_left_out(name: str) -> None:
    x, value = torch.randn(2, 12, 16), torch.randn(2, 8) if name == "condition" else torch.randn(2, 5, 8)
    options = {f"{name}_dim": 8}
    with pytest.raises(ValueError, match=f"{name} is for blocks that are built with {name}_dim, and has no effect"):
        Backbone(16, 1, 2, (12,), AttentionConfig(kind="softmax"))(x, **{name: value})
    with pytest.raises(ValueError, match=f"{name} is for blocks that are built with {name}_dim, and is missing"):
        Backbone(16, 1, 2, (12,), AttentionConfig(kind="softmax"), **options)(x)


@pytest.mark.parametrize("tokens", [15, 17, 20])
@pytest.mark.parametrize("kind", ["mhla", "softmax"])
def test_a_backbone_takes_the_tokens_of_its_grid(kind: str, tokens: int) -> None:
    model = Backbone(16, 1, 2, (4, 4), AttentionConfig(kind=kind, block_grid=[2, 2]))
    with pytest.raises(ValueError, match=f"{tokens} tokens for a layout of 16"):
        model(torch.randn(1, tokens, 16))


def test_masks_of_a_context_are_checked_and_hide_any_values() -> None:
    model = Backbone(16, 1, 2, (12,), AttentionConfig(kind="softmax"), context_dim=8)
    x, context = torch.randn(2, 12, 16), torch.randn(2, 5, 8)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[:, 3:] = False
    out = model(x, context=context, context_mask=mask)
    torch.testing.assert_close(out, model(x, context=context[:, :3]))
    context[:, 3:] = math.nan
    assert torch.equal(model(x, context=context, context_mask=mask), out)
    with pytest.raises(ValueError, match=r"context_mask is \[2, 5\] torch.int64; it must be bool \[2, 5\]"):
        model(x, context=context, context_mask=torch.ones(2, 5, dtype=torch.int64))


def test_operations_of_summaries() -> None:
    """Two products of 16 x 16 for each token, which write and read a summary, and one for each weighted summary."""
    layout = BlockLayout((64,), block_size=8)
    layer = build_attention(AttentionConfig(kind="mhla"), 32, 2, layout)
    assert layer.summaries_mixed(64) == 8 * 8
    assert layer.summary_flops(64, None, 8 * 8) == layer.operator_flops(64) == 2 * 2 * (2 * 64 + 8 * 8) * 16 * 16
    inside = 2 * 2 * 64 * (8 + 1) / 2 * (16 + 16)
    assert layer.summary_flops(64, 8, 0) == 2 * 2 * 2 * 64 * 16 * 16 + inside
    linear = build_attention(AttentionConfig(kind="linear"), 32, 2, layout)
    assert linear.operator_flops(64) == 2 * 2 * 2 * 64 * 16 * 16


def test_the_matrix_of_a_gated_convolution_gives_its_outputs() -> None:
    layer = build_attention(AttentionConfig(kind="gated_conv"), 16, 2, BlockLayout((12,), (1,)), causal=True)
    torch.nn.init.normal_(layer.conv.weight)
    with torch.no_grad():  # features of a head share their weights, since the matrix has one number for a head
        layer.conv.weight.copy_(
            layer.conv.weight.unflatten(-1, (2, 8)).mean(-1, keepdim=True).expand(-1, 2, 8).flatten(1)
        )
    x = torch.randn(3, 12, 16)
    q, k, v = layer._project(x)
    inputs = AttentionInputs(x, torch.ones_like(q), k, v)
    matrix = layer.weights(inputs)
    assert matrix.shape == (3, 2, 12, 12)
    torch.testing.assert_close(torch.einsum("bhnm,bmhd->bnhd", matrix, v), layer._gated(inputs, None, None))
