"""Who is planned: those that find room, in the order of the queue, so that those that find none are not starved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quartet.discovery.place import Place
from router.policy.base import Candidate, Pending, Snapshot
from router.policy.room import Tally, can_ever_hold


@dataclass(frozen=True)
class Planned:
    """A request that is planned.

    Attributes:
        index: its position among those that wait.
        pending: what is known of it.
        fenced: places that are kept for those ahead of it: it is not decoded there.
    """

    index: int
    pending: Pending
    fenced: frozenset[Place]


def choose_planned(waiting: Sequence[Pending], snapshot: Snapshot, limit: int) -> list[Planned]:
    """The first ``limit`` of ``waiting`` that find room now, and all those further back that bind at once.

    Whoever finds none fences the place with the most room, for all behind it: the room there only grows.
    """
    tally, fenced = Tally(), frozenset[Place]()
    found: list[Planned] = []
    for index, pending in enumerate(waiting):
        if len(found) >= limit and not pending.binds_at_once:
            continue
        if any(_can_go(place, pending, fenced) and tally.has_room(place, pending) for place in snapshot.decode):
            found.append(Planned(index, pending, fenced))
            continue
        eligible = [place for place in snapshot.decode if _can_go(place, pending, fenced)]
        if eligible:
            fenced |= {max(eligible, key=tally.num_free).place}
    return found


def _can_go(place: Candidate, pending: Pending, fenced: frozenset[Place]) -> bool:
    return place.place not in fenced and can_ever_hold(place, pending)
