"""How far each router's starts are counted in the load that its worker reports."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

# Routers that came and went; one that is forgotten only keeps its own bookings in full a little longer.
_MAX_ROUTERS = 1024
# By then a router that lives has long heard, many times over, that its last start is counted in.
_FORGET_AFTER_S = 600.0


@dataclass
class _Router:
    highest: int = 0
    heard_at: float = 0.0
    outstanding: set[int] = field(default_factory=set)


class CountedStarts:
    """Watermarks by router: all starts up to one are counted in.

    Numbers rise, but some never arrive: those of starts that a broken stream lost. So the watermark is the highest
    number that arrived, held back by those that arrived and are not counted in yet.

    They ride in every load that is sent, and each start of a router brings a new name: a router with no start left to
    count in that has been quiet for ten minutes is left out.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know no router; ``clock`` gives seconds."""
        self._clock = clock
        self._routers: OrderedDict[str, _Router] = OrderedDict()

    def arrive(self, router_id: str, number: int) -> None:
        """A start arrived, whatever becomes of it; it holds the watermark back until ``count_in``.

        Starts without a router, or without a number, are nobody's to count.
        """
        if not (router_id and number):
            return
        router = self._routers.setdefault(router_id, _Router())
        self._routers.move_to_end(router_id)
        router.heard_at = self._clock()
        router.highest = max(router.highest, number)
        router.outstanding.add(number)
        if len(self._routers) > _MAX_ROUTERS:
            self._routers.popitem(last=False)

    def count_in(self, router_id: str, number: int) -> None:
        """The load shows that start, or it has ended. May be called twice."""
        router = self._routers.get(router_id)
        if router is not None:
            router.heard_at = self._clock()
            router.outstanding.discard(number)

    def watermarks(self) -> dict[str, int]:
        """By router, the last number up to which every start is counted in."""
        self._forget_quiet()
        return {
            router_id: min(router.outstanding, default=router.highest + 1) - 1
            for router_id, router in self._routers.items()
        }

    def arrivals(self) -> dict[str, int]:
        """By router, the highest number that arrived."""
        return {router_id: router.highest for router_id, router in self._routers.items()}

    def _forget_quiet(self) -> None:
        oldest = self._clock() - _FORGET_AFTER_S
        for router_id, router in list(self._routers.items()):
            if router.heard_at < oldest and not router.outstanding:
                del self._routers[router_id]
