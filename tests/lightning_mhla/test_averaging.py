"""The moving average of the weights: its numbers, what checkpoints hold of it, and the weights with which a run resumes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning import LightningModule
from torch import Tensor, nn

from lightning_mhla.callbacks.averaging import ExponentialMovingAverage, evaluation_weights
from lightning_mhla.checkpoints.weights import LIVE


class Tied(LightningModule):
    """A weight that is used under two names, one that is not trained, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2, bias=False)
        self.two = nn.Linear(2, 2, bias=False)
        self.two.weight = self.one.weight
        self.frozen = nn.Parameter(torch.full((2,), 7.0), requires_grad=False)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) + self.frozen


def set_weights(module: Tied, value: float) -> None:
    with torch.no_grad():
        module.one.weight.fill_(value)
        module.frozen.fill_(10 * value)
        module.count.fill_(100 * value)  # type: ignore[operator]


def value_of(module: Tied) -> float:
    return float(module.one.weight.detach()[0, 0])


def trainer_at(step: int, *callbacks: Any, fn: str = "fit") -> Any:
    return SimpleNamespace(global_step=step, callbacks=list(callbacks), state=SimpleNamespace(fn=fn))


def train(average: ExponentialMovingAverage, module: Tied, values: dict[int, float]) -> None:
    """Make the optimizer steps with these numbers, which leave these weights."""
    for step, value in values.items():
        set_weights(module, value)
        average.on_train_batch_end(trainer_at(step), module)


def averaged(average: ExponentialMovingAverage, module: Tied) -> float:
    """The average, as a validation sees it; the weights afterwards are those from before."""
    live = value_of(module)
    average.on_validation_epoch_start(trainer_at(0), module)
    seen = value_of(module)
    average.on_validation_epoch_end(trainer_at(0), module)
    assert value_of(module) == live
    return seen


def started(decay: Any = 0.75) -> tuple[ExponentialMovingAverage, Tied]:
    module, average = Tied(), ExponentialMovingAverage(decay)
    set_weights(module, 50.0)
    average.setup(trainer_at(0), module, "fit")
    average.on_fit_start(trainer_at(0), module)
    return average, module


def test_the_first_step_is_copied_and_later_ones_are_averaged() -> None:
    average, module = started()
    assert averaged(average, module) == 50
    train(average, module, {1: 8.0})
    assert averaged(average, module) == 8, "the untrained weights count for nothing"
    train(average, module, {2: 4.0})
    assert averaged(average, module) == 0.75 * 8 + 0.25 * 4 == 7
    train(average, module, {3: 3.0})
    assert averaged(average, module) == 0.75 * 7 + 0.25 * 3
    assert (float(module.frozen[0]), float(module.count)) == (30, 300), "only trained weights are averaged"  # type: ignore[arg-type]
    average.on_train_end(trainer_at(3), module)
    assert value_of(module) == 6


def test_the_decay_may_change_at_each_step() -> None:
    decays = iter([0.5, 0.0])
    average, module = started(lambda: next(decays))
    train(average, module, {1: 8.0, 2: 4.0})
    assert averaged(average, module) == 6
    train(average, module, {3: 1.0})
    assert averaged(average, module) == 1


def test_a_batch_that_only_accumulates_gradients_does_not_count() -> None:
    average, module = started()
    train(average, module, {1: 8.0})
    train(average, module, {1: 1000.0})
    assert averaged(average, module) == 8
    average.on_train_batch_end(trainer_at(2), module)
    assert averaged(average, module) == 0.75 * 8 + 0.25 * 1000


def test_a_second_fit_begins_with_its_own_first_step() -> None:
    average, module = started()
    train(average, module, {1: 8.0, 2: 4.0})
    assert averaged(average, module) == 7
    set_weights(module, 20.0)
    average.setup(trainer_at(0), module, "fit")
    average.on_fit_start(trainer_at(0), module)
    assert averaged(average, module) == 20
    train(average, module, {1: 2.0})
    assert averaged(average, module) == 2


@pytest.mark.parametrize("set_up", [True, False])
def test_a_new_average_is_at_no_step(set_up: bool) -> None:
    average, module = ExponentialMovingAverage(0.75), Tied()
    if set_up:
        average.setup(trainer_at(0), module, "fit")
    assert average.state_dict() == {"latest_update_step": 0}
    set_weights(module, 50.0)
    average.on_fit_start(trainer_at(0), module)
    train(average, module, {1: 8.0})
    assert averaged(average, module) == 8


