"""Sums of an evaluation: losses, tokens and bytes, and answers by group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torchmetrics import Metric, SumMetric

SUMS = ("nats", "tokens", "bytes", "samples")
SUM_DTYPE = torch.float32 if torch.backends.mps.is_available() else torch.float64  # Apple's GPUs have no float64

MOST = 256
"""Groups that are counted."""


class Answers(Metric):
    """Right answers and questions, for each of up to :data:`MOST` groups."""

    full_state_update = False
    right: Tensor
    asked: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("right", "asked"):
            self.add_state(name, torch.zeros(MOST, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, right: Tensor, groups: Tensor) -> None:
        """Count answers.

        Args:
            right: ``[n]`` bool.
            groups: ``[n]`` int64, the group of each.
        """
        self.right += torch.bincount(groups[right], minlength=MOST)
        self.asked += torch.bincount(groups, minlength=MOST)

    def compute(self) -> Tensor:
        """Right answers and questions of each group, ``[2, MOST]``."""
        return torch.stack([self.right, self.asked])


def shares(counts: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Accuracy over all groups, of each, and of those together whose names differ in their last part only.

    Args:
        counts: as :meth:`Answers.compute` gives them.
        names: names of the groups: ``pairs4``, or ``tokens512_depth0``.
    """
    sums: dict[str, list[int]] = {}
    for name, (right, asked) in zip(names, counts.T.tolist(), strict=False):
        together = name.rpartition("_")[0]
        for key in {"accuracy", f"accuracy_{name}", *([f"accuracy_{together}"] if together else [])}:
            total = sums.setdefault(key, [0, 0])
            total[0] += right
            total[1] += asked
    return {key: right / asked for key, (right, asked) in sums.items() if asked}


class TextSums(nn.Module):
    """Sums over the batches and processes of one evaluation."""

    def __init__(self) -> None:
        super().__init__()
        metrics = {name: SumMetric(nan_strategy="disable").set_dtype(SUM_DTYPE) for name in SUMS}
        self.sums = nn.ModuleDict(metrics)
        self.answers = Answers()

    def add(self, **values: Tensor | int) -> None:
        """Add to the sums of :data:`SUMS`."""
        for name, value in values.items():
            cast(SumMetric, self.sums[name]).update(value)

    def compute(self) -> dict[str, float]:
        """The sums so far."""
        return {name: float(cast(SumMetric, self.sums[name]).compute()) for name in SUMS}

    def take(self, stage: str, groups: Sequence[str]) -> dict[str, float]:
        """Return the metrics since the last call: loss in nats a token, perplexity, bits per byte, accuracy.

        Args:
            stage: for messages.
            groups: names of those that answers are counted by.

        Raises:
            ValueError: when the loss is not finite.
        """
        sums = self.compute()
        loss = sums["nats"] / sums["tokens"]
        if not math.isfinite(loss):
            raise ValueError(f"the {stage} loss is {loss}: the weights are broken; resume from an earlier checkpoint")
        values = {"loss": loss, "perplexity": math.exp(min(loss, 80.0)), "samples": sums["samples"]}
        if sums["bytes"]:
            values["bits_per_byte"] = sums["nats"] / math.log(2) / sums["bytes"]
        if groups:
            values |= shares(self.answers.compute(), groups)
            self.answers.reset()
        for name in SUMS:
            cast(SumMetric, self.sums[name]).reset()
        return values
