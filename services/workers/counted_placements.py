"""What became of the starts that routers placed for clients, told for some seconds to whoever booked them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quartet.events.load import PlacementProgress

# Loads come once a second or more, and some are lost.
_TELL_FOR_S = 3.5
# Under load they come 20 times a second. To tell everything each time would cost router and worker more than the
# starts themselves: what is older than this comes only in every so many seconds' recapitulation.
_FRESH_S = 0.2
_RECAP_INTERVAL_S = 0.5
# What is told no more is found out by the router's own clock. 10,000 are 30 kB of a load.
_MAX_TOLD = 10_000


@dataclass(frozen=True)
class _News:
    router_id: str
    number: int
    at: float


class CountedPlacements:
    """Numbers of placed starts that were counted in, and of those that ended. They come in any order, or never."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know of none; ``clock`` gives seconds."""
        self._clock = clock
        self._recap_at = -_RECAP_INTERVAL_S
        self._recap_given_at: float | None = None
        self._started: deque[_News] = deque()
        self._ended: deque[_News] = deque()

    def start(self, router_id: str, number: int) -> None:
        """From the next load on it is counted in."""
        self._add(self._started, router_id, number)

    def end(self, router_id: str, number: int) -> None:
        """It is counted no more; it may never have been."""
        self._add(self._ended, router_id, number)

    def progress(self) -> dict[str, PlacementProgress]:
        """Everything of the last seconds, by router, for one who asks; that changes nothing for those who listen."""
        return self._since(self._clock() - _TELL_FOR_S)

    def news(self) -> dict[str, PlacementProgress]:
        """For the next load, by router; call ``told`` once it is out. Each is told three times or more."""
        now = self._clock()
        is_recap = now - self._recap_at >= _RECAP_INTERVAL_S
        self._recap_given_at = now if is_recap else None
        return self._since(now - (_TELL_FOR_S if is_recap else _FRESH_S))

    def told(self) -> None:
        """The last news are out: not all that are made come to that."""
        if self._recap_given_at is not None:
            self._recap_at = self._recap_given_at

    def _since(self, since: float) -> dict[str, PlacementProgress]:
        started, ended = _by_router(self._started, since), _by_router(self._ended, since)
        return {
            router_id: PlacementProgress(tuple(started.get(router_id, ())), tuple(ended.get(router_id, ())))
            for router_id in {**started, **ended}
        }

    def _add(self, told: deque[_News], router_id: str, number: int) -> None:
        if not (router_id and number):
            return
        now = self._clock()
        told.append(_News(router_id, number, now))
        while len(told) > _MAX_TOLD or told[0].at <= now - _TELL_FOR_S:
            told.popleft()


def _by_router(told: deque[_News], since: float) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for news in reversed(told):
        if news.at <= since:
            break
        numbers.setdefault(news.router_id, []).append(news.number)
    return numbers
