"""Which workers have announced themselves: each does once its engine is loaded and it takes requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection

from quartet.discovery.create import DiscoveryConfig, create_registry
from quartet.errors import DiscoveryError

_POLL_INTERVAL_S = 0.2


async def wait_announced(discovery: DiscoveryConfig, worker_ids: Collection[str]) -> None:
    """Wait until all of ``worker_ids`` are in the registry; while that can't be reached, they are not."""
    missing = set(worker_ids)
    registry = create_registry(discovery)
    try:
        while missing:
            # An etcd that has just been started does not answer yet.
            with contextlib.suppress(DiscoveryError):
                missing -= {record.worker_id for record in await registry.workers()}
            if missing:
                await asyncio.sleep(_POLL_INTERVAL_S)
    finally:
        await registry.close()
