"""Resumable downloads of remote files, with rules for permitted URLs and local paths."""

# Longer than other modules because it handles the failures of several network libraries.

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from mhla_kernels.own_files import check_own

from lightning_mhla.data.source import BrokenContentError, LargerFileError, ShardUnavailableError
from lightning_mhla.system.redaction import check_secrets
from lightning_mhla.system.untrusted import reason

log = logging.getLogger(__name__)

SCHEMES = ("http", "https", "s3", "gs", "hf")
"""Schemes of permitted URLs. All others are rejected, above all ``pipe:``."""

HTTP = ("http", "https")

ATTEMPTS, FIRST_ATTEMPTS = 8, 4
"""Number of consecutive attempts without progress before a download fails: by default, and for class lists and file sizes."""

PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Pause in seconds after the first failed attempt, which doubles after each further failure, and longest pause in seconds."""

SILENCE = 60
"""Seconds without a byte after which an attempt fails."""

CHUNK = 1 << 23
"""Number of bytes of one read."""

PROGRESS = 1 << 16
"""Number of bytes per attempt, and per :data:`SILENCE` seconds, that count as progress."""

ABSENT, PASSING, NEVER, RANGE_OUTSIDE = (401, 403, 404, 410), (408, 429), (501, 505), 416
"""HTTP statuses: file missing or forbidden; temporary client errors; permanent server errors; range beyond the file's end."""

CUT = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""TLS errors of an interrupted connection, which are worth another attempt, unlike those of an untrusted one."""

INNER = ("os_error", "certificate_error", "reason")
"""Attributes in which errors of aiohttp and urllib3 store their cause."""

LARGEST_SIDE_FILE = 1 << 26
"""Maximum size of a file beside the shards, in bytes."""

SIDE_FILES = ("manifest.json", "empty-caption.npy", "classes.txt")
"""Name endings of files shared by all shards of a prefix, see :func:`lightning_mhla.data.shards.beside_shard`."""


class DownloadStoppedError(Exception):
    """Raised when a download is canceled because the file is no longer needed."""


def url_scheme(name: str) -> str | None:
    """Return the scheme of a URL, such as ``"https"``; None for a local path.

    Raises:
        ValueError: if the scheme is not http, https, s3, gs or hf, or if the URL has ``***`` in place of a secret, as in
            saved options.
    """
    match = re.match(r"^([A-Za-z][A-Za-z0-9+.-]+):", name)
    if match is None:
        return None
    if match[1] not in SCHEMES or not name.startswith(f"{match[1]}://"):
        raise ValueError(
            f"{name!r}: shards come from a local path or one of {', '.join(SCHEMES)}; nothing else is opened (for a file whose "
            f"name has a colon, write ./{name})"
        )
    check_secrets(name)
    return match[1]


def kept_at(url: str, folder: Path) -> Path:
    """Return the local path at which a downloaded shard is stored; the path always ends in ``.tar``.

    Shards from the same remote folder, with the same query string, share one local folder.

    Args:
        url: URL of the shard.
        folder: root folder of all downloads.
    """
    address, _, query = url.partition("?")
    parent, _, name = address.rpartition("/")
    parent = re.sub(r"://[^/]*@", "://", parent)  # the path must not depend on a password
    digest = hashlib.sha256(f"{parent}?{query}".encode()).hexdigest()[:16]
    return folder / digest / (name if name.endswith(".tar") else f"{name}.tar")


def is_kept_folder(name: str) -> bool:
    """Return whether a name consists of 16 hexadecimal digits, like the names of folders for downloaded shards."""
    return re.fullmatch(r"[0-9a-f]{16}", name) is not None


def remote_size(url: str) -> int:
    """Ask a server for the size of a remote file, and return it in bytes.

    Raises:
        FileNotFoundError: if the file does not exist on the server.
        ShardUnavailableError: if the server does not answer, or does not report the size.
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
        raise ShardUnavailableError(f"{url}: the server does not report its size, which cache_bytes needs")
    return size


