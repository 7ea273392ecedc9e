"""Two-stage training: where the teacher is held, and what the weights of the second stage weigh."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mhla.generative.distillation import DistillationConfig
from lightning_mhla.swap.adapters import LoraOptions
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.training.linearize import DistillationOptions, DistilledLinearization, ScoringHost, TransferOptions
from lightning_mhla.training.module import TrainingModule
from lightning_mhla.training.options import TrainingOptions


def scores(network: Any, inputs: Tensor) -> Tensor:
    return network(inputs)


class Student(TrainingModule):
    def __init__(self) -> None:
        super().__init__(TrainingOptions())
        self.network = nn.Linear(2, 3, dtype=torch.bfloat16)
        self.linearization = DistilledLinearization(
            TransferOptions(teacher="folder"), ScoringHost("loss", scores, scores)
        )


def test_the_teacher_is_frozen_shared_by_copies_and_not_saved() -> None:
    read = []
    teacher = nn.Sequential(nn.Linear(2, 3), nn.Dropout())

    def read_teacher(path: str) -> nn.Module:
        read.append(path)
        return teacher

    module = Student()
    assert module.linearization.teacher is None
    for _ in range(2):  # two fits
        module.linearization.start(module, read_teacher)
    assert read == ["folder"]
    assert module.linearization.teacher is teacher
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert teacher[0].weight.dtype == torch.bfloat16
    assert copy.deepcopy(module).linearization is module.linearization
    assert set(module.state_dict()) == {"network.weight", "network.bias"}
    assert len(list(module.parameters())) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "lora.rank=0 must be at least 1; train: new trains without adapters"),
        ({"alpha": 0}, "lora.alpha=0 must be at least 1: adapters are multiplied by alpha / rank"),
        ({"rank": 4, "alpha": -8}, "lora.alpha=-8 must be at least 1"),
        ({"dropout": 1.0}, "lora.dropout=1.0 must be at least 0 and below 1"),
        ({"scale": 2}, "lora has no option 'scale'; there are rank, alpha, dropout"),
        (None, "lora takes options by name, not None"),
    ],
    ids=str,
)
def test_options_of_adapters_that_would_train_nothing_are_named(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        as_dataclass(LoraOptions, options, "lora")


@pytest.mark.parametrize(
    "options",
    [
        TransferOptions(logits_weight=2.0, loss_weight=3.0),
        DistillationConfig(teacher="folder", velocity_weight=2.0, flow_weight=3.0),
    ],
    ids=lambda options: type(options).__name__,
)
def test_the_second_stage_weighs_the_loss_and_the_distance(options: DistillationOptions) -> None:
    assert options.weighted(torch.tensor(10.0), torch.tensor(4.0)).item() == 38
