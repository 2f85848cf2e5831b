"""What is copied to the host before a step, what is lost, and which prompts a step of another one has room for."""

from __future__ import annotations

from itertools import accumulate

import pytest

from quartet.engine.scheduler import Load, Schedule, Scheduler, SchedulerConfig
from quartet.engine.tier_rules import Forecast, save_batches
from quartet.engine.validation import EngineLimits
from quartet.events.kv import Tier
from quartet.events.load import StepTime
from quartet.kvcache.block_hash import chain_digest
from quartet.kvcache.block_pool import BlockManager, EvictedBlock
from quartet.kvcache.sequence import Sequence
from quartet.kvcache.tiers import BlockName, LowerTiers, TierBlock, TierPlan
from tests.engine.fakes import make_request


def evict(plan: TierPlan, num_blocks: int) -> LowerTiers:
    """A sequence of so many blocks was evicted, the last one first; block ``n`` of it, from 1, lies in ``n`` still."""
    tiers = LowerTiers(plan)
    numbers = range(num_blocks, 0, -1)
    tiers.take([EvictedBlock(n, bytes([n]) * 32, bytes([n - 1]) * 32, n, n - 1 or None) for n in numbers])
    return tiers


def save(tiers: LowerTiers, *written: int, num_saving: int = 0) -> list[list[int]]:
    """The batches that are copied before a step whose load writes there."""
    batches: list[list[TierBlock]] = []
    for batch in save_batches(tiers, Schedule(loads=[Load(7, [], written)]), lambda: num_saving + len(batches)):
        tiers.saved(batch)
        batches.append(batch)
    return [[block.name.sequence_hash for block in batch] for batch in batches]


def here(tiers: LowerTiers) -> set[int]:
    return {block.name.sequence_hash for block in tiers.host}


@pytest.mark.parametrize("num_saving", [0, 4, 100])
def test_all_that_a_step_overwrites_is_copied_however_much_is_on_its_way(num_saving: int) -> None:
    tiers = evict(TierPlan(num_blocks=200), 150)
    batches = save(tiers, *range(150, 0, -1), num_saving=num_saving)
    assert [len(batch) for batch in batches] == [16] * 9 + [6]
    assert (len(here(tiers)), tiers.host.totals.num_dropped) == (150, 0)


@pytest.mark.parametrize("written", [(6, 5, 4, 3, 2, 1), (1, 2, 3, 4, 5, 6), (3, 6, 1, 2, 5, 4)])
def test_where_batches_are_bounded_the_first_of_a_sequence_are_copied(written: tuple[int, ...]) -> None:
    tiers = evict(TierPlan(num_blocks=20, max_concurrent_transfers=3, max_batch_size=2), 6)
    batches = save(tiers, *written, num_saving=1)
    assert [number for batch in batches for number in batch] == [number for number in written if number <= 4]
    assert here(tiers) == {1, 2, 3, 4}
    assert tiers.host.totals.num_dropped == 2


def test_what_a_load_reads_is_copied_whatever_the_bound_says() -> None:
    tiers = evict(TierPlan(num_blocks=20, max_concurrent_transfers=1, max_batch_size=2), 5)
    needed = [block for block in tiers.host if block.name.sequence_hash in (3, 4)]
    for block in needed:
        block.num_readers = 1
    schedule = Schedule(loads=[Load(7, needed, [1, 2, 3])])
    copied = [block for batch in save_batches(tiers, schedule, lambda: 1) for block in batch]
    assert {block.name.sequence_hash for block in copied} == {3, 4}
    assert here(tiers) == {3, 4, 5}, "the last one is not overwritten yet"


def test_a_batch_that_nobody_waits_for_is_copied_where_little_is_on_its_way() -> None:
    for num_saving, expected in ((0, [[6, 5]]), (4, [])):
        assert save(evict(TierPlan(num_blocks=20, max_batch_size=2), 6), num_saving=num_saving) == expected
    assert save(evict(TierPlan(num_blocks=20, max_batch_size=4), 6), 1, num_saving=9) == [[1, 6, 5, 4]]


@pytest.mark.parametrize(
    ("compute_s", "loading_s", "num_loaded"),
    [(0.1, 0.0, 2), (0.1, 0.09, 2), (0.1, 0.15, 0), (0.0009, 0.0, 0), (0.0015, 0.0, 2)],
)
def test_what_waits_for_other_loads_or_is_computed_at_once_is_not_loaded(
    compute_s: float, loading_s: float, num_loaded: int
) -> None:
    """``compute_s``: of all but a last token."""
    forecast = Forecast(
        step_time=StepTime(prefill_base_s=0.0, prefill_s_per_token=compute_s / 8),
        max_step_tokens=16,
        s_per_block={Tier.HOST: 1e-5},
        loading_s=loading_s,
    )
    found = list(evict(TierPlan(num_blocks=20), 2).host)
    assert forecast.num_loaded(found, 9, 4) == num_loaded


@pytest.mark.parametrize("is_below", [False, True])
def test_a_prompt_that_is_loaded_goes_with_the_steps_of_a_long_one(is_below: bool) -> None:
    lower = LowerTiers(TierPlan(num_blocks=20), TierPlan(num_blocks=20))
    blocks = BlockManager(60, 4, lower=lower)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)
    limits = EngineLimits(max_model_len=200, num_pool_tokens=240, vocab_size=100)
    scheduler = Scheduler(config, blocks, limits, onboarding=Everything())
    request = make_request(range(41))
    if is_below:
        seq = Sequence(request.generation.prompt_token_ids, block_size=4)
        digests = list(accumulate(map(seq.block_content, range(10)), chain_digest, initial=seq.extra_key.digest))
        lower.restore([BlockName(digests[n + 1], digests[n], n, n - 1 if n else None) for n in range(10)])
    scheduler.add(make_request([50] * 100))
    scheduler.update(scheduler.schedule().chunks, [])
    scheduler.add(request)
    assert [len(load.blocks) for load in scheduler.schedule().loads] == ([10] if is_below else [])


class Everything:
    """Loads all that is found."""

    def choose(self, seq: Sequence) -> None:
        pass
