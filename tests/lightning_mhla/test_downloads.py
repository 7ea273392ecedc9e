"""Downloads: one content of a file and never parts of two, bodies without end, and no attempt that cannot help."""

from __future__ import annotations

import gzip
import io
import os
import socket
import ssl
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from lightning_mhla.data import ShardReader, ShardUnavailableError, find_shards, remote
from lightning_mhla.data.cache import ShardCache
from lightning_mhla.data.remote import PROGRESS, download
from lightning_mhla.data.source import BrokenContentError
from lightning_mhla.data.tables import TarCheck, scan_shard


def shard(sign: str, count: int = 40, first: str = "cls") -> bytes:
    """Build a shard whose members consist of one repeated character."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for number in range(count):
            for kind in sorted(("cls", "txt"), key=lambda kind: kind != first):
                info = tarfile.TarInfo(f"{number:04d}.{kind}")
                info.size = 10_000
                tar.addfile(info, io.BytesIO(sign.encode() * info.size))
    return stream.getvalue()


A, B, LONGER = shard("a"), shard("b"), shard("c", 50)


class Answers(ThreadingHTTPServer):
    """Server that answers each request with the next function of a list, and all further ones with the last."""

    daemon_threads = True

    def __init__(self, *answers: Callable[[Any], None]) -> None:
        self.answers, self.asked = answers, 0
        self.headers: list[dict[str, str]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/t-00000.tar"

    def handle_error(self, *_: Any) -> None:
        """Do not report clients that have closed their connection."""


class _Handler(BaseHTTPRequestHandler):
    server: Answers
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if not self.path.split("?")[0].endswith(".tar"):
            self.send_error(404)
            return
        self.server.headers.append(dict(self.headers))
        answer = self.server.answers[min(self.server.asked, len(self.server.answers) - 1)]
        self.server.asked += 1
        answer(self)


def sends(
    data: bytes,
    cut: int | None = None,
    ranges: bool = True,
    obeys: bool = True,
    status: int | None = None,
    until: Callable[[], bool] = lambda: True,
    **marks: str,
) -> Callable[[Any], None]:
    """Sends a file, or the part that is asked for.

    Args:
        data: the file.
        cut: bytes after which the connection ends.
        ranges: whether parts are sent.
        obeys: whether ``If-Range`` is obeyed.
        status: of the answer; None for what is right.
        until: what the server waits for before it ends the connection.
        marks: headers, with ``_`` for ``-``.
    """

    def answer(handler: Any) -> None:
        asked, condition = handler.headers.get("Range") if ranges else None, handler.headers.get("If-Range")
        if asked and obeys and condition and condition not in marks.values():
            asked = None
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        outside = start >= len(data)
        handler.send_response(status or (416 if outside else 206 if asked else 200))
        body = b"" if outside else data[start:]
        if asked and not outside:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        for name, value in marks.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body if cut is None else body[:cut])
        handler.wfile.flush()
        end = time.monotonic() + 20
        while not until() and time.monotonic() < end:
            time.sleep(0.001)
        handler.close_connection = cut is not None

    return answer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE", 0.001)
    monkeypatch.setattr(remote, "LONGEST_PAUSE", 0.01)


@pytest.fixture
def serve() -> Iterator[Callable[..., Answers]]:
    started: list[tuple[Answers, threading.Thread]] = []

    def start(*answers: Callable[[Any], None]) -> Answers:
        server = Answers(*answers)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        started.append((server, thread))
        return server

    yield start
    for server, thread in started:
        server.shutdown()
        thread.join()
        server.server_close()


def fetched(url: str) -> bytes:
    sink = io.BytesIO()
    download(url, sink, 1 << 24)
    return sink.getvalue()


HALF = len(A) // 2
DAY, NEXT = "Wed, 25 Nov 2026 10:30:00 GMT", "Wed, 25 Nov 2026 10:31:00 GMT"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (sends(A, HALF, ETag='"a"'), sends(B, ETag='"b"')),
        (sends(A, HALF, ETag='"a"'), sends(B, obeys=False, ETag='"b"')),
        (sends(A, HALF, ETag='W/"a"'), sends(B, ETag='W/"b"')),
        (sends(A, HALF, Last_Modified=DAY), sends(B, Last_Modified=NEXT)),
        (sends(A, HALF, Last_Modified=DAY), sends(B, obeys=False, Last_Modified=NEXT)),
        (sends(A, HALF, ETag='"a"'), sends(B, ranges=False)),
        (sends(LONGER, HALF), sends(B)),
        (sends(A, HALF), sends(LONGER)),
        (sends(LONGER, len(B) + 1000, ETag='"a"'), sends(B, obeys=False, ETag='"b"')),
    ],
    ids=[
        "ETag", "ETag, disobeyed", "weak ETag", "time", "time, disobeyed", "no ranges", "shorter", "longer", "outside",
    ],
)  # fmt: skip
def test_two_contents_are_never_mixed(first: Any, then: Any, serve: Callable[..., Answers]) -> None:
    data = fetched(serve(first, then).url)
    assert data in (B, LONGER)


@pytest.mark.parametrize("marks", [{"ETag": '"a"'}, {"ETag": 'W/"a"'}, {"Last_Modified": DAY}, {}])
def test_the_same_content_goes_on_where_it_was_cut(marks: dict[str, str], serve: Callable[..., Answers]) -> None:
    sink = io.BytesIO()
    server = serve(sends(A, HALF, until=lambda: sink.tell() > 0, **marks), sends(A, **marks))
    download(server.url, sink, 1 << 24)
    assert sink.getvalue() == A
    assert server.asked == 2
    assert 0 < int(server.headers[1]["Range"].removeprefix("bytes=").removesuffix("-")) <= HALF
    expected = None if not marks or "W/" in marks.get("ETag", "") else next(iter(marks.values()))
    assert server.headers[1].get("If-Range") == expected


def test_a_server_whose_content_changes_each_time_is_given_up(serve: Callable[..., Answers]) -> None:
    server = serve(*(sends(A, HALF, ETag=f'"{number}"') for number in range(99)))
    with pytest.raises(ShardUnavailableError, match="cannot be read after 8 attempts"):
        fetched(server.url)
    assert server.asked < 30


def test_a_byte_more_with_each_attempt_is_no_progress(serve: Callable[..., Answers]) -> None:
    server = serve(sends(A, 1, ETag='"a"'))
    with pytest.raises(ShardUnavailableError, match="after 8 attempts"):
        fetched(server.url)
    assert server.asked == 8


def test_a_body_that_trickles_is_an_attempt_that_failed(serve: Callable[..., Answers], monkeypatch: Any) -> None:
    monkeypatch.setattr(remote, "SILENCE", 0.05)

    def trickle(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(A)))
        handler.end_headers()
        for number in range(len(A)):
            handler.wfile.write(A[number : number + 1])
            time.sleep(0.01)

    with pytest.raises(ShardUnavailableError, match=r"after 2 attempts \(TimeoutError: only \d+ bytes arrived in"):
        download(serve(trickle).url, io.BytesIO(), 1 << 24, attempts=2)


def packed(handler: Any, data: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def endless(start: bytes) -> Callable[[Any], None]:
    def answer(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(start)
        piece = bytes(1 << 20)
        while True:
            handler.wfile.write(piece)

    return answer


def test_a_body_that_is_packed_all_the_same_is_unpacked(serve: Callable[..., Answers], tmp_path: Path) -> None:
    data = gzip.compress(A)

    def cut(handler: Any) -> None:
        packed(handler, data[:100])
        handler.close_connection = True

    server = serve(lambda handler: packed(handler, data))
    assert find_shards(server.url, tmp_path)[0].read_bytes() == A
    assert server.headers[0]["Accept-Encoding"] == "identity"


MEMBER = tarfile.TarInfo("a.cls").tobuf(tarfile.USTAR_FORMAT)
PAX = tarfile.TarInfo("x")
PAX.type, PAX.size = tarfile.XHDTYPE, 100 << 20


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (endless(b""), "zeros in place of a member"),
        (endless(MEMBER), "zeros in place of a member"),
        (endless(MEMBER + bytes(1024) + b"x"), "data follows its end"),
        (endless(PAX.tobuf(tarfile.USTAR_FORMAT)), "a header of 104857600 bytes"),
        (endless(b"<html>" + b" " * 1000), "is not a complete tar file"),
        (lambda handler: packed(handler, gzip.compress(bytes(200 << 20), 1)), "zeros in place of a member"),
    ],
    ids=["zeros", "zeros after a member", "something after the end", "PAX", "a page", "gzip"],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_body_without_end_is_an_error_at_once(
    answer: Any, message: str, streamed: bool, serve: Callable[..., Answers], tmp_path: Path, monkeypatch: Any
) -> None:
    server = serve(answer)
    monkeypatch.setattr("lightning_mhla.data.cache.remote_size", lambda url: 1 << 30)
    cache = ShardCache(tmp_path, 1 << 32)
    read = (
        (lambda: cache.fetch(cache.add([server.url])[0])) if streamed else (lambda: find_shards(server.url, tmp_path))
    )
    with pytest.raises(BrokenContentError, match=rf"t-00000\.tar .*{message}"):
        read()
    assert server.asked == 1
    assert not [path for path in tmp_path.rglob("*.tar*") if path.is_file()]


def test_a_check_of_headers_knows_every_shard(tmp_path: Path) -> None:
    names = ["a.cls", f"{'long/' * 40}a.cls", "é.cls", "dir/"]
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path = tmp_path / f"{kind}.tar"
        with tarfile.open(path, "w", format=kind) as tar:
            for name in names:
                info = tarfile.TarInfo(name)
                info.type, info.size = (tarfile.DIRTYPE, 0) if name.endswith("/") else (tarfile.REGTYPE, 700)
                tar.addfile(info, io.BytesIO(bytes(info.size)))
        data = path.read_bytes()
        for step in (1000, len(data)):
            check = TarCheck("a")
            for start in range(0, len(data), step):
                check(data[start : start + step])
        assert len(scan_shard(path).keys) == 3
    tarfile.open(tmp_path / "empty.tar", "w").close()  # a shard whose samples are all broken has none
    TarCheck("a")((tmp_path / "empty.tar").read_bytes())
    assert len(scan_shard(tmp_path / "empty.tar").keys) == 0


def test_a_member_of_many_gigabytes_is_followed() -> None:
    info = tarfile.TarInfo("a.txt")
    info.size = 9 << 30
    check = TarCheck("a")
    check(info.tobuf(tarfile.PAX_FORMAT))
    assert check._left == 9 << 30


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 410, 418, 451, 501, 505])
def test_a_rejected_request_is_not_repeated(status: int, serve: Callable[..., Answers], tmp_path: Path) -> None:
    server = serve(sends(b"", status=status))
    with pytest.raises((ShardUnavailableError, FileNotFoundError), match=r"t-00000\.tar"):
        find_shards(server.url, tmp_path)
    assert server.asked == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again(status: int, serve: Callable[..., Answers]) -> None:
    server = serve(sends(b"", status=status), sends(A))
    assert fetched(server.url) == A


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "ftp://127.0.0.1/a.tar", "/t-00000.tar", "http://[", "gopher:x"]
)
def test_redirections_that_lead_nowhere_are_not_repeated(target: str, serve: Callable[..., Answers]) -> None:
    def answer(handler: Any) -> None:
        handler.send_response(302)
        handler.send_header("Location", target)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    server = serve(answer)
    with pytest.raises(ShardUnavailableError, match="check the address"):
        fetched(server.url)
    assert server.asked <= 12, "aiohttp follows ten"


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "lasting"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), True),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), False),
        (ssl.SSLCertVerificationError("certificate verify failed: self-signed certificate"), True),
        (ssl.SSLError("[SSL: WRONG_VERSION_NUMBER] wrong version number"), True),
        (ssl.SSLEOFError("EOF occurred in violation of protocol"), False),
        (ConnectionResetError("reset"), False),
        (ConnectionError(socket.gaierror(socket.EAI_NONAME, "unknown")), True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_unknown_hosts_and_certificates_are_not_asked_again(error: Exception, lasting: bool, monkeypatch: Any) -> None:
    asked = []

    def fail(url: str) -> Any:
        asked.append(url)
        raise raised(FileNotFoundError(url), raised(OSError("cannot connect"), error))

    monkeypatch.setattr(remote, "_system", fail)
    with pytest.raises(ShardUnavailableError, match="check the address" if lasting else "after 8 attempts"):
        fetched("https://example.invalid/a.tar")
    assert len(asked) == (1 if lasting else 8)


def test_a_server_without_tls_is_not_asked_again(
    serve: Callable[..., Answers], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ShardUnavailableError, match=r"t-00000\.tar cannot be read \(.*SSL.*check the address"):
        fetched(serve(sends(A)).url.replace("http:", "https:"))
    assert "attempt 2" not in caplog.text


def test_a_disk_that_is_full_is_not_filled_again(serve: Callable[..., Answers]) -> None:
    server = serve(sends(A))
    with open("/dev/full", "wb", buffering=0) as sink, pytest.raises(ShardUnavailableError, match="cannot be stored"):
        download(server.url, _Full(sink), 1 << 24)  # type: ignore[arg-type]
    assert server.asked == 1


class _Full:
    def __init__(self, sink: Any) -> None:
        self.sink, self.write = sink, sink.write

    def tell(self) -> int:
        return 0

    def seek(self, place: int) -> None:
        pass


def test_other_stores_are_not_mixed_either(monkeypatch: Any) -> None:
    """A file system like S3's: parts by range, and a mark of the content."""
    system = fsspec.filesystem("memory")
    system.pipe_file("/a.tar", A)
    monkeypatch.setattr(remote, "_system", lambda url: (system, "/a.tar"))
    sink, opened, read = io.BytesIO(), system.open, []

    def cut(path: str, *options: Any, **named: Any) -> Any:
        read.append(path)
        stream = opened(path, *options, **named)
        if len(read) == 1:
            monkeypatch.setattr(remote, "CHUNK", PROGRESS)
            rest = iter([stream.read(PROGRESS)])

            def part(_: int) -> bytes:
                for data in rest:
                    return data
                system.pipe_file("/a.tar", B)
                raise ConnectionResetError("cut")

            return _Cut(part)
        return stream

    monkeypatch.setattr(system, "open", cut)
    download("s3://bucket/a.tar", sink, 1 << 24)
    assert sink.getvalue() == B


