"""A web server of one folder with range requests, index pages and credentials, which counts what it is asked for."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

__all__ = ["Fault", "RangeServer", "Request"]

Fault = Callable[["Request"], "int | str | None"]
"""What goes wrong with a request: a status to answer, "cut" (half of the body, then the end), "drop" (no answer),
"whole" (the range is ignored), "short" (a smaller range than asked for), or None."""


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    method: str
    path: str
    """With its query."""
    range: str
    """The header, or ""."""


@dataclass
class RangeServer:
    """Serves a folder on 127.0.0.1, from a thread of this process, while it is entered."""

    folder: Path
    authorizations: frozenset[str] = frozenset()
    """Values of the header Authorization that are let in; none: everybody is."""
    fault: Fault | None = None
    requests: list[Request] = field(default_factory=list)
    bytes_sent: int = 0
    open_connections: int = 0
    peak_connections: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _sockets: set[socket.socket] = field(default_factory=set, repr=False)

    def __enter__(self) -> RangeServer:
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"owner": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)

    @property
    def url(self) -> str:
        """Of the folder, without a slash at the end."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def reset(self) -> None:
        """Count from here on; connections that are open stay counted."""
        with self._lock:
            self.requests.clear()
            self.bytes_sent, self.peak_connections = 0, self.open_connections

    @staticmethod
    def basic(user: str, password: str) -> str:
        """The header that HTTP's basic authentication sends."""
        return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no news."""


class _Handler(BaseHTTPRequestHandler):
    owner: RangeServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def setup(self) -> None:
        super().setup()
        with self.owner._lock:
            self.owner._sockets.add(self.connection)
            self.owner.open_connections += 1
            self.owner.peak_connections = max(self.owner.peak_connections, self.owner.open_connections)

    def finish(self) -> None:
        with self.owner._lock:
            self.owner._sockets.discard(self.connection)
            self.owner.open_connections -= 1
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        request = Request(self.command, self.path, self.headers.get("Range", ""))
        with self.owner._lock:
            self.owner.requests.append(request)
        fault = self.owner.fault(request) if self.owner.fault is not None else None
        if fault == "drop":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if isinstance(fault, int):
            self._send(fault, b"", {}, with_body)
            return
        if self.owner.authorizations and self.headers.get("Authorization") not in self.owner.authorizations:
            self._send(401 if "Authorization" not in self.headers else 403, b"", {}, with_body)
            return
        path = self.owner.folder / unquote(urlsplit(self.path).path).lstrip("/")
        if path.is_dir():
            page = "".join(f'<a href="{quote(name)}">{html.escape(name)}</a>' for name in _names(path))
            self._send(200, page.encode(), {"Content-Type": "text/html"}, with_body)
        elif path.is_file():
            self._send_file(path, request, fault, with_body)
        else:
            self._send(404, b"", {}, with_body)

    def _send_file(self, path: Path, request: Request, fault: str | None, with_body: bool) -> None:
        stat = path.stat()
        tag = hashlib.sha256(f"{stat.st_mtime_ns} {stat.st_size}".encode()).hexdigest()[:16]
        headers = {
            "Accept-Ranges": "bytes",
            "ETag": f'"{tag}"',
            "Last-Modified": formatdate(stat.st_mtime, usegmt=True),
        }
        start, stop, status = 0, stat.st_size, 200
        if request.range and fault != "whole":
            first, _, last = request.range.removeprefix("bytes=").partition("-")
            start, stop, status = int(first), min(int(last or stat.st_size - 1) + 1, stat.st_size), 206
            if start >= stat.st_size:
                self._send(416, b"", {"Content-Range": f"bytes */{stat.st_size}"}, with_body)
                return
            if fault == "short":
                stop = start + (stop - start) // 2
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{stat.st_size}"
        with path.open("rb") as file:
            data = os.pread(file.fileno(), stop - start, start) if with_body else b""
        self._send(status, data, headers, with_body, length=stop - start, cut=fault == "cut")

    def _send(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str],
        with_body: bool,
        *,
        length: int | None = None,
        cut: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data) if length is None else length)}.items():
            self.send_header(name, value)
        self.end_headers()
        body = data[: len(data) // 2] if cut else data
        if with_body:
            with self.owner._lock:
                self.owner.bytes_sent += len(body)
            self.wfile.write(body)
        if cut:
            self.close_connection = True


def _names(folder: Path) -> Iterator[str]:
    for entry in sorted(folder.iterdir()):
        yield entry.name + ("/" if entry.is_dir() else "")
