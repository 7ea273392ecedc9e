"""Mixing coefficients: start, bounds, precision, and their place in the optimizer."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import nn

from lightning_mhla import MHLA, AttentionConfig, BlockLayout
from lightning_mhla.attention.mixing import (
    LARGEST_DECAY,
    LOWER,
    UPPER,
    DenseCoefficients,
    ExponentialCoefficients,
    bounded,
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


LAYERS = {
    "dense": (BlockLayout((4, 4), (2, 2)), AttentionConfig(), False),
    "dense per head": (BlockLayout((4, 4), (2, 2)), AttentionConfig(mixing_per_head=True), False),
    "exponential": (BlockLayout((4, 4), (2, 2)), AttentionConfig(mixing="exponential", mixing_per_head=True), False),
    "causal": (BlockLayout((16,), block_size=4), AttentionConfig(), True),
    "causal exponential": (BlockLayout((16,), block_size=4), AttentionConfig(mixing="exponential"), True),
}


def layer_of(name: str) -> MHLA:
    layout, config, causal = LAYERS[name]
    return MHLA(8, 2, layout, config, causal=causal)


@pytest.mark.parametrize("value", [-1e-9, -0.2, -5.0, 1.001, 7.0, 1e6])
@pytest.mark.parametrize("name", LAYERS)
def test_coefficients_are_bounded_whatever_the_parameters_are(name: str, value: float) -> None:
    """An optimizer, an average or a checkpoint may have put anything there."""
    layer = layer_of(name)
    with torch.no_grad():
        for parameter in layer.mixing.parameters():
            parameter.fill_(value)
    matrix = layer.mixing.matrix()
    assert (matrix >= 0).all(), "a negative coefficient reaches the operator"
    assert (matrix <= UPPER * 4).all(), "up to four exponentials of at most 1"
    assert layer(torch.rand(2, 16, 8)).isfinite().all()
    assert layer.eval()(torch.rand(2, 16, 8)).isfinite().all()


def test_values_outside_are_reflected_and_those_inside_keep_their_bits() -> None:
    inside = torch.rand(1000, dtype=torch.float64).clamp(LOWER, UPPER).float()
    assert torch.equal(bounded(inside), inside)
    outside = torch.tensor([-0.2, LOWER - 0.01, 1.3, 2.5, -2.25], dtype=torch.float64, requires_grad=True)
    want = torch.tensor([2 * LOWER + 0.2, LOWER + 0.01, 0.7, 0.5 + 2 * LOWER, 0.25 + 2 * LOWER], dtype=torch.float64)
    torch.testing.assert_close(bounded(outside), want, atol=1e-4, rtol=0)
    (slopes,) = torch.autograd.grad(bounded(outside).sum(), outside)
    assert slopes.tolist() == [-1, -1, -1, 1, -1], "a value outside must be able to come back"
    assert torch.autograd.gradcheck(bounded, (outside,))
    assert torch.autograd.gradgradcheck(bounded, (outside,))
    for low, high in ((0.1, 0.3), (LOWER, LARGEST_DECAY)):
        values = bounded(torch.linspace(-50, 50, 4001), low, high)
        assert (values >= low - 1e-6).all()
        assert (values <= high + 1e-5).all()


def test_gradients_of_several_batches_add_up() -> None:
    """Data parallelism and accumulation add gradients up, also where coefficients start at a bound."""
    layer, batches = layer_of("dense"), torch.rand(3, 2, 16, 8)
    assert (layer.mixing.weight <= LOWER).any()
    sums = torch.zeros_like(layer.mixing.weight)
    for batch in batches:
        (gradient,) = torch.autograd.grad(layer(batch).square().sum(), layer.mixing.weight)
        sums += gradient
    (together,) = torch.autograd.grad(layer(batches.flatten(0, 1)).square().sum(), layer.mixing.weight)
    torch.testing.assert_close(sums, together)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_a_coefficient_that_an_optimizer_drove_down_grows_again(kind: str) -> None:
    """In a plain loop: down for a hundred steps, then up; momentum may carry it a little below its bound."""
    layer = layer_of("dense")
    optimizer = getattr(torch.optim, kind)(layer.mixing.parameters(), lr=1e-2)
    for slope in (1.0, -1.0):
        for _ in range(100):
            optimizer.zero_grad()
            (slope * layer.mixing()).sum().backward()
            optimizer.step()
            assert (layer.mixing() >= LOWER).all()
        coefficients = layer.mixing()
        assert (coefficients.mean() < 0.06) if slope > 0 else (coefficients > 0.1).all()


@pytest.mark.parametrize("name", LAYERS)
def test_the_bounds_hold_in_a_compiled_a_recomputed_an_averaged_and_a_mapped_layer(name: str) -> None:
    layer = layer_of(name)
    with torch.no_grad():
        for parameter in layer.mixing.parameters():
            parameter.sub_(0.5)
    # two kinds through all of the compiler; for the others, its capture of the graph is what differs
    backend = "aot_eager" if name in ("dense", "causal exponential") else "eager"
    x = torch.rand(2, 16, 8)
    layer(x).square().mean().backward()
    want, gradients = layer(x), {name: p.grad.clone() for name, p in layer.named_parameters()}
    averaged = torch.optim.swa_utils.AveragedModel(layer, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    torch.testing.assert_close(averaged(x), want)
    for run in (
        torch.compile(layer, fullgraph=True, backend=backend),
        lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False),
        lambda x: torch.func.functional_call(layer, dict(layer.named_parameters()), (x,)),
    ):
        layer.zero_grad()
        out = run(x)
        torch.testing.assert_close(out, want)
        out.square().mean().backward()
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name])


def test_what_is_carried_to_other_blocks_is_bounded() -> None:
    """Resized, extended, taken over from a checkpoint."""
    dense, causal = layer_of("dense").mixing, layer_of("causal").mixing
    exponential = layer_of("exponential").mixing
    low = torch.full((4, 4), -3.0)
    assert dense.carried("weight", torch.full((9, 9), -3.0), (3, 3)).min() >= LOWER
    assert exponential.carried("decay", torch.full((2, 4, 2), 90.0), (2, 2)).max() <= LARGEST_DECAY
    with torch.no_grad():
        dense.weight.copy_(low)
        causal.weight.copy_(low)
    for coefficients in (causal, exponential):
        coefficients.bring_inside_()
        assert all((parameter >= LOWER).all() for parameter in coefficients.parameters())
    dense.resize((4, 4))
    causal.extend(8)
    assert dense().min() >= LOWER
    assert dense.weight.min() >= 0
    assert causal.weight.isfinite().all()
    assert (causal() >= 0).all()


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


def test_exponential_coefficients_start_and_learn_without_decay() -> None:
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
    assert layer.bfloat16().mixing.amplitude.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"init": "random"}, "'random' is not one of"),
        ({"terms": 0}, "positive"),
        ({"min_decay": 0.0}, "mixing_min_decay=0.0 must lie between 1e-05 and 2.5"),
        ({"min_decay": 3.0}, "mixing_min_decay=3.0 must lie between 1e-05 and 2.5"),
        ({"prefix": 1}, "no position for the 1 prefix tokens"),
    ],
)
def test_exponential_coefficients_refuse(change: dict[str, object], message: str) -> None:
    layout = BlockLayout((4, 4), (2, 2), prefix_tokens=change.pop("prefix", 0))
    with pytest.raises(ValueError, match=message):
        ExponentialCoefficients(layout, **change)


def test_decays_stay_above_the_smallest_one() -> None:
    """From the start, after an optimizer step past the bound, and if they come from another layer or number of blocks."""
    options = AttentionConfig(mixing="exponential", mixing_terms=3, mixing_min_decay=0.5)
    mixing = MHLA(16, 2, BlockLayout((32,), block_size=4), options, causal=True).mixing
    torch.testing.assert_close(mixing.decay.detach(), torch.tensor([0.5, 1.25**0.5, 2.5]))
    with torch.no_grad():
        mixing.decay[0] = 0.4
    torch.testing.assert_close(mixing().decay.detach()[0], torch.tensor(0.6), msg="reflected at the bound")
    torch.testing.assert_close(
        mixing.carried("decay", torch.tensor([0.1, 0.7, 30.0]), None)[:2], torch.tensor([0.5, 0.7])
    )
    grid = ExponentialCoefficients(BlockLayout((8, 8), (2, 2)), terms=1, min_decay=0.5)
    grid.resize((8, 2))
    torch.testing.assert_close(grid().decay.detach(), torch.tensor([[0.5, 0.5]]))


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
    with torch.no_grad():
        mixing.decay.fill_(0.3)
    mixing.reset_parameters()
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


def test_decays_of_far_fewer_blocks_stay_within_their_bounds() -> None:
    mixing = ExponentialCoefficients(BlockLayout((32, 32), (32, 32)))
    with torch.no_grad():
        mixing.decay.fill_(2.5)
    small = ExponentialCoefficients(BlockLayout((32, 32), (2, 2)))
    carried = small.carried("decay", mixing.decay.detach(), (32, 32))
    assert carried is not None
    assert carried.max() <= LARGEST_DECAY
    mixing.resize((2, 2))
    assert mixing.decay.max() == LARGEST_DECAY
    assert mixing.forward((2, 2)).decay.max() == LARGEST_DECAY, "the fastest decay must not become a slow one"


def test_extended_coefficients_know_their_blocks() -> None:
    mixing = DenseCoefficients(BlockLayout((32,), block_size=4), causal=True)
    mixing.extend(16)
    assert mixing.grid == (16,)
    assert mixing.forward((12,)).shape[-2:] == (12, 12)
