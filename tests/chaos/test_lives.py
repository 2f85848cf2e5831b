"""Two processes with the id of one worker: the one that was silent for too long leaves it to the other."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest

from benchmarks.chaos_client import Clients, draw_asks
from benchmarks.chaos_fleet import READY, Fleet, FleetConfig
from quartet.client import RequestPath
from services.workers.config import EXIT_REPLACED

WAIT_S = 90.0
POLL_S = 0.05


@pytest.mark.usefixtures("etcd_binary")
async def test_a_frozen_worker_whose_id_another_has_taken_leaves_when_it_goes_on(tmp_path: Path) -> None:
    config = FleetConfig(num_prefill=1, num_decode=1, num_routers=1)
    async with Fleet(config, tmp_path, {}) as fleet:
        fleet.freeze("decode-0")
        async with asyncio.timeout(WAIT_S):
            while (await fleet.worker_states("router-0")).get("decode-0") == READY:  # noqa: ASYNC110 - of a process
                await asyncio.sleep(POLL_S)
        old = await fleet.replace("decode-0")
        await fleet.wait_ready(WAIT_S)
        ports = await fleet.worker_ports("router-0")
        assert ports["decode-0"] == int(fleet.grpc_address("decode-0").rpartition(":")[2])

        old.send(signal.SIGCONT)
        async with asyncio.timeout(WAIT_S):
            assert await old.wait() == EXIT_REPLACED
        assert await fleet.worker_ports("router-0") == ports
        [ask] = draw_asks(random.Random(0), 1, num_tokens=range(16, 17))
        clients = Clients(fleet.router_addresses)
        answer = await clients.ask(ask, RequestPath.GENERATE)
        await clients.close()
        assert (answer.error, len(answer.token_ids), answer.num_breaks) == (None, 16, 0)
