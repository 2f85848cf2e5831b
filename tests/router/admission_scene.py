"""A router's admission queue in front of one small decode worker, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry

from quartet.telemetry.metrics import RouterMetrics
from router.admission import Admission, QueuedRequest
from router.book import Reservation
from router.config import AdmissionConfig
from router.fair_queue import Standing
from router.kv_index.index import PrefixIndex
from router.policy.base import Policy
from router.policy.greedy import RoundRobinPolicy
from router.tenants import TenantConfig, Tenants
from router.workers import PoolKey, WorkerTable
from tests.router.records import make_load, make_record

TIMEOUT_S = 30.0
RECORD = make_record("decode-0", num_blocks=10)
POOL = PoolKey(RECORD.model_name, RECORD.model_fingerprint)


class AdmissionScene:
    """An admission to one decode worker with 10 blocks of 10 tokens."""

    def __init__(
        self, policy: Policy | None = None, *, tenants: Mapping[str, TenantConfig] | None = None, **config: object
    ) -> None:
        self.table = WorkerTable("router-a", heartbeat_timeout_s=10**9)
        policy = policy or RoundRobinPolicy(10**9)
        self.index = PrefixIndex()
        self.metrics = CollectorRegistry()
        self.tenants = Tenants(tenants)
        self.admission = Admission(
            self.table, policy, AdmissionConfig(**config), self.index, RouterMetrics(self.metrics), self.tenants
        )
        self.table.listen(self.admission.wake)
        self.table.put(RECORD, 0.0)
        self.table.connected(RECORD.key, make_load(RECORD), 0.0)
        self.tasks: list[asyncio.Task[Reservation]] = []
        self.order: list[str] = []

    def ask(
        self, name: str, num_blocks: int, *, priority: int = 0, tenant: str = "", hashes: Sequence[int] = ()
    ) -> asyncio.Task[Reservation]:
        num_tokens = num_blocks * 10
        queued = QueuedRequest(
            standing=self.admission.standing(POOL, priority=priority, tenant=tenant, num_tokens=num_tokens),
            num_tokens=max(10 * len(hashes), 1),
            num_reserved_tokens=num_tokens,
            num_most_tokens=num_tokens,
            sequence_hashes=hashes,
        )

        async def wait() -> Reservation:
            reservation = await self.admission.admit(queued)
            self.order.append(name)
            return reservation

        self.tasks.append(asyncio.create_task(wait()))
        return self.tasks[-1]

    async def admit(self, standing: Standing) -> Reservation:
        """One choice of the request of ``standing``."""
        queued = QueuedRequest(standing=standing, num_tokens=1, num_reserved_tokens=100, num_most_tokens=100)
        return await self.admission.admit(queued)

    def outcomes(self) -> dict[str, float]:
        """How many waits ended in which way."""
        names = ("placed", "refused", "expired", "unavailable", "cancelled")
        counts = {
            name: self.metrics.get_sample_value("quartet_router_admissions_total", {"outcome": name}) for name in names
        }
        return {name: count for name, count in counts.items() if count}

    async def settle(self) -> None:
        """Turn the event loop until what is due has run, and the queue rests no more from what computed for long."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(TIMEOUT_S):
            num_quiet_turns = 0
            while num_quiet_turns < 20:
                await asyncio.sleep(0)
                is_quiet = self.admission._due_pump is None and self.admission._rests_until <= loop.time()
                num_quiet_turns = num_quiet_turns + 1 if is_quiet else 0

    async def release(self, task: asyncio.Task[Reservation]) -> None:
        (await self.result(task)).release()
        self.admission.wake()
        await self.settle()

    async def result(self, task: asyncio.Task[Reservation]) -> Reservation:
        async with asyncio.timeout(TIMEOUT_S):
            return await task

    async def close(self) -> None:
        """End what still waits."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
