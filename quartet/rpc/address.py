"""Addresses to listen on, ``host:port``: who can reach them, and whether they may be served in the clear."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from quartet.errors import ConfigError


@dataclass(frozen=True)
class ListenAddress:
    """Where a server listens.

    Attributes:
        host: a name, or an IP address; IPv6 in brackets.
        port: 0 takes a free one.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, field: str) -> ListenAddress:
        """Read ``host:port``. Raises ``ConfigError`` naming ``field``."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or int(port) >= 2**16:
            raise ConfigError(f"{field}: must be host:port, not {text!r}")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this host can reach it."""
        ip = self._ip
        return self.host == "localhost" if ip is None else ip.is_loopback

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for all addresses of this host, so that nobody can dial it."""
        # To ZMQ an asterisk is what 0.0.0.0 is to others.
        return self.host == "*" or (self._ip is not None and self._ip.is_unspecified)

    def require_loopback(self, field: str, remedy: str) -> None:
        """Refuse an address that others can reach. Raises ``ConfigError`` naming ``field`` and the ``remedy``."""
        if not self.is_loopback:
            raise ConfigError(f"{field}: {self.host}:{self.port} is not loopback: it takes {remedy}")

    @property
    def _ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        try:
            return ipaddress.ip_address(self.host.removeprefix("[").removesuffix("]"))
        except ValueError:
            return None
