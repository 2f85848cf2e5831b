"""A web site on loopback, in threads of its own: it gives a picture, leads elsewhere, or never answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_WAIT_S = 90.0


class PictureSite(ThreadingHTTPServer):
    """Answers at ``/picture`` with ``file``, at ``/elsewhere`` with a redirect to ``127.0.0.2``, at ``/never`` not.

    Attributes:
        asked: was asked for what it never gives.
        left: the client that asked for it has gone.
    """

    daemon_threads = True

    def __init__(self, file: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.file = file
        self.asked, self.left = threading.Semaphore(0), threading.Semaphore(0)

    @property
    def host(self) -> str:
        """``host:port``."""
        return f"127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: PictureSite

    def do_GET(self) -> None:
        match self.path:
            case "/picture":
                self.send_response(200)
                self.send_header("Content-Length", str(len(self.server.file)))
                self.end_headers()
                self.wfile.write(self.server.file)
            case "/elsewhere":
                self.send_response(302)
                self.send_header("Location", f"http://127.0.0.2:{self.server.server_port}/picture")
                self.end_headers()
            case _:
                self.server.asked.release()
                self.connection.settimeout(_WAIT_S)
                self.connection.recv(1)
                self.server.left.release()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def picture_site(file: bytes) -> Iterator[PictureSite]:
    """One that serves."""
    site = PictureSite(file)
    thread = threading.Thread(target=site.serve_forever, name="site")
    thread.start()
    try:
        yield site
    finally:
        site.shutdown()
        thread.join()
        site.server_close()
