"""Workers' blocks and the router's copy, over real ZMQ and gRPC; only the model is a fake."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quartet.api.fleet import WorkerState
from quartet.discovery.base import Rank, WorkerRecord
from quartet.discovery.create import create_registry
from quartet.events.curve import EventsKey, read_events_key
from quartet.events.kv import Cleared, KvSnapshot, RankEvents, Removed, Stored, StoredBlocks, Tier
from quartet.events.publisher import EventPublisher
from quartet.events.subscriber import EventSubscriber
from quartet.kvcache import block_hash
from quartet.streams.worker_client import WorkerClient
from quartet.telemetry.metrics import RouterMetrics
from quartet.v1 import router_pb2 as pb
from quartet.v1.types_pb2 import Sampling
from router.fleet import Fleet
from router.kv_index.feed import KvJoins
from router.policy.create import PolicyConfig, PolicyName
from router.workers import WorkerTable
from services.workers import process as worker_process
from tests.router.kv_truth import Held, SetIndex
from tests.router.records import make_load, make_record
from tests.router.system import NUM_BLOCKS, System, expected, running_system
from tests.router.test_servicer import PROMPT, generate, token_ids_of
from tests.router.test_servicer import make_start as router_start
from tests.services.stream_workers import collect, make_start, until
from tests.services.test_model_files import FakeWorker, serving
from tests.streams.pulled import PulledDecode

TIMEOUT_S = 30.0


@dataclass
class Follower:
    """A router's fleet, and the index that it keeps."""

    fleet: Fleet
    table: WorkerTable
    index: SetIndex

    def records(self) -> list[WorkerRecord]:
        return [status.record for status in self.table.statuses(0) if status.state is WorkerState.READY]

    async def wait_ready(self, *epochs_past: int, num_workers: int = 1) -> list[WorkerRecord]:
        """The workers, once so many are ready, in lives other than those."""

        def is_met() -> bool:
            records = self.records()
            return len(records) == num_workers and all(record.epoch not in epochs_past for record in records)

        await until(is_met)
        return self.records()

    async def work(self, worker_id: str, seed: int, num_requests: int = 25) -> None:
        """Have so many requests decoded there, many of which begin alike, and several at once."""
        draw = random.Random(seed)
        prompts = [draw.choices(range(60), k=40) for _ in range(6)]

        async def decode() -> None:
            prompt = [*draw.choice(prompts)[: draw.randint(1, 40)], *draw.choices(range(60), k=draw.randint(1, 9))]
            decode = PulledDecode()
            decode.call = self.fleet.decode(Rank(worker_id), make_start(prompt, max_tokens=draw.randint(1, 9)), decode)
            await collect(decode)

        await asyncio.gather(*(decode() for _ in range(num_requests)))

    async def wait_exact(self) -> Held:
        """Return what the workers, which are idle, hold, once the index says the same."""
        async with asyncio.timeout(TIMEOUT_S):
            held: Held = {}
            for record in self.records():
                held |= await ask(record)
            await until(lambda: self.index.held == held)
        return held


async def ask(record: WorkerRecord) -> Held:
    """What a worker itself says that it holds."""
    held: Held = {}
    async with grpc.aio.insecure_channel(record.grpc_address) as channel:
        async for part in WorkerClient(channel).kv_snapshot(TIMEOUT_S):
            for stored in part.stored:
                rank = Rank(record.worker_id, part.data_parallel_rank)
                held.setdefault(rank, set()).update((stored.tier, named) for named in stored.sequence_hashes)
    return held


@asynccontextmanager
async def following(system: System, key: EventsKey | None = None) -> AsyncIterator[Follower]:
    """A router's fleet that follows the workers of ``system``."""
    index, table = SetIndex(), WorkerTable("router-a", heartbeat_timeout_s=30)
    fleet = Fleet(table, RouterMetrics(CollectorRegistry()), None, events_key=key, kv=KvJoins(index))
    registry = create_registry(system.discovery)
    tasks = [asyncio.create_task(fleet.watch(registry.watch())), asyncio.create_task(fleet.tend())]
    try:
        yield Follower(fleet, table, index)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await registry.close()
        await fleet.close()
        assert not index.held


