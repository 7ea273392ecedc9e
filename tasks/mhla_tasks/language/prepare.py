"""Conversion of text to token shards, for ``lightning prepare text``."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lightning_mhla.data.origins import Origin, sample_key
from lightning_mhla.data.write import Preparation, array_bytes, check_outside, fill_shards
from lightning_mhla.system.files import rebuilt_folder
from lightning_mhla.system.ranges import check_range
from mhla_tasks.language.corpus import Remarks, read_documents, source_files
from mhla_tasks.language.dialogues import Dialogue, Document, text_of
from mhla_tasks.language.documents import DocumentEncoder, EncodedDocuments, ReplyEncoder
from mhla_tasks.language.targets import UnknownRepliesError, mask_ranges
from mhla_tasks.language.text_bytes import counts_exactly
from mhla_tasks.language.token_shards import MISSING, STARTS, TARGETS, TOKENS
from mhla_tasks.language.tokenizer import fingerprint, load_tokenizer, save_tokenizer, table_size

log = logging.getLogger(__name__)

DIALOGUES = "dialogues.txt"
"""Name of a file that marks a folder of shards with dialogues."""


def text_runs(documents: Iterator[Document], characters: int) -> Iterator[list[Document]]:
    """Group consecutive documents into lists with at least ``characters`` characters each; the last list may have fewer."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(text_of(document))
        if size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group


def write_token_shards(
    target: Path,
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    prefix: str = "train",
    column: str = "text",
    run_characters: int = 4_000_000,
    runs_per_shard: int = 16,
    skip: int = 0,
    limit: int | None = None,
    control_tokens: bool = False,
    force: bool = False,
) -> list[Path]:
    """Tokenize documents, and write the tokens as WebDataset shards ``target/prefix-00000.tar`` and so on.

    Each sample of a shard holds many documents in these members of the tar file, where ``KEY`` is the key of the sample:

    * ``KEY.tokens.npy``: tokens of all documents.
    * ``KEY.starts.npy``: index of the first token of each document.
    * ``KEY.missing.npy``: for each document, the length of its text in bytes minus the number of bytes that its tokens stand
      for. The member is omitted if the difference is always 0.
    * ``KEY.targets.npy``: ranges of the tokens that belong to plain texts or to messages of the assistant, for the option
      ``assistant_only_loss`` of :class:`mhla_tasks.language.TokenShards`. The member is omitted, with a warning, if the chat
      template does not show which text the assistant writes.

    Args:
        target: path of the folder to write to, created if missing.
        sources: paths of files and folders, or data sets on the Hugging Face Hub as ``hub:NAME[:CONFIG[:SPLIT]]``.
        tokenizer: tokenizer whose token indices are below 2^32; for dialogues, with a chat template.
        prefix: prefix of the file names.
        column: name of the table column that holds the texts or dialogues.
        run_characters: minimum number of characters in a sample; the last sample may have fewer.
        runs_per_shard: number of samples in a shard.
        skip: number of documents to leave out at the start.
        limit: maximum number of documents; None for all.
        control_tokens: whether the spelling of a control token in a text, such as ``<|endoftext|>``, becomes that token.
        force: whether to delete the shards of an earlier call first.

    Returns:
        Paths of all shards.

    Raises:
        FileNotFoundError: if a source does not exist.
        ValueError: if there is no text, there are dialogues but no chat template, a number is out of range, ``target`` is
            inside a source, or the folder holds shards with this prefix that were made with different options or from files
            that have changed since.
    """
    check_range(least=1, run_characters=run_characters, runs_per_shard=runs_per_shard, limit=limit)
    check_range(least=0, skip=skip)
    check_outside(target, [Path(source) for source in sources if not source.startswith("hub:")])
    digest = fingerprint(tokenizer)
    options = {"sources": list(sources), "column": column, "skip": skip, "limit": limit, "tokenizer": digest}
    options |= {"run_characters": run_characters, "runs_per_shard": runs_per_shard, "control_tokens": control_tokens}
    dtype = np.uint16 if table_size(tokenizer) <= 65_536 else np.uint32
    with Preparation(target, prefix, options, _origins(sources), force=force):
        _keep_tokenizer(target, tokenizer)
        documents = itertools.islice(read_documents(sources, column), skip, None if limit is None else skip + limit)
        runs = text_runs(documents, run_characters)
        encoder = RunEncoder(tokenizer, control_tokens, dtype, target)

        def shards() -> Iterator[tuple[Path, int, Iterator[dict[str, Any]]]]:
            for number in itertools.count():
                shard = list(itertools.islice(runs, runs_per_shard))
                if not shard:
                    return
                keyed = zip(itertools.count(number * runs_per_shard), shard, strict=False)
                samples = ({"__key__": sample_key(key), **encoder.members(group)} for key, group in keyed)
                yield target / f"{prefix}-{number:05d}.tar", len(shard), samples

        paths = fill_shards(shards(), f"writing {prefix} shards", None)
    if not paths:
        raise ValueError(f"{', '.join(sources)} have no documents")
    return paths


