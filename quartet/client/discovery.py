"""Finding routers where they announce themselves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from quartet.errors import RouterUnavailableError

if TYPE_CHECKING:
    from quartet.discovery.create import DiscoveryConfig

#: Where routers are found: addresses of etcd, or all settings of discovery, with its TLS, user or directory.
DiscoverySource: TypeAlias = "str | Sequence[str] | DiscoveryConfig"


async def find_routers(source: DiscoverySource, *, namespace: str = "default") -> list[str]:
    """The gRPC addresses of all routers that are announced now and speak our contract, in random order.

    ``namespace`` is the deployment's; a ``DiscoveryConfig`` has its own.

    Raises:
        DiscoveryError: the registry can't be reached.
        RouterUnavailableError: no router is announced.
        ConfigError, ValueError: an address or the namespace is malformed.
    """
    # Imported here: etcd's stubs take as long as half of a client, and most clients are given addresses.
    from quartet.discovery.base import SPOKEN_VERSIONS
    from quartet.discovery.create import DiscoveryConfig, create_registry
    from quartet.discovery.etcd_client import EtcdConfig

    if not isinstance(source, DiscoveryConfig):
        endpoints = (source,) if isinstance(source, str) else tuple(source)
        source = DiscoveryConfig(etcd=EtcdConfig(endpoints=endpoints, namespace=namespace))
    registry = create_registry(source)
    try:
        records = await registry.routers()
    finally:
        await registry.close()
    addresses = [record.grpc_address for record in records if record.contract_version in SPOKEN_VERSIONS]
    if not addresses:
        raise RouterUnavailableError("discovery lists no router")
    random.shuffle(addresses)
    return addresses
