"""The smallest fleet that meets the targets, and whether to disaggregate it. Pure: a function tries each fleet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from cli.replay.results import PolicyResult


@dataclass(frozen=True, order=True)
class Shape:
    """The workers of a fleet; without Prefill workers it is *aggregated*: Decode workers compute all prompts."""

    num_prefill: int
    num_decode: int

    @property
    def size(self) -> int:
        """All workers."""
        return self.num_prefill + self.num_decode

    @property
    def is_aggregated(self) -> bool:
        """Whether all workers do both."""
        return not self.num_prefill

    def has_all_of(self, other: Shape) -> bool:
        """Whether ``other`` has no more workers of either kind."""
        return self.num_prefill >= other.num_prefill and self.num_decode >= other.num_decode

    def __str__(self) -> str:
        if self.is_aggregated:
            return "1 worker that does both" if self.size == 1 else f"{self.size} workers that do both"
        return f"{self.num_prefill} Prefill and {self.num_decode} Decode"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A percentile of a latency that must not be above ``limit_ms``.

    Attributes:
        latency: ``ttft`` or ``itl``.
        percent: 50, 95 or 99.
    """

    latency: str
    percent: int
    limit_ms: float

    def value_ms(self, result: PolicyResult) -> float:
        """What was measured of it."""
        value: float = getattr(getattr(result, f"{self.latency}_ms"), f"p{self.percent}")
        return value

    def __str__(self) -> str:
        return f"{self.latency.upper()} p{self.percent}"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What became of one fleet.

    Attributes:
        result: its replay; ``None``: that was ended early, as ``given_up`` says.
        missed: the targets that it does not meet.
        strain: the largest of all latencies over their limits: at most 1 if it meets the targets.
        given_up: why its replay was ended early; empty: it was not.
        given_up_at_s: when that was, in the replay's seconds.
    """

    shape: Shape
    result: PolicyResult | None
    missed: Sequence[Target] = ()
    strain: float = inf
    given_up: str = ""
    given_up_at_s: float = 0.0

    @property
    def meets(self) -> bool:
        """Whether it meets all targets."""
        return self.result is not None and not self.missed

    @property
    def reason(self) -> str:
        """Why it does not meet the targets; empty: it does."""
        if self.result is None:
            return self.given_up
        return ", ".join(
            f"{target} {target.value_ms(self.result):.4g} ms over {target.limit_ms:g}" for target in self.missed
        )


#: Replays a trace on a fleet. With ``whole`` the replay goes on to its end, however many requests are late.
TryShape: TypeAlias = Callable[[Shape, bool], Tried]


def judge(shape: Shape, result: PolicyResult, targets: Sequence[Target]) -> Tried:
    """Hold a replay's result against the targets."""
    strains = {target: target.value_ms(result) / target.limit_ms for target in targets}
    return Tried(
        shape=shape,
        result=result,
        missed=[target for target, strain in strains.items() if strain > 1],
        strain=max(strains.values()),
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a search found.

    Attributes:
        tried: all fleets that were replayed, the smallest first, and of one size the aggregated first.
        aggregated: the smallest aggregated fleet that meets the targets; ``None``: none of up to ``max_workers`` does.
        disaggregated: of the smallest disaggregated ones the one with the least strain; ``None``: none does with as few
            workers as ``aggregated``, or none of up to ``max_workers``.
        beside: the aggregated fleet with as many workers as the chosen one, or as the nearest.
    """

    max_workers: int
    tried: Sequence[Tried]
    aggregated: Tried | None
    disaggregated: Tried | None
    beside: Tried

    @property
    def chosen(self) -> Tried | None:
        """The smallest fleet; of two equal ones the aggregated, which is simpler. ``None``: none meets the targets."""
        if self.disaggregated is None:
            return self.aggregated
        if self.aggregated is None or self.disaggregated.shape.size < self.aggregated.shape.size:
            return self.disaggregated
        return self.aggregated

    @property
    def nearest(self) -> Tried:
        """The fleet that comes nearest to the targets, of those that were replayed to their end."""
        return min(self.tried, key=_distance)

    @property
    def nearest_other(self) -> Tried | None:
        """The same of the other kind: aggregated if ``nearest`` is not. ``None``: none was replayed to its end."""
        kind = self.nearest.shape.is_aggregated
        others = [one for one in self.tried if one.result is not None and one.shape.is_aggregated is not kind]
        return min(others, key=_distance, default=None)

    def verdict(self) -> str:
        """The answer to: should I disaggregate at all?"""
        together, apart = self.aggregated, self.disaggregated
        if self.chosen is None:
            return self._nearest_ones()
        if apart is None:
            assert together is not None, "one of them was chosen"
            others = f"; no {together.shape.size} of two kinds do" if together.shape.size > 1 else ""
            return f"Don't disaggregate: {together.shape} {_meet(together)} the targets{others}."
        if together is None or apart.shape.size < together.shape.size:
            return (
                f"Disaggregate: {apart.shape} meet the targets. {self.beside.shape} miss them "
                f"({self.beside.reason}){self._others()}."
            )
        return (
            f"No need to disaggregate: {together.shape} meet the targets, and come to {together.strain:.0%} of the "
            f"tightest. As many of two kinds, {apart.shape}, come to {apart.strain:.0%}."
        )

    def _nearest_ones(self) -> str:
        """How near fleets of both kinds come to the targets, which none meets."""
        nearest, other = self.nearest, self.nearest_other
        of_those = " of those replayed to their end" if any(one.result is None for one in self.tried) else ""
        beside = f" {other.shape}: {other.reason}." if other is not None else ""
        return (
            f"No fleet of {_workers(self.max_workers)} meets the targets. The nearest{of_those}, {nearest.shape}, "
            f"misses them: {nearest.reason}.{beside}"
        )

    def _others(self) -> str:
        """What became of the other aggregated fleets, as far as they were replayed."""
        if self.aggregated is not None:
            return f"; {self.aggregated.shape.size} meet them"
        largest = self.max_workers
        return f", and so do {largest}" if largest > self.beside.shape.size else ", and more were not tried"


def find(try_shape: TryShape, max_workers: int) -> Plan:
    """The smallest fleets of up to ``max_workers`` that meet the targets.

    It takes for granted that one more worker never makes a fleet miss them: so it halves ranges, and replays only some
    of the fleets.
    """
    search = _Search(try_shape)
    together = search.least([Shape(0, count) for count in range(1, max_workers + 1)])
    # A disaggregated fleet that is larger than an aggregated one is not wanted.
    size = together.shape.size if together is not None else max_workers
    apart: Tried | None = None
    for num_prefill in range(1, max_workers):
        found = search.least([Shape(num_prefill, count) for count in range(1, size - num_prefill + 1)])
        if found is not None:
            size = found.shape.size
            apart = found if apart is None else min(apart, found, key=lambda one: (one.shape.size, one.strain))
    beside = search.whole(Shape(0, size))
    if together is None and apart is None:
        search.finish_likeliest_apart()
    return Plan(
        max_workers=max_workers,
        tried=search.tried,
        # The search does not replay every size: this one may meet them against expectation.
        aggregated=beside if beside.meets else together,
        disaggregated=apart,
        beside=beside,
    )


class _Search:
    """Tries fleets, each once."""

    def __init__(self, try_shape: TryShape) -> None:
        self._try_shape = try_shape
        self._tried: dict[Shape, Tried] = {}

    @property
    def tried(self) -> Sequence[Tried]:
        """All that were tried, in order."""
        return sorted(self._tried.values(), key=lambda one: (one.shape.size, one.shape))

    def whole(self, shape: Shape) -> Tried:
        """``shape``, replayed to its end."""
        known = self._tried.get(shape)
        if known is None or known.result is None:
            known = self._tried[shape] = self._try_shape(shape, True)
        return known

    def finish_likeliest_apart(self) -> None:
        """Replay that disaggregated fleet to its end which came farthest before it was given up, if one was."""
        given_up = [one for one in self.tried if one.result is None and not one.shape.is_aggregated]
        if given_up:
            self.whole(max(given_up, key=lambda one: one.given_up_at_s).shape)

    def least(self, shapes: Sequence[Shape]) -> Tried | None:
        """The first of ``shapes``, each of which has one more worker than the last, that meets the targets."""
        if not shapes or not self._meets(shapes[-1]):
            return None
        low, high = 0, len(shapes) - 1
        while low < high:
            middle = (low + high) // 2
            if self._meets(shapes[middle]):
                high = middle
            else:
                low = middle + 1
        return self._tried[shapes[high]]

    def _meets(self, shape: Shape) -> bool:
        known = self._tried.get(shape)
        if known is None:
            if self._fails_by_others(shape):
                return False
            known = self._tried[shape] = self._try_shape(shape, False)
        return known.meets

    def _fails_by_others(self, shape: Shape) -> bool:
        """Whether a fleet with at least its workers of either kind was tried, and missed the targets."""
        return any(not one.meets and one.shape.has_all_of(shape) for one in self._tried.values())


def _distance(tried: Tried) -> tuple[float, int]:
    """How far a fleet is from the targets; of two that are as far the smaller comes first."""
    return tried.strain, tried.shape.size


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _meet(tried: Tried) -> str:
    return "meets" if tried.shape.size == 1 else "meet"
