"""Moves blocks between an engine's pool, host memory and disk, and decides whether a request loads or computes.

``Tiering`` lives on the engine's thread; copies to the pool, and all of the disk, are the work of a few threads of its
own, which post what became of it as messages to that one. ``quartet.kvcache.tiers`` knows which block lies where.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

from quartet.engine.base import TierCounts
from quartet.engine.scheduler import Load, Pull, Schedule
from quartet.engine.tier_rules import Forecast, load_s_per_block, save_batches
from quartet.events.kv import Tier
from quartet.events.load import StepTime
from quartet.kvcache.sequence import Sequence as TokenSequence
from quartet.kvcache.tiers import DiskWrite, LoadedBlock, LowerTiers, TierPlan
from quartet.transfer.disk_blocks import DiskBlocks
from quartet.transfer.host_blocks import HostBlocks, Saving

logger = logging.getLogger(__name__)

# Of a measured speed this share counts, the rest is what was known before.
_NEWS = 0.25
# A speed that was found too low is doubted by so much of its distance to the best one, each time that it decides.
_DOUBT = 0.02
# After a write that failed, for the disk may be full; after a read that hung, too.
_PAUSE_S = 10.0
# A load from disk may take so many times what is forecast, and so much more; then its request computes.
_PATIENCE, _PATIENCE_S = 4.0, 2.0


@dataclass(frozen=True)
class LoadBatchEnded:
    """A batch of a load has ended; nothing of it writes to the pool any more.

    Attributes:
        has_arrived: of each block, whether its slot of the host has it.
        is_loaded: whether the pool has those up to the first that has not arrived.
        began_at, read_at, ended_at: when it began, had read all from disk, and ended, in seconds of ``time.monotonic``.
    """

    batch: LoadBatch
    has_arrived: Sequence[bool]
    is_loaded: bool
    began_at: float
    read_at: float
    ended_at: float


@dataclass(frozen=True)
class LoadIsLate:
    """A load should have ended long ago, unless it has."""

    load: RunningLoad


@dataclass(frozen=True)
class WriteEnded:
    """A batch was written to disk, as far as ``is_good`` says of each block."""

    write: DiskWrite
    is_good: Sequence[bool]


@dataclass(frozen=True)
class PullsReady:
    """Blocks that these pulls write to were saved, or their copies have failed."""

    pulls: Sequence[Pull]


TierMessage: TypeAlias = LoadBatchEnded | LoadIsLate | WriteEnded | PullsReady


@dataclass(frozen=True)
class EndedLoad:
    """A load of ``duration_s`` brought the first ``num_blocks`` blocks that it was to bring."""

    id: int
    num_blocks: int
    duration_s: float


class Speed:
    """Seconds a block, as measured."""

    def __init__(self, s_per_block: float) -> None:
        """Begin with a first measurement."""
        self.s_per_block = self._best = s_per_block

    def observe(self, num_blocks: int, seconds: float) -> None:
        """So many blocks took so long."""
        measured = seconds / num_blocks
        self._best = min(self._best, measured)
        self.s_per_block += _NEWS * (measured - self.s_per_block)

    def doubt(self) -> None:
        """It was found too low to be used; if it never were again, nobody would see that it is better now."""
        self.s_per_block += _DOUBT * (self._best - self.s_per_block)


class Link:
    """Has transfers take the time of a link that the machine does not have, one after the other."""

    def __init__(self, s_per_block: float) -> None:
        self.s_per_block = s_per_block
        self._lock = threading.Lock()
        self._is_free_at = 0.0

    def wait(self, num_blocks: int) -> None:
        """Sleep until the link has moved so many blocks more."""
        with self._lock:
            self._is_free_at = max(self._is_free_at, time.monotonic()) + num_blocks * self.s_per_block
            due_at = self._is_free_at
        time.sleep(max(0.0, due_at - time.monotonic()))


class LoadBatch:
    """Some blocks of a load, which one thread moves.

    Attributes:
        is_given_up: nobody waits for it, and others write to the pool's blocks.
    """

    def __init__(self, load: RunningLoad, first: int, blocks: Sequence[LoadedBlock], block_ids: Sequence[int]) -> None:
        """``first``: which of the load's blocks comes first here; ``block_ids``: the pool's."""
        self.load, self.first, self.blocks, self.block_ids = load, first, blocks, block_ids
        self.is_given_up = False
        self._lock = threading.Lock()
        self._writes_to_pool = False

    @property
    def num_read(self) -> int:
        """Blocks that come from disk."""
        return sum(block.disk is not None for block in self.blocks)

    def begin_writing(self) -> bool:
        """It is about to write to the pool. False: it must not, as it was given up."""
        with self._lock:
            self._writes_to_pool = not self.is_given_up
            return self._writes_to_pool

    def give_up(self) -> bool:
        """Have it write nothing to the pool. False: it does already, and is about to end."""
        with self._lock:
            self.is_given_up = not self._writes_to_pool
            return self.is_given_up


@dataclass(eq=False)
class RunningLoad:
    """A load under way.

    Attributes:
        is_loaded: of each block, as far as known.
        batches: that have not ended, and were not given up.
        ended: that have.
    """

    id: int
    began_at: float
    expected_s: float
    is_loaded: list[bool]
    batches: list[LoadBatch] = field(default_factory=list)
    ended: list[LoadBatchEnded] = field(default_factory=list)
    stop_timer: Callable[[], None] = lambda: None


def start_timer(seconds: float, call: Callable[[], None]) -> Callable[[], None]:
    """Have ``call`` called on a thread of its own after so long; returns what prevents it."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    return timer.cancel


