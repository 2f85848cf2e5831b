"""Requests with media wait in order before their files are fetched or encoded."""

from __future__ import annotations

import asyncio

import pytest

from quartet.errors import QueueFullError
from router.fair_queue import FairShare
from router.media.queue import MediaOrder, MediaQueue, MediaQueueConfig, MediaRoom
from router.workers import PoolKey

POOL, OTHER_POOL = PoolKey("seeing", "aa"), PoolKey("other", "bb")
ENCODE_ROOM = 112  # of which 100 may be pinned
WAIT_S = 30.0


class QueueScene:
    """A media queue, and the names of the requests in the order of their admission."""

    def __init__(self, *, max_bytes: int = 1000, max_length: int = 100, timeout_s: float = WAIT_S) -> None:
        bounds = MediaQueueConfig(max_bytes=max_bytes, max_length=max_length, timeout_s=timeout_s, retry_delay_s=2.0)
        self.queue = MediaQueue(bounds, FairShare(), lambda _pool: ENCODE_ROOM)
        self.order: list[str] = []

    def ask(
        self, name: str, *, tokens: int = 0, size: int = 0, tenant: str = "", priority: int = 0, pool: PoolKey = POOL
    ) -> asyncio.Task[MediaRoom]:
        order = MediaOrder(pool=pool, tenant=tenant, priority=priority, num_encode_tokens=tokens, num_bytes=size)

        async def enter() -> MediaRoom:
            room = await self.queue.enter(order)
            self.order.append(name)
            return room

        return asyncio.create_task(enter(), name=name)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def result(task: asyncio.Task[MediaRoom]) -> MediaRoom:
    async with asyncio.timeout(WAIT_S):
        return await task


async def test_embeddings_pin_a_bounded_share_of_the_encode_workers_pools() -> None:
    scene = QueueScene()
    first, second, third = (scene.ask(str(number), tokens=50) for number in range(3))
    await settle()
    assert first.done() and second.done() and not third.done()
    first.result().pulled()
    await settle()
    assert third.done()
    fourth = scene.ask("fourth", tokens=20)
    await settle()
    assert not fourth.done()
    third.result().sized(30)
    await settle()
    assert fourth.done()
    first.result().close()
    assert scene.queue.length == 0


async def test_one_tenant_pins_no_more_than_four_fifths_of_the_encode_workers_pools() -> None:
    scene = QueueScene()
    flood = [scene.ask(f"flood-{number}", tokens=1, tenant="flood") for number in range(200)]
    await settle()
    assert scene.order == [f"flood-{number}" for number in range(81)], "of 100"
    others = [scene.ask(f"other-{number}", tokens=8, tenant="other") for number in range(2)]
    elsewhere = scene.ask("elsewhere", tokens=50, tenant="flood", pool=OTHER_POOL)
    await settle()
    assert all(task.done() for task in (*others, elsewhere))
    for task in flood[:81]:
        task.result().close()
    await settle()
    assert len(scene.order) > 81 + 3 + 40, "what it gives back it may pin again"
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_files_are_counted_at_their_largest_size_and_then_at_their_real_size() -> None:
    scene = QueueScene(max_bytes=100)
    first, second = scene.ask("first", size=80, tokens=1), scene.ask("second", size=80)
    room = await result(first)
    assert not second.done()
    room.fetched(10)
    room.pulled()
    await settle()
    assert second.done()
    third = scene.ask("third", size=20)
    await settle()
    assert not third.done(), "90 of 100 bytes are taken"
    room.close()
    room.close()
    await result(third)


async def test_a_tenants_files_leave_memory_for_another_tenants() -> None:
    scene = QueueScene(max_bytes=100)
    held = [await result(scene.ask(f"a{number}", size=17, tenant="a")) for number in range(5)]
    waiting = scene.ask("a5", size=1, tenant="a")
    await settle()
    assert not waiting.done(), "85 bytes are its own, and 15 are free"
    others = [await result(scene.ask(f"b{number}", size=5, tenant="b")) for number in range(2)]
    without_files = await result(scene.ask("a6", tokens=1, tenant="c"))
    for room in others:
        room.close()
    await settle()
    assert not waiting.done()
    held[0].fetched(12)
    await settle()
    assert waiting.done(), "80 are its own, and 20 are free"
    for room in (*held, waiting.result(), without_files):
        room.close()
    assert scene.queue.length == 0


