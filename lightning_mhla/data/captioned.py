"""Readers of files, such as images or video clips, in shards or in a folder, with captions or without."""

# Longer than other modules because the rules for captions are the same in folders and in shards.

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from lightning_mhla.data.lines import NotTextError, decode_text, has_surrogates, json_lines, parse_json, text_entry
from lightning_mhla.data.origins import Origin
from lightning_mhla.data.shards import ShardReader
from lightning_mhla.data.source import BrokenSampleError, read_sample
from lightning_mhla.system.listing import shown, visible_files, with_extension
from lightning_mhla.system.numbers import plural

log = logging.getLogger(__name__)

TEXT, JSON = "txt", "json"

METADATA = "metadata.jsonl"
"""Name of a folder's caption file: each line is an object with ``file_name`` and the caption (Hugging Face's imagefolder)."""

LONGEST_CAPTION = 1 << 20
"""Maximum size in bytes of the file that contains a sample's captions."""

MOST_CAPTIONS = 32
"""Maximum number of captions of a sample."""


class SampleFiles:
    """Base class of readers that return files, such as images or video clips, by sample index.

    Attributes:
        shard_sizes: number of samples in each shard; a folder counts as one shard.
    """

    shard_sizes: Sequence[int]

    def describe(self, index: int) -> str:
        """Return a short description of a sample's location, for log and error messages."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Return the name of a sample within its folder or shards. The name stays the same if the data is moved."""
        raise NotImplementedError

    def member(self, index: int, extensions: Sequence[str]) -> tuple[str, bytes]:
        """Read one file of a sample, chosen by its extension.

        Args:
            index: index of the sample.
            extensions: extensions to look for, without the dot, in order of preference.

        Returns:
            Extension and content of the file.

        Raises:
            BrokenSampleError: if the sample has no file with one of these extensions.
        """
        raise NotImplementedError

    def head(self, index: int, extensions: Sequence[str], count: int) -> bytes:
        """Read the first bytes of a sample's file, for example to decode only the header of an image.

        Args:
            index: index of the sample.
            extensions: extensions to look for, without the dot, in order of preference; ignored for a sample in a folder, which
                is a single file.
            count: maximum number of bytes to read.

        Raises:
            BrokenSampleError: if the sample is in a shard and has no file with one of these extensions.
        """
        raise NotImplementedError


class CaptionedFiles(SampleFiles):
    """Base class of readers that return captioned files, such as images or video clips, by sample index.

    Each sample has one or more captions, which are stored outside of its file. Subclasses read samples from shards or from a
    folder.
    """

    def captions(self, index: int) -> list[str]:
        """Return all captions of a sample, at least one.

        Raises:
            BrokenSampleError: if the sample has no caption, or a caption is not valid.
        """
        raise NotImplementedError

    def caption(self, index: int) -> str:
        """Return one caption of a sample. If the sample has several, torch's global random generator chooses one.

        Raises:
            BrokenSampleError: if the sample has no caption, or a caption is not valid.
        """
        captions = self.captions(index)
        return captions[0] if len(captions) == 1 else captions[int(torch.randint(len(captions), ()))]


class ShardFiles(CaptionedFiles):
    """Reader of captioned files in WebDataset shards, with captions in ``KEY.txt`` or ``KEY.json`` for the sample ``KEY``.

    Args:
        reader: reader of the shards.
        caption_key: JSON key of the caption, or of the list of captions, in a ``.json`` file.
    """

    def __init__(self, reader: ShardReader, caption_key: str) -> None:
        self.reader, self.caption_key = reader, caption_key
        self.shard_sizes: Sequence[int] = reader.shard_sizes

    @override
    def describe(self, index: int) -> str:
        return self.reader.describe(index)

    @override
    def name(self, index: int) -> str:
        return self.reader.name(index)

    @override
    def member(self, index: int, extensions: Sequence[str]) -> tuple[str, bytes]:
        extension = self.reader.extension(index, extensions)
        return extension, self.reader.read(index, extension)

    @override
    def head(self, index: int, extensions: Sequence[str], count: int) -> bytes:
        return self.reader.read(index, self.reader.extension(index, extensions), count=count)

    @override
    def captions(self, index: int) -> list[str]:
        extension, data = self.member(index, (TEXT, JSON))
        return parse_captions(data, extension, self.caption_key, self.describe(index))


