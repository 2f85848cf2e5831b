"""kv_aware's view of every place, told by the very lanes that it plans with."""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.base import Candidate, Option, Pending, Snapshot
from router.policy.lane import Job, Lane
from router.policy.obstacle import JUST_FAILED, decode_obstacle, prefill_obstacle
from router.policy.room import Tally, decode_choices


def explain_lanes(
    pending: Pending, job: Job, prefill: Sequence[Lane], decode: Sequence[Lane], snapshot: Snapshot
) -> list[Option]:
    """How ``pending``, whose ``job`` it is, stands at each place of ``snapshot``, of which these are the lanes.

    Terms in seconds add up to the cost. ``taken_share``, the share of a decode place's blocks that is spoken for, is no
    part of that: it decides where a request is decoded that is prefilled elsewhere. A decode place without obstacle and
    without cost is one that would only decode it.
    """
    tally = Tally()
    can_decode = {place.place for place in decode_choices(snapshot.decode, pending, tally)}
    options = []
    for lane, place in zip(prefill, snapshot.prefill, strict=True):
        is_able = job.num_missing[lane.number] is not None
        obstacle = "" if is_able else prefill_obstacle(place, pending) or JUST_FAILED
        options.append(_option(lane, job, pending, place, is_decode=False, obstacle=obstacle))
    for lane, place in zip(decode, snapshot.decode, strict=True):
        obstacle = "" if place.place in can_decode else decode_obstacle(place, pending, tally) or JUST_FAILED
        options.append(_option(lane, job, pending, place, is_decode=True, obstacle=obstacle))
    return options


def _option(lane: Lane, job: Job, pending: Pending, place: Candidate, *, is_decode: bool, obstacle: str) -> Option:
    is_weighed = not obstacle and job.num_missing[lane.number] is not None
    terms = lane.terms(job) if is_weighed else {}
    if is_decode and not obstacle:
        terms["taken_share"] = Tally().num_taken(place) / max(place.num_total_blocks, 1)
    return Option(
        place=place.place,
        is_decode=is_decode,
        num_cached_tokens=pending.num_cached_tokens.get(place.place, 0),
        cost=lane.turn([job]).cost if is_weighed else None,
        cost_unit="s" if is_weighed else "",
        terms=terms,
        obstacle=obstacle,
    )
