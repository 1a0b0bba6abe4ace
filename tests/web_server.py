"""A web server on loopback that behaves as badly as its pages ask for."""

from __future__ import annotations

import contextlib
import gzip
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROSE = "Gastrointestinal hemorrhage is bleeding anywhere between the esophagus and the rectum. " * 4


class Site(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pages: dict[str, tuple[str, bytes]] = {}  # path -> type, body
        self.asked: list[str] = []
        self.sent = 0  # bytes of bodies
        self.tries: dict[str, int] = {}
        self.stalled: set[str] = set()  # paths that are not answered until the site closes
        self.closing = threading.Event()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def url(self, path: str) -> str:
        return f"http://{self.host}{path}"

    def handle_error(self, request, client_address) -> None:
        "Clients hang up on hostile pages; that is the point."


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def log_message(self, *_) -> None:
        pass

    def _head(self, status: int = 200, kind: str | None = "text/html; charset=utf-8", **headers: str) -> None:
        self.send_response(status)
        if kind:
            self.send_header("Content-Type", kind)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _send(self, data: bytes) -> None:
        self.wfile.write(data)
        self.server.sent += len(data)

    def do_GET(self) -> None:
        path, site = self.path, self.server
        site.asked.append(path)
        site.tries[path] = tried = site.tries.get(path, 0) + 1
        name, _, argument = path.lstrip("/").partition("/")
        if path in site.stalled:
            site.closing.wait()
        elif path in site.pages:
            kind, body = site.pages[path]
            self._head(kind=kind)
            self._send(body)
        elif name == "redirect":  # /redirect/<address>
            self._head(302, Location=argument)
        elif name == "chain":  # /chain/<n>
            self._head(302, Location=f"/chain/{int(argument) + 1}")
        elif name == "loop":
            self._head(302, Location=path)
        elif name == "nowhere":
            self._head(302)
        elif name == "status":  # /status/<code>
            self._head(int(argument))
        elif name == "busy":  # fails twice
            self._head(503 if tried < 3 else 200, Retry_After="0")
            if tried >= 3:
                self._send(f"<p>{PROSE}</p>".encode())
        elif name == "endless":
            self._head()
            while True:
                self._send(b"x" * 65536)
        elif name == "drip":
            self._head()
            while True:
                self._send(b"x")
                self.wfile.flush()
                time.sleep(0.1)
        elif name == "dripheaders":
            for i in range(1000):
                self.wfile.write(b"HTTP/1.1 200 OK\r\n" if not i else b"X-%d: y\r\n" % i)
                self.wfile.flush()
                time.sleep(0.1)
        elif name == "silent":
            site.closing.wait()
        elif name == "hugeheaders":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 2_000_000 + b"\r\n\r\n")
        elif name == "bomb":  # 1 GB of zeros in 1 MB, in layers of gzip members
            self._head(Content_Encoding="gzip")
            packer = zlib.compressobj(9, wbits=31)
            block = bytes(10_000_000)
            for _ in range(100):
                self._send(packer.compress(block))
            self._send(packer.flush())
        elif name == "gzip":
            self._head(Content_Encoding="gzip")
            self._send(gzip.compress(f"<p>{PROSE}</p>".encode()))
        elif name == "tornzip":
            self._head(Content_Encoding="gzip")
            self._send(gzip.compress(PROSE.encode() * 50)[:-30])
        elif name == "notzip":
            self._head(Content_Encoding="gzip")
            self._send(PROSE.encode())
        elif name == "brotli":
            self._head(Content_Encoding="br")
            self._send(b"\x0b\x02\x80hello\x03")
        elif name == "torn":  # says more than it sends
            self._head(Content_Length="100000")
            self._send(PROSE.encode())
        elif name == "garbage":
            self.wfile.write(b"\x00\xff not http at all\r\n\r\n")
        elif name == "hangup":
            self.connection.close()
        else:
            self._head(404)
            self._send(b"<p>Not found</p>")


@contextlib.contextmanager
def web_site() -> Iterator[Site]:
    "Run a site."
    site = Site()
    thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        site.closing.set()
        site.shutdown()
        site.server_close()
