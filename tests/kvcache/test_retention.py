"""A conversation's blocks outlast others until its time has passed, within a share, and while there are others."""

from __future__ import annotations

import random

import pytest

from quartet.errors import OutOfBlocksError
from quartet.kvcache.block_hash import ExtraKey
from quartet.kvcache.block_pool import BlockCounts, BlockManager
from quartet.kvcache.retention import Retention, RetentionPlan, SessionId
from quartet.kvcache.sequence import Sequence

BLOCK_SIZE = 4
TTL_S = 60.0


class Clock:
    """Stands still unless a test says how much later it is."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Pool:
    """A block pool whose requests are computed at once; prompts are named by their first token."""

    def __init__(self, num_blocks: int, share: float = 0.5) -> None:
        self.clock = Clock()
        self.retention = Retention(RetentionPlan(ttl_s=TTL_S, share=share), num_blocks, self.clock)
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE, retention=self.retention)

    def serve(self, num_blocks: int, first: int, *, key: str = "", tenant: str = "", domain: str = "") -> int:
        """A request of so many full blocks begins and ends; returns how many of them were cached."""
        seq = prompt(num_blocks, first)
        num_cached = self.blocks.allocate(seq) // BLOCK_SIZE
        self.end(seq, key, tenant, domain)
        return num_cached

    def end(self, seq: Sequence, key: str = "", tenant: str = "", domain: str = "") -> None:
        seq.num_computed_tokens = len(seq)
        self.blocks.commit(seq)
        if key:
            self.blocks.retain(seq, SessionId(domain, tenant, key))
        self.blocks.free(seq)

    def num_cached(self, num_blocks: int, first: int) -> int:
        """How many of a prompt's blocks are there."""
        return self.blocks.num_cached_tokens(prompt(num_blocks, first)) // BLOCK_SIZE


def prompt(num_blocks: int, first: int) -> Sequence:
    """Full blocks, and a token more, so that all of them can be shared; equal where, and only where, ``first`` is."""
    token_ids = [first * 1000 + position for position in range(num_blocks * BLOCK_SIZE)]
    return Sequence([*token_ids, 0], block_size=BLOCK_SIZE)


def test_a_conversation_outlasts_younger_blocks_that_nobody_retains() -> None:
    pool = Pool(8)
    pool.serve(3, 1, key="talk")
    for other in range(2, 10):
        pool.serve(3, other)
    assert pool.num_cached(3, 1) == 3
    assert pool.blocks.num_retained == 3


def test_without_a_key_or_without_a_retention_blocks_go_in_the_order_of_their_use() -> None:
    pool = Pool(7)
    pool.serve(3, 1)
    plain = Pool(7)
    plain.blocks = BlockManager(7, BLOCK_SIZE)
    plain.serve(3, 1, key="talk")
    assert plain.blocks.num_retained == 0
    for each in (pool, plain):
        each.serve(3, 2)
        each.serve(3, 3)
        assert (each.num_cached(3, 1), each.num_cached(3, 2)) == (0, 3)


def test_it_goes_once_its_time_has_passed_since_its_last_request_ended() -> None:
    pool = Pool(8)
    pool.serve(3, 1, key="talk")
    pool.clock.now_s += TTL_S - 1
    pool.serve(3, 1, key="talk")
    pool.clock.now_s += TTL_S - 1
    for other in (2, 3, 4):
        pool.serve(3, other)
    assert pool.num_cached(3, 1) == 3
    pool.clock.now_s += 1
    pool.serve(3, 5)
    pool.serve(3, 6)
    assert pool.num_cached(3, 1) == 0
    assert pool.blocks.num_retained == 0


def test_whose_time_has_passed_is_the_next_to_go_if_it_was_due_by_its_last_use() -> None:
    pool = Pool(8)
    pool.serve(3, 1, key="talk")
    for other in (2, 3, 4):
        pool.serve(3, other)  # what is left free or unretained has room for one of them
    pool.clock.now_s += TTL_S
    pool.serve(3, 5)
    assert (pool.num_cached(3, 1), pool.num_cached(3, 4)) == (0, 3)


