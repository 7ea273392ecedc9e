"""Data modules for text: Python's standard library, Hugging Face data sets and local files, and token shards."""

# Longer than other modules because the options of three data modules are documented in it.

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_mhla.data import (
    BrokenSampleError,
    ResumableDataModule,
    SampleSource,
    ShardSets,
    ShardUnavailableError,
)
from lightning_mhla.data.loader import check_same_order, samples_each
from lightning_mhla.data.module import TRAINED, batches_trained, process_share
from lightning_mhla.data.options import ShardOptions
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.ranges import check_range
from mhla_tasks.language.columns import MissingColumnError
from mhla_tasks.language.corpus import Remarks, documents_of
from mhla_tasks.language.dialogues import Document
from mhla_tasks.language.documents import DocumentEncoder, ReplyEncoder
from mhla_tasks.language.hub import StreamedDataSet
from mhla_tasks.language.prompts import PromptFile
from mhla_tasks.language.shuffle import shuffled
from mhla_tasks.language.sources import ArrayRuns, TokenRuns, TokenWindows
from mhla_tasks.language.stdlib import load_stdlib
from mhla_tasks.language.stream import PackedRows, RowPosition, StreamLoader
from mhla_tasks.language.text_bytes import counts_exactly
from mhla_tasks.language.token_shards import MISSING, TARGETS, ShardRuns
from mhla_tasks.language.tokenizer import load_tokenizer, token_bytes
from mhla_tasks.language.vocabularies import vocabulary_conflict


class TextData(ResumableDataModule):
    """Base class of data modules for text; a subclass defines :attr:`tokenizer` and :meth:`runs`.

    Args:
        context: number of tokens in a sample.
        separate_documents: whether tokens attend only to tokens of the same document.
        prompts: file of prompts for the predict command: one on each line, or a table (.jsonl, .csv, ...) with a column prompt;
            null if the command is not used.
        options: arguments of :class:`lightning_mhla.data.ResumableDataModule`.

    Raises:
        ValueError: if ``context`` is below 1.
    """

    assistant_only_loss = False
    """Whether the loss of a dialogue counts only the messages of the assistant."""

    def __init__(self, context: int, separate_documents: bool, prompts: str | None, **options: Any) -> None:
        super().__init__(**options)
        if context < 1:
            raise ValueError(f"context={context} must be a positive number of tokens")
        self.context, self.separate_documents, self.prompts = context, separate_documents, prompts

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer that encodes the text."""
        raise NotImplementedError

    @override
    def source(self, stage: str) -> SampleSource:
        if stage == "predict":
            if self.prompts is None:
                raise ValueError("predict needs prompts: --data.prompts=FILE")
            return PromptFile(self.prompts)
        return self.windows("validate" if stage == "test" else stage)

    def windows(self, stage: str) -> TokenWindows:
        """Return the samples of a stage, which are windows of consecutive tokens.

        Args:
            stage: ``"train"`` or ``"validate"``; tests use the samples of ``"validate"``.
        """
        runs = self.runs(stage)
        return TokenWindows(
            runs, self.context, token_bytes(self.tokenizer), self.separate_documents, self.assistant_only_loss
        )

    def runs(self, stage: str) -> TokenRuns:
        """Return the long token sequences from which the samples of a stage are cut.

        Args:
            stage: ``"train"`` or ``"validate"``.
        """
        raise NotImplementedError

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Convert the mask of document starts in a batch to ``cu_seqlens``, the boundaries of the packed documents.

        The entry ``starts``, ``[B, N]`` bool, is replaced with ``cu_seqlens``: the index of the first token of each document in
        the concatenation of all rows, followed by ``B * N``. The part of a document at the start of a row counts as a document.
        The values are Python integers, because reading them from an accelerator later would wait for the device.

        Args:
            batch: batch as a dict; a batch of prompts has no entry ``starts``.
            dataloader_idx: ignored.

        Returns:
            The batch; unchanged if it has no entry ``starts``.
        """
        if isinstance(batch, dict) and "starts" in batch:
            starts = batch.pop("starts").clone()
            starts[:, 0] = True  # a sample may begin inside a document, and samples do not see each other
            batch["cu_seqlens"] = (*starts.flatten().nonzero()[:, 0].tolist(), starts.numel())
        return batch