class _Cut:
    def __init__(self, read: Callable[[int], bytes]) -> None:
        self.read = read

    def __enter__(self) -> _Cut:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_streamed_shard_that_was_replaced_is_not_read_by_the_old_table(
    serve: Callable[..., Answers], tmp_path: Path
) -> None:
    """Both have the same size, and members in different places."""
    other = shard("a", first="txt")
    assert len(other) == len(A)
    server = serve(sends(A))
    cache = ShardCache(tmp_path, 1 << 24)
    reader = ShardReader(cache.add([server.url]), None, cache)
    assert reader.read(0, "cls") == b"a" * 10_000
    reader.shards[0].unlink()
    server.answers = (sends(other),)
    with pytest.raises(ShardUnavailableError, match=r"t-00000\.tar is not the shard that its table was made of"):
        reader.read(0, "cls")
    again = ShardCache(tmp_path, 1 << 24)
    assert ShardReader(again.add([server.url]), None, again).read(0, "cls") == b"a" * 10_000


@pytest.mark.parametrize("way", ["renamed", "written over", "appended", "touched"])
def test_a_shard_that_is_replaced_on_the_disk_is_not_read_by_the_old_table(way: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(A)
    reader = ShardReader([path])
    if way != "renamed":  # else the file that is open stays the old one
        assert reader.read(0, "cls") == b"a" * 10_000
    later = path.stat().st_mtime_ns + 10**9  # clocks of file systems are coarse
    if way == "renamed":
        (tmp_path / "b").write_bytes(shard("b", first="txt"))
        (tmp_path / "b").replace(path)
    elif way == "written over":
        path.write_bytes(shard("b", first="txt"))
    elif way == "appended":
        path.write_bytes(A + bytes(512))
    os.utime(path, ns=(later, later))
    with pytest.raises(ShardUnavailableError, match=r"a\.tar was rewritten while it is in use"):
        reader.read(0, "txt")
    assert ShardReader([path]).read(0, "cls")[:1] == (b"b" if way in ("renamed", "written over") else b"a")


@pytest.mark.parametrize(
    ("sent", "size", "first"),
    [("bytes 5-9/10", 10, 5), ("bytes 5-9/*", None, 5), ("bytes 5-9", None, -1), ("", None, -1)],
)
def test_the_part_of_a_file_that_a_response_has(sent: str, size: int | None, first: int) -> None:
    answer = SimpleNamespace(status=206, content_length=5, url="http://a/b", headers={"Content-Range": sent})
    version, begin = remote._described(answer, encoded=False)
    assert (version.size, begin) == (size, first)
