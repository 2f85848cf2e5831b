"""Whom the router's queue serves first, whom it refuses, and what policies are shown of it."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest

from quartet.discovery.base import Rank
from quartet.errors import QueueFullError, WorkerUnavailableError
from quartet.events.load import StepTime
from router.admission import MAX_ASSIGNED_TOGETHER, QueuedRequest
from router.book import Reservation
from router.policy.base import Decision, Pending, Snapshot
from router.policy.greedy import RoundRobinPolicy
from router.policy.kv_aware import KvAwareConfig, KvAwarePolicy
from router.tenants import TenantConfig
from tests.router.admission_scene import POOL, RECORD, TIMEOUT_S, AdmissionScene
from tests.router.records import make_load


async def test_a_tenant_that_floods_is_refused_and_does_not_delay_other_tenants() -> None:
    scene = AdmissionScene(max_queue_length=20)
    full = scene.ask("full", 10, tenant="flood")
    await scene.settle()
    flood = [scene.ask(f"flood {number}", 10, tenant="flood") for number in range(30)]
    await scene.settle()
    assert [task.done() for task in flood] == [False] * 20 + [True] * 10
    small = [scene.ask(f"small {number}", 10, tenant="small") for number in range(2)]
    await scene.settle()
    assert [task.done() for task in flood] == [False] * 18 + [True] * 12
    for task in (full, small[0], flood[0], small[1]):
        await scene.release(task)
    assert scene.order == ["full", "small 0", "flood 0", "small 1", "flood 1"]
    assert scene.outcomes() == {"placed": 5, "refused": 12}
    await scene.close()


async def test_a_flood_waits_here_and_not_at_a_worker_whose_batch_is_full() -> None:
    scene = AdmissionScene()
    # Four other requests run there, of another router; all have room for more.
    scene.table.report(make_load(RECORD, max_running=6, num_running=4), 0.0)
    flood = [scene.ask(f"flood {number}", 1, tenant="flood") for number in range(100)]
    await scene.settle()
    small = scene.ask("small", 1, tenant="small")
    await scene.settle()
    assert scene.order == ["flood 0", "flood 1"]
    # The place of a request that ends is free at once, before the worker reports it; the small tenant's turn has come.
    await scene.release(flood[0])
    assert small.done()
    scene.table.report(make_load(RECORD, max_running=6, num_running=5, num_waiting=1), 0.0)
    await scene.release(small)
    assert scene.order == ["flood 0", "flood 1", "small"], "six run there still"
    scene.table.report(make_load(RECORD, max_running=6, num_running=4), 0.0)
    await scene.settle()
    assert scene.order == ["flood 0", "flood 1", "small", "flood 2"]
    await scene.close()


async def test_a_tenant_that_weighs_more_gets_more() -> None:
    scene = AdmissionScene(tenants={"heavy": TenantConfig(weight=3.0)})
    tasks = [scene.ask("full", 10, tenant="nobody")]
    await scene.settle()
    tasks += [scene.ask(name, 10, tenant=name) for _ in range(12) for name in ("heavy", "light")]
    for _ in range(12):
        [running] = [task for task in tasks if task.done() and not task.result().is_released]
        await scene.release(running)
    assert 8 <= scene.order[1:].count("heavy") <= 10


async def test_a_request_of_higher_priority_displaces_the_last_queued_one() -> None:
    scene = AdmissionScene(max_queue_length=1)
    scene.ask("full", 10)
    await scene.settle()
    last = scene.ask("last", 10)
    await scene.settle()
    scene.ask("urgent", 10, priority=1)
    with pytest.raises(QueueFullError):
        await scene.result(last)
    assert scene.admission.length == 1


async def test_a_priority_neither_delays_nor_refuses_another_tenants_requests() -> None:
    scene = AdmissionScene(max_queue_length=4)
    full = scene.ask("full", 10, tenant="nobody")
    await scene.settle()
    others = [scene.ask(f"b{number}", 10, tenant="b") for number in range(2)]
    urgent = [scene.ask(f"a{number}", 10, tenant="a", priority=2**31 - 1) for number in range(10)]
    await scene.settle()
    assert not any(task.done() for task in others)
    assert [task.done() for task in urgent] == [False] * 2 + [True] * 8
    for task in (full, others[0], urgent[0], others[1]):
        await scene.release(task)
    assert scene.order == ["full", "b0", "a0", "b1", "a1"]


class LevelsPolicy(RoundRobinPolicy):
    """Notes the priorities that it is shown."""

    def __init__(self) -> None:
        super().__init__(10**9)
        self.seen: list[int] = []

    def assign(self, queued: Sequence[Pending], snapshot: Snapshot) -> Decision:
        self.seen = [pending.priority for pending in queued]
        return super().assign(queued, snapshot)


async def test_a_policy_is_shown_which_requests_come_behind_others_of_their_tenant() -> None:
    policy = LevelsPolicy()
    scene = AdmissionScene(policy)
    full = scene.ask("full", 10, tenant="nobody")
    await scene.settle()
    for tenant, priority in (("a", 2**31 - 1), ("a", 7), ("a", 7), ("b", 0), ("c", -9)):
        scene.ask(tenant, 10, tenant=tenant, priority=priority)
    for number in range(20):
        scene.ask("d", 10, tenant="d", priority=number)
    await scene.settle()
    assert policy.seen[:8] == [0, 0, 0, 0, -1, -1, -1, -2]
    assert sorted(set(policy.seen)) == list(range(-7, 1)), "each level costs the policy time"
    await scene.release(full)
    scene.tasks[1].cancel()
    await scene.settle()
    assert policy.seen[:4] == [0, 0, 0, 0], "the most urgent one of a is placed, or gone"
    await scene.close()


async def test_kv_aware_lets_tiny_prompts_overtake_another_tenants_long_one_by_no_more_than_its_own_work() -> None:
    scene = AdmissionScene(KvAwarePolicy(random.Random(0), KvAwareConfig(gather_s=0.0)))
    step_time = StepTime(prefill_base_s=1e-3, prefill_s_per_token=1e-3)

    async def ask(tenant: str, num_tokens: int, first: int) -> Reservation:
        queued = QueuedRequest(
            standing=scene.admission.standing(POOL, tenant=tenant, num_tokens=num_tokens),
            num_tokens=num_tokens,
            num_reserved_tokens=num_tokens,
            num_most_tokens=num_tokens,
            arrived_at=time.monotonic(),
            sequence_hashes=range(first, first + num_tokens // 10),
        )
        return await scene.admission.admit(queued)

    busy = make_load(RECORD, step_time=step_time, max_running=1, num_running=1)
    free = make_load(RECORD, step_time=step_time, max_running=2, num_running=0)
    scene.table.report(busy, 0.0)
    long = asyncio.create_task(ask("long", 60, 1))
    await scene.settle()
    overtakers: list[asyncio.Task[Reservation]] = []
    while not long.done():
        overtakers += [asyncio.create_task(ask("tiny", 10, 10 * len(overtakers) + 100)) for _ in range(2)]
        await scene.settle()
        scene.table.report(free, 0.0)
        await scene.settle()
        scene.table.report(busy, 0.0)
        for task in overtakers:
            if task.done():
                task.result().release()
        await scene.settle()
        assert len(overtakers) < 100
    num_overtaken = sum(task.done() for task in overtakers)
    # It pays as much as 1.4 of them; more than one may be bound at a time.
    assert num_overtaken <= 4
    long.result().release()
    for task in overtakers:
        task.cancel()
    await asyncio.gather(*overtakers, return_exceptions=True)


async def test_waits_that_end_without_a_placement_are_counted_by_cause() -> None:
    scene = AdmissionScene(queue_timeout_s=0.05, unavailable_timeout_s=0.05)
    full = scene.ask("full", 10)
    await scene.settle()
    with pytest.raises(QueueFullError):
        await scene.result(scene.ask("late", 10))
    (await scene.result(full)).release()
    scene.table.broken(RECORD.key, RECORD.epoch)
    with pytest.raises(WorkerUnavailableError):
        await scene.result(scene.ask("nowhere", 1))
    assert scene.outcomes() == {"placed": 1, "expired": 1, "unavailable": 1}


async def test_a_wait_that_is_given_up_is_counted_as_cancelled() -> None:
    scene = AdmissionScene()
    scene.ask("full", 10)
    await scene.settle()
    gone = scene.ask("gone", 10)
    await scene.settle()
    gone.cancel()
    await asyncio.wait([gone])
    assert scene.outcomes() == {"placed": 1, "cancelled": 1}


class PatientPolicy(RoundRobinPolicy):
    """Keeps everybody at its first ``num_looks`` looks, and notes what it is shown."""

    def __init__(self, num_looks: int, poll_again_in_s: float | None = 0.001) -> None:
        super().__init__(10**9)
        self.num_looks_left = num_looks
        self.poll_again_in_s = poll_again_in_s
        self.seen: list[dict[Rank, int]] = []

    def assign(self, queued: Sequence[Pending], snapshot: Snapshot) -> Decision:
        self.seen += [dict(pending.num_cached_tokens) for pending in queued]
        self.num_looks_left -= 1
        if self.num_looks_left >= 0:
            return Decision([None] * len(queued), poll_again_in_s=self.poll_again_in_s)
        return super().assign(queued, snapshot)


async def test_a_policy_that_asks_for_another_poll_is_polled_again_without_an_event() -> None:
    scene = AdmissionScene(PatientPolicy(3))
    assert (await scene.result(scene.ask("late", 1))).placement.decode.worker_id == "decode-0"


async def test_a_policy_sees_cached_blocks_and_those_of_requests_sent_lately() -> None:
    policy = PatientPolicy(1, poll_again_in_s=None)
    scene = AdmissionScene(policy)
    rank = Rank("decode-0")
    scene.index.store(rank, None, [1, 2])
    first = scene.ask("first", 4, hashes=[1, 2, 3])
    await scene.settle()
    scene.index.remove(rank, [2])
    scene.admission.wake()
    await scene.result(first)
    assert policy.seen == [{rank: 20}, {rank: 10}]
    await scene.result(scene.ask("second", 4, hashes=[1, 2, 3, 4]))
    assert policy.seen[2:] == [{rank: 30}], "the blocks of the first one are predicted"
    scene.index.expire(float("inf"))
    standing = scene.admission.standing(POOL)
    queued = QueuedRequest(
        standing=standing, num_tokens=30, num_reserved_tokens=30, num_most_tokens=30, sequence_hashes=[1, 2, 3]
    )
    shown, snapshot = scene.admission.preview(queued)
    assert dict(shown.num_cached_tokens) == {rank: 10}
    assert [candidate.rank for candidate in snapshot.decode] == [rank]
    assert scene.admission.num_waiting(POOL) == 0


class SlowPolicy(RoundRobinPolicy):
    """Takes its time, the first so many times, and places nobody."""

    def __init__(self, num_slow: int = sys.maxsize) -> None:
        super().__init__(10**9)
        self._num_slow = num_slow
        self.looks: list[tuple[float, float, float]] = []  # when each began and ended, and how long it computed

    def assign(self, queued: Sequence[Pending], snapshot: Snapshot) -> Decision:
        began, computed_s = time.monotonic(), time.thread_time()
        while len(self.looks) < self._num_slow and time.thread_time() < computed_s + 0.02:
            pass
        self.looks.append((began, time.monotonic(), time.thread_time() - computed_s))
        return Decision([None] * len(queued))


async def test_a_slow_policy_takes_only_a_share_of_the_event_loop() -> None:
    policy = SlowPolicy()
    scene = AdmissionScene(policy, max_queue_length=2)
    asked = [scene.ask(str(number), 1) for number in range(5)]
    async with asyncio.timeout(TIMEOUT_S):
        while len(policy.looks) < 5:
            scene.admission.wake()
            await asyncio.sleep(0)
    for (_, ended, computed_s), (next_began, _, _) in pairwise(policy.looks[1:]):  # it was slow twice by then
        assert next_began - ended > 3.5 * computed_s, "a fifth of the time, however often something happens"
    assert sum(task.done() for task in asked) == 3, "the queue's bound holds meanwhile"
    await scene.close()


async def test_a_policy_that_was_slow_once_runs_again_at_once() -> None:
    policy = SlowPolicy(num_slow=1)  # the garbage collector may have looked around just then
    scene = AdmissionScene(policy)
    scene.ask("first", 1)
    async with asyncio.timeout(TIMEOUT_S):
        while not policy.looks:  # noqa: ASYNC110 - a policy has no event for it
            await asyncio.sleep(0)
    scene.admission.wake()
    for _ in range(3):  # turns of the loop, which take less than the 80 ms of a rest
        await asyncio.sleep(0)
    assert len(policy.looks) == 2
    await scene.close()


async def test_requests_that_wait_for_an_adapter_do_not_delay_others() -> None:
    scene = AdmissionScene(max_queue_length=1000)
    standing = scene.admission.standing(POOL)
    kept = [
        asyncio.create_task(
            scene.admission.admit(
                QueuedRequest(
                    standing=standing, num_tokens=1, num_reserved_tokens=1, num_most_tokens=1, adapter="absent"
                )
            )
        )
        for _ in range(MAX_ASSIGNED_TOGETHER)
    ]
    await scene.settle()
    await scene.result(scene.ask("plain", 1))
    for task in kept:
        task.cancel()
    await asyncio.gather(*kept, return_exceptions=True)
    assert scene.admission.length == 0
