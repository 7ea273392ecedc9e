"""Reading of documents from files, folders and Hugging Face data sets, with a log of the inputs that are left out."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from lightning_mhla.data.lines import NotTextError, has_surrogates, plain_suffix, read_text
from lightning_mhla.system.listing import shown, visible_files
from mhla_tasks.language.columns import MissingColumnError, Rows, read_column, table_kind
from mhla_tasks.language.dialogues import Dialogue, Document, text_of
from mhla_tasks.language.hub import StreamedDataSet

log = logging.getLogger(__name__)

BINARY = {
    "7z", "a", "avi", "bin", "bmp", "ckpt", "class", "db", "dll", "doc", "docx", "dylib", "eps", "exe", "flac",
    "gguf", "gif", "h5", "ico", "jar", "jpeg", "jpg", "mkv", "mov", "mp3", "mp4", "npy", "npz", "o", "odt", "ogg",
    "onnx", "pdf", "pickle", "pkl", "png", "pptx", "pt", "pth", "pyc", "pyd", "rar", "safetensors", "so", "sqlite",
    "tar", "tgz", "tif", "tiff", "ttf", "wasm", "wav", "webm", "webp", "whl", "woff", "woff2", "xls", "xlsx", "zip",
}  # fmt: skip
"""Suffixes of files that are not documents, even if their bytes are valid UTF-8."""

EXAMPLES = 3
"""Maximum number of inputs that the log names for each reason."""

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which UTF-8 cannot encode."""


class Remarks:
    """Counter of files, table rows and documents that are left out or changed, with a summary in one log line.

    Args:
        at_once: whether the first input of each kind is also logged immediately. An endless stream needs this, because it never
            reaches the point where the summary is logged.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once
        self.left_out: dict[str, list[str]] = {}
        self.changed: dict[str, list[str]] = {}
        self.counts: Counter[str] = Counter()

    def leave_out(self, kind: str, place: str) -> None:
        """Count an input that is left out, and keep the locations of the first three of each kind as examples for the log.

        Args:
            kind: description of such inputs in the plural, for example ``"binary files"``.
            place: path or location of the input.
        """
        self._add(self.left_out, kind, place)

    def change(self, kind: str, place: str) -> None:
        """Count a document that is changed before it is used, and keep the first three locations of each kind for the log.

        Args:
            kind: description of such documents in the plural.
            place: path or location of the document.
        """
        self._add(self.changed, kind, place)

    def _add(self, places: dict[str, list[str]], kind: str, place: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= EXAMPLES:
            places.setdefault(kind, []).append(place)
        if self.at_once and self.counts[kind] == 1:
            verb = "left out" if places is self.left_out else "changed"
            log.warning("%s: the first of the %s that are %s; the next ones are not mentioned", place, kind, verb)

    def __str__(self) -> str:
        """Return one line with the number and some examples of each kind of input that was left out or changed."""
        parts = []
        for title, kinds in (("left out", self.left_out), ("changed", self.changed)):
            counted = (
                f"{self.counts[kind]:,} {kind} ({', '.join(places)}{', ...' if self.counts[kind] > len(places) else ''})"
                for kind, places in kinds.items()
            )
            if kinds:
                parts.append(f"{title}: {', '.join(counted)}")
        return "; ".join(parts)

    def report(self) -> None:
        """Log the counts and examples in one warning, unless nothing was counted."""
        if self.counts:
            log.warning("%s", self)


def read_documents(sources: Sequence[str], column: str) -> Iterator[Document]:
    """Yield the documents of files, folders and data sets in the given order, without empty documents.

    A text file is one document. A table (``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``) has one document in each row;
    rows with a null or an empty text are left out. In a folder, hidden files, binary files, text that is not UTF-8 and tables
    without the column are left out. At the end, one log line gives the number of inputs that were left out for each reason.

    Args:
        sources: paths of files and folders, or data sets on the Hugging Face Hub as ``hub:NAME[:CONFIG[:SPLIT]]``.
        column: name of the table column that holds the texts or dialogues.

    Raises:
        FileNotFoundError: if a file, folder or data set does not exist.
        ValueError: if a table named in ``sources`` lacks the column, a table is broken, a file named in ``sources`` is not
            text, or there are no documents. The message names the source or file and, where possible, the line.
    """
    remarks, empty = Remarks(), True
    try:
        for source in sources:
            for document in _source_documents(source, column, remarks):
                empty = False
                yield document
        if empty:
            raise ValueError(f"{', '.join(sources)}: no document" + (f"; {remarks}" if remarks.counts else ""))
    except MissingColumnError as error:
        raise ValueError(f"{error}; choose one with --column (--data.column in training)") from error
    finally:
        if not empty:
            remarks.report()


def documents_of(rows: Rows, remarks: Remarks) -> Iterator[Document]:
    """Yield the documents of table rows, without nulls and empty texts.

    An unpaired surrogate, which UTF-8 cannot encode, is replaced with U+FFFD.

    Args:
        rows: location and document of each row; the document is None for a null.
        remarks: counter of the rows that are left out or changed.
    """
    for place, document in rows:
        text = "" if document is None else text_of(document)
        if document is None:
            remarks.leave_out("rows with null", place)
        elif not text or text.isspace():
            remarks.leave_out("empty documents", place)
        elif has_surrogates(text):
            remarks.change("documents with half a surrogate pair, which becomes U+FFFD", place)
            yield _without_surrogates(document)
        else:
            yield document


def _without_surrogates(document: Document) -> Document:
    if isinstance(document, Dialogue):
        messages = tuple((role, SURROGATE.sub("\ufffd", content)) for role, content in document.messages)
        return replace(document, messages=messages)
    return SURROGATE.sub("\ufffd", document)


def source_files(path: Path, remarks: Remarks) -> list[Path]:
    """List the files at a path: the file itself, or all visible files in a folder and its subfolders, sorted.

    Args:
        path: path of the file or folder.
        remarks: counter to which hidden files and folders are added.

    Raises:
        FileNotFoundError: if the path does not exist, or the folder has no visible files.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{shown(path)} is neither a file nor a folder")
    hidden: list[Path] = []
    files = visible_files(path, hidden)
    for left_out in hidden:
        remarks.leave_out("hidden or cache files and folders", shown(left_out))
    if not files:
        raise FileNotFoundError(f"{shown(path)} is a folder without visible files")
    return files


