"""Rules of the consolidated feed."""

from __future__ import annotations

from quartet.events.vllm import AllBlocksCleared, BlockRemoved, BlockStored, VllmBatch, VllmEvent
from quartet.kvcache.consolidate import ChangedRank, Consolidator, LeftOut

GPU, HOST = "GPU", "CPU_TIER1"


def stored(*hashes: int, parent: int | None = None, tokens: list[int], medium: str | None = GPU) -> BlockStored:
    """Blocks of one token each."""
    return BlockStored(
        block_hashes=list(hashes), parent_hash=parent, token_ids=tokens, block_size=1, medium=medium, group_idx=0
    )


class Scene:
    """A consolidator, and what it last gave out for rank 0."""

    def __init__(self, max_blocks: int = 100, max_ranks: int = 2) -> None:
        self.consolidator = Consolidator(max_blocks, max_ranks)

    def apply(self, source: str, *events: VllmEvent) -> list[VllmEvent]:
        return self.events(self.consolidator.apply(source, VllmBatch(time_s=0.0, events=events)))

    def events(self, changed: list[ChangedRank]) -> list[VllmEvent]:
        return [event for rank in changed for event in rank.events]

    def left_out(self, source: str, reason: LeftOut) -> int:
        return self.consolidator.left_out[source, reason]


def test_a_block_goes_out_for_the_first_source_and_ends_with_the_last() -> None:
    scene = Scene()
    assert scene.apply("engine", stored(1, tokens=[5])) == [
        BlockStored(block_hashes=[1], parent_hash=None, token_ids=[5], block_size=1, medium=GPU, group_idx=0)
    ]
    assert scene.apply("kvbm", stored(91, tokens=[5], medium=HOST)) == []
    assert scene.apply("engine", BlockRemoved(block_hashes=[1], medium=GPU)) == []
    # Under the hash and medium with which it went out.
    assert scene.apply("kvbm", BlockRemoved(block_hashes=[91], medium=HOST)) == [
        BlockRemoved(block_hashes=[1], medium=GPU)
    ]


def test_a_sequence_of_two_sources_is_one_and_parents_bear_the_hash_that_went_out() -> None:
    scene = Scene()
    scene.apply("engine", stored(1, 2, tokens=[5, 6]))
    [event] = scene.apply("kvbm", stored(91, 92, 93, tokens=[5, 6, 7]))
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.parent_hash, event.token_ids) == ([93], 2, [7])


def test_equal_tokens_after_others_are_another_block() -> None:
    scene = Scene()
    scene.apply("engine", stored(1, tokens=[5]))
    assert scene.apply("kvbm", stored(91, 92, tokens=[4, 5]))


def test_blocks_on_two_media_of_one_source_end_with_the_last_medium() -> None:
    scene = Scene()
    scene.apply("engine", stored(1, tokens=[5]))
    # An offload without tokens: the hash is known.
    assert (
        scene.apply("engine", BlockStored(block_hashes=[1], parent_hash=None, token_ids=[], block_size=0, medium="CPU"))
        == []
    )
    assert scene.apply("engine", BlockRemoved(block_hashes=[1], medium=GPU)) == []
    assert scene.apply("engine", BlockRemoved(block_hashes=[1], medium=HOST)) == [
        BlockRemoved(block_hashes=[1], medium=GPU)
    ]


def test_a_removal_without_a_medium_is_from_all_of_its_source() -> None:
    scene = Scene()
    scene.apply("engine", stored(1, tokens=[5]), stored(1, tokens=[5], medium=HOST))
    assert scene.apply("engine", BlockRemoved(block_hashes=[1])) == [BlockRemoved(block_hashes=[1], medium=GPU)]


def test_storing_twice_is_storing_once() -> None:
    scene = Scene()
    scene.apply("engine", stored(1, tokens=[5]))
    assert scene.apply("engine", stored(1, tokens=[5])) == []
    assert scene.apply("engine", BlockRemoved(block_hashes=[1], medium=GPU)) != []


def test_unknown_removals_are_left_out_and_counted() -> None:
    scene = Scene()
    scene.apply("engine", stored(1, tokens=[5]))
    assert scene.apply("kvbm", BlockRemoved(block_hashes=[1, 2], medium=GPU)) == []
    assert scene.apply("engine", BlockRemoved(block_hashes=[1], medium=HOST)) == []
    assert scene.left_out("kvbm", LeftOut.UNKNOWN_REMOVED) == 2
    assert scene.left_out("engine", LeftOut.UNKNOWN_REMOVED) == 1


