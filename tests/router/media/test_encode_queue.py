"""Requests wait for places at encode workers, tenant by tenant, and not at the workers."""

from __future__ import annotations

import asyncio
import random

import pytest

from quartet.discovery.base import WorkerKey
from quartet.errors import QueueFullError
from router.fair_queue import FIXED_TOKENS, FairShare
from router.kv_index.index import PrefixIndex
from router.media.encode_queue import EncodeNeed, EncodePlaces, EncodeQueue
from router.workers import PoolKey, WorkerTable
from tests.router.records import make_load, make_record

IMAGE, BOTH = frozenset({"image"}), frozenset({"image", "embeddings"})
MAX_ITEMS = 4


class EncodeScene:
    """Encode workers that take four items at a time, and the names of those that got places, in order."""

    def __init__(self, *worker_ids: str, max_length: int = 100) -> None:
        self.table = WorkerTable("router-a", heartbeat_timeout_s=10**9)
        self.queue = EncodeQueue(
            self.table, PrefixIndex(), FairShare(), random.Random(0), max_length=max_length, retry_delay_s=2.0
        )
        self.order: list[str] = []
        self.avoid: set[str] = set()
        for worker_id in worker_ids:
            self.join(worker_id)

    def join(self, worker_id: str, media: tuple[str, ...] = ("image",)) -> None:
        record = make_record(worker_id, media=media, max_media_tokens=10)
        self.table.put(record, 0.0)
        self.table.connected(record.key, make_load(record, max_running=MAX_ITEMS), 0.0)

    def report(self, worker_id: str, num_items: int, last_number: int = 0) -> None:
        """The worker has so many items, those of starts up to ``last_number`` of this router included."""
        [record] = [one.record for one in self.table.statuses(0.0) if one.record.worker_id == worker_id]
        load = make_load(
            record, max_running=MAX_ITEMS, num_waiting=num_items, router_progress={"router-a.1": last_number}
        )
        self.table.report(load, 0.0)

    def break_worker(self, worker_id: str) -> None:
        self.table.broken(WorkerKey(make_record(worker_id).role, worker_id), 1)

    def ask(
        self,
        name: str,
        num_items: int = 1,
        *,
        tenant: str = "",
        priority: int = 0,
        kinds: frozenset[str] = IMAGE,
        num_tokens: int = 10,
        after: EncodePlaces | None = None,
    ) -> asyncio.Task[EncodePlaces]:
        need = EncodeNeed(
            pool=PoolKey("tiny", "ab" * 32),
            tenant=tenant,
            priority=priority,
            kinds=kinds,
            hashes=range(num_items),
            num_tokens=num_items * num_tokens,
            avoid=self.avoid,
        )

        async def enter() -> EncodePlaces:
            places = await self.queue.enter(need, after)
            self.order.append(name)
            return places

        return asyncio.create_task(enter(), name=name)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def ask_many(scene: EncodeScene, count: int, name: str = "many") -> list[asyncio.Task[EncodePlaces]]:
    tasks = [scene.ask(f"{name}-{number}", tenant=name) for number in range(count)]
    await settle()
    return tasks