def test_whose_time_has_passed_unnoticed_goes_in_the_order_of_its_last_use() -> None:
    pool = Pool(13)
    pool.serve(3, 1)
    pool.serve(3, 2, key="talk")
    pool.serve(3, 3)
    pool.clock.now_s += TTL_S
    pool.serve(3, 4)
    pool.serve(3, 5)
    assert [pool.num_cached(3, first) for first in (1, 2, 3, 4)] == [0, 3, 3, 3]
    pool.serve(3, 6)
    assert [pool.num_cached(3, first) for first in (2, 3, 4)] == [0, 3, 3]


def test_a_request_that_needs_the_room_gets_it() -> None:
    pool = Pool(8, share=1.0)
    pool.serve(4, 1, key="old")
    pool.serve(3, 2, key="new")
    assert pool.blocks.num_available == 8
    assert pool.serve(3, 3) == 0
    assert (pool.num_cached(4, 1), pool.num_cached(3, 2)) == (1, 3), "the oldest session loses, from its end on"
    with pytest.raises(OutOfBlocksError):
        pool.blocks.allocate(prompt(8, 4))  # and a token
    assert pool.serve(7, 5) == 0
    assert pool.blocks.num_retained == 0


def test_beyond_the_share_the_oldest_one_loses_its_last_blocks_first() -> None:
    pool = Pool(16)
    pool.serve(4, 1, key="old")
    pool.serve(3, 2, key="middle")
    pool.serve(3, 3, key="new")
    assert pool.blocks.num_retained == 8
    pool.serve(7, 4)
    pool.serve(7, 5)
    assert [pool.num_cached(size, first) for size, first in ((4, 1), (3, 2), (3, 3))] == [2, 3, 3]


def test_of_a_prompt_larger_than_the_share_the_first_blocks_are_retained() -> None:
    pool = Pool(16)
    pool.serve(2, 1, key="small", tenant="other")
    pool.serve(12, 2, key="large")
    assert pool.blocks.num_retained == 8
    pool.serve(7, 3)
    pool.serve(7, 4)
    assert (pool.num_cached(2, 1), pool.num_cached(12, 2)) == (2, 6)


def test_a_share_of_less_than_a_block_retains_nothing() -> None:
    pool = Pool(8, share=0.1)
    pool.serve(3, 1, key="talk")
    assert pool.blocks.num_retained == 0


def test_a_tenant_that_fills_the_share_displaces_its_own_sessions() -> None:
    pool = Pool(40)
    pool.serve(4, 1, key="talk", tenant="small")
    for first in range(2, 12):
        pool.serve(4, first, key=str(first), tenant="large")
    assert pool.blocks.num_retained == 20
    pool.serve(19, 20)
    pool.serve(19, 21)
    assert pool.num_cached(4, 1) == 4
    assert [pool.num_cached(4, first) for first in range(2, 12)] == [0, 0, 0, 0, 0, 0, 4, 4, 4, 4]


def test_sessions_that_retain_hardly_a_block_weigh_too() -> None:
    pool = Pool(40)
    pool.serve(2, 1, key="talk", tenant="small")
    for number in range(200):
        pool.serve(1, 2, key=str(number), tenant="flood")
    assert len(pool.retention._sessions) <= 40
    assert pool.blocks.num_retained == 3
    pool.serve(19, 20)
    pool.serve(19, 21)
    assert pool.num_cached(2, 1) == 2


@pytest.mark.parametrize(
    ("tenant", "domain", "num_left"), [("", "", 3), ("acme", "", 0), ("", "acme", 0)], ids=["same", "tenant", "domain"]
)
def test_equal_keys_of_two_tenants_are_two_sessions(tenant: str, domain: str, num_left: int) -> None:
    pool = Pool(12)
    pool.serve(3, 1, key="talk")
    pool.clock.now_s += TTL_S - 1
    pool.serve(1, 2, key="talk", tenant=tenant, domain=domain)
    pool.clock.now_s += 1
    for other in range(3, 6):
        pool.serve(5, other)
    assert pool.num_cached(3, 1) == num_left, "a session's requests renew all that it retains"


def test_what_two_sessions_share_stays_until_the_last_of_them_lets_go() -> None:
    pool = Pool(12)
    pool.serve(3, 1, key="one", tenant="a")
    pool.clock.now_s += TTL_S / 2
    pool.serve(2, 1, key="two", tenant="b")
    assert pool.blocks.num_retained == 3
    pool.clock.now_s += TTL_S / 2
    for other in range(2, 5):
        pool.serve(5, other)
    assert pool.blocks.num_retained == 2
    assert pool.num_cached(3, 1) == 2


