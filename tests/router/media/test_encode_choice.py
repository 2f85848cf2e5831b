"""Which encode worker gets a request's media."""

from __future__ import annotations

import random
from collections import Counter

from quartet.discovery.base import Rank
from router.media.encode_queue import choose_encode
from router.workers import EncodeCandidate

BUSY, IDLE, OTHER = (Rank(name) for name in ("busy", "idle", "other"))
CANDIDATES = [EncodeCandidate(BUSY, 9), EncodeCandidate(IDLE, 0), EncodeCandidate(OTHER, 0)]


def choices(num_cached: dict[Rank, int], *avoid: str, candidates: list[EncodeCandidate] = CANDIDATES) -> set[Rank]:
    rng = random.Random(0)
    chosen = Counter(choose_encode(candidates, num_cached, frozenset(avoid), rng) for _ in range(50))
    return set(chosen)


def test_the_encode_worker_with_the_most_items_is_chosen_however_busy_it_is() -> None:
    assert choices({BUSY: 2, IDLE: 1}) == {BUSY}


def test_among_equal_matches_the_least_busy_is_chosen_and_ties_are_broken_at_random() -> None:
    assert choices({}) == {IDLE, OTHER}
    assert choices({BUSY: 1, IDLE: 1}) == {IDLE}


def test_an_encode_worker_that_just_failed_is_chosen_only_if_no_other_is_left() -> None:
    assert choices({BUSY: 2}, "busy", "idle") == {OTHER}
    assert choices({BUSY: 2}, "busy", "idle", "other") == {BUSY}


def test_without_encode_workers_none_is_chosen() -> None:
    assert choices({}, candidates=[]) == {None}


def test_a_worker_without_places_for_all_items_is_not_chosen_whatever_it_has_cached() -> None:
    full, half = EncodeCandidate(BUSY, 4, 4), EncodeCandidate(IDLE, 2, 4)

    def chosen(num_items: int, *candidates: EncodeCandidate, avoid: frozenset[str] = frozenset()) -> Rank | None:
        return choose_encode(candidates, {BUSY: 2}, avoid, random.Random(0), num_items=num_items)

    assert chosen(2, full, half) == IDLE
    assert chosen(3, full, half) is None
    assert chosen(1, full, half, avoid=frozenset({"idle"})) is None, "one that has failed it is no way out of a wait"
    assert chosen(9, EncodeCandidate(IDLE, 0, 4)) == IDLE
