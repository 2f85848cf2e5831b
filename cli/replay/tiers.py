"""The tiers below a simulated worker's pool: the engine's own tables, links instead of copies.

What goes where, what is lost and what a request loads are decided as ``quartet.engine.tiers`` does it, on the same
``LowerTiers``. A tier's link moves blocks in each direction at its speed, one batch after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf

from quartet.engine.scheduler import Load, Schedule
from quartet.engine.tiers import EndedLoad
from quartet.events.kv import Tier
from quartet.events.load import StepTime
from quartet.kvcache.sequence import Sequence as TokenSequence
from quartet.kvcache.tiers import DiskWrite, LoadedBlock, LowerTiers, TierBlock, TierPlan

# What a load takes beside its copies, as engines forecast it.
_LATENCY_S = 0.001


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
        self._host_s = block_size_bytes / (settings.host_gb_per_s * 1e9)
        self._disk_s = block_size_bytes / (settings.disk_gb_per_s * 1e9)
        self._ending: list[tuple[float, int, _LoadUnderWay | DiskWrite]] = []  # a heap: when each ends
        self._numbers = count()  # in the heap, equal times go by these
        self._loads: dict[int, _LoadUnderWay] = {}
        self._num_writing = 0
        self._saving_ends: list[float] = []  # of batches on their way to the host
        # When each link, in each direction, has moved all that it was given.
        self._is_loaded_at = self._is_saved_at = self._is_read_at = self._is_written_at = 0.0

    def choose(self, seq: TokenSequence) -> None:
        """Leave of ``seq.blocks_below`` those that are loaded sooner than computed, and let the others go."""
        found = seq.blocks_below
        num_loaded = self._num_loaded(found, len(seq) - seq.num_computed_tokens, seq.block_size)
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

    def _num_loaded(self, found: Sequence[TierBlock], num_missing_tokens: int, block_size: int) -> int:
        """How many of ``found`` to load: none, all, or those before one of another tier."""
        load_s = _LATENCY_S + sum(load.expected_s for load in self._loads.values())
        best, best_s = 0, self._computing_s(num_missing_tokens)
        for number, block in enumerate(found, 1):
            load_s += self._s_per_block(block.tier)
            if number < len(found) and found[number].tier is block.tier:
                continue
            total_s = load_s + self._computing_s(num_missing_tokens - number * block_size)
            if total_s < best_s:
                best, best_s = number, total_s
        return best

    def _computing_s(self, num_tokens: int) -> float:
        return self._step_time.prefill_in_steps_s(num_tokens, self._max_step_tokens, 0.0)

    def _s_per_block(self, tier: Tier) -> float:
        return self._host_s if tier is Tier.HOST else self._disk_s + self._host_s

    def _save(self, schedule: Schedule, now: float) -> None:
        plan = self.lower.host_plan
        urgent, others = self.lower.saves(_written(schedule), plan.max_batch_size)
        needed = [block for load in schedule.loads for block in load.blocks if block.source is not None]
        blocks = list({id(block): block for block in (*needed, *urgent, *others)}.values())
        self._saving_ends = [end for end in self._saving_ends if end > now]
        for begin in range(0, len(blocks), plan.max_batch_size):
            if begin >= len(needed) and len(self._saving_ends) >= plan.max_concurrent_transfers:
                break
            batch = blocks[begin : begin + plan.max_batch_size]
            self._is_saved_at = max(self._is_saved_at, now) + len(batch) * self._host_s
            self._saving_ends.append(self._is_saved_at)
            self.lower.saved(batch)
        self.lower.lose([block for block in urgent if block.source is not None])

    def _begin_load(self, load: Load, now: float) -> None:
        blocks = self.lower.begin_load(load.blocks)
        num_read = sum(block.disk is not None for block in blocks)
        # Its blocks may be on their way to the host still.
        starts_at = max(now, self._is_saved_at)
        self._is_loaded_at = max(self._is_loaded_at, starts_at) + len(blocks) * self._host_s
        ends_at = self._is_loaded_at
        if num_read:
            self._is_read_at = max(self._is_read_at, starts_at) + num_read * self._disk_s
            # The last batch that was read is copied to the device after that.
            num_last = min(num_read, self.lower.host_plan.max_batch_size)
            ends_at = max(ends_at, self._is_read_at + num_last * self._host_s)
        expected_s = sum(self._s_per_block(Tier.HOST if block.disk is None else Tier.DISK) for block in blocks)
        under_way = self._loads[load.id] = _LoadUnderWay(load.id, blocks, now, expected_s)
        self._add(ends_at + _LATENCY_S, under_way)

    def _write(self, now: float) -> None:
        plan = self.lower.disk_plan
        while plan is not None and self._num_writing < plan.max_concurrent_transfers:
            write = self.lower.writes()
            if write is None:
                return
            self._num_writing += 1
            # Its blocks may be on their way to the host still.
            starts_at = max(now, self._is_saved_at, self._is_written_at)
            self._is_written_at = starts_at + len(write.blocks) * self._disk_s
            self._add(self._is_written_at, write)

    def _add(self, ends_at: float, transfer: _LoadUnderWay | DiskWrite) -> None:
        heappush(self._ending, (ends_at, next(self._numbers), transfer))
        self.next_at = self._ending[0][0]


def _written(schedule: Schedule) -> Iterator[int]:
    """The pool's blocks that a step and its transfers write to."""
    for chunk in schedule.chunks:
        seq, end = chunk.running.seq, chunk.first_position + chunk.num_tokens
        yield from seq.block_table[chunk.first_position // seq.block_size : -(-end // seq.block_size)]
    for load in schedule.loads:
        yield from load.block_ids
    for pull in schedule.pulls:
        for copy in pull.copies:
            yield copy.block_id
