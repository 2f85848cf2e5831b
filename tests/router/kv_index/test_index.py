"""The prefix index says how much of a prompt each rank has, and forgets what it should."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest

from quartet.discovery.base import Rank
from quartet.events.kv import Tier
from router.kv_index import index as index_upkeep
from router.kv_index.index import LowerMatches, Match, PrefixIndex, PromptMatches, RankNumbers, keep_up
from router.policy.base import LowerTokens

A, B, C = Rank("a"), Rank("b"), Rank("c")
_TIMEOUT_S = 30.0
PROMPT = list(range(1000, 1256))


def test_every_rank_is_matched_with_its_number_of_blocks_most_first() -> None:
    index = PrefixIndex()
    for rank, num_blocks in [(A, 3), (B, 200), (C, 100)]:
        index.store(rank, None, PROMPT[:num_blocks])
    index.store(A, None, [7, 8, 9])
    matches = index.match(PROMPT)
    assert [(rank, match.num_device_blocks) for rank, match in matches.items()] == [(B, 200), (C, 100), (A, 3)]
    assert len(matches) == 3
    assert list(index.match([7, 8, 10, 11])) == [A]


@pytest.mark.parametrize("prompt", [[], [1], [1, *PROMPT]])
def test_a_prompt_whose_first_block_no_rank_has_matches_no_rank(prompt: list[int]) -> None:
    index = PrefixIndex()
    index.store(A, None, PROMPT)
    matches = index.match(prompt)
    assert dict(matches) == {}
    assert A not in matches
    assert B not in matches


def test_any_depths_of_many_ranks_are_found() -> None:
    rng = random.Random(1)
    for _ in range(200):
        index = PrefixIndex()
        prompt = PROMPT[: rng.randint(1, 256)]
        depths = {Rank(f"w{number}"): rng.randint(0, len(prompt)) for number in range(rng.choice([1, 3, 100]))}
        for rank, depth in depths.items():
            index.store(rank, None, prompt[:depth])
        found = {rank: match.num_blocks for rank, match in index.match(prompt).items()}
        assert found == {rank: depth for rank, depth in depths.items() if depth}


def test_the_first_unknown_block_of_a_prompt_is_found_at_every_position() -> None:
    index = PrefixIndex()
    index.store(A, None, PROMPT)
    index.store(B, None, PROMPT[:20])
    for depth in range(1, 257):
        prompt = PROMPT[:depth] + [-1] * (256 - depth)
        matches = index.match(prompt)
        assert matches[A].num_blocks == depth
        assert matches[B].num_blocks == min(depth, 20)


def test_a_removed_block_is_gone_from_that_rank_and_tier_alone() -> None:
    index = PrefixIndex()
    for rank in (A, B):
        index.store(rank, None, PROMPT[:4])
    index.store(A, None, PROMPT[:4], Tier.HOST)
    index.remove(A, [PROMPT[3], PROMPT[2]])
    index.remove(A, [99])
    index.remove(C, PROMPT)
    matches = index.match(PROMPT)
    assert matches[A] == Match(num_device_blocks=2, num_host_blocks=2)
    assert matches[B] == Match(num_device_blocks=4)


def test_each_block_counts_for_the_tier_that_holds_it() -> None:
    index = PrefixIndex()
    index.store(A, None, PROMPT[:2], Tier.DEVICE)
    index.store(A, PROMPT[1], PROMPT[2:5], Tier.HOST)
    index.store(A, PROMPT[4], PROMPT[5:9], Tier.DISK)
    index.store(B, None, PROMPT[:3], Tier.DISK)
    matches = index.match(PROMPT)
    assert matches[A] == Match(num_device_blocks=2, num_host_blocks=3, num_disk_blocks=4)
    assert matches[A].num_blocks == 9
    assert matches[B] == Match(num_disk_blocks=3)


def test_a_prompt_is_looked_up_by_tier_when_it_is_first_read() -> None:
    index = PrefixIndex()
    matches = PromptMatches(index, PROMPT, 10)
    lower = LowerMatches(matches)
    index.store(A, None, PROMPT[:2])
    assert (dict(matches), dict(lower)) == ({A: 20}, {})
    index.store(A, PROMPT[1], PROMPT[2:5], Tier.HOST)
    index.store(B, None, PROMPT[:3], Tier.DISK)
    assert not lower, "known already"
    matches.renew()
    assert dict(lower) == {A: LowerTokens(30, 0), B: LowerTokens(0, 30)}
    assert dict(matches) == {A: 50, B: 30}
    assert (lower.get(A), lower.get(C)) == (LowerTokens(30, 0), None)
    index.predict(A, PROMPT[:5], 1.0)
    matches.renew()
    assert dict(lower) == {B: LowerTokens(0, 30)}, "a request that was sent there loads the others"
    assert matches.get(A) == 50


def test_storing_a_block_whose_parent_the_rank_lacks_is_reported_as_a_loss() -> None:
    index = PrefixIndex()
    assert index.store(A, None, PROMPT[:2])
    assert index.store(A, PROMPT[1], PROMPT[2:3], Tier.HOST)
    assert index.store(A, PROMPT[2], PROMPT[3:4])
    assert not index.store(B, PROMPT[0], PROMPT[1:2])
    assert dict(index.match(PROMPT[:1])) == {A: Match(num_device_blocks=1)}


def test_a_cleared_rank_is_forgotten_at_once_and_can_store_again_before_it_is_swept() -> None:
    index = PrefixIndex()
    for rank in (A, B):
        index.store(rank, None, PROMPT[:10])
    index.predict(A, PROMPT[:20], 5)
    index.clear(A)
    index.clear(C)
    assert list(index.match(PROMPT)) == [B]
    index.store(A, None, PROMPT[:3])
    assert index.match(PROMPT)[A] == Match(num_device_blocks=3)
    while index.sweep(1):
        pass
    assert index.match(PROMPT)[A] == Match(num_device_blocks=3)
    assert index.num_predicted_blocks == 0
    assert index.num_blocks(Tier.DEVICE) == 10


def test_a_sweep_visits_no_more_entries_than_its_limit() -> None:
    index = PrefixIndex()
    index.store(A, None, PROMPT)
    index.clear(A)
    assert index.sweep(100)
    assert index.num_blocks(Tier.DEVICE) == 156
    assert index.sweep(100)
    assert not index.sweep(100)
    assert index.num_blocks(Tier.DEVICE) == 0
    assert not index.sweep(100)
    with pytest.raises(ValueError, match="max_entries"):
        index.sweep(0)


def test_a_rank_cleared_during_a_sweep_is_swept_by_the_next() -> None:
    index = PrefixIndex()
    index.store(A, None, PROMPT)
    index.store(B, None, PROMPT)
    index.clear(A)
    assert index.sweep(10)
    index.clear(B)
    while index.sweep(10):
        pass
    assert index.num_blocks(Tier.DEVICE) == 0


def test_a_match_does_not_change_with_the_index() -> None:
    index = PrefixIndex()
    index.store(A, None, PROMPT[:5])
    matches = index.match(PROMPT)
    index.clear(A)
    while index.sweep(100):
        pass
    index.store(B, None, PROMPT)  # has the number that A had
    assert dict(matches) == {A: Match(num_device_blocks=5)}


def test_predicted_blocks_count_separately_from_the_first_missing_block_on() -> None:
    index = PrefixIndex()
    index.store(A, None, PROMPT[:3])
    index.store(A, PROMPT[2], PROMPT[3:6], Tier.HOST)
    index.predict(A, PROMPT[:100], 10)
    index.predict(B, PROMPT[:2], 10)
    matches = index.match(PROMPT)
    assert matches[A] == Match(num_device_blocks=3, num_predicted_blocks=97)
    assert matches[B] == Match(num_predicted_blocks=2)
    assert index.num_predicted_blocks == 99


def test_a_stored_block_is_predicted_no_more() -> None:
    index = PrefixIndex()
    index.predict(A, PROMPT[:10], 10)
    index.store(A, None, PROMPT[:4], Tier.HOST)
    assert index.match(PROMPT)[A] == Match(num_predicted_blocks=10)
    index.store(A, None, PROMPT[:4])
    assert index.match(PROMPT)[A] == Match(num_device_blocks=4, num_predicted_blocks=6)
    assert index.num_predicted_blocks == 6
    index.remove(A, PROMPT[:4])
    assert index.match(PROMPT)[A] == Match(num_host_blocks=10)


def test_a_prediction_ends_at_its_time_unless_a_later_one_has_the_block_too() -> None:
    index = PrefixIndex()
    index.predict(A, PROMPT[:10], 5)
    index.predict(A, PROMPT[:4], 9)
    index.predict(A, PROMPT[:6], 7)
    index.predict(B, PROMPT[:2], 6)
    counts = []
    for now in (4, 5, 7, 9):
        index.expire(now)
        counts.append({rank: match.num_predicted_blocks for rank, match in index.match(PROMPT).items()})
    assert counts == [{A: 10, B: 2}, {A: 6, B: 2}, {A: 4}, {}]
    assert index.num_predicted_blocks == 0


def test_predictions_are_bounded_and_the_first_to_expire_give_way() -> None:
    index = PrefixIndex(max_predicted_blocks=10)
    index.predict(A, PROMPT[:6], 9)
    index.predict(B, PROMPT[:4], 5)
    index.predict(C, PROMPT[:3], 7)
    assert {rank: match.num_blocks for rank, match in index.match(PROMPT).items()} == {A: 6, C: 3}
    index.predict(B, PROMPT, 1)
    assert {rank: match.num_blocks for rank, match in index.match(PROMPT).items()} == {B: 10}
    assert index.num_predicted_blocks == 10


@pytest.mark.parametrize(("old", "new"), [(3, 8), (8, 3)])
def test_predictions_for_an_old_epoch_do_not_end_those_for_the_next_one(old: int, new: int) -> None:
    index = PrefixIndex()
    index.predict(A, PROMPT[:5], old)
    index.clear(A)
    while index.sweep(100):
        pass
    index.predict(A, PROMPT[:5], new)
    index.expire(new - 1)
    assert index.match(PROMPT)[A] == Match(num_predicted_blocks=5)
    index.expire(new)
    assert dict(index.match(PROMPT)) == {}
    assert index.num_predicted_blocks == 0


def test_numbers_are_used_again_once_swept_so_masks_stay_short() -> None:
    numbers = RankNumbers()
    assert [numbers.number(rank) for rank in (A, B, C, A)] == [0, 1, 2, 0]
    assert numbers.retire(A) == 0
    assert numbers.retire(A) is None
    assert numbers.number(A) == 3
    numbers.retire(B)
    assert (numbers.dead, numbers.current.alive) == (0b0011, 0b1100)
    numbers.free(0b0011)
    assert numbers.dead == 0
    assert [numbers.number(Rank("d")), numbers.number(Rank("e")), numbers.number(Rank("f"))] == [0, 1, 4]


def test_restarts_without_end_take_no_more_numbers() -> None:
    index = PrefixIndex()
    sizes = []
    for _ in range(200):
        index.store(A, None, PROMPT[:1])
        sizes.append(index.match(PROMPT)._reaches[0][1].bit_length())
        index.clear(A)
        while index.sweep(10):
            pass
    assert max(sizes) == 1


def test_blocks_of_one_event_share_their_mask() -> None:
    index = PrefixIndex()
    for rank in (A, B, C):
        index.store(rank, None, PROMPT)
    index.remove(B, PROMPT[100:])
    masks = [index._device.mask_of(sequence_hash, 0) for sequence_hash in PROMPT]
    assert all(one is other for one, other in pairwise(masks[:100]))
    assert all(one is other for one, other in pairwise(masks[100:]))


async def test_predictions_end_and_gone_workers_are_swept_out_a_little_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_upkeep, "_SWEPT_AT_ONCE", 10)
    index = PrefixIndex()
    index.store(Rank("gone"), None, range(1, 101))
    index.store(Rank("here"), None, range(1000, 1010))
    index.predict(Rank("here"), [7, 8], 0.0)
    index.clear(Rank("gone"))
    assert (index.num_blocks(Tier.DEVICE), index.num_predicted_blocks) == (110, 2)
    task = asyncio.create_task(keep_up(index))
    async with asyncio.timeout(_TIMEOUT_S):
        while index.num_blocks(Tier.DEVICE) > 10:  # noqa: ASYNC110 - the index has no event to wait on
            await asyncio.sleep(0.001)
    assert index.num_predicted_blocks == 0
    task.cancel()
    await asyncio.wait([task])
