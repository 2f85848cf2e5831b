"""What stays booked for clients that were sent to a worker and may never come."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.events.load import PlacementProgress
from router.book import PlacedBooking, PlacedState, WorkerBook

LAPSES_AT, ENDS_AT = 25.0, 600.0


def make_book() -> WorkerBook:
    return WorkerBook(1, block_size=10)


def place(
    book: WorkerBook,
    *,
    num_reserved_tokens: int = 95,
    num_queued_tokens: int = 0,
    on_end: Callable[[int], None] | None = None,
) -> PlacedBooking:
    """Book as a placement does: for the attempt, then for the client, then the attempt is over."""
    booking = book.reserve(0, num_reserved_tokens=num_reserved_tokens, num_queued_tokens=num_queued_tokens)
    placed = booking.commit("ab" * 16, 0, num_first_tokens=41, lapses_at=LAPSES_AT, ends_at=ENDS_AT, on_end=on_end)
    booking.release()
    return placed


def promised(book: WorkerBook) -> tuple[int, int, int]:
    account = book.accounts[0]
    return account.num_promised_blocks, account.num_placed_tokens, book.num_requests


def test_a_placement_counts_with_its_first_blocks_until_a_report_says_that_it_started() -> None:
    book = make_book()
    placed = place(book, num_queued_tokens=40)
    book.on_report(99)
    assert promised(book) == (5, 40, 1)
    book.on_report(99, PlacementProgress(started=(placed.number + 1,)))
    assert promised(book) == (5, 40, 1)
    for _ in range(3):  # reported several times
        book.on_report(99, PlacementProgress(started=(placed.number,)))
        # These are in the worker's own figures from now on; five more it may take.
        assert promised(book) == (5, 0, 1)
    book.on_report(99, PlacementProgress(started=(placed.number,), ended=(placed.number,)))
    assert promised(book) == (0, 0, 0)
    book.on_report(99, PlacementProgress(started=(placed.number,), ended=(placed.number,)))
    assert promised(book) == (0, 0, 0)


def test_a_refused_placement_is_booked_no_more() -> None:
    book = make_book()
    book.on_report(0, PlacementProgress(ended=(place(book).number,)))
    assert promised(book) == (0, 0, 0)


def test_placements_have_numbers_of_their_own() -> None:
    book = make_book()
    started = book.reserve(0, num_reserved_tokens=20)
    assert (started.send(), place(book).number, place(book).number) == (1, 1, 2)
    book.on_report(1)
    assert promised(book) == (12, 0, 3)
    book.on_report(1, PlacementProgress(ended=(2,)))
    assert promised(book) == (7, 0, 2)


def test_an_unused_placement_lapses_with_its_signature() -> None:
    book = make_book()
    place(book, num_queued_tokens=40)
    book.placed.poll(LAPSES_AT - 0.1)
    assert promised(book) == (5, 40, 1)
    book.placed.poll(LAPSES_AT)
    assert promised(book) == (0, 0, 0)


def test_a_placement_that_starts_after_it_lapsed_counts_again() -> None:
    book = make_book()
    placed = place(book)
    book.placed.poll(LAPSES_AT)
    book.on_report(0, PlacementProgress(started=(placed.number,)))
    assert promised(book) == (5, 0, 1)
    book.placed.poll(LAPSES_AT + 1)
    assert promised(book) == (5, 0, 1)


def test_a_placement_whose_end_was_never_reported_ends_with_its_request() -> None:
    book = make_book()
    placed = place(book)
    book.on_report(0, PlacementProgress(started=(placed.number,)))
    book.placed.poll(ENDS_AT)
    assert promised(book) == (0, 0, 0)
    assert placed.state is PlacedState.ENDED


def test_a_released_placement_is_gone_at_once() -> None:
    book = make_book()
    placed = place(book)
    placed.release()
    placed.release()
    assert promised(book) == (0, 0, 0)
    book.on_report(0, PlacementProgress(started=(placed.number,)))
    assert promised(book) == (0, 0, 0)


def test_a_placements_tokens_are_told_once_when_a_report_has_them() -> None:
    book, told = make_book(), list[int]()
    for _ in range(4):
        place(book, on_end=told.append)
    for _ in range(3):  # reported several times
        book.on_report(0, PlacementProgress(started=(1,), ended=(2, 1), num_output_tokens=(0, 700)))
    assert told == [0, 700]
    book.placed.poll(LAPSES_AT)
    book.on_report(0, PlacementProgress(ended=(3,)))  # by a worker of an earlier version
    book.placed.release_all()
    assert (told, promised(book)) == ([0, 700], (0, 0, 0))


def test_a_placement_that_reserves_less_than_its_first_blocks_never_counts_below_zero() -> None:
    book = make_book()
    placed = place(book, num_reserved_tokens=30)
    book.on_report(0, PlacementProgress(started=(placed.number,)))
    assert promised(book) == (0, 0, 1)


def test_polling_visits_a_placement_only_when_the_time_changes_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    book = make_book()
    for _ in range(100):
        place(book)
    polls: list[int] = []
    poll = PlacedBooking.poll
    monkeypatch.setattr(PlacedBooking, "poll", lambda self, now: polls.append(self.number) or poll(self, now))
    for now in (0.0, LAPSES_AT - 1, LAPSES_AT, LAPSES_AT + 1, ENDS_AT - 1, ENDS_AT, ENDS_AT + 1):
        book.placed.poll(now)
    assert len(polls) == 200
    assert promised(book) == (0, 0, 0)


_EVENTS = st.lists(st.tuples(st.sampled_from(["place", "started", "ended", "release", "time"]), st.integers(0, 5)))


@given(events=_EVENTS)
def test_the_sums_are_those_of_the_bookings_for_any_order_of_events(events: list[tuple[str, int]]) -> None:
    book, placed, now = make_book(), [], 0.0
    for event, index in events:
        if event == "place":
            placed.append(place(book, num_queued_tokens=7))
        elif event == "time":
            now += 10.0 * index
            book.placed.poll(now)
        elif index < len(placed) and event == "release":
            placed[index].release()
        elif index < len(placed):
            book.on_report(0, PlacementProgress(**{event: (placed[index].number,)}))
        states = [booking.state for booking in placed]
        waiting, started = states.count(PlacedState.WAITING), states.count(PlacedState.STARTED)
        assert promised(book) == (5 * (waiting + started), 7 * waiting, waiting + started)
    book.placed.poll(ENDS_AT)
    assert promised(book) == (0, 0, 0)