class Tiering:
    """The tiers below one engine's pool.

    Attributes:
        lower: which block lies where; the block pool gives it what it evicts.
    """

    def __init__(
        self,
        lower: LowerTiers,
        host: HostBlocks,
        disk: DiskBlocks | None,
        post: Callable[[TierMessage], None],
        *,
        speeds: Mapping[Tier, Speed],
        links: Mapping[Tier, Link] | None = None,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[float, Callable[[], None]], Callable[[], None]] = start_timer,
    ) -> None:
        """What is on disk is known already; nothing is on the host.

        Args:
            lower: with the plans of both tiers.
            host: slots of the host.
            disk: files; ``None``: there is no disk.
            post: takes a message on any thread, for ``take``.
            speeds: how fast blocks come from disk to the host and from there to the pool, as measured at the start.
            links: of tiers whose transfers are to take longer than they do.
            clock: gives seconds.
            timer: as ``start_timer``.
        """
        self.lower = lower
        self._host, self._disk, self._post, self._clock = host, disk, post, clock
        self._speeds, self._links = speeds, links or {}
        self._timer = timer
        # A disk that hangs keeps its readers only.
        self._loaders = _threads("quartet-load", lower.host_plan)
        self._readers = _threads("quartet-read", lower.host_plan)
        self._writers = _threads("quartet-write", lower.disk_plan or lower.host_plan)
        self._loads: dict[int, RunningLoad] = {}
        self._num_stuck = 0  # batches that were given up and have not ended
        self._savings: list[_SavedBatch] = []
        self._num_writing = 0
        self._writes_again_at = self._reads_again_at = 0.0
        self._step_time: Callable[[], StepTime | None] = lambda: None
        self._max_step_tokens = 1

    def forecast_by(self, step_time: Callable[[], StepTime | None], max_step_tokens: int) -> None:
        """How long steps take, of so many tokens at most; ``step_time`` gives ``None`` until that is known."""
        self._step_time, self._max_step_tokens = step_time, max_step_tokens

    @property
    def s_per_block(self) -> Mapping[Tier, float]:
        """Seconds a block by which loads are decided, of each tier."""
        return {tier: speed.s_per_block for tier, speed in self._speeds.items()}

    @property
    def counts(self) -> tuple[TierCounts, ...]:
        """The tiers now, for statistics."""
        tables = (self.lower.host,) if self._disk is None else (self.lower.host, self.lower.disk)
        return tuple(
            TierCounts(table.tier, table.counts, self._host.block_size_bytes, **vars(table.totals)) for table in tables
        )

    def choose(self, seq: TokenSequence) -> None:
        """Leave of ``seq.blocks_below`` those that are loaded sooner than computed, and let the others go.

        ``seq`` has its blocks of the pool. Until the steps' times are known, all are loaded. Of a disk that hangs,
        nothing is.
        """
        if self._num_stuck or self._clock() < self._reads_again_at:
            self._keep(seq, _num_leading([block.tier is Tier.HOST for block in seq.blocks_below]))
        found, step_time = seq.blocks_below, self._step_time()
        if step_time is None:
            return
        forecast = Forecast(
            step_time=step_time,
            max_step_tokens=self._max_step_tokens,
            s_per_block=self.s_per_block,
            loading_s=sum(load.expected_s for load in self._loads.values()),
        )
        num_loaded = forecast.num_loaded(found, len(seq) - seq.num_computed_tokens, seq.block_size)
        for tier in {block.tier for block in found[num_loaded:]}:
            self._speeds[tier].doubt()
        self._keep(seq, num_loaded)

    def begin_step(self, schedule: Schedule) -> None:
        """Save what the step and its transfers overwrite, and begin its loads; before anything of it begins."""
        batches = deque(batch for load in schedule.loads for batch in self._begin_load(load))
        if self.lower.pending:
            self._forget_saved()
            for _ in self._save(schedule):  # the first loads run while the last copies are begun
                while batches and self._is_free(batches[0]):
                    self._submit(batches.popleft())
        for batch in batches:
            self._submit(batch)
        if schedule.pulls and self._num_saving():
            self._delay_pulls(schedule)
        if self._disk is not None:
            self._write()

    def take(self, message: TierMessage) -> EndedLoad | None:
        """Take a message in that was posted; returns a load that has ended with it."""
        match message:
            case LoadBatchEnded():
                return self._end_batch(message)
            case LoadIsLate(load):
                return self._give_up(load)
            case WriteEnded(write, is_good):
                self._num_writing -= 1
                self.lower.end_write(write, is_good)
                if not all(is_good):
                    self._writes_again_at = self._clock() + _PAUSE_S
        return None

    def close(self) -> None:
        """End the threads, and give files and memory back, but for what a read that hangs may write to.

        The pool is still there.
        """
        for load in self._loads.values():
            load.stop_timer()
        self._loaders.shutdown(cancel_futures=True)
        for threads in (self._readers, self._writers):
            threads.shutdown(wait=not self._num_stuck, cancel_futures=True)
        _wait_for(self._savings)
        if self._num_stuck:
            return
        if self._disk is not None:
            self._disk.close()
        self._host.close()

    def _keep(self, seq: TokenSequence, num_blocks: int) -> None:
        """Let go of what ``seq`` found after the first ``num_blocks``."""
        self.lower.release(seq.blocks_below[num_blocks:])
        seq.blocks_below = seq.blocks_below[:num_blocks]

    def _save(self, schedule: Schedule) -> Iterator[None]:
        """Begin to copy a batch each time."""
        for batch in save_batches(self.lower, schedule, self._num_saving):
            block_ids, slots = [block.source or 0 for block in batch], [block.slot for block in batch]
            saving = self._host.save(block_ids, slots)
            self._savings.append(_SavedBatch(saving, frozenset(block_ids), frozenset(slots)))
            self.lower.saved(batch)
            yield

    def _delay_pulls(self, schedule: Schedule) -> None:
        """Others write to the blocks of pulls, which may still be being saved, and wait for no stream of ours."""
        pulls, schedule.pulls = schedule.pulls, []
        savings = tuple(self._savings)

        def wait() -> None:
            try:
                _wait_for(savings)
            except Exception:  # the job ends here: pulls go on, as nothing reads what they overwrite any more
                logger.exception("blocks could not be copied to the host")
            self._post(PullsReady(pulls))

        self._loaders.submit(wait)

    def _num_saving(self) -> int:
        self._forget_saved()
        return len(self._savings)

    def _forget_saved(self) -> None:
        self._savings = [batch for batch in self._savings if not batch.saving.is_done]

    def _begin_load(self, load: Load) -> list[LoadBatch]:
        blocks = self.lower.begin_load(load.blocks)
        size = self.lower.host_plan.max_batch_size
        tiers = (Tier.HOST if block.disk is None else Tier.DISK for block in blocks)
        expected_s = sum(load_s_per_block(self.s_per_block, tier) for tier in tiers)
        running = self._loads[load.id] = RunningLoad(load.id, self._clock(), expected_s, [False] * len(blocks))
        for begin in range(0, max(1, len(blocks)), size):
            ids = load.block_ids[begin : begin + size]
            running.batches.append(LoadBatch(running, begin, blocks[begin : begin + size], ids))
        if any(block.disk is not None for block in blocks):
            patience_s = _PATIENCE_S + _PATIENCE * sum(load.expected_s for load in self._loads.values())
            running.stop_timer = self._timer(patience_s, lambda: self._post(LoadIsLate(running)))
        return list(running.batches)

    def _is_free(self, batch: LoadBatch) -> bool:
        """Whether copies were begun of all that it overwrites, and to all slots that it reads."""
        is_saved = self.lower.pending.keys().isdisjoint(batch.block_ids)
        return is_saved and all(block.host.source is None for block in batch.blocks)

    def _submit(self, batch: LoadBatch) -> None:
        # Other copies are not waited for: the link moves what is saved beside what is loaded.
        savings = [saved for saved in self._savings if saved.meets(batch)]
        threads = self._readers if batch.num_read else self._loaders
        threads.submit(self._run_load, batch, savings)

    def _run_load(self, batch: LoadBatch, savings: Sequence[_SavedBatch]) -> None:
        """On a thread of its own: from disk to the host, and from there to the pool."""
        has_arrived = [block.disk is None for block in batch.blocks]
        is_loaded, began_at, read_at = False, 0.0, 0.0
        try:
            _wait_for(savings)
            began_at = time.monotonic()
            for index, block in enumerate(batch.blocks):
                if block.disk is not None and self._disk is not None:
                    has_arrived[index] = self._disk.read(block.disk.name, self._host.slot(block.host.slot))
            self._wait_link(Tier.DISK, batch.num_read)
            read_at = time.monotonic()
            if batch.begin_writing():
                num_loaded = _num_leading(has_arrived)
                slots = [block.host.slot for block in batch.blocks[:num_loaded]]
                self._host.load(slots, batch.block_ids[:num_loaded])
                self._wait_link(Tier.HOST, num_loaded)
                is_loaded = True
        except Exception:  # the job ends here: what it did not bring is computed
            logger.exception("blocks could not be loaded from a lower tier")
        self._post(LoadBatchEnded(batch, has_arrived, is_loaded, began_at, read_at, time.monotonic()))

    def _wait_link(self, tier: Tier, num_blocks: int) -> None:
        if tier in self._links and num_blocks:
            self._links[tier].wait(num_blocks)

    def _end_batch(self, ended: LoadBatchEnded) -> EndedLoad | None:
        batch, load = ended.batch, ended.batch.load
        if batch.is_given_up:
            self.lower.end_load(batch.blocks, ended.has_arrived)
            self._num_stuck -= 1
            self._reads_again_at = self._clock() + _PAUSE_S
            return None
        if ended.is_loaded:
            end = batch.first + len(batch.blocks)
            load.is_loaded[batch.first : end] = ended.has_arrived
        load.batches.remove(batch)
        load.ended.append(ended)
        return self._end(load)

    def _give_up(self, load: RunningLoad) -> EndedLoad | None:
        """Have the request compute what has not come by now. What writes to its blocks is waited for."""
        if self._loads.get(load.id) is not load:
            return None
        stuck = [batch for batch in load.batches if batch.give_up()]
        if stuck:
            logger.error("blocks on disk can't be read in time: prompts are computed, and the disk is left alone")
        for batch in stuck:
            load.batches.remove(batch)
            self.lower.give_up(batch.blocks)
            self._num_stuck += 1
        return self._end(load)

    def _end(self, load: RunningLoad) -> EndedLoad | None:
        if load.batches:
            return None
        load.stop_timer()
        del self._loads[load.id]
        # All at once: the first of a sequence is the most recently used one.
        ended = sorted(load.ended, key=lambda item: item.batch.first)
        self._observe(ended)
        blocks = [block for item in ended for block in item.batch.blocks]
        self.lower.end_load(blocks, [has for item in ended for has in item.has_arrived])
        return EndedLoad(load.id, _num_leading(load.is_loaded), self._clock() - load.began_at)

    def _observe(self, ended: Sequence[LoadBatchEnded]) -> None:
        """Learn from a load. Its batches share the links, so what one takes says little."""
        if not ended or not all(batch.is_loaded for batch in ended):
            return
        began_at = min(batch.began_at for batch in ended)
        read = [item for item in ended if item.batch.num_read]
        num_read, num_blocks = sum(item.batch.num_read for item in read), sum(len(item.batch.blocks) for item in ended)
        if num_read:
            self._speeds[Tier.DISK].observe(num_read, max(item.read_at for item in read) - began_at)
        elif num_blocks:
            self._speeds[Tier.HOST].observe(num_blocks, max(item.ended_at for item in ended) - began_at)

    def _write(self) -> None:
        plan = self.lower.disk_plan
        assert plan is not None, "there is a disk"
        while self._num_writing < plan.num_threads and self._clock() >= self._writes_again_at and not self._num_stuck:
            write = self.lower.writes()
            if write is None:
                return
            self._num_writing += 1
            self._forget_saved()
            self._writers.submit(self._run_write, write, tuple(self._savings))

    def _run_write(self, write: DiskWrite, savings: Sequence[_SavedBatch]) -> None:
        """On a thread of its own."""
        is_good = [False] * len(write.blocks)
        try:
            assert self._disk is not None, "there is a disk"
            _wait_for(savings)
            self._disk.delete(write.removed)
            for index, block in enumerate(write.blocks):
                self._disk.write(block.name, self._host.slot(block.slot))
                is_good[index] = True
        except Exception:  # the job ends here: what it did not write is on the host only
            logger.exception("blocks could not be written to disk")
        self._post(WriteEnded(write, is_good))