def _origins(sources: Sequence[str]) -> list[Origin]:
    """Return an origin for each input file and data set, by which a repeated ``lightning prepare text`` detects changes."""
    named_files: list[tuple[str, tuple[Path, ...]]] = []
    for source in sources:
        paths = [] if source.startswith("hub:") else source_files(Path(source), Remarks())
        named_files += [(str(path), (path,)) for path in paths] or [(source, ())]
    occurrences = Counter[str]()  # a source may be named twice
    origins = []
    for name, files in named_files:
        occurrences[name] += 1
        origins.append(Origin(f"{name} ({occurrences[name]})" if occurrences[name] > 1 else name, files))
    return origins


def _keep_tokenizer(target: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save the tokenizer in the subfolder ``tokenizer`` of the folder of the shards, unless it is there already.

    A new chat template replaces the template of the saved tokenizer, unless there are shards of dialogues. If the subfolder
    holds a different tokenizer and there are no shards yet, the subfolder is first renamed to ``tokenizer-1``, or to the next
    number that is not used.

    Args:
        target: folder of the shards.
        tokenizer: tokenizer to save.

    Raises:
        ValueError: if ``target`` already contains shards, and its subfolder contains a different tokenizer; or if the shards
            contain dialogues, and the tokenizer has a different chat template.
    """
    beside = target / "tokenizer"
    saved = load_tokenizer(beside) if beside.is_dir() else None
    has_shards = any(target.glob("*.tar"))
    template = tokenizer.chat_template
    has_new_template = template is not None and (saved is None or template != saved.chat_template)
    if has_shards and has_new_template and (target / DIALOGUES).exists():
        raise ValueError(f"{target} holds dialogues of a different chat template; choose a different folder")
    if saved is not None and fingerprint(saved) != fingerprint(tokenizer):
        if has_shards:
            raise ValueError(f"{target} holds shards of a different tokenizer (in {beside}); choose a different folder")
        numbered = (target / f"tokenizer-{number}" for number in itertools.count(1))
        beside.rename(next(name for name in numbered if not name.exists()))  # never delete a folder of the user
    if not beside.is_dir() or has_new_template:
        with rebuilt_folder(beside) as aside:
            save_tokenizer(tokenizer, aside)


class RunEncoder:
    """Encoder that turns groups of documents into the samples of token shards.

    Args:
        tokenizer: tokenizer of the documents, as for :class:`mhla_tasks.language.documents.DocumentEncoder`.
        control_tokens: whether the spelling of a control token in a text becomes that token.
        dtype: NumPy dtype of the stored tokens.
        target: folder of the shards. A file in it notes whether they hold dialogues.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control_tokens: bool, dtype: Any, target: Path) -> None:
        self.dtype, self.target = dtype, target
        self.writes_missing = not counts_exactly(tokenizer)
        self.has_warned = False
        self._tokenizer, self._control_tokens = tokenizer, control_tokens
        self._reply_encoder = ReplyEncoder(tokenizer, control_tokens)

    def members(self, documents: list[Document]) -> dict[str, bytes]:
        """Encode documents as a sample, and return the contents of its shard members, by suffix such as ``tokens.npy``.

        If there is a dialogue among the documents, a file in the folder of the shards notes this. The first time that the chat
        template does not show which text the assistant writes, a warning is logged.
        """
        tokens, starts, missing, targets = self._encode(documents)
        if any(isinstance(document, Dialogue) for document in documents):
            note = "The shards hold dialogues, made with the chat template in tokenizer/.\n"
            (self.target / DIALOGUES).write_text(note)
        members = {TOKENS: array_bytes(tokens.astype(self.dtype)), STARTS: array_bytes(starts)}
        if missing.any() or self.writes_missing:
            members[MISSING] = array_bytes(missing)
        if targets is not None:
            members[TARGETS] = array_bytes(mask_ranges(targets))
        return members

    def _encode(self, documents: list[Document]) -> EncodedDocuments:
        """Encode documents, without ``targets`` if the chat template does not show which text the assistant writes."""
        try:
            return self._reply_encoder(documents)
        except UnknownRepliesError as error:
            if not self.has_warned:
                log.warning("the shards do not support assistant_only_loss: %s", error)
            self.has_warned = True
            return self._encoder(documents)

    @cached_property
    def _encoder(self) -> DocumentEncoder:
        return DocumentEncoder(self._tokenizer, self._control_tokens)
