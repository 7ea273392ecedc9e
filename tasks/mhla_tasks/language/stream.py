"""Packing of streamed documents into batches. Packing can resume from a position in a checkpoint.

The global batch consists of the rows of all processes. Row r of the B rows packs documents r, r + B, r + 2 B, ... of the
stream. The contents of a batch therefore do not depend on the number of processes. The position of a row consists of two
numbers: the index of its next document, and the number of tokens of this document that are already used. Every batch contains
the positions after it; a checkpoint stores those of the last batch that the model was trained on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning import Trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_mhla.data.loader import with_short_errors
from lightning_mhla.data.module import batches_trained, process_share
from mhla_tasks.language.dialogues import Document
from mhla_tasks.language.documents import EncodedDocument
from mhla_tasks.language.text_bytes import spread_over

Encode = Callable[[Document], EncodedDocument]
"""Function that encodes a document as tokens."""

KEPT = 64
"""Number of batches whose positions are remembered, more than a Trainer and its worker process prefetch."""


class RowPosition(NamedTuple):
    """Position that one row of the global batch (the rows of all processes) has reached in a stream of documents.

    Attributes:
        document: index of the next document.
        used: number of tokens of this document that earlier samples used.
    """

    document: int
    used: int


class PackedRows(IterableDataset):
    """Endless stream of batches for one process; each row of a batch is filled with documents, without padding.

    Args:
        documents: function that returns a new iterator over the endless stream of documents, in the same order each time.
        encode: function that encodes a document as an :class:`EncodedDocument`.
        positions: start position of each row of the global batch, which all processes train on together.
        rows: indices of the rows of the global batch that this process packs.
        context: number of input tokens in a sample. A sample has one more token, which is only a target.
        token_bytes: number of bytes of text that each token of the vocabulary stands for, ``[V]``.
        separate_documents: whether batches have the entry ``starts``, which marks the tokens that begin a document.
    """

    def __init__(
        self,
        documents: Callable[[], Iterator[Document]],
        encode: Encode,
        positions: Sequence[RowPosition],
        rows: range,
        context: int,
        token_bytes: np.ndarray,
        separate_documents: bool,
    ) -> None:
        self.documents, self.encode, self.positions, self.rows = documents, encode, list(positions), rows
        self.context, self.token_bytes, self.separate_documents = context, token_bytes, separate_documents

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the batches that follow the start positions.

        Each batch is a dict for the b rows of this process:

        * ``tokens``: token indices, ``[b, context + 1]`` int64.
        * ``bytes``: number of bytes of text that the target tokens of each row stand for, ``[b]`` int64. The target tokens are
          all tokens but the first, or those in ``target_mask``.
        * ``position``: where each row continues after the batch, ``[b, 2]`` int64: the index of its next document, and the
          number of tokens of this document that are already used.
        * ``valid``: mask that is False for rows that only fill up a batch, ``[b]`` bool; here always True.
        * ``starts``, only with ``separate_documents``: mask of the tokens that begin a document, ``[b, context]`` bool.
        * ``target_mask``, only if ``encode`` returns targets: for each input token, whether the loss counts the token that
          follows it, ``[b, context]`` bool.
        """
        number = len(self.positions)
        row_positions = {row: self.positions[row] for row in self.rows}
        waiting: dict[int, list[tuple[int, Document]]] = {row: [] for row in self.rows}
        packs = {row: _Pack(position.used) for row, position in row_positions.items()}
        # The stream is read from its first document, so that its shuffle is the same; only documents in use are encoded.
        first = min(position.document for position in row_positions.values())
        for index, document in enumerate(self.documents()):
            row = index % number
            if index >= first and row in row_positions and index >= row_positions[row].document:
                waiting[row].append((index, document))
            # Rows fill at different speeds: a batch is complete when the slowest row of this process has a sample.
            while all(self._filled(packs[row], waiting[row]) for row in self.rows):
                yield self._batch([packs[row].take(self.context) for row in self.rows])

    def _filled(self, pack: _Pack, waiting: list[tuple[int, Document]]) -> bool:
        """Move documents of one batch row from ``waiting`` to ``pack`` until ``pack`` has enough tokens for a sample.

        Each document is encoded when it is moved. If ``waiting`` becomes empty first, ``pack`` has too few tokens.

        Args:
            pack: queue of the row's encoded documents, changed in place.
            waiting: index in the stream and content of each of the row's documents that are not encoded yet, changed in place.

        Returns:
            Whether ``pack`` has the ``context + 1`` tokens of a sample.
        """
        while pack.size <= self.context and waiting:
            index, document = waiting.pop(0)
            pack.add(index, self.encode(document))
        return pack.size > self.context

    def _batch(self, parts: list[_Window]) -> dict[str, torch.Tensor]:
        tokens = np.stack([part.tokens for part in parts])
        missing = np.array([part.missing for part in parts])
        masks = [part.targets[1:] for part in parts if part.targets is not None]
        sizes = self.token_bytes[tokens[:, 1:]]
        batch = {
            "tokens": torch.from_numpy(tokens),
            "bytes": torch.from_numpy((sizes * np.stack(masks) if masks else sizes).sum(1) + missing),
            "position": torch.tensor([part.position for part in parts]),
            "valid": torch.ones(len(parts), dtype=torch.bool),
        }
        if self.separate_documents:
            batch["starts"] = torch.from_numpy(np.stack([part.first[:-1] for part in parts]))
        if masks:
            batch["target_mask"] = torch.from_numpy(np.stack(masks))
        return batch