class UncaptionedFiles(SampleFiles):
    """Reader of files in a folder and its subfolders. Captions in the folder are neither read nor checked.

    Args:
        folder: folder to search. Hidden files are ignored, and symbolic links are followed.
        extensions: extensions of the files, without the dot.

    Raises:
        FileNotFoundError: if the folder does not exist, or contains no file with one of the extensions.
    """

    def __init__(self, folder: str | Path, extensions: Sequence[str]) -> None:
        self.folder = Path(folder)
        files = visible_files(self.folder) if self.folder.is_dir() else []
        self.paths = with_extension(files, extensions)
        if not self.paths:
            raise FileNotFoundError(f"{folder} is not a folder with .{' or .'.join(extensions)} files in it")
        self.shard_sizes: Sequence[int] = [len(self.paths)]
        self._caption_paths = with_extension(files, (TEXT, JSON))
        if others := sorted(set(files) - {*self.paths, *self._caption_paths, self.folder / METADATA}):
            log.warning(
                "%s: %s left out, such as %s: neither .%s nor captions",
                folder, plural(len(others), "file"), shown(others[0]), ", .".join(extensions),
            )  # fmt: skip

    @override
    def describe(self, index: int) -> str:
        return shown(self.paths[index])

    @override
    def name(self, index: int) -> str:
        return shown(self.paths[index].relative_to(self.folder))

    @override
    def member(self, index: int, extensions: Sequence[str]) -> tuple[str, bytes]:
        path = self.paths[index]
        extension = path.suffix.lower().lstrip(".")
        if extension not in extensions:
            raise BrokenSampleError(f"{shown(path)} is not a .{' or .'.join(extensions)} file")
        return extension, read_sample(path)

    @override
    def head(self, index: int, extensions: Sequence[str], count: int) -> bytes:
        with self.paths[index].open("rb") as stream:
            return stream.read(count)


class FolderFiles(UncaptionedFiles, CaptionedFiles):
    """Reader of captioned files in a folder and its subfolders.

    Captions are read from ``metadata.jsonl`` in the folder. A file that is not listed there has its captions in a ``.txt`` or
    ``.json`` file with the same name beside it.

    Args:
        folder: folder to search. Hidden files are ignored, and symbolic links are followed.
        extensions: extensions of the captioned files, without the dot.
        caption_key: JSON key of the caption, or of the list of captions, in a ``.json`` file or a line of ``metadata.jsonl``.

    Raises:
        FileNotFoundError: if the folder does not exist, or contains no file with one of the extensions.
        ValueError: if a line of ``metadata.jsonl`` has no ``file_name``, or the folder has a ``metadata.csv`` or
            ``metadata.parquet`` but no ``metadata.jsonl``.
    """

    def __init__(self, folder: str | Path, extensions: Sequence[str], caption_key: str) -> None:
        super().__init__(folder, extensions)
        self.caption_key = caption_key
        self._lines = self._read_metadata()
        # keyed by the extension in lower case, as for the images; 1.txt comes after 1.TXT in the list and replaces it
        self._captions = {(path.with_suffix(""), path.suffix.lower().lstrip(".")): path for path in self._caption_paths}
        self._mention_orphans()

    @override
    def member(self, index: int, extensions: Sequence[str]) -> tuple[str, bytes]:
        path = self.paths[index]
        if path.suffix.lower().lstrip(".") in extensions:
            return super().member(index, extensions)
        beside = self._beside(index, extensions)
        if beside is None:
            raise BrokenSampleError(f"{shown(path)} has no .{' or .'.join(extensions)} beside it")
        return beside.suffix.lower().lstrip("."), read_sample(beside)

    def _beside(self, index: int, extensions: Sequence[str]) -> Path | None:
        """Find the first caption file with the sample's name and one of the ``extensions``; None if there is none."""
        stem = self.paths[index].with_suffix("")
        return next((self._captions[stem, name] for name in extensions if (stem, name) in self._captions), None)

    @override
    def captions(self, index: int) -> list[str]:
        lines = self._lines.get(self.paths[index])
        if lines is not None:
            where = f"{self.folder / METADATA}: {shown(self.paths[index].name)}"
            return _checked([text for line in lines for text in _listed(line, self.caption_key, where)], where)
        extension, data = self.member(index, (TEXT, JSON))
        return parse_captions(data, extension, self.caption_key, self.describe(index))

    def origins(self) -> list[Origin]:
        """List the inputs of each sample: the files it is read from, and its captions if they come from ``metadata.jsonl``.

        Commands that convert the folder to shards save this list, so that a resumed conversion detects changed inputs.
        """
        result = []
        for index, path in enumerate(self.paths):
            lines = self._lines.get(path)
            beside = self._beside(index, (TEXT, JSON)) if lines is None else None
            files = (path,) if beside is None else (path, beside)
            note = "" if lines is None else json.dumps([line.get(self.caption_key) for line in lines])
            result.append(Origin(str(path.relative_to(self.folder)), files, note))
        return result

    def _mention_orphans(self) -> None:
        """Warn about captions of missing images or videos, and about ``.txt`` files that ``metadata.jsonl`` overrides."""
        captions = self._caption_paths
        stems = {path.with_suffix("") for path in self.paths}
        orphans = sorted(path.name for path in captions if path.with_suffix("") not in stems)
        orphans += sorted(path.name for path in set(self._lines) - set(self.paths))
        if orphans:
            log.warning(
                "%s: %s without a file of the same name, such as %s",
                self.folder, plural(len(orphans), "caption"), shown(orphans[0]),
            )  # fmt: skip
        listed = {path.with_suffix("") for path in self._lines}
        if twice := [path for path in captions if path.with_suffix("") in listed and path.suffix.lower() == f".{TEXT}"]:
            log.warning(
                "%s: %s left out, such as %s, since %s has captions of the same files",
                self.folder, plural(len(twice), "caption"), shown(twice[0].name), METADATA,
            )  # fmt: skip

    def _read_metadata(self) -> dict[Path, list[Mapping[str, Any]]]:
        path = self.folder / METADATA
        if not path.is_file():
            if other := [name for name in ("metadata.csv", "metadata.parquet") if (self.folder / name).is_file()]:
                raise ValueError(
                    f"{self.folder / other[0]} is not read; write its rows to {METADATA}, one JSON object per line"
                )
            return {}
        lines: dict[Path, list[Mapping[str, Any]]] = {}
        for number, line in json_lines(path):
            name = text_entry(line, "file_name", f"{path}: line {number}")
            lines.setdefault(self.folder / name, []).append(line)
        return lines


