"""The tiers below a simulated worker's pool: the engine's own tables, links instead of copies.

What goes where, what is lost and what a request loads are decided by ``quartet.engine.tier_rules``, as at engines. A
tier's link moves blocks in each direction at its speed, one batch after the other.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf

from quartet.engine.scheduler import Load, Schedule
from quartet.engine.tier_rules import LOAD_LATENCY_S, Forecast, load_s_per_block, save_batches
from quartet.engine.tiers import EndedLoad
from quartet.events.kv import Tier
from quartet.events.load import StepTime
from quartet.kvcache.sequence import Sequence as TokenSequence
from quartet.kvcache.tiers import DiskWrite, LoadedBlock, LowerTiers, TierPlan


@dataclass(frozen=True, kw_only=True)
class TierSettings:
    """The tiers below every pool of a fleet.

    Attributes:
        host_gb_per_s: between pinned host memory and the device; the default was measured on an H200.
        disk_gb_per_s: between disk and host memory.
    """

    host: TierPlan
    disk: TierPlan | None = None
    host_gb_per_s: float = 52.0
    disk_gb_per_s: float = 5.0


@dataclass(frozen=True)
class _LoadUnderWay:
    id: int
    blocks: Sequence[LoadedBlock]
    began_at: float
    expected_s: float


@dataclass(frozen=True)
class _Saving:
    ends_at: float
    block_ids: frozenset[int]
    slots: frozenset[int]

    def meets(self, block_ids: Sequence[int], slots: Set[int]) -> bool:
        """Whether a load of these waits for it."""
        return not (self.block_ids.isdisjoint(block_ids) and self.slots.isdisjoint(slots))


class SimulatedTiers:
    """Moves blocks between one worker's pool, host memory and disk. All times are seconds of the replay.

    Attributes:
        lower: which block lies where; the block pool gives it what it evicts.
        next_at: when the next load or write ends; ``inf``: there is none.
    """

    def __init__(
        self, settings: TierSettings, block_size_bytes: int, step_time: StepTime, max_step_tokens: int
    ) -> None:
        """All tiers are empty. Steps take ``step_time`` for ``max_step_tokens`` at most."""
        self.lower = LowerTiers(settings.host, settings.disk)
        self.next_at = inf
        self._step_time, self._max_step_tokens = step_time, max_step_tokens
        gb_per_s = {Tier.HOST: settings.host_gb_per_s, Tier.DISK: settings.disk_gb_per_s}
        self._s_per_block = {tier: block_size_bytes / (speed * 1e9) for tier, speed in gb_per_s.items()}
        self._ending: list[tuple[float, int, _LoadUnderWay | DiskWrite]] = []  # a heap: when each ends
        self._numbers = count()  # in the heap, equal times go by these
        self._loads: dict[int, _LoadUnderWay] = {}
        self._num_writing = 0
        # Of batches on their way to the host: when each ends, and the pool's blocks and the slots that it copies.
        self._savings: list[_Saving] = []
        # When each link, in each direction, has moved all that it was given.
        self._is_loaded_at = self._is_saved_at = self._is_read_at = self._is_written_at = 0.0

    def choose(self, seq: TokenSequence) -> None:
        """Leave of ``seq.blocks_below`` those that are loaded sooner than computed, and let the others go."""
        found = seq.blocks_below
        forecast = Forecast(
            step_time=self._step_time,
            max_step_tokens=self._max_step_tokens,
            s_per_block=self._s_per_block,
            loading_s=sum(load.expected_s for load in self._loads.values()),
        )
        num_loaded = forecast.num_loaded(found, len(seq) - seq.num_computed_tokens, seq.block_size)
        self.lower.release(found[num_loaded:])
        seq.blocks_below = found[:num_loaded]

    def begin_step(self, schedule: Schedule, now: float) -> None:
        """Save what the step and its transfers overwrite, and begin its loads."""
        if self.lower.pending:
            self._save(schedule, now)
        for load in schedule.loads:
            self._begin_load(load, now)
        self._write(now)

    def end(self, now: float) -> list[EndedLoad]:
        """End all that ends by ``now``; returns the loads among it."""
        ended: list[EndedLoad] = []
        while self._ending and self._ending[0][0] <= now:
            _, _, transfer = heappop(self._ending)
            if isinstance(transfer, DiskWrite):
                self._num_writing -= 1
                self.lower.end_write(transfer, [True] * len(transfer.blocks))
                continue
            del self._loads[transfer.id]
            self.lower.end_load(transfer.blocks, [True] * len(transfer.blocks))
            ended.append(EndedLoad(transfer.id, len(transfer.blocks), now - transfer.began_at))
        self._write(now)
        self.next_at = self._ending[0][0] if self._ending else inf
        return ended

    def _save(self, schedule: Schedule, now: float) -> None:
        for batch in save_batches(self.lower, schedule, lambda: self._num_saving(now)):
            self._is_saved_at = max(self._is_saved_at, now) + len(batch) * self._s_per_block[Tier.HOST]
            block_ids = frozenset(block.source or 0 for block in batch)
            slots = frozenset(block.slot for block in batch)
            self._savings.append(_Saving(self._is_saved_at, block_ids, slots))
            self.lower.saved(batch)

    def _num_saving(self, now: float) -> int:
        self._savings = [saving for saving in self._savings if saving.ends_at > now]
        return len(self._savings)

    def _begin_load(self, load: Load, now: float) -> None:
        blocks = self.lower.begin_load(load.blocks)
        self._num_saving(now)
        size, ends_at = self.lower.host_plan.max_batch_size, now
        for begin in range(0, len(blocks), size):
            batch, block_ids = blocks[begin : begin + size], load.block_ids[begin : begin + size]
            slots = {block.host.slot for block in batch}
            # What it reads and overwrites may be on its way to the host still.
            met = (saving.ends_at for saving in self._savings if saving.meets(block_ids, slots))
            ends_at = self._load_batch(batch, max(met, default=now))
        tiers = (Tier.HOST if block.disk is None else Tier.DISK for block in blocks)
        expected_s = sum(load_s_per_block(self._s_per_block, tier) for tier in tiers)
        under_way = self._loads[load.id] = _LoadUnderWay(load.id, blocks, now, expected_s)
        self._add(ends_at + LOAD_LATENCY_S, under_way)

    def _load_batch(self, batch: Sequence[LoadedBlock], starts_at: float) -> float:
        """When the device has it, if it may begin at ``starts_at``."""
        num_read = sum(block.disk is not None for block in batch)
        if num_read:
            self._is_read_at = max(self._is_read_at, starts_at) + num_read * self._s_per_block[Tier.DISK]
            starts_at = self._is_read_at
        self._is_loaded_at = max(self._is_loaded_at, starts_at) + len(batch) * self._s_per_block[Tier.HOST]
        return self._is_loaded_at

    def _write(self, now: float) -> None:
        plan = self.lower.disk_plan
        while plan is not None and self._num_writing < plan.num_threads:
            write = self.lower.writes()
            if write is None:
                return
            self._num_writing += 1
            # Its blocks may be on their way to the host still.
            starts_at = max(now, self._is_saved_at, self._is_written_at)
            self._is_written_at = starts_at + len(write.blocks) * self._s_per_block[Tier.DISK]
            self._add(self._is_written_at, write)

    def _add(self, ends_at: float, transfer: _LoadUnderWay | DiskWrite) -> None:
        heappush(self._ending, (ends_at, next(self._numbers), transfer))
        self.next_at = self._ending[0][0]
