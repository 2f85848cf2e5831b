"""A worker's KV events and snapshots: their numbers match, and no caller waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.engine.base import StepOutput
from quartet.errors import ProtocolError, WorkerUnavailableError
from quartet.events.kv import KvSnapshot, KvSnapshotPart, RankEvents, Removed, StoredBlocks, Tier
from quartet.rpc.server import RpcServer, ServerConfig, Service
from quartet.streams.convert.hand_off import MAX_PART_BLOCKS, from_kv_snapshot_part, to_kv_snapshot_parts
from quartet.streams.worker_client import WorkerClient
from quartet.v1 import kv_events_pb2, worker_pb2_grpc
from quartet.v1 import worker_pb2 as pb
from services.workers import kv_events
from services.workers.kv_events import KvEvents
from tests.services.fake_kv import FakeKvPublisher
from tests.services.test_model_files import FakeWorker, serving

TIMEOUT_S = 30.0
BLOCKS = [StoredBlocks(0, {1: None, 2: 1})]


@dataclass
class CountingEngine:
    """Takes note of being asked."""

    num_requests: int = 0

    def request_kv_snapshot(self) -> None:
        self.num_requests += 1


def changed(rank: int, *removed: int) -> RankEvents:
    return RankEvents(rank, [Removed(removed)])


async def ask(*events: KvEvents) -> list[asyncio.Task[KvSnapshot]]:
    """Begin to wait for snapshots."""
    tasks = [asyncio.create_task(each.snapshot()) for each in events]
    await asyncio.sleep(0)
    return tasks


async def answer(task: asyncio.Task[KvSnapshot]) -> KvSnapshot:
    async with asyncio.timeout(TIMEOUT_S):
        return await task


async def test_batches_of_all_ranks_go_out_in_order_and_a_snapshot_has_the_number_of_the_last_one() -> None:
    publisher, engine = FakeKvPublisher(), CountingEngine()
    events = KvEvents(engine, publisher)
    [waiting] = await ask(events)
    events.take(StepOutput(kv_events=[changed(0, 1), changed(1, 2)]))
    assert not waiting.done()
    events.take(StepOutput(kv_events=[changed(1, 3)], kv_snapshot=BLOCKS))
    events.take(StepOutput(kv_events=[changed(0, 4)]))
    assert await answer(waiting) == KvSnapshot(3, BLOCKS)
    assert publisher.published == [changed(0, 1), changed(1, 2), changed(1, 3), changed(0, 4)]


async def test_callers_that_wait_at_once_cost_the_engine_one_snapshot() -> None:
    engine = CountingEngine()
    events = KvEvents(engine, FakeKvPublisher())
    waiting = await ask(events, events, events)
    events.take(StepOutput(kv_snapshot=BLOCKS))
    assert [await answer(task) for task in waiting] == [KvSnapshot(0, BLOCKS)] * 3
    [later] = await ask(events)
    assert engine.num_requests == 2
    events.take(StepOutput(kv_snapshot=[]))
    assert await answer(later) == KvSnapshot(0, [])


async def test_a_cancelled_caller_does_not_delay_the_others() -> None:
    engine = CountingEngine()
    events = KvEvents(engine, FakeKvPublisher())
    given_up, waiting = await ask(events, events)
    given_up.cancel()
    await asyncio.wait([given_up])
    events.take(StepOutput(kv_snapshot=BLOCKS))
    assert await answer(waiting) == KvSnapshot(0, BLOCKS)


async def test_when_the_engine_ends_waiting_and_later_callers_get_an_error() -> None:
    events = KvEvents(CountingEngine(), FakeKvPublisher())
    [waiting] = await ask(events)
    events.close()
    events.close()
    for task in (waiting, *(await ask(events))):
        with pytest.raises(WorkerUnavailableError):
            await answer(task)


async def test_a_caller_of_a_stalled_engine_gets_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_SNAPSHOT_TIMEOUT_S", 0.01)
    events = KvEvents(CountingEngine(), FakeKvPublisher())
    with pytest.raises(WorkerUnavailableError, match="no step"):
        await events.snapshot()


async def parts_of(address: str) -> list[KvSnapshotPart]:
    async with grpc.aio.insecure_channel(address) as channel:
        return [part async for part in WorkerClient(channel).kv_snapshot(TIMEOUT_S)]


def chains_back(parts: Sequence[KvSnapshotPart]) -> dict[tuple[int, Tier], dict[int, int | None]]:
    """The tables that the parts of a snapshot say, by rank and tier."""
    tables: dict[tuple[int, Tier], dict[int, int | None]] = {}
    for part in parts:
        for stored in part.stored:
            table = tables.setdefault((part.data_parallel_rank, stored.tier), {})
            table.update(zip(stored.sequence_hashes, (stored.parent_hash, *stored.sequence_hashes), strict=False))
    return tables


async def test_a_snapshot_crosses_whole_in_short_messages() -> None:
    chain = {number: number - 1 if number % 1000 else None for number in range(1, 3 * MAX_PART_BLOCKS + 5)}
    blocks = [StoredBlocks(0, chain), StoredBlocks(1, {}), StoredBlocks(1, {0: 2**64 - 1, 7: None}, Tier.HOST)]
    worker = FakeWorker(snapshot=KvSnapshot(9, blocks))
    async with serving(worker, {}) as address:
        parts = await parts_of(address)
    assert {(part.number, part.epoch) for part in parts} == {(9, worker.record.epoch)}
    assert [part.data_parallel_rank for part in parts] == [0, 0, 0, 0, 1, 1]
    assert chains_back(parts) == {(0, Tier.DEVICE): chain, (1, Tier.HOST): {0: 2**64 - 1, 7: None}}
    # Sequences come as they lie, cut by nothing but the ends of messages.
    assert sum(len(part.stored) for part in parts[:4]) == 3 * MAX_PART_BLOCKS // 1000 + 1 + 3


async def test_a_snapshot_of_a_worker_without_blocks_has_its_number() -> None:
    async with serving(FakeWorker(snapshot=KvSnapshot(4, ())), {}) as address:
        [part] = await parts_of(address)
    assert (part.number, part.stored) == (4, [])


_hashes = st.integers(0, 40) | st.just(2**64 - 1)


@given(table=st.dictionaries(_hashes, st.none() | _hashes, max_size=30), tier=st.sampled_from(Tier))
def test_every_table_survives_the_wire_in_its_order(table: dict[int, int | None], tier: Tier) -> None:
    snapshot = KvSnapshot(1, [StoredBlocks(3, table, tier)])
    parts = [from_kv_snapshot_part(part) for part in to_kv_snapshot_parts(snapshot, epoch=5)]
    read = chains_back(parts).get((3, tier), {})
    assert list(read.items()) == list(table.items())


class Nonsense(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, part: pb.StreamKvSnapshotResponse) -> None:
        self._part = part

    async def StreamKvSnapshot(self, request, context) -> AsyncIterator[pb.StreamKvSnapshotResponse]:
        yield self._part


@pytest.mark.parametrize(
    "changes",
    [
        {"parent_hashes": []},
        {"parent_hashes": [1, 2]},
        {"first_blocks": [1]},
        {"tier": kv_events_pb2.TIER_UNSPECIFIED},
        {"tier": 9},
    ],
)
async def test_a_part_that_makes_no_sense_is_refused(changes: dict[str, object]) -> None:
    fields = {"sequence_hashes": [1], "parent_hashes": [1], "tier": kv_events_pb2.TIER_DEVICE, **changes}
    add = worker_pb2_grpc.add_WorkerServiceServicer_to_server
    servicer = Nonsense(pb.StreamKvSnapshotResponse(**fields))
    server = RpcServer(ServerConfig(), [Service("quartet.v1.WorkerService", lambda server: add(servicer, server))])
    port = await server.start()
    try:
        with pytest.raises(ProtocolError):
            await parts_of(f"127.0.0.1:{port}")
    finally:
        await server.drain(0)
