"""Snapshots that come rank by rank, in any order, while blocks come and go, against what the ranks really hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.engine.base import StepOutput
from quartet.engine.data_parallel import DataParallelEngine, RankSnapshots
from quartet.errors import EngineError
from quartet.events.kv import Cleared, KvEvent, RankEvents, Removed, Stored, StoredBlocks, Tier
from tests.engine.fakes import WAIT_S, FakePuller
from tests.kvcache.replica import Replica

NUM_RANKS = 3


class Rank:
    """One rank; its next output answers a request for a snapshot."""

    def __init__(self) -> None:
        self.held = Replica()
        self.is_asked = False
        self.last_hash = 0

    def output(self, change: str) -> tuple[list[KvEvent], dict[int, int | None] | None]:
        """What its next step brings."""
        events = [] if change == "nothing" else [self._change(change)]
        self.held.apply(events)
        is_asked, self.is_asked = self.is_asked, False
        return events, dict(self.held.parents) if is_asked else None

    def _change(self, change: str) -> KvEvent:
        if change == "remove" and self.held.parents:
            leaf = next(iter(set(self.held.parents) - set(self.held.parents.values())))
            return Removed([leaf])
        if change == "clear":
            return Cleared()
        parent = next(reversed(self.held.parents), None)
        self.last_hash += 2
        return Stored(parent, [self.last_hash - 1, self.last_hash])


class BrokenRank:
    """Its outputs end with an error that nobody expects of them."""

    async def outputs(self) -> AsyncIterator[StepOutput]:
        raise KeyError("a rank that is not there")
        yield StepOutput()


async def test_outputs_that_cannot_be_read_end_the_engine_instead_of_leaving_it_silent() -> None:
    engine = DataParallelEngine(1, lambda _rank, _puller: BrokenRank(), FakePuller())  # type: ignore[arg-type]
    engine._readers = asyncio.create_task(engine._read_all())
    with pytest.raises(EngineError, match="a rank that is not there"):
        async with asyncio.timeout(WAIT_S):
            async for _ in engine.outputs():
                pass


changes = st.sampled_from(["nothing", "store", "store", "remove", "clear"])


@given(st.lists(st.tuples(st.integers(0, NUM_RANKS - 1), changes, st.booleans()), max_size=60))
def test_a_whole_snapshot_has_the_blocks_of_all_ranks_and_comes_once_all_have_answered(
    outputs: list[tuple[int, str, bool]],
) -> None:
    ranks, snapshots = [Rank() for _ in range(NUM_RANKS)], RankSnapshots(NUM_RANKS)
    unheard: set[int] = set()
    for number, change, asks in outputs:
        if asks:
            snapshots.want()
            unheard = unheard or set(range(NUM_RANKS))
            for rank in ranks:
                rank.is_asked = True
        events, parents = ranks[number].output(change)
        part = None if parents is None else [StoredBlocks(number, parents)]
        whole = snapshots.take([RankEvents(number, events)] if events else (), part)
        was_waited_for = bool(unheard)
        if parents is not None:
            unheard.discard(number)
        assert (whole is not None) == (was_waited_for and not unheard)
        for blocks in whole or ():
            assert blocks.parent_hashes == ranks[blocks.data_parallel_rank].held.parents
            places = {named: place for place, named in enumerate(blocks.parent_hashes)}
            assert all(
                parent is None or places[parent] < places[named] for named, parent in blocks.parent_hashes.items()
            )
        if whole is not None:
            assert [blocks.data_parallel_rank for blocks in whole] == list(range(NUM_RANKS))


def test_an_answer_without_a_waiter_is_no_part_of_the_next_snapshot() -> None:
    snapshots = RankSnapshots(2)
    snapshots.want()
    assert snapshots.take((), [StoredBlocks(0, {1: None})]) is None
    assert snapshots.take((), [StoredBlocks(1, {2: None})]) is not None
    assert snapshots.take((), [StoredBlocks(1, {2: None})]) is None
    snapshots.want()
    assert snapshots.take((), [StoredBlocks(0, {1: None})]) is None


def test_each_tier_of_a_rank_is_a_part_that_events_keep_up_to_date() -> None:
    snapshots = RankSnapshots(2)
    snapshots.want()
    first = [StoredBlocks(0, {1: None, 2: 1}), StoredBlocks(0, {5: None}, Tier.HOST)]
    assert snapshots.take((), first) is None
    events = [Stored(1, [2], Tier.HOST), Removed([2]), Stored(None, [5], Tier.DISK), Removed([5], Tier.HOST)]
    assert snapshots.take([RankEvents(0, events)], None) is None
    whole = snapshots.take((), [StoredBlocks(1, {7: None})])
    assert whole is not None
    assert [(blocks.data_parallel_rank, blocks.tier, dict(blocks.parent_hashes)) for blocks in whole] == [
        (0, Tier.DEVICE, {1: None}),
        (0, Tier.HOST, {2: 1}),
        (0, Tier.DISK, {5: None}),
        (1, Tier.DEVICE, {7: None}),
    ]
