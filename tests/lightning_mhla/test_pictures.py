"""Content of the pictures: measures of attention, matrices, curves."""

from __future__ import annotations

import math

import pytest
import torch
from mhla_kernels import attention_matrix
from torch import nn

from lightning_mhla import MHLA, AttentionConfig, BlockLayout
from lightning_mhla.callbacks.pictures import (
    attention_entropy,
    attention_rank,
    draw_attention,
    draw_frames,
    draw_matrices,
    draw_mixing,
    fold_mixing,
    numbered_layers,
)


def test_rank_of_mhla_exceeds_the_bound_of_linear_attention() -> None:
    q, k = torch.rand(1, 64, 2, 4), torch.rand(1, 64, 2, 4)
    linear = attention_matrix(q, k, torch.ones(1, 1), block_size=64)[0]
    mixed = attention_matrix(q, k, torch.rand(16, 16), block_size=4)[0]
    assert attention_rank(linear) == 4
    assert attention_rank(mixed) > 40


def test_entropy_runs_from_one_token_to_all() -> None:
    assert attention_entropy(torch.eye(8)[None]) == 0.0
    assert math.isclose(attention_entropy(torch.full((2, 8, 8), 1 / 8)), math.log(8), rel_tol=1e-5)


def test_a_row_is_folded_back_to_the_grid() -> None:
    layout = BlockLayout((6, 4), (3, 2))
    mixing = torch.arange(36.0).view(6, 6)
    folded = fold_mixing(mixing, layout)
    assert folded.shape == (3 * 4 - 1, 2 * 3 - 1)
    for block in range(6):
        row, column = divmod(block, 2)
        tile = folded[row * 4 : row * 4 + 3, column * 3 : column * 3 + 2]
        assert torch.equal(tile.flatten(), mixing[block])
    assert folded[3].isnan().all()
    assert torch.equal(fold_mixing(mixing, BlockLayout((6,), (6,))), mixing)


def test_layers_of_other_grids_are_drawn_beside_each_other() -> None:
    """The stages of a VLT, say."""
    layouts = {"0.0": BlockLayout((6, 4), (3, 2)), "1.0": BlockLayout((3, 2), (1, 2))}
    figure = draw_attention({"0.0": torch.rand(1, 24, 24), "1.0": torch.rand(2, 6, 6)}, layouts, None, queries=2)
    assert [axis.get_images()[0].get_array().shape for axis in figure.axes] == [(6, 4)] * 2 + [(3, 2)] * 2
    assert [tuple(axis.lines[0].get_xydata()[0]) for axis in figure.axes] == [(1, 1), (3, 4), (0, 0), (1, 2)]
    figure = draw_mixing({"0.0": torch.rand(6, 6), "1.0": torch.rand(2, 2)}, layouts)
    panels = [axis.get_images()[0].get_array().shape for axis in figure.axes if axis.get_title()]
    assert panels == [(3 * 4 - 1, 2 * 3 - 1), (1, 2 * 3 - 1)]


def test_every_layer_gets_a_panel() -> None:
    layout = BlockLayout((4, 4), (2, 2), prefix_tokens=1)
    figure = draw_mixing({"0": torch.rand(5, 5), "3": torch.rand(3, 5, 5)}, {"0": layout, "3": layout})
    assert [axis.get_title() for axis in figure.axes if axis.get_title()] == ["layer 0", "layer 3"]
    for channels in (1, 3, 4):
        weights = {number: torch.rand(2, 17, 17) for number in ("1", "2", "5")}
        figure = draw_attention(weights, dict.fromkeys(weights, layout), torch.rand(channels, 8, 8), queries=4)
        assert len(figure.axes) == 3 * 5
        assert [axis.get_ylabel() for axis in figure.axes if axis.get_ylabel()] == ["layer 1", "layer 2", "layer 5"]


@pytest.mark.parametrize(("length", "shown"), [(1, [0]), (5, [0, 1, 2, 3, 4]), (9, [0, 2, 4, 6, 8])])
def test_attention_in_a_clip_is_drawn_by_frame(length: int, shown: list[int]) -> None:
    """The picture shows the query in the middle of the middle frame; entries of the matrix identify query and key."""
    layout = BlockLayout((length, 3, 4), (1, 1, 1))
    tokens = layout.num_tokens
    weights = torch.arange(float(tokens**2)).view(1, tokens, tokens).repeat(2, 1, 1)
    clip = torch.arange(4.0 * length).view(1, -1, 1, 1).expand(1, -1, 6, 8)  # four frames for one of the grid
    figure = draw_frames({"1": weights}, layout, clip)
    axes, middle = figure.axes, length // 2
    row = weights[0, (middle * 3 + 1) * 4 + 2].view(length, 3, 4)
    assert [axis.get_title() for axis in axes[: len(shown)]] == [f"frame {frame}" for frame in shown]
    for column, frame in enumerate(shown):
        below = axes[len(shown) + column]
        assert below.images[0].get_array().tolist() == row[frame].tolist()
        assert bool(below.lines) == (frame == middle)
    assert axes[len(shown)].get_ylabel() == "layer 1"


def test_layers_have_the_numbers_of_the_model() -> None:
    config = AttentionConfig(block_grid=(1, 1))
    layout = BlockLayout((4, 4), (1, 1))
    ours = [MHLA(8, 2, layout, config) for _ in range(2)]
    blocks = nn.ModuleList([nn.ModuleDict({"attn": each}) for each in (nn.Identity(), ours[0], nn.Identity(), ours[1])])
    assert list(numbered_layers(nn.ModuleDict({"blocks": blocks}))) == ["1", "3"]
    twice = nn.ModuleList([nn.ModuleDict({"first": ours[0], "second": ours[1]})])
    assert list(numbered_layers(twice)) == ["0", "1"], "names that do not tell them apart"


def test_sequences_are_drawn_as_whole_matrices() -> None:
    weights = torch.randn(2, 9, 9).tril()  # signed, as rotary makes them
    figure = draw_matrices({str(index): weights for index in range(5)})
    panels = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in panels] == [f"layer {index}" for index in range(5)]
    shown = torch.from_numpy(panels[0].images[0].get_array().filled(float("nan")))
    assert torch.equal(shown.isnan(), weights[0] == 0)
    torch.testing.assert_close(shown.nansum(-1), torch.ones(9), rtol=0, atol=1e-3)
