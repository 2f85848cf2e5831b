"""Which encode worker gets a request's media."""

from __future__ import annotations

import random
from collections import Counter

from quartet.discovery.base import Rank
from router.media.encode import choose_encode
from router.workers import EncodeCandidate

BUSY, IDLE, OTHER = (Rank(name) for name in ("busy", "idle", "other"))
CANDIDATES = [EncodeCandidate(BUSY, 9), EncodeCandidate(IDLE, 0), EncodeCandidate(OTHER, 0)]


def choices(num_cached: dict[Rank, int], *avoid: str, candidates: list[EncodeCandidate] = CANDIDATES) -> set[Rank]:
    rng = random.Random(0)
    chosen = Counter(choose_encode(candidates, num_cached, frozenset(avoid), rng) for _ in range(50))
    return set(chosen)


def test_who_has_most_of_the_items_is_asked_however_busy() -> None:
    assert choices({BUSY: 2, IDLE: 1}) == {BUSY}


def test_then_the_least_busy_and_ties_are_broken_at_random() -> None:
    assert choices({}) == {IDLE, OTHER}
    assert choices({BUSY: 1, IDLE: 1}) == {IDLE}


def test_who_just_failed_is_asked_only_where_nobody_else_is_left() -> None:
    assert choices({BUSY: 2}, "busy", "idle") == {OTHER}
    assert choices({BUSY: 2}, "busy", "idle", "other") == {BUSY}


def test_of_none_none_is_chosen() -> None:
    assert choices({}, candidates=[]) == {None}
