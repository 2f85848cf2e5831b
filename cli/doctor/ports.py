"""Whether the ports that Quartet takes by itself are free, or who answers there."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from cli.doctor.finding import Finding, ok, warning
from quartet.client import QuartetClient
from quartet.discovery.etcd_client import EtcdConfig
from quartet.errors import ServingError
from services.topology.launch import etcd_answers
from services.topology.topology import DEFAULT_ROUTER_PORT

DEFAULT_ETCD_PORT = 2379
_LOOPBACK = "127.0.0.1"
_ROUTER_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class PortsCheck:
    """The check, of these two ports of 127.0.0.1."""

    router_port: int = DEFAULT_ROUTER_PORT
    etcd_port: int = DEFAULT_ETCD_PORT

    async def __call__(self) -> Sequence[Finding]:
        """Look at both at the same time."""
        return await asyncio.gather(self._router(), self._etcd())

    async def _router(self) -> Finding:
        port = self.router_port
        name = f"port {port}"
        if is_free(port):
            return ok(name, "free, for the router")
        num_workers = await _count_workers(port)
        if num_workers is None:
            return warning(name, "taken, and no Quartet router answers", "quartet up FILE --router-port PORT")
        advice = "another one beside it: quartet up FILE --router-port PORT"
        return warning(name, f"a Quartet router serves there, with {num_workers} workers", advice)

    async def _etcd(self) -> Finding:
        port = self.etcd_port
        name = f"port {port}"
        if is_free(port):
            return ok(name, "free, for etcd")
        if await etcd_answers(EtcdConfig(endpoints=(f"{_LOOPBACK}:{port}",))):
            return ok(name, "an etcd answers; `quartet up` uses it")
        return ok(name, "taken, and no etcd answers without TLS; `quartet up` starts its own on another port")


def is_free(port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        # As servers do: a connection that has just ended does not take the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOOPBACK, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


async def _count_workers(port: int) -> int | None:
    try:
        async with asyncio.timeout(_ROUTER_TIMEOUT_S), QuartetClient([f"{_LOOPBACK}:{port}"]) as client:
            return len(await client.list_workers())
    except (ServingError, TimeoutError):
        return None
