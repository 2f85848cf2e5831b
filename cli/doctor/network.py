"""Checks of etcd and of ports: does an etcd answer, could one be started here, what has Quartet's ports."""

from __future__ import annotations

import asyncio
import email.utils
import errno
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import aiohttp

from cli.doctor.finding import Finding, ok, run_program, warning, wrong
from quartet.client import QuartetClient
from quartet.discovery.etcd_access import EtcdTls
from quartet.discovery.etcd_client import EtcdConfig
from quartet.errors import ServingError
from services.topology.launch import etcd_answers, etcd_fault, find_etcd
from services.topology.topology import DEFAULT_ROUTER_PORT

_HTTP_TIMEOUT_S = 2.0
_VERSION_TIMEOUT_S = 3.0
# etcd gives its time in whole seconds, half a round trip late.
_MAX_SKEW_S = 2.0
DEFAULT_ETCD_PORT = 2379
_LOOPBACK = "127.0.0.1"
_ROUTER_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class EtcdFacts:
    """What an etcd reports over HTTP; ``None``: it does not."""

    version: str | None = None
    skew_s: float | None = None


@dataclass(frozen=True)
class EtcdCheck:
    """Checks that etcd answers as Quartet asks it, or that ``quartet up`` could start one.

    Attributes:
        config: where etcd is.
        is_chosen: the user named the endpoints, so one that does not answer is wrong.
    """

    config: EtcdConfig
    is_chosen: bool

    async def __call__(self) -> Sequence[Finding]:
        """Ask all endpoints at the same time, each for itself."""
        singly = [replace(self.config, endpoints=(endpoint,)) for endpoint in self.config.endpoints]
        answers = await asyncio.gather(*(self._ask(config) for config in singly))
        return [finding for findings in answers for finding in findings]

    async def _ask(self, config: EtcdConfig) -> Sequence[Finding]:
        [endpoint] = config.endpoints
        fault = await etcd_fault(config)
        if not fault:
            facts = await ask_facts(config)
            version = "it gives no version over HTTP" if facts.version is None else f"version {facts.version}"
            return [ok("etcd", f"{endpoint} answers; {version}"), *judge_skew(endpoint, facts.skew_s)]
        if self.is_chosen:
            advice = "start it, name another one (--etcd), or say who you are (--etcd-cert, --etcd-user, --namespace)"
            return [wrong("etcd", f"{endpoint} does not answer a read: {fault}", advice)]
        return [await _startable(endpoint)]


async def ask_facts(config: EtcdConfig) -> EtcdFacts:
    """Version and clock of ``config``'s only endpoint, as far as it reports them; bounded in time."""
    [endpoint] = config.endpoints
    tls = config.tls
    address = endpoint.removeprefix("https://").removeprefix("http://")
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HTTP_TIMEOUT_S)) as session,
            session.get(
                f"{'http' if tls is None else 'https'}://{address}/version",
                ssl=True if tls is None else _ssl(tls),
                server_hostname=None if tls is None else tls.server_name,
            ) as response,
        ):
            now_s = time.time()
            body = await response.json(content_type=None)
            return EtcdFacts(str(body["etcdserver"]), _skew(response.headers.get("Date"), now_s))
    # It answered over gRPC, which is what counts. An etcd with HTTP on another port just reports less.
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
        return EtcdFacts()


def judge_skew(endpoint: str, skew_s: float | None) -> Sequence[Finding]:
    """What a host's clock that is ``skew_s`` seconds ahead of etcd's means."""
    if skew_s is None:
        return []
    if abs(skew_s) <= _MAX_SKEW_S:
        return [ok("clock", f"within {_MAX_SKEW_S:g} s of the etcd at {endpoint}")]
    message = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the etcd at {endpoint}"
    return [warning("clock", message, "signed starts and certificates expire by the clock: set up NTP on both hosts")]


@dataclass(frozen=True)
class PortsCheck:
    """Checks that the two ports of 127.0.0.1 that Quartet takes by default are free, or who answers there."""

    router_port: int = DEFAULT_ROUTER_PORT
    etcd_port: int = DEFAULT_ETCD_PORT

    async def __call__(self) -> Sequence[Finding]:
        """Check both at the same time."""
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
        # Servers set it too: a connection that has just ended does not keep the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOOPBACK, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


async def _startable(endpoint: str) -> Finding:
    binary = find_etcd()
    if binary is None:
        found = f"nothing answers at {endpoint}, and `quartet up` finds no etcd to start: it goes by files on this host"
        advice = "for several hosts `make tools` gets one; or install etcd-server, or set ETCD_ENDPOINTS"
        return warning("etcd", found, advice)
    run = await run_program([str(binary), "--version"], timeout_s=_VERSION_TIMEOUT_S)
    if run.exit_code != 0 or not run.lines:
        return wrong("etcd", f"{binary} --version {run.end}", "`make tools` gets one that runs here")
    return ok("etcd", f"nothing answers at {endpoint}; `quartet up` starts its own: {binary}, {run.lines[0]}")


def _skew(date: str | None, now_s: float) -> float | None:
    if date is None:
        return None
    # Whole seconds lose half a second on average.
    return now_s - (email.utils.parsedate_to_datetime(date).timestamp() + 0.5)


def _ssl(tls: EtcdTls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=None if tls.ca_file is None else str(tls.ca_file))
    if tls.cert_file is not None and tls.key_file is not None:
        context.load_cert_chain(str(tls.cert_file), str(tls.key_file))
    return context


async def _count_workers(port: int) -> int | None:
    try:
        async with asyncio.timeout(_ROUTER_TIMEOUT_S), QuartetClient([f"{_LOOPBACK}:{port}"]) as client:
            return len(await client.list_workers())
    except (ServingError, TimeoutError):
        return None
