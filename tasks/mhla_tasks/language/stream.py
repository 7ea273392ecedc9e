"""Documents as they stream in, packed into batches, with a position that a checkpoint can keep.

Row r of the global batch of B rows packs documents r, r + B, r + 2 B, ... of the stream, so that what a batch holds does
not depend on the number of processes, and a row is where it is by two numbers: its next document, and how many of that
document's tokens are used up. Every batch carries them along; the position of a run is that of the last batch it trained.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning import Trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_mhla.data.module import batches_trained, process_share
from mhla_tasks.language.text_bytes import spread

Encode = Callable[[str], np.ndarray]

KEPT = 64
"""Positions that are remembered: of more batches than a trainer and its worker fetch ahead."""


class RowPosition(NamedTuple):
    """Where a row stands: the next document it reads, and the tokens of it that are used up."""

    document: int
    used: int


class PackedRows(IterableDataset):
    """Batches of this process, without end.

    Args:
        documents: a fresh iterator over all documents of an endless stream, the same each time.
        encode: a document's tokens.
        positions: positions of the rows of the global batch, as many as it has rows.
        rows: those of this process.
        context: tokens of a row.
        token_bytes: bytes of each token of the vocabulary.
        separate_documents: whether samples say where documents begin.
        missing: bytes of a document beyond those of its tokens (``text_bytes.MissingBytes``); None where they add up.
    """

    def __init__(
        self,
        documents: Callable[[], Iterator[str]],
        encode: Encode,
        positions: Sequence[RowPosition],
        rows: range,
        context: int,
        token_bytes: np.ndarray,
        separate_documents: bool,
        missing: Callable[[str, np.ndarray], int] | None = None,
    ) -> None:
        self.missing = missing
        self.documents, self.encode, self.positions, self.rows = documents, encode, list(positions), rows
        self.context, self.token_bytes, self.separate_documents = context, token_bytes, separate_documents

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Batches: ``tokens`` ``[b, context + 1]``, ``bytes`` ``[b]``, ``position`` ``[b, 2]`` after them, ``valid``."""
        number = len(self.positions)
        wanted = {row: self.positions[row] for row in self.rows}
        waiting: dict[int, list[tuple[int, str]]] = {row: [] for row in self.rows}
        packs = {row: _Pack(position.used) for row, position in wanted.items()}
        first = min(position.document for position in wanted.values())
        stream = enumerate(self.documents())
        for index, document in stream:
            row = index % number
            if index >= first and row in wanted and index >= wanted[row].document:
                waiting[row].append((index, document))
            while all(self._filled(packs[row], waiting[row]) for row in self.rows):
                yield self._batch([packs[row].take(self.context) for row in self.rows])

    def _filled(self, pack: _Pack, waiting: list[tuple[int, str]]) -> bool:
        """Whether a row has tokens enough, once the documents that wait for it are read as far as needed."""
        while pack.size <= self.context and waiting:
            index, document = waiting.pop(0)
            tokens = self.encode(document)
            pack.add(index, tokens, 0 if self.missing is None else self.missing(document, tokens))
        return pack.size > self.context

    def _batch(self, parts: list[_Window]) -> dict[str, torch.Tensor]:
        tokens = np.stack([part.tokens for part in parts])
        missing = np.array([part.missing for part in parts])
        batch = {
            "tokens": torch.from_numpy(tokens),
            "bytes": torch.from_numpy(self.token_bytes[tokens[:, 1:]].sum(1) + missing),
            "position": torch.tensor([part.position for part in parts]),
            "valid": torch.ones(len(parts), dtype=torch.bool),
        }
        if self.separate_documents:
            batch["starts"] = torch.from_numpy(np.stack([part.first[:-1] for part in parts]))
        return batch


class _Window(NamedTuple):
    """Tokens of a sample, which of them begin a document, where the row stands after them, and their missing bytes."""

    tokens: np.ndarray
    first: np.ndarray
    position: RowPosition
    missing: int


