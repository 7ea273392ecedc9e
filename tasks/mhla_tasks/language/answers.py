"""Share of questions that a model answers, by group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

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
        names: of the groups: ``pairs4``, or ``tokens512_depth0``.
    """
    sums: dict[str, list[int]] = {}
    for name, (right, asked) in zip(names, counts.T.tolist(), strict=False):
        together = name.rpartition("_")[0]
        for key in {"accuracy", f"accuracy_{name}", *([f"accuracy_{together}"] if together else [])}:
            total = sums.setdefault(key, [0, 0])
            total[0] += right
            total[1] += asked
    return {key: right / asked for key, (right, asked) in sums.items() if asked}
