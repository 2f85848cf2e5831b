"""Forecasts when each rank would give each request its first token, assigns all that wait together, and binds late.

A request is bound to a rank only when that rank is about to run out of prompts to compute. Until then it stays in the
router's queue, where it can still be assigned elsewhere when others come. Long requests wait a moment for those that
come with them. A rank that has not reported how long its steps take gets its requests at once, since that moment can't
be foreseen.

In reading order: the configuration, the policy, the choice of the requests to plan (``choose_planned``), of the ranks
to plan for if there are very many (``shortlist``), and how several routers share ranks (``PeerWaits``, ``PeerTurns``).
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
from router.policy.forecast import AT_ONCE, CostWeights, Deferral, Job, Plan, PrefillForecast
from router.policy.joint import JointAssignment
from router.policy.onboarding import start_at
from router.policy.room import (
    JUST_FAILED,
    NOTHING_TAKEN,
    Backfill,
    Tally,
    can_decode_now,
    can_prefill,
    can_prefill_here,
    decode_choices,
    decode_obstacle,
    not_avoided,
    prefill_obstacle,
)

# In seconds. Requests with a prefill this short would feel the wait for others.
_SHORT_PREFILL_S = 0.05

# A turn that began longer ago is over, however late the router comes.
_LATE_S = 1.0

# Timers count milliseconds, and forecasts are not more exact.
_MIN_POLL_S = 0.0005


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """How far several routers keep out of each other's way (see ``PeerWaits`` and ``PeerTurns``).

    Attributes:
        report_s: after so long a placement is in the load that all routers know.
        doubt_s: a rank of another router is forecast to be free so much later than it looks.
        saving_share: a prompt does not wait for another router's rank on which at least this share less is missing than
            on the best of the router's own ranks.
        turn_s: routers that tell each other what they place have each rank in turn, for so long,
        open_s: and send to it only in so much of the turn: in the rest of it the others are told.
    """

    report_s: float = 0.06
    doubt_s: float = 0.15
    saving_share: float = 0.25
    turn_s: float = 0.004
    open_s: float = 0.002


@dataclass(frozen=True, kw_only=True)
class KvAwareConfig:
    """What the policy weighs, and when it binds.

    Attributes:
        margin_s: a rank gets its next group so long before it has computed all that it was given.
        num_planned_per_rank: of the requests that wait, so many for each rank are planned together,
        max_planned: but not more than that.
        shortlist_length: with more than twice as many ranks, only the most promising ones are planned for (see
            ``shortlist``).
        local_prefill_max_tokens: longer prompts are not prefilled where they are decoded, while another rank can
            prefill them; ``None``: only the cost decides.
        transfer_s_per_token: seconds to move a token's KV from where it is prefilled to where it is decoded. The
            default is that of 8 billion parameters with grouped queries (131,072 bytes) at 50 GB/s.
        overtaken_s: no request behind it in the queue overtakes a request that has waited for so long. (Nor one that
            those of other tenants have overtaken with as much work as its own.)
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


@dataclass(slots=True)
class _Route:
    """A rank that may prefill. If it does not decode, its requests are decoded elsewhere.

    ``is_full``: it only prefills, and its batch is full.
    """

    candidate: Candidate
    is_decode: bool
    is_full: bool = False


