"""Requests of one session go to the same ranks, with any policy, while these ranks are not overloaded.

No table of sessions is kept: a session's ranks follow from its key and the names of the ranks (``rendezvous_order``).
So all routers agree, and a restart forgets nothing. Overloaded ranks are skipped as in Mirrokni, Thorup and
Zadimoghaddam, "Consistent hashing with bounded loads", 2016.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from quartet.discovery.base import Rank
from router.policy.base import Candidate, Decision, Option, Pending, Placement, Policy, Snapshot
from router.policy.room import Tally, can_prefill, decode_choices, not_avoided
from router.policy.split import Remaining

# A rank is never overloaded as long as less than this share of its blocks is used or promised.
_FREE_SHARE = 0.5

_MASK = 2**64 - 1


@dataclass(frozen=True)
class _Home:
    """Where a session belongs now; ``prefill`` is ``None`` if no rank only prefills."""

    prefill: Rank | None
    decode: Rank


class SessionAffinityPolicy:
    """Shows ``base`` only a session's own ranks; for requests without a session, all ranks."""

    def __init__(self, base: Policy, *, max_load_factor: float = 1.25) -> None:
        """A rank with more than ``max_load_factor`` times the mean load is skipped for the next in a session's order.

        Load is the share of blocks used or promised on ranks that decode, and the prompt tokens queued on ranks that
        prefill; tokens that fit one step are no queue.
        """
        self._base = base
        self._max_load_factor = max_load_factor

    @property
    def name(self) -> str:
        """The name that users know."""
        return f"session_affinity({self._base.name})"

    def assign(self, queued: Sequence[Pending], snapshot: Snapshot) -> Decision:
        """Choose ranks for ``queued``; ``None`` keeps a request in the router's queue.

        Requests of one priority that have the same home are shown to the base policy together. Homes come in the order
        of their first requests.
        """
        homes, tally = _Homes(snapshot, self._max_load_factor), Tally()
        remaining = Remaining(snapshot)
        placements: list[Placement | None] = [None] * len(queued)
        polls_s: list[float] = []
        by_level = sorted(range(len(queued)), key=lambda index: -queued[index].priority)
        for _, level in groupby(by_level, key=lambda index: queued[index].priority):
            for home, indices in _grouped((index, homes.find(queued[index], tally)) for index in level):
                group = [queued[index] for index in indices]
                shown = remaining.snapshot if home is None else remaining.at(home.prefill, home.decode)
                decision = self._base.assign(group, shown)
                remaining.decide(group, decision.placements)
                for index, placement in zip(indices, decision.placements, strict=True):
                    placements[index] = placement
                if decision.poll_again_in_s is not None:
                    polls_s.append(decision.poll_again_in_s)
        return Decision(placements, min(polls_s, default=None))

    def explain(self, pending: Pending, snapshot: Snapshot) -> Sequence[Option]:
        """How each rank suits ``pending``, if nothing else waits."""
        home = _Homes(snapshot, self._max_load_factor).find(pending, Tally())
        everywhere = self._base.explain(pending, snapshot)
        if home is None:
            return everywhere
        shown = Remaining(snapshot).at(home.prefill, home.decode)
        own = {option.rank: option for option in self._base.explain(pending, shown)}
        return [own.get(option.rank) or _elsewhere(option, home) for option in everywhere]


def rendezvous_order(key: str, candidates: Sequence[Candidate]) -> list[Candidate]:
    """``candidates`` in the order of ``key``, first where it belongs; every router orders them alike.

    A candidate that comes or goes does not change the order of the others. This is highest random weight hashing:
    Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
    """
    seed = _hash(key)
    return sorted(candidates, key=lambda candidate: _mix(seed ^ _hash_of(candidate.rank)), reverse=True)


class _Homes:
    """Finds where sessions belong, beside what the requests before them are expected to take."""

    def __init__(self, snapshot: Snapshot, max_load_factor: float) -> None:
        self._snapshot = snapshot
        self._max_load_factor = max_load_factor

    def find(self, pending: Pending, tally: Tally) -> _Home | None:
        """The home of ``pending``, which is counted in; ``None``: it has no session, or no rank has room."""
        if not pending.session_key:
            return None
        prefill = self._prefill(pending, tally)
        decode = self._decode(pending, tally, is_queued=prefill is None)
        if decode is None:
            return None
        tally.add(pending, prefill, decode)
        return _Home(None if prefill is None else prefill.rank, decode.rank)

    def _prefill(self, pending: Pending, tally: Tally) -> Candidate | None:
        candidates = self._snapshot.prefill
        able = [candidate for candidate in candidates if can_prefill(candidate, pending)]
        preferred = [candidate for candidate in able if candidate.rank == pending.prefer_prefill]
        limit = self._max_load_factor * _mean_queue(candidates, tally)
        choices = preferred or not_avoided(able, pending)
        return _first(pending, choices, lambda candidate: _has_queue(candidate, limit, tally))

    def _decode(self, pending: Pending, tally: Tally, *, is_queued: bool) -> Candidate | None:
        """``is_queued``: the prompt is computed there too, and waits for that."""
        candidates = self._snapshot.decode
        choices = decode_choices(candidates, pending, tally)
        queue_limit = self._max_load_factor * _mean_queue(candidates, tally)
        num_taken = sum(tally.num_taken(candidate) for candidate in candidates)
        num_total = sum(candidate.num_total_blocks for candidate in candidates)
        share_limit = max(self._max_load_factor * num_taken / max(num_total, 1), _FREE_SHARE)

        def is_overloaded(candidate: Candidate) -> bool:
            is_full = tally.num_taken(candidate) > share_limit * candidate.num_total_blocks
            return is_full or (is_queued and _has_queue(candidate, queue_limit, tally))

        return _first(pending, choices, is_overloaded)


def _first(
    pending: Pending, choices: Sequence[Candidate], is_overloaded: Callable[[Candidate], bool]
) -> Candidate | None:
    """The first in the session's order that is not overloaded; if all are, the first."""
    order = rendezvous_order(pending.session_key, choices)
    return next((candidate for candidate in order if not is_overloaded(candidate)), order[0] if order else None)


def _mean_queue(candidates: Sequence[Candidate], tally: Tally) -> float:
    return sum(tally.num_queued_tokens(candidate) for candidate in candidates) / max(len(candidates), 1)


def _has_queue(candidate: Candidate, limit: float, tally: Tally) -> bool:
    return tally.num_queued_tokens(candidate) > limit + candidate.max_step_tokens


def _grouped(found: Iterable[tuple[int, _Home | None]]) -> Iterable[tuple[_Home | None, list[int]]]:
    groups: dict[_Home | None, list[int]] = {}
    for index, home in found:
        groups.setdefault(home, []).append(index)
    return groups.items()


def _elsewhere(option: Option, home: _Home) -> Option:
    if option.obstacle:
        return option
    at = home.decode if option.is_decode else home.prefill
    return replace(option, cost=None, cost_unit="", terms={}, obstacle=f"its session belongs to {at}")


@lru_cache(maxsize=4096)
def _hash_of(rank: Rank) -> int:
    return _hash(str(rank))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _mix(value: int) -> int:
    """The finalizer of splitmix64: it mixes a hundred ranks in less time than hashing ten of them takes."""
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
