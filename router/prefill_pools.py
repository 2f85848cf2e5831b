"""Prefills in other namespaces: their routers place the prompt, and a worker of this router pulls the blocks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence

from quartet.api.convert.prefill import AskedPrefill, PrefilledFor
from quartet.api.router_link import RouterLink
from quartet.discovery.base import SPOKEN_VERSIONS, Registry
from quartet.discovery.create import DiscoveryConfig, create_registry
from quartet.errors import DrainingError, RouterUnavailableError, WorkerUnavailableError
from quartet.rpc.channels import Dialer, TlsConfig
from quartet.telemetry.metrics import CertificateMetrics, CertificateUse

logger = logging.getLogger(__name__)

# Between two looks at a router that has left, whether its last prompt is done.
_IDLE_POLL_S = 0.5


class PrefillPools:
    """The routers of other namespaces that prefill for this one."""

    def __init__(
        self, routers: Mapping[str, Sequence[str]], tls: TlsConfig | None, discovery: DiscoveryConfig | None = None
    ) -> None:
        """``routers`` has ``host:port`` of each router, by namespace; without any they are found in ``discovery``.

        Nothing is dialled yet.

        Raises:
            ConfigError: a file of ``tls`` or ``discovery`` can't be used.
        """
        self._dialer = Dialer(tls) if routers else None
        self._links = {namespace: [*map(self._link, addresses)] for namespace, addresses in routers.items()}
        self._registries: Mapping[str, Registry] = {
            namespace: create_registry(discovery.of_namespace(namespace))
            for namespace, addresses in routers.items()
            if not addresses and discovery is not None
        }
        self._turn = 0

    @property
    def namespaces(self) -> Collection[str]:
        """Of all pools."""
        return self._links.keys()

    @property
    def has_discovered(self) -> bool:
        """Whether routers of any pool are found in discovery."""
        return bool(self._registries)

    def watch_certificates(self, certificates: CertificateMetrics) -> None:
        """Have those shown with which routers and discovery are dialled."""
        if self._dialer is not None:
            certificates.watch(CertificateUse.DIAL, self._dialer.certificate_end)
        for registry in self._registries.values():
            certificates.watch(CertificateUse.ETCD, registry.certificate_end)

    async def follow(self) -> None:
        """Follow the routers that discovery lists until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for namespace, registry in self._registries.items():
                tasks.create_task(self._follow(tasks, namespace, registry), name=f"routers of {namespace}")

    async def prefill(self, namespace: str, asked: AskedPrefill, *, timeout_s: float) -> PrefilledFor:
        """Have a prompt prefilled by one of the routers of ``namespace``, which are asked in turn.

        Raises:
            WorkerUnavailableError: none of them answers.
            ServingError: the first that answers failed.
        """
        links = tuple(self._links[namespace])
        self._turn += 1
        why = "it has no router"
        for number in range(len(links)):
            try:
                return await links[(self._turn + number) % len(links)].prefill(asked, timeout_s=timeout_s)
            except (RouterUnavailableError, DrainingError) as error:
                why = error.message
        raise WorkerUnavailableError(f"nothing prefills in {namespace}: {why}")

    async def close(self) -> None:
        """End all calls and connections."""
        await asyncio.gather(
            *(registry.close() for registry in self._registries.values()),
            *(link.close() for links in self._links.values() for link in links),
        )

    def _link(self, address: str) -> RouterLink:
        assert self._dialer is not None, "there are pools"
        return RouterLink(address, self._dialer)

    async def _follow(self, tasks: asyncio.TaskGroup, namespace: str, registry: Registry) -> None:
        links = self._links[namespace]
        async for records in registry.watch_routers():
            listed = {record.grpc_address for record in records if record.contract_version in SPOKEN_VERSIONS}
            for link in [link for link in links if link.address not in listed]:
                links.remove(link)
                tasks.create_task(_leave(link), name=f"leave router {link.address}")
            links += map(self._link, sorted(listed - {link.address for link in links}))
            logger.info("routers that prefill in %s: %s", namespace, ", ".join(sorted(listed)) or "none")


async def _leave(link: RouterLink) -> None:
    """Close ``link`` once nothing runs there."""
    try:
        while not link.is_idle:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(_IDLE_POLL_S)
    finally:
        await link.close()