def _source_documents(source: str, column: str, remarks: Remarks) -> Iterator[Document]:
    if source.startswith("hub:"):
        name, config, split = [*source[4:].split(":"), "", ""][:3]
        data_set = {"path": name, "name": config or None, "split": split or "train"}
        yield from documents_of(StreamedDataSet(data_set, column).rows(), remarks)
        return
    path = Path(source)
    in_folder = path.is_dir()
    for file in source_files(path, remarks):
        rows = _folder_rows(file, column, remarks) if in_folder else _counted(_rows(file, column), file, remarks)
        yield from documents_of(rows, remarks)


def _rows(path: Path, column: str) -> Rows:
    """Yield the location and the document of each row of a table; a text file that is not a table is a single row."""
    if (kind := table_kind(path)) is None:
        yield shown(path), read_text(path)
    else:
        yield from read_column(path, column, kind)


def _folder_rows(path: Path, column: str, remarks: Remarks) -> Rows:
    """Yield the location and the document of each row of a file in a folder.

    A file that does not hold documents, such as a binary file, yields no rows and is counted in ``remarks``.
    """
    if plain_suffix(path).lstrip(".") in BINARY:
        remarks.leave_out("binary files", shown(path))
        return
    kind, rows = table_kind(path), _rows(path, column)
    try:
        first = list(islice(rows, 1))
    except NotTextError as error:
        # A table that is not text is broken. A .json file, or a file without a table's suffix, may be of any kind.
        if kind not in (None, "json"):
            raise
        remarks.leave_out("binary files" if error.kind == "binary" else "files not in UTF-8", shown(path))
    except MissingColumnError:
        remarks.leave_out(f"tables without a column {column!r}", shown(path))
    except ValueError:
        if kind != "json":
            raise
        remarks.leave_out(".json files that do not hold documents", shown(path))
    else:
        yield from _counted(chain(first, rows), path, remarks)


def _counted(rows: Rows, path: Path, remarks: Remarks) -> Rows:
    """Yield the rows of a file unchanged, and count the file in ``remarks`` if it has no rows."""
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        remarks.leave_out("tables without a row", shown(path))
