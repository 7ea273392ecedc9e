"""Local HTTP server of a folder, for tests. It supports ranges, records requests, and can drop connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Server(ThreadingHTTPServer):
    """HTTP server of the files in a folder on a free local port; see :func:`served`.

    Attributes:
        requests: paths of all requests, in order.
        failing: whether to answer all requests with status 503.
    """

    daemon_threads = True

    def __init__(self, folder: Path, drop_every: int | None, ranges: bool) -> None:
        self.drop_every, self.ranges, self.lock = drop_every, ranges, threading.Lock()
        self.requests: list[str] = []
        self.failing = False
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """Ignore errors in the handling of a request, such as a connection that the client has closed."""


class _Handler(SimpleHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.requests.append(self.path)
            dropped = self.server.drop_every and len(self.server.requests) % self.server.drop_every == 0
        path = Path(self.translate_path(self.path))
        if self.server.failing:
            self.send_error(503)
            return
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        start, end = 0, len(data)
        range_header = self.headers.get("Range") if self.server.ranges else None
        if range_header:
            first, _, last = range_header.removeprefix("bytes=").partition("-")
            start, end = int(first), min(len(data), int(last) + 1 if last else len(data))
        self.send_response(206 if range_header else 200)
        if range_header:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        if self.server.ranges:
            self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        body = data[start:end]
        if dropped:
            body, self.close_connection = body[: len(body) // 2], True
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()


@contextmanager
def served(folder: Path, drop_every: int | None = None, ranges: bool = True) -> Iterator[Server]:
    """Serve the files in a folder by HTTP inside a ``with`` block.

    Args:
        folder: folder of the files.
        drop_every: number n, to close the connection of every n-th request halfway through the answer; None for never.
        ranges: whether the server supports requests for parts of files.
    """
    with Server(folder, drop_every, ranges) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
