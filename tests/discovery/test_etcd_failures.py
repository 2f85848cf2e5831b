"""How discovery behaves while a real etcd fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from quartet.discovery import etcd as etcd_module
from quartet.discovery.base import Role, Synchronised, WorkerAdded, WorkerRecord, WorkerRemoved
from quartet.discovery.etcd import EtcdRegistry
from quartet.discovery.etcd_client import EtcdClient, EtcdConfig, new_lease_id
from quartet.discovery.record_json import to_json
from quartet.errors import DiscoveryError, WorkerReplacedError
from services.topology.launch import free_port
from tests.discovery.records import (
    TIMEOUT_S,
    eventually,
    make_record,
    next_event,
    read_until,
    read_until_known,
    synchronised,
)
from tests.discovery.tcp_proxy import TcpProxy
from tests.etcd_server import EtcdServer
from tests.stopwatch import Stopwatch

LEASE_S = 2


class Cluster:
    """Registries and clients of one test."""

    def __init__(self) -> None:
        self._registries: list[EtcdRegistry] = []
        self._clients: list[EtcdClient] = []

    def registry(self, *endpoints: str) -> EtcdRegistry:
        self._registries.append(EtcdRegistry(_config(*endpoints)))
        return self._registries[-1]

    def client(self, *endpoints: str) -> EtcdClient:
        # These are the test's own hand: on a busy machine they wait.
        self._clients.append(EtcdClient(replace(_config(*endpoints), request_timeout_s=TIMEOUT_S)))
        return self._clients[-1]

    async def close(self) -> None:
        await asyncio.gather(*(registry.close() for registry in self._registries))
        await asyncio.gather(*(client.close() for client in self._clients))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    async with asyncio.timeout(TIMEOUT_S):
        await cluster.close()


def _config(*endpoints: str) -> EtcdConfig:
    return EtcdConfig(endpoints=endpoints, lease_ttl_s=LEASE_S, request_timeout_s=0.5)


def _key(record: WorkerRecord) -> str:
    return f"/quartet/default/{record.role}/{record.worker_id}"


async def _put_dead_worker(client: EtcdClient, worker_id: str) -> WorkerRecord:
    """Register a worker without renewing its lease: when it goes, a lease has passed."""
    record = make_record(worker_id)
    lease_id = new_lease_id()
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                await client.grant(lease_id)
                break
            except DiscoveryError:
                pass  # other clients of this process found the server gone, and gRPC shares what it knows
    await client.put(_key(record), to_json(record), lease_id)
    return record


def _removed(record: WorkerRecord) -> WorkerRemoved:
    return WorkerRemoved(record.worker_id, record.role)


async def test_no_event_is_lost_when_the_server_is_killed_and_restarted(etcd: EtcdServer, cluster: Cluster) -> None:
    living = await cluster.registry(etcd.endpoint).register(make_record("living"))
    leaving = await cluster.registry(etcd.endpoint).register(make_record("leaving"))
    watch = cluster.registry(etcd.endpoint).watch()
    assert len(await synchronised(watch)) == 2

    await asyncio.to_thread(etcd.restart)
    # Everything from here on may happen before the watch is back.
    await leaving.close()
    client = cluster.client(etcd.endpoint)
    dead = await _put_dead_worker(client, "dead")
    # No worker is reported anew, and a lease later the living one is still there: it was renewed across the restart.
    events = await read_until(watch, _removed(dead))
    if _removed(leaving.record) not in events:  # it reached no etcd to deregister: then its lease ends
        events += await read_until(watch, _removed(leaving.record))
    assert sorted(events, key=repr) == sorted([_removed(leaving.record), WorkerAdded(dead), _removed(dead)], key=repr)
    assert await cluster.registry(etcd.endpoint).workers() == [living.record]


async def test_a_wiped_server_gets_every_record_again_and_the_watch_follows(etcd: EtcdServer, cluster: Cluster) -> None:
    old = await cluster.registry(etcd.endpoint).register(make_record("old"))
    client = cluster.client(etcd.endpoint)
    for number in range(50):  # so that the new store's revisions stay below the ones seen
        await client.put(f"/elsewhere/{number}", b"", lease_id=0)
    watch = cluster.registry(etcd.endpoint).watch()
    await synchronised(watch)

    await asyncio.to_thread(etcd.wipe)
    new = await cluster.registry(etcd.endpoint).register(make_record("new"))
    await read_until_known(watch, {old.record.key: old.record}, [old.record, new.record])
    await new.close()
    await read_until_known(watch, {r.key: r for r in (old.record, new.record)}, [old.record])
    assert await asyncio.to_thread(etcd.revision) < 50


async def test_a_watch_from_beyond_the_store_is_refused_not_silent(etcd: EtcdServer, cluster: Cluster) -> None:
    client = cluster.client(etcd.endpoint)
    revision = (await client.list("/")).revision
    with pytest.raises(DiscoveryError, match=f"the store is at revision {revision}"):
        async with asyncio.timeout(TIMEOUT_S):
            await client.follow("/", revision + 50, _ignore, _ignore)


async def test_history_compacted_under_a_dead_watch_costs_no_event(etcd: EtcdServer, cluster: Cluster) -> None:
    registry = cluster.registry(etcd.endpoint)
    staying = await registry.register(make_record("staying"))
    leaving = await registry.register(make_record("leaving"))
    async with TcpProxy(etcd.endpoint) as proxy:
        watch = cluster.registry(proxy.endpoint).watch()
        assert len(await synchronised(watch)) == 2

        await proxy.cut()
        await leaving.close()
        passing = await registry.register(make_record("passing"))
        await passing.close()
        coming = await registry.register(make_record("coming"))
        await asyncio.to_thread(etcd.compact)
        await proxy.heal()

        # In the order of the keys, once each, and nothing about a worker that came and went.
        assert [await next_event(watch), await next_event(watch)] == [
            WorkerAdded(coming.record),
            _removed(leaving.record),
        ]
        await staying.close()
        assert await next_event(watch) == _removed(staying.record)


async def test_a_watch_from_a_compacted_revision_ends(etcd: EtcdServer, cluster: Cluster) -> None:
    client = cluster.client(etcd.endpoint)
    revision = (await client.list("/")).revision
    for number in range(3):
        await client.put(f"/elsewhere/{number}", b"", lease_id=0)
    await asyncio.to_thread(etcd.compact)
    with pytest.raises(DiscoveryError, match="compacted"):
        async with asyncio.timeout(TIMEOUT_S):
            await client.follow("/", revision, _ignore, _ignore)


async def test_a_worker_whose_lease_was_lost_registers_again(etcd: EtcdServer, cluster: Cluster) -> None:
    record = (await cluster.registry(etcd.endpoint).register(make_record())).record
    client = cluster.client(etcd.endpoint)
    before = await client.get(_key(record))
    assert before is not None
    await client.revoke(before.lease_id)
    assert await client.get(_key(record)) is None

    async def is_back() -> bool:
        now = await client.get(_key(record))
        return now is not None and now.value == before.value and now.lease_id != before.lease_id

    await eventually(is_back)


async def test_a_record_under_a_lease_of_somebody_else_returns_to_its_own(etcd: EtcdServer, cluster: Cluster) -> None:
    record = (await cluster.registry(etcd.endpoint).register(make_record())).record
    client = cluster.client(etcd.endpoint)
    before = await client.get(_key(record))
    assert before is not None
    await client.put(_key(record), before.value, lease_id=0)  # it would outlive its worker

    async def is_back() -> bool:
        now = await client.get(_key(record))
        return now is not None and now.lease_id == before.lease_id

    await eventually(is_back)


async def test_a_life_that_lost_its_lease_does_not_take_its_id_back_from_the_next(
    etcd: EtcdServer, cluster: Cluster
) -> None:
    async with TcpProxy(etcd.endpoint) as proxy:
        former = await cluster.registry(proxy.endpoint).register(make_record(epoch=1))
        watch = cluster.registry(etcd.endpoint).watch()
        await synchronised(watch)
        await proxy.cut()
        assert await next_event(watch) == _removed(former.record), "its lease ends"
        living = await cluster.registry(etcd.endpoint).register(make_record(epoch=2))
        await proxy.heal()
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(WorkerReplacedError):
                await former.ended()
        assert await next_event(watch) == WorkerAdded(living.record)
        await living.close()
        assert await next_event(watch) == _removed(living.record), "nothing came in between"


async def test_a_life_whose_id_went_to_another_role_while_it_was_cut_off_loses_it(
    etcd: EtcdServer, cluster: Cluster
) -> None:
    former = await cluster.registry(etcd.endpoint).register(make_record("both"))
    # In one step, so that it can't register again before.
    taken = make_record("both", role=Role.PREFILL)
    await cluster.client(etcd.endpoint).put(_key(taken), to_json(taken), lease_id=0)
    stored = await cluster.client(etcd.endpoint).get(_key(former.record))
    assert stored is not None
    await cluster.client(etcd.endpoint).revoke(stored.lease_id)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(WorkerReplacedError, match="worker_id both is taken by /quartet/default/prefill/both"):
            await former.ended()
    assert await cluster.registry(etcd.endpoint).workers() == [taken]


async def test_the_newer_of_two_lives_has_the_id_whichever_comes_back_first_after_a_wipe(
    etcd: EtcdServer, cluster: Cluster
) -> None:
    former = await cluster.registry(etcd.endpoint).register(make_record(epoch=1))
    living = await cluster.registry(etcd.endpoint).register(make_record(epoch=2))
    client = cluster.client(etcd.endpoint)
    # As if the former life had been the first to find the store empty.
    await client.put(_key(former.record), to_json(former.record), lease_id=0)

    async def is_back() -> bool:
        stored = await client.get(_key(living.record))
        return stored is not None and stored.value == to_json(living.record)

    await eventually(is_back)
    await living.close()


async def test_a_start_whose_first_put_was_not_answered_does_not_overwrite_the_next(
    etcd: EtcdServer, cluster: Cluster
) -> None:
    client = cluster.client(etcd.endpoint)
    registry = cluster.registry(etcd.endpoint)
    put_if = EtcdClient.put_if

    async def put_next_first(self: EtcdClient, key: str, value: bytes, lease_id: int, **conditions: Any) -> bool:
        await client.put(key, to_json(make_record(epoch=2)), lease_id=0)
        return await put_if(self, key, value, lease_id, **conditions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EtcdClient, "put_if", put_next_first)
        with pytest.raises(WorkerReplacedError):
            await registry.register(make_record(epoch=1))
    assert await registry.workers() == [make_record(epoch=2)]


async def test_a_record_that_was_deleted_comes_back(etcd: EtcdServer, cluster: Cluster) -> None:
    record = (await cluster.registry(etcd.endpoint).register(make_record())).record
    watch = cluster.registry(etcd.endpoint).watch()
    await synchronised(watch)
    client = cluster.client(etcd.endpoint)
    stored = await client.get(_key(record))
    assert stored is not None
    short = new_lease_id()
    await client.grant(short)
    await client.put(_key(record), stored.value, short)  # takes the key from its lease
    await client.revoke(short)
    assert [await next_event(watch), await next_event(watch)] == [_removed(record), WorkerAdded(record)]


async def test_a_key_that_is_not_text_is_ignored_by_lists_and_watches(etcd: EtcdServer, cluster: Cluster) -> None:
    garbage = b"/quartet/default/decode/\xff\xfe"
    record = (await cluster.registry(etcd.endpoint).register(make_record("before"))).record
    registry = cluster.registry(etcd.endpoint)
    watch = registry.watch()
    await synchronised(watch)
    await asyncio.to_thread(etcd.put, garbage, to_json(record))
    later = (await registry.register(make_record("later"))).record
    assert await next_event(watch) == WorkerAdded(later)
    assert await registry.workers() == [record, later]
    assert len(await synchronised(registry.watch())) == 2


async def test_one_of_three_endpoints_dead_from_the_start_is_passed_over(etcd: EtcdServer, cluster: Cluster) -> None:
    dead = f"127.0.0.1:{free_port()}"
    for endpoints in ((dead, etcd.endpoint, etcd.endpoint), (etcd.endpoint, dead, etcd.endpoint)):
        registry = cluster.registry(*endpoints)
        watch = registry.watch()
        registration = await registry.register(make_record())
        await read_until(watch, WorkerAdded(registration.record))
        assert await registry.workers() == [registration.record]
        await registration.close()
        assert await cluster.registry(etcd.endpoint).workers() == []


@pytest.mark.parametrize("failure", ["cut", "silence"])
async def test_an_endpoint_that_dies_later_is_left_for_the_next(
    etcd: EtcdServer, cluster: Cluster, failure: str
) -> None:
    async with TcpProxy(etcd.endpoint) as proxy:
        registry = cluster.registry(proxy.endpoint, etcd.endpoint)
        watch = registry.watch()
        assert await next_event(watch) == Synchronised()
        living = await registry.register(make_record("living"))
        assert await next_event(watch) == WorkerAdded(living.record)

        if failure == "cut":
            await proxy.cut()
        else:
            proxy.silence()
        dead = await _put_dead_worker(cluster.client(etcd.endpoint), "dead")
        # The watch moved, and the registration kept its lease over the move.
        assert await read_until(watch, _removed(dead)) == [WorkerAdded(dead), _removed(dead)]
        assert await registry.workers() == [living.record]


async def test_while_etcd_is_away_the_watch_keeps_what_it_knew(etcd: EtcdServer, cluster: Cluster) -> None:
    record = (await cluster.registry(etcd.endpoint).register(make_record())).record
    registry = cluster.registry(etcd.endpoint)
    watch = registry.watch()
    await synchronised(watch)
    etcd.kill()
    with pytest.raises(DiscoveryError, match="UNAVAILABLE"):
        await registry.workers()
    await asyncio.to_thread(etcd.start)
    later = await cluster.registry(etcd.endpoint).register(make_record("later", role=Role.ENCODE))
    assert await next_event(watch) == WorkerAdded(later.record)
    assert await registry.workers() == [record, later.record]


async def test_registering_where_no_etcd_answers_fails_in_bounded_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_module, "_REGISTER_WITHIN_S", 0.3)
    with pytest.raises(DiscoveryError, match=r"could not register in 0\.3 s: etcd at 127\.0\.0\.1"):
        await cluster.registry(f"127.0.0.1:{free_port()}").register(make_record())


async def test_registering_waits_for_an_etcd_that_is_just_starting(etcd: EtcdServer, cluster: Cluster) -> None:
    etcd.kill()
    registering = asyncio.create_task(cluster.registry(etcd.endpoint).register(make_record()))
    await asyncio.to_thread(etcd.start)
    async with asyncio.timeout(TIMEOUT_S):
        registration = await registering
    assert await cluster.registry(etcd.endpoint).workers() == [registration.record]


async def test_closing_with_dead_servers_is_bounded_whatever_their_number(etcd: EtcdServer, cluster: Cluster) -> None:
    registry = cluster.registry(*[etcd.endpoint] * 8)
    watch = registry.watch()
    await registry.register(make_record())
    await synchronised(watch)
    etcd.pause()
    stopwatch = Stopwatch()
    await registry.close()
    assert stopwatch.seconds < 2


def _ignore(*_: object) -> None:
    """Do nothing."""