@dataclass(frozen=True)
class _SavedBatch:
    """A copy of blocks of the pool to slots that was begun."""

    saving: Saving
    block_ids: frozenset[int]
    slots: frozenset[int]

    def meets(self, batch: LoadBatch) -> bool:
        """Whether the load writes what this reads, or reads or writes what this writes."""
        slots = (block.host.slot for block in batch.blocks)
        return not (self.block_ids.isdisjoint(batch.block_ids) and self.slots.isdisjoint(slots))


def _wait_for(batches: Sequence[_SavedBatch]) -> None:
    for batch in batches:
        batch.saving.wait()


def open_tiers(
    host_plan: TierPlan,
    disk_plan: TierPlan | None,
    host: HostBlocks,
    disk: DiskBlocks | None,
    post: Callable[[TierMessage], None],
    *,
    links: Mapping[Tier, Link] | None = None,
    timer: Callable[[float, Callable[[], None]], Callable[[], None]] = start_timer,
) -> Tiering:
    """The tiers below a pool whose blocks hold nothing yet: finds what is on disk, and measures how fast blocks come.

    Raises:
        ConfigError: the disk can't be written.
    """
    lower = LowerTiers(host_plan, disk_plan)
    if disk is not None:
        names = disk.scan()
        disk.delete(lower.restore(names))
        disk.trim_others(lower.disk.num_blocks * host.block_size_bytes)
        logger.info("%d blocks are on disk in %s", len(lower.disk), disk.folder)
    links = links or {}
    seconds = {Tier.HOST: _probe_host(host, host_plan)}
    seconds[Tier.DISK] = 0.0 if disk is None else disk.probe(host.slot(0))
    speeds = {
        tier: Speed(max(s_per_block, links[tier].s_per_block if tier in links else 0.0))
        for tier, s_per_block in seconds.items()
    }
    return Tiering(lower, host, disk, post, speeds=speeds, links=links, timer=timer)


def _probe_host(host: HostBlocks, plan: TierPlan) -> float:
    """Seconds to load a block."""
    num_blocks = min(plan.num_blocks, plan.max_batch_size, host.num_blocks)
    block_ids = list(range(num_blocks))
    host.save(block_ids, block_ids).wait()
    began = time.monotonic()
    host.load(block_ids, block_ids)
    return (time.monotonic() - began) / num_blocks


def _num_leading(items: Sequence[bool]) -> int:
    """How many are true, up to the first that is not."""
    return next((index for index, item in enumerate(items) if not item), len(items))


def _threads(name: str, plan: TierPlan) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(plan.num_threads, name)