def test_a_turn_takes_the_place_of_the_one_before_and_branches_stay() -> None:
    pool = Pool(40)
    pool.serve(2, 1, key="talk")
    for num_blocks in (3, 4, 5):
        pool.serve(num_blocks, 1, key="talk")
    [session] = pool.retention._sessions.values()
    assert len(session.tails) == 1
    for first in range(2, 12):
        pool.serve(1, first, key="talk")
    assert len(session.tails) == 8
    assert pool.blocks.num_retained == 8, "the oldest branch goes: it is the long one"


def test_a_session_that_goes_on_neither_keeps_others_from_expiring_nor_is_the_oldest() -> None:
    pool = Pool(20)
    pool.serve(4, 1, key="first")
    pool.serve(3, 2, key="second")
    pool.clock.now_s += TTL_S - 1
    pool.serve(4, 1, key="first")
    pool.serve(4, 3, key="third")
    assert pool.blocks.num_retained == 10
    for other in (4, 5, 6):
        pool.serve(8, other)
    assert [pool.num_cached(4, 1), pool.num_cached(3, 2), pool.num_cached(4, 3)] == [4, 2, 4]
    pool.clock.now_s += 1
    pool.serve(8, 7)
    assert pool.blocks.num_retained == 8


def test_a_branch_that_goes_on_is_not_the_oldest() -> None:
    pool = Pool(40)
    pool.serve(2, 1, key="talk")
    for first in range(2, 9):
        pool.serve(1, first, key="talk")
    pool.serve(2, 1, key="talk")
    pool.serve(1, 9, key="talk")
    assert pool.blocks.num_retained == 9
    for other in (20, 21, 22):
        pool.serve(12, other)
    assert (pool.num_cached(2, 1), pool.num_cached(1, 2)) == (2, 0)


def test_a_session_loses_its_oldest_branch_before_the_others() -> None:
    pool = Pool(16)
    pool.serve(3, 1, key="talk")
    pool.serve(3, 2, key="talk")
    pool.serve(4, 3, key="other")
    for other in (4, 5, 6):
        pool.serve(7, other)
    assert [pool.num_cached(3, 1), pool.num_cached(3, 2), pool.num_cached(4, 3)] == [1, 3, 4]


def test_what_a_session_has_left_behind_goes_before_what_others_asked_since() -> None:
    pool = Pool(16)
    pool.serve(3, 1, key="talk")
    pool.serve(3, 2, key="other")
    pool.serve(3, 3, key="talk")
    pool.serve(3, 4, key="talk")
    assert pool.blocks.num_retained == 8
    for other in (5, 6, 7):
        pool.serve(7, other)
    assert [pool.num_cached(3, first) for first in (1, 2, 3, 4)] == [0, 2, 3, 3]


def test_a_branch_that_has_lost_its_end_is_still_the_oldest() -> None:
    pool = Pool(40)
    pool.serve(3, 1, key="talk")
    for first in range(2, 9):
        pool.serve(1, first, key="talk")
    pool.serve(11, 10, key="other")  # takes a block of the first branch
    pool.serve(1, 9, key="talk")  # one branch too many
    for other in (20, 21, 22):
        pool.serve(19, other)
    assert [pool.num_cached(3, 1), pool.num_cached(1, 2), pool.num_cached(11, 10)] == [0, 1, 11]


def test_a_branch_that_ends_within_another_is_let_go_of_with_the_session() -> None:
    pool = Pool(16)
    pool.serve(3, 1, key="talk")
    pool.serve(2, 1, key="talk")
    pool.serve(6, 2, key="other")  # takes a block of the first branch
    assert pool.blocks.num_retained == 8
    pool.clock.now_s += TTL_S
    pool.serve(7, 3)
    assert pool.blocks.num_retained == 0


def test_a_session_that_comes_back_after_its_time_begins_anew() -> None:
    pool = Pool(16)
    pool.serve(3, 1, key="talk")
    pool.clock.now_s += TTL_S
    pool.serve(2, 2, key="talk")
    assert pool.blocks.num_retained == 2


