"""One behaviour, held against every registry."""

from __future__ import annotations

import asyncio
import json

import pytest

from quartet.discovery import etcd, file
from quartet.discovery.base import (
    Role,
    Synchronised,
    WorkerAdded,
    WorkerChanged,
    WorkerKey,
    WorkerRemoved,
)
from quartet.discovery.record_json import to_json
from quartet.errors import DiscoveryError, WorkerReplacedError
from tests.discovery.backends import LEASE_S, Backend
from tests.discovery.records import (
    TIMEOUT_S,
    eventually,
    make_record,
    make_router,
    next_event,
    next_routers,
    synchronised,
)
from tests.stopwatch import Stopwatch


async def test_a_watch_of_an_empty_registry_is_synchronised_at_once(backend: Backend) -> None:
    assert await next_event(backend.registry().watch()) == Synchronised()


async def test_a_registered_worker_is_seen_and_a_closed_registration_is_gone(backend: Backend) -> None:
    record = make_record()
    watch = backend.registry().watch()
    await synchronised(watch)

    registration = await backend.registry().register(record)
    assert registration.record == record
    assert await next_event(watch) == WorkerAdded(record)

    await registration.close()
    assert await next_event(watch) == WorkerRemoved("decode-0", Role.DECODE)
    assert await backend.registry().workers() == []


async def test_a_late_watch_reports_all_workers_and_then_that_it_is_synchronised(backend: Backend) -> None:
    records = [make_record("decode-0"), make_record("decode-1"), make_record("a-prefill", role=Role.PREFILL)]
    worker = backend.registry()
    for record in records:
        await worker.register(record)

    assert await synchronised(backend.registry().watch()) == [WorkerAdded(record) for record in records]


async def test_a_list_is_ordered_by_role_and_id(backend: Backend) -> None:
    records = [make_record("a"), make_record("a-b"), make_record("a.b"), make_record("0", role=Role.PREFILL)]
    registry = backend.registry()
    for record in reversed(records):
        await registry.register(record)
    assert await registry.workers() == records


async def test_routers_are_listed_and_watched_apart_from_workers(backend: Backend) -> None:
    registry = backend.registry()
    workers, routers = registry.watch(), registry.watch_routers()
    await synchronised(workers)
    assert await next_routers(routers) == []

    first = await backend.registry().register(make_router("router-b"))
    assert await next_routers(routers) == [first.record]
    worker = await backend.registry().register(make_record())
    second = await backend.registry().register(make_router("router-a"))
    assert await next_routers(routers) == [second.record, first.record]
    assert await next_event(workers) == WorkerAdded(worker.record)
    assert await registry.routers() == [second.record, first.record]
    assert await registry.workers() == [worker.record]

    await first.close()
    assert await next_routers(routers) == [second.record]
    await worker.close()
    assert await next_event(workers) == WorkerRemoved("decode-0", Role.DECODE)
    await routers.close()
    assert [each async for each in routers] == []


async def test_a_router_that_starts_anew_takes_its_id_from_its_former_life(backend: Backend) -> None:
    former = await backend.registry().register(make_router(epoch=1))
    living = await backend.registry().register(make_router(epoch=2))
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(WorkerReplacedError, match="another process has registered as router router-0"):
            await former.ended()
    assert await backend.registry().routers() == [living.record]


async def test_what_is_no_routers_record_is_no_router(backend: Backend) -> None:
    router = make_router()
    values = json.loads(to_json(router))
    await backend.store(router.key, json.dumps({**values, "grpc_address": "nowhere"}).encode())
    await backend.store(make_router("router-1").key, to_json(router))
    await backend.registry().register(make_router("router-2"))
    assert [record.router_id for record in await backend.registry().routers()] == ["router-2"]


async def test_a_worker_that_starts_anew_replaces_its_record(backend: Backend) -> None:
    await backend.registry().register(make_record(epoch=1))
    watch = backend.registry().watch()
    await synchronised(watch)

    second = make_record(epoch=2, grpc_address="127.0.0.1:50999")
    await backend.registry().register(second)
    assert await next_event(watch) == WorkerChanged(second)
    assert await backend.registry().workers() == [second]


async def test_closing_a_replaced_registration_leaves_the_new_record(backend: Backend) -> None:
    old = await backend.registry().register(make_record(epoch=1))
    new = await backend.registry().register(make_record(epoch=2))
    await old.close()
    assert await backend.registry().workers() == [new.record]


async def test_a_former_life_loses_its_worker_id_for_good(backend: Backend) -> None:
    former = await backend.registry().register(make_record(epoch=1))
    watch = backend.registry().watch()
    await synchronised(watch)
    living = await backend.registry().register(make_record(epoch=2))
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(WorkerReplacedError, match="another process has registered as decode decode-0"):
            await former.ended()
    assert await next_event(watch) == WorkerChanged(living.record)
    await former.close()
    await living.close()
    assert await next_event(watch) == WorkerRemoved("decode-0", Role.DECODE)


@pytest.mark.parametrize("value", [b"\xff", b'{"epoch":7}'])
async def test_what_names_no_epoch_takes_nobodys_worker_id(backend: Backend, value: bytes) -> None:
    record = (await backend.registry().register(make_record())).record
    registry = backend.registry()
    await backend.store(record.key, value)

    async def is_back() -> bool:
        return await registry.workers() == [record]

    await eventually(is_back)


