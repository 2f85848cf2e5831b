"""The router's queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from quartet.errors import QueueFullError
from router.admission import MAX_ASSIGNED_TOGETHER, QueuedRequest
from router.policy.base import Decision, Pending, Snapshot
from router.policy.greedy import RoundRobinPolicy
from tests.router.admission_scene import POOL, RECORD, TIMEOUT_S, AdmissionScene
from tests.router.records import make_load


@pytest.fixture
async def scene() -> AsyncIterator[AdmissionScene]:
    scene = AdmissionScene()
    yield scene
    await scene.close()


async def test_a_request_that_fits_is_admitted_at_once_and_the_next_when_blocks_are_released(
    scene: AdmissionScene,
) -> None:
    first, second = scene.ask("first", 6), scene.ask("second", 6)
    await scene.settle()
    assert (first.done(), second.done(), scene.admission.length) == (True, False, 1)
    await scene.release(first)
    assert second.done()
    assert scene.admission.length == 0


async def test_higher_priorities_come_first_and_equals_in_the_order_of_arrival(scene: AdmissionScene) -> None:
    full = scene.ask("full", 10)
    await scene.settle()
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 5), ("e", 0)):
        scene.ask(name, 10, priority=priority)
    for task in (full, *(scene.tasks[i] for i in (2, 4, 1, 5))):
        await scene.release(task)
    assert scene.order == ["full", "b", "d", "a", "e", "c"]


async def test_small_requests_do_not_starve_a_large_one(scene: AdmissionScene) -> None:
    small = scene.ask("small", 4)
    await scene.settle()
    large, late = scene.ask("large", 10), scene.ask("late", 2)
    await scene.settle()
    assert not large.done() and not late.done()
    await scene.release(small)
    assert scene.order == ["small", "large"]


async def test_cancelling_a_queued_request_admits_the_one_behind_it(scene: AdmissionScene) -> None:
    scene.ask("small", 4)
    await scene.settle()
    large, late = scene.ask("large", 10), scene.ask("late", 2)
    await scene.settle()
    large.cancel()
    await scene.settle()
    assert late.done()
    assert scene.admission.length == 0


async def test_a_load_report_with_free_blocks_admits_the_next_request(scene: AdmissionScene) -> None:
    scene.table.report(make_load(RECORD, num_in_use_blocks=8), 0.0)
    waiting = scene.ask("waiting", 5)
    await scene.settle()
    assert not waiting.done()
    scene.table.report(make_load(RECORD, num_in_use_blocks=5, num_cached_blocks=5), 0.0)
    await scene.settle()
    assert waiting.done()


async def test_a_request_cancelled_at_the_moment_of_its_placement_releases_it(scene: AdmissionScene) -> None:
    first = scene.ask("first", 10)
    await scene.settle()
    second = scene.ask("second", 10)
    await scene.settle()
    (await scene.result(first)).release()
    scene.admission._pump()  # places it; its task has not run yet
    second.cancel()
    await asyncio.wait([second])
    assert second.cancelled()
    [status] = scene.table.statuses(0.0)
    assert status.num_requests == 0


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    scene = AdmissionScene(max_queue_length=2, retry_delay_s=3.0)
    full = scene.ask("full", 10)
    await scene.settle()
    assert scene.admission.usage == 0.0
    waiting = [scene.ask("0", 1)]
    await scene.settle()
    assert scene.admission.usage == 0.5
    waiting.append(scene.ask("1", 1))
    await scene.settle()
    with pytest.raises(QueueFullError) as caught:
        await scene.result(scene.ask("refused", 1))
    assert scene.admission.usage == 1.0
    assert caught.value.retry_delay_s == 3.0
    assert scene.outcomes() == {"placed": 1, "refused": 1}
    await scene.release(full)
    assert all(task.done() for task in waiting)
    assert scene.outcomes() == {"placed": 3, "refused": 1}


async def test_a_burst_larger_than_the_queue_is_admitted_while_blocks_are_free() -> None:
    scene = AdmissionScene(max_queue_length=2)
    burst = [scene.ask(str(i), 1) for i in range(10)]
    await scene.settle()
    assert all(task.done() and task.exception() is None for task in burst)


async def test_a_request_of_many_choices_is_refused_before_any_of_them_comes() -> None:
    scene = AdmissionScene(max_queue_length=10)
    full = scene.ask("full", 10)
    await scene.settle()
    admission, most = scene.admission, 10 + MAX_ASSIGNED_TOGETHER
    standings = [admission.standing(POOL, tenant="a", num_choices=64) for _ in range(most // 64)]
    assert admission.length == 64 * len(standings), "they count before they come"
    with pytest.raises(QueueFullError):
        admission.standing(POOL, tenant="a", num_choices=64)
    assert scene.outcomes() == {"placed": 1, "refused": 64}
    for standing in standings:
        admission.leave(standing)
        admission.leave(standing)
    assert admission.length == 0
    await scene.release(full)


async def test_a_request_of_many_choices_displaces_requests_of_a_tenant_that_fills_the_queue() -> None:
    scene = AdmissionScene(max_queue_length=10)
    scene.ask("full", 10)
    await scene.settle()
    standings = [scene.admission.standing(POOL, tenant="a", num_choices=10) for _ in range(26)]
    crowd = [asyncio.create_task(scene.admit(standing)) for standing in standings for _ in range(10)]
    await asyncio.sleep(0)
    standing = scene.admission.standing(POOL, tenant="b", num_choices=10)
    assert scene.admission.length == 10 + MAX_ASSIGNED_TOGETHER
    await scene.settle()
    assert scene.admission.length == 10, "the policy has run, and those beyond the bound are refused"
    own = [asyncio.create_task(scene.admit(standing)) for _ in range(5)]
    await scene.settle()
    assert not any(task.done() for task in own)
    scene.admission.leave(standing)
    assert scene.admission.length == 10 - 5
    scene.tasks += [*crowd, *own]
    await scene.close()
    assert scene.admission.length == 0


async def test_the_policy_runs_at_most_once_a_turn_however_many_requests_a_full_queue_gets() -> None:
    policy = CountingPolicy()
    scene = AdmissionScene(policy, max_queue_length=20)
    scene.ask("full", 10)
    await scene.settle()
    before = policy.num_looks
    for turn in range(1, 6):
        for number in range(1000):
            scene.ask(f"{number}", 10)
        await asyncio.sleep(0)
        assert policy.num_looks <= before + turn
        assert scene.admission.length <= 20 + MAX_ASSIGNED_TOGETHER
    await scene.settle()
    assert scene.admission.length == 20
    await scene.close()


async def test_more_requests_than_are_assigned_at_once_are_all_admitted_while_blocks_are_free() -> None:
    scene = AdmissionScene(max_queue_length=1000)
    scene.table.broken(RECORD.key, RECORD.epoch)
    waiting = [scene.ask(str(i), 0) for i in range(2 * MAX_ASSIGNED_TOGETHER + 1)]
    await scene.settle()
    assert not any(task.done() for task in waiting)
    scene.table.connected(RECORD.key, make_load(RECORD), 0.0)
    for task in waiting:
        await scene.result(task)


async def test_a_request_waits_for_room_however_long_workers_may_be_away() -> None:
    scene = AdmissionScene(queue_timeout_s=0.3, unavailable_timeout_s=0.02)
    await scene.result(scene.ask("running", 10))
    with pytest.raises(QueueFullError, match="no worker had room in time"):
        await scene.result(scene.ask("waiting", 10))
    assert scene.outcomes() == {"placed": 1, "expired": 1}, "it was sent away before its time"


async def test_a_retry_is_queued_past_the_queues_bound() -> None:
    scene = AdmissionScene(max_queue_length=1)
    full = scene.ask("full", 10)
    await scene.settle()
    scene.ask("waiting", 10)
    await scene.settle()
    standing = scene.admission.standing(POOL)
    queued = QueuedRequest(standing=standing, is_retry=True, num_tokens=1, num_reserved_tokens=10, num_most_tokens=10)
    retry = asyncio.create_task(scene.admission.admit(queued))
    await scene.settle()
    assert scene.admission.length == 2
    await scene.release(full)
    await scene.release(scene.tasks[1])
    assert (await scene.result(retry)).placement.decode.worker_id == "decode-0"


async def test_a_retry_is_none_of_the_choices_that_are_still_to_come() -> None:
    scene = AdmissionScene()
    standing = scene.admission.standing(POOL, num_choices=3)
    first = asyncio.create_task(scene.admit(standing))
    await scene.settle()
    assert (first.done(), scene.admission.length) == (True, 2)
    queued = QueuedRequest(standing=standing, is_retry=True, num_tokens=1, num_reserved_tokens=100, num_most_tokens=100)
    scene.tasks.append(asyncio.create_task(scene.admission.admit(queued)))
    await scene.settle()
    assert scene.admission.length == 1 + 2
    scene.admission.leave(standing)
    assert scene.admission.length == 1
    await scene.close()


class CountingPolicy(RoundRobinPolicy):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__(10**9)
        self.num_looks = 0

    def assign(self, queued: Sequence[Pending], snapshot: Snapshot) -> Decision:
        self.num_looks += 1
        return super().assign(queued, snapshot)


class CountedPriority(int):
    """A priority that counts how often it is compared with another."""

    num_comparisons = 0

    def __neg__(self) -> CountedPriority:
        return CountedPriority(-int(self))

    def __eq__(self, other: object) -> bool:
        CountedPriority.num_comparisons += 1
        return int(self) == other

    __hash__ = int.__hash__


async def test_admitting_a_request_does_not_scan_a_long_queue() -> None:
    scene = AdmissionScene(max_queue_length=1000)
    full = scene.ask("full", 10)
    await scene.settle()
    CountedPriority.num_comparisons = 0
    waiting = [scene.ask(str(i), 1, priority=CountedPriority(-i)) for i in range(500)]
    await scene.settle()
    await scene.release(full)
    assert [task.done() for task in waiting].count(True) == 10
    for task in waiting:
        task.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*waiting, return_exceptions=True)
    assert scene.admission.length == 0
    # Binary searches look at no more than log2(500) = 9 each; three of them make one request's way.
    assert 0 < CountedPriority.num_comparisons < 500 * 3 * 10


async def test_the_admission_reports_the_length_of_its_queue(scene: AdmissionScene) -> None:
    full = scene.ask("full", 10)
    await scene.settle()
    scene.ask("waiting", 10)
    await scene.settle()
    assert scene.admission.length == 1
    await scene.release(full)
    assert scene.admission.length == 0
