"""Offers: what each ticket allows, when they end, and that each ends once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import pytest

from quartet.errors import (
    HandOffNotFoundError,
    HandOffStateError,
    InvalidRequestError,
    StaleEpochError,
)
from quartet.kvcache.hand_off import HandOffCounts, HandOffState, HandOffTicket, Offer, Offers
from quartet.kvcache.layout import BlocksPayload, KvLayout, OpaquePayload

EPOCH = 7
LAYOUT = KvLayout(model_fingerprint="f", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=2, block_size=4)
PAYLOAD = BlocksPayload(LAYOUT, num_tokens=10)


def new_offers() -> Offers:
    return Offers(EPOCH, ttl_s=30.0, max_pull_s=10.0)


def offer(offers: Offers, holder: int = 1, now: float = 0.0) -> Offer:
    return offers.offer(holder, (5, 3, 8), PAYLOAD, now=now)


def begin(offers: Offers, made: Offer, now: float = 1.0) -> None:
    offers.begin(made.ticket, [0, 2], now=now)


#: Everything that a peer can ask for, with the same arguments.
CALLS: list[Callable[[Offers, HandOffTicket, float], object]] = [
    lambda offers, ticket, now: offers.begin(ticket, [], now=now),
    lambda offers, ticket, now: offers.renew(ticket, now=now),
    lambda offers, ticket, now: offers.finish(ticket, now=now),
    lambda offers, ticket, now: offers.abort(ticket, now=now),
]
any_call = pytest.mark.parametrize("call", CALLS, ids=["begin", "renew", "finish", "abort"])


def test_ids_and_secrets_are_128_random_bits() -> None:
    offers = new_offers()
    drawn = [
        part for n in range(50) for made in [offer(offers, n)] for part in (made.ticket.hand_off_id, made.ticket.secret)
    ]
    assert {len(part) for part in drawn} == {16}
    assert len(set(drawn)) == 100


def test_the_random_source_can_be_replaced() -> None:
    numbers = itertools.count(1)
    offers = Offers(EPOCH, 30.0, 10.0, draw=lambda size: next(numbers).to_bytes(size, "big"))
    made = offer(offers)
    assert (made.ticket.hand_off_id, made.ticket.secret) == ((1).to_bytes(16, "big"), (2).to_bytes(16, "big"))


def test_a_secret_is_not_printed() -> None:
    made = offer(new_offers())
    assert repr(made.ticket.secret) not in repr(made)


def test_a_pull_that_finishes_releases() -> None:
    offers = new_offers()
    made = offer(offers)
    assert offers.counts == HandOffCounts(held=1, pulling=0, taken=0, expired=0, cancelled=0)
    assert offers.begin(made.ticket, [0, 1, 2], now=1.0) is made
    assert offers.counts == HandOffCounts(held=0, pulling=1, taken=0, expired=0, cancelled=0)
    ended = offers.finish(made.ticket, now=2.0)
    assert ended is made
    assert (ended.holder, ended.state) == (1, HandOffState.TAKEN)
    assert offers.counts == HandOffCounts(held=0, pulling=0, taken=1, expired=0, cancelled=0)


def test_a_hand_off_can_be_taken_without_reading_any_piece() -> None:
    offers = new_offers()
    made = offers.offer(1, (), OpaquePayload("trtllm", b"state"), now=0.0)
    offers.begin(made.ticket, [], now=0.0)
    assert offers.finish(made.ticket, now=0.0).state is HandOffState.TAKEN


@pytest.mark.parametrize("pulls", [False, True])
def test_an_abort_cancels_in_any_living_state(pulls: bool) -> None:
    offers = new_offers()
    made = offer(offers)
    if pulls:
        begin(offers, made)
    ended = offers.abort(made.ticket, now=2.0)
    assert ended is made
    assert (ended.holder, ended.state) == (1, HandOffState.CANCELLED)
    assert offers.counts == HandOffCounts(held=0, pulling=0, taken=0, expired=0, cancelled=1)


def test_a_hand_off_that_is_not_renewed_expires() -> None:
    offers = new_offers()
    made = offer(offers)
    assert offers.next_deadline() == 30.0
    assert offers.expire(now=29.9) == []
    assert offers.expire(now=30.0) == [made]
    assert (made.holder, made.state) == (1, HandOffState.EXPIRED)
    assert offers.expire(now=30.0) == []
    assert offers.next_deadline() is None


def test_a_renewal_starts_the_time_to_live_anew() -> None:
    offers = new_offers()
    first, second = offer(offers, 1), offer(offers, 2)
    offers.renew(first.ticket, now=20.0)
    assert offers.next_deadline() == 30.0
    assert [ended.holder for ended in offers.expire(now=49.9)] == [2]
    assert [ended.holder for ended in offers.expire(now=50.0)] == [1]
    assert second.holder == 2


def test_a_pull_outlives_the_time_to_live_but_not_its_own_bound() -> None:
    offers = new_offers()
    made = offer(offers)
    begin(offers, made, now=29.0)
    offers.renew(made.ticket, now=38.0)
    assert offers.expire(now=38.9) == []
    assert offers.is_pulling(made.ticket.hand_off_id, now=38.9)
    assert not offers.is_pulling(made.ticket.hand_off_id, now=39.0)
    with pytest.raises(HandOffNotFoundError):
        offers.finish(made.ticket, now=39.0)
    assert [ended.state for ended in offers.expire(now=39.0)] == [HandOffState.EXPIRED]


def test_the_next_deadline_is_the_earliest_of_hand_offs_and_pulls() -> None:
    offers = new_offers()
    pulled = offer(offers, 1)
    begin(offers, pulled, now=1.0)
    offer(offers, 2, now=2.0)
    assert offers.next_deadline() == 11.0
    assert [ended.holder for ended in offers.expire(now=11.0)] == [1]
    assert offers.next_deadline() == 32.0


@any_call
def test_another_epoch_is_stale(call: Callable[..., object]) -> None:
    offers = new_offers()
    made = offer(offers)
    with pytest.raises(StaleEpochError):
        call(offers, replace(made.ticket, epoch=EPOCH + 1), 1.0)
    assert offers.counts.held == 1


@any_call
def test_a_restarted_worker_refuses_hand_offs_of_its_earlier_epoch(call: Callable[..., object]) -> None:
    made = offer(new_offers())
    with pytest.raises(StaleEpochError):
        call(Offers(EPOCH + 1, 30.0, 10.0), made.ticket, 1.0)


@any_call
def test_unknown_ended_expired_and_wrong_secret_give_the_same_error(call: Callable[..., object]) -> None:
    offers = new_offers()
    due, ended, alive = offer(offers, 1), offer(offers, 2), offer(offers, 3)
    begin(offers, alive)
    offers.abort(ended.ticket, now=1.0)
    asked = [
        (b"?" * 16, alive.ticket.secret, 2.0),
        (b"", b"", 2.0),
        (ended.ticket.hand_off_id, ended.ticket.secret, 2.0),
        (alive.ticket.hand_off_id, b"?" * 16, 2.0),
        (alive.ticket.hand_off_id, b"", 2.0),
        (alive.ticket.hand_off_id, due.ticket.secret, 2.0),
        (due.ticket.hand_off_id, due.ticket.secret, 30.0),
    ]
    messages = set()
    for hand_off_id, secret, now in asked:
        with pytest.raises(HandOffNotFoundError) as caught:
            call(offers, HandOffTicket(hand_off_id, secret, EPOCH), now)
        messages.add((caught.value.message, caught.value.field))
    assert len(messages) == 1
    assert offers.counts == HandOffCounts(held=1, pulling=1, taken=0, expired=0, cancelled=1)


def test_a_second_begin_is_refused_and_the_first_goes_on() -> None:
    offers = new_offers()
    made = offer(offers)
    begin(offers, made)
    with pytest.raises(HandOffStateError):
        begin(offers, made)
    assert offers.finish(made.ticket, now=2.0).state is HandOffState.TAKEN


def test_a_finish_without_a_begin_is_refused() -> None:
    offers = new_offers()
    made = offer(offers)
    with pytest.raises(HandOffStateError):
        offers.finish(made.ticket, now=1.0)
    assert offers.counts.held == 1


@pytest.mark.parametrize("pieces", [[3], [-1], [0, 0], [0, 1, 2, 3]])
def test_impossible_pieces_are_refused_and_start_nothing(pieces: list[int]) -> None:
    offers = new_offers()
    made = offer(offers)
    with pytest.raises(InvalidRequestError) as caught:
        offers.begin(made.ticket, pieces, now=1.0)
    assert caught.value.field == "pieces"
    assert offers.counts.held == 1


def test_too_many_pieces_are_refused_by_their_number() -> None:
    class Unread(list[int]):
        def __iter__(self) -> NoReturn:
            raise AssertionError("no piece may be looked at")

    offers = new_offers()
    made = offer(offers)
    with pytest.raises(InvalidRequestError, match="there are 3 pieces"):
        offers.begin(made.ticket, Unread([0] * 100_000), now=1.0)
    assert offers.counts.held == 1


def test_the_worker_can_withdraw_what_it_holds() -> None:
    offers = new_offers()
    made = offer(offers, 1)
    begin(offers, made)
    offer(offers, 2)
    for holder in (1, 2):
        ended = offers.withdraw(holder)
        assert ended is not None
        assert (ended.holder, ended.state) == (holder, HandOffState.CANCELLED)
        assert offers.withdraw(holder) is None
    assert offers.next_deadline() is None


def test_no_blocks_are_pulled_before_begin_or_after_an_abort() -> None:
    offers = new_offers()
    made = offer(offers)
    assert not offers.is_pulling(made.ticket.hand_off_id, now=0.0)
    begin(offers, made)
    assert offers.is_pulling(made.ticket.hand_off_id, now=1.0)
    offers.abort(made.ticket, now=1.0)
    assert not offers.is_pulling(made.ticket.hand_off_id, now=1.0)
