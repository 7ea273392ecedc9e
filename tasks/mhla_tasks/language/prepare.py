"""Token shards of text: what ``lightning prepare text`` writes."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lightning_mhla.data.write import array_bytes, check_manifest, fill_shards
from mhla_tasks.language.documents import check_text, encode_documents
from mhla_tasks.language.token_shards import STARTS, TOKENS
from mhla_tasks.language.tokenizer import fingerprint, load_tokenizer

log = logging.getLogger(__name__)

ROWS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def read_documents(sources: Sequence[str], column: str) -> Iterator[str]:
    """Every document of all sources, in order.

    Raises:
        FileNotFoundError: when a source is not there.
        ValueError: when a table has no such column, or a file that is named is not text in UTF-8.
    """
    left_out: list[Path] = []
    for source in sources:
        if source.startswith("hub:"):
            name, config, split = [*source[4:].split(":"), "", ""][:3]
            yield from _rows(source, column, path=name, name=config or None, split=split or "train")
            continue
        for path in _files(Path(source)):
            if path.suffix in ROWS:
                yield from _rows(str(path), column, path=ROWS[path.suffix], data_files=str(path), split="train")
                continue
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                if path == Path(source):
                    raise ValueError(f"{path} is not text in UTF-8 ({error.reason} at byte {error.start})") from error
                left_out.append(path)
    if left_out:
        log.warning("%d files are not text in UTF-8 and were left out: %s ..", len(left_out), left_out[0])


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    if not found:
        raise FileNotFoundError(f"{path} is no file, and no folder that holds files")
    return found


def _rows(source: str, column: str, **options: Any) -> Iterator[str]:
    from datasets import load_dataset

    for row in load_dataset(streaming=True, **options):
        if column not in row:
            raise ValueError(f"{source} has no column {column!r}, only {sorted(row)}; choose one with --column")
        if row[column] is not None:
            yield check_text(row[column], source)


def text_runs(documents: Iterator[str], characters: int) -> Iterator[list[str]]:
    """Documents in groups of about ``characters`` characters, none left out."""
    group: list[str] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document)
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
) -> list[Path]:
    """Write ``target/prefix-00000.tar`` and so on: samples of many documents, ``KEY.tokens.npy`` and ``KEY.starts.npy``.

    Args:
        target: made if missing.
        sources: see :func:`read_documents`.
        tokenizer: at most 2^32 tokens.
        prefix: prefix of the file names.
        column: column of tables.
        run_characters: characters of a sample.
        runs_per_shard: samples in a shard.
        skip: leave out so many documents at the start.
        limit: take so many documents at most.

    Returns:
        Paths of all shards.

    Raises:
        ValueError: when the folder holds shards of this prefix made from something else, or there is no text.
    """
    digest = fingerprint(tokenizer)
    beside = target / "tokenizer"
    if beside.is_dir() and fingerprint(load_tokenizer(beside)) != digest:
        raise ValueError(f"{target} holds shards of another tokenizer (in {beside}); choose another folder")
    options = {"sources": list(sources), "column": column, "skip": skip, "limit": limit}
    sizes = {"run_characters": run_characters, "runs_per_shard": runs_per_shard}
    check_manifest(target / f"{prefix}-manifest.json", {**options, **sizes, "tokenizer": digest})
    if not beside.is_dir():
        aside = target / "tokenizer.part"
        tokenizer.save_pretrained(aside)
        aside.rename(beside)
    dtype = np.uint16 if len(tokenizer) <= 65_536 else np.uint32
    documents = itertools.islice(read_documents(sources, column), skip, None if limit is None else skip + limit)
    runs = text_runs(documents, run_characters)

    def shards() -> Iterator[tuple[Path, int, Iterator[dict[str, Any]]]]:
        for number in itertools.count():
            shard = list(itertools.islice(runs, runs_per_shard))
            if not shard:
                return
            keyed = zip(itertools.count(number * runs_per_shard), shard, strict=False)
            samples = ({"__key__": f"{key:08d}", **_encode(texts, tokenizer, dtype)} for key, texts in keyed)
            yield target / f"{prefix}-{number:05d}.tar", len(shard), samples

    paths = fill_shards(shards(), f"writing runs to {prefix} shards", None)
    if not paths:
        raise ValueError(f"{', '.join(sources)} gave no document")
    return paths


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase, dtype: Any) -> dict[str, bytes]:
    tokens, starts = encode_documents(texts, tokenizer)
    return {TOKENS: array_bytes(tokens.astype(dtype)), STARTS: array_bytes(starts)}
