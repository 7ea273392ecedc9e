"""Files behind URLs: which are opened, where they are kept, and downloads that outlast a failing server."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from mhla_kernels.own_files import check_own

from lightning_mhla.data.source import ShardUnavailableError
from lightning_mhla.system.untrusted import reason

log = logging.getLogger(__name__)

SCHEMES = ("http", "https", "s3", "gs", "hf")
"""Remote locations that shards may come from; everything else but a plain path is rejected, ``pipe:`` above all."""

HTTP = ("http", "https")

ATTEMPTS, FIRST_ATTEMPTS = 8, 4
"""Attempts in a row that may bring nothing before a download fails, in training and at the start."""

PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds after the first attempt, each further one twice as long, and at most."""

SILENCE = 60
"""Seconds without a byte after which an attempt has failed."""

CHUNK = 1 << 23
"""Bytes of one read."""

ABSENT, PASSING = (401, 403, 404, 410), (408, 429)
"""HTTP's words for a file that is not there, or not for us, and for a server that is busy."""

LARGEST_SIDE_FILE = 1 << 26
"""Bytes of a file beside the shards."""

SIDE_FILES = ("manifest.json", "empty-caption.npy", "classes.txt")
"""Files shared by all shards of a prefix, see :func:`lightning_mhla.data.shards.beside_shard`."""


class DownloadStoppedError(Exception):
    """A download was given up because nobody wants it any more."""


def url_scheme(name: str) -> str | None:
    """The scheme of a URL; None for a local path.

    Raises:
        ValueError: for a scheme that is not allowed.
    """
    match = re.match(r"^([A-Za-z][A-Za-z0-9+.-]+):", name)
    if match is None:
        return None
    if match[1] not in SCHEMES or not name.startswith(f"{match[1]}://"):
        raise ValueError(
            f"{name!r}: shards come from a local path or one of {', '.join(SCHEMES)}; nothing else is opened"
        )
    return match[1]


def kept_at(url: str, folder: Path) -> Path:
    """Where a shard behind a URL is kept, always as ``.tar``; those of one remote folder lie together, if it has no query."""
    address, _, query = url.partition("?")
    parent, _, name = address.rpartition("/")
    digest = hashlib.sha256(f"{parent}?{query}".encode()).hexdigest()[:16]
    return folder / digest / (name if name.endswith(".tar") else f"{name}.tar")


def is_kept_folder(name: str) -> bool:
    """Whether a folder has a name that :func:`kept_at` gives."""
    return re.fullmatch(r"[0-9a-f]{16}", name) is not None


def remote_size(url: str) -> int:
    """Bytes of a remote file.

    Raises:
        FileNotFoundError: when there is no such file.
        ShardUnavailableError: when the server does not answer, or does not say.
    """
    failures = 0
    while True:
        try:
            system, path = _system(url)
            size = system.info(path).get("size")
            break
        except Exception as error:
            failures += 1
            _wait(url, error, failures, FIRST_ATTEMPTS, None)
    if not isinstance(size, int) or size <= 0:
        raise ShardUnavailableError(f"{url}: the server does not say how many bytes it has, which cache_bytes needs")
    return size


def download(
    url: str, sink: BinaryIO, most: int, stop: threading.Event | None = None, attempts: int = ATTEMPTS
) -> None:
    """Write a remote file into ``sink``, from where it was cut where the server knows ranges.

    Args:
        url: the file.
        sink: written from its start on.
        most: number of bytes that it may have.
        stop: once set, the download is given up.
        attempts: in a row that may bring nothing.

    Raises:
        FileNotFoundError: when there is no such file.
        ShardUnavailableError: when the server failed that often, or the file is larger.
        DownloadStoppedError: when ``stop`` was set.
    """
    failures = furthest = 0
    while True:
        try:
            system, path = _system(url)
            whole = sink.tell() == 0 and url_scheme(url) in HTTP  # in one request, which any server answers
            with system.open(path, "rb", block_size=0 if whole else CHUNK, cache_type="none") as source:
                try:
                    if sink.tell():
                        source.seek(sink.tell())
                    while chunk := source.read(CHUNK):
                        if sink.tell() + len(chunk) > most:
                            raise ShardUnavailableError(f"{url} has more than the {most} bytes that are expected")
                        sink.write(chunk)
                        if stop is not None and stop.is_set():
                            raise DownloadStoppedError(url)
                except ValueError:  # the server gives no parts of files
                    sink.seek(0)
                    raise
            expected = getattr(source, "size", None)
            if isinstance(expected, int) and sink.tell() < expected:
                raise EOFError(f"the connection ended after {sink.tell()} of {expected} bytes")
            return
        except (DownloadStoppedError, ShardUnavailableError):
            raise
        except Exception as error:
            failures = 1 if sink.tell() > furthest else failures + 1
            furthest = max(furthest, sink.tell())
            _wait(url, error, failures, attempts, stop)


def side_files(urls: Sequence[str], folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Path and content of what belongs to all shards of a prefix, where the server has it and it is not in ``folder``.

    Raises:
        ForeignFileError: when somebody else put one into ``folder``.
    """
    shards = [url.rpartition("/") for url in urls if "?" not in url]
    for parent, prefix in sorted({(parent, name.rpartition("-")[0]) for parent, _, name in shards if "-" in name}):
        for name in SIDE_FILES:
            url, content = f"{parent}/{prefix}-{name}", io.BytesIO()
            target = kept_at(f"{parent}/{prefix}.tar", folder).with_name(f"{prefix}-{name}")
            if os.path.lexists(target):
                check_own(target)
            else:
                with suppress(FileNotFoundError):
                    download(url, content, LARGEST_SIDE_FILE, attempts=FIRST_ATTEMPTS)
                    yield target, content.getvalue()


def _system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    options: dict[str, Any] = {}
    if url_scheme(url) in HTTP:
        from aiohttp import ClientTimeout  # its own limit of five minutes cuts large shards

        options["client_kwargs"] = {"timeout": ClientTimeout(total=None, sock_connect=30, sock_read=SILENCE)}
    system, path = fsspec.core.url_to_fs(url, **options)
    return system, path


def _wait(url: str, error: Exception, failures: int, attempts: int, stop: threading.Event | None) -> None:
    """Pause after a failure, or raise what a person should read."""
    while isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec's words for any failure of a server
    status = getattr(error, "status", None)
    if isinstance(error, FileNotFoundError | PermissionError) or status in ABSENT:
        raise FileNotFoundError(f"{url} does not exist, or may not be read ({reason(error)})") from error
    if isinstance(error, ImportError):
        raise error
    refused = isinstance(status, int) and 400 <= status < 500 and status not in PASSING
    if refused or failures >= attempts:
        tries = "" if refused else f" after {failures} attempts"
        raise ShardUnavailableError(
            f"{url} cannot be read{tries} ({type(error).__name__}: {reason(error)}); the run resumes from its last "
            "checkpoint once the server answers"
        ) from error
    pause = min(LONGEST_PAUSE, PAUSE * 2 ** (failures - 1))
    log.warning("%s: %s; attempt %d of %d in %.1f s", url, reason(error), failures + 1, attempts, pause)
    if stop is None:
        time.sleep(pause)
    elif stop.wait(pause):
        raise DownloadStoppedError(url)
