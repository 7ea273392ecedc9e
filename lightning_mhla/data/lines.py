"""Reading of text files and JSON Lines files, including compressed files and files in UTF-16 or UTF-32.

Only a line feed ends a line: U+2028, U+0085 and form feeds are ordinary characters. UTF-8 is read with or without a byte order
mark, UTF-16 and UTF-32 only with one. The mark is never part of the text. Any other content raises an error that names the file
and the defect, so that a model never trains on wrongly decoded text.
"""

# Longer than other modules because each defect of a file has its own error message, which says how to fix the file.

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

import fsspec

from lightning_mhla.system.listing import shown
from lightning_mhla.system.redaction import check_secrets
from lightning_mhla.system.untrusted import reason

Source = str | os.PathLike[str]
"""Path, or URL that fsspec opens."""

CHUNK = 1 << 20
"""Number of bytes that are decoded at a time."""

LONGEST_LINE, LONGEST_ARRAY = 1 << 25, 1 << 27
"""Maximum number of characters in a line of text, and in a line of JSON that holds all rows of a table.

A line of text is tokenized in one piece, which limits its length.
"""

LARGEST_UNPACKED = 1 << 28
"""Maximum number of characters of a compressed file that is read at once.

Plain files have no limit, since a small file cannot expand to a large text.
"""

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of the supported compressed files."""

MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # must come before UTF-16, since it begins with the mark of UTF-16-LE
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)

UNPACK = "decompress it, or give it the suffix {}"
CONVERT = "export it as text"
SIGNATURES = (
    (b"\x1f\x8b", "gzip data", UNPACK.format(".gz")),
    (b"BZh", "bzip2 data", UNPACK.format(".bz2")),
    (b"\xfd7zXZ\0", "xz data", UNPACK.format(".xz")),
    (b"\x28\xb5\x2f\xfd", "Zstandard data", UNPACK.format(".zst")),
    (b"\x04\x22\x4d\x18", "LZ4 data", "decompress it"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it"),
    (b"Rar!\x1a\x07", "a RAR archive", "unpack it"),
    (b"PK\x03\x04", "a ZIP archive (or .docx, .xlsx, .pt)", "unpack it or export it as text"),
    (b"%PDF-", "a PDF document", CONVERT),
    (b"{\\rtf", "an RTF document", CONVERT),
    (b"\xd0\xcf\x11\xe0", "a Microsoft Office document", CONVERT),
    (b"\x7fELF", "a program", "leave it out"),
    (b"\x89PNG", "a PNG image", "leave it out"),
    (b"\xff\xd8\xff", "a JPEG image", "leave it out"),
    (b"PAR1", "a Parquet table", "give it the suffix .parquet"),
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer, not the file itself", "run git lfs pull"),
)
"""Signatures of files that are not text, their names, and remedies."""

PRINTABLE_SIGNATURES = (b"BZh", b"PAR1")
"""Signatures that a text file may begin with, too; they count only if the first bytes of the file are not ASCII text."""


class NotTextError(ValueError):
    """Raised for a file that is not text in a supported encoding. The message names the file and the defect.

    Attributes:
        kind: ``"binary"`` if the file has a zero byte or begins like a binary format; ``"not UTF-8"`` if its bytes cannot be
            decoded in the encoding that its byte order mark names, or in UTF-8 if it has no mark.
    """

    def __init__(self, message: str, kind: str = "binary") -> None:
        super().__init__(message)
        self.kind = kind


def file_name(source: Source) -> str:
    """Return the last component of a path or URL, without the query string of the URL."""
    text = os.fspath(source)
    return PurePosixPath(urlsplit(text).path if "://" in text else text).name


def plain_suffix(source: Source) -> str:
    """Return the suffix of a path or URL in lower case, ignoring a compression suffix: ``.jsonl`` for ``a.jsonl.gz``."""
    name = PurePosixPath(file_name(source).lower())
    return (name.with_suffix("") if name.suffix in COMPRESSED else name).suffix


@contextmanager
def open_bytes(source: Source) -> Iterator[BinaryIO]:
    """Context manager that opens a file or URL for reading bytes, and decompresses it according to its suffix.

    The suffixes ``.gz``, ``.bz2``, ``.xz`` and ``.zst`` are recognized. Files with other suffixes are read unchanged.

    Args:
        source: path or URL.

    Yields:
        Binary stream of the decompressed content.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the content is truncated, is not in the compressed format that the suffix names, or is a ``.zst`` file
            and pyarrow is not installed.
    """
    suffix = PurePosixPath(file_name(source)).suffix.lower()
    text = os.fspath(source)
    check_secrets(text)
    opened: Any = fsspec.open(text, "rb").open() if "://" in text else open(source, "rb")  # noqa: SIM115
    with opened as raw:
        try:
            if suffix == ".gz":
                yield cast("BinaryIO", gzip.GzipFile(fileobj=raw))
            elif suffix == ".bz2":
                yield cast("BinaryIO", bz2.BZ2File(raw))
            elif suffix == ".xz":
                yield cast("BinaryIO", lzma.LZMAFile(raw))  # noqa: SIM115  # closing raw is sufficient
            elif suffix == ".zst":
                yield _zstandard(raw, source)
            else:
                yield raw
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            # Decompressors raise OSError without a number; one with a number comes from the disk or the network.
            if suffix not in COMPRESSED or (isinstance(error, OSError) and error.errno is not None):
                raise
            raise ValueError(
                f"{shown(source)} is not a complete {suffix} file ({reason(error)}); download or compress it again, or "
                f"remove the suffix if it is not compressed"
            ) from error


def _zstandard(raw: BinaryIO, source: Source) -> BinaryIO:
    try:
        import pyarrow
    except ImportError as error:
        raise ValueError(
            f"{shown(source)}: .zst files are read with pyarrow: pip install pyarrow, or decompress it with zstd -d"
        ) from error
    return cast("BinaryIO", pyarrow.CompressedInputStream(raw, "zstd"))


def decode_text(data: bytes, where: str) -> str:
    """Decode the complete content of a text file to a string.

    Args:
        data: content of the file.
        where: name of the file, for error messages.

    Raises:
        NotTextError: if the data is not text in UTF-8, or in UTF-16 or UTF-32 with a byte order mark.
    """
    return "".join(_decode(io.BytesIO(data), where))


def read_text(source: Source) -> str:
    r"""Read a complete text file, decompress it if needed, and convert all line endings to ``\n``.

    Args:
        source: path or URL.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is not text in UTF-8, UTF-16 or UTF-32, or if it is compressed and has more than 2**28
            characters.
    """
    parts, count = [], 0
    compressed = PurePosixPath(file_name(source)).suffix.lower() in COMPRESSED
    with open_bytes(source) as stream:
        for part in _decode(stream, shown(source)):
            parts.append(part)
            count += len(part)
            if compressed and count > LARGEST_UNPACKED:
                raise ValueError(
                    f"{shown(source)} has more than {LARGEST_UNPACKED} characters once it is decompressed, too many for one "
                    "text; decompress it, or split it"
                )
    text = "".join(parts)
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def iterate_lines(source: Source, longest: int | None = None) -> Iterator[str]:
    r"""Iterate over all lines of a text file, including blank lines, without loading the complete file.

    Args:
        source: path or URL.
        longest: maximum number of characters in a line; None for 2**25. The file is read in pieces of 2**20 bytes, and only
            lines that continue from one piece to the next are checked.

    Yields:
        Line without its final ``\n``. A ``\r`` before the ``\n`` is kept.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is not text in UTF-8, UTF-16 or UTF-32, if a line is longer than ``longest``, or if the file
            uses only carriage returns as line endings.
    """
    longest = longest or LONGEST_LINE
    parts: list[str] = []
    number, length = 1, 0
    with open_bytes(source) as stream:
        for text in _decode(stream, shown(source)):
            head, *more_lines = text.split("\n")
            parts.append(head)
            length += len(head)
            # Only the line that continues over several pieces; other lines are shorter than a piece.
            if length > longest:
                raise ValueError(
                    f"{shown(source)}: line {number} has more than {longest} characters; break it into several lines"
                )
            if more_lines:
                yield "".join(parts)
                yield from more_lines[:-1]
                parts, length, number = [more_lines[-1]], len(more_lines[-1]), number + len(more_lines)
    last = "".join(parts)
    if number == 1 and "\r" in last.rstrip("\r"):
        raise ValueError(
            rf"{shown(source)} has no line feed, only carriage returns; convert it, for example with tr '\r' '\n'"
        )
    if last:
        yield last


def read_lines(source: Source, longest: int | None = None) -> Iterator[tuple[int, str]]:
    """Iterate over the non-blank lines of a text file and their line numbers, without loading the complete file.

    Args:
        source: path or URL.
        longest: maximum number of characters in a line; None for 2**25. The file is read in pieces of 2**20 bytes, and only
            lines that continue from one piece to the next are checked.

    Yields:
        Line number, counted from 1 with blank lines included, and the line without its line ending.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is not text in UTF-8, UTF-16 or UTF-32, if a line is longer than ``longest``, or if the file
            uses only carriage returns as line endings.
    """
    for number, line in enumerate(iterate_lines(source, longest), 1):
        if line.strip():
            yield number, line.removesuffix("\r")


def json_lines(source: Source) -> Iterator[tuple[int, dict[str, Any]]]:
    """Iterate over the objects in a JSON Lines file and their line numbers, without loading the complete file.

    Blank lines are skipped.

    Args:
        source: path or URL.

    Yields:
        Line number, counted from 1 with blank lines included, and the object parsed from that line.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is not text, or a line that is not blank does not contain a JSON object.
    """
    for number, line in read_lines(source):
        yield number, parse_object(line, f"{shown(source)}: line {number}")


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Parse a string that contains a JSON object.

    Args:
        text: JSON string, such as a line of a JSON Lines file.
        where: location of the string, for error messages.

    Raises:
        ValueError: if the string is not valid JSON, or its value is not an object.
    """
    value = parse_json(text, where)
    if not isinstance(value, dict):
        raise ValueError(f'{where} is not a JSON object {{"name": ...}}: {text.strip()[:60]!r}')
    return value


