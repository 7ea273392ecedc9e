"""Documents from files as users have them: one column whatever stands beside it, folders of anything, every error named."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import resource
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from http_server import served
from mhla_tasks.commandline import registry
from mhla_tasks.language import HubText
from mhla_tasks.language.corpus import read_documents
from mhla_tasks.language.hub import StreamedDataSet
from mhla_tasks.language.prompts import PromptFile
from mhla_tasks.language.shuffle import shuffled
from mhla_tasks.language.tokenizer import load_tokenizer
from processes import fork_server, run_in_turn

FILLER = "x" * 2000
ENOUGH = 12_000
"""Rows of :data:`FILLER` that are more than the first block that a reader of columns looks at."""


def documents(*sources: Path, column: str = "text") -> list[str]:
    return list(read_documents([str(source) for source in sources], column))


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tokenizer_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


OTHERS: dict[str, tuple[Any, Any]] = {
    "a number, later a string": ({"id": 1}, {"id": "s"}),
    "a new column": ({}, {"extra": 1}),
    "a column less": ({"id": 1, "url": "u"}, {}),
    "null, later a list": ({"note": None}, {"note": ["hello"]}),
    "a nested key more": ({"meta": {"a": 1}}, {"meta": {"a": {"b": [2]}}}),
    "an integer beyond 64 bits": ({"id": 1}, {"id": 10**40}),
    "an empty key": ({"id": 1}, {"": {"": []}}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_columns_may_become_anything(name: str, tmp_path: Path) -> None:
    first, last = OTHERS[name]
    row, end = json.dumps({"text": FILLER, **first}), json.dumps({"text": "end", **last})
    (tmp_path / "a.jsonl").write_text(f"{row}\n" * ENOUGH + end)
    found = documents(tmp_path / "a.jsonl")
    assert len(found) == ENOUGH + 1
    assert found[-1] == "end"


def test_other_columns_of_a_stream_may_become_anything(tokenizer_folder: str, tmp_path: Path) -> None:
    row, end = json.dumps({"text": FILLER, "id": 1}), json.dumps({"text": "end", "id": {"x": None}})
    (tmp_path / "a.jsonl").write_text(f"{row}\n" * ENOUGH + end)
    data = HubText(
        tokenizer_folder, path="json", data_files=str(tmp_path / "a.jsonl"), val_documents=2, shuffle_buffer=0
    )
    data.seed = 0
    assert list(islice(data._documents(), ENOUGH - 2, ENOUGH)) == ["end", FILLER], "the second pass follows the first"


def test_a_data_set_of_the_hub_is_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: a\n  data_files:\n  - {split: train, path: 'a/*.jsonl'}\n"
        "  - {split: test, path: a/held-out/2.jsonl}\n---\n"
    )
    (tmp_path / "a" / "held-out").mkdir(parents=True)
    write_lines(tmp_path / "a" / "held-out" / "2.jsonl", {"text": "held out"})
    row = json.dumps({"text": FILLER, "id": 1})
    (tmp_path / "a" / "0.jsonl").write_text(f"{row}\n" * ENOUGH)
    write_lines(tmp_path / "a" / "1.jsonl", {"id": "s", "text": "end\u2028of it", "more": [{}]})
    found = list(read_documents([f"hub:{tmp_path}:a"], "text"))
    assert (len(found), found[-1]) == (ENOUGH + 1, "end\u2028of it")
    assert list(read_documents([f"hub:{tmp_path}:a:test"], "text")) == ["held out"]
    data = StreamedDataSet({"path": str(tmp_path), "name": "a", "split": "train", "data_files": None}, "url")
    with pytest.raises(ValueError, match=r"0\.jsonl: line 1 has no column 'url', only \['id', 'text'\]"):
        next(data.rows())
    with pytest.raises(ValueError, match=r"has no split 'val', only \['test', 'train'\]"):
        list(read_documents([f"hub:{tmp_path}:a:val"], "text"))


def test_files_behind_urls_stream_in(tokenizer_folder: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two", "id": 1})
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n'))
    pq.write_table(pa.table({"id": [1], "text": ["four"]}), tmp_path / "c.parquet")
    with served(tmp_path) as server:
        urls = [f"{server.url}/a.jsonl?download=true", f"{server.url}/b.jsonl.gz"]
        data = HubText(tokenizer_folder, path="json", data_files=urls, val_documents=1, shuffle_buffer=0)
        data.seed = 0
        assert list(islice(data._documents(), 2)) == ["two", "three"]
        rows = StreamedDataSet({"path": "parquet", "data_files": f"{server.url}/c.parquet"}, "text").rows()
        assert [text for _, text in rows] == ["four"]
        with pytest.raises(OSError, match=r"none\.jsonl"):
            list(StreamedDataSet({"path": "json", "data_files": f"{server.url}/none.jsonl"}, "text").rows())


def test_files_of_a_stream_are_named_by_patterns(tokenizer_folder: str, tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_lines(tmp_path / f"{name}.jsonl", {"text": f"{name} one"}, {"text": f"{name} two"})
    (tmp_path / "c.txt").write_text("c one\n\nc\u2028two\n")
    (tmp_path / "d.tsv").write_text("id\ttext\n1\td one\n")

    def texts(path: str, *patterns: str) -> list[str | None]:
        files = [str(tmp_path / pattern) for pattern in patterns]
        return [text for _, text in StreamedDataSet({"path": path, "data_files": files}, "text").rows()]

    assert texts("json", "*.jsonl") == ["a one", "a two", "b one", "b two"]
    assert texts("text", "c.txt") == ["c one", "c\u2028two"]
    assert texts("csv", "d.tsv") == ["d one"]
    with pytest.raises(FileNotFoundError, match=r"could not be loaded: .*e\*\.jsonl is not a file"):
        texts("json", "e*.jsonl")
    for column, error, message in (
        ("text", FileNotFoundError, "is not a file"),
        ("x", ValueError, "line 1 has no column 'x'"),
    ):
        name = "a.jsonl" if column == "x" else "e.jsonl"
        data = HubText(tokenizer_folder, path="json", data_files=str(tmp_path / name), column=column, seed=1)
        with pytest.raises(error, match=message):
            data.train_dataloader()
    with pytest.raises(ValueError, match="local files have only the split train"):
        HubText(tokenizer_folder, path="json", data_files=str(tmp_path / "a.jsonl"), split="test").windows("validate")


def test_a_shuffle_keeps_every_document_and_depends_on_the_seed() -> None:
    texts = [str(number) for number in range(100)]
    assert list(shuffled(texts, 0, 1)) == texts
    orders = [list(shuffled(texts, 10, seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(texts)
    assert orders[0] != texts


ARRAY = json.dumps([{"text": "one", "id": 1}, {"id": None, "text": "two"}])
CSV = 'id,text\r\n1,"one, ""quoted""\r\non\x0b two\u2028lines"\r\n\r\n2,two\r\n'
READ: dict[str, tuple[bytes, list[str]]] = {
    "array.json": (ARRAY.encode(), ["one", "two"]),
    "indented.json": (json.dumps(json.loads(ARRAY), indent=1).encode(), ["one", "two"]),
    "object.json": (json.dumps({"text": "one\u2028two", "id": 1}, indent=2).encode("utf-8-sig"), ["one\u2028two"]),
    "lines.json": (b'{"text": "one"}\n\n{"text": "two", "id": 1}\n', ["one", "two"]),
    "array.json.gz": (gzip.compress(ARRAY.encode()), ["one", "two"]),
    "marked.jsonl": (b'\xef\xbb\xbf{"text": "one\\u2028"}\r\n{"text": "two\x1d"}'.replace(b"\x1d", b"\xc2\x85"), ["one\u2028", "two\x85"]),
    "joined.jsonl": (b'\xef\xbb\xbf{"text": "one"}\n\xef\xbb\xbf{"text": "two"}\n', ["one", "two"]),
    "wide.jsonl": ('{"text": "één"}\n{"text": "two"}'.encode("utf-16"), ["één", "two"]),
    "rows.ndjson.bz2": (bz2.compress(b'{"text": "one"}\n'), ["one"]),
    "table.csv": (CSV.encode(), ['one, "quoted"\r\non\x0b two\u2028lines', "two"]),
    "excel.csv": (CSV.encode("utf-8-sig"), ['one, "quoted"\r\non\x0b two\u2028lines', "two"]),
    "excel.tsv": ("text\tid\none, two\t1\n".encode("utf-16"), ["one, two"]),
    "table.csv.xz": (lzma.compress(CSV.encode()), ['one, "quoted"\r\non\x0b two\u2028lines', "two"]),
    "long.csv": (b"text,id\n" + b"x" * 500_000 + b",1\n", ["x" * 500_000]),
    "plain.txt": (b"one\r\ntwo\x0c\n", ["one\ntwo\x0c\n"]),
    "marked.md": ("\ufeffone\n".encode(), ["one\n"]),
    "wide.txt": (codecs.BOM_UTF16_BE + "één\r\n".encode("utf-16-be"), ["één\n"]),
    "plain.txt.gz": (gzip.compress("één".encode()), ["één"]),
    "Makefile": (b"all:\n", ["all:\n"]),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_every_kind_of_file_is_read_or_rejected_but_never_taken_as_raw_text(name: str, tmp_path: Path) -> None:
    data, wanted = READ[name]
    (tmp_path / name).write_bytes(data)
    assert documents(tmp_path / name) == wanted
    assert documents(tmp_path) == wanted, "the same in a folder"


def test_zstandard_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(pa.compress(b'{"text": "one"}\n', "zstd", asbytes=True))
    assert documents(tmp_path) == ["one"]


REJECTED: dict[str, tuple[bytes, str]] = {
    "missing.jsonl": (b'{"text": "one"}\n\n{"body": "two"}\n', r"line 3 has no column 'text', only \['body'\]; choose one with --column"),
    "number.jsonl": (b'{"text": "one"}\n{"text": 3}\n', r"line 2: '3' is int, not text"),
    "list.jsonl": (b'{"text": ["one"]}\n', r"line 1: .* is list, not text"),
    "torn.jsonl": (b'{"text": "one"}\n{"text": "tw', r"line 2 is not JSON \("),
    "array.jsonl": (b'[{"text": "one"}]\n', r"line 1 is not a JSON object"),
    "latin.jsonl": (b'{"text": "one"}\n{"text": "caf\xe9"}\n', r"UTF-8: 0xe9, byte 29 in line 2"),
    "texts.json": (b'["one", "two"]', r"item 1 is str 'one', not an object with 'text'"),
    "item.json": (b'[{"text": "one"},\n {"body": 1}]', r"item 2 has no column 'text', only \['body'\]"),
    "scalar.json": (b'"one"', r"holds str 'one'; a \.json of documents is an array of objects"),
    "two.json": (b'[{"text": "one"}]\n[]\n', r"line 2 follows an array"),
    "columns.json": (b'{"text": ["one", "two"]}', r"is list, not text"),
    "header.csv": (b"id;text\n1;one\n", r"line 1 has no column 'text', only \['id;text'\]"),
    "ragged.csv": (b'text,id\n"one\ntwo",1\nthree, four,2\n', r"line 4 has 3 fields, the header has 2"),
    "quote.csv": (b'text,id\n"one"two,1\n', r"line 2: .*check the quotes"),
    "open.tsv": (b'text\tid\n"one\t1\ntwo\t2\n', r"line 2: .*check the quotes"),
    "twice.csv": (b"text,text\na,b\n", r"line 1 has 2 columns 'text'"),
    "torn.csv.gz": (gzip.compress(CSV.encode())[:-5], r"is not a complete \.gz file"),
    "torn.parquet": (b"PAR1 and no more", r"is not a complete Parquet file"),
    "packed.txt": (gzip.compress(b"one"), r"is not text but gzip data; decompress it, or give it the suffix \.gz"),
    "report.txt": (b"%PDF-1.7\n", r"is not text but a PDF document"),
    "report.docx": (b"PK\x03\x04", r"is not text but a ZIP archive"),
    "wide.txt": ("one\n".encode("utf-16-le"), r"zero byte, as in binary files and in UTF-16 without a byte order mark"),
    "latin.txt": (b"one\ncaf\xe9\n", r"0xe9, byte 7 in line 2 .* iconv"),
    "twice.txt.gz.gz": (gzip.compress(gzip.compress(b"one")), r"is not text but gzip data"),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_what_cannot_be_read_names_the_file_and_the_place(name: str, tmp_path: Path) -> None:
    data, message = REJECTED[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        documents(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name))


def test_parquet_reads_one_column(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"text {number}" for number in range(1000)]
    pq.write_table(pa.table({"a.b": texts, "text": pa.array(texts).dictionary_encode(), "n": [[1]] * 1000}), path)
    assert documents(path) == texts
    assert documents(path, column="a.b") == texts
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'body', only \['a\.b', 'text', 'n'\]"):
        documents(path, column="body")
    with pytest.raises(ValueError, match=r"a\.parquet: column 'n' is list<.*>, not text"):
        documents(path, column="n")
    bad = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(bytes([0, 0, 0, 0, 3, 0, 0, 0, 5, 0, 0, 0])), pa.py_buffer(b"one\xe9\xe9")]
    )
    pq.write_table(pa.table({"text": bad}), path)
    with pytest.raises(ValueError, match=r"a\.parquet: row 2: column 'text' is not UTF-8"):
        documents(path)


def test_other_columns_of_parquet_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"blob": ["y" * 1000] * 1000, "text": ["one", None] * 500}),
        path,
        compression="none",
        use_dictionary=False,
    )
    data = bytearray(path.read_bytes())
    data[1000:20_000] = b"\xff" * 19_000  # in the pages of the other column
    path.write_bytes(data)
    assert documents(path) == ["one"] * 500


def test_rows_without_a_text_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = write_lines(
        tmp_path / "a.jsonl", *({"text": text} for text in ("one", None, "", " \n", "two", None, None, None))
    )
    pq.write_table(pa.table({"text": ["three", None, ""]}), tmp_path / "b.parquet")
    (tmp_path / "c.csv").write_text("text,id\n,1\nfour,2\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "header.csv").write_text("text,id\n")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "d.parquet")
    pq.write_table(pa.table({"text": pa.nulls(2)}), tmp_path / "e.parquet")
    (tmp_path / "f.txt").write_text("")
    names = ("a.jsonl", "b.parquet", "c.csv", "empty.jsonl", "header.csv", "d.parquet", "e.parquet", "f.txt")
    assert documents(*(tmp_path / name for name in names)) == ["one", "two", "three", "four"]
    (said,) = caplog.messages
    assert f"7 rows with null ({rows}: line 2, {rows}: line 6, {rows}: line 7, ...)" in said
    assert f"5 empty documents ({rows}: line 3, {rows}: line 4, {tmp_path / 'b.parquet'}: row 3, ...)" in said
    assert "3 tables without a row" in said
    for name in ("empty.jsonl", "header.csv", "d.parquet"):
        assert str(tmp_path / name) in said
    with pytest.raises(ValueError, match=r"empty\.jsonl: no document; left out: 1 tables without a row"):
        documents(tmp_path / "empty.jsonl")


def test_half_a_surrogate_pair_is_replaced_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "bad \\ud83d end"}\n{"text": "\\ud83d\\ude00"}\n{"text": "\\udc00\\ud83d"}\n')
    assert documents(path) == ["bad \ufffd end", "\U0001f600", "\ufffd\ufffd"]
    (said,) = caplog.messages
    assert "changed: 2 documents with half a surrogate pair" in said
    assert f"{path}: line 1, {path}: line 3" in said
    write_lines(tmp_path / "b.jsonl", {"prompt": "fine"}, {"prompt": "\udc00"})
    with pytest.raises(ValueError, match=r"b\.jsonl: line 2: the prompt has half of a surrogate pair"):
        PromptFile(tmp_path / "b.jsonl")


def test_a_long_file_streams(tmp_path: Path) -> None:
    """Memory does not grow with the file."""
    path = tmp_path / "a.jsonl"
    line = json.dumps({"text": "x" * 100_000, "id": 1}) + "\n"
    with path.open("w") as stream:
        stream.writelines(line for _ in range(2000))  # 200 MB
    rows = read_documents([str(path)], "text")
    next(rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(1 for _ in rows) == 1999
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "kilobytes"


def make_repository(folder: Path) -> None:
    """Write a folder of code as users have it, with one document in it."""
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "a.py").write_text("print('hello')\n")
    for hidden in (
        ".git/config",
        ".cache/token",
        ".ipynb_checkpoints/a-checkpoint.py",
        "code/__pycache__/notes.txt",
        ".env",
    ):
        (folder / hidden).parent.mkdir(exist_ok=True)
        (folder / hidden).write_text("SECRET")


def test_hidden_files_are_not_documents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_repository(tmp_path)
    assert documents(tmp_path) == ["print('hello')\n"]
    (said,) = caplog.messages
    assert said.startswith("left out: 5 hidden or cache files and folders (")
    assert str(tmp_path / ".git") in said


FOREIGN: dict[str, tuple[bytes, str]] = {
    "package.json": (b'{"name": "x"}\n', "1 tables without a column 'text' ("),
    "list.json": (b'[{"name": "x"}]\n', "1 tables without a column 'text' ("),
    "tsconfig.json": (b'// comment\n{"a": 1}\n', "1 .json files that do not hold documents ("),
    "version.json": (b"3\n", "1 .json files that do not hold documents ("),
    "log.jsonl": (b'{"loss": 1}\n', "1 tables without a column 'text' ("),
    "metrics.csv": (b"step,loss\n1,2\n", "1 tables without a column 'text' ("),
    "last.ckpt": (b"weights", "1 binary files ("),
    "model.safetensors": (b"\x08\0\0\0\0\0\0\0{}", "1 binary files ("),
    "tool": (b"\x7fELF\x02", "1 binary files ("),
    "photo": (b"\xff\xd8\xff\xe0", "1 binary files ("),
    "old.tar.gz": (gzip.compress(b"a" * 600), "1 binary files ("),
    "dump.dat": (b"one\0two", "1 binary files ("),
    "latin.txt": (b"caf\xe9", "1 files not in UTF-8 ("),
    "__init__.py": (b"", "1 empty documents ("),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files_do_not_stop_a_folder(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, reason = FOREIGN[name]
    (tmp_path / "a.py").write_text("print('hello')\n")
    (tmp_path / name).write_bytes(data)
    assert documents(tmp_path) == ["print('hello')\n"]
    assert caplog.messages == [f"left out: {reason}{tmp_path / name})"]


def test_broken_tables_of_a_folder_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print('hello')\n")
    for name in ("torn.jsonl", "number.jsonl", "ragged.csv", "torn.parquet", "latin.jsonl", "missing.jsonl"):
        (tmp_path / name).write_bytes(REJECTED[name][0])
        with pytest.raises(ValueError, match=name):
            documents(tmp_path)
        (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match="is neither a file nor a folder"):
        documents(tmp_path / "absent")
    (tmp_path / "empty" / ".git").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"is a folder without visible files$"):
        documents(tmp_path / "empty")


def test_links_of_a_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("one")
    write_lines(tmp_path / "rows.jsonl", {"text": "two"})
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "texts" / "rows.jsonl").symlink_to(tmp_path / "rows.jsonl")
    (tmp_path / "texts" / "up").symlink_to(tmp_path / "texts")
    (tmp_path / "texts" / "gone.txt").symlink_to(tmp_path / "absent")
    assert documents(tmp_path / "texts") == ["one", "two"]


def test_the_command_says_what_it_leaves_out(tokenizer_folder: str, tmp_path: Path) -> None:
    make_repository(tmp_path / "repo")
    (tmp_path / "repo" / "package.json").write_text('{"name": "x"}')
    (tmp_path / "repo" / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n")

    write_lines(tmp_path / "rows.jsonl", {"text": "one"}, {"text": {"a": 1}})
    good = [["tokenizer", "out", "repo", "--vocab_size=300"], ["text", "shards", "repo", "--tokenizer=out"]]
    messages = {
        "rows.jsonl": "error: rows.jsonl: line 2: \"{'a': 1}\" is dict, not text",
        "repo/package.json": "error: repo/package.json: line 1 has no column 'text', only ['name']; choose one with --column",
        "repo/logo.png": "error: repo/logo.png is not text but a PNG image",
    }
    texts = [["text", "others", name, f"--tokenizer={tokenizer_folder}"] for name in messages]
    tokenizers = [["tokenizer", "others", name] for name in messages]
    calls = [*good, *texts, *tokenizers, [*texts[0], "--limit=1"]]
    *results, limited = run_in_turn(*(["prepare", *call] for call in calls), folder=tmp_path)
    for status, said in results[:2]:
        assert status == 0, said
        lines = [line for line in said.splitlines() if "left out" in line]
        assert len(lines) == 1, said
        for part in (
            "5 hidden or cache files and folders",
            "1 tables without a column 'text' (repo/package.json)",
            "1 binary files (repo/logo.png)",
        ):
            assert part in lines[0]
    for (status, said), message in zip(results[2:], 2 * list(messages.values()), strict=True):
        assert status == 1
        assert message in said
        assert "Traceback" not in said
    assert limited[0] == 0, limited[1]


def test_an_error_of_the_reading_process_is_one_line(tokenizer_folder: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", *({"text": "river " * 20} for _ in range(20)), {"text": 3})
    data = HubText(
        tokenizer_folder, path="json", data_files=str(tmp_path / "rows.jsonl"), batch_size=2, context=16, val_documents=2,
        shuffle_buffer=0, num_workers=1, seed=1,
    )  # fmt: skip
    loader = data.train_dataloader()
    loader.trainer = None
    with pytest.raises(ValueError, match=r"^\S*rows\.jsonl: line 21: '3' is int, not text; choose a different column$"):
        list(loader)


PROMPTS: dict[str, tuple[bytes, list[str]]] = {
    "u2028.jsonl": ('{"prompt": "a\u2028b"}\n{"prompt": "c"}\n'.encode(), ["a\u2028b", "c"]),
    "u85.jsonl": ('{"prompt": "a\x85b"}\n'.encode(), ["a\x85b"]),
    "escaped.jsonl": (b'{"prompt": "one\\ftwo"}', ["one\ftwo"]),
    "mark.jsonl": (b'\xef\xbb\xbf{"prompt": "a", "id": 1}\r\n\r\n{"id": "x", "prompt": "b"}', ["a", "b"]),
    "mark.txt": (b"\xef\xbb\xbfhello\r\nworld \r\n", ["hello", "world "]),
    "feed.txt": (b"page one\x0cpage two\n\nlast", ["page one\x0cpage two", "last"]),
    "separators.txt": ("a\u2029b\x1cc\x0bd\n".encode(), ["a\u2029b\x1cc\x0bd"]),
    "wide.txt": ("één\ntwo\n".encode("utf-16"), ["één", "two"]),
    "packed.txt.gz": (gzip.compress(b"one\ntwo\n"), ["one", "two"]),
    "array.json": (b'[{"prompt": "one"}, {"prompt": "two"}]', ["one", "two"]),
    "table.csv": (b'prompt,id\n"one\ntwo",1\n', ["one\ntwo"]),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_of_files(name: str, tmp_path: Path) -> None:
    data, wanted = PROMPTS[name]
    (tmp_path / name).write_bytes(data)
    assert PromptFile(tmp_path / name).prompts == wanted


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"one\ncaf\xe9\n", r"a\.txt is not text in UTF-8: 0xe9, byte 7 in line 2"),
        (
            "a.jsonl",
            b'{"prompt": "one"}\n\n{"text": "x"}\n',
            r"a\.jsonl: line 3 has no column 'prompt', only \['text'\]",
        ),
        ("a.jsonl", b'{"prompt": "one"}\n{"prompt": ""}\n', r"a\.jsonl: line 2 has an empty prompt"),
        ("a.jsonl", b'{"prompt": null}\n', r"a\.jsonl: line 1 has an empty prompt"),
        ("a.jsonl", b'{"prompt": ["x"]}\n', r"a\.jsonl: line 1: .* is list, not text"),
        ("a.jsonl", b'{"prompt": "x"}\nnot json\n', r"a\.jsonl: line 2 is not JSON"),
        ("a.txt", b"\n \n", r"a\.txt holds no prompt"),
        ("a.txt", b"one\rtwo", r"a\.txt has no line feed, only carriage returns"),
    ],
)
def test_prompts_that_cannot_be_read_are_named(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        PromptFile(tmp_path / name)


def test_one_long_value_is_an_error_that_names_it_in_every_kind_of_table(
    tmp_path: Path, tokenizer_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "a" * (1 << 25)
    kinds = {
        "a.jsonl": json.dumps({"text": long + long}),
        "a.csv": f'text\n"{long}\n{long}"\n',
        "a.tsv": f"text\n{long}{long}\n",
        "a.jsonl.gz": json.dumps({"text": long + long}),
        "open.csv": 'text\n"' + f"{long[:1000]}\n" * 40_000,
    }
    for name, content in kinds.items():
        path = tmp_path / name
        data = content.encode()
        path.write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)
        with pytest.raises(ValueError, match=rf"{name}: line \d+\b.*(has more than 33554432 characters|field limit)"):
            documents(path)
    rows = [{"text": "a" * 1000}] * 1000
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    monkeypatch.setattr("lightning_mhla.data.lines.LONGEST_LINE", 10_000)
    assert len(documents(tmp_path / "rows.json")) == 1000, "an array of all rows may stand in one line"
    status, said = fork_server().run(
        "prepare", "text", str(tmp_path / "out"), str(tmp_path / "a.jsonl"), f"--tokenizer={tokenizer_folder}",
        module="mhla_tasks",
    )  # fmt: skip
    assert status == 1
    assert "a.jsonl: line 1 has more than 33554432 characters" in said
    assert "Traceback" not in said


def test_prepare_says_that_texts_are_too_short_for_a_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("The river is wide. " * 20)
    target = str(tmp_path / "tokenizer")
    for size, is_short in ((262, False), (5000, True)):
        registry.run("prepare tokenizer", [target, str(tmp_path / "a.txt"), "--vocab_size", str(size)])
        size = len(load_tokenizer(target))
        said = " ".join(capsys.readouterr().out.split())
        assert f"{size} tokens in {target}" in said
        assert (f"too short for 5,000 tokens; use --model.vocab_size={size} in training" in said) == is_short
    registry.run("prepare text", [str(tmp_path / "one"), str(tmp_path / "a.txt"), "--tokenizer", target])
    assert f"tokens in 1 shard: {tmp_path}/one/train-00000.tar\n" in capsys.readouterr().out
    (tmp_path / "b.jsonl").write_text('{"text": "The river is wide. The river is deep."}\n' * 3)
    words = [str(tmp_path / "two"), str(tmp_path / "b.jsonl"), "--tokenizer", target, "--run_characters", "20"]
    registry.run("prepare text", [*words, "--runs_per_shard", "1"])
    assert f"tokens in 3 shards: {tmp_path}/two/train-00000.tar to train-00002.tar\n" in capsys.readouterr().out
