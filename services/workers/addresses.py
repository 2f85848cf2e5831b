"""What a worker tells others to dial: not always what it listens on."""

from __future__ import annotations

from dataclasses import dataclass

from quartet.errors import ConfigError
from quartet.rpc.address import ListenAddress


@dataclass(frozen=True, kw_only=True)
class Advertised:
    """The addresses of a worker's record.

    Attributes:
        grpc: ``host:port``.
        events: ``tcp://host:port``.
        http: ``host:port``.
    """

    grpc: str
    events: str
    http: str


@dataclass(frozen=True, kw_only=True)
class Listening:
    """What a worker listens on, as it is configured, and what peers are told to dial.

    Attributes:
        host: that peers dial; empty: the one that is listened on.
    """

    grpc: ListenAddress
    events: ListenAddress
    http: ListenAddress
    host: str = ""

    def __post_init__(self) -> None:
        """Raises ``ConfigError`` where peers could not know what to dial."""
        if not self.host and self.grpc.is_wildcard:
            message = f"peers can't dial {self.grpc.host}, which server.address has: name the host that they can"
            raise ConfigError(f"advertise_host: {message}")

    def advertise(self, *, grpc_port: int, events_port: int, http_port: int) -> Advertised:
        """What to tell once the ports are known."""
        return Advertised(
            grpc=f"{self.host or self.grpc.host}:{grpc_port}",
            events=f"tcp://{self._host_of(self.events)}:{events_port}",
            http=f"{self._host_of(self.http)}:{http_port}",
        )

    def _host_of(self, address: ListenAddress) -> str:
        # What only this host reaches stays so: under a name of the network others would knock there in vain.
        if address.is_loopback:
            return address.host
        if self.host:
            return self.host
        return self.grpc.host if address.is_wildcard else address.host
