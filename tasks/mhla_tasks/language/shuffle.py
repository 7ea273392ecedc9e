"""Shuffling of streamed documents."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from mhla_tasks.language.dialogues import Document


def shuffled(documents: Iterable[Document], size: int, seed: int) -> Iterator[Document]:
    """Iterate over documents in random order, with a shuffle buffer of ``size`` documents.

    Args:
        documents: documents to shuffle. They are read once, at most ``size`` documents ahead.
        size: number of documents in the buffer; 0 keeps the order.
        seed: seed of the random order.
    """
    if not size:
        yield from documents
        return
    generator = random.Random(seed)
    buffer: list[Document] = []
    for document in documents:
        if len(buffer) < size:
            buffer.append(document)
            continue
        index = generator.randrange(size)
        yield buffer[index]
        buffer[index] = document
    generator.shuffle(buffer)
    yield from buffer
