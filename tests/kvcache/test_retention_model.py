"""The block pool with sessions against the naive model of ``test_block_pool_model``, in any order of calls.

The model knows who asked for what, and when; it reads from the retention which names it retains, and judges that and
every eviction.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from quartet.kvcache.block_pool import BlockManager
from quartet.kvcache.retention import BlockName, Retention, RetentionPlan, SessionId
from quartet.kvcache.sequence import Sequence
from tests.kvcache.test_block_pool_model import BLOCK_SIZE, NUM_BLOCKS, TOKEN_IDS, Content, Holding, PoolMachine

TTL_S = 10.0
SHARE = 0.5
MAX_RETAINED = 4
SESSIONS = st.builds(SessionId, st.just(""), st.sampled_from(["a", "b"]), st.sampled_from(["1", "2"]))


@dataclass(frozen=True)
class Before:
    """The idle names when room is made, those of them that sessions retain, and how many have to go."""

    idle: list[Content]
    retained: set[Content]
    num_evicted: int


class SessionPoolMachine(PoolMachine):
    def __init__(self) -> None:
        super().__init__()
        self.time_s = 0.0
        self.retention = Retention(RetentionPlan(ttl_s=TTL_S, share=SHARE), NUM_BLOCKS, lambda: self.time_s)
        self.pool = BlockManager(NUM_BLOCKS, BLOCK_SIZE, has_events=True, retention=self.retention)
        self.ended_at: dict[SessionId, float] = {}
        self.chains: dict[SessionId, set[Content]] = {}  # all that requests of a session had since it began
        self.was_retained: set[Content] = set()  # since its last use
        self.before: Before | None = None

    @rule(seconds=st.integers(1, 12))
    def wait(self, seconds: int) -> None:
        self.time_s += seconds

    @precondition(lambda self: self.running)
    @rule(data=st.data(), session=SESSIONS, holds=st.booleans())
    def end_in_session(self, data: st.DataObject, session: SessionId, holds: bool) -> None:
        running = data.draw(st.sampled_from(self.running))
        self.commit(running)
        wanted = self.retained_by_the_living() | set(running.names)
        if running.names:
            before = self.chains[session] if self.is_alive(session) else set()
            self.chains[session] = before | set(running.names)
            self.ended_at[session] = self.time_s
        self.pool.retain(running.seq, session)
        if running.names:
            num_tails = sum(len(record.tails) for record in self.retention._sessions.values())
            assert self.retained() <= wanted
            if len(wanted) <= MAX_RETAINED and num_tails < NUM_BLOCKS:
                assert self.retained() == wanted, "what has room is retained"
            else:
                assert num_tails <= NUM_BLOCKS
        self.was_retained |= self.retained()
        self.end(running, holds=holds)

    def end(self, running: Holding, *, holds: bool) -> None:
        self.running.remove(running)
        if holds:
            self.now += 1
            num_held = -(-running.seq.num_computed_tokens // BLOCK_SIZE)
            assert self.pool.hold(running.seq, self.now) == tuple(running.blocks[:num_held])
            running.blocks = running.blocks[:num_held]
            self.holders[self.now] = running
        else:
            self.pool.free(running.seq)
            self.stop_using(running)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token_ids=st.lists(TOKEN_IDS, min_size=1, max_size=3))
    def generate(self, data: st.DataObject, token_ids: list[int]) -> None:
        super().generate(data, token_ids)
        self.settle()

    def allocate(self, seq: Sequence) -> None:
        super().allocate(seq)
        self.settle()

    def evict(self, num_new: int, keep: list[Content] | None = None) -> None:
        idle = [name for name in self.idle_names() if name not in (keep or [])]
        num_evicted = max(0, num_new - self.num_free())
        self.before = Before(idle, self.retained_by_the_living(), num_evicted)

    def settle(self) -> None:
        """Judge what was evicted since ``evict``."""
        if self.before is None:
            return
        before, self.before = self.before, None
        there = {self.slots[block][-1] for block in range(NUM_BLOCKS) if self.pool.sequence_hash(block) is not None}
        gone = self.last_used.keys() - there
        assert len(gone) == before.num_evicted
        assert gone <= set(before.idle)
        others = set(before.idle) - before.retained
        assert not gone & before.retained or others <= gone, "retained ones are the last to go"
        for name in gone - before.retained:
            for kept in others - gone:
                both_lapsed = {name, kept} <= self.was_retained
                assert both_lapsed or self.last_used[name] <= self.last_used[kept], "the least recently used one goes"
        for extra_key, token_ids in there & self.last_used.keys():
            assert (extra_key, token_ids[:-BLOCK_SIZE]) not in gone, "no block outlives the one before it"
        for name in gone:
            del self.last_used[name]
        self.was_retained &= self.last_used.keys()

    def stop_using(self, having: Holding) -> None:
        super().stop_using(having)
        self.was_retained -= set(having.names)
        self.was_retained |= self.retained()

    def is_alive(self, session: SessionId) -> bool:
        return session in self.ended_at and self.time_s < self.ended_at[session] + TTL_S

    def retained(self) -> set[Content]:
        return {self.content(name) for name in self.retention._retained}

    def retained_by_the_living(self) -> set[Content]:
        """What will be retained once it is noticed whose time has passed."""
        found: set[Content] = set()
        for id, session in self.retention._sessions.items():
            if self.is_alive(id):
                for tail in session.tails:
                    extra_key, token_ids = self.content(tail)
                    lengths = range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE)
                    found |= {(extra_key, token_ids[:length]) for length in lengths}
        return found

    def content(self, name: BlockName) -> Content:
        content = self.slots[name.block_id][-1]
        assert content is not None
        return content

    @invariant()
    def retained_names_are_of_their_sessions_within_the_share_and_begin_at_the_first_block(self) -> None:
        retained = self.retained()
        assert self.pool.num_retained == len(retained) <= MAX_RETAINED
        asked = set[Content]().union(*self.chains.values())
        assert retained <= asked & self.last_used.keys()
        for extra_key, token_ids in retained:
            assert len(token_ids) == BLOCK_SIZE or (extra_key, token_ids[:-BLOCK_SIZE]) in retained

    @invariant()
    def tenants_weigh_what_they_retain(self) -> None:
        tenants = self.retention._tenants
        num_tails = sum(len(session.tails) for session in self.retention._sessions.values())
        assert sum(tenant.weight for tenant in tenants.values()) == len(self.retained()) + num_tails
        assert num_tails == self.retention._num_tails == sum(len(tenant.tails) for tenant in tenants.values())
        assert all(session.tails for session in self.retention._sessions.values())
        if self.retention._sessions:
            most = max(tenant.weight for tenant in tenants.values() if tenant.tails)
            assert self.retention._scales.heaviest.weight == most


TestPoolWithSessions = SessionPoolMachine.TestCase
TestPoolWithSessions.settings = settings(stateful_step_count=40)