def parse_captions(data: bytes, extension: str, key: str, where: str) -> list[str]:
    """Parse the captions of a sample from the content of a ``.txt`` or ``.json`` file.

    Args:
        data: content of the file.
        extension: ``"txt"`` or ``"json"``.
        key: JSON key of the caption, or of the list of captions, in a ``.json`` file.
        where: location of the sample, for error messages.

    Returns:
        List of at least one caption, without leading and trailing white space.

    Raises:
        BrokenSampleError: if the file is larger than 1 MiB, is not text or JSON, contains no caption or more than 32, or if a
            caption is empty or is not a string.
    """
    where = f"{where}: .{extension}"
    if len(data) > LONGEST_CAPTION:
        raise BrokenSampleError(f"{where} is not a caption: {len(data)} bytes")
    try:
        text = decode_text(data, where)
        content: Any = text if extension == TEXT else parse_json(text, where)
    except ValueError as error:
        raise BrokenSampleError(str(error)) from error
    return _checked([content] if extension == TEXT else _listed(content, key, where), where)


def caption_members(captions: Sequence[str]) -> dict[str, bytes]:
    """Encode the captions of a sample as the content of a ``.txt`` file (one caption) or a ``.json`` file (several).

    A single caption that a reader of text files would reject or change, such as one with a zero byte, is also encoded as JSON.

    Returns:
        Dict with one entry: the file's extension, ``"txt"`` or ``"json"``, and its content.
    """
    if len(captions) == 1 and _is_plain(captions[0].encode()):
        return {TEXT: captions[0].encode()}
    return {JSON: json.dumps(list(captions)).encode()}


def _is_plain(data: bytes) -> bool:
    """Return whether a reader of text files would accept the UTF-8 content of a file and return it unchanged."""
    try:
        return decode_text(data, "a caption").encode() == data
    except NotTextError:
        return False


def _listed(content: Any, key: str, where: str) -> list[Any]:
    """Extract a list of captions from a parsed JSON value.

    Args:
        content: list of captions, or JSON object with a caption or a list of captions under ``key``.
        key: key of the captions if ``content`` is an object.
        where: location of the sample, for error messages.

    Raises:
        BrokenSampleError: if ``content`` is neither a list nor an object with a value under ``key``.
    """
    captions = content.get(key) if isinstance(content, dict) else content if isinstance(content, list) else None
    if captions is None:
        raise BrokenSampleError(f"{where} holds no caption under {key!r}; set caption_key")
    return captions if isinstance(captions, list) else [captions]


def _checked(captions: Sequence[Any], where: str) -> list[str]:
    if len(captions) > MOST_CAPTIONS:
        raise BrokenSampleError(f"{where} holds {len(captions)} captions, at most {MOST_CAPTIONS} are read")
    for text in captions:
        if not isinstance(text, str) or has_surrogates(text):
            raise BrokenSampleError(f"{where} holds a caption that is not text: {str(text)[:40]!a}")
        if not text.strip():
            raise BrokenSampleError(f"{where} holds an empty caption")
    if not captions:
        raise BrokenSampleError(f"{where} holds an empty caption")
    return [text.strip() for text in captions]
