"""Data modules with synthetic sequences that test a model's memory: associative recall, and a needle in a haystack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from lightning_mhla.data import ResumableDataModule, SampleSource
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.ranges import check_range
from mhla_tasks.language.loss import IGNORED

STAGES = {"train": 0, "validate": 1, "test": 2}
"""Number of each stage, which is part of the seed of its samples."""


@dataclass(frozen=True)
class RecallPart:
    """Options of a set of associative recall sequences that have the same length and the same number of pairs.

    Args:
        tokens: number of tokens in a sequence, an even number.
        pairs: number of key-value pairs, at most a quarter of ``tokens``. For each pair, a sequence has one question: the key
            occurs again, and the model has to predict its value.
        samples: number of sequences.

    Raises:
        ValueError: if an option is out of range.
    """

    tokens: int = 64
    pairs: int = 4
    samples: int = 10_000

    def __post_init__(self) -> None:
        if self.pairs < 1 or self.tokens % 2 or 4 * self.pairs > self.tokens:
            raise ValueError(
                f"tokens={self.tokens} must be even and at least four times pairs={self.pairs}: a pair and its question "
                "take two tokens each"
            )
        if self.samples < 1:
            raise ValueError(f"samples={self.samples} must be positive")


class QuestionData(ResumableDataModule):
    """Base class of data modules for sequences with questions that test a model's memory.

    A question is a position at which the model has to predict a token (the answer) that follows from earlier tokens.

    Accuracy is measured separately for groups of sequences, such as those of the same length. A batch is a dict:

    * ``tokens``: token indices, ``[B, N]`` int64.
    * ``labels``: token to predict at each position, ``[B, N]`` int64; -100 where no answer is expected.
    * ``group``: index of each sequence's group, ``[B]`` int64.

    Args:
        vocab_size: vocabulary size of the model.
        options: arguments of :class:`lightning_mhla.data.ResumableDataModule`.
    """

    groups: Sequence[str] = ()
    """Names of the groups by which answers are counted."""

    def __init__(self, vocab_size: int, **options: Any) -> None:
        super().__init__(**options)
        self.vocab_size = vocab_size

    def questions(self, stage: str) -> SampleSource:
        """Return the samples of a stage: sequences with positions at which the model has to predict a certain token.

        Args:
            stage: ``"train"``, ``"validate"`` or ``"test"``.
        """
        raise NotImplementedError

    @override
    def source(self, stage: str) -> SampleSource:
        if stage == "predict":
            raise ValueError(f"{type(self).__name__} has no prompts to predict from; use validate or test")
        return self.questions(stage)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Remove the positions after the last label of a batch from ``tokens`` and ``labels``; they do not affect the loss.

        Args:
            batch: batch as a dict; see the class description.
            dataloader_idx: ignored.

        Returns:
            A batch with shorter sequences; ``batch`` itself if it has no ``labels``.
        """
        if isinstance(batch, dict) and "labels" in batch:
            question_columns = (batch["labels"] != IGNORED).any(0).nonzero()
            end = int(question_columns[-1]) + 1 if len(question_columns) else batch["labels"].shape[1]
            batch = {**batch, **{name: batch[name][:, :end] for name in ("tokens", "labels")}}
        return batch


