"""The block pool against a naive model, in any order of calls.

The model writes down, for each slot of each physical block, all tokens up to the one whose KV is there: so wrong
sharing, a block in two places or a block handed out too early shows as wrong content, whatever the pool believes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quartet.errors import OutOfBlocksError
from quartet.kvcache import sequence
from quartet.kvcache.block_hash import ExtraKey, sequence_hashes
from quartet.kvcache.block_pool import BlockCounts, BlockManager
from quartet.kvcache.sequence import Sequence
from tests.kvcache.replica import Replica

NUM_BLOCKS = 9
BLOCK_SIZE = 2
#: Mostly equal, so that sequences meet: prefixes are shared, and computed by several at once.
TOKEN_IDS = st.sampled_from([0, 0, 0, 0, 0, 0, 1])

Content: TypeAlias = tuple[ExtraKey, tuple[int, ...]]  # all tokens up to and with this one


@dataclass(eq=False)
class Holding:
    """What a running sequence or a holder has: blocks, the content of their slots, and the names committed."""

    seq: Sequence
    blocks: list[int] = field(default_factory=list)
    contents: list[Content] = field(default_factory=list)
    names: list[Content] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockManager(NUM_BLOCKS, BLOCK_SIZE, has_events=True)
        self.replica = Replica()
        self.slots: list[list[Content | None]] = [[None] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.waiting: list[Sequence] = []
        self.running: list[Holding] = []
        self.holders: dict[int, Holding] = {}
        self.last_used: dict[Content, int] = {}  # of every name
        self.now = 0

    @rule(
        token_ids=st.lists(TOKEN_IDS, min_size=1, max_size=9),
        salt=st.sampled_from(["", "", "salt"]),
        num_requests=st.integers(1, 3),
    )
    def arrive(self, token_ids: list[int], salt: str, num_requests: int) -> None:
        for _ in range(num_requests):
            seq = Sequence(token_ids, block_size=BLOCK_SIZE, extra_key=ExtraKey(cache_salt=salt))
            self.waiting.append(seq)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def allocate_one(self, data: st.DataObject) -> None:
        self.allocate(data.draw(st.sampled_from(self.waiting)))

    @precondition(lambda self: self.waiting)
    @rule()
    def allocate_all(self) -> None:
        for seq in list(self.waiting):
            self.allocate(seq)

    @precondition(lambda self: self.running)
    @rule()
    def compute_all(self) -> None:
        for running in self.running:
            self.compute(running, len(running.seq))
            self.commit(running)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 6), commits=st.booleans())
    def compute_one(self, data: st.DataObject, num_tokens: int, commits: bool) -> None:
        running = data.draw(st.sampled_from(self.running))
        self.compute(running, num_tokens)
        if commits:
            self.commit(running)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token_ids=st.lists(TOKEN_IDS, min_size=1, max_size=3))
    def generate(self, data: st.DataObject, token_ids: list[int]) -> None:
        running = data.draw(st.sampled_from(self.running))
        seq = running.seq
        num_new = max(0, -(-(len(seq) + len(token_ids)) // BLOCK_SIZE) - len(running.blocks))
        if not self.has_room(num_new):
            with pytest.raises(OutOfBlocksError):
                self.pool.extend(seq, len(token_ids))
            assert seq.block_table == running.blocks
            return
        self.evict(num_new)
        self.pool.extend(seq, len(token_ids))
        running.blocks = list(seq.block_table)
        for token_id in token_ids:
            seq.append(token_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ends=st.booleans())
    def give_back(self, data: st.DataObject, ends: bool) -> None:
        running = data.draw(st.sampled_from(self.running))
        self.pool.free(running.seq)
        self.running.remove(running)
        self.stop_using(running)
        if not ends:  # preempted: it will run again
            self.waiting.append(running.seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        running = data.draw(st.sampled_from(self.running))
        self.commit(running)
        num_held = -(-running.seq.num_computed_tokens // BLOCK_SIZE)
        self.now += 1
        assert self.pool.hold(running.seq, self.now) == tuple(running.blocks[:num_held])
        running.blocks = running.blocks[:num_held]
        self.running.remove(running)
        self.holders[self.now] = running

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        holder = data.draw(st.sampled_from(sorted(self.holders)))
        self.pool.release(holder)
        self.stop_using(self.holders.pop(holder))
        if twice:
            self.pool.release(holder)

    @invariant()
    def counts_equal_the_models_and_add_up(self) -> None:
        in_use = {block for running in self.running for block in running.blocks}
        held = {block for holder in self.holders.values() for block in holder.blocks} - in_use
        cached = len(self.idle_names())
        free = NUM_BLOCKS - cached - len(held) - len(in_use)
        assert self.pool.counts == BlockCounts(free, cached, len(held), len(in_use), NUM_BLOCKS)
        assert self.pool.num_available == free + cached

    @invariant()
    def everybody_finds_the_content_that_was_computed(self) -> None:
        for having in (*self.running, *self.holders.values()):
            found = [slot for block in having.blocks for slot in self.slots[block]]
            assert found[: len(having.contents)] == having.contents
            assert len(set(having.blocks)) == len(having.blocks)

    @invariant()
    def exactly_what_is_committed_is_named(self) -> None:
        named = [block for block in range(NUM_BLOCKS) if self.pool.sequence_hash(block) is not None]
        assert {self.slots[block][-1] for block in named} == set(self.last_used)
        assert len(named) == len(self.last_used)
        for block in named:
            self.check_hash(block)

    @invariant()
    def a_subscriber_to_the_events_knows_the_named_blocks(self) -> None:
        self.replica.apply(self.pool.take_events())
        hashes = [self.pool.sequence_hash(block) for block in range(NUM_BLOCKS)]
        assert set(self.replica.parents) == {named for named in hashes if named is not None}
        assert list(self.pool.stored_blocks().items()) == list(self.replica.parents.items())
        assert self.pool.take_events() == []

    def allocate(self, seq: Sequence) -> None:
        shared: list[Content] = []
        for index in range((len(seq) - 1) // BLOCK_SIZE):
            name = (seq.extra_key, tuple(seq.token_ids[: (index + 1) * BLOCK_SIZE]))
            if name not in self.last_used:
                break
            shared.append(name)
        if not self.has_room(seq.num_blocks - len(shared), keep=shared):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(seq)
            return
        self.evict(seq.num_blocks - len(shared), keep=shared)
        assert self.pool.allocate(seq) == len(shared) * BLOCK_SIZE
        self.waiting.remove(seq)
        self.running.append(Holding(seq, list(seq.block_table), names=shared))
        self.read_shared(self.running[-1])

    def compute(self, running: Holding, num_tokens: int) -> None:
        seq = running.seq
        for position in range(seq.num_computed_tokens, min(len(seq), seq.num_computed_tokens + num_tokens)):
            block = running.blocks[position // BLOCK_SIZE]
            others = [other for other in (*self.running, *self.holders.values()) if other is not running]
            assert all(block not in other.blocks for other in others), "wrote into another's block"
            content = (seq.extra_key, tuple(seq.token_ids[: position + 1]))
            self.slots[block][position % BLOCK_SIZE] = content
            running.contents.append(content)
            seq.num_computed_tokens += 1

    def check_hash(self, block: int) -> None:
        content = self.slots[block][-1]
        assert content is not None
        extra_key, token_ids = content
        assert self.pool.sequence_hash(block) == sequence_hashes(token_ids, BLOCK_SIZE, extra_key)[-1]

    def read_shared(self, running: Holding) -> None:
        seq = running.seq
        for position in range(seq.num_computed_tokens):
            content = self.slots[running.blocks[position // BLOCK_SIZE]][position % BLOCK_SIZE]
            assert content == (seq.extra_key, tuple(seq.token_ids[: position + 1])), "shared another's content"
            running.contents.append(content)

    def commit(self, running: Holding) -> None:
        seq = running.seq
        self.pool.commit(seq)
        for index in range(len(running.names), seq.num_computed_tokens // BLOCK_SIZE):
            running.names.append((seq.extra_key, tuple(seq.token_ids[: (index + 1) * BLOCK_SIZE])))
            self.last_used.setdefault(running.names[-1], 0)

    def stop_using(self, having: Holding) -> None:
        self.now += 1
        for name in having.names:
            self.last_used[name] = self.now

    def idle_names(self) -> list[Content]:
        """Names that are neither used nor held: the next to be evicted first."""
        alive = {name for having in (*self.running, *self.holders.values()) for name in having.names}
        idle = [name for name in self.last_used if name not in alive]
        return sorted(idle, key=lambda name: (self.last_used[name], -len(name[1])))

    def has_room(self, num_new: int, keep: list[Content] | None = None) -> bool:
        idle = [name for name in self.idle_names() if name not in (keep or [])]
        return num_new <= self.num_free() + len(idle)

    def evict(self, num_new: int, keep: list[Content] | None = None) -> None:
        idle = [name for name in self.idle_names() if name not in (keep or [])]
        for name in idle[: max(0, num_new - self.num_free())]:
            del self.last_used[name]

    def num_free(self) -> int:
        taken = {block for having in (*self.running, *self.holders.values()) for block in having.blocks}
        return NUM_BLOCKS - len(taken) - len(self.idle_names())


class CollidingPoolMachine(PoolMachine):
    """The same where every hash is equal: names that others see are useless then, sharing must still be right."""

    def __init__(self) -> None:
        super().__init__()
        self.monkeypatch = pytest.MonkeyPatch()
        self.monkeypatch.setattr(sequence, "chain_hashes", lambda _, blocks: [42] * len(blocks))

    def check_hash(self, block: int) -> None:
        assert self.pool.sequence_hash(block) == 42

    def teardown(self) -> None:
        self.monkeypatch.undo()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(stateful_step_count=40)
TestCollidingPool = CollidingPoolMachine.TestCase
TestCollidingPool.settings = settings(stateful_step_count=40)
