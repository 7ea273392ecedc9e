"""Readers for files from untrusted sources, which raise ValueError for a broken or malicious file and never run code.

Each reader converts all errors of its library to ValueError, and limits the memory and time that a small file can demand.
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
"""Built-in errors that libraries raise on broken files, in addition to their own error classes."""

YAML_CHARACTERS = 1 << 20
YAML_DEPTH = 50
YAML_VALUES = 100_000
"""Maximum number of characters, nesting depth and number of values of a YAML file.

The limits are far above those of any legitimate configuration, and far below those of a file that takes seconds to read.
"""

LARGEST_JSON = 1 << 27
"""Maximum size of a JSON file in bytes; parsed, it takes a multiple of this in memory."""

PACKED, NPY_HEADER = 20, 1 << 16
"""Maximum ratio of an unpacked array to the size of its archive, and maximum size of an array's header in bytes."""

DTYPES = (np.float16, np.float32, np.float64, np.uint8, np.uint16, np.uint32, np.int32, np.int64, np.bool_)
"""Dtypes of the arrays that are read."""


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, truncated to 200 characters.

    Unprintable characters become question marks. If the first line ends in a colon, the second line is appended. If the message
    is empty, the name of the error's class is returned.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return "".join(sign if sign.isprintable() else "?" for sign in text)[:200]


def check_size(path: Path, most: int) -> None:
    """Check that a file has at most ``most`` bytes.

    Raises:
        ValueError: if the file is larger. The message names the file and its size.
    """
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"{path} has {size} bytes, at most {most} are read; is it the right file?")


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Context manager that raises an error if its block takes too much processor time.

    The limit is enforced with the timer ``ITIMER_VIRTUAL``. There is no limit outside the main thread, or if other code uses
    this timer.

    Args:
        seconds: maximum processor time in seconds.
        what: plural subject of the error message. For example, "the loops of the template" gives the message "the loops of the
            template take more than 5 s".

    Raises:
        ValueError: if the block takes longer.
    """
    # Python runs signal handlers in the main thread only: elsewhere the error would be raised in unrelated code.
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return

    def stop(number: int, frame: object) -> NoReturn:
        raise ValueError(f"{what} take more than {seconds:g} s")

    previous_handler = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous_handler)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file does not contain a JSON object, or is larger than 128 MiB.
    """
    check_size(path, LARGEST_JSON)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON file ({reason(error)})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain a JSON object, not {type(content).__name__}")
    return content


def parse_array(data: bytes) -> np.ndarray:
    """Parse the content of an ``.npy`` file from an untrusted source.

    Args:
        data: complete content of the file, in the byte order of this machine. The dtype must be bool, int32, int64, uint8,
            uint16, uint32, float16, float32 or float64.

    Raises:
        ValueError: if the content is not a valid array, or if its length does not fit the shape and dtype in the header.
    """
    shape, dtype, start = parse_array_header(data)
    size, needed = len(data) - start, math.prod(shape) * dtype.itemsize
    if needed != size:
        raise ValueError(f"an array {list(shape)} of {dtype} needs {needed} bytes, but {size} follow")
    try:
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except BROKEN as error:
        raise ValueError(reason(error)) from error


def parse_array_header(data: bytes) -> tuple[tuple[int, ...], np.dtype, int]:
    """Parse the header of an ``.npy`` file.

    Args:
        data: beginning of the file, with at least the complete header.

    Returns:
        Shape, dtype, and offset in bytes of the first value.

    Raises:
        ValueError: if the header is invalid, or if the dtype is not bool, int32, int64, uint8, uint16, uint32, float16, float32
            or float64 in the byte order of this machine.
    """
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, _, dtype = read(stream)
    except BROKEN as error:
        raise ValueError(f"not a header of a NumPy array: {reason(error)}") from error
    if dtype not in DTYPES or any(type(length) is not int or not 0 <= length < 1 << 48 for length in shape):
        raise ValueError(f"{dtype} of shape {str(shape)[:60]} is not an array of plain numbers")
    return shape, dtype, stream.tell()


