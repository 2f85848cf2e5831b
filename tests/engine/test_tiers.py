"""Engines with tiers below their pool: what was evicted comes back, or is computed. The fake checks every block."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from queue import Queue
from random import Random
from weakref import WeakSet

import pytest

from quartet.engine.base import EngineRequest, Failed, Finished, Prefilled, RequestKind, StepOutput, TierCounts
from quartet.engine.runner import ModelRunner, RunningRequest, ScheduledChunk
from quartet.engine.scheduler import Load, Pull, Schedule
from quartet.engine.step_engine import StepEngine
from quartet.engine.step_loop import OutputBuilder
from quartet.engine.tiers import Link, LoadBatchEnded, PullsReady, Speed, Tiering, TierMessage, open_tiers
from quartet.errors import RequestCancelledError
from quartet.events.kv import StoredBlocks, Tier
from quartet.events.load import OnboardTime, StepTime
from quartet.kvcache.block_hash import chain_digest, sequence_hashes
from quartet.kvcache.block_pool import EvictedBlock
from quartet.kvcache.layout import KvLayout
from quartet.kvcache.sequence import Sequence
from quartet.kvcache.tiers import BlockName, LowerTiers, TierBlock, TierPlan
from quartet.transfer.base import PieceRun, PoolMemory
from quartet.transfer.disk_blocks import DiskBlocks
from quartet.transfer.host_blocks import DONE, PlainHostBlocks, Saving
from tests.engine.consumer import Consumer, StartEngine
from tests.engine.fakes import WAIT_S, FakePuller, FakeRunner, expected_output, make_request
from tests.engine.launching import LaunchingRunner
from tests.engine.tiers import make_tiers
from tests.kvcache.replica import TierReplica

PROMPT, OTHER = range(40), range(63, 23, -1)  # ten blocks each, of a pool of twelve


#: Nothing is copied before it must be, but for one block a step.
SINGLY = TierPlan(num_blocks=40, max_batch_size=1, max_concurrent_transfers=50)


class GatedSaving:
    """A copy that is under way until ``event`` is set, as on a GPU."""

    def __init__(self, event: threading.Event, is_waited_for: threading.Event) -> None:
        self._event, self._is_waited_for = event, is_waited_for

    @property
    def is_done(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        self._is_waited_for.set()
        assert self._event.wait(WAIT_S)


class GatedHostBlocks(PlainHostBlocks):
    """Loads wait until ``may_load`` is set, and then fail if ``fails``; copies end once ``may_save`` is set."""

    def __init__(self, memory: PoolMemory, num_slots: int, num_blocks: int) -> None:
        super().__init__(memory, num_slots, num_blocks=num_blocks)
        self.may_load, self.may_save, self.began = threading.Event(), threading.Event(), threading.Event()
        self.is_waited_for = threading.Event()
        self.fails = self.loads_before_second_copy = False
        self.num_copies = 0
        self.may_load.set()
        self.may_save.set()

    def save(self, block_ids: Items[int], slots: Items[int]) -> Saving:
        self.num_copies += 1
        if self.loads_before_second_copy and self.num_copies == 2:
            assert self.began.wait(WAIT_S), "no load began"
        super().save(block_ids, slots)
        return DONE if self.may_save.is_set() else GatedSaving(self.may_save, self.is_waited_for)

    def load(self, slots: Items[int], block_ids: Items[int]) -> None:
        self.began.set()
        assert self.may_load.wait(WAIT_S)
        if self.fails:
            raise OSError("the memory is gone")
        super().load(slots, block_ids)


async def answer(engine: StepEngine, consumer: Consumer, prompt: Items[int], max_tokens: int = 1) -> EngineRequest:
    """The request, which was answered as it should be."""
    engine.submit(request := make_request(prompt, max_tokens=max_tokens))
    assert isinstance(await consumer.wait_terminal(request), Finished)
    assert consumer.tokens[request.id] == expected_output(request.generation)
    return request


def tier(engine: StepEngine, which: Tier) -> TierCounts:
    [found] = [counts for counts in engine.stats()[0].tiers if counts.tier is which]
    return found


async def test_an_evicted_prefix_is_loaded_from_the_host(start_engine: StartEngine) -> None:
    runner = FakeRunner(num_blocks=12)
    engine = await start_engine(runner, tiers=make_tiers(20))
    consumer = Consumer(engine)
    for prompt in (PROMPT, OTHER):
        await answer(engine, consumer, prompt)
    request = await answer(engine, consumer, PROMPT, max_tokens=4)
    started = consumer.started[request.id]
    assert started.num_cached_tokens == 36
    assert started.onboard_s > 0
    assert runner.chunk_sizes[2:] == [[4], [1], [1], [1]]
    assert tier(engine, Tier.HOST).num_loaded == 7, "two were still on the device"


async def test_what_a_request_finds_makes_no_room_for_what_it_displaces(start_engine: StartEngine) -> None:
    engine = await start_engine(FakeRunner(num_blocks=12), tiers=make_tiers(12))
    consumer = Consumer(engine)
    for prompt in (PROMPT, OTHER):
        await answer(engine, consumer, prompt)
    request = await answer(engine, consumer, PROMPT)
    assert consumer.started[request.id].num_cached_tokens == 36
    assert tier(engine, Tier.HOST).num_dropped == 3


async def test_what_a_load_overwrites_is_copied_before(start_engine: StartEngine) -> None:
    engine = await start_engine(FakeRunner(num_blocks=12), tiers=make_tiers(40, host_plan=SINGLY))
    consumer = Consumer(engine)
    for prompt in (PROMPT, OTHER, PROMPT, OTHER):
        request = await answer(engine, consumer, prompt)
    assert consumer.started[request.id].num_cached_tokens == 36


async def test_a_load_begins_once_what_its_first_blocks_overwrite_is_being_copied(start_engine: StartEngine) -> None:
    host = Host()
    tiers = make_tiers(40, host=host.make, host_plan=SINGLY)
    engine = await start_engine(FakeRunner(num_blocks=12), tiers=tiers)
    consumer = Consumer(engine)
    for prompt in (PROMPT, OTHER):
        await answer(engine, consumer, prompt)
    host.blocks.began.clear()
    host.blocks.num_copies, host.blocks.loads_before_second_copy = 0, True
    request = await answer(engine, consumer, PROMPT)
    assert consumer.started[request.id].num_cached_tokens == 36
    assert host.blocks.num_copies > 2


async def test_an_engine_says_what_a_token_of_each_tier_takes(start_engine: StartEngine, tmp_path: Path) -> None:
    def open_slow(runner: ModelRunner, post: Callable[[TierMessage], None], *, path: Path | None) -> Tiering:
        assert isinstance(runner.memory, PoolMemory)
        plan, host = TierPlan(num_blocks=20), PlainHostBlocks(runner.memory, 20, num_blocks=runner.num_blocks)
        disk = None if path is None else DiskBlocks(path, runner.layout)
        links = {Tier.HOST: Link(4.0), Tier.DISK: Link(8.0)}
        return open_tiers(plan, None if disk is None else plan, host, disk, post, links=links)

    # Blocks of four tokens. What is on disk comes by way of the host.
    for path, disk_s in ((None, 0.0), (tmp_path / "tier", 3.0)):
        engine = await start_engine(FakeRunner(num_blocks=12), tiers=partial(open_slow, path=path))
        assert engine.stats()[0].onboard_time == OnboardTime(host_s_per_token=1.0, disk_s_per_token=disk_s)
    engine = await start_engine(FakeRunner(num_blocks=12))
    assert engine.stats()[0].onboard_time is None


async def test_a_load_that_fails_is_computed(start_engine: StartEngine) -> None:
    runner, host = FakeRunner(num_blocks=12), Host()
    engine = await start_engine(runner, tiers=make_tiers(20, host=host.make))
    consumer = Consumer(engine)
    for prompt in (PROMPT, OTHER):
        await answer(engine, consumer, prompt)
    host.blocks.fails = True
    request = await answer(engine, consumer, PROMPT)
    assert consumer.started[request.id].num_cached_tokens == 8
    assert runner.chunk_sizes[-1] == [32]


async def test_others_compute_while_blocks_are_loaded(start_engine: StartEngine) -> None:
    host = Host()
    engine = await start_engine(FakeRunner(num_blocks=12), tiers=make_tiers(20, host=host.make))
    consumer = Consumer(engine)
    for prompt in (PROMPT, OTHER):
        await answer(engine, consumer, prompt)
    host.hold_loads()
    engine.submit(loading := make_request(PROMPT, max_tokens=1))
    await asyncio.to_thread(host.blocks.began.wait, WAIT_S)
    await answer(engine, consumer, [1, 2, 3], max_tokens=3)
    assert loading.id not in consumer.started
    host.blocks.may_load.set()
    await consumer.wait_terminal(loading)
    assert consumer.tokens[loading.id] == expected_output(loading.generation)


async def test_a_request_that_is_cancelled_while_it_loads_keeps_its_blocks_until_nothing_writes_there(
    start_engine: StartEngine,
) -> None:
    host = Host()
    engine = await start_engine(FakeRunner(num_blocks=12), tiers=make_tiers(20, host=host.make))
    consumer = Consumer(engine)
    for prompt in (PROMPT, OTHER):
        await answer(engine, consumer, prompt)
    host.hold_loads()
    engine.submit(request := make_request(PROMPT))
    await asyncio.to_thread(host.blocks.began.wait, WAIT_S)
    engine.cancel(request.id)
    await answer(engine, consumer, [1, 2, 3])
    assert request.id not in consumer.terminal
    assert engine.stats()[0].num_in_use_blocks == 10
    host.blocks.may_load.set()
    terminal = await consumer.wait_terminal(request)
    assert isinstance(terminal, Failed)
    assert isinstance(terminal.error, RequestCancelledError)
    assert engine.stats()[0].num_in_use_blocks == 0
    assert tier(engine, Tier.HOST).blocks.in_use == 0


async def test_a_pull_begins_once_what_it_overwrites_is_copied(start_engine: StartEngine) -> None:
    host, puller = Host(), FakePuller()
    tiers = make_tiers(20, host=host.make, host_plan=SINGLY)
    engine = await start_engine(FakeRunner(num_blocks=14), puller=puller, tiers=tiers)
    consumer = Consumer(engine)
    await answer(engine, consumer, PROMPT)
    host.blocks.may_save.clear()
    generated = expected_output(make_request(OTHER, max_tokens=1).generation)
    pulling = make_request(OTHER, generated=generated, hand_off=puller.offer_prefix([*OTHER, *generated]))
    engine.submit(pulling)
    await answer(engine, consumer, [1, 2], max_tokens=2)
    assert not puller.fetch_began.is_set()
    host.blocks.may_save.set()
    assert isinstance(await consumer.wait_terminal(pulling), Finished)
    assert consumer.tokens[pulling.id] == expected_output(pulling.generation)[1:]
    request = await answer(engine, consumer, PROMPT)
    assert consumer.started[request.id].num_cached_tokens == 36


async def test_blocks_are_lost_where_too_many_are_on_their_way(start_engine: StartEngine) -> None:
    host = Host()
    plan = TierPlan(num_blocks=20, max_concurrent_transfers=2, max_batch_size=2)
    engine = await start_engine(FakeRunner(num_blocks=12), tiers=make_tiers(20, host=host.make, host_plan=plan))
    consumer = Consumer(engine)
    await answer(engine, consumer, PROMPT)
    host.blocks.may_save.clear()
    await answer(engine, consumer, OTHER)
    assert (tier(engine, Tier.HOST).num_stored, tier(engine, Tier.HOST).num_dropped) == (4, 4)
    host.blocks.may_save.set()
    await answer(engine, consumer, PROMPT)


async def test_what_one_request_loads_is_shared_with_those_that_come_meanwhile(start_engine: StartEngine) -> None:
    host = Host()
    engine = await start_engine(FakeRunner(num_blocks=34), tiers=make_tiers(60, host=host.make))
    consumer = Consumer(engine)
    for prompt in (PROMPT, *([start, *OTHER[1:]] for start in range(1, 5))):
        await answer(engine, consumer, prompt)
    host.hold_loads()
    requests = [make_request(PROMPT, max_tokens=1) for _ in range(3)]
    for request in requests:
        engine.submit(request)
    await asyncio.to_thread(host.blocks.began.wait, WAIT_S)
    host.blocks.may_load.set()
    for request in requests:
        await consumer.wait_terminal(request)
        assert consumer.started[request.id].num_cached_tokens == 36
    assert tier(engine, Tier.HOST).num_loaded == 9


class HangingDiskBlocks(DiskBlocks):
    """Reads wait until ``may_read`` is set."""

    def __init__(self, path: Path, layout: KvLayout) -> None:
        super().__init__(path, layout)
        self.may_read, self.began = threading.Event(), threading.Event()
        self.num_begun = 0
        self.may_read.set()

    def read(self, name: BlockName, into: memoryview) -> bool:
        self.num_begun += 1
        self.began.set()
        assert self.may_read.wait(WAIT_S)
        return super().read(name, into)


@pytest.mark.parametrize("ends", [False, True], ids=["the disk wakes", "the engine ends"])
async def test_what_a_disk_that_hangs_does_not_bring_in_time_is_computed_and_it_is_left_alone(
    start_engine: StartEngine, tmp_path: Path, ends: bool
) -> None:
    disks, late = list[HangingDiskBlocks](), list[Callable[[], None]]()

    def disk(path: Path, layout: KvLayout) -> DiskBlocks:
        disks.append(HangingDiskBlocks(path, layout))
        return disks[0]

    def timer(_seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        late.append(call)
        return lambda: late.remove(call)

    runner = FakeRunner(num_blocks=34)
    engine = await start_engine(runner, tiers=make_tiers(40, 100, tmp_path, disk=disk, timer=timer))
    consumer = Consumer(engine)
    await fill_disk(engine, consumer)
    disks[0].may_read.clear()
    disks[0].began.clear()
    requests = [make_request(PROMPT, max_tokens=1) for _ in range(2)]
    engine.submit(requests[0])
    await asyncio.to_thread(disks[0].began.wait, WAIT_S)
    await answer(engine, consumer, [1, 2, 3])
    assert requests[0].id not in consumer.terminal, "it waits for the disk"
    engine.submit(requests[1])
    num_begun = disks[0].num_begun
    [call] = late
    call()
    for request in requests:
        assert isinstance(await consumer.wait_terminal(request), Finished)
        assert consumer.tokens[request.id] == expected_output(request.generation)
    assert consumer.started[requests[0].id].num_cached_tokens == 0
    # Also if it is needed again: it is displaced once more, and computed.
    for number in range(4):
        await answer(engine, consumer, [number, *OTHER[1:]])
    await answer(engine, consumer, PROMPT)
    assert disks[0].num_begun == num_begun
    if ends:
        await engine.close()
        disks[0].may_read.set()
        return
    disks[0].may_read.set()
    async with asyncio.timeout(WAIT_S):
        while tier(engine, Tier.DISK).blocks.in_use:
            await answer(engine, consumer, [1, 2, 3])
    assert tier(engine, Tier.DISK).num_failed == 0


def test_a_request_s_time_in_the_queue_leaves_its_load_out() -> None:
    now = 1.0
    outputs = OutputBuilder(lambda: now)
    running = RunningRequest(request=(request := make_request([1, 2])), seq=Sequence([1, 2], block_size=4))
    outputs.submit(request.id, submitted_at=1.0)
    outputs.take_load(request.id, 2.0)
    now = 6.0
    outputs.start([running])
    output = outputs.build()
    assert output is not None
    assert [(started.queue_s, started.onboard_s) for started in output.started] == [(3.0, 2.0)]


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_blocks_come_back_from_disk_also_after_a_restart(
    start_engine: StartEngine, tmp_path: Path, is_restarted: bool
) -> None:
    runner = FakeRunner(num_blocks=12)
    engine = await start_engine(runner, tiers=make_tiers(40, 100, tmp_path))
    consumer = Consumer(engine)
    await fill_disk(engine, consumer)
    if is_restarted:
        await engine.close()
        runner = FakeRunner(num_blocks=12)
        engine = await start_engine(runner, tiers=make_tiers(40, 100, tmp_path))
        consumer = Consumer(engine)
    request = await answer(engine, consumer, PROMPT)
    assert consumer.started[request.id].num_cached_tokens == 36
    assert tier(engine, Tier.DISK).num_loaded == 9
    assert runner.chunk_sizes[-1] == [4]


async def test_an_engine_that_starts_bounds_the_files_of_former_models(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    runner = FakeRunner(num_blocks=12)
    former = DiskBlocks(tmp_path, replace(runner.layout, model_fingerprint="former"))
    for number in range(3):
        name = BlockName(bytes([number]) * 32, bytes(32), number, None)
        former.write(name, memoryview(bytes(runner.layout.piece_size_bytes)))
    former.close()
    os.utime(former.folder, (0, 0))
    await start_engine(runner, tiers=make_tiers(40, 2, tmp_path))
    assert not former.folder.exists()


@pytest.mark.parametrize("place", [0, 20, 60, 100, -1])
async def test_a_damaged_file_is_deleted_and_its_block_computed(
    start_engine: StartEngine, tmp_path: Path, place: int
) -> None:
    runner = FakeRunner(num_blocks=12)
    engine = await start_engine(runner, tiers=make_tiers(40, 100, tmp_path))
    consumer = Consumer(engine)
    await fill_disk(engine, consumer)
    for file in files_in(tmp_path):
        data = bytearray(file.read_bytes())
        data[place] ^= 1
        file.write_bytes(data)
    request = await answer(engine, consumer, PROMPT)
    assert consumer.started[request.id].num_cached_tokens == 0
    assert runner.chunk_sizes[-1] == [40]
    assert tier(engine, Tier.DISK).num_failed == 9


async def test_events_and_snapshots_tell_tiers(start_engine: StartEngine, tmp_path: Path) -> None:
    engine = await start_engine(FakeRunner(num_blocks=12), tiers=make_tiers(40, 100, tmp_path))
    consumer = EventConsumer(engine)
    await fill_disk(engine, consumer)
    await answer(engine, consumer, PROMPT)
    engine.request_kv_snapshot()
    await consumer.wait_seen()
    tables = {blocks.tier: blocks.parent_hashes for blocks in consumer.snapshots[-1]}
    assert set(tables) == set(Tier)
    assert tables == consumer.tables_at_snapshot
    assert set(sequence_hashes(PROMPT, 4)[:9]) <= tables[Tier.HOST].keys() & tables[Tier.DISK].keys()


async def test_a_prefill_loads_what_it_hands_off(start_engine: StartEngine) -> None:
    puller, source = FakePuller(), FakeRunner(num_blocks=12)
    prefilling = await start_engine(source, tiers=make_tiers(20))
    decoding = await start_engine(FakeRunner(), puller=puller)
    prefills, decodes = Consumer(prefilling), Consumer(decoding)
    for prompt in (PROMPT, OTHER):
        await answer(prefilling, prefills, prompt)
    prefilling.submit(prefill := make_request(PROMPT, kind=RequestKind.PREFILL))
    prefilled = await prefills.wait_terminal(prefill)
    assert isinstance(prefilled, Prefilled)
    assert (prefilled.num_cached_tokens, source.chunk_sizes[-1]) == (36, [4])
    assert prefilled.onboard_s > 0
    assert source.memory is not None
    hand_off = puller.offer_prefilled(source.memory, source.layout, prefilled)
    request = make_request(PROMPT, generated=[prefilled.token_id], hand_off=hand_off)
    decoding.submit(request)
    await decodes.wait_terminal(request)
    assert [prefilled.token_id, *decodes.tokens[request.id]] == expected_output(request.generation)


def test_pulls_wait_for_blocks_that_an_earlier_step_began_to_save() -> None:
    hosts, posted, ready = list[GatedHostBlocks](), list[TierMessage](), threading.Event()

    def host(memory: PoolMemory, num_slots: int, num_blocks: int) -> GatedHostBlocks:
        hosts.append(GatedHostBlocks(memory, num_slots, num_blocks))
        return hosts[0]

    def post(message: TierMessage) -> None:
        posted.append(message)
        ready.set()

    tiers = make_tiers(4, host=host)(FakeRunner(num_blocks=12), post)
    hosts[0].may_save.clear()
    tiers.lower.take([EvictedBlock(3, bytes(32), bytes(32), 1, None)])
    tiers.begin_step(Schedule())
    assert not tiers.lower.pending, "it is on its way"
    pull = Pull(7, PieceRun(0, [3]))
    tiers.begin_step(schedule := Schedule(pulls=[pull]))
    assert schedule.pulls == [] and not posted
    hosts[0].may_save.set()
    assert ready.wait(WAIT_S)
    assert posted == [PullsReady([pull])]
    tiers.close()


def test_copies_that_have_ended_are_forgotten() -> None:
    class Saved:
        is_done = True

        def wait(self) -> None:
            pass

    kept = WeakSet[Saved]()

    class NotingHostBlocks(PlainHostBlocks):
        def save(self, block_ids: Items[int], slots: Items[int]) -> Saving:
            super().save(block_ids, slots)
            kept.add(saving := Saved())
            return saving

    def host(memory: PoolMemory, num_slots: int, num_blocks: int) -> PlainHostBlocks:
        return NotingHostBlocks(memory, num_slots, num_blocks=num_blocks)

    tiers = make_tiers(4, host=host)(FakeRunner(num_blocks=12), lambda _message: None)
    for number in range(20):
        tiers.lower.take([EvictedBlock(3, bytes([number]) * 32, bytes(32), number, None)])
        tiers.begin_step(Schedule(chunks=[chunk_to(3)]))
    assert len(kept) <= 2
    tiers.close()


def test_pulls_go_on_if_the_copies_that_they_wait_for_fail() -> None:
    posted, ready = list[TierMessage](), threading.Event()

    class Failing:
        is_done = False

        def wait(self) -> None:
            raise OSError("the memory is gone")

    class FailingHostBlocks(PlainHostBlocks):
        def save(self, block_ids: Items[int], slots: Items[int]) -> Saving:
            return super().save(block_ids, slots) if 0 in block_ids else Failing()

    def post(message: TierMessage) -> None:
        posted.append(message)
        ready.set()

    def host(memory: PoolMemory, num_slots: int, num_blocks: int) -> PlainHostBlocks:
        return FailingHostBlocks(memory, num_slots, num_blocks=num_blocks)

    tiers = make_tiers(4, host=host)(FakeRunner(num_blocks=12), post)
    tiers.lower.take([EvictedBlock(3, bytes(32), bytes(32), 1, None)])
    pull = Pull(7, PieceRun(0, [3]))
    tiers.begin_step(Schedule(pulls=[pull]))
    assert ready.wait(WAIT_S)
    assert posted == [PullsReady([pull])]


@pytest.mark.parametrize("where", [Tier.HOST, Tier.DISK])
def test_what_a_block_takes_is_learned_from_whole_loads_as_their_batches_share_the_link(
    tmp_path: Path, where: Tier
) -> None:
    posted = Queue[TierMessage]()
    runner = FakeRunner(num_blocks=12)
    tiers = make_tiers(0, 20, tmp_path, host_plan=TierPlan(num_blocks=20, max_batch_size=2))(runner, posted.put)
    contents = [bytes([number]) for number in range(6)]
    digests = list(accumulate(contents, chain_digest, initial=bytes(32)))
    if where is Tier.HOST:
        evicted = [EvictedBlock(n, digests[n + 1], digests[n], n, n - 1 if n else None) for n in range(6)]
        tiers.lower.take(evicted)
        tiers.begin_step(Schedule(loads=[Load(1, [], range(6))]))
        tiers.take(posted.get(timeout=WAIT_S))
    else:
        tiers.lower.restore([BlockName(digests[n + 1], digests[n], n, n - 1 if n else None) for n in range(6)])
    before = tiers.s_per_block
    tiers.begin_step(Schedule(loads=[Load(7, tiers.lower.find(bytes(32), contents), range(6))]))
    for number in range(3):
        message = posted.get(timeout=WAIT_S)
        assert isinstance(message, LoadBatchEnded)
        # All begin at once, and end one after the other.
        times = {"began_at": 100.0, "read_at": 102.0 + 2 * number, "ended_at": 102.0 + 2 * number}
        tiers.take(replace(message, has_arrived=[True, True], **times))
    other = Tier.HOST if where is Tier.DISK else Tier.DISK
    assert tiers.s_per_block[where] == pytest.approx(before[where] + 0.25 * (1.0 - before[where]))
    assert tiers.s_per_block[other] == before[other]
    tiers.close()


@pytest.mark.parametrize("is_met", [False, True])
def test_a_load_waits_only_for_copies_of_what_it_overwrites(is_met: bool) -> None:
    hosts, posted, ended = list[GatedHostBlocks](), list[TierMessage](), threading.Event()

    def post(message: TierMessage) -> None:
        posted.append(message)
        ended.set()

    def host(memory: PoolMemory, num_slots: int, num_blocks: int) -> GatedHostBlocks:
        hosts.append(GatedHostBlocks(memory, num_slots, num_blocks))
        return hosts[0]

    tiers = make_tiers(4, host=host)(FakeRunner(num_blocks=12), post)
    digest = chain_digest(bytes(32), b"first")
    tiers.lower.take([EvictedBlock(2, digest, bytes(32), 1, None)])
    tiers.begin_step(Schedule())
    found = tiers.lower.find(bytes(32), [b"first"])
    hosts[0].may_save.clear()
    hosts[0].began.clear()
    tiers.lower.take([EvictedBlock(3, b"other", bytes(32), 2, None)])
    tiers.begin_step(Schedule(loads=[Load(7, found, [3 if is_met else 4])]))
    if is_met:
        assert hosts[0].is_waited_for.wait(WAIT_S)
        assert not ended.is_set()
    else:
        assert ended.wait(WAIT_S)
    hosts[0].may_save.set()
    assert ended.wait(WAIT_S)
    [message] = posted
    assert isinstance(message, LoadBatchEnded)
    assert message.is_loaded
    tiers.close()


@pytest.mark.parametrize("kind", [FakeRunner, LaunchingRunner])
async def test_many_requests_that_displace_one_another_get_what_they_should(
    start_engine: StartEngine, tmp_path: Path, kind: type[FakeRunner]
) -> None:
    engine = await start_engine(kind(num_blocks=24), tiers=make_tiers(16, 64, tmp_path), max_num_seqs=4)
    consumer = Consumer(engine)
    source = Random(1)
    requests = []
    for number in range(120):
        start = source.choice([0, 10, 20, 30])
        prompt = [start + position % 23 for position in range(source.randrange(5, 40))]
        engine.submit(request := make_request(prompt, max_tokens=source.randrange(1, 5)))
        if number % 9 == 0:
            engine.cancel(request.id)
        requests.append(request)
        if number % 5 == 0:
            await consumer.wait_terminal(request)
    for number, request in enumerate(requests):
        outcome = await consumer.wait_terminal(request)
        assert isinstance(outcome, Finished) or number % 9 == 0
        if isinstance(outcome, Finished):
            assert consumer.tokens[request.id] == expected_output(request.generation)
    assert tier(engine, Tier.HOST).num_loaded > 0
    assert engine.stats()[0].num_in_use_blocks == 0
    assert tier(engine, Tier.HOST).blocks.in_use == 0


def chunk_to(block_id: int) -> ScheduledChunk:
    """A step's part that writes to this block."""
    seq = Sequence([1, 2], block_size=4)
    seq.block_table = [block_id]
    return ScheduledChunk(RunningRequest(request=make_request([1, 2]), seq=seq), 0, 2, samples=True)


