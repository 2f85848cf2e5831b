"""Whether etcd answers the way Quartet asks it, and else whether one can be started here."""

from __future__ import annotations

import asyncio
import email.utils
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import aiohttp

from cli.doctor.finding import Finding, ok, warning, wrong
from cli.doctor.program import run_program
from quartet.discovery.etcd_client import EtcdConfig
from services.topology.launch import etcd_answers, find_etcd

_HTTP_TIMEOUT_S = 2.0
_VERSION_TIMEOUT_S = 3.0
# What etcd says of the time is whole seconds, and half a round trip old.
_MAX_SKEW_S = 2.0


@dataclass(frozen=True)
class EtcdFacts:
    """What an etcd tells over HTTP; ``None`` where it doesn't."""

    version: str | None = None
    skew_s: float | None = None


@dataclass(frozen=True)
class EtcdCheck:
    """The check.

    Attributes:
        config: where etcd is.
        is_chosen: somebody named the endpoints: one that does not answer is then wrong.
    """

    config: EtcdConfig
    is_chosen: bool

    async def __call__(self) -> Sequence[Finding]:
        """Ask every endpoint by itself, at the same time."""
        singly = [replace(self.config, endpoints=(endpoint,)) for endpoint in self.config.endpoints]
        answers = await asyncio.gather(*(self._ask(config) for config in singly))
        return [finding for findings in answers for finding in findings]

    async def _ask(self, config: EtcdConfig) -> Sequence[Finding]:
        [endpoint] = config.endpoints
        if await etcd_answers(config):
            facts = await ask_facts(config)
            version = "its version is not told over HTTP" if facts.version is None else f"version {facts.version}"
            return [ok("etcd", f"{endpoint} answers; {version}"), *judge_skew(endpoint, facts.skew_s)]
        if self.is_chosen:
            return [
                wrong("etcd", f"{endpoint} does not answer", "start it, or name another one: --etcd, ETCD_ENDPOINTS")
            ]
        return [await _startable(endpoint)]


async def ask_facts(config: EtcdConfig) -> EtcdFacts:
    """Version and clock of ``config``'s one etcd, as far as it tells them; bounded in time."""
    [endpoint] = config.endpoints
    is_secure = config.ca_file is not None or endpoint.startswith("https://")
    address = endpoint.removeprefix("https://").removeprefix("http://")
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HTTP_TIMEOUT_S)) as session,
            session.get(
                f"{'https' if is_secure else 'http'}://{address}/version", ssl=_ssl(config) if is_secure else True
            ) as response,
        ):
            now_s = time.time()
            body = await response.json(content_type=None)
            return EtcdFacts(str(body["etcdserver"]), _skew(response.headers.get("Date"), now_s))
    # It answered over gRPC, which is what counts; where it has HTTP elsewhere, it just tells less.
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
        return EtcdFacts()


def judge_skew(endpoint: str, skew_s: float | None) -> Sequence[Finding]:
    """What it means that this host's clock is ``skew_s`` seconds ahead of etcd's."""
    if skew_s is None:
        return []
    if abs(skew_s) <= _MAX_SKEW_S:
        return [ok("clock", f"within {_MAX_SKEW_S:g} s of the etcd at {endpoint}")]
    message = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the etcd at {endpoint}"
    return [warning("clock", message, "signed starts and certificates expire by the clock: set up NTP on both hosts")]


async def _startable(endpoint: str) -> Finding:
    binary = find_etcd()
    if binary is None:
        return wrong(
            "etcd",
            f"nothing answers at {endpoint}, and `quartet up` finds no etcd to start",
            "`make tools` gets one; or install etcd-server, or set ETCD_ENDPOINTS",
        )
    run = await run_program([str(binary), "--version"], timeout_s=_VERSION_TIMEOUT_S)
    if run.exit_code != 0 or not run.lines:
        return wrong("etcd", f"{binary} --version {run.end}", "`make tools` gets one that runs here")
    return ok("etcd", f"nothing answers at {endpoint}; `quartet up` starts its own: {binary}, {run.lines[0]}")


def _skew(date: str | None, now_s: float) -> float | None:
    if date is None:
        return None
    # Half a second is what the whole seconds cut off on average.
    return now_s - (email.utils.parsedate_to_datetime(date).timestamp() + 0.5)


def _ssl(config: EtcdConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=None if config.ca_file is None else str(config.ca_file))
    if config.cert_file is not None and config.key_file is not None:
        context.load_cert_chain(str(config.cert_file), str(config.key_file))
    return context
