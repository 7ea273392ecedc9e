"""CAME in addition to AdamW: its state, agreement with the package of its authors, and rejected options."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pytorch_optimizer import CAME
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.attention.mixing import LOWER, UPPER, DenseCoefficients
from lightning_mhla.callbacks.forecast import needs
from lightning_mhla.generative.flow import FlowConfig
from lightning_mhla.system.numbers import rounded
from lightning_mhla.training.optim import OptimizerConfig, build_optimizer


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        network(torch.randn(32, 8, generator=generator)).square().mean().backward()
        optimizer.step()


def test_came_is_its_packages() -> None:
    ours, theirs = model(), model()
    config = OptimizerConfig(kind="came", lr=1e-2, weight_decay=0.0, schedule="constant")
    optimizer, _ = build_optimizer(ours, config, steps=10, steps_per_epoch=10)
    train(ours, optimizer, 10)
    train(theirs, CAME(theirs.parameters(), lr=1e-2, betas=(0.9, 0.999, 0.9999)), 10)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert kept(optimizer, ours[0].weight) < 2 * 8 * 16


def kept(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    return sum(value.numel() for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor))


def test_kernels_of_one_pixel_cost_no_more_than_in_adamw() -> None:
    network = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, groups=8))
    optimizer, _ = build_optimizer(network, OptimizerConfig(kind="came", schedule="constant"), 10, 10)
    network(torch.randn(2, 4, 6, 6)).square().mean().backward()
    optimizer.step()
    for parameter in network.parameters():
        assert kept(optimizer, parameter) <= 2 * parameter.numel() + 1


def test_came_goes_on_to_the_bit() -> None:
    config = OptimizerConfig(kind="came", lr=1e-2, schedule="constant")
    whole, first, second = model(), model(), model()
    train(whole, build_optimizer(whole, config, 10, 10)[0], 4)
    optimizer = build_optimizer(first, config, 10, 10)[0]
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        if step == 2:
            second.load_state_dict(first.state_dict())
            resumed = build_optimizer(second, config, 10, 10)[0]
            resumed.load_state_dict(optimizer.state_dict())
            first, optimizer = second, resumed
        optimizer.zero_grad()
        first(torch.randn(32, 8, generator=generator)).square().mean().backward()
        optimizer.step()
    for one, other in zip(whole.parameters(), first.parameters(), strict=True):
        assert torch.equal(one, other)


def test_coefficients_stay_within_their_bounds() -> None:
    mixing = DenseCoefficients(BlockLayout((4, 4), (2, 2)))
    optimizer, _ = build_optimizer(mixing, OptimizerConfig(kind="came", lr=10.0, schedule="constant"), 10, 10)
    mixing.weight.grad = torch.full_like(mixing.weight, 1.0)
    optimizer.step()
    assert (mixing.weight < 0).any(), "the step is not large enough to leave the bounds"
    assert (mixing.matrix() >= LOWER).all()
    assert (mixing.matrix() <= UPPER).all()


def test_betas() -> None:
    for kind, wanted in (("adamw", (0.9, 0.999)), ("came", (0.9, 0.999, 0.9999))):
        config = OptimizerConfig(kind=kind, schedule="constant")  # type: ignore[arg-type]
        assert build_optimizer(model(), config, 10, 10)[0].param_groups[0]["betas"] == wanted
    for kind, betas in (("adamw", (0.9, 0.99, 0.9)), ("came", (0.9, 0.99))):
        with pytest.raises(ValueError, match=rf"{kind} takes {5 - len(betas)}"):
            OptimizerConfig(kind=kind, betas=betas)  # type: ignore[arg-type]


def test_the_forecast_counts_what_it_keeps() -> None:
    network = model()
    weights = 4 * sum(parameter.numel() for parameter in network.parameters()) / (1 << 20)
    for optimizer, name, numbers in (
        (torch.optim.AdamW(network.parameters()), "gradients, AdamW;", 4),
        (torch.optim.SGD(network.parameters(), 0.1, momentum=0.9), "gradients, SGD;", 3),
        (torch.optim.SGD(network.parameters(), 0.1), "gradients, SGD;", 2),
        (torch.optim.RMSprop(network.parameters()), "gradients; the state of the optimizer and activations", 2),
    ):
        text = needs(network, False, 1, optimizer)
        assert name in text
        assert f"{rounded(numbers * weights)} MiB" in text
    network.optimizer_config = OptimizerConfig()  # type: ignore[assignment]
    assert "AdamW" in needs(network, False, 1)
    network.optimizer_config = OptimizerConfig(kind="came")  # type: ignore[assignment]
    assert "CAME" in needs(network, False, 1)


def test_sharded_parameters_are_refused(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'met'}", rank=0, world_size=1)
    try:
        network = nn.Linear(4, 4)
        network.weight = nn.Parameter(distribute_tensor(network.weight.data, init_device_mesh("cpu", (1,))))
        with pytest.raises(ValueError, match="does not support sharded parameters"):
            build_optimizer(network, OptimizerConfig(kind="came", schedule="constant"), 10, 10)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(("option", "value"), [("schedule", "linear"), ("kind", "adam"), ("schedule", "")])
def test_names_that_mean_nothing_are_refused(option: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"optimizer.{option}={value!r} is not one of"):
        OptimizerConfig(**{option: value})  # type: ignore[arg-type]


def test_times_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"flow\.times='lognormal' is not one of"):
        FlowConfig(times="lognormal")  # type: ignore[arg-type]