def found_blocks(*tiers: Tier) -> list[TierBlock]:
    name = BlockName(bytes(32), bytes(32), 0, None)
    return [TierBlock(name, tier, 0) for tier in tiers]


@pytest.mark.parametrize(
    ("host_s", "disk_s", "expected"),
    [(0.0001, 0.0001, 4), (0.0001, 1.0, 2), (1.0, 0.0001, 0), (0.0001, 0.0030, 2), (0.0001, 0.0010, 4)],
)
def test_blocks_are_loaded_where_that_takes_less_than_to_compute_them(
    host_s: float, disk_s: float, expected: int
) -> None:
    tiers = bare_tiers({Tier.HOST: Speed(host_s), Tier.DISK: Speed(disk_s)})
    tiers.forecast_by(lambda: StepTime(prefill_base_s=0.0, prefill_s_per_token=0.0005), 64)
    seq = Sequence(range(20), block_size=4)
    seq.blocks_below = found_blocks(Tier.HOST, Tier.HOST, Tier.DISK, Tier.DISK)
    for block in seq.blocks_below:
        block.num_readers = 1
    tiers.choose(seq)
    assert len(seq.blocks_below) == expected
    tiers.close()


def test_a_tier_that_was_slow_once_is_tried_again() -> None:
    speed = Speed(0.001)
    for _ in range(20):
        speed.observe(10, 10.0)
    assert speed.s_per_block > 0.9
    for _ in range(400):
        speed.doubt()
    assert speed.s_per_block < 0.002