def checkpoint_of(average: ExponentialMovingAverage, module: Tied, step: int) -> dict[str, Any]:
    checkpoint: dict[str, Any] = {"state_dict": {name: value.clone() for name, value in module.state_dict().items()}}
    average.on_save_checkpoint(trainer_at(step), module, checkpoint)
    return checkpoint | {"own": average.state_dict()}


def test_a_checkpoint_holds_both_weights_under_all_names() -> None:
    average, module = started()
    train(average, module, {1: 8.0, 2: 4.0})
    checkpoint = checkpoint_of(average, module, 2)
    first = {name: float(value.flatten()[0]) for name, value in checkpoint["state_dict"].items()}
    live = {name: float(value.flatten()[0]) for name, value in checkpoint[LIVE].items()}
    assert first == {"one.weight": 7, "two.weight": 7, "frozen": 40, "count": 400}
    assert live == {"one.weight": 4, "two.weight": 4, "frozen": 40, "count": 400}
    assert checkpoint["averaging_state"] == {"n_averaged": torch.tensor(2)}
    assert checkpoint["own"] == {"latest_update_step": 2}


def test_without_an_average_a_checkpoint_stays_as_it_is() -> None:
    checkpoint: dict[str, Any] = {"state_dict": Tied().state_dict()}
    ExponentialMovingAverage(0.5).on_save_checkpoint(trainer_at(0), Tied(), checkpoint)
    assert checkpoint.keys() == {"state_dict"}


def resumed(checkpoint: dict[str, Any], fn: str = "fit") -> tuple[ExponentialMovingAverage, Tied]:
    """In the order in which Lightning restores a run."""
    module, average = Tied(), ExponentialMovingAverage(0.75)
    average.setup(trainer_at(0), module, fn)
    module.load_state_dict(checkpoint["state_dict"])
    average.on_load_checkpoint(trainer_at(0, fn=fn), module, checkpoint)
    average.load_state_dict(checkpoint["own"])
    if fn == "fit":
        average.on_fit_start(trainer_at(0), module)
    return average, module


def test_a_resumed_run_goes_on_with_the_trained_weights_and_the_same_average() -> None:
    average, module = started()
    train(average, module, {1: 8.0, 2: 4.0})
    checkpoint = checkpoint_of(average, module, 2)
    again, copy = resumed(checkpoint)
    assert value_of(copy) == 4
    assert averaged(again, copy) == 7
    assert again.state_dict() == average.state_dict()
    for one, other in ((average, module), (again, copy)):
        train(one, other, {2: 1000.0})  # the step of the checkpoint: gradients are accumulated
        train(one, other, {3: 3.0})
    assert averaged(again, copy) == averaged(average, module) == 6


def test_weights_that_are_frozen_when_a_run_resumes_keep_their_average() -> None:
    average, module = started()
    train(average, module, {1: 8.0, 2: 4.0})
    checkpoint = checkpoint_of(average, module, 2)
    again, copy = ExponentialMovingAverage(0.75), Tied()
    copy.one.weight.requires_grad_(False)
    again.setup(trainer_at(0), copy, "fit")
    copy.load_state_dict(checkpoint["state_dict"])
    again.on_load_checkpoint(trainer_at(0), copy, checkpoint)
    again.load_state_dict(checkpoint["own"])
    again.on_fit_start(trainer_at(0), copy)
    assert value_of(copy) == 4
    assert averaged(again, copy) == 7


def test_other_commands_keep_the_averaged_weights() -> None:
    average, module = started()
    train(average, module, {1: 8.0, 2: 4.0})
    again, copy = resumed(checkpoint_of(average, module, 2), fn="validate")
    assert value_of(copy) == 7
    assert averaged(again, copy) == 7


