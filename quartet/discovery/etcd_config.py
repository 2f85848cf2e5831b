"""Where etcd is and how discovery uses it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quartet.discovery.base import check_name


@dataclass(frozen=True, kw_only=True)
class EtcdConfig:
    """Where etcd is and how it is used.

    Attributes:
        endpoints: ``host:port``, ``http://host:port`` or ``https://host:port``; tried in turn.
        namespace: separates deployments that share an etcd.
        lease_ttl_s: seconds after which a killed worker's record goes; etcd allows no less than about 2.
        request_timeout_s: longest wait for one answer of one endpoint, in seconds.
        ca_file: PEM certificates that the server's is checked against; switches TLS on. With an https
            endpoint and no file, the system's.
        cert_file: PEM certificate chain to show to the server; goes with ``key_file``.
        key_file: PEM private key of ``cert_file``.
    """

    endpoints: tuple[str, ...] = ("127.0.0.1:2379",)
    namespace: str = "default"
    lease_ttl_s: int = 5
    request_timeout_s: float = 2.0
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("endpoints must name at least one etcd server")
        if self.lease_ttl_s < 1 or self.request_timeout_s <= 0:
            raise ValueError("lease_ttl_s and request_timeout_s must be positive")
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        check_name("namespace", self.namespace)
