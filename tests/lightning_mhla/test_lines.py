"""Text files as users have them: encodings, compression, line ends, and errors that name the file and the line."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_mhla.data.lines import (
    LONGEST_LINE,
    decode_text,
    iterate_lines,
    json_lines,
    read_lines,
    read_text,
    text_entry,
)

ROWS: list[dict[str, Any]] = [
    {"text": "a\u2028b\u2029c\x85d"},
    {"text": "é \U0001f600", "n": 1},
    {"text": "\f\x1c end"},
]
JSONL = "\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
NUMBERED = [(number, row) for number, row in zip((1, 3, 5), ROWS, strict=True)]

ENCODED = {
    "plain.jsonl": JSONL.encode(),
    "mark.jsonl": JSONL.encode("utf-8-sig"),
    "utf16.jsonl": JSONL.encode("utf-16"),
    "utf16be.jsonl": codecs.BOM_UTF16_BE + JSONL.encode("utf-16-be"),
    "utf32.jsonl": JSONL.encode("utf-32"),
    "rows.jsonl.gz": gzip.compress(JSONL.encode()),
    "members.jsonl.gz": gzip.compress(JSONL[:20].encode()) + gzip.compress(JSONL[20:].encode()),
    "rows.jsonl.bz2": bz2.compress(JSONL.encode("utf-16")),
    "ROWS.JSONL.XZ": lzma.compress(JSONL.encode("utf-8-sig")),
}


@pytest.mark.parametrize("name", ENCODED)
def test_json_lines_in_every_encoding(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(ENCODED[name])
    assert list(json_lines(tmp_path / name)) == NUMBERED


def test_zstandard_is_read_frame_by_frame(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    frames = [pyarrow.compress(part.encode(), "zstd", asbytes=True) for part in (JSONL[:9], JSONL[9:])]
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(b"".join(frames))
    assert list(json_lines(path)) == NUMBERED
    path.write_bytes(b"".join(frames)[:-3])
    with pytest.raises(ValueError, match=r"rows\.jsonl\.zst is not a complete \.zst file"):
        list(json_lines(path))


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\ftwo\r\n\r\n  \nthree\x85four\x0b\x1e\nsix".encode())
    assert list(read_lines(path)) == [(1, "one\ftwo"), (4, "three\x85four\x0b\x1e"), (5, "six")]
    assert read_text(path) == "one\ftwo\n\n  \nthree\x85four\x0b\x1e\nsix"
    path.write_bytes(b"one\rtwo\r")
    with pytest.raises(ValueError, match=r"a\.txt has no line feed, only carriage returns"):
        list(read_lines(path))


def test_lines_longer_than_a_piece_and_characters_on_its_border(tmp_path: Path) -> None:
    lines = ["x" * 1_048_575 + "é", "y" * 2_500_000, "", "z"]
    for encoding in ("utf-8", "utf-16"):
        (tmp_path / "a.txt").write_bytes("\n".join(lines).encode(encoding))
        assert [line for _, line in read_lines(tmp_path / "a.txt")] == [line for line in lines if line]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"ok\n" * 400_000 + b"caf\xe9\n", r"UTF-8: 0xe9, byte 1200003 in line 400001 .*iconv"),
        ("ok\né".encode()[:-1], r"UTF-8: 0xc3, byte 3 in line 2 \(unexpected end of data\)"),
        (codecs.BOM_UTF16_LE + "a\nb".encode("utf-16-le") + b"\x00\xd8c\0", r"UTF-16: 0x00, byte 8 in line 2"),
        ("one\ntwo\n".encode("utf-16-le"), r"line 1 has a zero byte, as in binary files and in UTF-16 without"),
        (b"one\ntwo\n\0", r"line 3 has a zero byte"),
        (gzip.compress(b"hello"), r"is not text but gzip data; decompress it, or give it the suffix \.gz"),
        (b"\x7fELF\x02\x01\x01", r"is not text but a program"),
        (b"\x89PNG\r\n\x1a\n", r"is not text but a PNG image"),
        (b"%PDF-1.4\n1 0 obj", r"is not text but a PDF document; export it as text"),
        (b"PK\x03\x04word/document.xml", r"is not text but a ZIP archive \(or \.docx"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", r"is not text but a Git LFS pointer"),
    ],
)
def test_files_that_are_not_text_are_named_with_the_place(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        read_text(path)
    with pytest.raises(ValueError, match=message) as in_lines:
        list(read_lines(path))
    with pytest.raises(ValueError, match=message) as in_bytes:
        decode_text(data, str(path))
    assert str(caught.value) == str(in_lines.value) == str(in_bytes.value)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.gz", gzip.compress(JSONL.encode())[:-9]),
        ("b.gz", b"plain text"),
        ("c.bz2", bz2.compress(JSONL.encode())[:-4]),
        ("d.xz", lzma.compress(JSONL.encode())[:-8]),
    ],
)
def test_compressed_files_that_are_cut_short(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{name} is not a complete \.{name[2:]} file"):
        read_text(tmp_path / name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r'line 2 is not JSON \(.* at column 10\): \'{"text": "cut\''),
        ('["text"]', r"line 2 is not a JSON object"),
        ('{"text": "a"} {"text": "b"}', r"line 2 is not JSON \(Extra data at column 15\)"),
        ("[" * 100_000, r"line 2 is nested too deep"),
    ],
)
def test_lines_that_are_not_objects_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        list(json_lines(path))
    assert str(caught.value).startswith(f"{path}: line 2")


def test_what_is_beside_the_text_may_be_anything(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "label": 3, "n": ' + "7" * 5000 + '}\n\ufeff{"text": "two", "n": NaN}\n')
    first, second = (row for _, row in json_lines(path))
    assert (first["text"], second["text"]) == ("one", "two")
    assert (first["label"], type(first["label"])) == (3, int), "changed by the number beside it"


def test_entries_that_are_not_text_are_named() -> None:
    assert text_entry({"a": "é"}, "a", "x: line 1") == "é"
    with pytest.raises(ValueError, match=r"x: line 1 has no 'b', only \['a', 'c'\]"):
        text_entry({"c": 1, "a": 2}, "b", "x: line 1")
    with pytest.raises(ValueError, match=r"x: line 1: 'a' is NoneType 'None', not text"):
        text_entry({"a": None}, "a", "x: line 1")
    with pytest.raises(ValueError, match=r"x: line 1: 'a' has half of a surrogate pair"):
        text_entry({"a": "\ud83d"}, "a", "x: line 1")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.xz", "a.bz2"])
@pytest.mark.parametrize("before", [0, 3])
def test_a_line_without_end_is_named(name: str, before: int, tmp_path: Path) -> None:
    data = b"{}\n" * before + b'{"text": "' + b"a" * (LONGEST_LINE + (1 << 20))
    pack = {
        ".gz": partial(gzip.compress, compresslevel=1),
        ".xz": partial(lzma.compress, preset=0),
        ".bz2": bz2.compress,
    }
    (tmp_path / name).write_bytes(pack.get(Path(name).suffix, bytes)(data))
    begun = time.process_time()
    with pytest.raises(ValueError, match=rf"{name}: line {before + 1} has more than {LONGEST_LINE} characters"):
        list(json_lines(tmp_path / name))
    assert time.process_time() - begun < 2


def test_a_line_just_short_enough_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_mhla.data.lines.LONGEST_LINE", 10)
    (tmp_path / "a.txt").write_text("a" * 10 + "\n" + "b" * 10)
    assert list(iterate_lines(tmp_path / "a.txt")) == ["a" * 10, "b" * 10]
    (tmp_path / "a.txt").write_text("a" * 10 + "\n" + "b" * 11)
    with pytest.raises(ValueError, match=r"a\.txt: line 2 has more than 10 characters"):
        list(iterate_lines(tmp_path / "a.txt"))


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
def test_a_text_that_becomes_large_is_named(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_mhla.data.lines.LARGEST_UNPACKED", 5 << 20)
    pack = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}[suffix]
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(pack(b"a\n" * (4 << 20)))
    with pytest.raises(ValueError, match=rf"a\.txt{suffix} has more than 5242880 characters once it is decompressed"):
        read_text(path)
    (tmp_path / "a.txt").write_bytes(b"a\n" * (4 << 20))
    assert len(read_text(tmp_path / "a.txt")) == 8 << 20, "a file that is not compressed is as large as it is"