def test_blocks_after_an_unknown_one_are_left_out_and_counted() -> None:
    scene = Scene()
    assert scene.apply("engine", stored(2, 3, parent=1, tokens=[5, 6])) == []
    assert scene.left_out("engine", LeftOut.UNKNOWN_PARENT) == 2


def test_a_parent_may_be_named_by_the_public_scheme() -> None:
    scene = Scene()
    [first] = scene.apply("engine", stored(1, tokens=[5]))
    assert isinstance(first, BlockStored)
    name = next(iter(scene.consolidator._ranks[0]._blocks))
    # The other source has only the second block, and calls the first one by its name.
    [event] = scene.apply("kvbm", stored(92, parent=name, tokens=[6]))
    assert isinstance(event, BlockStored)
    assert event.parent_hash == 1


def test_blocks_without_tokens_that_nobody_named_are_left_out_and_counted() -> None:
    scene = Scene()
    untold = BlockStored(block_hashes=[4, 5], parent_hash=None, token_ids=[], block_size=0)
    assert scene.apply("engine", untold) == []
    assert scene.left_out("engine", LeftOut.NO_TOKENS) == 2


def test_a_source_that_clears_keeps_the_blocks_of_others() -> None:
    scene = Scene()
    scene.apply("engine", stored(1, 2, 3, tokens=[5, 6, 7]))
    scene.apply("kvbm", stored(91, tokens=[5]))
    # Leaves first.
    assert scene.apply("engine", AllBlocksCleared()) == [BlockRemoved(block_hashes=[3, 2], medium=GPU)]
    assert scene.apply("kvbm", AllBlocksCleared()) == [AllBlocksCleared()]
    assert scene.apply("kvbm", AllBlocksCleared()) == []


def test_a_source_that_is_dropped_has_no_block_on_any_rank() -> None:
    scene = Scene()
    for rank in (0, 1):
        batch = VllmBatch(time_s=0.0, events=[stored(1, tokens=[5])], data_parallel_rank=rank)
        [changed] = scene.consolidator.apply("engine", batch)
        assert changed.data_parallel_rank == rank
    assert scene.consolidator.num_blocks() == scene.consolidator.num_blocks("engine") == 2
    assert scene.consolidator.drop("engine") == [
        ChangedRank(0, [AllBlocksCleared()]),
        ChangedRank(1, [AllBlocksCleared()]),
    ]
    assert scene.consolidator.num_blocks() == 0


def test_one_hash_for_two_contents_goes_out_as_two() -> None:
    scene = Scene()
    scene.apply("engine", stored(1, tokens=[5]))
    [other] = scene.apply("kvbm", stored(1, tokens=[6]))
    assert isinstance(other, BlockStored)
    assert other.block_hashes != [1]
    assert scene.apply("kvbm", BlockRemoved(block_hashes=[1], medium=GPU)) == [
        BlockRemoved(block_hashes=other.block_hashes, medium=GPU)
    ]


def test_a_hash_that_gets_other_contents_lets_go_of_the_old_ones() -> None:
    scene = Scene()
    scene.apply("engine", stored(1, tokens=[5]))
    stored_again, removed = scene.apply("engine", stored(1, tokens=[6]))
    assert isinstance(stored_again, BlockStored)
    assert removed == BlockRemoved(block_hashes=[1], medium=GPU)


def test_blocks_beyond_the_bound_are_left_out_and_counted() -> None:
    scene = Scene(max_blocks=2)
    [event] = scene.apply("engine", stored(1, 2, 3, 4, tokens=[5, 6, 7, 8]))
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [1, 2]
    assert scene.left_out("engine", LeftOut.TOO_MANY) == 2


