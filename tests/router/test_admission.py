"""The router's queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from quartet.errors import QueueFullError
from router.admission import MAX_ASSIGNED_TOGETHER, QueuedRequest
from tests.router.desk import POOL, RECORD, TIMEOUT_S, Desk
from tests.router.records import make_load


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    yield desk
    await desk.close()


async def test_a_request_that_fits_is_admitted_at_once_and_the_next_when_blocks_are_released(desk: Desk) -> None:
    first, second = desk.ask("first", 6), desk.ask("second", 6)
    await desk.settle()
    assert (first.done(), second.done(), desk.admission.length) == (True, False, 1)
    await desk.release(first)
    assert second.done()
    assert desk.admission.length == 0


async def test_higher_priorities_come_first_and_equals_in_the_order_of_arrival(desk: Desk) -> None:
    full = desk.ask("full", 10)
    await desk.settle()
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 5), ("e", 0)):
        desk.ask(name, 10, priority=priority)
    for task in (full, *(desk.tasks[i] for i in (2, 4, 1, 5))):
        await desk.release(task)
    assert desk.order == ["full", "b", "d", "a", "e", "c"]


async def test_small_requests_do_not_starve_a_large_one(desk: Desk) -> None:
    small = desk.ask("small", 4)
    await desk.settle()
    large, late = desk.ask("large", 10), desk.ask("late", 2)
    await desk.settle()
    assert not large.done() and not late.done()
    await desk.release(small)
    assert desk.order == ["small", "large"]


async def test_cancelling_a_queued_request_admits_the_one_behind_it(desk: Desk) -> None:
    desk.ask("small", 4)
    await desk.settle()
    large, late = desk.ask("large", 10), desk.ask("late", 2)
    await desk.settle()
    large.cancel()
    await desk.settle()
    assert late.done()
    assert desk.admission.length == 0


async def test_a_load_report_with_free_blocks_admits_the_next_request(desk: Desk) -> None:
    desk.table.report(make_load(RECORD, num_in_use_blocks=8), 0.0)
    waiting = desk.ask("waiting", 5)
    await desk.settle()
    assert not waiting.done()
    desk.table.report(make_load(RECORD, num_in_use_blocks=5, num_cached_blocks=5), 0.0)
    await desk.settle()
    assert waiting.done()


async def test_a_request_cancelled_at_the_moment_of_its_placement_releases_it(desk: Desk) -> None:
    first = desk.ask("first", 10)
    await desk.settle()
    second = desk.ask("second", 10)
    await desk.settle()
    (await desk.result(first)).release()
    desk.admission._pump()  # places it; its task has not run yet
    second.cancel()
    await asyncio.wait([second])
    assert second.cancelled()
    [status] = desk.table.statuses(0.0)
    assert status.num_requests == 0


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    desk = Desk(max_queue_length=2, retry_delay_s=3.0)
    full = desk.ask("full", 10)
    await desk.settle()
    waiting = [desk.ask(str(i), 1) for i in range(2)]
    await desk.settle()
    with pytest.raises(QueueFullError) as caught:
        await desk.result(desk.ask("refused", 1))
    assert caught.value.retry_delay_s == 3.0
    assert desk.outcomes() == {"placed": 1, "refused": 1}
    await desk.release(full)
    assert all(task.done() for task in waiting)
    assert desk.outcomes() == {"placed": 3, "refused": 1}


async def test_a_burst_larger_than_the_queue_is_admitted_while_blocks_are_free() -> None:
    desk = Desk(max_queue_length=2)
    burst = [desk.ask(str(i), 1) for i in range(10)]
    await desk.settle()
    assert all(task.done() and task.exception() is None for task in burst)


async def test_more_requests_than_are_assigned_at_once_are_all_admitted_while_blocks_are_free() -> None:
    desk = Desk(max_queue_length=1000)
    desk.table.broken(RECORD.key, RECORD.epoch)
    waiting = [desk.ask(str(i), 0) for i in range(2 * MAX_ASSIGNED_TOGETHER + 1)]
    await desk.settle()
    assert not any(task.done() for task in waiting)
    desk.table.connected(RECORD.key, make_load(RECORD), 0.0)
    for task in waiting:
        await desk.result(task)


async def test_a_retry_is_queued_past_the_queues_bound() -> None:
    desk = Desk(max_queue_length=1)
    full = desk.ask("full", 10)
    await desk.settle()
    desk.ask("waiting", 10)
    await desk.settle()
    standing = desk.admission.standing(POOL)
    queued = QueuedRequest(standing=standing, is_retry=True, num_tokens=1, num_reserved_tokens=10, num_most_tokens=10)
    retry = asyncio.create_task(desk.admission.admit(queued))
    await desk.settle()
    assert desk.admission.length == 2
    await desk.release(full)
    await desk.release(desk.tasks[1])
    assert (await desk.result(retry)).placement.decode.worker_id == "decode-0"


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
    desk = Desk(max_queue_length=1000)
    full = desk.ask("full", 10)
    await desk.settle()
    CountedPriority.num_comparisons = 0
    waiting = [desk.ask(str(i), 1, priority=CountedPriority(-i)) for i in range(500)]
    await desk.settle()
    await desk.release(full)
    assert [task.done() for task in waiting].count(True) == 10
    for task in waiting:
        task.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*waiting, return_exceptions=True)
    assert desk.admission.length == 0
    # Binary searches look at no more than log2(500) = 9 each; three of them make one request's way.
    assert 0 < CountedPriority.num_comparisons < 500 * 3 * 10


async def test_the_admission_reports_the_length_of_its_queue(desk: Desk) -> None:
    full = desk.ask("full", 10)
    await desk.settle()
    desk.ask("waiting", 10)
    await desk.settle()
    assert desk.admission.length == 1
    await desk.release(full)
    assert desk.admission.length == 0
