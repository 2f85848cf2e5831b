"""Forecasts when each rank would give each request its first token, and assigns all that wait together, late.

A request is bound to a rank only when that rank is about to run out of prompts to compute: until then it stays in the
router's queue, where it can still be assigned otherwise when others come. Long ones wait a moment for those that come
with them, and of several routers each leaves the others' ranks to them for a while. Places
that have not told how long their steps take are bound to at once: nobody can say there when that moment is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice

from quartet.discovery.base import Rank
from router.policy.base import Candidate, Decision, Option, Peers, Pending, Placement, Snapshot
from router.policy.forecast import AT_ONCE, CostWeights, Hold, Job, Lane, Turn
from router.policy.joint import JointAssignment
from router.policy.room import (
    JUST_FAILED,
    Tally,
    can_ever_hold,
    can_prefill,
    can_prefill_here,
    decode_choices,
    decode_obstacle,
    prefill_obstacle,
    welcome,
)

# Of seconds: waiting for others would be felt beside a prefill that takes no longer.
_SHORT_PREFILL_S = 0.05

# Timers count milliseconds, and forecasts are not better.
_MIN_LOOK_S = 0.0005


# What several routers leave to each other, who see each other's placements only when workers report them.
#
# Without it all of them send to the same free rank at once. So each rank is first one router's: it takes it as if it
# were alone. Another router leaves a prompt to the rank's own router, and then to those between the two in their
# order,
# for as long as it takes until their placements are reported; what is free then is free to take. A prompt that finds
# much
# more of itself at a rank than elsewhere does not wait: computing it anew costs all more than meeting somebody there.


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """How far routers keep out of each other's way.

    Attributes:
        report_s: after so long a placement is in the load that all routers know.
        doubt_s: a rank that is another router's is forecast to be free so much later than it looks.
        saving_share: a prompt does not wait for another router's rank that spares it at least this share of what the
            best of the router's own places lacks.
    """

    report_s: float = 0.06
    doubt_s: float = 0.15
    saving_share: float = 0.25


@dataclass(frozen=True, kw_only=True)
class KvAwareConfig:
    """What the policy weighs, and when it binds.

    Attributes:
        margin_s: a rank gets its next group so long before it has computed all that it was given.
        num_planned_per_rank: of the requests that wait, so many for each rank are planned together,
        max_planned: but not more than that.
        shortlist_length: with more than twice as many ranks, only the most promising are planned for (see
            ``router.policy.kv_aware``).
        local_prefill_max_tokens: longer prompts are not prefilled where they are decoded, while another rank can
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
    num_planned_per_rank: int = 3
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
    """A lane of the plan: the rank that prefills, and where its requests are decoded if not there."""

    candidate: Candidate
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
        limit = min(config.num_planned_per_rank * len(routes), config.max_planned)
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
            num_bound, look_in_s = _num_bound(route.candidate, lane, turn, config.margin_s)
            next_look_s = min(next_look_s, look_in_s)
            for position, group in enumerate(turn.groups):
                for job in group:
                    one = planned[job.number]
                    if position < num_bound or one.pending.binds_at_once:
                        cost = _added_cost(lane, turn, job)
                        placements[one.index] = self._placement(one, route, cost, snapshot, tally)
        if len(planned) >= limit and any(placements):
            next_look_s = 0.0  # there may be more ranks than were planned for
        return Decision(placements, None if next_look_s == math.inf else max(next_look_s, _MIN_LOOK_S))

    def explain(self, pending: Pending, snapshot: Snapshot) -> Sequence[Option]:
        """How ``pending`` stands at each rank, were it all that waits."""
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
            [route.candidate for route in routes],
            [_free_in_s(route.candidate, now) for route in routes],
            length,
            self._rng.randrange(len(routes)),
        )
        return [routes[number] for number in numbers]

    def _lane(self, number: int, route: _Route, now: float) -> Lane:
        candidate = route.candidate
        free = Lane(
            number,
            free_in_s=max(candidate.step_ends_at - now, 0.0),
            num_decoding=candidate.num_decoding,
            num_context_tokens=candidate.num_context_tokens,
            max_step_tokens=candidate.max_step_tokens,
            step_time=candidate.step_time,
            weights=self._config.weights,
            transfer_s_per_token=0.0 if route.is_decode else self._config.transfer_s_per_token,
        )
        if candidate.num_unbegun_tokens:
            free.free_in_s += free.prefill_s(candidate.num_unbegun_tokens)
        return free

    def _jobs(self, planned: Sequence[Planned], routes: Sequence[_Route], snapshot: Snapshot) -> list[Job]:
        tally = Tally()
        everybody = (*snapshot.prefill, *snapshot.decode)
        turns = Turns([route.candidate for route in routes], everybody, snapshot.peers, self._config.peers)
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
                    0 if other is one else pending.num_shared_tokens(other.pending, routes[0].candidate.block_size)
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
            [
                route.candidate.step_time.prefill_s(count)
                for route, count in zip(routes, num_missing, strict=True)
                if count
            ],
            default=0.0,
        )
        gather_s = self._config.gather_share * (least_s - _SHORT_PREFILL_S)
        return max(min(gather_s, self._config.gather_s) - age_s, 0.0)

    def _num_missing(self, one: Planned, routes: Sequence[_Route], tally: Tally) -> list[int | None]:
        """By route; ``None`` where it can't be prefilled."""
        pending, can_go = one.pending, self._can_go(one, routes, tally)
        able = [can_go(number) for number in range(len(routes))]
        ranks = [route.candidate for can, route in zip(able, routes, strict=True) if can]
        welcomed = {candidate.rank for candidate in welcome(ranks, pending)}
        return [
            pending.num_missing_tokens(route.candidate.rank) if can and route.candidate.rank in welcomed else None
            for can, route in zip(able, routes, strict=True)
        ]

    def _can_go(self, one: Planned, routes: Sequence[_Route], tally: Tally) -> Callable[[int], bool]:
        """Whether ``one`` can take a route, by its number."""
        pending, fenced = one.pending, one.fenced
        limit = self._config.local_prefill_max_tokens
        is_remote_only = (
            limit is not None
            and pending.num_tokens > limit
            and any(not route.is_decode and can_prefill(route.candidate, pending) for route in routes)
        )

        def can_go(number: int) -> bool:
            route = routes[number]
            if not route.is_decode:
                return can_prefill(route.candidate, pending)
            if is_remote_only or route.candidate.rank in fenced or not can_prefill_here(route.candidate, pending):
                return False
            return can_ever_hold(route.candidate, pending) and tally.has_room(route.candidate, pending)

        return can_go

    def _placement(
        self, one: Planned, route: _Route, cost: float, snapshot: Snapshot, tally: Tally
    ) -> Placement | None:
        pending = one.pending
        decode = route.candidate if route.is_decode else self._decode(one, snapshot, tally)
        if decode is None or not tally.has_room(decode, pending):
            return None
        tally.add(pending, None if route.is_decode else route.candidate, decode)
        return Placement(
            None if route.is_decode else route.candidate.rank,
            decode.rank,
            pending.num_cached_tokens.get(route.candidate.rank, 0),
            cost,
        )

    def _decode(self, one: Planned, snapshot: Snapshot, tally: Tally) -> Candidate | None:
        """Where blocks are least scarce; among equals, at random."""
        open_ranks = [candidate for candidate in snapshot.decode if candidate.rank not in one.fenced]
        able = decode_choices(open_ranks, one.pending, tally)
        if not able:
            return None
        shares = [tally.num_taken(candidate) / max(candidate.num_total_blocks, 1) for candidate in able]
        least = min(shares)
        return self._rng.choice([candidate for candidate, share in zip(able, shares, strict=True) if share <= least])