@dataclass(frozen=True)
class Version:
    """Version of a remote file as its server reports it. A download resumes only if the version is unchanged.

    Attributes:
        tag: entity tag (ETag) of an HTTP server, or fsspec's key for the version on other servers; None if unknown.
        written: time of the last change, as text in the server's format; None if unknown.
        size: size of the complete file in bytes; None if unknown.
    """

    tag: str | None = None
    written: str | None = None
    size: int | None = None

    def differs(self, later: Version) -> bool:
        """Return whether this version differs from ``later`` in an attribute that is known for both."""
        pairs = ((self.tag, later.tag), (self.written, later.written), (self.size, later.size))
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)

    def condition(self) -> dict[str, str]:
        """Return an ``If-Range`` header, with which a server sends the rest of a file only if this version is still current.

        The result is an empty dict if the server reported neither a strong ETag nor a modification time.
        """
        strong = None if self.tag is None or self.tag.startswith("W/") else self.tag
        mark = strong or self.written
        return {"If-Range": mark} if mark else {}


class Download:
    """Download of one file in several attempts.

    Each attempt continues where the previous one ended, unless the file on the server has changed.

    Args:
        url: URL of the file.
        sink: seekable stream to write the file to, from the beginning.
        most: maximum size of the file in bytes. A larger file is an error.
        stop: event that cancels the download; None if nothing cancels it.
        make_check: function that is called whenever the download starts from the beginning, and creates a check of the content.
            The check is a function that receives the pieces of the file in order, and raises BrokenContentError for wrong
            content. None for no check.
    """

    def __init__(
        self,
        url: str,
        sink: BinaryIO,
        most: int,
        stop: threading.Event | None = None,
        make_check: Callable[[], Callable[[bytes], None]] | None = None,
    ) -> None:
        self.url, self.sink, self.most, self.stop = url, sink, most, stop
        self.make_check = make_check or (lambda: lambda data: None)
        self.restart()

    def restart(self) -> None:
        """Discard the part of the file received so far, so that the next attempt starts from the beginning."""
        self.sink.seek(0)
        self.version, self.check = Version(), self.make_check()

    def attempt(self) -> None:
        """Try once to download the rest of the file, starting after the part that was already received.

        Raises:
            ShardUnavailableError: if the file is larger than ``most`` bytes, or writing it to ``sink`` fails.
            BrokenContentError: if the check that ``make_check`` created rejects the content.
            DownloadStoppedError: if the download is canceled.
            Exception: if the attempt fails for any other reason. The type depends on the network library.
        """
        system, path = _system(self.url)
        if url_scheme(self.url) in HTTP:
            self._attempt_http(system, path)
        else:
            self._attempt_other(system, path)
        if self.version.size is not None and self.sink.tell() < self.version.size:
            raise EOFError(f"the connection ended after {self.sink.tell()} of {self.version.size} bytes")
        self.sink.truncate()  # drop the rest of an earlier, longer version

    def _attempt_http(self, system: Any, path: str) -> None:
        start = self.sink.tell()
        headers = {"Accept-Encoding": "identity"}  # offsets in ranges refer to the encoded content
        if start:
            headers |= {"Range": f"bytes={start}-", **self.version.condition()}
        # any size but 0 avoids an extra request for the size, which the response contains
        with system.open(path, "rb", block_size=0, size=1, headers=headers) as source:
            answer = source.r
            encoded = answer.headers.get("Content-Encoding", "identity") not in ("", "identity")
            version, first = _described(answer, encoded)
            if first != start or self.version.differs(version):
                self.restart()
                if first:
                    raise EOFError("the file has changed on the server, or it sends a different part; starting over")
            self.version = version
            try:
                self._copy(source)
            except BaseException:
                if encoded:  # the number of decoded bytes is not an offset to resume at
                    self.restart()
                raise

    def _attempt_other(self, system: Any, path: str) -> None:
        start = self.sink.tell()
        # fsspec caches listings, and with them the size and version of the previous attempt.
        if start:
            system.invalidate_cache()
        version = Version(tag=str(system.ukey(path)), size=system.info(path).get("size"))
        if self.version.differs(version):
            self.restart()
        self.version = version
        # Files are read once from start to end, so a block cache would only copy.
        with system.open(path, "rb", block_size=CHUNK, cache_type="none") as source:
            if self.sink.tell():
                source.seek(self.sink.tell())
            self._copy(source)

    def _copy(self, source: Any) -> None:
        begun, brought = time.monotonic(), 0
        while chunk := source.read(CHUNK):
            if self.sink.tell() + len(chunk) > self.most:
                raise LargerFileError(f"{self.url} has more than the expected {self.most} bytes")
            self.check(chunk)
            try:
                self.sink.write(chunk)
            except OSError as error:  # an error of the local disk, which another attempt does not fix
                raise ShardUnavailableError(f"{self.url} cannot be stored ({reason(error)})") from error
            if self.stop is not None and self.stop.is_set():
                raise DownloadStoppedError(self.url)
            brought += len(chunk)
            if time.monotonic() - begun > SILENCE:
                if brought < PROGRESS:
                    raise TimeoutError(f"only {brought} bytes arrived in {SILENCE} s")
                begun, brought = time.monotonic(), 0