async def test_a_single_request_is_admitted_whatever_its_size() -> None:
    scene = QueueScene(max_bytes=10)
    room = await result(scene.ask("large", tokens=10**6, size=10**6))
    room.close()
    await result(scene.ask("next", tokens=10**6, size=10**6))


async def test_a_tenant_with_many_requests_does_not_delay_another_tenants() -> None:
    scene = QueueScene()
    many = [scene.ask("a", tokens=100, tenant="a") for _ in range(5)]
    await settle()
    few = [scene.ask("b", tokens=100, tenant="b"), scene.ask("urgent", tokens=100, tenant="a", priority=1)]
    for _ in range(6):
        await settle()
        [task] = [task for task in (*many, *few) if task.done() and task.result().num_encode_tokens]
        task.result().pulled()
    assert scene.order[:3] == ["a", "b", "urgent"]


async def test_a_request_that_waits_for_one_pools_encode_workers_does_not_delay_another_pools() -> None:
    scene = QueueScene()
    await result(scene.ask("first", tokens=100))
    waiting = scene.ask("second", tokens=100)
    await result(scene.ask("elsewhere", tokens=100, pool=OTHER_POOL))
    behind = scene.ask("third", tokens=1)
    await settle()
    assert not waiting.done() and not behind.done()
    for task in (waiting, behind):
        task.cancel()


async def test_the_last_queued_request_is_refused_when_the_queue_is_full() -> None:
    scene = QueueScene(max_length=2)
    await result(scene.ask("in", tokens=100))
    waiting = [scene.ask(str(number), tokens=100) for number in range(2)]
    await settle()
    urgent = scene.ask("urgent", tokens=100, priority=1)
    with pytest.raises(QueueFullError) as caught:
        await result(waiting[1])
    assert caught.value.retry_delay_s == 2.0
    assert scene.queue.length == 2
    for task in (waiting[0], urgent):
        task.cancel()


async def test_a_wait_has_a_bound() -> None:
    scene = QueueScene(timeout_s=0.01)
    await result(scene.ask("in", tokens=100))
    with pytest.raises(QueueFullError, match="in time"):
        await result(scene.ask("late", tokens=100))
    assert scene.queue.length == 0


async def test_a_cancelled_request_leaves_nothing_behind() -> None:
    scene = QueueScene()
    room = await result(scene.ask("in", tokens=100))
    waiting, next_one = scene.ask("waiting", tokens=100), scene.ask("next", tokens=100)
    await settle()
    waiting.cancel()
    await settle()
    assert scene.queue.length == 1
    room.close()
    # Let in and cancelled in the same moment.
    next_one.cancel()
    await settle()
    await result(scene.ask("last", tokens=100))


async def test_a_better_request_enters_while_the_last_one_is_being_cancelled() -> None:
    scene = QueueScene(max_length=1)
    room = await result(scene.ask("in", tokens=100))
    last = scene.ask("last", tokens=100)
    await settle()
    better = scene.ask("better", tokens=100, priority=1)
    last.cancel()  # before `better` enters: its wait has ended, but its task has not run
    await settle()
    assert last.cancelled() and not better.done()
    assert scene.queue.length == 1
    room.close()
    (await result(better)).close()
    await result(scene.ask("next", tokens=100))
    assert scene.queue.length == 0


async def test_a_tenants_priority_does_not_refuse_another_tenants_request() -> None:
    scene = QueueScene(max_length=2)
    await result(scene.ask("in", tokens=100))
    waiting = [scene.ask(f"b{number}", tokens=100, tenant="b") for number in range(2)]
    await settle()
    flood = [scene.ask(f"a{number}", tokens=100, tenant="a", priority=2**31 - 1) for number in range(3)]
    for task in (waiting[1], *flood[1:]):
        with pytest.raises(QueueFullError):
            await result(task)
    assert not waiting[0].done() and not flood[0].done(), "each tenant has one"
    for task in (waiting[0], flood[0]):
        task.cancel()