def _routes(snapshot: Snapshot) -> list[_Route]:
    return [_Route(rank, False) for rank in snapshot.prefill] + [_Route(rank, True) for rank in snapshot.decode]


def _num_bound(candidate: Candidate, lane: Lane, turn: Turn, margin_s: float) -> tuple[int, float]:
    """How many groups of ``turn`` are bound now, and in how many seconds the next one may be."""
    if not candidate.is_measured:
        return len(turn.groups), math.inf  # nobody is kept for a moment that can't be foreseen
    wait_s = max(lane.free_in_s - margin_s, lane.held_s(turn.groups[0]))
    if wait_s > 0.0:
        return 0, wait_s
    return 1, turn.first_token_in_s[0] - margin_s if len(turn.groups) > 1 else math.inf


def _free_in_s(candidate: Candidate, now: float) -> float:
    """When the rank has computed what it was given, without what its steps spend on decoding."""
    free_in_s = candidate.step_ends_at - now if candidate.step_ends_at > now else 0.0
    if candidate.num_unbegun_tokens:
        free_in_s += candidate.step_time.prefill_in_steps_s(
            candidate.num_unbegun_tokens, candidate.max_step_tokens, 0.0
        )
    return free_in_s


def _added_cost(lane: Lane, turn: Turn, job: Job) -> float:
    """What ``job`` adds to the cost of its lane's ``turn``."""
    return turn.cost - lane.turn([other for group in turn.groups for other in group if other is not job]).cost