async def end(*tasks: asyncio.Task[EncodePlaces]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_worker_gets_no_more_than_it_takes_and_the_place_of_each_item_is_free_at_once() -> None:
    scene = EncodeScene("encode-0")
    many = await ask_many(scene, 9)
    assert (len(scene.order), scene.queue.length) == (4, 5)
    many[0].result().leave_one()
    await settle()
    assert scene.order == [f"many-{number}" for number in range(5)]
    many[0].result().release()
    many[1].result().release()
    many[1].result().release()
    await settle()
    assert scene.order == [f"many-{number}" for number in range(6)]
    await end(*many)


async def test_another_tenants_request_is_next_however_many_wait() -> None:
    scene = EncodeScene("encode-0")
    many = await ask_many(scene, 50)
    few = scene.ask("few", tenant="few")
    await settle()
    assert not few.done()
    many[0].result().release()
    await settle()
    assert scene.order[4:] == ["few"]
    await end(*many, few)


async def test_items_of_other_routers_take_places_too() -> None:
    scene = EncodeScene("encode-0")
    scene.report("encode-0", num_items=3)
    first, second = scene.ask("first"), scene.ask("second")
    await settle()
    assert scene.order == ["first"]
    number = first.result().booking.send()
    scene.report("encode-0", 2, number)
    await settle()
    assert scene.order == ["first", "second"]
    first.result().release()
    scene.report("encode-0", 4, number)
    third = scene.ask("third")
    await settle()
    assert not third.done(), "four are another router's, and one is on its way"
    await end(first, second, third)


async def test_a_request_of_many_items_waits_only_for_those_that_run_and_alone_may_have_more() -> None:
    scene = EncodeScene("encode-0")
    running = await ask_many(scene, 3)
    large = scene.ask("large", 6, tenant="other")
    await settle()
    later = await ask_many(scene, 3, "later")
    assert (len(scene.order), scene.queue.length) == (3, 4), "there is a place for one of the later ones, but not yet"
    for task in running:
        task.result().release()
    await settle()
    assert scene.order[3:] == ["large"]
    for _ in range(3):
        large.result().leave_one()
    await settle()
    assert scene.order[4:] == ["later-0"]
    await end(*running, large, *later)


async def test_who_waits_for_one_worker_does_not_keep_others_from_another_one() -> None:
    scene = EncodeScene("encode-0")
    scene.join("encode-1", ("image", "embeddings"))
    everywhere = [scene.ask(str(number), kinds=BOTH) for number in range(6)]
    await settle()
    assert scene.order == ["0", "1", "2", "3"], "only one of them takes both kinds"
    images = [scene.ask(f"image-{number}") for number in range(5)]
    await settle()
    assert scene.order[4:] == [f"image-{number}" for number in range(4)]
    await end(*everywhere, *images)


async def test_a_worker_that_failed_the_request_is_chosen_only_if_no_other_is_there() -> None:
    scene = EncodeScene("encode-0", "encode-1")
    scene.avoid.add("encode-0")
    tasks = await ask_many(scene, 5)
    assert {task.result().rank.worker_id for task in tasks[:4]} == {"encode-1"}
    assert not tasks[4].done(), "the other one has places, but has failed it"
    scene.break_worker("encode-1")
    await settle()
    assert tasks[4].result().rank.worker_id == "encode-0"
    await end(*tasks)


async def test_while_no_worker_is_there_requests_wait_in_order() -> None:
    scene = EncodeScene()
    first, urgent = scene.ask("first"), scene.ask("urgent", priority=1)
    await settle()
    assert scene.queue.length == 2
    scene.join("encode-0")
    await settle()
    assert scene.order == ["urgent", "first"]
    await end(first, urgent)


@pytest.mark.parametrize("is_cached", [False, True])
async def test_small_and_cached_items_cost_places_too(is_cached: bool) -> None:
    scene = EncodeScene("encode-0")
    tasks = [scene.ask("small", tenant="small", num_tokens=1) for _ in range(60)]
    tasks += [scene.ask("large", tenant="large", num_tokens=128) for _ in range(20)]
    while len(scene.order) < 30:
        await settle()
        for task in tasks:
            if task.done():
                task.result().sized(0 if is_cached else task.result().standing.num_tokens - FIXED_TOKENS)
                task.result().release()
    # By their tokens alone, 128 of the small ones would come for each large one.
    assert scene.order[:30].count("small") <= 2 * scene.order[:30].count("large") + 4
    await end(*tasks)


async def test_a_tenant_pays_for_what_the_tower_computes() -> None:
    scene = EncodeScene("encode-0")
    # Both were charged 100 tokens; one's picture was in the worker's cache.
    cached, fresh = (scene.ask("", tenant=tenant, num_tokens=100) for tenant in ("cached", "fresh"))
    filling = await ask_many(scene, 2, "filling")
    cached.result().sized(0)
    fresh.result().sized(100)
    asked = [scene.ask("fresh", tenant="fresh"), scene.ask("cached", tenant="cached")]
    await settle()
    scene.order.clear()
    for task in filling:
        task.result().release()
        await settle()
    assert scene.order == ["cached", "fresh"]
    await end(cached, fresh, *filling, *asked)


async def test_who_had_places_before_goes_first_and_pays_once() -> None:
    scene = EncodeScene("encode-0")
    first, other = scene.ask("first", tenant="first", num_tokens=100), scene.ask("other", tenant="other")
    filling = [scene.ask("", tenant=tenant) for tenant in ("third", "fourth")]
    await settle()
    asked = [scene.ask("of other", tenant="other"), scene.ask("of first", tenant="first")]
    await settle()
    first.result().sized(5)
    first.result().sized(1000)  # pays once
    scene.break_worker("encode-0")
    first.result().release()
    again = scene.ask("again", tenant="first", after=first.result())
    await settle()
    scene.order.clear()
    scene.join("encode-0")
    await settle()
    assert scene.order == ["again"]
    again.result().sized(1000)
    for task in filling:
        task.result().release()
        await settle()
    assert scene.order == ["again", "of first", "of other"]
    await end(first, other, *filling, *asked, again)


async def test_of_too_many_the_last_one_of_the_largest_tenant_is_refused() -> None:
    scene = EncodeScene(max_length=3)
    many = await ask_many(scene, 3)
    few = scene.ask("few", tenant="few")
    await settle()
    with pytest.raises(QueueFullError, match="too many requests wait for an encode worker") as refused:
        many[2].result()
    assert refused.value.retry_delay_s == 2.0
    assert scene.queue.length == 3
    await end(*many, few)
    assert scene.queue.length == 0


async def test_one_that_is_cancelled_as_it_gets_its_places_gives_them_back() -> None:
    scene = EncodeScene("encode-0")
    many = await ask_many(scene, 5)
    many[0].result().release()
    many[4].cancel()
    await settle()
    following = scene.ask("following")
    await settle()
    assert following.done()
    for task in (*many[:4], following):
        task.result().release()
    assert not any(status.num_requests for status in scene.table.statuses(0.0))