class _Window(NamedTuple):
    """Sample for one row of a batch.

    Attributes:
        tokens: token indices, ``[context + 1]``.
        first: mask of the tokens that begin a document, ``[context + 1]`` bool.
        position: position in the stream of documents at which the row's next sample begins.
        missing: length in bytes of the text of the sample's targets, minus the number of bytes that these tokens stand for.
        targets: mask of the tokens that the loss counts, ``[context + 1]`` bool; None if it counts all.
    """

    tokens: np.ndarray
    first: np.ndarray
    position: RowPosition
    missing: int
    targets: np.ndarray | None


class _Part(NamedTuple):
    """Encoded document in the queue from which the samples of one batch row are cut.

    Attributes:
        document: index of the document in the stream.
        used: number of tokens of the document that earlier samples used.
        encoded: all tokens of the document, including those already used.
    """

    document: int
    used: int
    encoded: EncodedDocument

    @property
    def left(self) -> int:
        """Number of tokens of the document that no sample has used yet."""
        return len(self.encoded.tokens) - self.used


class _Pack:
    """Queue of encoded documents from which the samples of one row are cut.

    Args:
        used: number of tokens of the first document that earlier samples used.
    """

    def __init__(self, used: int) -> None:
        self.skip = used
        self.parts: list[_Part] = []
        self.size = 0

    def add(self, document: int, encoded: EncodedDocument) -> None:
        """Append the tokens of a document to the queue.

        Args:
            document: index of the document in the stream.
            encoded: all tokens of the document.
        """
        skip, self.skip = self.skip, 0  # only the first document after a restart is partly used
        self.parts.append(_Part(document, skip, encoded))
        self.size += len(encoded.tokens) - skip

    def take(self, context: int) -> _Window:
        """Remove and return the next sample of ``context + 1`` tokens.

        The last token of a sample is also the first token of the next one.
        """
        tokens = np.concatenate([part.encoded.tokens[part.used :] for part in self.parts])[: context + 1]
        masks = [part.encoded.targets[part.used :] for part in self.parts if part.encoded.targets is not None]
        first = np.zeros(context + 1, dtype=bool)
        position = missing = 0
        for part in self.parts:
            if position > context:
                break
            if part.used == 0 and part.left:
                first[position] = True
            low = part.used + (position == 0)  # the first token of a sample is not predicted in it
            count = len(part.encoded.tokens)
            high = min(count, part.used + context + 1 - position)
            missing += spread_over(part.encoded.missing, count, low, high, part.encoded.targets)
            position += part.left
        # Drop the documents that are used up; ``context`` tokens are used, not ``context + 1``.
        remaining = context
        while remaining >= self.parts[0].left:
            remaining -= self.parts.pop(0).left
        part = self.parts[0]
        self.parts[0] = part._replace(used=part.used + remaining)
        self.size -= context
        targets = np.concatenate(masks)[: context + 1] if masks else None
        return _Window(tokens, first, RowPosition(part.document, part.used + remaining), missing, targets)


