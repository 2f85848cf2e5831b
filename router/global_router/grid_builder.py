"""Makes grids from what pools were measured to take: per cell the cheapest pool that meets its targets. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from router.global_router.grid import Axis


@dataclass(frozen=True, kw_only=True)
class MeasuredPool:
    """What one pool costs and takes.

    Attributes:
        namespace: of the pool.
        cost: of keeping it, in any unit, the same for all.
        latency_ms: for each measure (``ttft``, ``itl``) what it takes, by number of tokens; one entry counts for all.
    """

    namespace: str
    cost: float
    latency_ms: Mapping[str, Mapping[float, float]]

    def predict_ms(self, measure: str, num_tokens: float) -> float:
        """What ``measure`` takes for ``num_tokens``: on the line between, or through, the two nearest points."""
        points = sorted(self.latency_ms[measure].items())
        if len(points) == 1:
            return points[0][1]
        for (low, low_ms), (high, high_ms) in pairwise(points):
            if num_tokens <= high or high == points[-1][0]:
                share = (num_tokens - low) / (high - low)
                return max(low_ms + share * (high_ms - low_ms), 0.0)
        raise AssertionError("the last pair takes all that is left")


def length_grid(pools: Sequence[MeasuredPool], measure: str, lengths: Axis, targets: Axis) -> list[list[int]]:
    """A table of lengths by targets: rows are bands of tokens, columns bands of ``measure`` in ms.

    A pool meets a cell if what it takes in the middle of the row is within the upper edge of the column.
    """
    return [
        [
            _cheapest(pools, {measure: _middle(lengths, row)}, {measure: targets.band(column)[1]})
            for column in range(targets.resolution)
        ]
        for row in range(lengths.resolution)
    ]


def target_grid(pools: Sequence[MeasuredPool], ttft: Axis, itl: Axis, num_tokens: float) -> list[list[int]]:
    """A table of both targets, for requests of ``num_tokens``: a pool meets a cell if it meets both upper edges."""
    at = {"ttft": num_tokens, "itl": num_tokens}
    return [
        [
            _cheapest(pools, at, {"ttft": ttft.band(row)[1], "itl": itl.band(column)[1]})
            for column in range(itl.resolution)
        ]
        for row in range(ttft.resolution)
    ]


def priorities(pools: Sequence[MeasuredPool], measures: Sequence[str], num_tokens: float) -> list[int]:
    """For each pool its place among them, the fastest first."""
    order = sorted(range(len(pools)), key=lambda pool: _total_ms(pools[pool], dict.fromkeys(measures, num_tokens)))
    return [order.index(pool) for pool in range(len(pools))]


def _cheapest(pools: Sequence[MeasuredPool], at: Mapping[str, float], most_ms: Mapping[str, float]) -> int:
    """The cheapest pool that takes at most ``most_ms``, the faster of two; else the fastest of all."""
    numbers = range(len(pools))
    meeting = [
        pool for pool in numbers if all(pools[pool].predict_ms(name, at[name]) <= most_ms[name] for name in most_ms)
    ]
    if meeting:
        return min(meeting, key=lambda pool: (pools[pool].cost, _total_ms(pools[pool], at)))
    return min(numbers, key=lambda pool: _total_ms(pools[pool], at))


def _total_ms(pool: MeasuredPool, at: Mapping[str, float]) -> float:
    return sum(pool.predict_ms(measure, num_tokens) for measure, num_tokens in at.items())


def _middle(axis: Axis, index: int) -> float:
    low, high = axis.band(index)
    return (low + high) / 2