async def test_a_record_that_only_newer_versions_can_read_takes_the_worker_id(backend: Backend) -> None:
    former = await backend.registry().register(make_record())
    await backend.store(former.record.key, b'{"epoch":"9","role":"something new"}')
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(WorkerReplacedError):
            await former.ended()


async def test_a_registration_is_not_lost_by_being_closed(backend: Backend) -> None:
    registration = await backend.registry().register(make_record())
    waiting = asyncio.create_task(registration.ended())
    await registration.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


async def test_a_worker_id_that_another_role_has_is_refused(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (etcd, file):
        monkeypatch.setattr(module, "_REGISTER_WITHIN_S", 2.0)  # what is tried takes a hundredth of it
    prefill = await backend.registry().register(make_record("both", role=Role.PREFILL))
    with pytest.raises(DiscoveryError, match=r"worker_id both is taken by .*prefill.both"):
        await backend.registry().register(make_record("both", role=Role.DECODE))
    assert await backend.registry().workers() == [prefill.record]


async def test_the_id_of_a_worker_that_left_is_free_for_another_role(backend: Backend) -> None:
    leaving = await backend.registry().register(make_record("both", role=Role.PREFILL))
    await leaving.close()
    decode = await backend.registry().register(make_record("both", role=Role.DECODE))
    assert await backend.registry().workers() == [decode.record]


async def test_two_watches_see_the_same(backend: Backend) -> None:
    registry = backend.registry()
    watches = [registry.watch(), registry.watch()]
    for watch in watches:
        await synchronised(watch)
    registration = await backend.registry().register(make_record())
    for watch in watches:
        assert await next_event(watch) == WorkerAdded(registration.record)
    await watches[0].close()
    await registration.close()
    assert await next_event(watches[1]) == WorkerRemoved("decode-0", Role.DECODE)


async def test_keys_of_a_newer_version_are_ignored(backend: Backend) -> None:
    record = make_record()
    fields = json.loads(to_json(record)) | {"colour": "blue", "state": {"deep": [1]}}
    await backend.store(record.key, json.dumps(fields).encode())
    assert await synchronised(backend.registry().watch()) == [WorkerAdded(record)]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        to_json(make_record("somebody-else")),
        to_json(make_record("bad"))[:-20],
        to_json(make_record("bad")).replace(b"127.0.0.1:50051", b"\\ud800:1"),
        to_json(make_record("bad")).replace(b'"data_parallel_size":1', b'"data_parallel_size":1000000'),
    ],
)
async def test_an_unreadable_record_is_skipped_and_hides_no_other(backend: Backend, value: bytes) -> None:
    good = await backend.registry().register(make_record("good"))
    await backend.store(WorkerKey(role=Role.DECODE, worker_id="bad"), value)
    assert await synchronised(backend.registry().watch()) == [WorkerAdded(good.record)]
    assert await backend.registry().workers() == [good.record]


async def test_a_record_that_becomes_unreadable_counts_as_removed(backend: Backend) -> None:
    record = make_record()
    await backend.store(record.key, to_json(record))
    watch = backend.registry().watch()
    await synchronised(watch)
    await backend.store(record.key, b"{}")
    assert await next_event(watch) == WorkerRemoved("decode-0", Role.DECODE)


async def test_namespaces_do_not_see_each_other(backend: Backend) -> None:
    blue = await backend.registry("blue").register(make_record("blue-worker"))
    # A namespace whose name begins like another's is still another.
    other = await backend.registry("blue-green").register(make_record("other-worker"))
    assert await synchronised(backend.registry("blue").watch()) == [WorkerAdded(blue.record)]
    assert await backend.registry("blue-green").workers() == [other.record]
    assert await backend.registry().workers() == []


async def test_a_killed_worker_is_gone_within_its_lease_and_a_living_one_stays(backend: Backend) -> None:
    replaced = await backend.registry().register(make_record("living", epoch=1))
    living = await backend.registry().register(make_record("living", epoch=2))
    dying = make_record("dying")
    await backend.start_worker(dying)
    watch = backend.registry().watch()
    assert len(await synchronised(watch)) == 2

    await backend.kill_worker()
    since_killed = Stopwatch()
    assert await next_event(watch) == WorkerRemoved("dying", Role.DECODE)
    # etcd checks for ended leases every half second; the rest is for a slow machine.
    assert since_killed.seconds < LEASE_S + 2.5
    # Nor has the replaced registration, which has renewed itself meanwhile, taken its record back.
    assert await backend.registry().workers() == [living.record]
    await replaced.close()


async def test_closing_a_watch_ends_its_iteration(backend: Backend) -> None:
    watch = backend.registry().watch()
    await synchronised(watch)
    waiting = asyncio.create_task(next_event(watch))
    await asyncio.sleep(0)
    await watch.close()
    with pytest.raises(StopAsyncIteration):
        await waiting


async def test_closing_a_registry_removes_its_records_and_ends_its_watches(backend: Backend) -> None:
    registry = backend.registry()
    watch = registry.watch()
    await registry.register(make_record())
    await registry.close()
    with pytest.raises(StopAsyncIteration):
        await next_event(watch)
    assert await backend.registry().workers() == []
