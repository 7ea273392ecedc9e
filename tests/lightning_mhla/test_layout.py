"""Block layouts: order, offsets, and rejected arguments."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mhla import BlockLayout


@st.composite
def layouts(draw: st.DrawFn) -> BlockLayout:
    grid = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    blocks = [draw(st.integers(1, length)) for length in grid]
    return BlockLayout(tuple(grid), tuple(blocks), prefix_tokens=draw(st.integers(0, 2)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(layout=layouts())
def test_blocks_are_boxes_that_cover_the_grid_once(layout: BlockLayout) -> None:
    order = layout.order.tolist()
    assert sorted(order) == list(range(layout.num_tokens)), "some token is missing or comes twice"
    assert [order[i] for i in layout.inverse.tolist()] == list(range(layout.num_tokens))
    offsets = layout.block_offsets.tolist()
    assert len(offsets) == layout.num_blocks + 1
    assert (offsets[0], offsets[-1]) == (0, layout.num_tokens)
    first = int(layout.prefix_tokens > 0)
    boxes = list(product(*(list(pairwise(axis)) for axis in layout.edges)))
    for box, (start, end) in zip(boxes, list(pairwise(offsets))[first:], strict=True):
        want = [layout.prefix_tokens + _raster(place, layout.grid) for place in product(*(range(a, b) for a, b in box))]
        assert order[start:end] == want, f"block {box} holds other tokens"


def _raster(place: tuple[int, ...], grid: tuple[int, ...]) -> int:
    index = 0
    for at, length in zip(place, grid, strict=True):
        index = index * length + at
    return index


def test_uneven_blocks_differ_by_one_token_along_an_axis() -> None:
    layout = BlockLayout((14, 14), (4, 4))
    assert [b - a for a, b in pairwise(layout.edges[0])] == [3, 4, 3, 4]
    assert "block_offsets" in layout.operator_blocks


@pytest.mark.parametrize(
    ("layout", "blocks"),
    [
        (BlockLayout((16, 16), (4, 4)), {"block_size": 16}),
        (BlockLayout((10,), block_size=4), {"block_size": 4}),
        (BlockLayout((3,), block_size=4), {"block_size": 4}),
        (BlockLayout((6,), (2,), prefix_tokens=3), {"block_size": 3}),
    ],
    ids=["even", "short last", "one short block", "prefix of a block's size"],
)
def test_equal_blocks_need_no_offsets(layout: BlockLayout, blocks: dict[str, int]) -> None:
    assert layout.operator_blocks == blocks


def test_one_dimension_is_already_in_order() -> None:
    assert BlockLayout((10,), block_size=4).is_raster
    assert not BlockLayout((4, 4), (2, 2)).is_raster
    assert torch.equal(BlockLayout((4, 4), (2, 2)).order[:4], torch.tensor([0, 1, 4, 5]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grid": (8, 8), "blocks": (9, 4)}, r"block_grid \(9, 4\) does not fit the token grid \(8, 8\)"),
        ({"grid": (8, 8), "blocks": (4,)}, "has 1 axes"),
        ({"grid": (8, 8)}, "exactly one of blocks"),
        ({"grid": (8,), "blocks": (2,), "block_size": 4}, "exactly one of blocks"),
        ({"grid": (8, 8), "block_size": 4}, "needs a 1-D grid"),
        ({"grid": (8, 0), "blocks": (1, 1)}, "at least one token"),
        ({"grid": (8,), "blocks": (2,), "prefix_tokens": -1}, "must not be negative"),
    ],
)
def test_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockLayout(**arguments)