def test_tenants_that_retain_too_much_end_up_with_as_much_each() -> None:
    pool = Pool(60)
    pool.serve(2, 1, key="talk", tenant="small")
    for first in range(2, 22):
        pool.serve(4, first, key=str(first), tenant="flood")
    pool.serve(24, 30, key="long", tenant="late")
    for other in (40, 41, 42):
        pool.serve(29, other)
    left = {"flood": sum(pool.num_cached(4, first) for first in range(2, 22)), "late": pool.num_cached(24, 30)}
    assert pool.num_cached(2, 1) == 2
    assert sum(left.values()) == 28
    assert abs(left["flood"] - left["late"]) <= 4


def test_blocks_that_a_request_shares_are_no_room_for_its_others() -> None:
    pool = Pool(12)
    pool.serve(3, 1, key="talk")
    pool.serve(8, 2)
    running = prompt(8, 3)
    pool.blocks.allocate(running)  # sets the conversation aside
    counts = pool.blocks.counts
    assert (counts.cached, counts.free) == (3, 0)
    with pytest.raises(OutOfBlocksError):
        pool.blocks.allocate(prompt(3, 1))
    assert pool.blocks.counts == counts


def test_a_request_without_a_key_leaves_what_it_shares_retained() -> None:
    pool = Pool(12)
    pool.serve(3, 1, key="talk")
    assert pool.serve(3, 1) == 3
    for other in range(2, 5):
        pool.serve(5, other)
    assert pool.num_cached(3, 1) == 3


def test_retained_blocks_can_be_shared_held_and_copied_like_others() -> None:
    pool = Pool(12)
    pool.serve(3, 1, key="talk")
    pool.serve(8, 2)  # the conversation is set aside
    pool.serve(8, 3)
    first, second = prompt(3, 1), prompt(3, 1)
    assert pool.blocks.allocate(first) == 12
    assert pool.blocks.allocate(second, shares=False) == 0
    for seq in (first, second):
        seq.num_computed_tokens = len(seq)
        pool.blocks.commit(seq)
    pool.blocks.retain(first, SessionId("", "", "talk"))
    pool.blocks.hold(first, 7)
    pool.blocks.free(second)
    assert pool.blocks.counts == BlockCounts(free=4, cached=4, held=4, in_use=0, total=12)
    pool.blocks.release(7)
    assert pool.blocks.counts == BlockCounts(free=5, cached=7, held=0, in_use=0, total=12)
    assert pool.num_cached(3, 1) == 3


def test_a_copy_takes_over_from_a_retained_block_that_is_set_aside() -> None:
    pool = Pool(12)
    copy = prompt(3, 1)
    pool.blocks.allocate(copy)
    pool.serve(3, 1, key="talk")
    pool.serve(4, 2)
    pool.serve(4, 3)  # sets the conversation aside
    assert pool.retention.num_aside == 3
    copy.num_computed_tokens = len(copy)
    pool.blocks.commit(copy)
    assert pool.retention.num_aside == 0
    assert pool.blocks.num_retained == 3
    pool.blocks.free(copy)
    pool.serve(8, 4)
    assert pool.num_cached(3, 1) == 3


def test_salted_blocks_are_retained_apart() -> None:
    pool = Pool(12)
    salted = Sequence(prompt(3, 1).token_ids, block_size=BLOCK_SIZE, extra_key=ExtraKey(cache_salt="s"))
    pool.blocks.allocate(salted)
    pool.end(salted, "talk")
    pool.serve(3, 1, key="talk")
    assert pool.blocks.num_retained == 6


def test_what_lapses_while_it_is_set_aside_goes_from_its_end_on() -> None:
    pool = Pool(8)
    pool.serve(3, 1, key="talk")
    pool.serve(4, 2)
    pool.serve(4, 3)
    assert pool.retention.num_aside == 3
    pool.clock.now_s += TTL_S
    running = prompt(1, 4)
    pool.blocks.allocate(running)  # a block of it, where one is free, and another for the token
    assert (pool.num_cached(3, 1), pool.num_cached(4, 3)) == (2, 4)
    assert pool.blocks.num_retained == 0


def test_no_block_outlives_the_one_before_it_whatever_lapses() -> None:
    for seed in range(12):
        rng, pool = random.Random(seed), Pool(24, share=(0.3, 0.5, 1.0)[seed % 3])
        for _ in range(100):
            pool.clock.now_s += rng.choice((0, 1, TTL_S / 3))
            pool.serve(rng.randrange(1, 8), rng.randrange(4), key=rng.choice(("", "a", "b", "c")))
            names = {name for name in pool.blocks._names if name is not None}
            assert all(name.parent is None or name.parent in names for name in names), seed
