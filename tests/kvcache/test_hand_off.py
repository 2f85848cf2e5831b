"""Hand-offs: who may do what, when they end, and that their end is told once."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from quartet.errors import (
    HandOffNotFoundError,
    HandOffStateError,
    InvalidRequestError,
    StaleEpochError,
)
from quartet.kvcache.hand_off import EndedHandOff, HandOffCounts, HandOffEntry, HandOffState, HandOffTable
from quartet.kvcache.layout import BlocksPayload, KvLayout, OpaquePayload

EPOCH = 7
LAYOUT = KvLayout(model_fingerprint="f", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=2, block_size=4)
PAYLOAD = BlocksPayload(LAYOUT, num_tokens=10)


def new_table() -> HandOffTable:
    return HandOffTable(EPOCH, ttl_s=30.0, max_pull_s=10.0)


def offer(table: HandOffTable, holder: int = 1, now: float = 0.0) -> HandOffEntry:
    return table.offer(holder, (5, 3, 8), PAYLOAD, now=now)


def begin(table: HandOffTable, entry: HandOffEntry, now: float = 1.0) -> None:
    table.begin(entry.hand_off_id, entry.secret, EPOCH, [0, 2], now=now)


#: Everything that a peer can ask for, with the same arguments.
CALLS: list[Callable[[HandOffTable, bytes, bytes, int, float], object]] = [
    lambda table, id, secret, epoch, now: table.begin(id, secret, epoch, [], now=now),
    lambda table, id, secret, epoch, now: table.renew(id, secret, epoch, now=now),
    lambda table, id, secret, epoch, now: table.finish(id, secret, epoch, now=now),
    lambda table, id, secret, epoch, now: table.abort(id, secret, epoch, now=now),
]
any_call = pytest.mark.parametrize("call", CALLS, ids=["begin", "renew", "finish", "abort"])


def test_ids_and_secrets_are_128_random_bits() -> None:
    table = new_table()
    drawn = [part for n in range(50) for entry in [offer(table, n)] for part in (entry.hand_off_id, entry.secret)]
    assert {len(part) for part in drawn} == {16}
    assert len(set(drawn)) == 100


def test_the_random_source_can_be_replaced() -> None:
    numbers = itertools.count(1)
    table = HandOffTable(EPOCH, 30.0, 10.0, draw=lambda size: next(numbers).to_bytes(size, "big"))
    entry = offer(table)
    assert (entry.hand_off_id, entry.secret) == ((1).to_bytes(16, "big"), (2).to_bytes(16, "big"))


def test_a_secret_is_not_printed() -> None:
    entry = offer(new_table())
    assert repr(entry.secret) not in repr(entry)


def test_a_pull_that_finishes_releases() -> None:
    table = new_table()
    entry = offer(table)
    assert table.counts == HandOffCounts(held=1, pulling=0, released=0, expired=0, cancelled=0)
    assert table.begin(entry.hand_off_id, entry.secret, EPOCH, [0, 1, 2], now=1.0) == entry
    assert table.counts == HandOffCounts(held=0, pulling=1, released=0, expired=0, cancelled=0)
    ended = table.finish(entry.hand_off_id, entry.secret, EPOCH, now=2.0)
    assert ended == EndedHandOff(entry.hand_off_id, holder=1, state=HandOffState.RELEASED)
    assert table.counts == HandOffCounts(held=0, pulling=0, released=1, expired=0, cancelled=0)


def test_a_hand_off_can_be_taken_without_reading_any_piece() -> None:
    table = new_table()
    entry = table.offer(1, (), OpaquePayload("trtllm", b"state"), now=0.0)
    table.begin(entry.hand_off_id, entry.secret, EPOCH, [], now=0.0)
    assert table.finish(entry.hand_off_id, entry.secret, EPOCH, now=0.0).state is HandOffState.RELEASED


@pytest.mark.parametrize("pulls", [False, True])
def test_an_abort_cancels_in_any_living_state(pulls: bool) -> None:
    table = new_table()
    entry = offer(table)
    if pulls:
        begin(table, entry)
    ended = table.abort(entry.hand_off_id, entry.secret, EPOCH, now=2.0)
    assert ended == EndedHandOff(entry.hand_off_id, holder=1, state=HandOffState.CANCELLED)
    assert table.counts == HandOffCounts(held=0, pulling=0, released=0, expired=0, cancelled=1)


def test_a_hand_off_that_nobody_renews_expires() -> None:
    table = new_table()
    entry = offer(table)
    assert table.next_deadline() == 30.0
    assert table.expire(now=29.9) == []
    assert table.expire(now=30.0) == [EndedHandOff(entry.hand_off_id, 1, HandOffState.EXPIRED)]
    assert table.expire(now=30.0) == []
    assert table.next_deadline() is None


def test_a_renewal_starts_the_time_to_live_anew() -> None:
    table = new_table()
    first, second = offer(table, 1), offer(table, 2)
    table.renew(first.hand_off_id, first.secret, EPOCH, now=20.0)
    assert table.next_deadline() == 30.0
    assert [ended.holder for ended in table.expire(now=49.9)] == [2]
    assert [ended.holder for ended in table.expire(now=50.0)] == [1]
    assert second.holder == 2


def test_a_pull_outlives_the_time_to_live_but_not_its_own_bound() -> None:
    table = new_table()
    entry = offer(table)
    begin(table, entry, now=29.0)
    table.renew(entry.hand_off_id, entry.secret, EPOCH, now=38.0)
    assert table.expire(now=38.9) == []
    assert table.is_pulling(entry.hand_off_id, now=38.9)
    assert not table.is_pulling(entry.hand_off_id, now=39.0)
    with pytest.raises(HandOffNotFoundError):
        table.finish(entry.hand_off_id, entry.secret, EPOCH, now=39.0)
    assert [ended.state for ended in table.expire(now=39.0)] == [HandOffState.EXPIRED]


def test_the_next_deadline_is_the_earliest_of_hand_offs_and_pulls() -> None:
    table = new_table()
    pulled = offer(table, 1)
    begin(table, pulled, now=1.0)
    offer(table, 2, now=2.0)
    assert table.next_deadline() == 11.0
    assert [ended.holder for ended in table.expire(now=11.0)] == [1]
    assert table.next_deadline() == 32.0


@any_call
def test_another_epoch_is_stale(call: Callable[..., object]) -> None:
    table = new_table()
    entry = offer(table)
    with pytest.raises(StaleEpochError):
        call(table, entry.hand_off_id, entry.secret, EPOCH + 1, 1.0)
    assert table.counts.held == 1


@any_call
def test_a_restarted_worker_refuses_hand_offs_of_its_earlier_life(call: Callable[..., object]) -> None:
    entry = offer(new_table())
    with pytest.raises(StaleEpochError):
        call(HandOffTable(EPOCH + 1, 30.0, 10.0), entry.hand_off_id, entry.secret, EPOCH, 1.0)


@any_call
def test_unknown_ended_due_and_wrong_secret_look_the_same(call: Callable[..., object]) -> None:
    table = new_table()
    due, ended, alive = offer(table, 1), offer(table, 2), offer(table, 3)
    begin(table, alive)
    table.abort(ended.hand_off_id, ended.secret, EPOCH, now=1.0)
    asked = [
        (b"?" * 16, alive.secret, 2.0),
        (b"", b"", 2.0),
        (ended.hand_off_id, ended.secret, 2.0),
        (alive.hand_off_id, b"?" * 16, 2.0),
        (alive.hand_off_id, b"", 2.0),
        (alive.hand_off_id, due.secret, 2.0),
        (due.hand_off_id, due.secret, 30.0),
    ]
    messages = set()
    for hand_off_id, secret, now in asked:
        with pytest.raises(HandOffNotFoundError) as caught:
            call(table, hand_off_id, secret, EPOCH, now)
        messages.add((caught.value.message, caught.value.field))
    assert len(messages) == 1
    assert table.counts == HandOffCounts(held=1, pulling=1, released=0, expired=0, cancelled=1)


def test_a_second_begin_is_refused_and_the_first_goes_on() -> None:
    table = new_table()
    entry = offer(table)
    begin(table, entry)
    with pytest.raises(HandOffStateError):
        begin(table, entry)
    assert table.finish(entry.hand_off_id, entry.secret, EPOCH, now=2.0).state is HandOffState.RELEASED


def test_a_finish_without_a_begin_is_refused() -> None:
    table = new_table()
    entry = offer(table)
    with pytest.raises(HandOffStateError):
        table.finish(entry.hand_off_id, entry.secret, EPOCH, now=1.0)
    assert table.counts.held == 1


@pytest.mark.parametrize("pieces", [[3], [-1], [0, 0], [0, 1, 2, 3]])
def test_impossible_pieces_are_refused_and_start_nothing(pieces: list[int]) -> None:
    table = new_table()
    entry = offer(table)
    with pytest.raises(InvalidRequestError) as caught:
        table.begin(entry.hand_off_id, entry.secret, EPOCH, pieces, now=1.0)
    assert caught.value.field == "pieces"
    assert table.counts.held == 1


def test_the_worker_can_withdraw_what_it_holds() -> None:
    table = new_table()
    entry = offer(table, 1)
    begin(table, entry)
    offer(table, 2)
    for holder in (1, 2):
        ended = table.withdraw(holder)
        assert ended is not None
        assert (ended.holder, ended.state) == (holder, HandOffState.CANCELLED)
        assert table.withdraw(holder) is None
    assert table.next_deadline() is None


def test_nothing_is_being_pulled_before_begin_or_after_an_abort() -> None:
    table = new_table()
    entry = offer(table)
    assert not table.is_pulling(entry.hand_off_id, now=0.0)
    begin(table, entry)
    assert table.is_pulling(entry.hand_off_id, now=1.0)
    table.abort(entry.hand_off_id, entry.secret, EPOCH, now=1.0)
    assert not table.is_pulling(entry.hand_off_id, now=1.0)