async def test_a_tenant_pays_for_the_embeddings_that_it_really_needed() -> None:
    scene = QueueScene()
    room = await result(scene.ask("a0", tokens=100, tenant="a"))
    waiting = [scene.ask(name, tokens=60, tenant=name[0]) for name in ("b0", "b1", "a1", "a2")]
    await settle()
    room.sized(40)  # the most that it could have been was 100
    room.pulled()
    for _ in waiting:
        await settle()
        [task] = [task for task in waiting if task.done() and task.result().num_encode_tokens]
        task.result().pulled()
    assert scene.order == ["a0", "b0", "a1", "b1", "a2"]


async def test_cancelling_thousands_of_queued_requests_admits_the_one_behind_them() -> None:
    scene = QueueScene(max_length=5000)
    room = await result(scene.ask("in", tokens=100))
    crowd = [scene.ask(str(number), tokens=100) for number in range(2000)]
    last = scene.ask("last", tokens=100)
    await settle()
    for task in crowd:
        task.cancel()
    room.close()
    await result(last)
    assert scene.order == ["in", "last"]
    assert scene.queue.length == 0


async def test_a_request_that_can_not_have_its_room_now_keeps_only_its_own_tenants_waiting() -> None:
    scene = QueueScene(max_bytes=1000)
    running = await result(scene.ask("running", tokens=10, size=500, tenant="a"))
    large = [scene.ask("bytes", size=1001, tenant="hog"), scene.ask("tokens", tokens=101, tenant="greedy")]
    behind = [scene.ask("h", size=1, tenant="hog"), scene.ask("g", tokens=1, tenant="greedy")]
    await settle()
    for name in ("a", "b", "c"):
        (await result(scene.ask(name, tokens=10, size=10, tenant=name))).close()
    assert not any(task.done() for task in (*large, *behind))
    running.close()
    await result(large[0])
    (await result(large[1])).close()
    await result(behind[1])
    for task in behind:
        task.cancel()


async def test_a_request_larger_than_the_pool_keeps_no_tenant_waiting_whose_turn_comes_after_it() -> None:
    scene = QueueScene()
    for _ in range(20):  # much of the work was this tenant's, so its turn comes later
        (await result(scene.ask("before", tokens=50, tenant="other"))).close()
    running = await result(scene.ask("running", tokens=10, tenant="a"))
    large = scene.ask("large", tokens=101, tenant="greedy")
    await settle()
    (await result(scene.ask("other", tokens=10, tenant="other"))).close()
    assert not large.done()
    running.close()
    await result(large)


async def test_what_comes_in_requests_counts_at_once_and_is_refused_beyond_the_tenants_bound() -> None:
    scene = QueueScene(max_bytes=1000)
    held = []
    with pytest.raises(QueueFullError, match="memory") as caught:
        for _ in range(100):
            held.append(scene.queue.hold("hog", 100))
    assert caught.value.retry_delay_s == 2.0
    assert scene.queue.num_bytes == 100 * len(held) == 900, "a tenth is left"
    other = scene.queue.hold("other", 50)
    with pytest.raises(QueueFullError):
        scene.queue.hold("third", 51)
    scene.queue.hold("hog", 0).close()
    other.fetched(20)
    scene.queue.hold("third", 51).close()
    waiting = scene.ask("fetching", size=200, tenant="third")
    await settle()
    assert not waiting.done()
    for room in (*held, other):
        room.close()
        room.close()
    (await result(waiting)).close()
    assert scene.queue.num_bytes == scene.queue.length == 0


async def test_a_request_that_holds_its_files_does_not_wait_behind_one_that_waits_for_memory() -> None:
    scene = QueueScene(max_bytes=100)
    held = [scene.queue.hold("a", 30) for _ in range(3)]
    fetches = scene.ask("fetches", size=20, tenant="a")
    await settle()
    rooms = [await result(scene.ask(f"held-{number}", tokens=1, tenant="a")) for number in range(3)]
    assert not fetches.done()
    for room in (*held, *rooms):
        room.close()
    (await result(fetches)).close()
    assert scene.queue.num_bytes == 0
