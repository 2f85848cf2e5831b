"""Policies of tiers, and what is lost where there is no room."""

from __future__ import annotations

import pytest

from quartet.events.kv import Tier
from quartet.kvcache.block_hash import chain_digest
from quartet.kvcache.block_pool import EvictedBlock
from quartet.kvcache.tiers import BlockName, LowerTiers, OffloadPolicy, TierPlan


def evicted(number: int, block_id: int = 0, num_uses: int = 1) -> EvictedBlock:
    """Block ``number`` of a sequence, from 1."""
    parent = None if number == 1 else number - 1
    return EvictedBlock(block_id, bytes([number]) * 32, bytes([number - 1]) * 32, number, parent, num_uses)


def evict(tiers: LowerTiers, *blocks: EvictedBlock) -> list[int]:
    """The blocks whose content has to be copied."""
    tiers.take(blocks)
    urgent, _ = tiers.saves([block.block_id for block in blocks], 0)
    tiers.saved(urgent)
    return [block.name.sequence_hash for block in urgent]


def here(tiers: LowerTiers) -> set[int]:
    return {block.name.sequence_hash for block in tiers.host}


@pytest.mark.parametrize(
    ("policy", "copied"), [(OffloadPolicy.PASS_ALL, [[1], [1]]), (OffloadPolicy.PRESENCE, [[1], []])]
)
def test_a_block_that_is_there_is_copied_again_by_pass_all_only(policy: OffloadPolicy, copied: list[list[int]]) -> None:
    tiers = LowerTiers(TierPlan(num_blocks=4, policy=policy))
    assert [evict(tiers, evicted(1)), evict(tiers, evicted(1))] == copied


def test_a_copy_that_pass_all_makes_again_and_has_no_time_for_leaves_the_one_that_is_there() -> None:
    tiers = LowerTiers(TierPlan(num_blocks=4, policy=OffloadPolicy.PASS_ALL))
    evict(tiers, evicted(1))
    tiers.take([evicted(1), evicted(2, 1)])
    urgent, _ = tiers.saves([0, 1], 0)
    tiers.lose(urgent)
    assert here(tiers) == {1}
    assert (tiers.host.totals.num_dropped, tiers.pending) == (1, {})


def test_by_presence_lfu_a_block_goes_down_with_its_second_use() -> None:
    tiers = LowerTiers(TierPlan(num_blocks=4, policy=OffloadPolicy.PRESENCE_LFU))
    assert evict(tiers, evicted(1)) == []
    assert evict(tiers, evicted(2, num_uses=2)) == [2], "it was shared"
    assert evict(tiers, evicted(1)) == [1], "it was computed twice"
    often = LowerTiers(TierPlan(num_blocks=4, policy=OffloadPolicy.PRESENCE_LFU, min_lfu_count=3))
    assert [evict(often, evicted(1, num_uses=2)), evict(often, evicted(1, num_uses=2))] == [[], [1]]


@pytest.mark.parametrize(("policy", "num_written"), [(OffloadPolicy.PRESENCE, 1), (OffloadPolicy.PRESENCE_LFU, 0)])
def test_only_what_was_used_again_is_written_to_disk_by_default(policy: OffloadPolicy, num_written: int) -> None:
    tiers = LowerTiers(TierPlan(num_blocks=1), TierPlan(num_blocks=4, policy=policy))
    evict(tiers, evicted(1))
    write = tiers.writes()
    assert (0 if write is None else len(write.blocks)) == num_written


def test_of_more_than_there_is_room_for_the_first_of_a_sequence_stay() -> None:
    tiers = LowerTiers(TierPlan(num_blocks=2))
    evict(tiers, *(evicted(number, number) for number in (4, 3, 2, 1)))
    assert here(tiers) == {1, 2}
    assert tiers.host.totals.num_dropped == 2


def test_the_last_of_a_sequence_is_the_first_to_be_forgotten() -> None:
    tiers = LowerTiers(TierPlan(num_blocks=3))
    evict(tiers, *(evicted(number, number) for number in (3, 2, 1)))
    evict(tiers, evicted(9))
    assert here(tiers) == {1, 2, 9}
    evict(tiers, evicted(2), evicted(1))  # they were used meanwhile, and are here
    evict(tiers, evicted(8))
    assert here(tiers) == {1, 2, 8}


def test_a_block_that_is_written_to_disk_is_not_being_loaded() -> None:
    tiers = LowerTiers(TierPlan(num_blocks=2), TierPlan(num_blocks=4, policy=OffloadPolicy.PRESENCE))
    for number in (1, 2):
        evict(tiers, evicted(number))
    write = tiers.writes()
    assert write is not None
    name = write.blocks[0].name
    assert not tiers.is_loading(name.digest), "it can be shared from the host now"
    tiers.find(name.parent_digest, [])
    tiers.host.get(name.digest).num_readers += 1  # type: ignore[union-attr]
    assert tiers.is_loading(name.digest)


def test_nobody_waits_for_a_load_that_was_given_up_and_its_slot_stays() -> None:
    tiers = LowerTiers(TierPlan(num_blocks=1), TierPlan(num_blocks=4, policy=OffloadPolicy.PRESENCE))
    digest = chain_digest(bytes(32), b"first")
    tiers.restore([BlockName(digest, bytes(32), 1, None)])
    loaded = tiers.begin_load(tiers.find(bytes(32), [b"first"]))
    assert tiers.is_loading(digest)
    tiers.give_up(loaded)
    assert not tiers.is_loading(digest)
    assert tiers.find(bytes(32), [b"first"]) == []
    assert evict(tiers, evicted(9)) == [], "what hangs may write to the only slot"
    tiers.end_load(loaded, [True])
    [found] = tiers.find(bytes(32), [b"first"])
    assert (found.tier, tiers.is_loading(digest)) == (Tier.HOST, True)


def test_a_file_that_is_being_deleted_is_not_written_meanwhile() -> None:
    tiers = LowerTiers(TierPlan(num_blocks=3), TierPlan(num_blocks=2, policy=OffloadPolicy.PRESENCE, max_batch_size=1))
    tiers._num_clean = 3  # as of a host with twelve blocks
    evict(tiers, *(evicted(number, number) for number in (1, 2, 3)))
    for number in (1, 2):
        write = tiers.writes()
        assert write is not None
        assert [block.name.sequence_hash for block in write.blocks] == [number]
        tiers.end_write(write, [True])
    deleting = tiers.writes()
    assert deleting is not None
    assert (deleting.removed, deleting.blocks[0].name.sequence_hash) == ([bytes([1]) * 32], 3)
    assert tiers.writes() is None, "the first one is on the host, and its file about to go"
    tiers.end_write(deleting, [True])
    write = tiers.writes()
    assert write is not None
    assert write.blocks[0].name.sequence_hash == 1
