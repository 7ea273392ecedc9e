"""What the pictures measure and show."""

from __future__ import annotations

import math

import torch
from mhla_kernels import attention_matrix

from lightning_mhla import BlockLayout
from lightning_mhla.callbacks.pictures import (
    attention_entropy,
    attention_rank,
    draw_attention,
    draw_matrices,
    draw_mixing,
    fold_mixing,
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


def test_every_layer_gets_a_panel() -> None:
    layout = BlockLayout((4, 4), (2, 2), prefix_tokens=1)
    figure = draw_mixing([torch.rand(5, 5), torch.rand(3, 5, 5)], layout)
    assert [axis.get_title() for axis in figure.axes if axis.get_title()] == ["layer 0", "layer 1"]
    figure = draw_attention([torch.rand(2, 17, 17)] * 3, layout, torch.rand(3, 8, 8), queries=4)
    assert len(figure.axes) == 3 * 5


def test_sequences_are_drawn_as_whole_matrices() -> None:
    weights = torch.randn(2, 9, 9).tril()  # signed, as rotary makes them
    figure = draw_matrices([weights] * 5)
    panels = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in panels] == [f"layer {index}" for index in range(5)]
    shown = torch.from_numpy(panels[0].images[0].get_array().filled(float("nan")))
    assert torch.equal(shown.isnan(), weights[0] == 0)
    torch.testing.assert_close(shown.nansum(-1), torch.ones(9), rtol=0, atol=1e-3)
