"""Starts of which other routers tell, before the workers report them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quartet.discovery.base import Rank, WorkerRecord
from quartet.events.bookings import BookedStart, RouterBookings
from router.book import numbering
from router.policy.base import Candidate, Pending, Placement
from router.workers import PoolKey, WorkerTable
from tests.router.records import make_load, make_record

RECORD = make_record()
NAME = numbering("router-b", RECORD.epoch)


def make_table(record: WorkerRecord = RECORD) -> WorkerTable:
    table = WorkerTable("router-a", heartbeat_timeout_s=30.0)
    table.put(record, 0.0)
    table.connected(record.key, make_load(record), 0.0)
    return table


def start(number: int, tokens: int = 100, blocks: int = 4, **changes: int | str) -> BookedStart:
    return replace(BookedStart(RECORD.worker_id, RECORD.epoch, 0, number, tokens, blocks), **changes)  # type: ignore[arg-type]


def tell(table: WorkerTable, *starts: BookedStart, now: float = 1.0, router_id: str = "router-b") -> None:
    table.hear(RouterBookings(router_id, starts), now)


def candidate(table: WorkerTable, now: float = 1.0) -> Candidate:
    [found] = table.snapshot(PoolKey(RECORD.model_name, RECORD.model_fingerprint), now).decode
    return found


def counts(table: WorkerTable) -> tuple[int, int, int]:
    found = candidate(table)
    assert found.num_queued_tokens == found.num_unbegun_tokens
    return found.num_queued_tokens, found.num_promised_blocks, found.num_requests


def test_what_another_router_sent_counts_until_a_report_says_that_it_has_arrived() -> None:
    table = make_table()
    tell(table, start(1), start(2, 50, 2))
    assert counts(table) == (150, 6, 2)
    table.report(replace(make_load(RECORD), router_arrivals={NAME: 1}), 1.1)
    assert counts(table) == (50, 2, 1)
    table.report(replace(make_load(RECORD), router_arrivals={NAME: 2}), 1.2)
    assert counts(table) == (0, 0, 0)


def test_a_start_that_a_report_counts_already_is_not_counted_again() -> None:
    table = make_table()
    table.report(replace(make_load(RECORD), router_arrivals={NAME: 1}), 1.0)
    tell(table, start(1), start(2))
    assert counts(table) == (100, 4, 1)


def test_a_start_that_never_arrives_counts_for_a_second() -> None:
    table = make_table()
    tell(table, start(1), now=1.0)
    table.tick(1.9)
    assert counts(table) == (100, 4, 1)
    table.tick(2.0)
    assert counts(table) == (0, 0, 0)


def test_of_very_many_starts_the_newest_count() -> None:
    table = make_table()
    tell(table, *[start(number, 1, 1) for number in range(1, 2001)])
    tokens, blocks, requests = counts(table)
    assert tokens == blocks == requests == 512
    table.report(replace(make_load(RECORD), router_arrivals={NAME: 1999}), 1.1)
    assert counts(table) == (1, 1, 1)


@pytest.mark.parametrize(
    "other", [start(1, worker_id="nobody"), start(1, worker_epoch=RECORD.epoch ^ 1), start(1, data_parallel_rank=1)]
)
def test_starts_at_ranks_that_are_unknown_here_are_ignored(other: BookedStart) -> None:
    table = make_table()
    tell(table, other)
    assert counts(table) == (0, 0, 0)


def test_a_router_does_not_hear_itself() -> None:
    table = make_table()
    tell(table, start(1), router_id="router-a")
    assert counts(table) == (0, 0, 0)
    assert candidate(table) and table.snapshot(PoolKey(RECORD.model_name, RECORD.model_fingerprint), 1.0).peers
    assert table.snapshot(PoolKey(RECORD.model_name, RECORD.model_fingerprint), 1.0).peers.num_routers == 1


def test_routers_take_turns_once_all_that_are_active_tell_what_they_send() -> None:
    table = make_table()
    pool = PoolKey(RECORD.model_name, RECORD.model_fingerprint)
    table.set_clock(50.0)
    table.report(make_load(RECORD), 0.5)
    tell(table, start(1), now=1.0)
    peers = table.snapshot(pool, 1.0).peers
    assert (peers.number, peers.num_routers, peers.tell_bookings, peers.clock_ahead_s) == (0, 2, True, 50.0)
    silent = numbering("router-c", RECORD.epoch)
    table.report(replace(make_load(RECORD), router_arrivals={NAME: 1, silent: 1}), 1.5)
    peers = table.snapshot(pool, 1.5).peers
    assert (peers.num_routers, peers.tell_bookings) == (3, False)
    tell(table, start(1), now=2.0, router_id="router-c")
    assert table.snapshot(pool, 2.0).peers.tell_bookings
    table.tick(20.0)
    assert table.snapshot(pool, 20.0).peers.num_routers == 1


def test_the_table_says_what_is_sent_where_and_what_it_takes() -> None:
    table = make_table()
    sent: list[BookedStart] = []
    table.on_sent = sent.append
    pending = Pending(num_tokens=90, num_reserved_tokens=RECORD.block_size * 3, num_most_tokens=500)
    reservation = table.reserve(Placement(None, Rank(RECORD.worker_id)), pending)
    assert sent == []
    reservation.decode.send()
    assert sent == [start(1, 90, 3)]
