"""Configuration of the HTTP face."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quartet.errors import ConfigError
from quartet.rpc.channels import MAX_API_MESSAGE_BYTES

_MAX_PORT = 2**16 - 1


@dataclass(frozen=True, kw_only=True)
class HttpTlsConfig:
    """Files of the server's certificate, PEM; read again when they change.

    Attributes:
        cert_file: the certificate chain, made out to the name that clients dial.
        key_file: its private key.
    """

    cert_file: Path
    key_file: Path


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """OpenAI's API over HTTP.

    Attributes:
        port: 0: there is none.
        host: the address to listen on, IPv6 in brackets; beyond loopback it takes ``tls``, or ``server.insecure`` of
            the router.
        keys_file: API keys, ``TENANT KEY`` a line (``router.http.keys``). ``None``: every caller is anonymous, and any
            Authorization header passes.
        operators: tenants whose keys may read ``/metrics``, and see the workers in ``/health`` and the page's fleet.
            Without keys all may, but for the page, which is for loopback.
        tls: certificates; ``None`` serves in the clear.
        max_body_bytes: of one request. By default 64 MiB of pictures fit, which grow by a third as data URLs.
        max_held_body_bytes: of all bodies that are being read; one tenant or address may take half.
        body_timeout_s: a body must have come, and been parsed, within this time; a whole answer be taken in as much.
        idle_timeout_s: a connection on which no request is complete ends after this time.
        keepalive_s: a stream on which nothing was sent for this long gets a comment, so that proxies keep it. One that
            waits for a worker begins then, with a 200.
        max_unread_bytes: what a slow reader may leave unread of one stream.
        max_connections: connections in all, each with one request at a time. A stream takes 18 KB.
        max_connections_of_address: of one client's address.
        max_requests_of_tenant: requests at a time, of one tenant with a key.
    """

    port: int = 0
    host: str = "127.0.0.1"
    keys_file: Path | None = None
    operators: tuple[str, ...] = ()
    tls: HttpTlsConfig | None = None
    max_body_bytes: int = MAX_API_MESSAGE_BYTES // 3 * 4 + (1 << 20)
    max_held_body_bytes: int = 512 << 20
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    keepalive_s: float = 15.0
    max_unread_bytes: int = 256 << 10
    max_connections: int = 16_384
    max_connections_of_address: int = 8_192
    max_requests_of_tenant: int = 8_192

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(f"port: must be in [0, {_MAX_PORT}], not {self.port}")
        if self.operators and self.keys_file is None:
            raise ConfigError("operators: names tenants, and without keys_file there are none")
        for name, value in vars(self).items():
            if name.startswith("max_") and value < 1:
                raise ConfigError(f"{name}: must be at least 1")
        for name in ("body_timeout_s", "idle_timeout_s", "keepalive_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0")