@pytest.fixture
async def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[System]:
    system = System(tmp_path)
    monkeypatch.setattr(worker_process, "create_engine", system.create_engine)
    yield system
    await system.close()


@pytest.mark.parametrize("has_key", [False, True])
async def test_the_router_knows_exactly_which_blocks_were_stored_and_evicted(
    system: System, tmp_path: Path, has_key: bool
) -> None:
    key: EventsKey | None = None
    if has_key:
        file = tmp_path / "events_key"
        file.touch(mode=0o600)
        file.write_text("5e" * 32)
        key, system.worker_settings = read_events_key(file), {"events_key_file": file}
    system.start_worker("decode-0")
    async with following(system, key) as router:
        await router.wait_ready()
        for seed in range(3):
            await router.work("decode-0", seed)
            held = await router.wait_exact()
        # More was computed than there is room for.
        assert NUM_BLOCKS // 2 < len(held[Rank("decode-0")]) <= NUM_BLOCKS


async def test_a_router_that_joins_late_knows_the_same_blocks(system: System) -> None:
    system.start_worker("decode-0")
    async with following(system) as router:
        await router.wait_ready()
        await router.work("decode-0", 1)
        async with following(system) as late:
            await late.wait_ready()
            working = asyncio.create_task(router.work("decode-0", 2))
            await late.work("decode-0", 3)
            await working
            assert await late.wait_exact() == await router.wait_exact()


async def test_a_restarted_workers_blocks_are_learnt_anew_and_other_workers_blocks_stay(system: System) -> None:
    for worker_id in ("decode-0", "decode-1"):
        system.start_worker(worker_id)
    async with following(system) as router:
        records = await router.wait_ready(num_workers=2)
        for record in records:
            await router.work(record.worker_id, 1)
        before = await router.wait_exact()
        gone = system.workers.pop("decode-0")
        gone.task.cancel()
        await asyncio.wait([gone.task])
        system.start_worker("decode-0")
        await router.wait_ready(records[0].epoch, num_workers=2)
        after = await router.wait_exact()
        assert after == {Rank("decode-1"): before[Rank("decode-1")]}
        await router.work("decode-0", 2)
        assert len(await router.wait_exact()) == 2


async def test_where_all_blocks_have_one_hash_no_request_gets_anothers_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_hash, "xxh3_64_intdigest", lambda *_: 42)
    # Equal blocks behind different ones, and different ones behind equal ones.
    prompts = [[*[first] * 8, *[second] * 8, 9] for first in (20, 30) for second in (40, 50)]
    policy = PolicyConfig(name=PolicyName.KV_AWARE)
    # One worker: with two, load decides where a prompt is prefilled, and so what is cached there.
    async with running_system(tmp_path, monkeypatch, "decode-0", policy=policy) as (_, stub):
        cached: list[int] = []
        for prompt in [*prompts, *prompts]:
            answer = await generate(stub, router_start(token_ids=pb.TokenIds(ids=prompt)))
            assert token_ids_of(answer) == expected(prompt, 12)
            cached.append(answer[-1].finished.usage.num_cached_tokens)
        # The first time only what truly begins alike is shared, and then all but the last token.
        assert cached == [0, 8, 0, 8, 16, 16, 16, 16]


