"""What engines, and replays of engines, decide about tiers: what a request loads, and what is saved before a step.

Pure: who moves the bytes, or counts how long that takes, is the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quartet.engine.scheduler import Schedule
from quartet.events.kv import Tier
from quartet.events.load import StepTime
from quartet.kvcache.tiers import LowerTiers, TierBlock

#: A load's way through another thread, and the turn of the engine's thread that it takes more.
LOAD_LATENCY_S = 0.001


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a request's choice goes by.

    Attributes:
        step_time: how long steps take, of ``max_step_tokens`` at most.
        s_per_block: seconds a block from each tier to the next faster one.
        loading_s: that loads under way should take.
    """

    step_time: StepTime
    max_step_tokens: int
    s_per_block: Mapping[Tier, float]
    loading_s: float

    def num_loaded(self, found: Sequence[TierBlock], num_missing_tokens: int, block_size: int) -> int:
        """How many of ``found`` are loaded sooner than computed: none, all, or those before one of another tier."""
        load_s = LOAD_LATENCY_S + self.loading_s
        best, best_s = 0, self._computing_s(num_missing_tokens)
        for number, block in enumerate(found, 1):
            load_s += load_s_per_block(self.s_per_block, block.tier)
            if number < len(found) and found[number].tier is block.tier:
                continue
            total_s = load_s + self._computing_s(num_missing_tokens - number * block_size)
            if total_s < best_s:
                best, best_s = number, total_s
        return best

    def _computing_s(self, num_tokens: int) -> float:
        return self.step_time.prefill_in_steps_s(num_tokens, self.max_step_tokens, 0.0)


def load_s_per_block(s_per_block: Mapping[Tier, float], tier: Tier) -> float:
    """Seconds for a block to come from there to the device; what is on disk comes by way of the host."""
    host_s = s_per_block[Tier.HOST]
    return host_s if tier is Tier.HOST else host_s + s_per_block[tier]


def save_batches(lower: LowerTiers, schedule: Schedule, num_saving: Callable[[], int]) -> Iterator[list[TierBlock]]:
    """Batches to copy to the host before ``schedule``'s step, in this order, each while the next one is not asked for.

    What its loads read, and what it overwrites; if that leaves room, another batch. Where the plan bounds batches on
    their way, of which there are ``num_saving``, and not all has room, the blocks that were evicted last are copied:
    they come before the others in their sequences. The others are lost.
    """
    size, most = lower.host_plan.max_batch_size, lower.host_plan.max_concurrent_transfers
    urgent, others = lower.saves(written_blocks(schedule), size)
    needed = [block for load in schedule.loads for block in load.blocks if block.source is not None]
    blocks = list({id(block): block for block in (*needed, *urgent)}.values())
    if most is not None:
        num_blocks = max(len(needed), size * max(0, most - num_saving()))
        kept = set(map(id, [*lower.evicted_last(blocks[len(needed) :], num_blocks - len(needed)), *needed]))
        blocks = [block for block in blocks if id(block) in kept]
        lower.lose([block for block in urgent if id(block) not in kept])
    chosen = set(map(id, blocks))
    others = [block for block in others if id(block) not in chosen]
    for begin in range(0, len(blocks), size):
        batch = blocks[begin : begin + size]
        room = size - len(batch)
        batch, others = batch + others[:room], others[room:]
        yield batch
    if others and num_saving() < lower.host_plan.num_threads:
        yield others


def written_blocks(schedule: Schedule) -> list[int]:
    """The pool's blocks that a step and its transfers write to."""
    written: list[int] = []
    for chunk in schedule.chunks:
        seq, end = chunk.running.seq, chunk.first_position + chunk.num_tokens
        written += seq.block_table[chunk.first_position // seq.block_size : -(-end // seq.block_size)]
    for load in schedule.loads:
        written += load.block_ids
    for pull in schedule.pulls:
        written += [copy.block_id for copy in pull.copies]
    return written