# kv_aware's view of every rank, told by the very lanes that it plans with.


def explain_lanes(
    pending: Pending, job: Job, prefill: Sequence[Lane], decode: Sequence[Lane], snapshot: Snapshot
) -> list[Option]:
    """How ``pending``, whose ``job`` it is, stands at each place of ``snapshot``, of which these are the lanes.

    Terms in seconds add up to the cost. ``taken_share``, the share of a decode rank's blocks that is spoken for, is no
    part of that: it decides where a request is decoded that is prefilled elsewhere. A decode rank without obstacle and
    without cost is one that would only decode it.
    """
    tally = Tally()
    can_decode = {candidate.rank for candidate in decode_choices(snapshot.decode, pending, tally)}
    options = []
    for lane, candidate in zip(prefill, snapshot.prefill, strict=True):
        is_able = job.num_missing[lane.number] is not None
        obstacle = "" if is_able else prefill_obstacle(candidate, pending) or JUST_FAILED
        options.append(_option(lane, job, pending, candidate, is_decode=False, obstacle=obstacle))
    for lane, candidate in zip(decode, snapshot.decode, strict=True):
        obstacle = "" if candidate.rank in can_decode else decode_obstacle(candidate, pending, tally) or JUST_FAILED
        options.append(_option(lane, job, pending, candidate, is_decode=True, obstacle=obstacle))
    return options


def _option(lane: Lane, job: Job, pending: Pending, candidate: Candidate, *, is_decode: bool, obstacle: str) -> Option:
    is_weighed = not obstacle and job.num_missing[lane.number] is not None
    terms = lane.terms(job) if is_weighed else {}
    if is_decode and not obstacle:
        terms["taken_share"] = Tally().num_taken(candidate) / max(candidate.num_total_blocks, 1)
    return Option(
        rank=candidate.rank,
        is_decode=is_decode,
        num_cached_tokens=pending.num_cached_tokens.get(candidate.rank, 0),
        cost=lane.turn([job]).cost if is_weighed else None,
        cost_unit="s" if is_weighed else "",
        terms=terms,
        obstacle=obstacle,
    )


# Who is planned: those that find room, in the order of the queue, so that those that find none are not starved.


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
    fenced: frozenset[Rank]


def choose_planned(waiting: Sequence[Pending], snapshot: Snapshot, limit: int) -> list[Planned]:
    """The first ``limit`` of ``waiting`` that find room now, and all those further back that bind at once.

    Whoever finds none fences the rank with the most room, for all behind it: the room there only grows.
    """
    tally, fenced = Tally(), frozenset[Rank]()
    found: list[Planned] = []
    for index, pending in enumerate(waiting):
        if len(found) >= limit and not pending.binds_at_once:
            continue
        if any(_can_go(rank, pending, fenced) and tally.has_room(rank, pending) for rank in snapshot.decode):
            found.append(Planned(index, pending, fenced))
            continue
        eligible = [rank for rank in snapshot.decode if _can_go(rank, pending, fenced)]
        if eligible:
            fenced |= {max(eligible, key=tally.num_free).rank}
    return found


