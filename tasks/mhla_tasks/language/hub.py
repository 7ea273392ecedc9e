"""Streaming of rows from local files, URLs and data sets on the Hugging Face Hub.

For a data set on the Hub, the library ``datasets`` lists the files, which are then read like local files if their format allows
this. The readers of ``datasets`` are used only for other formats, because they infer the columns from the first rows, and fail
if a column changes later, even if this column is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from glob import glob, has_magic
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from lightning_mhla.data.lines import file_name
from lightning_mhla.system.listing import shown
from lightning_mhla.system.untrusted import reason
from mhla_tasks.language.columns import MissingColumnError, Rows, read_column, table_kind
from mhla_tasks.language.dialogues import as_document

KINDS = {"json": "json", "parquet": "parquet", "csv": "csv", "text": "lines"}
"""File formats that can be used in place of a data set's name, and their kinds in :func:`read_column`."""

ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar", ".lz4")
"""Suffixes of files that ``datasets`` unpacks."""

Files = list[tuple[str, str]]
"""List of files, each a tuple of its path or URL and its format, as in the argument ``kind`` of :func:`read_column`."""


class StreamedDataSet:
    """Text data set on the Hugging Face Hub or in files, whose rows are streamed instead of stored.

    Args:
        data_set: arguments of ``datasets.load_dataset``; those that are None are left out:

            * ``path``: name on the Hugging Face Hub; or, with ``data_files``, the format ``json``, ``csv``, ``parquet`` or
              ``text``.
            * ``name``: name of the data set's configuration.
            * ``split``: name of the split to read.
            * ``data_files``: files, glob patterns or URLs.
        column: name of the column that holds the texts or dialogues.

    Raises:
        FileNotFoundError: if the data set or a file does not exist.
        ValueError: if the data set has no such split.
    """

    def __init__(self, data_set: Mapping[str, Any], column: str) -> None:
        self.data_set = {name: value for name, value in data_set.items() if value is not None}
        self.column = column
        local = data_set["path"] in KINDS and data_set.get("data_files")
        self.files = local_files(self.data_set) if local else _hub_files(self.data_set)

    def rows(self) -> Rows:
        """Yield the location and the document of each row, starting at the first row; the document is None for a null.

        Raises:
            OSError: if a file or the network fails.
            ValueError: if a row is broken or lacks the column; the message names the file and the row.
        """
        if self.files is None:
            return _streamed_rows(self.data_set, self.column)
        return chain.from_iterable(_file_rows(file, self.column, kind) for file, kind in self.files)


def local_files(data_set: Mapping[str, Any]) -> Files:
    """List the files that a data set's ``data_files`` entry names, with the matches of glob patterns in alphabetical order.

    Args:
        data_set: dict with ``path`` (the format ``json``, ``csv``, ``parquet`` or ``text``), ``data_files`` (a path, URL or
            glob pattern, or a list of these) and optionally ``split``, which must be ``"train"`` or None.

    Returns:
        For each file, a tuple of its path or URL and its format, which :func:`read_column` takes as ``kind``.

    Raises:
        FileNotFoundError: if a file does not exist or a pattern has no match.
        ValueError: if ``split`` is neither ``"train"`` nor None.
    """
    data_files, split = data_set["data_files"], data_set.get("split")
    if split not in (None, "train"):
        raise ValueError(
            f"split={split}: local files have only the split train; name the files of {split} in data_files"
        )
    files: Files = []
    for pattern in [data_files] if isinstance(data_files, str) else data_files:
        plain = "://" in pattern or Path(pattern).is_file()
        matches = glob(pattern, recursive=True) if has_magic(pattern) else []
        names = [pattern] if plain else sorted(name for name in matches if not Path(name).is_dir())
        if not names:
            raise FileNotFoundError(
                f"the data set could not be loaded: {shown(pattern)} is not a file; check data_files"
            )
        files += [(name, _kind(data_set["path"], name)) for name in names]
    return files


