"""Text for language models: the standard library of this Python, token shards, and data sets of the hub."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_mhla.data import ResumableDataModule, SampleSource, ShardSets
from lightning_mhla.data.loader import samples_each
from lightning_mhla.data.module import process_share
from mhla_tasks.language.documents import check_text, encode_document, encode_documents
from mhla_tasks.language.prompts import PromptFile
from mhla_tasks.language.sources import ArrayRuns, TokenWindows
from mhla_tasks.language.stdlib import load_stdlib
from mhla_tasks.language.stream import PackedRows, RowPosition, StreamLoader
from mhla_tasks.language.token_shards import ShardRuns
from mhla_tasks.language.tokenizer import load_tokenizer, token_bytes


class TextData(ResumableDataModule):
    """The base of data sets of text; each gives :attr:`tokenizer` and :meth:`windows`.

    Args:
        context: tokens of a sample, which the model sees at once.
        separate_documents: whether tokens see their own document only (packed with cu_seqlens).
        prompts: file for predict: one prompt a line, or .jsonl with a "prompt" in each.
        options: options of :class:`lightning_mhla.data.ResumableDataModule`.
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

    @override
    def source(self, stage: str) -> SampleSource:
        if stage == "predict":
            if self.prompts is None:
                raise ValueError("predict needs prompts: --data.init_args.prompts=FILE")
            return PromptFile(self.prompts)
        return self.windows("validate" if stage == "test" else stage)

    def windows(self, stage: str) -> TokenWindows:
        """Samples of ``"train"`` or ``"validate"``."""
        raise NotImplementedError

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Where packed documents begin, as numbers of the CPU, so that nothing waits for the device."""
        if isinstance(batch, dict) and "starts" in batch:
            starts = batch.pop("starts").clone()
            starts[:, 0] = True
            batch["cu_seqlens"] = (*starts.flatten().nonzero()[:, 0].tolist(), starts.numel())
        return batch


class PythonSource(TextData):
    """The standard library of the running Python: 9 MB of real text that is always there.

    Args:
        batch_size: samples of a batch over all processes together.
        context: tokens of a sample.
        vocab_size: vocabulary size of the byte-level BPE that is trained on the text, once, and kept in the cache.
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
    @override
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_stdlib(self.vocab_size, self.cache).tokenizer

    @override
    def windows(self, stage: str) -> TokenWindows:
        text = load_stdlib(self.vocab_size, self.cache)
        runs = ArrayRuns(text.tokens[stage], text.starts[stage], "the standard library")
        return TokenWindows(runs, self.context, token_bytes(text.tokenizer), self.separate_documents)