def test_one_content_under_ever_new_hashes_takes_no_more_room_than_blocks() -> None:
    scene = Scene(max_blocks=2)
    assert scene.apply("engine", stored(1, tokens=[5]))
    for block_hash in range(2, 7):
        assert scene.apply("engine", stored(block_hash, tokens=[5])) == []
    assert scene.consolidator.num_blocks("engine") == 2
    assert scene.left_out("engine", LeftOut.TOO_MANY) == 4
    # Also where the hash is known by another's name, and no tokens come with it.
    name = next(iter(scene.consolidator._ranks[0]._blocks))
    assert scene.apply("engine", BlockStored(block_hashes=[name], parent_hash=None, token_ids=[], block_size=0)) == []
    assert scene.left_out("engine", LeftOut.TOO_MANY) == 5
    # What it has can still be stored again, and what it gives up makes room.
    assert scene.apply("engine", stored(1, tokens=[6])) != []
    scene.apply("engine", BlockRemoved(block_hashes=[1], medium=GPU))
    assert scene.apply("engine", stored(9, tokens=[7])) != []


def test_a_source_without_room_takes_none_of_another() -> None:
    scene = Scene(max_blocks=2)
    scene.apply("hostile", stored(1, 2, 3, 4, tokens=[5, 6, 7, 8]))
    [event] = scene.apply("engine", stored(91, 92, parent=None, tokens=[1, 2]))
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [91, 92]
    assert scene.left_out("engine", LeftOut.TOO_MANY) == 0


def test_a_source_has_so_many_blocks_on_all_its_ranks_together_and_so_many_ranks() -> None:
    scene = Scene(max_blocks=3, max_ranks=2)
    for rank in range(1_000):
        event = stored(rank, tokens=[rank])
        scene.consolidator.apply("hostile", VllmBatch(time_s=0.0, events=[event], data_parallel_rank=rank))
    assert (scene.consolidator.num_blocks("hostile"), len(scene.consolidator._ranks)) == (2, 2)
    assert scene.left_out("hostile", LeftOut.TOO_MANY) == 998
    batch = VllmBatch(time_s=0.0, events=[stored(1, 2, tokens=[8, 9])], data_parallel_rank=5_000)
    [changed] = scene.consolidator.apply("engine", batch)
    assert changed.data_parallel_rank == 5_000
    # On a rank that it has, it may have what is left.
    assert scene.apply("hostile", stored(7, 8, tokens=[7, 8]))
    assert scene.consolidator.num_blocks("hostile") == 3
    # Ranks without blocks are forgotten, and others take their place.
    for rank in (0, 1):
        batch = VllmBatch(time_s=0.0, events=[AllBlocksCleared()], data_parallel_rank=rank)
        assert scene.consolidator.apply("hostile", batch)
    assert list(scene.consolidator._ranks) == [5_000]
    batch = VllmBatch(time_s=0.0, events=[stored(1, tokens=[1])], data_parallel_rank=900)
    assert scene.consolidator.apply("hostile", batch)
    assert scene.consolidator.drop("hostile") and scene.consolidator.drop("engine")
    assert scene.consolidator._ranks == {}


def test_a_block_lies_on_a_few_media_only() -> None:
    scene = Scene()
    for number in range(1_000):
        scene.apply("engine", stored(1, tokens=[5], medium=f"MEDIUM_{number}"))
    assert scene.left_out("engine", LeftOut.TOO_MANY) == 992
    for number in range(7):
        assert scene.apply("engine", BlockRemoved(block_hashes=[1], medium=f"MEDIUM_{number}")) == []
    assert scene.apply("engine", BlockRemoved(block_hashes=[1], medium="MEDIUM_7")) != []


def test_extra_keys_go_with_their_blocks() -> None:
    scene = Scene()
    event = BlockStored(
        block_hashes=[1, 2], parent_hash=None, token_ids=[5, 6], block_size=1, medium=GPU, extra_keys=[["salt"], None]
    )
    assert scene.apply("engine", event) == [event]


def test_only_what_goes_on_is_joined() -> None:
    scene = Scene()
    sequences = [stored(1, tokens=[5]), stored(2, 3, tokens=[6, 7]), stored(4, parent=3, tokens=[8], medium=HOST)]
    assert scene.apply("engine", *sequences) == sequences
    removed = [BlockRemoved(block_hashes=[4], medium=HOST), BlockRemoved(block_hashes=[3, 2], medium=GPU)]
    assert scene.apply("engine", *removed) == removed


def test_ignored_events_are_counted() -> None:
    scene = Scene()
    scene.consolidator.apply("engine", VllmBatch(time_s=0.0, events=[], num_ignored=3))
    assert scene.left_out("engine", LeftOut.IGNORED) == 3