def _integer(digits: str) -> float:
    """Convert the digits of a number to an int, or to a float if Python does not convert that many digits."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


def parse_json(text: str, where: str) -> Any:
    """Parse a string that contains a JSON value of any type.

    Args:
        text: JSON string.
        where: location of the string, for error messages.

    Returns:
        Python value as ``json.loads`` returns it, except that integers with too many digits for Python become floats.

    Raises:
        ValueError: if the string is not valid JSON, or is nested too deeply.
    """
    text = text.lstrip("\ufeff")  # concatenated files have byte order marks inside
    try:
        try:
            return json.loads(text)
        # JSONDecodeError is a ValueError, so it must not reach the next clause.
        except json.JSONDecodeError:
            raise
        except ValueError:  # an integer has more digits than Python converts
            return json.loads(text, parse_int=_integer)
    except json.JSONDecodeError as error:
        position = f"column {error.colno}" if "\n" not in text.strip() else f"line {error.lineno} column {error.colno}"
        raise ValueError(f"{where} is not JSON ({error.msg} at {position}): {text.strip()[:60]!r}") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply to be read: {text.strip()[:60]!r}") from error


def text_entry(row: dict[str, Any], key: str, where: str) -> str:
    """Return the string that a JSON object stores under a key.

    Args:
        row: JSON object.
        key: key of the string.
        where: location of the object, for error messages.

    Raises:
        ValueError: if the key is missing, or its value is not a string that can be encoded as UTF-8.
    """
    if key not in row:
        raise ValueError(f"{where} has no {key!r}, only {sorted(row)}")
    value = row[key]
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key!r} is {type(value).__name__} {str(value)[:60]!r}, not text")
    if has_surrogates(value):
        raise ValueError(f"{where}: {key!r} has half of a surrogate pair: {value[:60]!r}; write the character itself")
    return value


def has_surrogates(text: str) -> bool:
    r"""Return whether a string contains an unpaired surrogate, such as ``\ud83d``, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _decode(stream: BinaryIO, where: str) -> Iterator[str]:
    """Decode a binary stream piece by piece, and yield the text of each piece.

    A byte order mark selects UTF-8, UTF-16 or UTF-32. Without a mark, the encoding is UTF-8.

    Args:
        stream: binary stream, read from its current position.
        where: name of the file, for error messages.

    Raises:
        NotTextError: if the stream is not text in the selected encoding.
    """
    data = stream.read(CHUNK)
    _check_signature(data, where)
    mark, encoding = next(((mark, name) for mark, name in MARKS if data.startswith(mark)), (b"", "utf-8"))
    decoder = codecs.getincrementaldecoder(encoding)()
    line, offset, data = 1, len(mark), data[len(mark) :]
    while True:
        pending = len(decoder.getstate()[0])  # bytes of a character that continues in this piece
        # checked before decoding: UTF-16 without a mark has zero bytes, and its decoding error would be misleading
        if encoding == "utf-8" and b"\0" in data:
            _reject_nul(where, line + data[: data.index(b"\0")].count(b"\n"))
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            decodable = error.object[: error.start]
            position = (
                f"byte {offset - pending + error.start} in line {line + decodable.decode(encoding).count(chr(10))}"
            )
            byte = f"0x{error.object[error.start]:02x}"
            raise NotTextError(
                f"{where} is not text in {encoding.removesuffix('-le').removesuffix('-be').upper()}: {byte}, {position} "
                f"({error.reason}); convert it, for example with iconv -f LATIN1 -t UTF-8, or leave it out",
                "not UTF-8",
            ) from error
        if "\0" in text:
            _reject_nul(where, line + text[: text.index("\0")].count("\n"))
        yield text
        if not data:
            return
        line, offset = line + text.count("\n"), offset + len(data)
        data = stream.read(CHUNK)


def _reject_nul(where: str, line: int) -> None:
    raise NotTextError(
        f"{where} is not text in UTF-8: line {line} has a zero byte, as in binary files and in UTF-16 without a byte order "
        "mark; leave it out or convert it, for example with iconv -f UTF-16LE -t UTF-8"
    )


def _check_signature(head: bytes, where: str) -> None:
    """Check that a file does not begin with the signature of a binary format, such as PDF or ZIP.

    Args:
        head: first bytes of the file.
        where: name of the file, for error messages.

    Raises:
        NotTextError: if the file begins with such a signature.
    """
    for signature, name, way_out in SIGNATURES:
        if not head.startswith(signature):
            continue
        if signature in PRINTABLE_SIGNATURES and _is_ascii_text(head):
            continue
        raise NotTextError(f"{where} is not text but {name}; {way_out}")


def _is_ascii_text(head: bytes) -> bool:
    return head.isascii() and b"\0" not in head