def read_yaml(path: Path) -> Any:
    """Read a YAML file, after a check that it is safe to parse.

    Returns:
        The parsed value, such as a dict, a list or a string; None for an empty file.

    Raises:
        ValueError: if the file cannot be read, or if it exceeds a limit on its length, its nesting or the number of its values.
    """
    try:
        with path.open(encoding="utf-8-sig") as stream:
            text = stream.read(YAML_CHARACTERS + 1)
        return parse_yaml(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read ({reason(error)})") from error


def parse_yaml(text: str, loader: Any = yaml.SafeLoader) -> Any:
    """Parse YAML text, after a check that it is safe to parse.

    Args:
        text: YAML text.
        loader: ``yaml.SafeLoader``, ``yaml.CSafeLoader`` or a subclass of one of them.

    Returns:
        The parsed value, such as a dict, a list or a string; None for an empty text.

    Raises:
        ValueError: if the text exceeds a limit of :func:`check_yaml`, or if a value does not fit its tag, as in ``!!bool 5``.
        yaml.YAMLError: if the text is not valid YAML.
    """
    check_yaml(text)
    try:
        return yaml.load(text, loader)
    except yaml.YAMLError:
        raise
    except BROKEN as error:
        raise ValueError(f"a value cannot be read: {reason(error)}") from error


def read_arrays(path: Path, most: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Read arrays of plain numbers from an ``.npz`` file.

    Args:
        path: path of the file.
        most: maximum size in bytes of each array to read, by name; other arrays are ignored. An array must also not be larger
            than 20 times the file, or 1 MiB if that is more.

    Returns:
        Arrays by name, without those that are not in the file.

    Raises:
        ValueError: if the file is damaged, if an array is too large, or if a header does not fit the size of its array.
        FileNotFoundError: if there is no such file.
        PermissionError: if the file may not be read.
    """
    arrays = {}
    try:
        with ZipFile(path) as archive:
            entries = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            limit = max(PACKED * path.stat().st_size, 1 << 20)
            for name in most.keys() & entries.keys():
                size = entries[name].file_size  # as the archive states it; zipfile never unpacks more than this
                if size > min(most[name], limit):
                    raise ValueError(
                        f"{name} has {size} bytes in a file of {path.stat().st_size} bytes, which is more than is read"
                    )
                with archive.open(entries[name]) as stream:
                    shape, dtype, start = parse_array_header(stream.read(NPY_HEADER))
                if math.prod(shape) * dtype.itemsize != size - start:
                    raise ValueError(f"{name} {list(shape)} {dtype} does not fill {size - start} bytes")
                with archive.open(entries[name]) as stream:
                    arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
    except (BadZipFile, zlib.error, NotImplementedError, OSError, *BROKEN) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(f"{path} is not an .npz that can be read safely ({reason(error)})") from error
    return arrays


def check_yaml(text: str) -> None:
    """Check that a YAML text is safe to parse: limited in length, in nesting, and in values once aliases are expanded.

    Raises:
        ValueError: if the text has more than 2**20 characters, 50 levels of nesting or 100,000 values, or if an alias refers to
            itself or to an unknown anchor.
    """
    if len(text) > YAML_CHARACTERS:
        raise ValueError(f"{len(text)} characters are too many for a configuration (at most {YAML_CHARACTERS})")
    sizes: dict[str, int] = {}
    open_collections: list[list[Any]] = []  # anchor and number of values of each collection around the current event
    # Events are read without building values, so that an alias costs nothing; each alias counts the values of its anchor.
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            open_collections.append([event.anchor, 1])
            if len(open_collections) > YAML_DEPTH:
                raise ValueError(f"collections are nested more than {YAML_DEPTH} deep")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_collections.pop()
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"alias *{event.anchor} refers to itself or to an unknown anchor")
            anchor, size = None, sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size = event.anchor, 1
        else:
            continue
        if anchor:
            sizes[anchor] = size
        if size > YAML_VALUES:
            raise ValueError(f"more than {YAML_VALUES} values after its aliases are expanded")
        if open_collections:
            open_collections[-1][1] += size