class PythonSource(TextData):
    """Data module for the source code of Python's standard library: 9 MB of real text that needs no download.

    Args:
        batch_size: number of samples per batch, summed over all processes.
        context: number of tokens in a sample.
        vocab_size: vocabulary size of the byte-level BPE tokenizer, which is trained on the text once and kept in the cache.
        separate_documents: whether tokens attend only to tokens of the same file.
        num_workers: number of worker processes for each training process; 0 is fastest for text in memory.
        seed: random seed for the order of the samples; null for the seed of seed_everything.
        cache_dir: folder for the tokenizer and the tokens; null for the user's cache.
        prompts: file of prompts for the predict command: one on each line, or a table (.jsonl, .csv, ...) with a column prompt;
            null if the command is not used.
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
        """Train the tokenizer and encode the standard library, unless the results are in the cache already.

        Lightning calls this method once on each node.
        """
        load_stdlib(self.vocab_size, self.cache)

    @property
    @override
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_stdlib(self.vocab_size, self.cache).tokenizer

    @override
    def runs(self, stage: str) -> ArrayRuns:
        text = load_stdlib(self.vocab_size, self.cache)
        return ArrayRuns(text.tokens[stage], text.starts[stage], "the standard library")


class HubText(TextData):
    """Data module for text from the Hugging Face Hub or from local files, which is tokenized while it is streamed.

    Nothing is stored on disk; for more than a short trial, prepare token shards instead. To resume, the stream is read again
    from its start, and training continues with exactly the next token. Only the text column is read; the values in other
    columns may have any type. Rows whose text is null or only whitespace are skipped; the log mentions the first such row.

    Args:
        tokenizer: folder of a tokenizer, or name of a model on the Hugging Face Hub.
        path: name of the data set on the Hugging Face Hub; or, with data_files, the format of the files: json (JSON lines, or
            an array of objects), csv, parquet, or text (each line is a document).
        name: name of the data set's configuration; null for the default.
        split: name of the split to read.
        data_files: local files, glob patterns or URLs, if path is a file format; null for a data set on the Hub. Files that end
            in .gz, .bz2, .xz or .zst are decompressed.
        column: name of the column that holds the texts, or the dialogues: lists of messages with role and content, which the
            chat template of the tokenizer turns into tokens.
        batch_size: number of samples per batch, summed over all processes.
        context: number of tokens in a sample.
        separate_documents: whether tokens attend only to tokens of the same document.
        steps_per_epoch: number of batches in an epoch.
        shuffle_buffer: number of documents that are shuffled together; 0 for the order of the data set.
        val_documents: number of documents at the start of the data set that are used for validation only.
        num_workers: 0 to read and tokenize in the training process; 1 or more to do so in one separate process.
        seed: random seed for the order of the documents; null for the seed of seed_everything.
        control_tokens: whether the spelling of a control token in a text, such as <|endoftext|>, becomes that token; false
            leaves it as text.
        prompts: file of prompts for the predict command: one on each line, or a table (.jsonl, .csv, ...) with a column prompt;
            null if the command is not used.
        assistant_only_loss: whether the loss of a dialogue, in training and validation, counts only the messages of the
            assistant and the tokens that end them; false counts all messages. Texts always count in full.

    Raises:
        ValueError: if ``context`` or ``steps_per_epoch`` is below 1, or ``shuffle_buffer`` or ``val_documents`` is negative.
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
        control_tokens: bool = False,
        assistant_only_loss: bool = False,
    ) -> None:
        super().__init__(
            context, separate_documents, prompts, batch_size=batch_size, num_workers=num_workers, seed=seed
        )
        self.save_hyperparameters(ignore=["prompts"])
        check_range(least=1, steps_per_epoch=steps_per_epoch)
        check_range(least=0, shuffle_buffer=shuffle_buffer, val_documents=val_documents)
        self.tokenizer_name, self.column, self.control_tokens = tokenizer, column, control_tokens
        self.assistant_only_loss = assistant_only_loss
        self.data_set = {"path": path, "name": name, "split": split, "data_files": data_files}
        self.steps_per_epoch, self.shuffle_buffer, self.val_documents = steps_per_epoch, shuffle_buffer, val_documents
        self._stream: StreamLoader | None = None

    @cached_property
    @override
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.tokenizer_name)

    @override
    def runs(self, stage: str) -> ArrayRuns:
        """Return the tokens for validation: those of the first ``val_documents`` documents of the data set.

        Training does not use these documents.

        Args:
            stage: ignored; training samples come from :meth:`train_dataloader`.

        Raises:
            ValueError: if there are no documents to validate on.
        """
        remarks = Remarks()
        documents = list(itertools.islice(self._unshuffled(remarks), self.val_documents))
        remarks.report()
        if not documents:
            raise ValueError(f"the data set gave none of val_documents={self.val_documents} documents to validate on")
        encoded = self._encoder(documents)
        source = "the first documents of the data set"
        return ArrayRuns(encoded.tokens, encoded.starts, source, encoded.missing, encoded.targets)

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            self._stream = None

    def train_dataloader(self) -> StreamLoader:  # type: ignore[override]
        """Return a loader of packed training batches; a resumed run continues after the last batch that it trained on.

        A later call in the same training, as with the trainer option ``reload_dataloaders_every_n_epochs``, returns the same
        loader, which continues with the next batch.
        """
        stream = self._stream
        if stream is not None and stream.continues(self.trainer, self.batch_size):
            return stream
        rank, world = process_share(self.trainer)
        rows_per_process = samples_each(self.batch_size, world)
        rows = range(rank * rows_per_process, (rank + 1) * rows_per_process)
        table = token_bytes(self.tokenizer)

        def make(positions: Sequence[RowPosition]) -> PackedRows:
            return PackedRows(
                self._documents, self._encoder.one, positions, rows, self.context, table, self.separate_documents
            )

        # Raise errors of a missing file or column here, not in the worker process.
        next(self._unshuffled(Remarks()), None)
        self._stream = StreamLoader(make, self.batch_size, rows, self.steps_per_epoch, self.num_workers, self.trainer)
        if self._trained_with is not None:
            self._stream.start_at(self._trained_with)
        return self._stream

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore from a checkpoint the position that each row of the batch has reached in the stream of documents.

        The loader may exist already, because some strategies build it before they read the checkpoint.

        Args:
            state_dict: positions that :meth:`state_dict` returned; ignored if they were saved before the first training step.

        Raises:
            ValueError: if an option that determines the order of the documents, such as the seed, differs.
        """
        if not state_dict.get("rows") or state_dict.get(TRAINED) == 0:
            return
        check_same_order(state_dict, self._order_options())
        self._trained_with = state_dict
        if self._stream is not None:
            self._stream.start_at(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the position that each row of the batch has reached in the stream of documents.

        The rows are those of the global batch, which all processes train on together.

        Returns:
            A dict with the positions, the number of batches trained so far, and the options that determine the order of the
            documents, such as the seed; empty before training.
        """
        if self._stream is None or self.trainer is None:
            return {}
        return {**self._stream.state_dict(), **self._order_options(), TRAINED: batches_trained(self.trainer)}

    def _order_options(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("seed", "shuffle_buffer", "val_documents")}

    @cached_property
    def _data(self) -> StreamedDataSet:
        return StreamedDataSet(self.data_set, self.column)

    def _unshuffled(self, remarks: Remarks) -> Iterator[Document]:
        """Yield each document once, in the order of the data set.

        The texts or dialogues come from the table column that the option ``column`` names. Rows without text are left out.
        Unpaired surrogates, which UTF-8 cannot encode, are replaced with U+FFFD.

        Args:
            remarks: counter of the rows that are left out and of the documents in which characters are replaced.

        Raises:
            BrokenSampleError: if a row is broken or lacks the column; the message names the file and the row.
            ShardUnavailableError: if a file cannot be read at the moment.
        """
        rows = self._data.rows()
        try:
            yield from documents_of(rows, remarks)
        except MissingColumnError as error:
            raise BrokenSampleError(f"{error}; set column") from error
        except ValueError as error:
            raise BrokenSampleError(str(error)) from error
        except OSError as error:
            raise ShardUnavailableError(str(error)) from error

    def _documents(self) -> Iterator[Document]:
        """Yield the training documents endlessly, in a different order in each epoch.

        Every call of this method yields the same sequence.

        Raises:
            ValueError: if there are no documents after those for validation.
        """
        remarks = Remarks(at_once=True)
        for epoch in itertools.count():
            trained = itertools.islice(self._unshuffled(remarks), self.val_documents, None)
            none = True
            for document in shuffled(trained, self.shuffle_buffer, self.seed + epoch):
                none = False
                yield document
            if none:
                raise ValueError(f"the data set has no more than val_documents={self.val_documents} documents")

    @cached_property
    def _encoder(self) -> DocumentEncoder:
        encoder = ReplyEncoder if self.assistant_only_loss else DocumentEncoder
        return encoder(self.tokenizer, self.control_tokens)


