"""Forecasts when each place would give each request its first token, and assigns all that wait together, late.

A request is bound to a place only when that place is about to run out of prompts to compute: until then it stays in the
router's queue, where it can still be assigned otherwise when others come. Long ones wait a moment for those that come
with them, and of several routers each leaves the others' places to them for a while (``router.policy.peers``). Places
that have not told how long their steps take are bound to at once: nobody can say there when that moment is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.policy.base import Candidate, Decision, Option, Pending, Placement, Snapshot
from router.policy.fences import Planned, choose_planned
from router.policy.joint import JointAssignment
from router.policy.kv_aware_explain import explain_lanes
from router.policy.lane import CostWeights, Job, Lane, Turn
from router.policy.peers import PeerConfig, Turns
from router.policy.room import Tally, can_ever_hold, can_prefill, can_prefill_here, decode_choices, welcome
from router.policy.shortlist import shortlist

# Of seconds: waiting for others would be felt beside a prefill that takes no longer.
_SHORT_PREFILL_S = 0.05
# Timers count milliseconds, and forecasts are not better.
_MIN_LOOK_S = 0.0005


@dataclass(frozen=True, kw_only=True)
class KvAwareConfig:
    """What the policy weighs, and when it binds.

    Attributes:
        margin_s: a place gets its next group so long before it has computed all that it was given.
        num_planned_per_place: of the requests that wait, so many for each place are planned together,
        max_planned: but not more than that.
        shortlist_length: with more than twice as many places, only the most promising are planned for (see
            ``router.policy.shortlist``).
        local_prefill_max_tokens: longer prompts are not prefilled where they are decoded, while another place can
            prefill them; ``None``: that hangs on the cost alone.
        transfer_s_per_token: seconds that moving a token's KV from where it is prefilled to where it is decoded takes.
            The default is that of 8 billion parameters with grouped queries (131,072 bytes) at 50 GB/s.
        overtaken_s: a request that has waited for so long is overtaken by nobody that stands behind it in the queue.
        gather_s: a request waits at most so long for others that come with it, to be planned together,
        gather_share: but for no more than this share of the time by which its prefill is longer than a short one.
        peers: how several routers keep out of each other's way.
    """

    weights: CostWeights = field(default_factory=CostWeights)
    margin_s: float = 0.005
    num_planned_per_place: int = 3
    max_planned: int = 32
    shortlist_length: int = 8
    local_prefill_max_tokens: int | None = None
    transfer_s_per_token: float = 2.6e-6
    overtaken_s: float = 3.0
    gather_s: float = 0.002
    gather_share: float = 0.02
    peers: PeerConfig = field(default_factory=PeerConfig)


@dataclass(frozen=True)
class _Route:
    """A lane of the plan: the place that prefills, and where its requests are decoded if not there."""

    place: Candidate
    is_decode: bool


class KvAwarePolicy:
    """See the module."""

    def __init__(self, rng: random.Random, config: KvAwareConfig | None = None) -> None:
        """``rng`` breaks ties."""
        self._rng = rng
        self._config = config or KvAwareConfig()

    @property
    def name(self) -> str:
        """What its users know it by."""
        return "kv_aware"

    def assign(self, waiting: Sequence[Pending], snapshot: Snapshot) -> Decision:
        """Choose places for those whose turn it is; the others wait for theirs."""
        placements: list[Placement | None] = [None] * len(waiting)
        routes, config = _routes(snapshot), self._config
        limit = min(config.num_planned_per_place * len(routes), config.max_planned)
        planned = choose_planned(waiting, snapshot, limit)
        if not planned:
            return Decision(placements)
        routes = self._worth_planning(routes, planned, snapshot.now)
        lanes = [self._lane(number, route, snapshot.now) for number, route in enumerate(routes)]
        assignment = JointAssignment(lanes, self._jobs(planned, routes, snapshot), self._rng)
        tally, next_look_s = Tally(), math.inf
        for lane, route, turn in zip(lanes, routes, assignment.turns, strict=True):
            if not turn.groups:
                continue
            num_bound, look_in_s = _num_bound(route.place, lane, turn, config.margin_s)
            next_look_s = min(next_look_s, look_in_s)
            for position, group in enumerate(turn.groups):
                for job in group:
                    one = planned[job.number]
                    if position < num_bound or one.pending.binds_at_once:
                        cost = _added_cost(lane, turn, job)
                        placements[one.index] = self._placement(one, route, cost, snapshot, tally)
        if len(planned) >= limit and any(placements):
            next_look_s = 0.0  # there may be more places than were planned for
        return Decision(placements, None if next_look_s == math.inf else max(next_look_s, _MIN_LOOK_S))

    def explain(self, pending: Pending, snapshot: Snapshot) -> Sequence[Option]:
        """How ``pending`` stands at each place, were it all that waits."""
        routes = _routes(snapshot)
        if not routes:
            return []
        [job] = self._jobs([Planned(0, pending, frozenset())], routes, snapshot)
        lanes = [self._lane(number, route, snapshot.now) for number, route in enumerate(routes)]
        return explain_lanes(pending, job, lanes[: len(snapshot.prefill)], lanes[len(snapshot.prefill) :], snapshot)

    def _worth_planning(self, routes: list[_Route], planned: Sequence[Planned], now: float) -> list[_Route]:
        """All routes, unless there are very many."""
        length = self._config.shortlist_length
        if len(routes) <= 2 * length:
            return routes
        tally = Tally()
        numbers = shortlist(
            [(one.pending, self._can_go(one, routes, tally)) for one in planned],
            [route.place for route in routes],
            [_free_in_s(route.place, now) for route in routes],
            length,
            self._rng.randrange(len(routes)),
        )
        return [routes[number] for number in numbers]

    def _lane(self, number: int, route: _Route, now: float) -> Lane:
        place = route.place
        free = Lane(
            number,
            free_in_s=max(place.step_ends_at - now, 0.0),
            num_decoding=place.num_decoding,
            num_context_tokens=place.num_context_tokens,
            max_step_tokens=place.max_step_tokens,
            step_time=place.step_time,
            weights=self._config.weights,
            transfer_s_per_token=0.0 if route.is_decode else self._config.transfer_s_per_token,
        )
        if place.num_unbegun_tokens:
            free.free_in_s += free.prefill_s(place.num_unbegun_tokens)
        return free

    def _jobs(self, planned: Sequence[Planned], routes: Sequence[_Route], snapshot: Snapshot) -> list[Job]:
        tally = Tally()
        everybody = (*snapshot.prefill, *snapshot.decode)
        turns = Turns([route.place for route in routes], everybody, snapshot.peers, self._config.peers)
        jobs: list[Job] = []
        for number, one in enumerate(planned):
            pending = one.pending
            age_s = max(snapshot.now - pending.arrived_at, 0.0)
            num_missing = self._num_missing(one, routes, tally)
            job = Job(
                number=number,
                num_tokens=pending.num_tokens,
                age_s=age_s,
                priority=pending.priority,
                is_due=age_s >= self._config.overtaken_s,
                num_missing=num_missing,
                num_shared=[
                    0 if other is one else pending.num_shared_tokens(other.pending, routes[0].place.block_size)
                    for other in planned
                ],
                hold=turns.hold(num_missing, age_s, self._gather_s(num_missing, routes, age_s)),
            )
            jobs.append(job)
        return jobs

    def _gather_s(self, num_missing: Sequence[int | None], routes: Sequence[_Route], age_s: float) -> float:
        """For how much longer others are waited for that may come with it."""
        if age_s >= self._config.gather_s:
            return 0.0
        least_s = min(
            [route.place.step_time.prefill_s(count) for route, count in zip(routes, num_missing, strict=True) if count],
            default=0.0,
        )
        gather_s = self._config.gather_share * (least_s - _SHORT_PREFILL_S)
        return max(min(gather_s, self._config.gather_s) - age_s, 0.0)

    def _num_missing(self, one: Planned, routes: Sequence[_Route], tally: Tally) -> list[int | None]:
        """By route; ``None`` where it can't be prefilled."""
        pending, can_go = one.pending, self._can_go(one, routes, tally)
        able = [can_go(number) for number in range(len(routes))]
        places = [route.place for can, route in zip(able, routes, strict=True) if can]
        welcomed = {place.place for place in welcome(places, pending)}
        return [
            pending.num_missing_tokens(route.place.place) if can and route.place.place in welcomed else None
            for can, route in zip(able, routes, strict=True)
        ]

    def _can_go(self, one: Planned, routes: Sequence[_Route], tally: Tally) -> Callable[[int], bool]:
        """Whether ``one`` can take a route, by its number."""
        pending, fenced = one.pending, one.fenced
        limit = self._config.local_prefill_max_tokens
        is_remote_only = (
            limit is not None
            and pending.num_tokens > limit
            and any(not route.is_decode and can_prefill(route.place, pending) for route in routes)
        )

        def can_go(number: int) -> bool:
            route = routes[number]
            if not route.is_decode:
                return can_prefill(route.place, pending)
            if is_remote_only or route.place.place in fenced or not can_prefill_here(route.place, pending):
                return False
            return can_ever_hold(route.place, pending) and tally.has_room(route.place, pending)

        return can_go

    def _placement(
        self, one: Planned, route: _Route, cost: float, snapshot: Snapshot, tally: Tally
    ) -> Placement | None:
        pending = one.pending
        decode = route.place if route.is_decode else self._decode(one, snapshot, tally)
        if decode is None or not tally.has_room(decode, pending):
            return None
        tally.add(pending, None if route.is_decode else route.place, decode)
        return Placement(
            None if route.is_decode else route.place.place,
            decode.place,
            pending.num_cached_tokens.get(route.place.place, 0),
            cost,
        )

    def _decode(self, one: Planned, snapshot: Snapshot, tally: Tally) -> Candidate | None:
        """Where blocks are least scarce; among equals, at random."""
        open_places = [place for place in snapshot.decode if place.place not in one.fenced]
        able = decode_choices(open_places, one.pending, tally)
        if not able:
            return None
        shares = [tally.num_taken(place) / max(place.num_total_blocks, 1) for place in able]
        least = min(shares)
        return self._rng.choice([place for place, share in zip(able, shares, strict=True) if share <= least])


