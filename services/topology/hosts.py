"""A topology on several hosts: what each host is called and dialled by, and the folder of secrets that it has."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quartet.discovery.checks import is_address
from quartet.errors import ConfigError
from quartet.rpc.channels import ListenAddress, TlsConfig

#: Ports of a process that ``Host.first_port`` counts: gRPC, events, metrics.
PORTS_OF_PROCESS = 3

_MAX_PORT = 2**16 - 1


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host.

    Attributes:
        address: what other hosts and clients dial: an IP address or a name; IPv6 in brackets.
        bind: the IP address that its processes listen on; empty: ``address``.
        first_port: of the ports that they listen on, three each: gRPC, events, metrics. The first three are the
            router's, the next three the first worker's, and so on; 0: free ones. The router's port for gRPC is
            ``router.port`` all the same.
        metrics: metrics and probes, which are in the clear, listen on ``bind`` too; otherwise on loopback.

    Raises:
        ConfigError: naming the field.
    """

    address: str
    bind: str = ""
    first_port: int = 0
    metrics: bool = False

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        if not is_address(f"{self.address}:1"):
            raise ConfigError(f"address: must be an IP address or a name, IPv6 in brackets, not {self.address!r}")
        if ListenAddress.parse(f"{self.address}:1", "address").is_wildcard:
            raise ConfigError(f"address: others can't dial {self.address}; it belongs into bind")
        if not _is_ip(self.listens_on):
            what = "must be an IP address" if self.bind else "is missing; where address is a name, it is the IP address"
            raise ConfigError(f"bind: {what} to listen on, IPv6 in brackets")
        if not 0 <= self.first_port <= _MAX_PORT:
            raise ConfigError(f"first_port: must be in [0, {_MAX_PORT}], not {self.first_port}")

    @property
    def listens_on(self) -> str:
        """The address that its processes listen on."""
        return self.bind or self.address

    @property
    def names(self) -> tuple[str, ...]:
        """What its processes are dialled by, as certificates have it: IPv6 without brackets."""
        names = dict.fromkeys((self.address, self.listens_on))
        is_wildcard = ListenAddress.parse(f"{self.listens_on}:1", "bind").is_wildcard
        return tuple(bare(name) for name in names if not (is_wildcard and name == self.listens_on))

    def ports(self, *, num_workers: int, has_router: bool) -> Sequence[int]:
        """Those from ``first_port`` on that so many workers, and a router, listen on; none if they take free ones."""
        if not self.first_port:
            return ()
        # The router's own for gRPC is ``router.port``.
        first = self.first_port + (1 if has_router else PORTS_OF_PROCESS)
        return range(first, self.first_port + (1 + num_workers) * PORTS_OF_PROCESS)

    def port(self, process: int, which: int) -> int:
        """The port number ``which`` of those of the process number ``process``, the router's being 0; 0: a free one.

        Raises:
            ConfigError: there is no such port, as ``first_port`` is too high.
        """
        if not self.first_port:
            return 0
        port = self.first_port + process * PORTS_OF_PROCESS + which
        if port > _MAX_PORT:
            raise ConfigError(f"first_port: {self.first_port} leaves too few ports for its processes")
        return port


@dataclass(frozen=True)
class SecretFiles:
    """The folder of one host, as ``quartet secrets`` writes it; each process there has its own certificate."""

    folder: Path

    def identity(self, process: str) -> TlsConfig:
        """What the process of that name serves and dials with."""
        return TlsConfig(
            ca_file=self.folder / "ca.pem",
            cert_file=self.folder / f"{process}.pem",
            key_file=self.folder / f"{process}.key",
        )

    @property
    def events_key(self) -> Path:
        """The key that encrypts events, the same on all hosts."""
        return self.folder / "events_key"

    @property
    def signing_keys(self) -> Path:
        """The keys of signed starts, the same on all hosts."""
        return self.folder / "signing_keys"

    @property
    def http_keys(self) -> Path:
        """The API keys of the routers' HTTP, the same on all hosts."""
        return self.folder / "http_keys"

    @property
    def etcd(self) -> dict[str, Path]:
        """What its processes show etcd, by the names of ``EtcdTls``."""
        files = self.folder / "etcd"
        return {"ca_file": files / "ca.pem", "cert_file": files / "client.pem", "key_file": files / "client.key"}

    @property
    def etcd_password(self) -> Path:
        """The password of the user of etcd, where the topology names one."""
        return self.folder / "etcd" / "password"

    def missing(self, processes: list[str], *, has_http: bool) -> Iterator[Path]:
        """The files that are not there, of those that these processes need. Who dials etcd misses its files.

        Raises:
            ConfigError: this user may not see whether a file is there, or not read it; names it.
        """
        identities = [self.identity(process) for process in processes]
        needed = [file for tls in identities for file in (tls.ca_file, tls.cert_file, tls.key_file)]
        needed += [self.events_key, self.signing_keys, *([self.http_keys] if has_http else [])]
        return (file for file in dict.fromkeys(needed) if not _is_readable(file))


def bare(host: str) -> str:
    """``host`` without the brackets of IPv6."""
    return host.removeprefix("[").removesuffix("]")


def _is_readable(file: Path) -> bool:
    """Whether the file is there. Raises ``ConfigError`` if this user can't read it."""
    try:
        with file.open("rb"):
            return True
    except FileNotFoundError:
        return False
    except OSError as error:
        remedy = "the user that runs Quartet must own it, or be in its group"
        raise ConfigError(f"secrets: cannot read {file}: {error.strerror}; {remedy}") from error


def _is_ip(host: str) -> bool:
    try:
        return ipaddress.ip_address(bare(host)).version == 4 or host.startswith("[")
    except ValueError:
        return False