class Host:
    """Makes the slots of an engine's host, and keeps them for a test."""

    def make(self, memory: PoolMemory, num_slots: int, num_blocks: int) -> PlainHostBlocks:
        self.blocks = GatedHostBlocks(memory, num_slots, num_blocks)
        return self.blocks

    def hold_loads(self) -> None:
        self.blocks.began.clear()  # the engine has measured a load
        self.blocks.may_load.clear()


class EventConsumer(Consumer):
    """Keeps what events say of tiers, and snapshots."""

    def __init__(self, engine: StepEngine) -> None:
        self.replica = TierReplica()
        self.snapshots: list[Items[StoredBlocks]] = []
        self.tables_at_snapshot: dict[Tier, dict[int, int | None]] = {}
        super().__init__(engine)

    def _take(self, output: StepOutput) -> None:
        super()._take(output)
        for changed in output.kv_events:
            self.replica.apply(changed.events)
        if output.kv_snapshot is not None:
            self.snapshots.append(output.kv_snapshot)
            self.tables_at_snapshot = {tier: dict(table) for tier, table in self.replica.tables.items()}


async def fill_disk(engine: StepEngine, consumer: Consumer) -> None:
    """Answer ``PROMPT``, and then others until its first nine blocks are on disk and nowhere else."""
    for prompt in (PROMPT, *([start, *OTHER[1:]] for start in range(9))):
        await answer(engine, consumer, prompt)
        await consumer.wait_seen()
        async with asyncio.timeout(WAIT_S):
            while tier(engine, Tier.DISK).blocks.in_use or tier(engine, Tier.HOST).blocks.held:
                await consumer.wait_seen()


def files_in(path: Path) -> list[Path]:
    return list(path.rglob("*.kv"))


def bare_tiers(speeds: dict[Tier, Speed]) -> Tiering:
    memory = PoolMemory(4, 64)
    lower = LowerTiers(TierPlan(num_blocks=4), TierPlan(num_blocks=4))
    return Tiering(lower, PlainHostBlocks(memory, 4, num_blocks=4), None, lambda _message: None, speeds=speeds)
