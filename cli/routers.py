"""``quartet routers``: shows the routers that discovery lists."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.table import Table

from cli.options import EtcdOptions
from cli.output import open_console
from quartet.discovery.base import RouterRecord
from quartet.discovery.create import DiscoveryConfig, create_registry
from quartet.discovery.etcd_client import EtcdConfig

_PIPE_WIDTH = 200


def routers(*, etcd: EtcdOptions) -> None:
    """Show the routers that announce themselves in etcd."""
    discovery = etcd.discovery(default=EtcdConfig().endpoints[0])
    assert discovery is not None, "it has a default"
    open_console(pipe_width=_PIPE_WIDTH, highlight=True).print(router_table(asyncio.run(_list(discovery))))


async def _list(discovery: DiscoveryConfig) -> list[RouterRecord]:
    registry = create_registry(discovery)
    try:
        return await registry.routers()
    finally:
        await registry.close()


def router_table(routers: Sequence[RouterRecord]) -> Table:
    """One row a router. ``calls``: of Generate, that it takes at a time."""
    table = Table()
    for name in ("router", "gRPC", "HTTP", "metrics", "bookings", "contract"):
        table.add_column(name, no_wrap=name == "router")
    table.add_column("calls", justify="right")
    for record in routers:
        addresses = (record.grpc_address, record.http_address, record.metrics_address, record.events_address)
        shown = [address or "-" for address in addresses]
        table.add_row(record.router_id, *shown, record.contract_version, str(record.max_generates or "-"))
    return table
