"""What ``quartet secrets`` writes: certificates, keys and passwords of a topology's hosts, a folder for each."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from quartet.config import write_whole_file
from quartet.errors import ConfigError
from quartet.events.curve import read_events_key
from quartet.rpc.audience import IdentityKind
from quartet.rpc.channels import ListenAddress
from quartet.streams.signed_start import SigningKeys
from services.topology.certificates import LOOPBACK_NAMES, KeptAuthority, kind_of
from services.topology.hosts import SecretFiles, bare
from services.topology.launch import draw_api_keys, draw_events_key, draw_signing_key
from services.topology.topology import Topology, plan_routers, plan_workers

_PASSWORD_BYTES = 24

# What people and programs are that call from outside. Each has a certificate, and an API key of a tenant of that name,
# which is also its tenant by gRPC.
_PEOPLE = (IdentityKind.OPERATOR, IdentityKind.CLIENT)


@dataclass(frozen=True)
class SecretsFolder:
    """The folder of all secrets of one topology; who has it can make more.

    Attributes:
        path: it holds ``hosts/NAME`` for each host, and for others ``etcd``, with what etcd serves with, ``operator``
            and ``client``, with the certificate and the API key of those and, where etcd has a user, with what they
            look for routers by, and ``authority``, which no host gets.
    """

    path: Path

    def host(self, name: str) -> SecretFiles:
        """What the host of that name gets."""
        return SecretFiles(self.path / "hosts" / name)

    @property
    def authority(self) -> Path:
        """What certificates are made with, and one copy of each key that hosts share."""
        return self.path / "authority"

    @property
    def reader_password(self) -> Path:
        """The password of a user of etcd that may read routers' records, and nothing else."""
        return self.authority / "etcd" / "reader_password"


def provide_secrets(topology: Topology, folder: SecretsFolder, *, valid: timedelta) -> list[str]:
    """Write all that the hosts of ``topology`` need. What is there already stays, if it is still right.

    So further hosts and workers get certificates of the same authority, and certificates are made anew which end within
    a month or whose host has another address now. Keys that hosts share are those in ``authority``.

    Args:
        topology: with ``hosts``.
        folder: where; made for its owner alone.
        valid: how long new certificates are.

    Returns:
        The files that are new or changed, below ``folder``; of a certificate and its key, the certificate.

    Raises:
        ConfigError: settings of the topology are wrong, or keys in ``authority`` can't be used.
        OSError, ValueError: a file can't be written, or one that is there is not of the right kind.
    """
    if not topology.hosts:
        raise ConfigError("hosts: there are none; `quartet up --tls` makes certificates for one host")
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    changed = [*_certificates(topology, folder, valid), *_keys(topology, folder)]
    return [str(path.relative_to(folder.path)) for path in changed]


def _certificates(topology: Topology, folder: SecretsFolder, valid: timedelta) -> Iterator[Path]:
    namespace = topology.namespace
    grpc = KeptAuthority(folder.authority / "grpc", f"quartet {namespace}", valid=valid)
    etcd = KeptAuthority(folder.authority / "etcd", f"quartet {namespace} etcd", valid=valid)
    for name, host in topology.hosts.items():
        share = replace(topology, host=name, secrets=folder.host(name).folder)
        hosts = tuple(dict.fromkeys([*host.names, *LOOPBACK_NAMES]))
        for plan in [*plan_workers(share, num_cores=1), *plan_routers(share)]:
            uri = f"quartet://{namespace}/{kind_of(plan.role)}/{plan.name}"
            yield from grpc.provide(folder.host(name).folder, plan.name, uris=[uri], hosts=hosts)
        yield from etcd.provide(folder.host(name).folder / "etcd", "client")
    for kind in _PEOPLE:
        yield from grpc.provide(folder.path / kind, kind, uris=[f"quartet://{namespace}/{kind}/{kind}"])
        if topology.discovery.etcd.user:  # without users a certificate alone would let them write
            yield from etcd.provide(folder.path / kind / "etcd", "client")
    yield from etcd.provide(folder.path / "etcd", "etcd", hosts=_etcd_hosts(topology))


def _etcd_hosts(topology: Topology) -> Sequence[str]:
    endpoints = [endpoint.rpartition("//")[2] for endpoint in topology.discovery.etcd.endpoints]
    dialled = [bare(ListenAddress.parse(endpoint, "discovery.etcd.endpoints").host) for endpoint in endpoints]
    return tuple(dict.fromkeys([*dialled, *LOOPBACK_NAMES]))


def _keys(topology: Topology, folder: SecretsFolder) -> Iterator[Path]:
    own = SecretFiles(folder.authority)
    for path, draw in (
        (own.events_key, draw_events_key),
        (own.signing_keys, draw_signing_key),
        (own.http_keys, lambda directory: draw_api_keys(directory, *_PEOPLE)),
    ):
        if _is_unwritten(path):
            path.unlink(missing_ok=True)
            yield draw(path.parent)
    read_events_key(own.events_key)
    SigningKeys(own.signing_keys)
    for path in (own.etcd_password, folder.reader_password):
        if _is_unwritten(path):
            yield write_whole_file(path, f"{secrets.token_urlsafe(_PASSWORD_BYTES)}\n".encode())
    if topology.router.http_port:
        yield from _keys_of_people(folder)
    for copy, original in _copies(topology, folder):
        content = original.read_bytes()
        if not copy.is_file() or copy.read_bytes() != content:
            yield write_whole_file(copy, content)


def _copies(topology: Topology, folder: SecretsFolder) -> Iterator[tuple[Path, Path]]:
    """Each copy of a secret, and the original that it must equal."""
    own = SecretFiles(folder.authority)
    for name in topology.hosts:
        its = folder.host(name)
        yield its.events_key, own.events_key
        yield its.signing_keys, own.signing_keys
        if topology.discovery.etcd.user:
            yield its.etcd_password, own.etcd_password
        if topology.router.http_port and name in topology.router.hosts:
            yield its.http_keys, own.http_keys
    if topology.discovery.etcd.user:
        for kind in _PEOPLE:
            yield SecretFiles(folder.path / kind).etcd_password, folder.reader_password


def _keys_of_people(folder: SecretsFolder) -> Iterator[Path]:
    """Each one's own API key in its folder: the first of its tenant in ``authority`` that stands there in the clear."""
    lines = [line.split() for line in SecretFiles(folder.authority).http_keys.read_text().splitlines()]
    for kind in _PEOPLE:
        copy = folder.path / kind / "http_key"
        keys = [
            words[1] for words in lines if len(words) > 1 and words[0] == kind and not words[1].startswith("sha256:")
        ]
        if not keys:
            copy.unlink(missing_ok=True)
        elif not copy.is_file() or copy.read_text() != f"{keys[0]}\n":
            yield write_whole_file(copy, f"{keys[0]}\n".encode())


def _is_unwritten(path: Path) -> bool:
    """Whether there is no such file, or an empty one, as a full disk leaves it."""
    return not path.is_file() or not path.stat().st_size
