"""When a topology can be used: the router and every worker serve, and the router places requests at all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from quartet.client import QuartetClient, WorkerState, WorkerStatus
from quartet.errors import ServingError
from quartet.rpc.channels import is_serving

_POLL_INTERVAL_S = 0.2


async def wait_ready(
    router_address: str, worker_ids: Collection[str], report: Callable[[str], None]
) -> Sequence[WorkerStatus]:
    """Wait until everything is ready; until then ``report`` is told what is missing whenever that changes.

    Returns:
        All workers.
    """
    told = ""
    async with QuartetClient(router_address) as client:
        while missing := await _missing(client, router_address, worker_ids):
            message = f"waiting for {', '.join(missing)}"
            if message != told:
                report(message)
                told = message
            await asyncio.sleep(_POLL_INTERVAL_S)
        return await client.list_workers()


async def _missing(client: QuartetClient, router_address: str, worker_ids: Collection[str]) -> list[str]:
    if not await is_serving(router_address):
        return ["router", *sorted(worker_ids)]
    try:
        known = {worker.record.worker_id: worker for worker in await client.list_workers()}
    except ServingError:
        # It has just come up, or is about to fall: its process tells.
        return ["router", *sorted(worker_ids)]
    missing = [worker_id for worker_id in sorted(worker_ids) if worker_id not in known]
    for worker_id in sorted(set(worker_ids) & set(known)):
        worker = known[worker_id]
        if worker.state is not WorkerState.READY:
            missing.append(f"{worker_id} ({worker.state})")
        elif not await is_serving(worker.record.grpc_address):
            missing.append(f"{worker_id} (not serving)")
    return missing