def _can_go(candidate: Candidate, pending: Pending, fenced: frozenset[Rank]) -> bool:
    return candidate.rank not in fenced and can_ever_hold(candidate, pending)


# Of very many ranks, those worth planning for: forecasts for all of them would take longer than they gain.


def shortlist(
    pendings: Sequence[tuple[Pending, Callable[[int], bool]]],
    candidates: Sequence[Candidate],
    free_in_s: Sequence[float],
    length: int,
    first: int,
) -> list[int]:
    """Numbers of ranks, ascending.

    Args:
        pendings: what is to be planned, each with whether it can go to a rank at all.
        candidates: all of them; one is known by its position.
        free_in_s: by rank, when it has computed what it was given.
        length: for each request, so many of those that are free first are taken, and half as many of those that have
            some of it and would have computed the rest first.
        first: where to begin among places that are free together: always the same would be sent everything.
    """
    by_freedom = sorted([*range(first, len(candidates)), *range(first)], key=free_in_s.__getitem__)
    numbers = {candidate.rank: number for number, candidate in enumerate(candidates)}
    chosen: set[int] = set()
    for pending, can_go in pendings:
        able = (number for number in by_freedom if can_go(number))
        chosen.update(islice(_welcome(able, candidates, pending), length))
        known = [numbers[candidate] for candidate in pending.num_cached_tokens if candidate in numbers]
        known = [number for number in known if number not in chosen and can_go(number)]
        ends_in_s = {number: free_in_s[number] + _prefill_s(candidates[number], pending) for number in known}
        chosen.update(nsmallest(length // 2, known, key=ends_in_s.__getitem__))
    return sorted(chosen)


def _prefill_s(candidate: Candidate, pending: Pending) -> float:
    return candidate.step_time.prefill_s(pending.num_missing_tokens(candidate.rank))


def _welcome(numbers: Iterator[int], candidates: Sequence[Candidate], pending: Pending) -> Iterator[int]:
    """Those that did not just fail ``pending``; if there are none, all."""
    if not pending.avoid:
        return numbers
    able = list(numbers)
    return iter([number for number in able if candidates[number].rank.worker_id not in pending.avoid] or able)


class Turns:
    """For how long each rank is left to others."""

    def __init__(
        self, candidates: Sequence[Candidate], everybody: Iterable[Candidate], peers: Peers, config: PeerConfig
    ) -> None:
        """``ranks`` are known by their position from here on; whose each is follows from all names.

        These are ``peers.places``, or those of ``everybody`` where they are not given.
        """
        self._config = config
        self._waits_s = [0.0] * len(candidates)
        if peers.num_routers > 1:
            order = peers.ranks or sorted(candidate.rank for candidate in everybody)
            positions = {candidate: position for position, candidate in enumerate(order)}
            distances = [(peers.number - positions[candidate.rank]) % peers.num_routers for candidate in candidates]
            self._waits_s = [distance * config.report_s for distance in distances]
        self._is_alone = not any(self._waits_s)

    def hold(self, num_missing: Sequence[int | None], age_s: float, least_s: float) -> Hold:
        """How a prompt is kept from places that has waited for ``age_s`` and goes nowhere for another ``least_s``."""
        if self._is_alone:
            return Hold([least_s] * len(num_missing), [least_s] * len(num_missing)) if least_s else AT_ONCE
        own = [count for count, wait_s in zip(num_missing, self._waits_s, strict=True) if count and not wait_s]
        num_spared = (1.0 - self._config.saving_share) * min(own, default=0)
        until_s, starts_in_s = list[float](), list[float]()
        for count, wait_s in zip(num_missing, self._waits_s, strict=True):
            is_free = not wait_s or (count is not None and count <= num_spared)
            until_s.append(least_s if is_free else max(wait_s - age_s, least_s))
            starts_in_s.append(until_s[-1] if is_free else until_s[-1] + self._config.doubt_s)
        return Hold(until_s, starts_in_s)