class HubText(TextData):
    """Text of a data set on the hub, or of local files, tokenised while it streams in.

    Nothing is stored; to train for more than a trial, or again, make token shards of it. A run resumes with the very next
    token after a stop, once the documents before it are read past.

    Args:
        tokenizer: a model on the hub, or a folder.
        path: name of the data set, or json, parquet or text with data_files.
        name: configuration of the data set.
        split: split of the data set.
        data_files: local files or URLs, for json, parquet and text.
        column: that holds the text.
        batch_size: samples of a batch over all processes together.
        context: tokens of a sample.
        separate_documents: whether tokens see their own document only.
        steps_per_epoch: batches that are called an epoch.
        shuffle_buffer: documents that are shuffled together; 0 for the order of the data set.
        val_documents: documents at the start that are kept for validation.
        num_workers: 1 reads and tokenises in a process of its own.
        seed: seed of the shuffle; null takes seed_everything.
        prompts: file for predict: one prompt a line, or .jsonl with a "prompt" in each.
    """

    def __init__(
        self,
        tokenizer: str,
        path: str = "HuggingFaceFW/fineweb-edu",
        name: str | None = None,
        split: str = "train",
        data_files: str | list[str] | None = None,
        column: str = "text",
        batch_size: int = 128,
        context: int = 2048,
        separate_documents: bool = False,
        steps_per_epoch: int = 1000,
        shuffle_buffer: int = 10_000,
        val_documents: int = 500,
        num_workers: int = 1,
        seed: int | None = None,
        prompts: str | None = None,
    ) -> None:
        super().__init__(
            context, separate_documents, prompts, batch_size=batch_size, num_workers=num_workers, seed=seed
        )
        self.save_hyperparameters(ignore=["prompts"])
        self.tokenizer_name, self.column = tokenizer, column
        self.data_set = {"path": path, "name": name, "split": split, "data_files": data_files}
        self.steps_per_epoch, self.shuffle_buffer, self.val_documents = steps_per_epoch, shuffle_buffer, val_documents
        self._stream: StreamLoader | None = None

    @cached_property
    @override
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.tokenizer_name)

    @override
    def windows(self, stage: str) -> TokenWindows:
        """Return windows of the documents at the start."""
        rows = self._open().take(self.val_documents)
        texts = [check_text(row[self.column], "the data set") for row in rows if row[self.column] is not None]
        if not texts:
            raise ValueError(f"the data set gave none of val_documents={self.val_documents} documents to validate on")
        runs = ArrayRuns(*encode_documents(texts, self.tokenizer), "the first documents of the data set")
        return TokenWindows(runs, self.context, token_bytes(self.tokenizer), self.separate_documents)

    def train_dataloader(self) -> StreamLoader:  # type: ignore[override]
        """Packed batches that resume where the trainer's batch count stands."""
        rank, world = process_share(self.trainer)
        each = samples_each(self.batch_size, world)
        rows = range(rank * each, (rank + 1) * each)
        table = token_bytes(self.tokenizer)

        def make(positions: Sequence[RowPosition]) -> PackedRows:
            return PackedRows(
                self._documents, self._encode, positions, rows, self.context, table, self.separate_documents
            )

        self._stream = StreamLoader(make, self.batch_size, rows, self.steps_per_epoch, self.num_workers, self.trainer)
        if self._trained_with is not None:
            self._stream.load_state_dict(self._trained_with)
        return self._stream

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint; some strategies make the loader before they read it."""
        self._trained_with = state_dict
        if self._stream is not None:
            self._stream.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Where every row stands, for the checkpoint."""
        return {} if self._stream is None else self._stream.state_dict()

    def _open(self) -> Any:
        from datasets import load_dataset

        given = {key: value for key, value in self.data_set.items() if value is not None}
        try:
            data = load_dataset(**given, streaming=True)
        except Exception as error:
            raise FileNotFoundError(
                f"the data set {given} could not be loaded ({type(error).__name__}: {str(error).splitlines()[0]}); check its "
                "name and the network, or give local files: path: json and data_files"
            ) from error
        features: dict[str, Any] = next(iter(data), {})
        if self.column not in features:
            raise ValueError(f"the data set has no column {self.column!r}, only {sorted(features)}; set column")
        return data

    def _documents(self) -> Iterator[str]:
        """All documents over and over, each time in another order; the same whenever it is called."""
        data = self._open().skip(self.val_documents)
        for epoch in itertools.count():
            shuffled = (
                data.shuffle(seed=self.seed + epoch, buffer_size=self.shuffle_buffer) if self.shuffle_buffer else data
            )
            none = True
            for row in shuffled:
                none = False
                text = row[self.column]
                yield "" if text is None else check_text(text, "the data set")
            if none:
                raise ValueError(f"the data set has no more than val_documents={self.val_documents} documents")

    def _encode(self, text: str) -> np.ndarray:
        return encode_document(self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer)


class TokenShards(TextData):
    """Text that ``lightning prepare text`` has turned into tokens, in WebDataset tar shards.

    Args:
        train: shards to train on: DIR/train-{00000..00099}.tar, a glob, URLs, or a list of these.
        val: shards to validate and test on, in the same forms.
        tokenizer: folder of the tokenizer, or a model on the hub; null for the folder tokenizer/ beside the shards.
        batch_size: samples of a batch over all processes together.
        context: tokens of a sample.
        separate_documents: whether tokens see their own document only.
        num_workers: worker processes for each training process.
        seed: order of the samples; null takes seed_everything.
        max_skipped: broken training samples that one process skips, with a warning each, before it stops.
        shuffle_window: shards whose samples are shuffled together; null shuffles everything with everything.
        cache_dir: folder for downloaded shards and for member tables of read-only folders; null for the user's cache.
        cache_bytes: limit in bytes of the shards behind URLs that lie in cache_dir at a time: they are fetched ahead, and
            removed when done. null downloads all and keeps them.
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
        cache_bytes: int | None = None,
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
        self.shards: ShardSets = ShardSets(train, val, cache_dir, cache_bytes)
        self.tokenizer_name = tokenizer

    @cached_property
    @override
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.tokenizer_name or self._beside())

    def _beside(self) -> Path:
        folder = self.shards.find("train")[0].parent / "tokenizer"
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is not there, so the tokenizer of the shards is unknown; name it with "
                "--data.init_args.tokenizer (a folder, or a model on the hub)"
            )
        return folder

    @override
    def windows(self, stage: str) -> TokenWindows:
        table = token_bytes(self.tokenizer)
        return TokenWindows(ShardRuns(self.shards.reader(stage)), self.context, table, self.separate_documents)
