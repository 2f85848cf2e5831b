"""The router's book of promises."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quartet.discovery.base import Rank
from router.book import Booking, ItemsBooking, WorkerBook
from router.policy.base import Pending, Placement
from router.workers import WorkerTable
from tests.router.records import make_load, make_record


def test_a_booking_counts_in_full_until_a_report_names_it() -> None:
    book = WorkerBook(1, block_size=10)
    booking = book.reserve(0, num_reserved_tokens=95, num_queued_tokens=40)
    assert (book.accounts[0].num_promised_blocks, book.accounts[0].num_unreported_tokens) == (10, 40)
    number = booking.send()
    book.on_report(number - 1)
    assert (book.accounts[0].num_promised_blocks, book.accounts[0].num_unreported_tokens) == (10, 40)
    booking.grow_to(41)
    book.on_report(number - 1)
    book.on_report(number - 1)
    assert (book.accounts[0].num_promised_blocks, book.accounts[0].num_unreported_tokens) == (10, 0)
    book.on_report(number)
    assert (book.accounts[0].num_promised_blocks, book.accounts[0].num_unreported_tokens) == (5, 0)


def test_a_prompt_takes_all_its_blocks_at_once_so_nothing_is_promised_beside_what_is_reported() -> None:
    book = WorkerBook(1, block_size=10)
    booking = book.reserve_prompt(0, num_tokens=95, num_queued_tokens=40)
    number = booking.send()
    book.on_report(number - 1, arrived_number=number)  # it waits there for its room
    assert (book.accounts[0].num_promised_blocks, book.accounts[0].num_unreported_tokens) == (10, 0)
    book.on_report(number)
    assert book.accounts[0].num_promised_blocks == 0
    booking.release()
    assert book.accounts[0].num_promised_blocks == 0


def test_tokens_to_prefill_count_until_their_request_has_arrived() -> None:
    book = WorkerBook(1, block_size=10)
    first, second = (book.reserve(0, num_reserved_tokens=20, num_queued_tokens=20) for _ in range(2))
    first.send()
    second.send()
    book.on_report(0, arrived_number=1)  # it waits there for the running batch
    assert (book.accounts[0].num_promised_blocks, book.accounts[0].num_unreported_tokens) == (4, 20)
    second.release()
    assert (book.accounts[0].num_promised_blocks, book.accounts[0].num_unreported_tokens) == (2, 0)


def test_requests_count_once_whether_reported_or_not_and_those_of_others_too() -> None:
    book = WorkerBook(2, block_size=10)
    account, other_rank = book.accounts

    def num_requests() -> int:
        return account.num_requests + account.num_other_requests

    first, second, third = (book.reserve(0) for _ in range(3))
    first.send()
    second.send()
    assert num_requests() == 3
    book.on_report(0, arrived_number=1, num_requests=[5, 2])  # one of five is ours, it waits for the batch
    assert (num_requests(), other_rank.num_other_requests) == (7, 2)
    book.on_report(2, num_requests=[5])
    assert (num_requests(), other_rank.num_other_requests) == (6, 0)
    first.release()
    first.release()
    assert num_requests() == 5  # at once: no report has to come
    third.send()
    second.release()
    book.on_report(3, num_requests=[2])  # of before the end of the second one
    assert num_requests() == 2
    book.on_report(3, num_requests=[0])  # our third one has ended there, and its last tokens are on their way
    assert num_requests() == 1
    third.release()
    book.on_report(3, num_requests=[0])
    assert (num_requests(), account.num_reported_requests) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from(["reserve", "send", "leave", "release", "report"]), st.integers(0, 9))))
def test_items_count_until_they_are_encoded_however_reports_run_behind(steps: list[tuple[str, int]]) -> None:
    book = WorkerBook(1, block_size=1)
    [account] = book.accounts
    bookings: list[tuple[ItemsBooking, list[int]]] = []  # with the items that are left
    for step, number in steps:
        booking, left = bookings[number % len(bookings)] if bookings else (None, [0])
        if step == "reserve":
            bookings.append((book.reserve_items(number + 1), [number + 1]))
        elif step == "report":
            book.on_report(number, num_requests=[number])
        elif booking is not None and step == "send" and not booking.number and not booking.is_released:
            booking.send()
        elif booking is not None and step == "leave" and left[0]:
            booking.leave_one()
            left[0] -= 1
        elif booking is not None and step == "release":
            booking.release()
            left[0] = 0
        assert account.num_requests == sum(left[0] for _, left in bookings)
        assert 0 <= account.num_reported_requests <= account.num_requests
    for booking, _ in bookings:
        booking.release()
    assert (account.num_requests, account.num_reported_requests, book.num_requests) == (0, 0, 0)


def test_a_decoding_request_has_no_tokens_to_prefill_whatever_reports_say() -> None:
    book = WorkerBook(1, block_size=10)
    booking = book.reserve(0, num_reserved_tokens=100, num_queued_tokens=90)
    booking.send()
    booking.grow_to(91)
    assert book.accounts[0].num_unreported_tokens == 0


def test_held_blocks_leave_the_promise_one_report_late() -> None:
    book = WorkerBook(1, block_size=10)
    booking = book.reserve(0, num_reserved_tokens=100)
    book.on_report(booking.send())
    booking.grow_to(30)
    assert book.accounts[0].num_promised_blocks == 10
    book.on_report(1)  # it may have been sent before those tokens were sampled
    booking.grow_to(50)
    assert book.accounts[0].num_promised_blocks == 10
    book.on_report(1)
    assert book.accounts[0].num_promised_blocks == 7
    book.on_report(1)
    assert book.accounts[0].num_promised_blocks == 5


def test_blocks_that_a_request_holds_are_promised_no_more() -> None:
    book = WorkerBook(1, block_size=10)
    booking = book.reserve(0, num_reserved_tokens=40)
    book.on_report(booking.send())
    promised = []
    for num_tokens in (10, 11, 39, 40, 41, 95):
        booking.grow_to(num_tokens)
        book.on_report(1)
        book.on_report(1)
        promised.append(book.accounts[0].num_promised_blocks)
    assert promised == [3, 2, 0, 0, 0, 0]


def test_a_placement_that_is_never_sent_counts_until_released() -> None:
    book = WorkerBook(1, block_size=10)
    booking = book.reserve(0, num_reserved_tokens=40)
    book.on_report(99)
    assert book.accounts[0].num_promised_blocks == 4
    booking.release()
    booking.release()
    assert book.accounts[0].num_promised_blocks == 0
    assert book.num_requests == 0


def test_numbers_count_starts_to_one_worker() -> None:
    book = WorkerBook(2, block_size=10)
    assert [book.reserve(rank).send() for rank in (0, 1, 0)] == [1, 2, 3]


class Naive:
    """The same sums, worked out from scratch."""

    def __init__(self, booking: Booking, reserved: int, queued: int) -> None:
        self.booking, self.reserved, self.queued = booking, reserved, queued
        self.held = self.held_at_report = self.settled = 0
        self.has_arrived = self.is_reported = self.is_released = False

    @property
    def promised(self) -> int:
        if self.is_released:
            return 0
        return max(0, self.reserved - self.settled) if self.is_reported else self.reserved


@given(st.data())
def test_the_sums_are_those_of_the_bookings(data: st.DataObject) -> None:
    book = WorkerBook(1, block_size=10)
    bookings: list[Naive] = []
    for _ in range(data.draw(st.integers(1, 40))):
        step = data.draw(st.sampled_from(["reserve", "send", "report", "grow", "release"]))
        chosen = data.draw(st.sampled_from(bookings)) if bookings else None
        if step == "reserve" or chosen is None:
            tokens, queued = data.draw(st.integers(0, 100)), data.draw(st.integers(0, 100))
            booking = book.reserve(0, num_reserved_tokens=tokens, num_queued_tokens=queued)
            bookings.append(Naive(booking, -(-tokens // 10), queued))
        elif step == "send" and not chosen.booking.number:
            chosen.booking.send()
        elif step == "report":
            number = data.draw(st.integers(0, len(bookings)))
            arrived = data.draw(st.integers(0, len(bookings)))
            book.on_report(number, arrived_number=arrived)
            for naive in bookings:
                naive.settled, naive.held_at_report = naive.held_at_report, naive.held
                naive.is_reported |= 0 < naive.booking.number <= number
                naive.has_arrived |= 0 < naive.booking.number <= max(number, arrived)
        elif step == "grow":
            chosen.held = max(chosen.held, data.draw(st.integers(0, 12)))
            chosen.booking.grow_to(chosen.held * 10)
            chosen.has_arrived = True
        elif step == "release":
            chosen.booking.release()
            chosen.is_released = True
        account = book.accounts[0]
        assert account.num_promised_blocks == sum(naive.promised for naive in bookings)
        assert account.num_unreported_tokens == sum(
            naive.queued for naive in bookings if not naive.has_arrived and not naive.is_released
        )
        assert book.num_requests == sum(not naive.is_released for naive in bookings)


def test_a_remote_prefill_counts_tokens_at_its_prefill_rank_and_blocks_at_its_decode_rank() -> None:
    table = WorkerTable("router-a", heartbeat_timeout_s=30)
    prefill, decode = make_record("prefill-0"), make_record("decode-0")
    for record in (prefill, decode):
        table.put(record, 0)
        table.connected(record.key, make_load(record), 0)
    pending = Pending(num_tokens=100, num_reserved_tokens=150, num_most_tokens=150)
    reservation = table.reserve(Placement(Rank("prefill-0"), Rank("decode-0")), pending)
    snapshot = table.snapshot(table.pools(0)[0].key, 0)
    assert (snapshot.prefill[0].num_queued_tokens, snapshot.prefill[0].num_promised_blocks) == (100, 0)
    assert (snapshot.decode[0].num_queued_tokens, snapshot.decode[0].num_promised_blocks) == (0, 15)
    assert reservation.prefill is not None
    number = reservation.prefill.send()
    table.report(make_load(prefill, router_progress={"router-b.1": 5}), 0)
    assert table.snapshot(table.pools(0)[0].key, 0).prefill[0].num_queued_tokens == 100
    queued = make_load(prefill, router_progress={"router-a.1": number}, num_queued_prefill_tokens=60)
    table.report(queued, 0)
    assert table.snapshot(table.pools(0)[0].key, 0).prefill[0].num_queued_tokens == 60
    reservation.release()
    assert table.snapshot(table.pools(0)[0].key, 0).decode[0].num_free_for_booking == 100