class _Part(NamedTuple):
    """A document of a row: its number, how many of its tokens are used, all of them, and its missing bytes."""

    document: int
    used: int
    tokens: np.ndarray
    missing: int

    @property
    def left(self) -> int:
        """Tokens that are not used."""
        return len(self.tokens) - self.used


class _Pack:
    """Tokens of one row that are read and not used."""

    def __init__(self, used: int) -> None:
        self.skip = used
        self.parts: list[_Part] = []
        self.size = 0

    def add(self, document: int, tokens: np.ndarray, missing: int) -> None:
        """One more document of the row."""
        skip, self.skip = self.skip, 0
        self.parts.append(_Part(document, skip, tokens, missing))
        self.size += len(tokens) - skip

    def take(self, context: int) -> _Window:
        """``context + 1`` tokens, of which the last stays for the next window."""
        tokens = np.concatenate([part.tokens[part.used :] for part in self.parts])[: context + 1]
        first = np.zeros(context + 1, dtype=bool)
        position = missing = 0
        for part in self.parts:
            if position > context:
                break
            if part.used == 0 and part.left:
                first[position] = True
            low = part.used + (position == 0)  # the first token of a window is not predicted in it
            high = min(len(part.tokens), part.used + context + 1 - position)
            before, after = (spread(part.missing, len(part.tokens), at) for at in (low, high))
            missing += after - before
            position += part.left
        left = context
        while left >= self.parts[0].left:
            left -= self.parts.pop(0).left
        part = self.parts[0]
        self.parts[0] = part._replace(used=part.used + left)
        self.size -= context
        return _Window(tokens, first, RowPosition(part.document, part.used + left), missing)


class StreamLoader:
    """Packed batches of a stream that resume where a checkpoint stands.

    Args:
        make: batches from row positions on.
        batch_size: rows of the global batch.
        rows: those of this process.
        steps: batches that are called an epoch.
        num_workers: 0, or 1 to read and tokenise in a process of its own.
        trainer: whose batch count says which batch was the last one trained.
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
        self._after: OrderedDict[int, list[list[int]]] = OrderedDict()

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """The rest of the epoch that the run stands in."""
        trained, steps = 0, self.steps
        if self.trainer is not None:
            trained, steps = batches_trained(self.trainer), int(self.trainer.num_training_batches)
        if self._iterator is None:
            self._iterator = iter(DataLoader(self.make(self.start), batch_size=None, num_workers=self.workers))
        for number in range(trained, (trained // steps + 1) * steps):
            batch = next(self._iterator)
            self._after[number + 1] = batch.pop("position").tolist()
            if len(self._after) > KEPT:
                self._after.popitem(last=False)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Positions of all rows after the last batch that was trained (call it on every process)."""
        trained = batches_trained(self.trainer) if self.trainer is not None else 0
        mine = self._after.get(trained, [list(self.start[row]) for row in self.rows])
        if self.trainer is None or self.trainer.world_size == 1:
            return {"rows": mine}
        everyone: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(everyone, (process_share(self.trainer)[0], mine))
        parts = dict(everyone)  # processes that share sequences have the same rows
        return {"rows": [row for offset in sorted(parts) for row in parts[offset]]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint's positions; before the first batch there are none."""
        if self.trainer is None or batches_trained(self.trainer):
            self.start_at(state)

    def start_at(self, state: dict[str, Any]) -> None:
        """Resume from positions, as :meth:`state_dict` gives them.

        Raises:
            ValueError: for another batch size.
        """
        if len(state["rows"]) != self.batch_size:
            raise ValueError(
                f"the checkpoint was trained with batch_size={len(state['rows'])}, this run has {self.batch_size}: its "
                "rows could not resume with the very next document. Set batch_size back, or start from the weights alone"
            )
        self.start = [RowPosition(*row) for row in state["rows"]]