class KvAwarePolicy:
    """See the module."""

    def __init__(self, rng: random.Random, config: KvAwareConfig | None = None) -> None:
        """``rng`` breaks ties."""
        self._rng = rng
        self._config = config or KvAwareConfig()
        self._turn_at: dict[Rank, float] = {}  # of ranks that it would send to but for the turn: when that begins

    @property
    def name(self) -> str:
        """The name that users know."""
        return "kv_aware"

    def assign(self, queued: Sequence[Pending], snapshot: Snapshot) -> Decision:
        """Choose ranks for the requests to bind now; ``None`` keeps a request in the router's queue."""
        placements: list[Placement | None] = [None] * len(queued)
        routes, config = _routes(snapshot), self._config
        if (busy_s := self._busy_s(queued, routes, snapshot.now)) > 0.0:
            return Decision(placements, max(busy_s, _MIN_POLL_S))
        limit = min(config.num_planned_per_rank * len(routes), config.max_planned)
        planned = choose_planned(queued, snapshot, limit)
        if not planned:
            return Decision(placements)
        routes = self._worth_planning(routes, planned, snapshot.now)
        forecasts = self._forecasts(routes, snapshot.now)
        assignment = JointAssignment(forecasts, self._jobs(planned, routes, snapshot), self._rng)
        tally, next_poll_s = Tally(), math.inf
        for forecast, route, plan in zip(forecasts, routes, assignment.plans, strict=True):
            if not plan.groups:
                self._turn_at.pop(route.candidate.rank, None)  # it needs no turn there
                continue
            deferred_s = self._deferred_s(route.candidate.rank, forecast, plan, snapshot)
            num_bound, poll_in_s = _num_bound(route.candidate, forecast, plan, config.margin_s, deferred_s)
            next_poll_s, num_spare = min(next_poll_s, poll_in_s), route.candidate.num_spare_tokens
            for position, group in enumerate(plan.groups):
                for job in group:
                    one = planned[job.number]
                    is_short = (num_missing := job.num_missing[forecast.number] or 0) <= num_spare
                    if position < num_bound or is_short or one.pending.binds_at_once:
                        num_spare -= num_missing
                        cost = _added_cost(forecast, plan, job)
                        placements[one.index] = self._placement(one, route, cost, snapshot, tally)
        if len(planned) >= limit and any(placements):
            next_poll_s = 0.0  # more requests may find a rank than were planned
        return Decision(placements, None if next_poll_s == math.inf else max(next_poll_s, _MIN_POLL_S))

    def explain(self, pending: Pending, snapshot: Snapshot) -> Sequence[Option]:
        """How each rank suits ``pending``, if nothing else waits, by the forecasts that ``assign`` plans with.

        Terms in seconds add up to the cost. ``taken_share``, the share of a decode rank's blocks that is used or
        promised, is no part of it: it decides where a request is decoded that is prefilled elsewhere. A decode rank
        without obstacle and without cost is one that would only decode the request.
        """
        routes = _routes(snapshot)
        if not routes:
            return []
        [job] = self._jobs([Planned(0, pending, frozenset())], routes, snapshot)
        forecasts, tally = self._forecasts(routes, snapshot.now), Tally()
        can_decode = {candidate.rank for candidate in decode_choices(snapshot.decode, pending, tally)}
        options = []
        for forecast, route in zip(forecasts, routes, strict=True):
            candidate = route.candidate
            if route.is_decode:
                is_able, obstacle = candidate.rank in can_decode, decode_obstacle(candidate, pending, tally)
            else:
                is_able = job.num_missing[forecast.number] is not None and not route.is_full
                obstacle = prefill_obstacle(candidate, pending)
            obstacle = "" if is_able else obstacle or JUST_FAILED
            options.append(_option(forecast, job, pending, route, obstacle))
        return options

    def _deferred_s(self, rank: Rank, forecast: PrefillForecast, plan: Plan, snapshot: Snapshot) -> float:
        """For how long the first of ``plan`` is not sent; a router that missed all of its turn sends all the same.

        An event loop that lags would else miss one turn after the other. One that comes in time, for a prompt that was
        gathered until its turn was nearly over, waits for the next: the others are told too late of what it sends now.
        """
        deferred_s, now = forecast.deferred_s(plan.groups[0]), snapshot.now
        if not snapshot.peers.tell_bookings:
            return deferred_s
        turn_at = self._turn_at.pop(rank, math.inf)
        if not deferred_s or forecast.free_in_s > self._config.margin_s:
            return deferred_s
        if turn_at + self._config.peers.open_s <= now < turn_at + _LATE_S:
            return 0.0
        self._turn_at[rank] = turn_at if now < turn_at < math.inf else now + deferred_s
        return deferred_s

    def _busy_s(self, queued: Sequence[Pending], routes: Sequence[_Route], now: float) -> float:
        """For so many seconds no rank that may prefill ``queued`` is given anything, whatever the plan; 0: who knows.

        Under load the policy runs far more often than a rank becomes free. A plan takes ten times as long as this.
        """
        limit, least_s = self._config.local_prefill_max_tokens, math.inf
        remote = [route.candidate for route in routes if not route.is_decode]
        if limit is None or not remote:
            return 0.0
        for candidate in remote:
            free_in_s = _free_in_s(candidate, now) - self._config.margin_s
            if free_in_s <= 0.0 or candidate.num_spare_tokens or not candidate.is_measured:
                return 0.0
            least_s = min(least_s, free_in_s)
        first, *others = remote
        for pending in queued:
            if pending.binds_at_once or pending.num_tokens <= limit:
                return 0.0
            if not (can_prefill(first, pending) or any(can_prefill(other, pending) for other in others)):
                return 0.0
        return least_s

    def _worth_planning(self, routes: list[_Route], planned: Sequence[Planned], now: float) -> list[_Route]:
        """All routes, unless there are very many."""
        length = self._config.shortlist_length
        if len(routes) <= 2 * length:
            return routes
        numbers = shortlist(
            [(one.pending, self._can_go(one, routes)) for one in planned],
            [route.candidate for route in routes],
            [_free_in_s(route.candidate, now) for route in routes],
            length,
            self._rng.randrange(len(routes)),
        )
        return [routes[number] for number in numbers]

    def _forecasts(self, routes: Sequence[_Route], now: float) -> list[PrefillForecast]:
        weights, transfer_s = self._config.weights, self._config.transfer_s_per_token
        return [
            PrefillForecast(
                number, route.candidate, now, weights, transfer_s_per_token=0.0 if route.is_decode else transfer_s
            )
            for number, route in enumerate(routes)
        ]

    def _jobs(self, planned: Sequence[Planned], routes: Sequence[_Route], snapshot: Snapshot) -> list[Job]:
        waits = self._peer_waits([route.candidate for route in routes], snapshot)
        jobs: list[Job] = []
        due_by = snapshot.now - self._config.overtaken_s
        last_due = max([number for number, one in enumerate(planned) if _is_due(one.pending, due_by)], default=-1)
        for number, one in enumerate(planned):
            pending = one.pending
            age_s = max(snapshot.now - pending.arrived_at, 0.0)
            num_missing, onboard_s = _to_compute(pending, routes, self._able(one, routes))
            job = Job(
                number=number,
                num_tokens=pending.num_tokens,
                age_s=age_s,
                priority=pending.priority,
                is_due=number <= last_due,  # one that is due goes before those behind it, not before those ahead
                num_missing=num_missing,
                onboard_s=onboard_s,
                num_shared=[
                    0 if other is one else pending.num_shared_tokens(other.pending, routes[0].candidate.block_size)
                    for other in planned
                ],
                deferral=self._deferral(waits, num_missing, routes, age_s),
            )
            jobs.append(job)
        return jobs

    def _peer_waits(self, candidates: Sequence[Candidate], snapshot: Snapshot) -> PeerWaits | PeerTurns:
        everybody, peers = (*snapshot.prefill, *snapshot.decode), snapshot.peers
        if peers.num_routers > 1 and peers.tell_bookings:
            return PeerTurns(candidates, everybody, peers, self._config.peers, snapshot.now)
        return PeerWaits(candidates, everybody, peers, self._config.peers)

    def _deferral(
        self, waits: PeerWaits | PeerTurns, num_missing: Sequence[int | None], routes: Sequence[_Route], age_s: float
    ) -> Deferral:
        pairs = zip(routes, num_missing, strict=True)
        prefill_s = min([route.candidate.step_time.prefill_s(count) for route, count in pairs if count], default=0.0)
        if isinstance(waits, PeerTurns) and prefill_s < _SHORT_PREFILL_S:
            return AT_ONCE  # to meet another router's request costs less than to plan twice
        return waits.defer(num_missing, age_s, self._gather_s(prefill_s, age_s))

    def _gather_s(self, prefill_s: float, age_s: float) -> float:
        """For how much longer a request with a prefill of ``prefill_s`` waits for others that may come with it."""
        gather_s = self._config.gather_share * (prefill_s - _SHORT_PREFILL_S)
        return max(min(gather_s, self._config.gather_s) - age_s, 0.0)

    def _able(self, one: Planned, routes: Sequence[_Route]) -> list[bool]:
        """By route, whether it can be prefilled there."""
        pending, can_go = one.pending, self._can_go(one, routes)
        able = [can_go(number) for number in range(len(routes))]
        if any(route.is_full for route in routes):
            able = _without_full(able, routes)
        if pending.avoid:
            candidates = [route.candidate for can, route in zip(able, routes, strict=True) if can]
            chosen = {candidate.rank for candidate in not_avoided(candidates, pending)}
            able = [can and route.candidate.rank in chosen for can, route in zip(able, routes, strict=True)]
        return able

    def _can_go(self, one: Planned, routes: Sequence[_Route]) -> Callable[[int], bool]:
        """Whether ``one`` can take a route, by its number."""
        pending, reserved = one.pending, one.reserved
        limit = self._config.local_prefill_max_tokens
        is_remote_only = (
            limit is not None
            and pending.num_tokens > limit
            and any(not route.is_decode and can_prefill(route.candidate, pending) for route in routes)
        )

        def can_go(number: int) -> bool:
            candidate = routes[number].candidate
            if not routes[number].is_decode:
                return can_prefill(candidate, pending)
            if is_remote_only or candidate.rank in reserved or not can_prefill_here(candidate, pending):
                return False
            return can_decode_now(candidate, pending, NOTHING_TAKEN)

        return can_go

    def _placement(
        self, one: Planned, route: _Route, cost: float, snapshot: Snapshot, tally: Tally
    ) -> Placement | None:
        pending = one.pending
        decode = route.candidate if route.is_decode else self._decode(one, snapshot, tally)
        if decode is None or not tally.has_room(decode, pending):
            return None
        prefill = None if route.is_decode else route.candidate
        if prefill is not None and not tally.can_run(prefill):
            return None
        tally.add(pending, prefill, decode)
        return Placement(
            None if prefill is None else prefill.rank,
            decode.rank,
            start_at(route.candidate, pending).num_cached_tokens,
            cost,
        )

    def _decode(self, one: Planned, snapshot: Snapshot, tally: Tally) -> Candidate | None:
        """The rank with the smallest share of its blocks taken; among equals, at random."""
        unreserved = [candidate for candidate in snapshot.decode if candidate.rank not in one.reserved]
        able = decode_choices(unreserved, one.pending, tally)
        if not able:
            return None
        shares = [tally.taken_share(candidate) for candidate in able]
        least = min(shares)
        return self._rng.choice([candidate for candidate, share in zip(able, shares, strict=True) if share <= least])