def _described(answer: Any, encoded: bool) -> tuple[Version, int]:
    """Read the version of a file, and the position in the file at which a response starts, from HTTP response headers.

    Args:
        answer: response object of the aiohttp library.
        encoded: whether the response is compressed, so that its length is not the size of the file.

    Returns:
        Version of the file, and position in bytes; -1 if the headers state no valid position.

    Raises:
        ShardUnavailableError: if the HTTP status is neither 200 nor 206.
    """
    if answer.status not in (200, 206):
        raise ShardUnavailableError(f"{answer.url} does not send a file (status {answer.status})")
    size, first = answer.content_length, 0
    if answer.status == 206:
        content_range = re.fullmatch(
            r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)", answer.headers.get("Content-Range", "")
        )
        first = -1 if content_range is None else int(content_range[1])
        size = None if content_range is None or content_range[2] == "*" else int(content_range[2])
    return Version(answer.headers.get("ETag"), answer.headers.get("Last-Modified"), None if encoded else size), first


def download(
    url: str,
    sink: BinaryIO,
    most: int,
    stop: threading.Event | None = None,
    attempts: int = ATTEMPTS,
    make_check: Callable[[], Callable[[bytes], None]] | None = None,
) -> None:
    """Download a remote file. After a failure, continue the download if the file on the server is unchanged.

    Args:
        url: URL of the file.
        sink: seekable stream to write the file to, from the beginning.
        most: maximum size of the file in bytes. A larger file is an error.
        stop: event that cancels the download; None if nothing cancels it.
        attempts: number of consecutive failures after which the download fails. An attempt that received at least 64 KiB
            restarts this count.
        make_check: function that is called whenever the download starts from the beginning, and creates a check of the content.
            The check is a function that receives the pieces of the file in order, and raises BrokenContentError for wrong
            content. None for no check.

    Raises:
        FileNotFoundError: if the file does not exist on the server.
        ShardUnavailableError: if too many attempts fail, or the file is too large.
        BrokenContentError: if the check rejects the content.
        DownloadStoppedError: if ``stop`` is set.
    """
    parts = Download(url, sink, most, stop, make_check)
    failures = furthest = 0
    while True:
        try:
            return parts.attempt()
        except (DownloadStoppedError, ShardUnavailableError, BrokenContentError):
            raise
        except Exception as error:
            if _status(error) == RANGE_OUTSIDE and sink.tell():
                parts.restart()  # the file is shorter than it was
                error = EOFError("the file has changed on the server; starting over")
            # An attempt with progress restarts the count, so that a long download survives any number of interruptions.
            failures = 1 if sink.tell() >= furthest + PROGRESS else failures + 1
            furthest = max(furthest, sink.tell())
            _wait(url, error, failures, attempts, stop)


