"""Mixing coefficients: start, bounds, precision, and their place in the optimiser."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import nn

from lightning_mhla import MHLA, AttentionConfig, BlockLayout
from lightning_mhla.attention.mixing import (
    LOWER,
    DenseCoefficients,
    ExponentialCoefficients,
    clip_mixing,
    locality_mixing,
    uniform_mixing,
)
from lightning_mhla.training.optim import OptimizerConfig, Schedule, build_optimizer, parameter_groups


def test_locality_follows_the_paper() -> None:
    mixing = locality_mixing(BlockLayout((8, 8), (4, 4)))
    distance = [math.dist((0, 0), (i, j)) for i in range(4) for j in range(4)]
    want = torch.tensor([1 - d / max(distance) for d in distance])
    torch.testing.assert_close(mixing[0], want / want.sum())
    torch.testing.assert_close(mixing.sum(-1), torch.ones(16))
    assert mixing[5].argmax() == 5


def test_causal_start_sees_every_earlier_block_and_no_later() -> None:
    for start in (locality_mixing, uniform_mixing):
        mixing = start(BlockLayout((64,), block_size=8), causal=True)
        assert (mixing.tril() > 0).sum() == 36, f"{start.__name__} starts a visible block at zero"
        assert (mixing.triu(1) == 0).all()
        torch.testing.assert_close(mixing.sum(-1), torch.ones(8))


def test_one_block_has_weight_one() -> None:
    assert locality_mixing(BlockLayout((5, 5), (1, 1))).tolist() == [[1.0]]


def test_prefix_block_is_near_to_all() -> None:
    mixing = locality_mixing(BlockLayout((4, 4), (2, 2), prefix_tokens=1))
    torch.testing.assert_close(mixing[0], torch.full((5,), 0.2))
    assert (mixing[1:, 0] == mixing[1:].amax(-1)).all()


def test_a_coefficient_at_the_bound_can_grow_again() -> None:
    torch.manual_seed(0)
    layer = MHLA(8, 2, BlockLayout((4, 4), (2, 2)))
    with torch.no_grad():
        layer.mixing.weight.fill_(-5.0)
        layer.mixing.weight.diagonal().fill_(7.0)
    layer.mixing.clip_()
    assert (layer.mixing.weight.min(), layer.mixing.weight.max()) == (torch.tensor(LOWER), 1.0)
    optimizer, _, _ = build_optimizer(layer, OptimizerConfig(lr=0.1), steps=10, steps_per_epoch=1)
    layer.mixing.weight.grad = -torch.ones_like(layer.mixing.weight)
    optimizer.step()
    assert (layer.mixing.weight >= 0.09).all(), "a coefficient stuck at its lower bound"
    assert layer.mixing.weight.max() == 1.0, "a coefficient left its upper bound"


def test_coefficients_stay_float32_in_a_bfloat16_model() -> None:
    layer = MHLA(8, 2, BlockLayout((4, 4), (2, 2)))
    before = layer.mixing.weight.detach().clone()
    layer.bfloat16()
    assert layer.qkv.weight.dtype == torch.bfloat16
    assert layer.mixing.weight.dtype == torch.float32
    assert torch.equal(layer.mixing.weight, before)
    assert layer(torch.randn(2, 16, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_frozen_and_per_head() -> None:
    layout = BlockLayout((4, 4), (2, 2))
    assert not DenseCoefficients(layout, trainable=False).weight.requires_grad
    assert DenseCoefficients(layout, heads=3).weight.shape == (3, 4, 4)
    with pytest.raises(ValueError, match="'random' is not one of"):
        DenseCoefficients(layout, init="random")  # type: ignore[arg-type]


def test_parameter_groups() -> None:
    model = nn.ModuleDict({"attn": MHLA(8, 2, BlockLayout((4, 4), (2, 2))), "norm": nn.LayerNorm(8)})
    groups = parameter_groups(model, OptimizerConfig(lr=1.0, weight_decay=0.1, mixing_lr_scale=5.0))
    found = {group["name"].split("-")[0]: group for group in groups}
    assert set(found) == {"decay", "no_decay", "mixing"}
    assert (found["mixing"]["lr"], found["mixing"]["weight_decay"]) == (5.0, 0.0)
    assert found["no_decay"]["weight_decay"] == 0.0
    assert {p.ndim for p in found["decay"]["params"]} == {2}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_layer_decay_lowers_the_rate_towards_the_input() -> None:
    model = nn.ModuleDict(
        {"stem": nn.Linear(2, 2), "a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "head": nn.Linear(2, 2)}
    )
    layers = [["stem"], ["a."], ["b."]]
    groups = parameter_groups(model, OptimizerConfig(lr=1.0, layer_decay=0.5), layers)
    rate = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert [rate[id(model[name].weight)] for name in ("stem", "a", "b", "head")] == [0.125, 0.25, 0.5, 1.0]


def test_schedule() -> None:
    factor = Schedule(OptimizerConfig(lr=1.0, min_lr=0.1), steps=110, warmup=10)
    assert [round(factor(step), 3) for step in (0, 9, 10, 60, 110)] == [0.1, 1.0, 1.0, 0.55, 0.1]
    with pytest.raises(ValueError, match="needs an end"):
        build_optimizer(nn.Linear(2, 2), OptimizerConfig(), steps=math.inf, steps_per_epoch=1)
    with pytest.raises(ValueError, match="not both"):
        OptimizerConfig(warmup_epochs=1, warmup_steps=1)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_exponential_coefficients_mix_like_their_matrix(causal: bool) -> None:
    layout = BlockLayout((32,), block_size=4) if causal else BlockLayout((8, 8), (4, 4))
    config = AttentionConfig(mixing="exponential", mixing_per_head=True)
    layer = MHLA(16, 2, layout, config, causal=causal)
    x = torch.randn(2, layout.num_tokens, 16)
    out = layer(x)
    dense = MHLA(16, 2, layout, AttentionConfig(mixing_per_head=True), causal=causal)
    state = {name: value for name, value in layer.state_dict().items() if "mixing" not in name}
    dense.load_state_dict({**state, "mixing.weight": layer.mixing.matrix()})
    torch.testing.assert_close(dense(x), out)
    out.square().mean().backward()
    assert (layer.mixing.amplitude.grad != 0).all()
    assert (layer.mixing.decay.grad != 0).any()


def test_exponential_coefficients_start_clip_and_learn_without_decay() -> None:
    layout = BlockLayout((32,), block_size=4)
    layer = MHLA(16, 2, layout, AttentionConfig(mixing="exponential"), causal=True)
    torch.testing.assert_close(layer.mixing.decay.detach(), torch.tensor([0.05, 0.184, 0.679, 2.5]), atol=1e-3, rtol=0)
    near = layer.mixing.matrix()[-1]
    assert (near.diff() > 0).all(), "nearer blocks must weigh more at the start"
    even = ExponentialCoefficients(layout, init="uniform").matrix()
    torch.testing.assert_close(even, torch.ones(8, 8), atol=1e-3, rtol=0)
    groups = {
        g["name"].split("-")[0]: g
        for g in parameter_groups(layer, OptimizerConfig(weight_decay=0.1, mixing_lr_scale=3.0))
    }
    assert {id(p) for p in groups["mixing"]["params"]} == {id(layer.mixing.amplitude), id(layer.mixing.decay)}
    assert groups["mixing"]["weight_decay"] == 0
    with torch.no_grad():
        layer.mixing.amplitude.fill_(-1.0)
        layer.mixing.decay.fill_(-1.0)
    clip_mixing(layer)
    assert (layer.mixing.amplitude == LOWER).all()
    assert (layer.mixing.decay == LOWER).all()
    assert layer.bfloat16().mixing.amplitude.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"init": "random"}, "'random' is not one of"),
        ({"terms": 0}, "positive"),
        ({"prefix": 1}, "no position for the 1 prefix tokens"),
    ],
)
def test_exponential_coefficients_refuse(change: dict[str, object], message: str) -> None:
    layout = BlockLayout((4, 4), (2, 2), prefix_tokens=change.pop("prefix", 0))
    with pytest.raises(ValueError, match=message):
        ExponentialCoefficients(layout, **change)


@pytest.mark.parametrize("grid", [(4, 4), (2, 5), (2, 3, 4)], ids=str)
def test_every_row_of_the_locality_start_follows_the_paper(grid: tuple[int, ...]) -> None:
    mixing = locality_mixing(BlockLayout(grid, grid))
    places = list(product(*(range(count) for count in grid)))
    for row, place in enumerate(places):
        distance = torch.tensor([math.dist(place, other) for other in places])
        want = 1 - distance / distance.max()
        torch.testing.assert_close(mixing[row], want / want.sum())


def test_exponential_coefficients_keep_their_reach_over_other_blocks() -> None:
    """Twice as many blocks along an axis are half as far apart, so that decays halve."""
    mixing = ExponentialCoefficients(BlockLayout((8, 8), (4, 2)), terms=3)
    want = mixing.decay.detach() * torch.tensor([0.5, 1.0])
    torch.testing.assert_close(mixing((8, 2)).decay.detach(), want)
    mixing.resize((8, 2))
    torch.testing.assert_close(mixing.decay.detach(), want)


def test_locality_on_an_oblong_grid() -> None:
    """On a square one rows and columns could be exchanged unseen."""
    mixing = locality_mixing(BlockLayout((2, 6), (2, 3)))
    distance = torch.tensor([math.dist((0, 0), (i, j)) for i in range(2) for j in range(3)])
    want = 1 - distance / distance.max()
    torch.testing.assert_close(mixing[0], want / want.sum())


def test_positions_and_biases_do_not_decay() -> None:
    model = nn.Linear(8, 8)
    model.position = nn.Parameter(torch.zeros(1, 4, 8))
    groups = parameter_groups(nn.ModuleDict({"stem": model}), OptimizerConfig(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert [decay[id(p)] for p in (model.weight, model.bias, model.position)] == [0.1, 0.0, 0.0]
