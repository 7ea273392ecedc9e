"""Sums over an evaluation: losses, tokens, bytes, and correct answers by group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torchmetrics import Metric, SumMetric

SUMS = ("nats", "tokens", "bytes", "samples")
"""Names of the sums: losses in nats, predicted tokens, bytes of their text, and sequences."""

SUM_DTYPE = torch.float32 if torch.backends.mps.is_available() else torch.float64  # Apple's GPUs have no float64

MOST = 256
"""Maximum number of groups that answers are counted in."""


class Answers(Metric):
    """Metric that counts the questions and the correct answers in each group of questions.

    A question is a token that the model has to predict. A group is, for example, all questions in sequences of equal length.
    At most 256 groups are counted.

    Attributes:
        right: number of correct answers in each group, ``[256]`` int64; 0 for groups that do not occur.
        asked: number of questions in each group, ``[256]`` int64.
    """

    full_state_update = False
    right: Tensor
    asked: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("right", "asked"):
            self.add_state(name, torch.zeros(MOST, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, right: Tensor, groups: Tensor) -> None:
        """Add a batch of answers to the counts.

        Args:
            right: mask that is True for correct answers, ``[n]`` bool.
            groups: index of the group of each answer, from 0 to 255, ``[n]`` int64.
        """
        self.right += torch.bincount(groups[right], minlength=MOST)
        self.asked += torch.bincount(groups, minlength=MOST)

    def compute(self) -> Tensor:
        """Return the number of correct answers (row 0) and of questions (row 1) in each group, ``[2, 256]`` int64."""
        return torch.stack([self.right, self.asked])


def shares(counts: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Compute the accuracy over all questions, in each group, and in each set of groups with a common name.

    The common name of a group is the part before the last underscore of its name: ``tokens512`` for ``tokens512_depth0``. A
    name without an underscore has no common name.

    Args:
        counts: number of correct answers (row 0) and of questions (row 1) in each group, such as the result of
            :meth:`Answers.compute`, ``[2, 256]``.
        names: names of the groups, in the order of ``counts``, such as ``pairs4`` or ``tokens512_depth0``. There may be fewer
            than 256 names; the remaining columns of ``counts`` are ignored.

    Returns:
        Accuracies from 0 to 1 under keys such as ``accuracy``, ``accuracy_tokens512_depth0`` and ``accuracy_tokens512``. Groups
        without questions are omitted.
    """
    sums: dict[str, list[int]] = {}
    for name, (right, questions) in zip(names, counts.T.tolist(), strict=False):
        common_name = name.rpartition("_")[0]
        for key in {"accuracy", f"accuracy_{name}", *([f"accuracy_{common_name}"] if common_name else [])}:
            total = sums.setdefault(key, [0, 0])
            total[0] += right
            total[1] += questions
    return {key: right / questions for key, (right, questions) in sums.items() if questions}


class TextSums(nn.Module):
    """Module that sums losses, tokens, bytes, samples and correct answers over the batches and processes of an evaluation.

    Attributes:
        sums: a metric for each of the sums ``nats`` (losses), ``tokens``, ``bytes`` and ``samples``, by name.
        answers: metric that counts the correct answers; its ``update`` adds a batch.
    """

    def __init__(self) -> None:
        super().__init__()
        # By default, torchmetrics leaves NaN out of the sum; here it must remain, so that `take` reports it.
        metrics = {name: SumMetric(nan_strategy="disable").set_dtype(SUM_DTYPE) for name in SUMS}
        self.sums = nn.ModuleDict(metrics)
        self.answers = Answers()

    def add(self, **values: Tensor | int) -> None:
        """Add values to the running sums.

        Args:
            values: scalar to add to each named sum; the names are ``nats`` (losses), ``tokens``, ``bytes`` and ``samples``.
        """
        for name, value in values.items():
            cast(SumMetric, self.sums[name]).update(value)

    def compute(self) -> dict[str, float]:
        """Return the sums so far over all processes, under the keys ``nats``, ``tokens``, ``bytes`` and ``samples``."""
        return {name: float(cast(SumMetric, self.sums[name]).compute()) for name in SUMS}

    def take(self, stage: str, groups: Sequence[str]) -> dict[str, float]:
        """Compute the metrics of all batches since the previous call of this method, and reset the sums.

        The sums are added up over all processes, so call this method on every process.

        Args:
            stage: purpose of the batches, such as ``"val"`` for validation; named in the error message.
            groups: names of the groups by which answers are counted, in the order of their indices, at most 256; empty if the
                data has no questions.

        Returns:
            Metrics by name:

            * ``loss``, in nats per token; ``perplexity``, at most exp(80); and ``samples``, the number of samples.
            * ``bits_per_byte``, if the number of bytes of text is known.
            * The accuracies that :func:`shares` computes, such as ``accuracy`` over all questions and ``accuracy_pairs4``, if
              ``groups`` is not empty.

        Raises:
            ValueError: if no token counts toward the loss, or the loss is not finite.
        """
        sums = self.compute()
        if not sums["tokens"]:
            raise ValueError(
                f"the {stage} batches have no token that counts toward the loss; give the data dialogues with messages of the "
                "assistant, or set data.assistant_only_loss: false"
            )
        loss = sums["nats"] / sums["tokens"]
        if not math.isfinite(loss):
            raise ValueError(f"the {stage} loss is {loss}: the weights are broken; resume from an earlier checkpoint")
        # A perplexity above exp(88) does not fit into float32.
        values = {"loss": loss, "perplexity": math.exp(min(loss, 80.0)), "samples": sums["samples"]}
        if sums["bytes"]:
            values["bits_per_byte"] = sums["nats"] / math.log(2) / sums["bytes"]
        if groups:
            values |= shares(self.answers.compute(), groups)
        self.reset()
        return values

    def reset(self) -> None:
        """Set all sums and counts to 0."""
        self.answers.reset()
        for name in SUMS:
            cast(SumMetric, self.sums[name]).reset()
