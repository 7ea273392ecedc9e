"""Numbers of optimizer steps: of epochs, parts of epochs and complete runs, whatever limits them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_mhla.system.steps import accumulation, steps_of_epochs, steps_of_run
from lightning_mhla.training.module import TrainingModule
from lightning_mhla.training.optim import OptimizerConfig
from lightning_mhla.training.options import TrainingOptions


def trainer(batches: float = 7, accumulate: int = 1, schedule: dict[int, int] | None = None, **options: Any) -> Any:
    callbacks = [object(), *([GradientAccumulationScheduler(schedule)] if schedule else [])]
    defaults = {"max_steps": -1, "max_epochs": None, "limit_train_batches": 1.0}
    return SimpleNamespace(
        num_training_batches=batches, accumulate_grad_batches=accumulate, callbacks=callbacks, **(defaults | options)
    )


def test_the_accumulation_of_an_epoch() -> None:
    assert [accumulation(trainer(accumulate=3), epoch) for epoch in range(3)] == [3, 3, 3]
    scheduled = trainer(accumulate=5, schedule={0: 1, 1: 2, 3: 4})
    assert [accumulation(scheduled, epoch) for epoch in range(5)] == [1, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("accumulate", "epochs", "steps"),
    [
        (1, 0, 0), (1, 1, 7), (1, 2, 14), (1, 0.5, 3.5), (1, 2.5, 17.5),
        (2, 1, 4), (2, 3, 12), (2, 0.5, 2), (2, 1.25, 5), (7, 2, 2), (8, 3, 3),
    ],
)  # fmt: skip
def test_steps_of_epochs(accumulate: int, epochs: float, steps: float) -> None:
    """The last batch of an epoch ends the accumulation."""
    assert steps_of_epochs(trainer(7, accumulate), epochs) == pytest.approx(steps)


@pytest.mark.parametrize(("epochs", "steps"), [(1, 7), (1.5, 9), (2, 11), (2.5, 13), (3, 15), (3.5, 16), (4, 17)])
def test_steps_under_an_accumulation_that_changes(epochs: float, steps: float) -> None:
    """A part of an epoch is that part of the epoch's own steps: of the last one that has begun, not of the first."""
    assert steps_of_epochs(trainer(7, schedule={0: 1, 1: 2, 3: 4}), epochs) == steps


def test_data_without_a_length_or_without_batches() -> None:
    assert steps_of_epochs(trainer(math.inf), 2) == math.inf
    assert steps_of_epochs(trainer(7, limit_train_batches=0), 2) == 0
    assert steps_of_run(trainer(math.inf, max_epochs=3)) == math.inf
    assert steps_of_run(trainer(math.inf, max_epochs=3, max_steps=11)) == 11


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({}, math.inf),
        ({"max_epochs": -1}, math.inf),
        ({"max_steps": 5}, 5),
        ({"max_steps": 0}, 0),
        ({"max_steps": 1, "max_epochs": -1}, 1),
        ({"max_epochs": 3}, 21),
        ({"max_epochs": 1}, 7),
        ({"max_epochs": 0}, 7),
        ({"max_epochs": 3, "max_steps": 20}, 20),
        ({"max_epochs": 3, "max_steps": 22}, 21),
        ({"max_epochs": 2, "max_steps": 1}, 1),
    ],
)
def test_the_limit_that_is_reached_first_ends_a_run(limits: dict[str, int], steps: float) -> None:
    found = steps_of_run(trainer(**limits))
    assert found == steps
    assert isinstance(found, float | int)


def test_a_warm_up_in_epochs_needs_data_with_a_length() -> None:
    module = TrainingModule(TrainingOptions(optimizer=OptimizerConfig(warmup_epochs=2)))
    module._trainer = trainer(batches=math.inf, max_steps=100)
    with pytest.raises(ValueError, match=r"warmup_epochs=2 needs data with a length; give warmup_steps"):
        module._lengths()
    module._trainer = trainer(max_steps=100)
    assert module._lengths() == (100, 7)
