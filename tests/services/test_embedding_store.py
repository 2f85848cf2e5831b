"""Items in a worker's pool of embeddings: written once, waited for, made again where a writer fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest

from quartet.errors import (
    InvalidMediaError,
    InvalidRequestError,
    MediaTooLargeError,
    OutOfBlocksError,
    TransferError,
)
from quartet.kvcache.embedding_pool import EmbeddingPool
from services.workers.embedding_store import EmbeddingStore, Hold, Want
from tests.services.stream_workers import WAIT_S, until

BLOCK_SIZE = 4
A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))


@dataclass
class Maker:
    """Writes one item when it is let, or fails with ``error``."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)
    num_calls: int = 0
    was_cancelled: bool = False

    async def __call__(self, block_ids: tuple[int, ...]) -> None:
        self.num_calls += 1
        self.began.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.error is not None:
            raise self.error


def ready(error: Exception | None = None) -> Maker:
    maker = Maker(error=error)
    maker.gate.set()
    return maker


@dataclass
class User:
    """A request that wants items: what it was given, and how that goes on."""

    store: EmbeddingStore
    wants: Sequence[Want]
    holds: dict[int, Hold] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.obtaining = asyncio.create_task(self.store.obtain(self.wants, self.holds.__setitem__))

    async def obtained(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await asyncio.shield(self.obtaining)

    def release(self) -> None:
        for hold in self.holds.values():
            hold.release()


class Stores:
    """Makes stores that have to be empty in the end."""

    def __init__(self) -> None:
        self.made: list[EmbeddingStore] = []

    def __call__(self, num_blocks: int = 4, *, room_timeout_s: float = WAIT_S) -> EmbeddingStore:
        pool = EmbeddingPool(num_blocks, BLOCK_SIZE)
        self.made.append(EmbeddingStore(pool, field="media", room_timeout_s=room_timeout_s))
        return self.made[-1]


@pytest.fixture
async def stores() -> AsyncIterator[Stores]:
    stores = Stores()
    yield stores
    for store in stores.made:
        assert store.counts.held == store.counts.in_use == 0


async def test_an_item_is_made_once_for_all_requests_that_want_it(stores: Stores) -> None:
    store, maker, other = stores(), Maker(), ready()
    first, second = User(store, [Want(A, 5, maker)]), User(store, [Want(A, 5, other)])
    await maker.began.wait()
    assert not store.has(A)
    maker.gate.set()
    await first.obtained()
    await second.obtained()
    third = User(store, [Want(A, 5, other)])
    await third.obtained()
    assert (maker.num_calls, other.num_calls) == (1, 0)
    assert first.holds[0].block_ids == second.holds[0].block_ids == third.holds[0].block_ids
    for user in (first, second, second, third):  # twice is once
        assert store.counts.held == 2
        user.release()
    assert store.counts.cached == 2


async def test_an_item_that_a_request_names_twice_is_made_once_and_held_twice(stores: Stores) -> None:
    store, maker, other = stores(), ready(), ready()
    user = User(store, [Want(A, 4, maker), Want(B, 4, ready()), Want(A, 4, other)])
    await user.obtained()
    assert (maker.num_calls, other.num_calls) == (1, 0)
    user.holds[0].release()
    assert store.counts.held == 2
    user.release()


async def test_cancelling_one_waiting_request_does_not_cancel_the_item_for_the_others(stores: Stores) -> None:
    store, maker = stores(), Maker()
    first, second, third = (User(store, [Want(A, 4, maker)]) for _ in range(3))
    await maker.began.wait()
    second.obtaining.cancel()
    await asyncio.wait([second.obtaining])
    maker.gate.set()
    await first.obtained()
    await third.obtained()
    assert (maker.num_calls, maker.was_cancelled, second.holds) == (1, False, {})
    first.release()
    third.release()


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_if_the_request_that_makes_an_item_fails_the_next_waiting_one_makes_it(
    stores: Stores, is_cancelled: bool
) -> None:
    store, failing, maker = stores(), Maker(error=TransferError("gone")), Maker()
    first = User(store, [Want(A, 4, failing)])
    second, third = (User(store, [Want(A, 4, maker)]) for _ in range(2))
    await failing.began.wait()
    if is_cancelled:
        first.obtaining.cancel()
        await asyncio.wait([first.obtaining])
    else:
        failing.gate.set()
        with pytest.raises(TransferError):
            await first.obtained()
    await maker.began.wait()
    maker.gate.set()
    await second.obtained()
    await third.obtained()
    assert maker.num_calls == 1
    second.release()
    third.release()


async def test_a_failed_item_cancels_the_other_items_of_its_request(stores: Stores) -> None:
    store, slow = stores(), Maker()
    user = User(store, [Want(A, 4, slow), Want(B, 4, ready(InvalidMediaError("no picture")))])
    with pytest.raises(InvalidMediaError):
        await user.obtained()
    assert slow.was_cancelled
    assert store.counts.free == 4


async def test_a_request_waits_until_others_release_their_items(stores: Stores) -> None:
    store = stores(2)
    holder, waiting = User(store, [Want(A, 8, ready())]), User(store, [Want(B, 4, ready()), Want(C, 4, ready())])
    await holder.obtained()
    await asyncio.wait([waiting.obtaining], timeout=0.02)  # it does not get them
    assert waiting.holds == {}
    holder.release()
    await waiting.obtained()
    assert not store.has(A)
    waiting.release()


async def test_requests_that_wait_for_room_hold_nothing_that_another_needs(stores: Stores) -> None:
    """With room item by item, each of the two would get one and wait for the other's for ever."""
    store = stores(2)
    holder = User(store, [Want(A, 4, ready())])
    await holder.obtained()
    users = [User(store, [Want(name * 32, 4, ready()) for name in names]) for names in ((b"c", b"d"), (b"e", b"f"))]
    await until(lambda: store.counts.held == 1)
    holder.release()
    for user in users:
        await user.obtained()
        user.release()


async def test_waiting_for_room_times_out(stores: Stores) -> None:
    store = stores(2, room_timeout_s=0.02)
    holder = User(store, [Want(A, 8, ready())])
    await holder.obtained()
    waiting = User(store, [Want(A, 8, ready()), Want(B, 4, ready())])
    with pytest.raises(MediaTooLargeError, match="take 3 blocks of embeddings, and there are 2"):
        await waiting.obtained()
    waiting = User(store, [Want(B, 4, ready())])
    with pytest.raises(OutOfBlocksError):
        await waiting.obtained()
    holder.release()
    late = User(store, [Want(B, 4, ready())])
    await late.obtained()
    late.release()


async def test_cancelling_a_request_that_waits_for_room_gives_the_room_to_the_next(stores: Stores) -> None:
    store = stores(2)
    holder = User(store, [Want(A, 4, ready())])
    await holder.obtained()
    large, small = User(store, [Want(B, 8, ready())]), User(store, [Want(C, 4, ready())])
    await asyncio.wait([large.obtaining, small.obtaining], timeout=0.02)
    large.obtaining.cancel()
    await small.obtained()
    small.release()
    holder.release()


async def test_stored_items_and_those_being_written_are_obtained_while_others_wait_for_room(stores: Stores) -> None:
    store, maker = stores(3), Maker()
    holder, writer = User(store, [Want(A, 4, ready())]), User(store, [Want(B, 4, maker)])
    await holder.obtained()
    await maker.began.wait()
    waiting = User(store, [Want(C, 12, ready())])
    await asyncio.wait([waiting.obtaining], timeout=0.02)  # it is first in line
    users = [User(store, [Want(name, 4, ready()) for name in names]) for names in ((A,), (A, B))]
    await users[0].obtained()
    maker.gate.set()
    await users[1].obtained()
    assert waiting.holds == {}
    for user in (holder, writer, *users):
        user.release()
    await waiting.obtained()
    waiting.release()


async def test_a_queued_request_goes_ahead_once_others_have_made_all_its_items(stores: Stores) -> None:
    store = stores(4)
    holders = [User(store, [Want(name * 32, 8, ready())]) for name in (b"g", b"h")]
    for holder in holders:
        await holder.obtained()
    first, second, third = (
        User(store, [Want(name, 4, ready()) for name in names]) for names in ((A, B), (C, C * 2), (B, A))
    )
    await asyncio.wait([third.obtaining], timeout=0.02)  # they stand in line
    holders[0].release()
    await first.obtained()
    await third.obtained()
    assert second.holds == {}
    for user in (first, third):
        user.release()
    await second.obtained()
    for user in (second, holders[1]):
        user.release()


async def test_only_the_first_queued_request_holds_its_stored_items(stores: Stores) -> None:
    """Would the second one hold its own as well, each of the two would wait for the other's block for ever."""
    store = stores(4)
    holder = User(store, [Want(name, num_tokens, ready()) for name, num_tokens in ((A, 4), (B, 4), (C, 8))])
    await holder.obtained()
    users = [User(store, [Want(there, 4, ready()), Want(there * 2, 12, ready())]) for there in (A, B)]
    await until(lambda: 0 in users[0].holds)
    assert users[1].holds == {}
    holder.release()
    for user in users:
        await user.obtained()
        user.release()


async def test_the_timeout_for_room_begins_when_a_request_is_first_in_the_queue(stores: Stores) -> None:
    """Else a request that came soon after one that waits in vain would fail with it, though there is room for it."""
    store = stores(2, room_timeout_s=0.05)
    holder = User(store, [Want(A, 4, ready())])
    await holder.obtained()
    large, small = User(store, [Want(B, 8, ready())]), User(store, [Want(C, 4, ready())])
    with pytest.raises(OutOfBlocksError):
        await large.obtained()
    await small.obtained()
    small.release()
    holder.release()


async def test_an_item_of_another_size_is_refused_by_name(stores: Stores) -> None:
    store = stores()
    user = User(store, [Want(A, 4, ready())])
    await user.obtained()
    other = User(store, [Want(B, 4, ready()), Want(A, 5, ready())])
    with pytest.raises(InvalidRequestError) as caught:
        await other.obtained()
    assert caught.value.field == "media[1]"
    other.release()
    user.release()
