"""Reading files that anybody may have written: a broken or hostile one is a ValueError, never code that runs.

Each reader here turns whatever its library raises on such a file into one kind of error, and bounds what a few bytes can
ask for.
"""

from __future__ import annotations

import io
import json
import math
import signal
import struct
import threading
import tokenize
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from zipfile import BadZipFile, ZipFile

import numpy as np
import yaml

BROKEN = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    EOFError,
    MemoryError,
    RecursionError,
    RuntimeError,
    SyntaxError,
    struct.error,
    tokenize.TokenError,
)
"""Errors that libraries raise on broken files, besides their own."""

YAML_CHARACTERS = 1 << 20
YAML_DEPTH = 50
YAML_VALUES = 100_000
"""Bounds of a configuration: far above any honest one, far below what takes seconds to read."""

LARGEST_JSON = 1 << 27
"""Bytes of a JSON file, which become many times as many in memory."""

PACKED, NPY_HEADER = 20, 1 << 16
"""Times as large as its file that an array of an archive may be, and the bytes in which its header has to lie."""

DTYPES = (np.float16, np.float32, np.float64, np.uint8, np.uint16, np.uint32, np.int32, np.int64, np.bool_)


def reason(error: BaseException, length: int = 200) -> str:
    """The first line of an error's message, printable and short."""
    lines = str(error).splitlines() or [type(error).__name__]
    return "".join(sign if sign.isprintable() else "?" for sign in lines[0])[:length]


def check_size(path: Path, most: int) -> None:
    """Raise a ValueError that names a file with more bytes than it may have."""
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"{path} has {size} bytes, at most {most} are read; is it the right file?")


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Stop code that computes for too long: a timer's signal raises inside of it.

    In a thread that is not the main one, and where somebody else uses the timer, there is no limit.

    Args:
        seconds: processor time that it may take.
        what: subject of the error's sentence.

    Raises:
        ValueError: when the time is over.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return

    def stop(number: int, frame: object) -> NoReturn:
        raise ValueError(f"{what} take more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: naming the file, when it holds anything else, or more than :data:`LARGEST_JSON` bytes.
    """
    check_size(path, LARGEST_JSON)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON file ({reason(error)})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, where named values belong")
    return content


def parse_array(data: bytes) -> np.ndarray:
    """The array in the bytes of an ``.npy`` file: plain numbers in the order of this machine, as many as there are bytes for.

    Raises:
        ValueError: when it is anything else.
    """
    shape, dtype, start = parse_array_header(data)
    size = len(data) - start
    count = 1
    for length in shape:
        count *= length
    if count * dtype.itemsize != size:
        raise ValueError(f"{list(shape)} {dtype} are {count * dtype.itemsize} bytes, but {size} follow")
    try:
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except BROKEN as error:
        raise ValueError(reason(error)) from error


def parse_array_header(data: bytes) -> tuple[tuple[int, ...], np.dtype, int]:
    """Shape, dtype and first data byte of an ``.npy`` file whose beginning is ``data``.

    Raises:
        ValueError: when it is no header, or of anything but plain numbers.
    """
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, _, dtype = read(stream)
    except BROKEN as error:
        raise ValueError(f"no header of numpy: {reason(error)}") from error
    if dtype not in DTYPES or any(type(length) is not int or not 0 <= length < 1 << 48 for length in shape):
        raise ValueError(f"{dtype} of shape {str(shape)[:60]} are no plain numbers")
    return shape, dtype, stream.tell()


def read_yaml(path: Path) -> Any:
    """The values in a YAML file.

    Raises:
        ValueError: naming the file, when it cannot be read, or :func:`check_yaml` refuses it.
    """
    try:
        with path.open(encoding="utf-8-sig") as stream:
            text = stream.read(YAML_CHARACTERS + 1)
        check_yaml(text)
        return yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read ({reason(error)})") from error


def read_arrays(path: Path, most: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Arrays of an ``.npz`` file: plain numbers, as many as their headers say and the archive has bytes for.

    Args:
        path: the file.
        most: bytes that each array may have, by name; others are not read. A packed array may be larger than its part of the
            file, up to :data:`PACKED` times the file.

    Raises:
        ValueError: naming the file, when it is anything else.
    """
    arrays = {}
    try:
        with ZipFile(path) as archive:
            infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            limit = max(PACKED * path.stat().st_size, 1 << 20)
            for name in most.keys() & infos.keys():
                size = infos[name].file_size
                if size > min(most[name], limit):
                    raise ValueError(
                        f"{name} of {size} bytes in a file of {path.stat().st_size} is larger than is read"
                    )
                with archive.open(infos[name]) as stream:
                    shape, dtype, start = parse_array_header(stream.read(NPY_HEADER))
                if math.prod(shape) * dtype.itemsize != size - start:
                    raise ValueError(f"{name} {list(shape)} {dtype} does not fill {size - start} bytes")
                with archive.open(infos[name]) as stream:
                    arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
    except (BadZipFile, zlib.error, NotImplementedError, OSError, *BROKEN) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(f"{path} is not an .npz that can be read safely ({reason(error)})") from error
    return arrays


def check_yaml(text: str) -> None:
    """Refuse what would take a configuration's reader apart: too large, too deep, aliases that multiply.

    Raises:
        ValueError: saying which.
    """
    if len(text) > YAML_CHARACTERS:
        raise ValueError(f"{len(text)} characters are no configuration (at most {YAML_CHARACTERS})")
    sizes: dict[str, int] = {}
    inside: list[list[Any]] = []  # anchor and number of values of each collection around what is read
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            inside.append([event.anchor, 1])
            if len(inside) > YAML_DEPTH:
                raise ValueError(f"nested more than {YAML_DEPTH} deep")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = inside.pop()
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"*{event.anchor} names itself, or nothing")
            anchor, size = None, sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size = event.anchor, 1
        else:
            continue
        if anchor:
            sizes[anchor] = size
        if size > YAML_VALUES:
            raise ValueError(f"more than {YAML_VALUES} values once its aliases are followed")
        if inside:
            inside[-1][1] += size
