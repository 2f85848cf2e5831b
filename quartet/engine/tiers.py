"""Moves blocks between an engine's pool, host memory and disk, and decides whether a request loads or computes.

``Tiering`` lives on the engine's thread; copies to the pool, and all of the disk, are the work of a few threads of its
own, which post what became of it as messages to that one. ``quartet.kvcache.tiers`` knows which block lies where.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
# After a write that failed: the disk may be full.
_PAUSE_S = 10.0


@dataclass(frozen=True)
class LoadBatchEnded:
    """A batch of a load has ended; nothing of it writes to the pool any more.

    Attributes:
        first: its first block's place in the load.
        has_arrived: of each block, whether its slot of the host has it.
        is_loaded: whether the pool has those up to the first that has not arrived.
        seconds: that the batch took, by the tier that its blocks came from.
    """

    id: int
    first: int
    has_arrived: Sequence[bool]
    is_loaded: bool
    seconds: Mapping[Tier, float]


@dataclass(frozen=True)
class WriteEnded:
    """A batch was written to disk, as far as ``is_good`` says of each block."""

    write: DiskWrite
    is_good: Sequence[bool]


@dataclass(frozen=True)
class PullsReady:
    """Blocks that these pulls write to were saved."""

    pulls: Sequence[Pull]


TierMessage: TypeAlias = LoadBatchEnded | WriteEnded | PullsReady


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


@dataclass
class _Load:
    """A load under way; ``has_arrived`` and ``is_loaded`` are of each block, as far as known."""

    blocks: Sequence[LoadedBlock]
    began_at: float
    expected_s: float
    num_batches: int
    has_arrived: list[bool] = field(default_factory=list)
    is_loaded: list[bool] = field(default_factory=list)


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
        """
        self.lower = lower
        self._host, self._disk, self._post, self._clock = host, disk, post, clock
        self._speeds, self._links = speeds, links or {}
        self._loaders = _threads("quartet-load", lower.host_plan)
        self._writers = _threads("quartet-write", lower.disk_plan or lower.host_plan)
        self._loads: dict[int, _Load] = {}
        self._savings: list[_SavedBatch] = []
        self._num_writing = 0
        self._writes_again_at = 0.0
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

        ``seq`` has its blocks of the pool. Until the steps' times are known, all are loaded.
        """
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
        self.lower.release(found[num_loaded:])
        seq.blocks_below = found[:num_loaded]

    def begin_step(self, schedule: Schedule) -> None:
        """Save what the step and its transfers overwrite, and begin its loads; before anything of it begins."""
        if self.lower.pending:
            self._save(schedule)
        if schedule.pulls and self._num_saving():
            self._delay_pulls(schedule)
        for load in schedule.loads:
            self._begin_load(load)
        if self._disk is not None:
            self._write()

    def take(self, message: TierMessage) -> EndedLoad | None:
        """Take a message in that was posted; returns a load that has ended with it."""
        match message:
            case LoadBatchEnded():
                return self._end_batch(message)
            case WriteEnded(write, is_good):
                self._num_writing -= 1
                self.lower.end_write(write, is_good)
                if not all(is_good):
                    self._writes_again_at = self._clock() + _PAUSE_S
        return None

    def close(self) -> None:
        """End the threads, and give files and memory back. The pool is still there."""
        for threads in (self._loaders, self._writers):
            threads.shutdown(cancel_futures=True)
        _wait_for(self._savings)
        if self._disk is not None:
            self._disk.close()
        self._host.close()

    def _save(self, schedule: Schedule) -> None:
        for batch in save_batches(self.lower, schedule, self._num_saving):
            block_ids, slots = [block.source or 0 for block in batch], [block.slot for block in batch]
            saving = self._host.save(block_ids, slots)
            self._savings.append(_SavedBatch(saving, frozenset(block_ids), frozenset(slots)))
            self.lower.saved(batch)

    def _delay_pulls(self, schedule: Schedule) -> None:
        """Others write to the blocks of pulls, which may still be being saved, and wait for no stream of ours."""
        pulls, schedule.pulls = schedule.pulls, []
        savings = tuple(self._savings)

        def wait() -> None:
            _wait_for(savings)
            self._post(PullsReady(pulls))

        self._loaders.submit(wait)

    def _num_saving(self) -> int:
        self._savings = [batch for batch in self._savings if not batch.saving.is_done]
        return len(self._savings)

    def _begin_load(self, load: Load) -> None:
        blocks = self.lower.begin_load(load.blocks)
        size = self.lower.host_plan.max_batch_size
        tiers = (Tier.HOST if block.disk is None else Tier.DISK for block in blocks)
        expected_s = sum(load_s_per_block(self.s_per_block, tier) for tier in tiers)
        begins = range(0, max(1, len(blocks)), size)
        self._loads[load.id] = _Load(blocks, self._clock(), expected_s, len(begins))
        self._loads[load.id].has_arrived = [False] * len(blocks)
        self._loads[load.id].is_loaded = [False] * len(blocks)
        self._num_saving()
        for begin in begins:
            job = _LoadJob(load.id, begin, blocks[begin : begin + size], load.block_ids[begin : begin + size])
            # Others are not waited for: the link moves what is saved beside what is loaded.
            savings = [batch for batch in self._savings if batch.meets(job)]
            self._loaders.submit(self._run_load, job, savings)

    def _run_load(self, job: _LoadJob, savings: Sequence[_SavedBatch]) -> None:
        """On a thread of its own: from disk to the host, and from there to the pool."""
        has_arrived = [block.disk is None for block in job.blocks]
        is_loaded, seconds = False, {}
        try:
            _wait_for(savings)
            began = time.monotonic()
            for index, block in enumerate(job.blocks):
                if block.disk is not None and self._disk is not None:
                    has_arrived[index] = self._disk.read(block.disk.name, self._host.slot(block.host.slot))
            self._wait_link(Tier.DISK, len(job.blocks) - sum(block.disk is None for block in job.blocks))
            read_s = time.monotonic() - began
            num_loaded = _num_leading(has_arrived)
            slots = [block.host.slot for block in job.blocks[:num_loaded]]
            self._host.load(slots, job.block_ids[:num_loaded])
            self._wait_link(Tier.HOST, num_loaded)
            seconds = {Tier.DISK: read_s, Tier.HOST: time.monotonic() - began - read_s}
            is_loaded = True
        except Exception:  # the job ends here: what it did not bring is computed
            logger.exception("blocks could not be loaded from a lower tier")
        self._post(LoadBatchEnded(job.id, job.first, has_arrived, is_loaded, seconds))

    def _wait_link(self, tier: Tier, num_blocks: int) -> None:
        if tier in self._links and num_blocks:
            self._links[tier].wait(num_blocks)

    def _end_batch(self, ended: LoadBatchEnded) -> EndedLoad | None:
        load = self._loads[ended.id]
        end = ended.first + len(ended.has_arrived)
        load.has_arrived[ended.first : end] = ended.has_arrived
        load.is_loaded[ended.first : end] = [has and ended.is_loaded for has in ended.has_arrived]
        if ended.is_loaded:
            num_read = sum(block.disk is not None for block in load.blocks[ended.first : end])
            for tier, num_blocks in ((Tier.DISK, num_read), (Tier.HOST, _num_leading(ended.has_arrived))):
                if num_blocks:
                    self._speeds[tier].observe(num_blocks, ended.seconds[tier])
        load.num_batches -= 1
        if load.num_batches:
            return None
        del self._loads[ended.id]
        self.lower.end_load(load.blocks, load.has_arrived)
        return EndedLoad(ended.id, _num_leading(load.is_loaded), self._clock() - load.began_at)

    def _write(self) -> None:
        plan = self.lower.disk_plan
        assert plan is not None, "there is a disk"
        while self._num_writing < plan.num_threads and self._clock() >= self._writes_again_at:
            write = self.lower.writes()
            if write is None:
                return
            self._num_writing += 1
            self._num_saving()
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
class _LoadJob:
    id: int
    first: int
    blocks: Sequence[LoadedBlock]
    block_ids: Sequence[int]


@dataclass(frozen=True)
class _SavedBatch:
    """A copy of blocks of the pool to slots that was begun."""

    saving: Saving
    block_ids: frozenset[int]
    slots: frozenset[int]

    def meets(self, job: _LoadJob) -> bool:
        """Whether the load writes what this reads, or reads or writes what this writes."""
        slots = (block.host.slot for block in job.blocks)
        return not (self.block_ids.isdisjoint(job.block_ids) and self.slots.isdisjoint(slots))


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
) -> Tiering:
    """The tiers below a pool whose blocks hold nothing yet: finds what is on disk, and measures how fast blocks come.

    Raises:
        ConfigError: the disk can't be written.
    """
    lower = LowerTiers(host_plan, disk_plan)
    if disk is not None:
        names = disk.scan()
        disk.delete(lower.restore(names))
        logger.info("%d blocks are on disk in %s", len(lower.disk), disk.folder)
    links = links or {}
    seconds = {Tier.HOST: _probe_host(host, host_plan)}
    seconds[Tier.DISK] = 0.0 if disk is None else disk.probe(host.slot(0))
    speeds = {
        tier: Speed(max(s_per_block, links[tier].s_per_block if tier in links else 0.0))
        for tier, s_per_block in seconds.items()
    }
    return Tiering(lower, host, disk, post, speeds=speeds, links=links)


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
