"""What a worker reports of placed starts, and for how long."""

from __future__ import annotations

import pytest

from quartet.events.load import PlacementProgress
from services.workers import requests
from services.workers.requests import CountedPlacements


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_news_are_reported_by_router_for_some_seconds() -> None:
    clock = Clock()
    counted = CountedPlacements(clock)
    counted.start("a", 5)
    counted.start("b", 5)
    send(counted)
    clock.now += 2
    counted.end("a", 5, 70)
    counted.end("a", 4, 0)
    send(counted)
    assert counted.progress() == {"a": PlacementProgress((5,), (4, 5), (0, 70)), "b": PlacementProgress((5,))}
    clock.now += 1.5
    assert counted.progress() == {"a": PlacementProgress((), (4, 5), (0, 70))}
    clock.now += 2
    assert counted.progress() == {}


@pytest.mark.parametrize("interval_s", [0.05, 0.19, 0.4, 0.5, 0.7, 1.0])
def test_each_placement_is_reported_several_times_but_not_in_every_load(interval_s: float) -> None:
    clock = Clock()
    counted = CountedPlacements(clock)
    num_reported: list[int] = []
    for number in range(1, 101):
        counted.end("a", number, number)
        clock.now += interval_s
        num_reported += send(counted).get("a", PlacementProgress()).ended
    times = [num_reported.count(number) for number in range(1, 101)][: -int(4 / interval_s)]
    assert times
    assert 2 < min(times) <= max(times) <= 12


def test_asking_for_progress_and_unsent_loads_do_not_use_up_news() -> None:
    clock = Clock()
    counted = CountedPlacements(clock)
    counted.end("a", 5, 70)
    send(counted)
    clock.now += 0.3  # it is no longer fresh: only a recapitulation has it
    whole = {"a": PlacementProgress((), (5,), (70,))}
    assert send(counted) == {}
    assert counted.progress() == whole
    clock.now += 0.3
    assert [counted.progress(), counted.news(), counted.progress(), counted.news()] == [whole] * 4
    counted.sent()
    assert counted.news() == {}
    assert counted.progress() == whole


def test_news_from_before_a_worker_was_stopped_are_reported_as_others_are() -> None:
    clock = Clock()
    counted = CountedPlacements(clock)
    counted.start("a", 4)
    counted.end("a", 5, 70)
    assert counted.news() == {"a": PlacementProgress((4,), (5,), (70,))}  # for a load that is not sent
    clock.now += 100.0
    counted.end("a", 6, 80)
    whole = {"a": PlacementProgress((4,), (6, 5), (80, 70))}
    assert [counted.progress(), send(counted)] == [whole, whole]
    clock.now += 3.4
    assert [counted.progress(), send(counted)] == [whole, whole]
    clock.now += 0.2
    assert [counted.progress(), send(counted)] == [{}, {}]


def test_news_of_after_a_load_was_made_wait_for_the_next_load() -> None:
    clock = Clock()
    counted = CountedPlacements(clock)
    counted.news()
    counted.end("a", 5, 70)
    counted.sent()
    clock.now += 100.0
    assert send(counted) == {"a": PlacementProgress((), (5,), (70,))}


def test_requests_that_no_router_placed_are_not_reported() -> None:
    counted = CountedPlacements(Clock())
    counted.start("", 5)
    counted.end("a", 0, 70)
    assert counted.progress() == {}


def test_memory_is_bounded() -> None:
    counted = CountedPlacements(Clock())
    for number in range(1, requests._MAX_REPEATED + 11):
        counted.end("a", number, number)
    told = counted.progress()["a"].ended
    assert (told[-1], told[0], len(told)) == (11, requests._MAX_REPEATED + 10, requests._MAX_REPEATED)


def send(counted: CountedPlacements) -> dict[str, PlacementProgress]:
    """What a load has that is made and sent now."""
    news = counted.news()
    counted.sent()
    return news
