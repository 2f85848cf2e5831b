"""A model of the consolidated feed: whatever sources do, its reader has exactly what any of them has."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quartet.events.vllm import AllBlocksCleared, BlockRemoved, BlockStored, VllmBatch, decode_batch, encode_batch
from quartet.kvcache.consolidate import ChangedRank, Consolidator, LeftOut
from tests.events.vllm_reader import Index, read_maps

SOURCES = ("engine", "kvbm", "other")
RANKS = (0, 1)
MEDIA = ("GPU", "CPU_TIER1")
TOKENS = st.tuples(*[st.integers(0, 1)] * 2) | st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)


class ConsolidatedFeed(RuleBasedStateMachine):
    """Sources with caches of blocks of one token; a block is the tuple of all tokens up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.consolidator = Consolidator()
        # By source and rank: the media of each block.
        self.held: dict[tuple[str, int], dict[tuple[int, ...], set[str]]] = {
            (source, rank): {} for source in SOURCES for rank in RANKS
        }
        self.readers = {rank: Index() for rank in RANKS}
        self.num_unknown = 0

    def name(self, source: str, block: tuple[int, ...]) -> int:
        """The source's own hash of a block; each has another scheme."""
        return int("".join(map(str, (SOURCES.index(source) + 2, *block))))

    def apply(self, source: str, rank: int, *events: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        sent = VllmBatch(time_s=0.0, events=events, data_parallel_rank=rank)
        self.read(self.consolidator.apply(source, decode_batch(encode_batch(sent))))

    def read(self, changed: list[ChangedRank]) -> None:
        for rank in changed:
            batch = VllmBatch(time_s=0.0, events=rank.events, data_parallel_rank=rank.data_parallel_rank)
            self.readers[rank.data_parallel_rank].take(read_maps(encode_batch(batch)).events)

    @rule(source=st.sampled_from(SOURCES), rank=st.sampled_from(RANKS), tokens=TOKENS, medium=st.sampled_from(MEDIA))
    def store_all(self, source: str, rank: int, tokens: tuple[int, ...], medium: str) -> None:
        """A sequence, from its first block on."""
        self.store(source, rank, tokens, 0, medium)

    @rule(source=st.sampled_from(SOURCES), rank=st.sampled_from(RANKS), tokens=TOKENS, medium=st.sampled_from(MEDIA))
    def store_the_rest(self, source: str, rank: int, tokens: tuple[int, ...], medium: str) -> None:
        """A sequence, from the first block on that is not there."""
        held = self.held[source, rank]
        known = next((n for n in range(len(tokens)) if tokens[: n + 1] not in held), 0)
        self.store(source, rank, tokens, known, medium)

    def store(self, source: str, rank: int, tokens: tuple[int, ...], first: int, medium: str) -> None:
        blocks = [tokens[: index + 1] for index in range(first, len(tokens))]
        for block in blocks:
            self.held[source, rank].setdefault(block, set()).add(medium)
        parent = self.name(source, tokens[:first]) if first else None
        names = [self.name(source, block) for block in blocks]
        event = BlockStored(
            block_hashes=names, parent_hash=parent, token_ids=tokens[first:], block_size=1, medium=medium
        )
        self.apply(source, rank, event)

    @rule(source=st.sampled_from(SOURCES), rank=st.sampled_from(RANKS), tokens=TOKENS, medium=st.sampled_from(MEDIA))
    def remove(self, source: str, rank: int, tokens: tuple[int, ...], medium: str) -> None:
        """A block and all after it, if it is there: engines remove leaves first. Else it is an unknown removal."""
        held = self.held[source, rank]
        gone = sorted((b for b in held if b[: len(tokens)] == tokens and medium in held[b]), key=len, reverse=True)
        self.num_unknown += not gone
        for block in gone:
            held[block].discard(medium)
            if not held[block]:
                del held[block]
        names = [self.name(source, block) for block in gone or [tokens]]
        self.apply(source, rank, BlockRemoved(block_hashes=names, medium=medium))

    @rule(source=st.sampled_from(SOURCES), rank=st.sampled_from(RANKS))
    def clear(self, source: str, rank: int) -> None:
        self.held[source, rank].clear()
        self.apply(source, rank, AllBlocksCleared())

    @rule(source=st.sampled_from(SOURCES))
    def drop(self, source: str) -> None:
        for rank in RANKS:
            self.held[source, rank].clear()
        self.read(self.consolidator.drop(source))

    @invariant()
    def a_reader_has_what_any_source_has(self) -> None:
        for rank, reader in self.readers.items():
            union = {block for source in SOURCES for block in self.held[source, rank]}
            assert sorted(reader.blocks.values()) == sorted(union)

    @invariant()
    def the_counts_are_true(self) -> None:
        num_unknown = sum(self.consolidator.left_out[source, LeftOut.UNKNOWN_REMOVED] for source in SOURCES)
        assert num_unknown == self.num_unknown
        for source in SOURCES:
            assert self.consolidator.num_blocks(source) == sum(len(self.held[source, rank]) for rank in RANKS)


# Sources that may say anything, of blocks of one token each.

MAX_BLOCKS, MAX_RANKS = 3, 2
_SMALL = st.integers(0, 5)


def _stored(hashes: list[int], parent: int | None, medium: str | None, draw_tokens: list[int]) -> BlockStored:
    tokens = draw_tokens[: len(hashes)] if len(draw_tokens) >= len(hashes) else []
    return BlockStored(block_hashes=hashes, parent_hash=parent, token_ids=tokens, block_size=1, medium=medium)


HASHES, MEDIUM = st.lists(_SMALL, min_size=1, max_size=4), st.none() | st.sampled_from(MEDIA)
EVENTS = st.one_of(
    st.builds(_stored, HASHES, st.none() | _SMALL, MEDIUM, st.lists(_SMALL, max_size=4)),
    st.builds(lambda hashes, medium: BlockRemoved(block_hashes=hashes, medium=medium), HASHES, MEDIUM),
    st.just(AllBlocksCleared()),
)
SAID = st.lists(
    st.tuples(st.sampled_from(SOURCES), st.none() | _SMALL, st.lists(EVENTS, max_size=4) | st.none()), max_size=30
)


@given(SAID)
def test_whatever_sources_say_they_keep_to_their_bounds_and_a_strict_reader_follows(
    said: list[tuple[str, int | None, list[BlockStored | BlockRemoved | AllBlocksCleared] | None]],
) -> None:
    """``None`` in the place of events: the source is dropped."""
    consolidator, readers = Consolidator(MAX_BLOCKS, MAX_RANKS), defaultdict[int, Index](Index)

    def read(changed: list[ChangedRank]) -> None:
        for rank in changed:
            batch = VllmBatch(time_s=0.0, events=rank.events, data_parallel_rank=rank.data_parallel_rank)
            readers[rank.data_parallel_rank].take(read_maps(encode_batch(batch)).events)

    for source, rank, events in said:
        if events is None:
            read(consolidator.drop(source))
        else:
            read(consolidator.apply(source, VllmBatch(time_s=0.0, events=events, data_parallel_rank=rank)))
        assert all(consolidator.num_blocks(name) <= MAX_BLOCKS for name in SOURCES)
        assert len(consolidator._ranks) <= MAX_RANKS * len(SOURCES)
        assert consolidator.num_blocks() == sum(len(reader.blocks) for reader in readers.values())
    for source in SOURCES:
        read(consolidator.drop(source))
    assert not any(reader.blocks for reader in readers.values())
    assert consolidator._ranks == {}
    # All room is there again.
    for source in SOURCES:
        event = _stored([1, 2, 3], None, None, [1, 2, 3])
        consolidator.apply(source, VllmBatch(time_s=0.0, events=[event]))
        assert consolidator.num_blocks(source) == MAX_BLOCKS


TestConsolidatedFeed = ConsolidatedFeed.TestCase
TestConsolidatedFeed.settings = settings(stateful_step_count=30)
