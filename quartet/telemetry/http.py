"""The HTTP port of every process: /metrics, /livez and /readyz, in threads of its own; of routers also targets.

A scrape formats for milliseconds and a client may be slow; neither may hold up the event loop. Kubernetes probes come
here, because its gRPC probe speaks no TLS.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from quartet.errors import ConfigError
from quartet.telemetry.targets import TARGETS_PATH, ListTargets, is_near, render_targets

logger = logging.getLogger(__name__)

_CLIENT_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 2.0


# The share of the time in which metrics are formatted; scrapes that come meanwhile get the last figures. It takes the
# lock that the event loop needs, some 5 ms each time.
_FORMATTING_SHARE = 1 / 20
# Prometheus' text formats, in all versions and ways to escape, are fewer.
_MAX_FORMATS = 32


@dataclass(frozen=True, kw_only=True)
class Probes:
    """What the probes ask; called on a thread, so each may only read.

    Attributes:
        is_alive: false only when nothing but a restart helps: the engine is dead.
        is_ready: whether requests should come here.
    """

    is_alive: Callable[[], bool]
    is_ready: Callable[[], bool]


class TelemetryServer:
    """Serves metrics and probes from ``start`` to ``close``."""

    def __init__(
        self,
        address: str,
        registry: CollectorRegistry,
        probes: Probes,
        targets: ListTargets | None = None,
    ) -> None:
        """Serve at ``address``, ``host:port``; port 0 takes a free one.

        ``targets`` lists the processes for Prometheus; ``None``: this process knows no others.
        """
        self._address = address
        self._registry = registry
        self._probes = probes
        self._targets = targets
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Listen, and return the port. Raises ``ConfigError`` naming an address that can't be listened on."""
        host, _, port = self._address.rpartition(":")
        if not host:
            raise ConfigError(f"http_address: must be host:port, not {self._address!r}")
        try:
            handler = _handler_class(self._registry, self._probes, self._targets)
            server = _server_class(host)((host.strip("[]"), int(port)), handler)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(f"http_address: cannot listen on {self._address}: {error}") from error
        self._server = server
        self._thread = threading.Thread(target=server.serve, name="telemetry-http", daemon=True)
        self._thread.start()
        return int(server.server_address[1])

    async def close(self) -> None:
        """Stop listening, in bounded time. May be called twice, or without ``start``."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(self._stop, server)

    def _stop(self, server: _Server) -> None:
        server.stop()
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_S)


class Exposition:
    """The metrics of ``registry`` as text. Scrapes that come close together share one, which one thread formats."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` counts seconds."""
        self._registry = registry
        self._clock = clock
        self._lock = threading.Lock()
        self._fresh_until = clock()
        # By format: the text.
        self._last: dict[str, bytes] = {}

    def get(self, accept: str) -> tuple[bytes, str]:
        """The text in the format that the header ``accept`` asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        with self._lock:
            began = self._clock()
            if content_type not in self._last or began >= self._fresh_until:
                if len(self._last) >= _MAX_FORMATS:
                    self._last.clear()
                self._last[content_type] = encode(self._registry)
                self._fresh_until = began + (self._clock() - began) / _FORMATTING_SHARE
            return self._last[content_type], content_type


class _Server(ThreadingHTTPServer):
    """Sleeps until a client comes: ``serve_forever`` wakes up to look whether it is to end, in every idle process."""

    daemon_threads = True  # a slow client doesn't hold up the end of the process
    timeout = 0  # of `handle_request`: a client that came may have gone again

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._stop_reader, self._stop_writer = socket.socketpair()

    def serve(self) -> None:
        """Serve until ``stop``, and close everything."""
        with self, self._stop_reader, selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            selector.register(self._stop_reader, selectors.EVENT_READ)
            while not any(key.fileobj is self._stop_reader for key, _ in selector.select()):
                self.handle_request()

    def stop(self) -> None:
        """End ``serve``. Any thread may call it."""
        self._stop_writer.close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no error; anything else is ours."""
        error = sys.exception()
        if isinstance(error, ConnectionError | TimeoutError):
            logger.debug("HTTP client %s went away: %s", client_address, error)
        else:
            logger.error("HTTP request of %s failed", client_address, exc_info=error)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _server_class(host: str) -> type[_Server]:
    return _Server6 if ":" in host else _Server


def _handler_class(
    registry: CollectorRegistry, probes: Probes, targets: ListTargets | None
) -> type[BaseHTTPRequestHandler]:
    # http.server makes handlers itself, so what they need comes by closure.
    exposition = Exposition(registry)

    class Handler(BaseHTTPRequestHandler):
        timeout = _CLIENT_TIMEOUT_S

        def do_GET(self) -> None:
            match urlsplit(self.path).path:
                case "/metrics":
                    self._answer(HTTPStatus.OK, *exposition.get(self.headers.get("Accept", "")))
                case "/livez":
                    self._answer_probe(probes.is_alive())
                case "/readyz":
                    self._answer_probe(probes.is_ready())
                case path if path == TARGETS_PATH and targets is not None:
                    found = targets(is_near(self.client_address[0], self.connection.getsockname()[0]))
                    self._answer(HTTPStatus.OK, render_targets(found), "application/json")
                case _:
                    self._answer(HTTPStatus.NOT_FOUND, b"/metrics, /livez, /readyz\n")

        def _answer_probe(self, is_well: bool) -> None:
            if is_well:
                self._answer(HTTPStatus.OK, b"ok\n")
            else:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"no\n")

        def _answer(self, status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            logger.debug(format, *args)

    return Handler