def side_files(urls: Sequence[str], folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Download the small files that accompany remote shards, such as lists of class names, unless they exist locally.

    Files that do not exist on the server are skipped.

    Args:
        urls: URLs of the shards. Shards whose URL has a query string are ignored.
        folder: root folder of all downloads.

    Yields:
        Local path at which to store a downloaded file, and its content.

    Raises:
        ForeignFileError: if a local file at such a path belongs to a different user.
        ShardUnavailableError: if a download fails.
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
    """Return the fsspec file system for a URL, and the path of the file within this file system."""
    options: dict[str, Any] = {}
    if url_scheme(url) in HTTP:
        from aiohttp import ClientTimeout  # its own limit of five minutes cuts large shards

        options["client_kwargs"] = {"timeout": ClientTimeout(total=None, sock_connect=30, sock_read=SILENCE)}
    system, path = fsspec.core.url_to_fs(url, **options)
    return system, path


def _wait(url: str, error: Exception, failures: int, attempts: int, stop: threading.Event | None) -> None:
    """Wait before the next attempt of a failed download, or raise an error if another attempt is pointless.

    Args:
        url: URL of the file.
        error: exception that ended the failed attempt.
        failures: number of consecutive failures so far.
        attempts: number of consecutive failures after which the download fails.
        stop: event that ends the wait and cancels the download; None if nothing cancels it.

    Raises:
        FileNotFoundError: if the file does not exist, or may not be read.
        ShardUnavailableError: if no attempt is left, or another one would fail in the same way.
        DownloadStoppedError: if ``stop`` is set.
    """
    error = _root(error)
    status = _status(error)
    if isinstance(error, FileNotFoundError | PermissionError) or status in ABSENT:
        raise FileNotFoundError(f"{url} does not exist, or may not be read ({reason(error)})") from error
    if isinstance(error, ImportError):
        raise error
    lasting = _is_lasting(error)
    if lasting or failures >= attempts:
        tries = "" if lasting else f" after {failures} attempts"
        way_out = "check the address" if lasting else "the run resumes from its last checkpoint once the server answers"
        raise ShardUnavailableError(
            f"{url} cannot be read{tries} ({type(error).__name__}: {reason(error)}); {way_out}"
        ) from error
    pause = min(LONGEST_PAUSE, PAUSE * 2 ** (failures - 1))
    log.warning("%s: %s; attempt %d of %d in %.1f s", url, reason(error), failures + 1, attempts, pause)
    if stop is None:
        time.sleep(pause)
    elif stop.wait(pause):
        raise DownloadStoppedError(url)


def _root(error: Exception) -> Exception:
    """Return the error that fsspec has wrapped in a FileNotFoundError, or ``error`` itself if it wraps no other error."""
    while isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _status(error: Exception) -> int | None:
    """Return the HTTP status code that an error of a network library contains; None if it contains none."""
    error = _root(error)
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _is_lasting(error: Exception) -> bool:
    """Return whether a failure is permanent, such as a rejected request, an unknown host or an invalid certificate."""
    from aiohttp import InvalidURL, NonHttpUrlClientError, RedirectClientError, TooManyRedirects

    status = _status(error)
    if status is not None and (400 <= status < 500 or status in NEVER) and status not in PASSING:
        return True
    for cause in _causes(error):
        if isinstance(cause, InvalidURL | NonHttpUrlClientError | RedirectClientError | TooManyRedirects):
            return True
        if isinstance(cause, socket.gaierror):
            # EAI_AGAIN means that the name server did not answer; other errors mean that the name is unknown.
            return cause.errno != socket.EAI_AGAIN
        if isinstance(cause, ssl.SSLError):
            return not isinstance(cause, CUT)
    return False


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Iterate over an error and all errors that caused it, directly or indirectly.

    Network libraries store some causes in the arguments or attributes of an error, which are searched too.
    """
    waiting, seen = [error], set[int]()
    while waiting:
        cause = waiting.pop()
        if id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            inner = (cause.__cause__, cause.__context__, *(getattr(cause, name, None) for name in INNER), *cause.args)
            waiting += [cause for cause in inner if isinstance(cause, BaseException)]
