"""Row-by-row readers of a column of texts or dialogues in JSON lines, JSON, CSV, TSV, Parquet and plain text files.

The values in other columns may have any type.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from lightning_mhla.data.lines import (
    COMPRESSED,
    LONGEST_ARRAY,
    LONGEST_LINE,
    Source,
    file_name,
    iterate_lines,
    json_lines,
    open_bytes,
    parse_json,
    parse_object,
    plain_suffix,
    read_lines,
    read_text,
)
from lightning_mhla.system.listing import shown
from lightning_mhla.system.untrusted import reason
from mhla_tasks.language.dialogues import Document, as_document

Rows = Iterator[tuple[str, Document | None]]
"""Iterator over the rows of a table: tuples of a row's location, for messages, and its document, which is None for a null."""

ROWS_AT_ONCE = 256
"""Number of Parquet rows that are read at once."""

LONGEST_LIST = 300
"""Maximum number of characters of a list of names in a message."""


class MissingColumnError(ValueError):
    """Error for a table or a row that lacks the requested column; the message lists the existing columns."""


def read_column(source: Source, column: str, kind: str | None = None) -> Rows:
    """Read one column of texts or dialogues of a table lazily, row by row.

    Args:
        source: path or URL of the table.
        column: name of the column that holds the texts or dialogues.
        kind: format of the table, one of those below; None to use the format that the file suffix indicates.

            * ``jsonl`` or ``parquet``.
            * ``csv`` or ``tsv``: the first row holds the names of the columns, and every value is a text.
            * ``json``: an array of objects, a single object, or JSON lines. Each object is a row. An array is loaded at once.
            * ``lines``: plain text in which each line is a row; ``column`` is ignored.

    Returns:
        Iterator over tuples of the location of a row, for error messages, and its document: a string, a ``Dialogue``, or None
        for a null. Blank lines are skipped.

    Raises:
        MissingColumnError: if the table or a row lacks the column.
        OSError: if the file cannot be read.
        ValueError: if ``kind`` is None and the suffix indicates none of these formats, the file is broken, or a value is
            neither text nor a dialogue. The message names the file and, where possible, the line, item or row.
    """
    kind = kind or table_kind(source)
    if kind is None:
        raise ValueError(f"{shown(source)} is not a table ({', '.join(SUFFIXES)})")
    return READERS[kind](source, column)


def table_kind(source: Source) -> str | None:
    """Return the format of a table file according to its suffix, such as ``jsonl``; None if it is not a table.

    A compression suffix is ignored: ``a.jsonl.gz`` is a ``jsonl`` table.
    """
    return SUFFIXES.get(plain_suffix(source))


def _json_lines(source: Source, column: str) -> Rows:
    for number, row in json_lines(source):
        yield _entry(row, column, f"{shown(source)}: line {number}")


def _json(source: Source, column: str) -> Rows:
    lines = read_lines(source, LONGEST_ARRAY)
    number, line = next(lines, (0, ""))
    if not line:
        return
    try:
        value = parse_json(line, f"{shown(source)}: line {number}")
    except ValueError:  # the first line is not complete JSON: one value is spread over several lines
        value, lines = parse_json(read_text(source), shown(source)), iter(())
    if isinstance(value, dict):
        yield _entry(value, column, f"{shown(source)}: line {number}")
        for number, line in lines:
            place = f"{shown(source)}: line {number}"
            yield _entry(parse_object(line, place), column, place)
        return
    if not isinstance(value, list):
        raise ValueError(
            f"{shown(source)} holds {type(value).__name__} {str(value)[:60]!r}; a .json of documents is an array of objects, "
            "one object, or an object on each line"
        )
    for number, line in lines:
        raise ValueError(f"{shown(source)}: line {number} follows an array: {line[:60]!r}; a .json holds one array")
    for number, item in enumerate(value, 1):
        place = f"{shown(source)}: item {number}"
        if not isinstance(item, dict):
            raise ValueError(f"{place} is {type(item).__name__} {str(item)[:60]!r}, not an object with {column!r}")
        yield _entry(item, column, place)


def _entry(row: dict[str, Any], column: str, place: str) -> tuple[str, Document | None]:
    if column not in row:
        raise _missing(column, sorted(row), place)
    return place, as_document(row[column], place)


def _separated(source: Source, column: str, delimiter: str) -> Rows:
    csv.field_size_limit(LONGEST_LINE)  # the default of 128 KiB is less than a long document
    # Quoted fields may span lines, so the reader needs the line ends.
    rows = csv.reader((f"{line}\n" for line in iterate_lines(source)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    line = 1
    while True:
        place = f"{shown(source)}: line {line}"
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(
                f"{place}: {reason(error)}; check the quotes (a quote inside a quoted field is written twice)"
            ) from error
        line = rows.line_num + 1
        if not row:
            continue
        if header is None:
            header = row
            index = _only_index(header, column, place)
        elif len(row) != len(header):
            raise ValueError(
                f"{place} has {len(row)} fields, the header has {len(header)}; put fields with a {delimiter!r} in quotes"
            )
        else:
            yield place, row[index]


def _parquet(source: Source, column: str) -> Rows:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    name = shown(source)
    if PurePosixPath(file_name(source).lower()).suffix in COMPRESSED:
        raise ValueError(
            f"{name}: compressed Parquet is not supported; decompress the file (Parquet compresses itself)"
        )
    number = 0
    with open_bytes(source) as stream:
        try:
            table = ParquetFile(stream)
            index = _only_index(table.schema_arrow.names, column, name)
            _check_type(table.schema_arrow.field(index).type, column, name)
            for batch in table.iter_batches(ROWS_AT_ONCE, columns=[column]):
                for value in batch.column(batch.schema.names.index(column)):
                    number += 1
                    place = f"{name}: row {number}"
                    yield place, as_document(value.as_py(), place)
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}: row {number}: column {column!r} is not UTF-8 ({reason(error)})") from error
        except (pyarrow.ArrowException, OSError) as error:
            # Arrow raises OSError without an errno for a broken file; one with an errno comes from the file system.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(
                f"{name} is not a complete Parquet file ({reason(error)}, after row {number}); download or write it again"
            ) from error


def _check_type(kind: Any, column: str, name: str) -> None:
    import pyarrow

    types = pyarrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    dialogues = (types.is_list(kind) or types.is_large_list(kind)) and types.is_struct(kind.value_type)
    texts = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    if not (texts or dialogues or types.is_null(kind)):
        raise ValueError(f"{name}: column {column!r} is {kind}, not text; choose a different column")


def _lines(source: Source, column: str) -> Rows:
    for number, line in read_lines(source):
        yield f"{shown(source)}: line {number}", line


def _only_index(names: Sequence[str], column: str, place: str) -> int:
    if column not in names:
        raise _missing(column, names, place)
    if names.count(column) > 1:
        raise ValueError(f"{place} has {names.count(column)} columns {column!r}; rename all but one")
    return names.index(column)


def _missing(column: str, names: Iterable[str], place: str) -> MissingColumnError:
    listed = str(list(names))
    return MissingColumnError(
        f"{place} has no column {column!r}, only {listed[:LONGEST_LIST]}{'...' if len(listed) > LONGEST_LIST else ''}"
    )


READERS: dict[str, Callable[[Source, str], Rows]] = {
    "jsonl": _json_lines,
    "json": _json,
    "csv": partial(_separated, delimiter=","),
    "tsv": partial(_separated, delimiter="\t"),
    "parquet": _parquet,
    "lines": _lines,
}

SUFFIXES = {
    ".jsonl": "jsonl",
    ".jsonlines": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
"""Mapping from file suffix to table format."""
