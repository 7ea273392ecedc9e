"""Text for language models: the standard library of this Python, token shards, and data sets of the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_mhla.data import ResumableDataModule, SampleSource, ShardReader, find_shards
from mhla_tasks.language.prompts import PromptFile
from mhla_tasks.language.shards import ShardRuns
from mhla_tasks.language.sources import ArrayRuns, TokenWindows
from mhla_tasks.language.stdlib import load_stdlib
from mhla_tasks.language.tokenizer import load_tokenizer, token_bytes


class TextData(ResumableDataModule):
    """What the data sets of text share; each gives :attr:`tokenizer` and :meth:`windows`.

    Args:
        context: tokens of a sample, which the model sees at once.
        separate_documents: whether tokens see their own document only (packed with cu_seqlens).
        prompts: file for predict: one prompt a line, or .jsonl with a "prompt" in each.
        options: of :class:`lightning_mhla.data.ResumableDataModule`.
    """

    def __init__(self, context: int, separate_documents: bool, prompts: str | None, **options: Any) -> None:
        super().__init__(**options)
        if context < 1:
            raise ValueError(f"context={context} must be a positive number of tokens")
        self.context, self.separate_documents, self.prompts = context, separate_documents, prompts

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the text."""
        raise NotImplementedError

    def source(self, stage: str) -> SampleSource:
        """See :meth:`ResumableDataModule.source`."""
        if stage == "predict":
            if self.prompts is None:
                raise ValueError("predict needs prompts: --data.init_args.prompts=FILE")
            return PromptFile(self.prompts)
        return self.windows("validate" if stage == "test" else stage)

    def windows(self, stage: str) -> TokenWindows:
        """Samples of ``"train"`` or ``"validate"``."""
        raise NotImplementedError


class PythonSource(TextData):
    """The standard library of the running Python: 10 MB of real text that is always there.

    Args:
        batch_size: samples of a batch over all processes together.
        context: tokens of a sample.
        vocab_size: of the byte-level BPE that is trained on the text, once, and kept in the cache.
        separate_documents: whether tokens see their own file only.
        num_workers: worker processes for each training process; 0 is fastest for text in memory.
        seed: order of the samples; null takes seed_everything.
        cache_dir: folder for the tokenizer and the tokens; null for the user's cache.
        prompts: file for predict: one prompt a line, or .jsonl with a "prompt" in each.
    """

    def __init__(
        self,
        batch_size: int = 8,
        context: int = 512,
        vocab_size: int = 4096,
        separate_documents: bool = False,
        num_workers: int = 0,
        seed: int | None = None,
        cache_dir: str | None = None,
        prompts: str | None = None,
    ) -> None:
        super().__init__(
            context, separate_documents, prompts, batch_size=batch_size, num_workers=num_workers, seed=seed
        )
        self.save_hyperparameters(ignore=["prompts"])
        self.vocab_size, self.cache = vocab_size, Path(cache_dir) if cache_dir else None

    def prepare_data(self) -> None:
        """Train the tokenizer and encode the text, once on each node."""
        load_stdlib(self.vocab_size, self.cache)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """See :class:`TextData`."""
        return load_stdlib(self.vocab_size, self.cache).tokenizer

    def windows(self, stage: str) -> TokenWindows:
        """See :class:`TextData`."""
        text = load_stdlib(self.vocab_size, self.cache)
        runs = ArrayRuns(text.tokens[stage], text.starts[stage], "the standard library")
        return TokenWindows(runs, self.context, token_bytes(text.tokenizer), self.separate_documents)


class TokenShards(TextData):
    """Text that ``python -m mhla_tasks.language.shards`` has turned into tokens, in WebDataset tar shards.

    Args:
        train: shards to train on: DIR/train-{00000..00099}.tar, a glob, URLs, or a list of these.
        val: shards to validate and test on, likewise.
        tokenizer: folder of the tokenizer, or a model on the hub; null for the folder tokenizer/ beside the shards.
        batch_size: samples of a batch over all processes together.
        context: tokens of a sample.
        separate_documents: whether tokens see their own document only.
        num_workers: worker processes for each training process.
        seed: order of the samples; null takes seed_everything.
        max_skipped: broken training samples that one process skips, with a warning each, before it stops.
        shuffle_window: shards whose samples are shuffled together; null shuffles everything with everything.
        cache_dir: folder for downloaded shards and for member tables of read-only folders; null for the user's cache.
        prompts: file for predict: one prompt a line, or .jsonl with a "prompt" in each.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str],
        tokenizer: str | None = None,
        batch_size: int = 128,
        context: int = 2048,
        separate_documents: bool = False,
        num_workers: int = 4,
        seed: int | None = None,
        max_skipped: int = 100,
        shuffle_window: int | None = None,
        cache_dir: str | None = None,
        prompts: str | None = None,
    ) -> None:
        super().__init__(
            context,
            separate_documents,
            prompts,
            batch_size=batch_size,
            num_workers=num_workers,
            seed=seed,
            max_skipped=max_skipped,
            shuffle_window=shuffle_window,
        )
        self.save_hyperparameters(ignore=["prompts"])
        self.shards = {"train": train, "validate": val}
        self.tokenizer_name, self.cache = tokenizer, Path(cache_dir) if cache_dir else None
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def prepare_data(self) -> None:
        """Find or download the shards and read their member tables, once on each node."""
        if self.trainer is not None and self.trainer.state.fn in ("fit", "validate", "test"):
            for stage in ("train", "validate") if self.trainer.state.fn == "fit" else ("validate",):
                self._reader(stage)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """See :class:`TextData`."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.tokenizer_name or self._beside())
        return self._tokenizer

    def _beside(self) -> Path:
        folder = find_shards(self.shards["train"], self.cache)[0].parent / "tokenizer"
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is not there, so the tokenizer of the shards is unknown; name it with "
                "--data.init_args.tokenizer (a folder, or a model on the hub)"
            )
        return folder

    def windows(self, stage: str) -> TokenWindows:
        """See :class:`TextData`."""
        table = token_bytes(self.tokenizer)
        return TokenWindows(ShardRuns(self._reader(stage)), self.context, table, self.separate_documents)

    def _reader(self, stage: str) -> ShardReader:
        return ShardReader(find_shards(self.shards[stage], self.cache), self.cache)
