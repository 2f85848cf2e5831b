"""Prefills in other namespaces: their routers place the prompt, and a worker of this router pulls the blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from quartet.api.convert.prefill import AskedPrefill, PrefilledFor
from quartet.api.router_link import RouterLink
from quartet.errors import DrainingError, RouterUnavailableError, WorkerUnavailableError
from quartet.rpc.channels import Dialer, TlsConfig


class PrefillPools:
    """The routers of other namespaces that prefill for this one."""

    def __init__(self, routers: Mapping[str, Sequence[str]], tls: TlsConfig | None) -> None:
        """``routers`` has ``host:port`` of each router, by namespace. Nothing is dialled yet.

        Raises:
            ConfigError: a file of ``tls`` can't be used.
        """
        dialer = Dialer(tls) if routers else None
        self._links = {
            namespace: [RouterLink(address, dialer) for address in addresses] if dialer is not None else []
            for namespace, addresses in routers.items()
        }
        self._turn = 0

    @property
    def namespaces(self) -> Collection[str]:
        """Of all pools."""
        return self._links.keys()

    async def prefill(self, namespace: str, asked: AskedPrefill, *, timeout_s: float) -> PrefilledFor:
        """Have a prompt prefilled by one of the routers of ``namespace``, which are asked in turn.

        Raises:
            WorkerUnavailableError: none of them answers.
            ServingError: the first that answers failed.
        """
        links = self._links[namespace]
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
        await asyncio.gather(*(link.close() for links in self._links.values() for link in links))