def test_an_average_begins_at_a_checkpoint_without_one() -> None:
    """A run that had no average is resumed with one: it begins with the weights that are there."""
    module = Tied()
    set_weights(module, 5.0)
    again, copy = resumed({"state_dict": module.state_dict(), "own": {"latest_update_step": 4}})
    assert value_of(copy) == averaged(again, copy) == 5
    train(again, copy, {4: 1000.0})
    assert averaged(again, copy) == 5
    train(again, copy, {5: 3.0})
    assert averaged(again, copy) == 3


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_has_the_average_and_no_dropout(training: bool) -> None:
    average, module = started()
    train(average, module, {1: 8.0, 2: 4.0})
    module.train(training)
    with suppress(KeyError), evaluation_weights(trainer_at(2, object(), average), module):
        assert value_of(module) == 7
        assert not module.training
        raise KeyError
    assert value_of(module) == 4
    assert module.training is training
    module.one.eval()  # as a frozen part of a model that trains
    with evaluation_weights(trainer_at(2, average), module), evaluation_weights(trainer_at(2, average), module):
        assert value_of(module) == 7, "a second context changes nothing"
    assert value_of(module) == 4
    assert not module.one.training
    with evaluation_weights(trainer_at(2, object()), module):
        assert value_of(module) == 4, "a run without an average"
        assert not module.training
    assert module.training is training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_average_of_half_precision_weights_is_not_rounded(dtype: torch.dtype) -> None:
    module, average = Tied().to(dtype), ExponentialMovingAverage(0.999)
    average.setup(trainer_at(0), module, "fit")
    average.on_fit_start(trainer_at(0), module)
    train(average, module, {1: 1.0, **dict.fromkeys(range(2, 502), 2.0)})
    assert averaged(average, module) == pytest.approx(2 - 0.999**500, abs=1e-2)
    content = checkpoint_of(average, module, 501)
    exact = content["state_dict"]["one.weight"]
    assert exact[0, 0].item() == pytest.approx(2 - 0.999**500, abs=1e-4)
    again = ExponentialMovingAverage(0.999)
    copy = Tied().to(dtype)
    copy.load_state_dict(content["state_dict"])
    again.on_load_checkpoint(trainer_at(501), copy, content)
    assert value_of(copy) == 2
    assert torch.equal(checkpoint_of(again, copy, 501)["state_dict"]["one.weight"], exact)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """The mesh of a process group of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_sharded_weights_are_averaged_in_their_shards(mesh: Any) -> None:
    """A forward pass without a backward pass leaves full weights in the module; what is written to those is lost."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    module, average = Tied(), ExponentialMovingAverage(0.75)
    module.frozen.requires_grad_(True)
    set_weights(module, 50.0)
    fully_shard(module, mesh=mesh)

    def forward() -> None:
        with torch.no_grad():
            module(torch.ones(1, 2))
        assert not isinstance(module.one.weight, DTensor), "the test shows nothing"

    def value() -> float:
        module.reshard()  # type: ignore[attr-defined]
        return float(module.one.weight.full_tensor().detach()[0, 0])  # type: ignore[attr-defined]

    def set_shards(number: float) -> None:
        module.reshard()  # type: ignore[attr-defined]
        with torch.no_grad():
            module.one.weight.to_local().fill_(number)  # type: ignore[attr-defined]

    average.setup(trainer_at(0), module, "fit")
    forward()
    average.on_fit_start(trainer_at(0), module)
    for step, number in ((1, 8.0), (2, 4.0)):
        set_shards(number)
        forward()
        average.on_train_batch_end(trainer_at(step), module)
    forward()
    average.on_validation_epoch_start(trainer_at(2), module)
    forward()
    assert value() == 7
    forward()
    average.on_validation_epoch_end(trainer_at(2), module)
    assert value() == 4
    checkpoint: dict[str, Any] = {"state_dict": dict(module.state_dict())}
    average.on_save_checkpoint(trainer_at(2), module, checkpoint)
    assert isinstance(checkpoint["state_dict"]["one.weight"], DTensor)
    full = {"state_dict": {name: torch.zeros(value.shape) for name, value in checkpoint["state_dict"].items()}}
    average.on_save_checkpoint(trainer_at(2), module, full)
    for saved in (checkpoint, full):
        tensor = saved["state_dict"]["two.weight"]
        assert float((tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)[0, 0]) == 7
    assert not isinstance(full["state_dict"]["one.weight"], DTensor), "gathered, as the rest of the checkpoint is"
    forward()
    average.on_train_end(trainer_at(2), module)
    assert value() == 7