class TokenShards(TextData):
    """Data module for tokenized text in WebDataset tar shards, which ``lightning prepare text`` writes.

    Args:
        train: shards to train on: DIR/train-{00000..00099}.tar, a glob, URLs, or a list of these.
        val: shards to validate and test on, given in the same way as train.
        tokenizer: folder of the tokenizer, or name of a model on the Hugging Face Hub; null for the folder tokenizer/ beside
            the shards.
        batch_size: number of samples per batch, summed over all processes.
        context: number of tokens in a sample.
        separate_documents: whether tokens attend only to tokens of the same document.
        num_workers: number of worker processes for each training process.
        seed: random seed for the order of the samples; null for the seed of seed_everything.
        shards: options for reading shards and for caching downloads.
        prompts: file of prompts for the predict command: one on each line, or a table (.jsonl, .csv, ...) with a column prompt;
            null if the command is not used.
        assistant_only_loss: whether the loss of a dialogue, in training and validation, counts only the messages of the
            assistant and the tokens that end them; false counts all messages. Texts always count in full.
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
        shards: ShardOptions = ShardOptions(shuffle_window=None),
        prompts: str | None = None,
        assistant_only_loss: bool = False,
    ) -> None:
        super().__init__(
            context, separate_documents, prompts,
            batch_size=batch_size, num_workers=num_workers, seed=seed, shards=shards,
        )  # fmt: skip
        self.save_hyperparameters(ignore=["prompts"])
        keep_plain(self)
        self.shards: ShardSets = ShardSets(train, val, self.shard_options)
        self.tokenizer_name, self.assistant_only_loss = tokenizer, assistant_only_loss

    @cached_property
    @override
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.tokenizer_name or self._beside())

    def _beside(self) -> Path:
        folder = self.shards.find("train")[0].parent / "tokenizer"
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is not there, so the tokenizer of the shards is unknown; name it with "
                "--data.tokenizer (a folder, or a model on the hub)"
            )
        return folder

    def _check_tokenizers(self, stage: str) -> None:
        """Check that the tokenizers stored beside the shards of a stage have the same tokens as :attr:`tokenizer`.

        Args:
            stage: ``"train"`` or ``"validate"``.

        Raises:
            ValueError: if a tokenizer differs.
        """
        name = self.tokenizer_name or self._beside()
        for folder in dict.fromkeys(shard.parent for shard in self.shards.find(stage)):
            beside = folder / "tokenizer"
            if not beside.is_dir() or (Path(name).exists() and beside.samefile(name)):
                continue
            if conflict := vocabulary_conflict(load_tokenizer(beside), self.tokenizer):
                raise ValueError(
                    f"the shards in {folder} were made with a different tokenizer than {name}: {conflict}; prepare them again "
                    f"with lightning prepare text --tokenizer {name}, or give shards of one tokenizer"
                )

    @override
    def runs(self, stage: str) -> ShardRuns:
        self._check_tokenizers(stage)
        runs = ShardRuns(self.shards.reader(stage))
        uncounted = [run for run in range(len(runs.lengths)) if not runs.has_missing(run)]
        if stage == "validate" and uncounted and not counts_exactly(self.tokenizer):
            raise ValueError(
                f"{runs.describe(uncounted[0])} has no .{MISSING}: its tokenizer changes text before it cuts it, so that the "
                "bytes of the text (for bits per byte) cannot be counted from the tokens; prepare the validation shards again "
                "with lightning prepare text --force"
            )
        unmarked = [run for run in range(len(runs.lengths)) if not runs.has_targets(run)]
        if self.assistant_only_loss and unmarked:
            raise ValueError(
                f"{runs.describe(unmarked[0])} has no .{TARGETS}, so the assistant's messages are unknown, which "
                "assistant_only_loss needs; prepare the shards again with lightning prepare text --force, which warns if the "
                "chat template does not show which text the model writes, or set assistant_only_loss: false"
            )
        return runs
