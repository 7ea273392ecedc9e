"""Metric that measures how well two sets of embeddings of the same samples agree on nearest neighbors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat
from typing_extensions import override

NEIGHBORS = 10
"""Number of nearest neighbors to compare for each sample."""

QUERIES_AT_ONCE = 1024
"""Number of samples that are compared with all others at once, which limits the memory use."""


class EmbeddingPairs(Metric):
    """Metric that compares the nearest neighbors of samples in the embeddings of a model and of its teacher.

    The correct neighbors of a sample are the ten other samples whose teacher embeddings have the highest cosine similarity to
    its own, or all other samples if there are fewer. The result is a dict of two shares of correct neighbors, from 0 to 1,
    averaged over the samples:

    * ``recall_at_10``: share that is also among the ten nearest neighbors in the model's embeddings.
    * ``mixed_recall_at_10``: share that is also found if the model's embedding of a sample is compared with the teacher's
      embeddings of all others, as in a search index that the teacher built.

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
        """Return a dict of the scalars ``recall_at_10`` and ``mixed_recall_at_10``, which the class defines."""
        model, teacher = dim_zero_cat(self.model), dim_zero_cat(self.teacher)
        if len(model) < 2:
            return dict.fromkeys(("recall_at_10", "mixed_recall_at_10"), torch.tensor(torch.nan))
        wanted = _neighbors(teacher, teacher)
        return {
            "recall_at_10": _share_of(wanted, _neighbors(model, model)),
            "mixed_recall_at_10": _share_of(wanted, _neighbors(model, teacher)),
        }


def _neighbors(queries: Tensor, index: Tensor) -> Tensor:
    """Find the nearest neighbors of n samples by cosine similarity. A sample is not its own neighbor.

    Args:
        queries: normalized embeddings of the samples, ``[n, dim]``.
        index: normalized embeddings of the same samples among which neighbors are searched, ``[n, dim]``.

    Returns:
        Indices of the k nearest neighbors, ``[n, k]`` int64; k is at most 10.
    """
    nearest = []
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        # Cosine similarities [queries, n] of a part of the queries.
        similarity = queries[start : start + QUERIES_AT_ONCE] @ index.T
        rows = torch.arange(len(similarity), device=similarity.device)
        similarity[rows, start + rows] = -torch.inf  # a sample is not its own neighbor
        nearest.append(similarity.topk(min(NEIGHBORS, len(index) - 1), dim=-1).indices)
    return torch.cat(nearest)


def _share_of(wanted: Tensor, neighbors: Tensor) -> Tensor:
    # [n, k, 1] and [n, 1, k]: whether each wanted neighbor is among those that were found.
    return (wanted[:, :, None] == neighbors[:, None, :]).any(-1).float().mean()