class StreamLoader:
    """Loader of batches that are packed with streamed documents; it can resume from the stream positions in a checkpoint.

    An error in the worker process is reported in one line, with the file and the row.

    Args:
        make: function that takes the positions of all rows of the global batch, and returns the batches that start there.
        batch_size: number of rows in the global batch, which all processes train on together.
        rows: indices of the rows of the global batch that this process packs.
        steps: number of batches in an epoch.
        num_workers: 0 to read and tokenize in the training process; 1 or more to do so in one separate process.
        trainer: Trainer whose number of trained batches determines where the loader continues. The loader cannot determine
            this itself, because batches are loaded ahead. None to start with the first batch.
    """

    def __init__(
        self,
        make: Callable[[Sequence[RowPosition]], PackedRows],
        batch_size: int,
        rows: range,
        steps: int,
        num_workers: int,
        trainer: Trainer | None,
    ) -> None:
        self.make, self.batch_size, self.rows, self.steps = make, batch_size, rows, steps
        self.workers, self.trainer = min(num_workers, 1), trainer
        self.start = [RowPosition(row, 0) for row in range(batch_size)]
        self._iterator: Any = None
        self._yielded = 0
        self._after: OrderedDict[int, list[list[int]]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.steps

    def continues(self, trainer: Trainer | None, batch_size: int) -> bool:
        """Return whether this loader can continue to serve a trainer that has trained on its batches.

        Args:
            trainer: Trainer that asks for batches; None if there is none, so that the loader cannot continue.
            batch_size: number of rows in the global batch, which must not have changed.
        """
        if trainer is None or (trainer, batch_size) != (self.trainer, self.batch_size):
            return False
        return batches_trained(trainer) in self._after

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the batches of the current epoch that training has not used yet.

        They have the entries that :meth:`PackedRows.__iter__` lists, except ``position``.
        """
        return with_short_errors(self._batches())

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        trained, steps = 0, self.steps
        if self.trainer is not None:
            trained, steps = batches_trained(self.trainer), int(self.trainer.num_training_batches)
        # One iterator serves all epochs, because the stream does not end with an epoch. A learning rate finder sets the number
        # of trained batches back.
        if self._iterator is None or (self.trainer is not None and trained != self._yielded):
            positions = list(self.start)
            for row, position in zip(self.rows, self._own_positions(trained), strict=True):
                positions[row] = RowPosition(*position)
            self._iterator = iter(DataLoader(self.make(positions), batch_size=None, num_workers=self.workers))
        for number in range(trained, (trained // steps + 1) * steps):
            batch = next(self._iterator)
            self._yielded = number + 1
            self._after[self._yielded] = batch.pop("position").tolist()
            if len(self._after) > KEPT:
                self._after.popitem(last=False)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the stream position of each row of the global batch, as of the last batch used for training.

        This is a collective operation, so call it on every process.

        Returns:
            A dict whose entry ``rows`` holds two numbers for each row: the index of the next document, and the number of tokens
            of this document that are already used.
        """
        # Batches may be prefetched: look up the position after the trained batch, not after the newest one.
        trained = batches_trained(self.trainer) if self.trainer is not None else 0
        own_positions = self._own_positions(trained)
        if self.trainer is None or self.trainer.world_size == 1:
            return {"rows": own_positions}
        gathered: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(gathered, (process_share(self.trainer)[0], own_positions))
        parts = dict(gathered)  # processes that share sequences have the same rows
        return {"rows": [row for offset in sorted(parts) for row in parts[offset]]}

    def _own_positions(self, trained: int) -> list[list[int]]:
        """Return the positions of this process's rows after ``trained`` batches; the start positions if there were none."""
        return self._after.get(trained, [list(self.start[row]) for row in self.rows])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the stream positions in a checkpoint.

        A loader with a trainer ignores positions that were saved before the run had trained on any batch. The stream then
        starts with its first document, even if the batch size differs from that of the checkpoint.

        Args:
            state: positions that :meth:`state_dict` returned.

        Raises:
            ValueError: if the positions are used, and their number differs from the batch size.
        """
        if self.trainer is None or batches_trained(self.trainer):
            self.start_at(state)

    def start_at(self, state: dict[str, Any]) -> None:
        """Set the position in the stream of documents at which each row of the global batch starts.

        Args:
            state: positions that :meth:`state_dict` returned.

        Raises:
            ValueError: if the number of positions differs from the batch size.
        """
        if len(state["rows"]) != self.batch_size:
            raise ValueError(
                f"the checkpoint was trained with batch_size={len(state['rows'])}, this run has {self.batch_size}: its "
                "rows could not resume with the very next document. Set batch_size back, or start from the weights alone"
            )
        self.start = [RowPosition(*row) for row in state["rows"]]