@dataclass(slots=True)
class Planned:
    """A request that is planned.

    Attributes:
        index: its position among those that wait.
        pending: what is known of it.
        reserved: ranks that requests ahead of it have reserved: it is not decoded there.
    """

    index: int
    pending: Pending
    reserved: frozenset[Rank]


def choose_planned(queued: Sequence[Pending], snapshot: Snapshot, limit: int) -> list[Planned]:
    """The first ``limit`` of ``queued`` that find room now, and all those behind them that bind at once.

    They are no more than decode ranks may have beside their requests: else the shortest or the oldest of them would get
    the last places, and not the first in the queue. A request that finds no room reserves a rank (see
    ``router.policy.room.Backfill``).
    """
    backfill, found = Backfill(), list[Planned]()
    num_places = _num_places(snapshot.decode, len(queued))
    for index, pending in enumerate(queued):
        if len(found) == num_places:
            break
        if len(found) >= limit and not pending.binds_at_once:
            continue
        unreserved = backfill.unreserved(snapshot.decode)
        if any(can_decode_now(candidate, pending, NOTHING_TAKEN) for candidate in unreserved):
            found.append(Planned(index, pending, backfill.reserved))
        else:
            backfill.reserve(pending, unreserved, NOTHING_TAKEN)
    return found