def _routes(snapshot: Snapshot) -> list[_Route]:
    return [_Route(place, False) for place in snapshot.prefill] + [_Route(place, True) for place in snapshot.decode]


def _num_bound(place: Candidate, lane: Lane, turn: Turn, margin_s: float) -> tuple[int, float]:
    """How many groups of ``turn`` are bound now, and in how many seconds the next one may be."""
    if not place.is_measured:
        return len(turn.groups), math.inf  # nobody is kept for a moment that can't be foreseen
    wait_s = max(lane.free_in_s - margin_s, lane.held_s(turn.groups[0]))
    if wait_s > 0.0:
        return 0, wait_s
    return 1, turn.first_token_in_s[0] - margin_s if len(turn.groups) > 1 else math.inf


def _free_in_s(place: Candidate, now: float) -> float:
    """When the place has computed what it was given, without what its steps spend on decoding."""
    free_in_s = place.step_ends_at - now if place.step_ends_at > now else 0.0
    if place.num_unbegun_tokens:
        free_in_s += place.step_time.prefill_in_steps_s(place.num_unbegun_tokens, place.max_step_tokens, 0.0)
    return free_in_s


def _added_cost(lane: Lane, turn: Turn, job: Job) -> float:
    """What ``job`` adds to the cost of its lane's ``turn``."""
    return turn.cost - lane.turn([other for group in turn.groups for other in group if other is not job]).cost
