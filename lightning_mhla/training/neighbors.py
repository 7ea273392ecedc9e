"""Metric of how many nearest neighbors two sets of embeddings of the same samples have in common."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat
from typing_extensions import override

NEIGHBORS = 10
"""Number of nearest neighbors that the recall counts."""

QUERIES_AT_ONCE = 1024
"""Number of samples that are compared with all others at once, which bounds the memory."""


class EmbeddingPairs(Metric):
    """Metric of embeddings that a model and its teacher compute for the same samples: how alike their neighborhoods are.

    The result is a dict of two shares, from 0 to 1, of each sample's ten nearest neighbors in the teacher's embeddings (by
    cosine similarity, fewer for small sets) that are also neighbors:

    * ``recall_at_10``: among the model's embeddings.
    * ``mixed_recall_at_10``: if a sample's embedding by the model is searched for among the embeddings of the teacher, as in an
      index that the teacher built.

    Both are NaN for fewer than two samples.
    """

    full_state_update = False
    model: list[Tensor]
    teacher: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("model", "teacher"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    @override
    def update(self, model: Tensor, teacher: Tensor) -> None:
        """Add the embeddings of a batch.

        Args:
            model: embeddings that the model computed, ``[B, dim]``.
            teacher: embeddings of the same samples that the teacher computed, ``[B, dim]``.
        """
        self.model.append(F.normalize(model.float(), dim=-1))
        self.teacher.append(F.normalize(teacher.float(), dim=-1))

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return the two shares of common neighbors."""
        model, teacher = dim_zero_cat(self.model), dim_zero_cat(self.teacher)
        if len(model) < 2:
            return dict.fromkeys(("recall_at_10", "mixed_recall_at_10"), torch.tensor(torch.nan))
        wanted = _neighbors(teacher, teacher)
        return {
            "recall_at_10": _share_of(wanted, _neighbors(model, model)),
            "mixed_recall_at_10": _share_of(wanted, _neighbors(model, teacher)),
        }


def _neighbors(queries: Tensor, index: Tensor) -> Tensor:
    """Return the indices of the nearest other samples, ``[n, k]`` int64, for normalized embeddings ``[n, dim]``."""
    nearest = []
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        similarity = queries[start : start + QUERIES_AT_ONCE] @ index.T
        rows = torch.arange(len(similarity), device=similarity.device)
        similarity[rows, start + rows] = -torch.inf  # a sample is not its own neighbor
        nearest.append(similarity.topk(min(NEIGHBORS, len(index) - 1), dim=-1).indices)
    return torch.cat(nearest)


def _share_of(wanted: Tensor, neighbors: Tensor) -> Tensor:
    return (wanted[:, :, None] == neighbors[:, None, :]).any(-1).float().mean()