def _kind(name: str, file: str) -> str:
    """Return the format of a table file for the argument ``kind`` of :func:`read_column`.

    Args:
        name: format according to the library ``datasets``: ``json``, ``csv``, ``parquet`` or ``text``.
        file: path or URL of the file. Its suffix distinguishes JSON lines from JSON, and TSV from CSV.
    """
    by_suffix = table_kind(file)
    return by_suffix if by_suffix and (name, by_suffix) in {("json", "jsonl"), ("csv", "tsv")} else KINDS[name]


def _file_rows(file: str, column: str, kind: str) -> Rows:
    try:
        yield from read_column(file, column, kind)
    except (OSError, ValueError):
        raise
    except Exception as error:  # every file system behind a URL raises its own types of errors
        if "://" not in file:
            raise
        raise OSError(
            f"{file} could not be read ({type(error).__name__}: {reason(error)}); check the network"
        ) from error


def _hub_files(data_set: Mapping[str, Any]) -> Files | None:
    """List the URL and the format of each file of a data set on the Hugging Face Hub.

    Args:
        data_set: arguments of ``datasets.load_dataset``, such as ``path``.

    Returns:
        A list of tuples of URL and format; None if only the library ``datasets`` can read the data set.

    Raises:
        FileNotFoundError: if the data set cannot be loaded.
        ValueError: if the data set does not have the split.
    """
    from datasets import load_dataset_builder

    split = data_set.get("split") or "train"
    arguments = {key: value for key, value in data_set.items() if key != "split"}
    try:
        builder = load_dataset_builder(**arguments)
    except Exception as error:
        raise _not_loaded(data_set, error) from error
    format_name, config = type(builder).__module__.rpartition(".")[2], builder.config
    if format_name not in KINDS or not config.data_files:
        return None
    # Options of the data set that change how its files are parsed need the readers of ``datasets``.
    if getattr(config, "field", None) or getattr(config, "sep", ",") != ",":
        return None
    if split not in config.data_files:
        raise ValueError(
            f"the data set {data_set['path']} has no split {split!r}, only {sorted(map(str, config.data_files))}"
        )
    files = [str(file) for file in config.data_files[split]]
    if any(PurePosixPath(file_name(file).lower()).suffix in ARCHIVES for file in files):
        return None
    return [(file, _kind(format_name, file)) for file in files]


def _streamed_rows(data_set: Mapping[str, Any], column: str) -> Rows:
    """Yield the location and the document of each row of a data set, with the reader of the library ``datasets``.

    Args:
        data_set: arguments of ``datasets.load_dataset``, such as ``path``.
        column: name of the column that holds the texts or dialogues.

    Raises:
        FileNotFoundError: if the data set cannot be loaded.
        OSError: if a file or the network fails.
        ValueError: if a row is broken or lacks the column.
    """
    from datasets import load_dataset

    name, number = f"the data set {data_set['path']}", 0
    try:
        rows = load_dataset(**data_set, streaming=True)
    except Exception as error:
        raise _not_loaded(data_set, error) from error
    rows = iter(rows)
    while True:
        number += 1
        place = f"{name}: row {number}"
        try:
            row = next(rows)
        except StopIteration:
            return
        except OSError:
            raise
        except Exception as error:  # the library of each format raises its own types of errors
            raise ValueError(f"{place} could not be read ({type(error).__name__}: {reason(error)})") from error
        if column not in row:
            raise MissingColumnError(f"{place} has no column {column!r}, only {sorted(row)}")
        yield place, as_document(row[column], place)


def _not_loaded(data_set: Mapping[str, Any], error: Exception) -> FileNotFoundError:
    return FileNotFoundError(
        f"the data set {data_set} could not be loaded ({type(error).__name__}: {reason(error)}); check its name and the "
        "network, or give local files: path: json and data_files"
    )
