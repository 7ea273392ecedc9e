"""Columns of tables row by row: the place of each row, its text, and errors that name both."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mhla_tasks.language.columns import MissingColumnError, read_column, table_kind

from lightning_mhla.data.lines import plain_suffix

CONTENTS: dict[str, tuple[str, list[tuple[str, str | None]]]] = {
    "a.jsonl": ('{"text": "one"}\n\n{"id": 1, "text": null}\n{"text": ""}\n',
                [("line 1", "one"), ("line 3", None), ("line 4", "")]),
    "b.json": ('{"text": "one"}\n\n{"text": null}\n', [("line 1", "one"), ("line 3", None)]),
    "c.json": ('[{"text": "one"},\n {"text": null},\n {"text": "three"}]',
               [("item 1", "one"), ("item 2", None), ("item 3", "three")]),
    "d.json": ('{"id": 1,\n "text": "one"}\n', [("line 1", "one")]),
    "empty.json": ("", []),
    "none.json": ("[]", []),
    "e.csv": ('id,text\n1,"one\ntwo"\n\n2,three\n', [("line 2", "one\ntwo"), ("line 5", "three")]),
    "later.csv": ("\n\ntext\none\n", [("line 4", "one")]),
    "empty.csv": ("", []),
    "f.tsv": ("text\tid\none, two\t1\n", [("line 2", "one, two")]),
}  # fmt: skip


def rows(path: Path, column: str = "text", kind: str | None = None) -> list[tuple[str, str | None]]:
    """Places without the path, which every one begins with, and texts."""
    found = list(read_column(path, column, kind))
    assert all(place.startswith(f"{path}: ") for place, _ in found)
    return [(place.removeprefix(f"{path}: "), text) for place, text in found]


@pytest.mark.parametrize("name", CONTENTS)
def test_every_row_has_its_place_and_its_text(name: str, tmp_path: Path) -> None:
    content, wanted = CONTENTS[name]
    (tmp_path / name).write_text(content)
    assert rows(tmp_path / name) == wanted
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(content.encode()))
    assert rows(packed) == wanted


@pytest.mark.parametrize(
    ("name", "suffix", "kind"),
    [
        ("a.jsonl", ".jsonl", "jsonl"), ("a.JSONLines", ".jsonlines", "jsonl"), ("a.ndjson.gz", ".ndjson", "jsonl"),
        ("a.b.json.zst", ".json", "json"), ("a.csv.bz2", ".csv", "csv"), ("a.tsv.xz", ".tsv", "tsv"),
        ("a.parquet", ".parquet", "parquet"), ("a.txt", ".txt", None), ("a.gz", "", None), ("a", "", None),
        ("https://host/a.jsonl.gz?download=true", ".jsonl", "jsonl"),
    ],
)  # fmt: skip
def test_the_suffix_says_the_kind(name: str, suffix: str, kind: str | None) -> None:
    assert plain_suffix(name) == suffix
    assert table_kind(name) == kind


def test_a_kind_that_is_given_replaces_that_of_the_suffix(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text\none\n")
    assert rows(tmp_path / "a.txt", kind="csv") == [("line 2", "one")]
    assert rows(tmp_path / "a.txt", kind="lines") == [("line 1", "text"), ("line 2", "one")]
    (tmp_path / "b.csv").write_text('{"text": "one"}\n')
    assert rows(tmp_path / "b.csv", kind="jsonl") == [("line 1", "one")]
    with pytest.raises(ValueError, match=r"a\.txt is not a table \(\.jsonl, .*\.parquet\)"):
        read_column(tmp_path / "a.txt", "text")


@pytest.mark.parametrize(
    ("name", "content", "read", "message"),
    [
        ("a.jsonl", '{"text": "one"}\n{"id": 1, "body": 2}\n', 1, "line 2 has no column 'text', only ['body', 'id']"),
        ("a.json", '[{"text": "one"}, {"id": 1}]', 1, "item 2 has no column 'text', only ['id']"),
        ("a.csv", "id,body\n1,2\n", 0, "line 1 has no column 'text', only ['id', 'body']"),
    ],
)
def test_a_column_that_is_missing(name: str, content: str, read: int, message: str, tmp_path: Path) -> None:
    """The rows before it are read."""
    path = tmp_path / name
    path.write_text(content)
    found: list[Any] = []
    with pytest.raises(MissingColumnError) as error:
        found.extend(iter(read_column(path, "text")))
    assert str(error.value) == f"{path}: {message}"
    stream = read_column(path, "text")
    assert len([next(stream) for _ in range(read)]) == read


@pytest.mark.parametrize(("length", "listed"), [(300, True), (301, False)])
def test_a_long_list_of_columns_is_cut(length: int, listed: bool, tmp_path: Path) -> None:
    name = "x" * (length - 4)  # two brackets and two quotes
    (tmp_path / "a.jsonl").write_text(json.dumps({name: 1}))
    with pytest.raises(MissingColumnError) as error:
        rows(tmp_path / "a.jsonl")
    said = str(error.value).partition("only ")[2]
    assert said == (str([name]) if listed else str([name])[:300] + "...")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": ["one"]}', "line 1: "),
        ("a.json", '"one"', " holds str 'one'; a .json of documents is an array of objects, one object, or"),
        ("a.json", "3", " holds int '3'"),
        ("a.json", '[{"text": "one"}]\n{"text": "two"}', "line 2 follows an array: '{\"text\": \"two\"}'; a .json holds one"),
        ("a.json", '[{"text": "one"}, 3]', "item 2 is int '3', not an object with 'text'"),
        ("a.json", '{"text": "one"}\n[]', "line 2"),
        ("a.csv", 'text\n"one"two\n', "line 2: "),
        ("a.csv", 'text\none\n"two\n', "line 3: "),
        ("a.csv", "text,id\none,1\ntwo\n", "line 3 has 1 fields, the header has 2; put fields with a ',' in quotes"),
        ("a.tsv", "text\tid\none\t1\t2\n", "line 2 has 3 fields, the header has 2; put fields with a '\\t' in quotes"),
        ("a.csv", "text,id,text\na,1,b\n", "line 1 has 2 columns 'text'; rename all but one"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_read(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError) as error:  # noqa: PT011  compared below
        rows(tmp_path / name)
    assert str(error.value).startswith(str(tmp_path / name))
    assert message in str(error.value)
    assert not isinstance(error.value, MissingColumnError)


def test_a_field_may_be_longer_than_pythons_limit(tmp_path: Path) -> None:
    limit = csv.field_size_limit(1000)
    try:
        (tmp_path / "a.csv").write_text(f"text\n{'x' * 1001}\n")
        assert rows(tmp_path / "a.csv") == [("line 2", "x" * 1001)]
    finally:
        csv.field_size_limit(limit)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_every_type_of_text_in_parquet(kind: pa.DataType, tmp_path: Path) -> None:
    texts = ["one", None, *map(str, range(600))]
    try:
        array = pa.array(texts, kind)
    except pa.ArrowNotImplementedError:  # dictionaries are encoded
        array = pa.array(texts).dictionary_encode()
    pq.write_table(pa.table({"id": [[1]] * len(texts), "text": array}), tmp_path / "a.parquet", row_group_size=400)
    assert rows(tmp_path / "a.parquet") == [(f"row {number}", text) for number, text in enumerate(texts, 1)]


@pytest.mark.parametrize("values", [[1], [b"one"], [["one"]], [True]])
def test_other_types_of_parquet_are_errors(values: list[Any], tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: column 'text' is .*, not text; choose a different column"):
        rows(tmp_path / "a.parquet")


def test_parquet_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.nulls(3)}), path)
    assert rows(path) == [("row 1", None), ("row 2", None), ("row 3", None)]
    with pytest.raises(MissingColumnError, match=r"a\.parquet has no column 'body', only \['text'\]"):
        rows(path, "body")
    packed = tmp_path / "a.parquet.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(ValueError, match=r"a\.parquet\.gz: compressed Parquet is not supported; decompress the file"):
        rows(packed)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a\.parquet is not a complete Parquet file \(.*, after row 0\)"):
        rows(path)

    def fails(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(pq, "ParquetFile", fails)
    with pytest.raises(OSError, match="Input/output error") as error:
        rows(path)
    assert not isinstance(error.value, ValueError), "the file is not at fault"
    assert error.value.errno == 5
    with pytest.raises(FileNotFoundError):
        rows(tmp_path / "absent.parquet")