class AssociativeRecall(QuestionData):
    """Data module for multi-query associative recall (MQAR): sequences of key-value pairs, then questions about them.

    The task follows Zoology (arXiv 2312.04927, section 4). A sequence of N tokens begins with D pairs of a key and its value.
    Keys are drawn without replacement from the lower half of the vocabulary, values from the upper half. The rest of the
    sequence consists of (N - 2D) / 2 slots of two tokens. D of these slots begin with a key, after which the model has to
    predict its value. The D slots are drawn without replacement, slot i = 1, 2, ... with a probability proportional to
    ``i ** (power - 1)``. All other tokens after the pairs are random, or 0 if ``random_non_queries`` is false. Accuracy is
    logged separately for each number of pairs, for example as ``val/accuracy_pairs4``.

    Args:
        train: sets of sequences to train on, by length and number of pairs.
        val: sets of sequences to validate and test on; the sequences differ from those of training.
        vocab_size: number of tokens in the vocabulary; token 0 is neither key nor value.
        power: exponent of the distribution of the questions' positions; small values put them close to the pairs.
        random_non_queries: whether tokens between the questions are random tokens of the full vocabulary; otherwise they are 0.
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of worker processes for each training process.
        seed: random seed for the sequences and their order; null for the seed of seed_everything.

    Raises:
        ValueError: if ``train`` or ``val`` is empty, the vocabulary is too small for a sequence, or ``power`` is not between 0
            and 10.
    """

    def __init__(
        self,
        train: list[RecallPart] = [RecallPart()],  # noqa: B006  never changed
        val: list[RecallPart] = [RecallPart(samples=1000)],  # noqa: B006  never changed
        vocab_size: int = 8192,
        power: float = 0.01,
        random_non_queries: bool = True,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__(vocab_size, batch_size=batch_size, num_workers=num_workers, seed=seed)
        self.save_hyperparameters()
        keep_plain(self)
        parts = {
            name: [as_dataclass(RecallPart, part) for part in part_options]
            for name, part_options in (("train", train), ("val", val))
        }
        for name, listed in parts.items():
            if not listed:
                raise ValueError(
                    f"{name}=[] has no set of sequences; give at least one, with tokens, pairs and samples"
                )
        self.parts = {"train": parts["train"], "validate": parts["val"], "test": parts["val"]}
        for part in (*parts["train"], *parts["val"]):
            if vocab_size <= part.tokens or part.pairs > vocab_size // 2 - 1:
                raise ValueError(f"vocab_size={vocab_size} must exceed the {part.tokens} tokens of a sequence")
        check_range(least=0, most=10, power=power)
        self.power, self.random_non_queries = power, random_non_queries
        self.context = max(part.tokens for part in parts["train"])
        self.pairs = sorted({part.pairs for part in parts["val"]})
        self.groups = [f"pairs{pairs}" for pairs in self.pairs]

    @override
    def questions(self, stage: str) -> SampleSource:
        return _RecallSamples(self, stage)


class _RecallSamples:
    """Data set of associative recall sequences, each of which is generated when it is read.

    Args:
        data: data module with the options of the sequences.
        stage: ``"train"``, ``"validate"`` or ``"test"``.
    """

    def __init__(self, data: AssociativeRecall, stage: str) -> None:
        self.parts, self.stage = data.parts[stage], stage
        self.vocab_size, self.power, self.fill = data.vocab_size, data.power, data.random_non_queries
        self.seed, self.pairs = data.seed, data.pairs
        self.ends = np.cumsum([part.samples for part in self.parts])
        self.longest = max(part.tokens for part in self.parts)
        self.shard_sizes: Sequence[int] = [int(self.ends[-1])]

    def __len__(self) -> int:
        return self.shard_sizes[0]

    def __getitem__(self, index: int) -> dict[str, Any]:
        part = self.parts[int(np.searchsorted(self.ends, index, side="right"))]
        # The seed depends on stage and index only, so that every process and every epoch draws the same sample.
        draw = np.random.default_rng((self.seed, STAGES[self.stage], index))
        half = self.vocab_size // 2
        keys = 1 + draw.choice(half - 1, part.pairs, replace=False)
        values = half + draw.choice(self.vocab_size - half, part.pairs, replace=False)
        tokens = np.zeros(self.longest, dtype=np.int64)
        labels = np.full(self.longest, IGNORED, dtype=np.int64)
        first = 2 * part.pairs
        tokens[0:first:2], tokens[1:first:2] = keys, values
        chances = np.arange(1, (part.tokens - first) // 2 + 1) ** (self.power - 1)
        slots = draw.choice(len(chances), part.pairs, replace=False, p=chances / chances.sum())
        question_positions = first + 2 * slots
        if self.fill:
            tokens[first : part.tokens] = draw.integers(0, self.vocab_size, part.tokens - first)
        tokens[question_positions], labels[question_positions] = keys, values
        group = self.pairs.index(part.pairs) if part.pairs in self.pairs else 0
        return {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels), "group": group, "bytes": 0}


class Needle(QuestionData):
    """Data module for the needle-in-a-haystack test, in which the model has to recall a value among random tokens.

    A sequence has a key and its value at a random position among random tokens, and the key again at the end. The model has to
    predict the value after the last key. Keys, values and the haystack (the other tokens) come from different thirds of the
    vocabulary. Accuracy is logged by sequence length (``val/accuracy_tokens512``), and by length and depth
    (``val/accuracy_tokens512_depth0`` to ``depth4``). The depth is the fifth of the haystack that contains the pair, counted
    from 0.

    Args:
        tokens: number of tokens in a training sequence.
        lengths: lengths of the sequences to validate and test on, as multiples of ``tokens``.
        vocab_size: number of tokens in the vocabulary.
        samples: number of training sequences in an epoch.
        val_samples: number of sequences of each length to validate and test on.
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of worker processes for each training process.
        seed: random seed for the sequences and their order; null for the seed of seed_everything.

    Raises:
        ValueError: if an option is below its minimum, such as 8 for ``tokens`` and 6 for ``vocab_size``.
    """

    DEPTHS = 5

    def __init__(
        self,
        tokens: int = 256,
        lengths: list[int] = [1, 2, 4, 8],  # noqa: B006  never changed
        vocab_size: int = 96,
        samples: int = 10_000,
        val_samples: int = 200,
        batch_size: int = 32,
        num_workers: int = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__(vocab_size, batch_size=batch_size, num_workers=num_workers, seed=seed)
        self.save_hyperparameters()
        check_range(least=3 + self.DEPTHS, tokens=tokens)
        check_range(least=6, vocab_size=vocab_size)
        check_range(least=1, samples=samples, val_samples=val_samples, lengths=min(lengths, default=0))
        self.tokens, self.lengths, self.counts = tokens, lengths, (samples, val_samples)
        self.context = tokens
        sizes = [tokens * length for length in lengths]
        self.groups = [f"tokens{size}_depth{depth}" for size in sizes for depth in range(self.DEPTHS)]

    @override
    def questions(self, stage: str) -> SampleSource:
        return _NeedleSamples(self, stage)


class _NeedleSamples:
    """Data set of needle-in-a-haystack sequences, each of which is generated when it is read.

    Args:
        data: data module with the options of the sequences.
        stage: ``"train"``, ``"validate"`` or ``"test"``.
    """

    def __init__(self, data: Needle, stage: str) -> None:
        self.stage, self.seed, self.third = stage, data.seed, data.vocab_size // 3
        self.depths = data.DEPTHS
        self.sizes = [data.tokens] if stage == "train" else [data.tokens * length for length in data.lengths]
        self.each = data.counts[stage != "train"]
        self.shard_sizes: Sequence[int] = [self.each * len(self.sizes)]

    def __len__(self) -> int:
        return self.shard_sizes[0]

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, size = index // self.each, self.sizes[index // self.each]
        draw = np.random.default_rng((self.seed, STAGES[self.stage], index))
        tokens = np.zeros(max(self.sizes), dtype=np.int64)
        labels = np.full(max(self.sizes), IGNORED, dtype=np.int64)
        key, value = int(draw.integers(self.third)), self.third + int(draw.integers(self.third))
        tokens[:size] = 2 * self.third + draw.integers(0, self.third, size)
        position = int(draw.integers(0, size - 2))
        tokens[position : position + 2] = key, value
        tokens[size - 1], labels[size - 1] = key, value
        depth = position * self.depths // (size - 2)
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "group": number * self.depths + depth,
            "bytes": 0,
        }