async def test_explain_prices_blocks_that_lie_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = PolicyConfig(name=PolicyName.KV_AWARE)
    async with running_system(tmp_path, monkeypatch, "decode-0", policy=policy, num_host_blocks=128) as (_, stub):

        async def one_token(prompt: list[int]) -> list[pb.GenerateResponse]:
            return await generate(
                stub, router_start(token_ids=pb.TokenIds(ids=prompt), sampling=Sampling(max_tokens=1))
            )

        async def explained() -> pb.RankOption:
            response = await stub.Explain(pb.ExplainRequest(start=router_start()), timeout=TIMEOUT_S)
            [option] = response.options
            return option

        await one_token(PROMPT)
        async with asyncio.timeout(TIMEOUT_S):
            while not (option := await explained()).num_matched_tokens:
                pass  # each look is a call that takes its time
        assert option.terms["onboard_s"] == 0
        for first in (1, 2):  # together they fill the pool
            await one_token([first] * 150)
        async with asyncio.timeout(TIMEOUT_S):
            while not (await explained()).terms["onboard_s"]:
                pass
        assert (await explained()).num_matched_tokens == len(PROMPT)
        answer = await one_token(PROMPT)
        assert token_ids_of(answer) == expected(PROMPT, 1)
        assert answer[0].accepted.choices[0].num_matched_tokens == len(PROMPT)
        assert answer[-1].finished.time.onboard.ToNanoseconds() > 0


@dataclass
class FloodingWorker(FakeWorker):
    """Changes what it holds far faster than anybody can hear of it."""

    publisher: EventPublisher = field(kw_only=True)
    held: dict[int, int | None] = field(default_factory=dict)
    num_snapshots: int = 0

    def change(self, stored: int, removed: int | None = None) -> None:
        """One block comes, another one goes, in a batch that is long for it: others go too that never were there."""
        self.held[stored] = None
        absent = range(10**9, 10**9 + 50_000)
        gone = absent if removed is None else [removed, *absent]
        if removed is not None:
            del self.held[removed]
        self.publisher.publish_kv(RankEvents(0, [Stored(None, [stored]), Removed(gone)]))

    def clear(self) -> None:
        self.held.clear()
        self.publisher.publish_kv(RankEvents(0, [Cleared()]))

    async def kv_snapshot(self) -> KvSnapshot:
        self.num_snapshots += 1
        return KvSnapshot(self.publisher.kv_number, [StoredBlocks(0, dict(self.held))])


@asynccontextmanager
async def flooded(index: SetIndex) -> AsyncIterator[tuple[FloodingWorker, KvJoins]]:
    """A worker and who listens to it, each with next to no room for what waits."""
    lost: Counter[str] = Counter()
    record = make_record()
    publisher = EventPublisher("127.0.0.1", worker_id=record.worker_id, epoch=record.epoch, max_pending_messages=2)
    worker, joins = FloodingWorker(record, publisher=publisher), KvJoins(index)
    subscriber = EventSubscriber(
        joins.take_load, lambda: lost.update(["malformed"]), joins.take_batch, max_pending_messages=2
    )
    try:
        async with serving(worker, {}) as address, grpc.aio.insecure_channel(address) as channel:
            joins.enter(record, WorkerClient(channel))
            subscriber.connect(publisher.endpoint)
            yield worker, joins
            await joins.close()
    finally:
        subscriber.close()
        publisher.close()
    assert not lost


async def heartbeats(worker: FloodingWorker) -> None:
    while True:
        worker.publisher.publish_load(make_load(worker.record))
        await asyncio.sleep(0.02)


async def test_a_flood_past_the_high_water_mark_leaves_the_index_exact() -> None:
    index = SetIndex()

    def is_exact(worker: FloodingWorker) -> bool:
        return index.held.get(Rank("decode-0"), set()) == {(Tier.DEVICE, named) for named in worker.held}

    async with flooded(index) as (worker, joins), asyncio.TaskGroup() as tasks:
        beating = tasks.create_task(heartbeats(worker))
        await until(lambda: joins.num_live == 1)
        for _ in range(3):
            num_snapshots = worker.num_snapshots
            # In one go: the event loop, which receives it, does not run meanwhile.
            for number in range(60):
                worker.change(number, removed=number - 1 if number % 2 else None)
            await until(lambda: is_exact(worker))
            assert worker.num_snapshots > num_snapshots, "nothing was lost"
            worker.clear()
            await until(lambda: not worker.held and is_exact(worker))
        beating.cancel()
