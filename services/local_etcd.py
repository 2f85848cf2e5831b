"""The etcd of a topology on one host: one that answers already, or one of its own."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quartet.discovery.create import DiscoveryConfig, create_registry
from quartet.discovery.etcd_config import EtcdConfig
from quartet.errors import DiscoveryError

_LOOPBACK = "127.0.0.1"
# Below the kernel's ephemeral range: a client that dials a server just killed can otherwise be given the very
# port it dials, and keep the server from coming back.
_PORTS = range(20_000, 32_000)
_NUM_PORTS_TRIED = 100


async def etcd_answers(config: EtcdConfig) -> bool:
    """Whether one of its endpoints answers a read; takes no longer than its request timeout for each."""
    registry = create_registry(DiscoveryConfig(etcd=config))
    try:
        await registry.workers()
    except DiscoveryError:
        return False
    finally:
        await registry.close()
    return True


def own_etcd(config: EtcdConfig) -> EtcdConfig:
    """``config`` for an etcd of one's own, on a free loopback port, without TLS."""
    endpoint = f"{_LOOPBACK}:{free_port()}"
    return replace(config, endpoints=(endpoint,), ca_file=None, cert_file=None, key_file=None)


def etcd_command(binary: Path, config: EtcdConfig, data_dir: Path) -> Sequence[str]:
    """The command that serves ``config``'s one endpoint, alone, with its data in ``data_dir``."""
    client = f"http://{config.endpoints[0]}"
    peer = f"http://{_LOOPBACK}:{free_port()}"
    options = {
        "name": "quartet",
        "data-dir": str(data_dir),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"quartet={peer}",
        "heartbeat-interval": "50",  # ms; with the next one a lone member is its leader in half a second
        "election-timeout": "500",
        "logger": "zap",
        # At a healthy start and end it logs errors with stack traces; why it died is what it calls fatal.
        "log-level": "fatal",
    }
    return [str(binary), *(f"--{name}={value}" for name, value in options.items())]


# By this process, each with what tells other processes of this project so.
_given: dict[int, socket.socket] = {}


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now and that no client is given by chance; never the same twice.

    Whoever got it may not listen yet: until this process ends, no other one is given it here either.

    Raises:
        OSError: there is none.
    """
    for port in random.SystemRandom().sample(_PORTS, _NUM_PORTS_TRIED):
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((_LOOPBACK, port))
                _given[port] = _reserve(port)
            except OSError:
                continue
            return port
    raise OSError(f"no free port in {_NUM_PORTS_TRIED} tries")


def _reserve(port: int) -> socket.socket:
    """Hold a name that only one process of a network namespace can have. Raises ``OSError``: another one has it."""
    name = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            name.bind(f"\0quartet-port-{port}")
        except OSError:
            name.close()
            raise
    return name
