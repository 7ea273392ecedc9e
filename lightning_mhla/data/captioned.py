"""Files with captions, as members of shards or beside each other in a folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from lightning_mhla.data.shards import ShardReader
from lightning_mhla.data.source import BrokenSampleError
from lightning_mhla.system.untrusted import reason

log = logging.getLogger(__name__)

TEXT, JSON = "txt", "json"

METADATA = "metadata.jsonl"
"""File of a folder with a line for each sample: its ``file_name`` and its caption (Hugging Face's imagefolder)."""

LONGEST_CAPTION = 1 << 20
"""Bytes of a caption and what comes with it."""


class CaptionedFiles(Protocol):
    """Files with captions, by index.

    Attributes:
        shard_sizes: samples in each shard.
    """

    shard_sizes: Sequence[int]

    def describe(self, index: int) -> str:
        """Where a sample lies, for messages."""

    def member(self, index: int, wanted: Sequence[str]) -> tuple[str, bytes]:
        """The first of ``wanted`` extensions that a sample has, and its bytes; BrokenSampleError if it has none."""

    def head(self, index: int, wanted: Sequence[str], count: int) -> bytes:
        """The first bytes of the member that :meth:`member` gives."""

    def caption(self, index: int) -> str:
        """The caption of a sample; BrokenSampleError if it has none."""


class ShardFiles:
    """Files with captions in shards: ``KEY.txt``, or an entry of ``KEY.json``.

    Args:
        reader: the shards.
        caption_key: entry of a ``.json`` that is the caption.
    """

    def __init__(self, reader: ShardReader, caption_key: str) -> None:
        self.reader, self.caption_key = reader, caption_key
        self.shard_sizes: Sequence[int] = reader.shard_sizes

    def describe(self, index: int) -> str:
        """Shard and key."""
        return self.reader.describe(index)

    def member(self, index: int, wanted: Sequence[str]) -> tuple[str, bytes]:
        """See :meth:`CaptionedFiles.member`."""
        extension = self.reader.extension(index, wanted)
        return extension, self.reader.read(index, extension)

    def head(self, index: int, wanted: Sequence[str], count: int) -> bytes:
        """See :meth:`CaptionedFiles.head`."""
        return self.reader.read(index, self.reader.extension(index, wanted), count=count)

    def caption(self, index: int) -> str:
        """See :meth:`CaptionedFiles.caption`."""
        extension, data = self.member(index, (TEXT, JSON))
        return parse_caption(data, extension, self.caption_key, self.describe(index))


class FolderFiles:
    """Files below a folder, each with a caption in the folder's ``metadata.jsonl``, or beside it (``.txt`` or ``.json``).

    Args:
        folder: searched with all folders in it.
        extensions: of the samples.
        caption_key: entry of a ``.json``, and of a line of ``metadata.jsonl``, that is the caption.

    Raises:
        FileNotFoundError: when there is no such folder or no sample in it.
        ValueError: when a line of ``metadata.jsonl`` names no file.
    """

    def __init__(self, folder: str | Path, extensions: Sequence[str], caption_key: str) -> None:
        self.folder, self.caption_key = Path(folder), caption_key
        found = list(self.folder.rglob("*")) if self.folder.is_dir() else []
        self.paths = sorted(path for path in found if path.suffix.lower().lstrip(".") in extensions and path.is_file())
        if not self.paths:
            raise FileNotFoundError(f"{folder} is no folder with .{' or .'.join(extensions)} files in it")
        self.shard_sizes: Sequence[int] = [len(self.paths)]
        self._lines = self._read_metadata()
        self._mention_orphans([path for path in found if path.suffix in (f".{TEXT}", f".{JSON}")])

    def describe(self, index: int) -> str:
        """The path."""
        return str(self.paths[index])

    def member(self, index: int, wanted: Sequence[str]) -> tuple[str, bytes]:
        """See :meth:`CaptionedFiles.member`."""
        own = self.paths[index]
        extension = own.suffix.lower().lstrip(".")
        if extension in wanted:
            return extension, own.read_bytes()
        for name in wanted:
            if (path := own.with_suffix(f".{name}")).is_file():
                return name, path.read_bytes()
        raise BrokenSampleError(f"{own} has no .{' or .'.join(wanted)} beside it")

    def head(self, index: int, wanted: Sequence[str], count: int) -> bytes:
        """See :meth:`CaptionedFiles.head`."""
        with self.paths[index].open("rb") as stream:
            return stream.read(count)

    def caption(self, index: int) -> str:
        """See :meth:`CaptionedFiles.caption`."""
        line = self._lines.get(self.paths[index])
        if line is not None:
            return parse_caption(line, JSON, self.caption_key, f"{METADATA}: {self.paths[index].name}")
        extension, data = self.member(index, (TEXT, JSON))
        return parse_caption(data, extension, self.caption_key, self.describe(index))

    def _mention_orphans(self, captions: Sequence[Path]) -> None:
        """Warn of captions that belong to no file."""
        files = {path.with_suffix("") for path in self.paths}
        orphans = sorted(path.name for path in captions if path.with_suffix("") not in files)
        orphans += sorted(path.name for path in set(self._lines) - set(self.paths))
        if orphans:
            log.warning("%s: %d captions without a file beside them, such as %s", self.folder, len(orphans), orphans[0])

    def _read_metadata(self) -> dict[Path, bytes]:
        path = self.folder / METADATA
        if not path.is_file():
            return {}
        lines: dict[Path, bytes] = {}
        for number, line in enumerate(filter(None, path.read_bytes().splitlines()), 1):
            try:
                lines[self.folder / str(json.loads(line)["file_name"])] = line
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(f"{path}: line {number} has no file_name ({reason(error)})") from error
        return lines


def parse_caption(data: bytes, extension: str, key: str, where: str) -> str:
    """The caption in a ``.txt`` or ``.json`` file.

    Raises:
        BrokenSampleError: naming ``where``, if there is none.
    """
    where = f"{where}: .{extension}"
    if len(data) > LONGEST_CAPTION:
        raise BrokenSampleError(f"{where} is no caption: {len(data)} bytes")
    try:
        text = data.decode() if extension == TEXT else json.loads(data)[key]
        if isinstance(text, str):
            text.encode()  # a lone surrogate is no text
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        hint = "" if extension == TEXT else f" under {key!r}; set caption_key"
        raise BrokenSampleError(f"{where} holds no caption{hint} ({reason(error)})") from error
    if not isinstance(text, str) or not text.strip():
        raise BrokenSampleError(f"{where} holds an empty caption")
    return text.strip()
