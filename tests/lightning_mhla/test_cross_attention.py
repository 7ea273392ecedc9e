"""Cross-attention layers: the definition in float64, masks, lengths, positions, initial values, gradients, rejected options."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_mhla import AttentionConfig, BlockLayout, CrossAttentionConfig, MHLACrossAttention
from lightning_mhla.attention import CrossAttention, CrossProjections, build_cross_attention
from lightning_mhla.attention.cross_mixing import initial_cross_mixing
from lightning_mhla.attention.mixing import LARGEST_DECAY, locality_mixing

IMAGE, TEXT = BlockLayout((5, 6), blocks=(2, 3)), BlockLayout((20,), block_size=4)
SEQUENCE = BlockLayout((24,), block_size=5)
DIM, CONTEXT, HEADS = 12, 7, 3


def build(layout: BlockLayout = IMAGE, context: BlockLayout = TEXT, **options: Any) -> CrossAttention:
    """Build a layer in float64 whose mixing coefficients differ from their initial values."""
    torch.manual_seed(0)
    widths = {name: options.pop(name) for name in ("key_value_heads", "key_width", "value_width") if name in options}
    layer = build_cross_attention(
        AttentionConfig(**options), DIM, HEADS, layout, context, context_dim=CONTEXT, **widths
    ).double()
    if isinstance(layer, MHLACrossAttention):
        for parameter in layer.mixing.parameters():
            torch.nn.init.uniform_(parameter, 0.05, 1.0)
    return layer


def tokens(queries: int = 30, keys: int = 20) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(2, count, width, generator=generator).double() for count, width in ((queries, DIM), (keys, CONTEXT))
    )


def block_of(layout: BlockLayout, count: int) -> Tensor:
    """Return the block of each of ``count`` tokens in raster order."""
    if layout.block_size is not None:
        return torch.arange(count) // layout.block_size
    blocks = torch.empty(count, dtype=torch.int64)
    blocks[layout.order] = torch.repeat_interleave(torch.tensor(layout.block_sizes))
    return blocks


def exponential(layer: Any, queries: tuple[int, ...], keys: tuple[int, ...]) -> Tensor:
    """Mixing coefficients ``[H, Mq, Mk]`` by a loop over pairs of blocks, for sequences and for grids of equal axes."""
    amplitude, decay = layer.mixing.amplitude.double(), layer.mixing.decay.double().clamp(max=LARGEST_DECAY)
    built = (layer.layout.block_grid, layer.context_layout.block_grid) if layer.layout.block_size else (queries, keys)
    decay = decay if decay.dim() == 3 else decay[..., None]
    grids = [torch.cartesian_prod(*(torch.arange(n) for n in grid)).view(-1, len(grid)) for grid in (queries, keys)]
    scale = torch.tensor([k / q for q, k in zip(*built, strict=True)], dtype=torch.float64)
    out = torch.zeros(len(amplitude), len(grids[0]), len(grids[1]), dtype=torch.float64)
    for i, a in enumerate(grids[0]):
        for j, b in enumerate(grids[1]):
            distance = ((a + 0.5) * scale - 0.5 - b).abs()
            out[:, i, j] = (amplitude * (-(decay * distance).sum(-1)).exp()).sum(-1)
    return out


def defined(layer: Any, x: Tensor, context: Tensor, mixing: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the layer from all pairs of a query and a context token.

    Args:
        layer: layer with feature map relu.
        x: tokens.
        context: context tokens.
        mixing: coefficient of each pair, ``[H, Nq, Nk]``.
        mask: ``[B, Nk]``, False for hidden context tokens.
    """
    q = layer.q(x).unflatten(-1, (HEADS, -1))
    k, v = layer.kv(context).split(
        [layer.key_value_heads * layer.key_width, layer.key_value_heads * layer.value_width], -1
    )
    k, v = (
        t.unflatten(-1, (layer.key_value_heads, -1)).repeat_interleave(HEADS // layer.key_value_heads, 2)
        for t in (k, v)
    )
    weights = mixing * torch.einsum("bqhd,bkhd->bhqk", q.relu() + 1e-6, k.relu() + 1e-6)
    if mask is not None:
        weights = weights * mask[:, None, None]
    if layer.config.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
    else:
        weights = weights * layer.key_width**-0.5
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    out = out if layer.norm is None else layer.norm(out)
    out = out.flatten(2)
    if layer.gate is not None:
        out = out * torch.nn.functional.silu(layer.gate(x))
    return layer.proj(out)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixing_per_head": True, "gate": True, "key_value_heads": 1},
        {"normalize": False, "key_width": 5, "value_width": 3},
    ],
    ids=["shared", "per head", "widths"],
)
def test_dense_mixing_of_an_image_and_a_text_is_the_definition(options: dict[str, Any]) -> None:
    layer = build(**options)
    x, context = tokens(keys=18)  # shorter than the layout, with a partial last block
    mixing = layer.mixing.matrix().double().expand(HEADS, 6, 5)
    pairs = mixing[:, block_of(IMAGE, 30)][:, :, block_of(TEXT, 18)]
    mask = torch.rand(2, 18, generator=torch.Generator().manual_seed(3)) < 0.6
    torch.testing.assert_close(layer(x, context), defined(layer, x, context, pairs), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        layer(x, context, context_mask=mask), defined(layer, x, context, pairs, mask), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize(
    ("layout", "context", "counts"),
    [
        (SEQUENCE, TEXT, (33, 41)),  # longer than both layouts
        (IMAGE, BlockLayout((4, 8), blocks=(2, 4)), (30, 32)),
    ],
    ids=["sequences", "images"],
)
def test_exponential_mixing_takes_scaled_positions(
    layout: BlockLayout, context: BlockLayout, counts: tuple[int, int]
) -> None:
    layer = build(layout, context, mixing="exponential", mixing_per_head=True, mixing_terms=3)
    x, read = tokens(*counts)
    blocks = [block_of(side, count) for side, count in zip((layout, context), counts, strict=True)]
    grids = [
        (-(-count // side.block_size),) if side.block_size else side.block_grid
        for side, count in zip((layout, context), counts, strict=True)
    ]
    pairs = exponential(layer, *grids)[:, blocks[0]][:, :, blocks[1]]
    torch.testing.assert_close(layer(x, read), defined(layer, x, read, pairs), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mixing", ["dense", "exponential"])
def test_pieces_of_a_sequence_give_the_outputs_of_the_complete_sequence(mixing: Any) -> None:
    """The first piece ends inside a block, the second one is one token, the third begins and ends inside blocks."""
    layer = build(SEQUENCE, TEXT, mixing=mixing, mixing_per_head=True)
    x, context = tokens(24)
    bounds = (0, 7, 8, 19, 24)
    pieces = [layer(x[:, a:b], context, start=a) for a, b in pairwise(bounds)]
    torch.testing.assert_close(torch.cat(pieces, 1), layer(x, context), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "options",
    [
        {"mixing_per_head": True, "gate": True},
        {"key_value_heads": 1, "normalize": False, "feature_map": "elu"},
        {"mixing": "exponential", "feature_map": "learned"},
        {"kind": "linear"},
    ],
    ids=["per head", "plain", "exponential", "linear"],
)
def test_summaries_of_a_context_are_read_like_its_tokens(options: dict[str, Any]) -> None:
    """Pieces that end inside blocks, single tokens, and masks on both sides."""
    layer = build(SEQUENCE, TEXT, **options)
    x, context = tokens(24, 18)
    mask, readable = torch.ones(2, 24).bool(), torch.ones(2, 18).bool()
    mask[0, 9:12], readable[1, 5:] = False, False
    summaries = layer.summarize(context, readable)
    for a, b in pairwise((0, 7, 8, 9, 19, 24)):
        piece = {"mask": mask[:, a:b], "start": a}
        want = layer(x[:, a:b], context, context_mask=readable, **piece)
        torch.testing.assert_close(layer(x[:, a:b], summaries, **piece), want, rtol=1e-9, atol=1e-9)
    swapped_rows = summaries.select(torch.tensor([1, 0]))
    want = layer(x, context.flip(0), context_mask=readable.flip(0))
    torch.testing.assert_close(layer(x, swapped_rows), want, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="summaries contain the mask and the layout of their context"):
        layer(x, summaries, context_mask=readable)
    with pytest.raises(ValueError, match="kind 'softmax' has no summaries"):
        build(SEQUENCE, TEXT, kind="softmax").summarize(context)


SUMMARIZED: list[dict[str, Any]] = [
    {"mixing_per_head": True},
    {"mixing": "exponential", "feature_map": "learned", "key_value_heads": 1},
    {"kind": "linear", "gate": True},
]
SUMMARIZED_IDS = ["per head", "exponential", "linear"]


@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", SUMMARIZED, ids=SUMMARIZED_IDS)
def test_calls_without_gradients_leave_those_of_a_later_call(
    options: dict[str, Any], scope: type[AbstractContextManager[None]]
) -> None:
    """A block is read without gradients, then with them, then without them after a step of an optimizer."""
    layer = build(SEQUENCE, TEXT, **options)
    x, context = (t.requires_grad_() for t in tokens(24, 18))
    leaves, piece = [context, *layer.parameters()], {"start": 5}
    want = torch.autograd.grad(layer(x[:, 5:8], context, **piece).square().sum(), leaves)
    summaries = layer.summarize(context)
    with scope():
        plain = layer(x[:, 5:8], summaries, **piece).clone()
    got = torch.autograd.grad(layer(x[:, 5:8], summaries, **piece).square().sum(), leaves, retain_graph=True)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    with scope():
        assert torch.equal(layer(x[:, 5:8], summaries, **piece), plain)
    mixing = [parameter for name, parameter in layer.named_parameters() if "mixing" in name]
    if mixing:
        optimizer = torch.optim.SGD(mixing, lr=0.1)
        layer(x[:, 5:8], summaries, **piece).square().sum().backward()
        optimizer.step()
        with scope():
            changed = layer(x[:, 5:8], context, **piece)
            torch.testing.assert_close(layer(x[:, 5:8], summaries, **piece), changed, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(changed, plain), "the step changes the coefficients"


@pytest.mark.parametrize("options", SUMMARIZED, ids=SUMMARIZED_IDS)
def test_summaries_that_do_not_fit_are_rejected(options: dict[str, Any]) -> None:
    layer = build(SEQUENCE, TEXT, **options)
    x, context = tokens(24, 18)
    summaries = layer.summarize(context)
    for rows in ([0], [0, 1, 1]):
        with pytest.raises(ValueError, match=rf"summaries of 2 rows, 3 heads and keys of width 4 .* \[{len(rows)}, 24"):
            layer(x[rows], summaries)
        with pytest.raises(ValueError, match=rf"summaries of {len(rows)} rows"):
            layer(x, summaries.select(torch.tensor(rows)))
    for shape in ((6, 4), (3, 8), (1, 4)):
        queries = CrossProjections(
            lambda x, shape=shape: x.new_ones(*x.shape[:2], *shape), lambda c: (c, c), lambda out: out
        )
        with pytest.raises(ValueError, match=rf"do not fit queries \[2, 24, {shape[0]}, {shape[1]}\]"):
            layer(x, summaries, projections=queries)
    others = [copy.deepcopy(layer), build(SEQUENCE, TEXT, **options), build(SEQUENCE, TEXT, kind="softmax")]
    for other in others:
        with pytest.raises(ValueError, match="computed by a different layer"):
            other(x, summaries)
    with torch.no_grad():
        copied = copy.deepcopy(layer.summarize(context))
    torch.testing.assert_close(layer(x, copied), layer(x, context), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", SUMMARIZED, ids=SUMMARIZED_IDS)
def test_outputs_have_the_dtype_of_the_queries(options: dict[str, Any]) -> None:
    """Summaries that are computed under autocast and read outside of it, and the other way round."""
    layer = build(SEQUENCE, TEXT, **options).float()
    x, context = (t.float() for t in tokens(24, 18))
    cast = torch.autocast("cpu", dtype=torch.bfloat16)
    want = layer(x, context)
    with cast:
        low, low_want = layer.summarize(context), layer(x, context)
    out = layer(x, low)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, want, rtol=0.05, atol=0.05)
    with cast:
        out = layer(x, layer.summarize(context)), layer(x[:, 5:8], low, start=5)
    assert {y.dtype for y in out} == {low_want.dtype} == {torch.bfloat16}
    torch.testing.assert_close(out[0], low_want, rtol=0.05, atol=0.05)
    half = build(SEQUENCE, TEXT, **options).bfloat16()
    assert half(x.bfloat16(), half.summarize(context.bfloat16())).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["mhla", "linear", "softmax"])
def test_a_side_without_tokens_is_named(kind: str) -> None:
    layer, (x, context) = build(SEQUENCE, TEXT, kind=kind), tokens(24)
    for start in (0, 7):
        with pytest.raises(ValueError, match=r"0 query tokens, but attention needs at least one: \[2, 0, 12\]"):
            layer(x[:, :0], context, start=start)
    with pytest.raises(ValueError, match=r"0 context tokens, but attention needs at least one: \[2, 0, 7\]"):
        layer(x, context[:, :0])
    with pytest.raises(ValueError, match="0 query tokens for a layout of 30"):
        build(kind=kind)(x[:, :0], context)


@pytest.mark.parametrize("kind", ["mhla", "linear", "softmax"])
def test_hidden_tokens_change_nothing(kind: str) -> None:
    layer = build(kind=kind)
    x, context = tokens()
    mask, readable = torch.ones(2, 30).bool(), torch.ones(2, 20).bool()
    mask[0, 4:9], readable[0, 11:], readable[1] = False, False, False
    out = layer(x, context, mask, readable)
    spoiled, read = x.masked_fill(~mask[..., None], torch.nan), context.masked_fill(~readable[..., None], torch.nan)
    assert torch.equal(layer(spoiled, read, mask, readable), out)
    assert not out[0, 4:9].any()
    torch.testing.assert_close(out[0, 12:], layer(x, context[:, :11])[0, 12:], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(out[1], layer.proj(torch.zeros(30, DIM).double()))  # nothing to read


@pytest.mark.parametrize(("layout", "context"), [(IMAGE, TEXT), (SEQUENCE, TEXT)], ids=["image and text", "texts"])
def test_uniform_coefficients_start_as_linear_attention(layout: BlockLayout, context: BlockLayout) -> None:
    start, counts = AttentionConfig(mixing_init="uniform", feature_map="elu"), (layout.num_tokens, 20)
    torch.manual_seed(0)
    layer = build_cross_attention(start, DIM, HEADS, layout, context, context_dim=CONTEXT).double()
    linear = build(layout, context, kind="linear", feature_map="elu")
    linear.load_state_dict({name: value for name, value in layer.state_dict().items() if "mixing" not in name})
    x, read = tokens(*counts)
    torch.testing.assert_close(layer(x, read), linear(x, read), rtol=1e-4, atol=1e-5)  # eps weighs more after 1 / Mk


def test_softmax_is_that_of_torch() -> None:
    layer, (x, context) = build(kind="softmax", key_value_heads=1), tokens()
    q = layer.q(x).unflatten(-1, (HEADS, 4)).transpose(1, 2)
    k, v = (t[:, None].expand(-1, HEADS, -1, -1) for t in layer.kv(context).split(4, -1))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x, context), layer.proj(want))


def test_locality_is_that_of_self_attention_on_equal_grids_and_relative_on_others() -> None:
    torch.testing.assert_close(initial_cross_mixing(IMAGE, IMAGE), locality_mixing(IMAGE))
    assert torch.equal(initial_cross_mixing(IMAGE, TEXT), torch.full((6, 5), 1 / 5)), "text has no place in an image"
    stretched = initial_cross_mixing(BlockLayout((3,), block_size=1), BlockLayout((9,), block_size=1))
    assert stretched.argmax(1).tolist() == [1, 4, 7], "each query block is closest to the middle of its third"
    torch.testing.assert_close(stretched.sum(1), torch.ones(3))
    two = initial_cross_mixing(BlockLayout((1,), block_size=1), BlockLayout((2,), block_size=1))
    assert two.tolist() == [[0.5, 0.5]], "equally far blocks weigh the same"


@pytest.mark.parametrize(
    ("layout", "context", "options"),
    [
        (IMAGE, TEXT, {"mixing_per_head": True, "gate": True, "normalize": False}),
        (IMAGE, TEXT, {"feature_map": "learned"}),
        (SEQUENCE, TEXT, {"mixing": "exponential", "mixing_terms": 2}),
        (IMAGE, TEXT, {"kind": "linear", "feature_map": "elu"}),
    ],
    ids=["dense", "learned", "exponential", "linear"],
)
def test_gradients_reach_every_parameter_and_are_right(
    layout: BlockLayout, context: BlockLayout, options: dict[str, Any]
) -> None:
    layer = build(layout, context, **options).to(torch.float64)
    x, read = (t.requires_grad_() for t in tokens(layout.num_tokens, 9))
    assert torch.autograd.gradcheck(lambda *t: layer(*t), (x[:1, :], read[:1]), atol=1e-5, rtol=1e-3, fast_mode=True)
    layer(x, read).square().sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in layer.parameters() if parameter.grad is not None)
    idle = [name for name, parameter in layer.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert not idle, f"no gradient for {idle}"


def test_a_layout_of_the_call_is_the_layout_of_a_layer_with_it() -> None:
    """A larger image, in as many blocks, once by an argument, and once by fit."""
    layer, larger = build(), BlockLayout((8, 9), blocks=(2, 3))
    x, context = tokens(72)
    fitted = copy.deepcopy(layer)
    fitted.fit(larger)
    torch.testing.assert_close(layer(x, context, layout=larger), fitted(x, context))
    with pytest.raises(ValueError, match="72 query tokens for a layout of 30"):
        layer(x, context)


def test_the_layer_compiles_without_breaks() -> None:
    layer, (x, context) = build(), tokens()
    mask = torch.ones(2, 20).bool()
    mask[0, 7:] = False
    compiled = torch.compile(lambda *t: layer(*t, context_mask=mask), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, context), layer(x, context, context_mask=mask))


@pytest.mark.parametrize("kind", ["mhla", "linear", "softmax"])
def test_an_exported_layer_takes_any_number_of_rows(kind: str) -> None:
    layer, (x, context) = build(kind=kind), tokens()
    rows = torch.export.Dim("rows", min=2, max=64)
    graph = torch.export.export(layer, (x, context), dynamic_shapes=({0: rows}, {0: rows})).module()
    x, context = x.repeat(2, 1, 1)[1:], context.repeat(2, 1, 1)[1:]
    torch.testing.assert_close(graph(x, context), layer(x, context))


def test_coefficients_outside_the_range_count_as_reflected_and_go_to_other_heads() -> None:
    layer = build()
    with torch.no_grad():
        layer.mixing.weight[0, 0] = 1.25
    x, context = tokens()
    out = layer(x, context)
    layer.mixing.bring_inside_()
    assert layer.mixing.weight[0, 0] == 0.75
    assert torch.equal(layer(x, context), out)
    heads = build(mixing_per_head=True)
    assert heads.mixing.carried("weight", layer.mixing.weight.detach(), (2, 3)).shape == (HEADS, 6, 5)
    assert heads.mixing.carried("weight", layer.mixing.weight.detach(), (3, 2)) is None
    layer.mixing.reset_parameters()
    assert torch.equal(layer.mixing.weight, torch.full((6, 5), 0.2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "gla"}, "'gla' reads its own tokens only; cross-attention has the kinds linear, mhla, softmax"),
        ({"lepe": 3}, "lepe=3 needs queries and keys of the same tokens"),
        ({"rotary": True, "normalize": False}, "rotary=True needs queries and keys of the same tokens"),
        ({"key_weighting": True}, "key_weighting=True needs"),
        ({"block_grid": [3, 3]}, r"asks for blocks \[3, 3\]"),
        ({"mixing": "exponential"}, "needs queries and context on the same axes.*mixing: dense"),
    ],
)
def test_options_without_meaning_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_the_class_of_a_kind_rejects_the_configuration_of_another() -> None:
    with pytest.raises(ValueError, match=r"computes attention kind 'mhla'.*has kind 'linear'"):
        MHLACrossAttention(DIM, HEADS, IMAGE, TEXT, AttentionConfig(kind="linear"))
    assert MHLACrossAttention(DIM, HEADS, IMAGE, TEXT).config.kind == "mhla"
    with pytest.raises(ValueError, match="key_block_size=0 must be positive"):
        CrossAttentionConfig(key_block_size=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda layer, x, c: layer(x[:, :29], c), "29 query tokens for a layout of 30"),
        (
            lambda layer, x, c: layer(x, torch.cat([c, c], 1)),
            r"\[10\] context blocks do not fit.*made for \[5\].*exponential",
        ),
        (lambda layer, x, c: layer(x, c, start=3), "start=3 needs a layout with block_size"),
        (lambda layer, x, c: layer(x, c, context_mask=torch.ones(2, 19).bool()), r"context_mask is \[2, 19\]"),
        (lambda layer, x, c: layer(x, c, torch.ones(2, 30)), r"mask is \[2, 30\] torch.float32; it must be bool"),
        (lambda layer, x, c: layer(x[0], c), r"x is \[30, .*\]; it must be \[batch, tokens, width\]"),
        (lambda layer, x, c: layer(x, c[0]), r"context is \[20, .*\]; it must be \[batch, tokens, width\]"),
        (lambda layer, x, c: layer(x, c[:1]), "a context of 1 rows does not fit tokens of 2 rows"),
    ],
)
def test_calls_that_do_not_fit_are_rejected(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(build(), *tokens())


def test_a_sequence_ends_where_dense_coefficients_end() -> None:
    layer, (x, context) = build(SEQUENCE, TEXT), tokens(5)
    assert layer(x, context, start=20).shape == x.shape
    with pytest.raises(ValueError, match=r"\[1\] query blocks after 5 others do not fit dense coefficients"):
        layer(x, context, start=25)


@pytest.mark.parametrize(("queries", "keys", "per_head"), [(24, 20, False), (24, 13, True), (11, 20, True)])
def test_an_exported_graph_takes_any_length_whatever_the_example(queries: int, keys: int, per_head: bool) -> None:
    """An example may fill all blocks that the coefficients cover, of the queries, of the context or of both."""
    layer = build(SEQUENCE, TEXT, mixing_per_head=per_head)
    lengths = {1: torch.export.Dim("queries", min=6, max=24)}, {1: torch.export.Dim("keys", min=5, max=20)}
    graph = torch.export.export(layer, tokens(queries, keys), dynamic_shapes=lengths).module()
    for example in ((24, 20), (6, 5), (17, 9)):
        torch.testing.assert_close(graph(*tokens(*example)), layer(*tokens(*example)))


@pytest.mark.parametrize("start", [-1, "a", 1.5, True, None, torch.tensor(1.0), [1]], ids=str)
@pytest.mark.parametrize("queries", [SEQUENCE, IMAGE], ids=["sequence", "image"])
def test_the_tokens_before_are_counted_by_an_integer(queries: BlockLayout, start: Any) -> None:
    layer, (x, context) = build(queries, TEXT), tokens(queries.num_tokens)
    with pytest.raises(ValueError, match=r"start=.* must be an integer, at least 0"):
        layer(x, context, start=start)
    assert layer(x, context, start=np.int64(0)).shape == x.shape


def test_the_smallest_decay_holds_in_cross_attention() -> None:
    layout = BlockLayout((32,), block_size=8)
    config = AttentionConfig(block_size=8, mixing="exponential", mixing_min_decay=0.5)
    layer = MHLACrossAttention(16, 2, layout, layout, config)
    assert layer.mixing.decay.min() > 0.499
    with pytest.raises(ValueError, match="mixing_min_decay=9"):
        MHLACrossAttention(16, 2, layout, layout, replace(config, mixing_min_decay=9.0))