def _num_places(candidates: Sequence[Candidate], most: int) -> int:
    """How many more requests ``candidates`` may have together; ``most`` if they may have more, or none says."""
    num_places = 0
    for candidate in candidates:
        if not candidate.max_requests:
            return most
        num_places += max(candidate.max_requests - candidate.num_requests, 0)
        if num_places >= most:
            return most
    return num_places


def shortlist(
    pendings: Sequence[tuple[Pending, Callable[[int], bool]]],
    candidates: Sequence[Candidate],
    free_in_s: Sequence[float],
    length: int,
    first: int,
) -> list[int]:
    """The ranks worth planning for, of very many: forecasts for all of them would take longer than they gain.

    Args:
        pendings: the requests to plan, each with whether it can go to a rank at all.
        candidates: all ranks; their positions are their numbers.
        free_in_s: by rank, when it has computed what it was given.
        length: for each request, so many of the ranks that are free first are taken, and half as many of those that
            have some of it cached and would have computed the rest first.
        first: where to begin among ranks that are free at the same time; always the same one would get everything.

    Returns:
        The numbers of ranks, ascending.
    """
    by_freedom = sorted([*range(first, len(candidates)), *range(first)], key=free_in_s.__getitem__)
    numbers = {candidate.rank: number for number, candidate in enumerate(candidates)}
    chosen: set[int] = set()
    for pending, can_go in pendings:
        able = (number for number in by_freedom if can_go(number))
        chosen.update(islice(_not_avoided_numbers(able, candidates, pending), length))
        known = [numbers[rank] for rank in pending.num_cached_tokens if rank in numbers]
        known = [number for number in known if number not in chosen and can_go(number)]
        prefill_s = _load_and_prefill_s if pending.lower_tokens else _prefill_s
        ends_in_s = {number: free_in_s[number] + prefill_s(candidates[number], pending) for number in known}
        chosen.update(nsmallest(length // 2, known, key=ends_in_s.__getitem__))
    return sorted(chosen)


class PeerWaits:
    """For how long this router leaves each rank to the other routers.

    Routers see each other's placements only when workers report them. Without this, all of them would send to the same
    free rank at once. So each rank is first one router's own, which uses it as if it were alone. Another router leaves
    the rank to its own router, and then to the routers between the two in their order, for as long as it takes until
    their placements are reported. A rank that is free then is free to take. A prompt that finds much more of itself on
    a rank than elsewhere does not wait: computing it anew costs all requests more than meeting another router there.
    """

    def __init__(
        self, candidates: Sequence[Candidate], everybody: Iterable[Candidate], peers: Peers, config: PeerConfig
    ) -> None:
        """``candidates`` are known by their position from here on.

        Which router a rank belongs to follows from the order of ``peers.ranks``, or of ``everybody`` if these are
        not given.
        """
        self._config = config
        self._waits_s = [0.0] * len(candidates)
        if peers.num_routers > 1:
            in_order = peers.ranks or sorted(candidate.rank for candidate in everybody)
            positions = {owned: position for position, owned in enumerate(in_order)}
            distances = [(peers.number - positions[one.rank]) % peers.num_routers for one in candidates]
            self._waits_s = [distance * config.report_s for distance in distances]
        self._is_alone = not any(self._waits_s)

    def defer(self, num_missing: Sequence[int | None], age_s: float, least_s: float) -> Deferral:
        """For how long a prompt is not sent to each rank.

        Args:
            num_missing: by rank, its tokens to compute there.
            age_s: how long it has waited.
            least_s: for how much longer it goes nowhere.
        """
        if self._is_alone:
            return Deferral([least_s] * len(num_missing), [least_s] * len(num_missing)) if least_s else AT_ONCE
        own = [count for count, wait_s in zip(num_missing, self._waits_s, strict=True) if count and not wait_s]
        num_spared = (1.0 - self._config.saving_share) * min(own, default=0)
        until_s, starts_in_s = list[float](), list[float]()
        for count, wait_s in zip(num_missing, self._waits_s, strict=True):
            is_free = not wait_s or (count is not None and count <= num_spared)
            until_s.append(least_s if is_free else max(wait_s - age_s, least_s))
            starts_in_s.append(until_s[-1] if is_free else until_s[-1] + self._config.doubt_s)
        return Deferral(until_s, starts_in_s)


class PeerTurns:
    """When routers that tell each other what they place may send to each rank: in turn.

    Routers that see the same free rank at the same moment would all send to it before they are told of each other. So
    each rank is one router's at a time, by their common clock, and each router has other ranks at the same time.
    What others placed in their turns a router knows in its own, so it needs no further doubt.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        everybody: Iterable[Candidate],
        peers: Peers,
        config: PeerConfig,
        now: float,
    ) -> None:
        """``candidates`` are known by their position from here on; the order of ranks is as in ``PeerWaits``."""
        self._config = config
        in_order = peers.ranks or sorted(candidate.rank for candidate in everybody)
        # Of more routers than ranks, some have no rank at a time; they are spread evenly among the others.
        step = max(peers.num_routers / max(len(in_order), 1), 1.0)
        begins = {rank: peers.number - int(position * step) for position, rank in enumerate(in_order)}
        self._cycle_s = config.turn_s * peers.num_routers
        time_s = (now + peers.clock_ahead_s) % self._cycle_s
        self._since_s = [time_s - begins[candidate.rank] * config.turn_s for candidate in candidates]

    def defer(self, num_missing: Sequence[int | None], age_s: float, least_s: float) -> Deferral:
        """For how long a prompt is not sent to each rank; arguments as in ``PeerWaits.defer``."""
        until_s = [self._until_s(since_s + least_s) + least_s for since_s in self._since_s]
        return Deferral(until_s, until_s)

    def _until_s(self, since_s: float) -> float:
        """Seconds until the router may send to a rank whose turn began ``since_s`` ago, or some cycles before that."""
        passed_s = since_s % self._cycle_s
        return 0.0 if passed_s < self._config.open_s else self._cycle_s - passed_s


def _is_due(pending: Pending, due_by: float) -> bool:
    return pending.arrived_at <= due_by or pending.is_overtaken


def _routes(snapshot: Snapshot) -> list[_Route]:
    prefill = [_Route(candidate, False, not NOTHING_TAKEN.can_run(candidate)) for candidate in snapshot.prefill]
    return prefill + [_Route(candidate, True) for candidate in snapshot.decode]


def _to_compute(
    pending: Pending, routes: Sequence[_Route], able: Sequence[bool]
) -> tuple[list[int | None], list[float]]:
    """By route, tokens to compute there, ``None`` if not ``able``, and seconds to load others; empty: none loads."""
    if not pending.lower_tokens:
        num_missing = [
            pending.num_missing_tokens(route.candidate.rank) if can else None
            for can, route in zip(able, routes, strict=True)
        ]
        return num_missing, []
    starts = [start_at(route.candidate, pending) for route in routes]
    return (
        [
            max(pending.num_tokens - start.num_cached_tokens, 1) if can else None
            for can, start in zip(able, starts, strict=True)
        ],
        [start.onboard_s for start in starts],
    )


def _without_full(able: list[bool], routes: Sequence[_Route]) -> list[bool]:
    """``able``, by route, without the full ones, unless no other of ``able`` only prefills."""
    free = [can and not route.is_full for can, route in zip(able, routes, strict=True)]
    has_free = any(can and not route.is_decode for can, route in zip(free, routes, strict=True))
    return free if has_free else able


def _num_bound(
    candidate: Candidate, forecast: PrefillForecast, plan: Plan, margin_s: float, deferred_s: float
) -> tuple[int, float]:
    """How many groups of ``plan`` are bound now, and in how many seconds the next one may be."""
    if not candidate.is_measured:
        return len(plan.groups), math.inf  # when the rank runs out of prompts can't be foreseen
    wait_s = max(forecast.free_in_s - margin_s, deferred_s)
    if wait_s > 0.0:
        return 0, wait_s
    return 1, plan.first_token_in_s[0] - margin_s if len(plan.groups) > 1 else math.inf


def _added_cost(forecast: PrefillForecast, plan: Plan, job: Job) -> float:
    """What ``job`` adds to the cost of ``plan``."""
    return plan.cost - forecast.plan([other for group in plan.groups for other in group if other is not job]).cost


def _option(forecast: PrefillForecast, job: Job, pending: Pending, route: _Route, obstacle: str) -> Option:
    candidate = route.candidate
    is_weighed = not obstacle and job.num_missing[forecast.number] is not None
    terms = forecast.terms(job) if is_weighed else {}
    if route.is_decode and not obstacle:
        terms["taken_share"] = Tally().taken_share(candidate)
    return Option(
        rank=candidate.rank,
        is_decode=route.is_decode,
        num_cached_tokens=start_at(candidate, pending).num_cached_tokens,
        cost=forecast.plan([job]).cost if is_weighed else None,
        cost_unit="s" if is_weighed else "",
        terms=terms,
        obstacle=obstacle,
    )


def _free_in_s(candidate: Candidate, now: float) -> float:
    """When the rank has computed what it was given, without the time that its steps spend on decoding."""
    free_in_s = candidate.step_ends_at - now if candidate.step_ends_at > now else 0.0
    if candidate.num_unbegun_tokens:
        num_tokens, max_step_tokens = candidate.num_unbegun_tokens, candidate.max_step_tokens
        free_in_s += candidate.step_time.prefill_in_steps_s(num_tokens, max_step_tokens, 0.0)
    return free_in_s


def _prefill_s(candidate: Candidate, pending: Pending) -> float:
    return candidate.step_time.prefill_s(pending.num_missing_tokens(candidate.rank))


def _load_and_prefill_s(candidate: Candidate, pending: Pending) -> float:
    start = start_at(candidate, pending)
    return start.onboard_s + candidate.step_time.prefill_s(max(pending.num_tokens - start.num_cached_tokens, 1))


def _not_avoided_numbers(numbers: Iterator[int], candidates: Sequence[Candidate], pending: Pending) -> Iterator[int]:
    """As ``not_avoided``, lazily: of the ranks of ``numbers``."""
    if not pending.avoid:
        return numbers
    able = list(numbers)
    return iter([number for number in able if candidates[number].rank.worker_id not in pending.avoid] or able)
