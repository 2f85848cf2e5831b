"""Which pool a request is for: a table over two targets, and what comes next where that pool can't take it. Pure.

The formulas are those of Dynamo's global router (``ai-dynamo/dynamo``, ``components/src/dynamo/global_router``): each
axis is cut into bands of equal width, values outside belong to the outermost bands, and a missing target is the middle.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """One side of a grid: ``resolution`` bands of equal width from ``minimum`` to ``maximum``."""

    minimum: float
    maximum: float
    resolution: int

    @property
    def step(self) -> float:
        """The width of a band."""
        return (self.maximum - self.minimum) / self.resolution

    @property
    def middle(self) -> float:
        """What counts where nothing is asked for."""
        return (self.minimum + self.maximum) / 2

    def index(self, value: float | None) -> int:
        """The band of ``value``, from 0; ``None``: of the middle."""
        bands = ((self.middle if value is None else value) - self.minimum) / self.step
        # Compared before it is cut to a whole number, which infinity and numbers beyond all bands can't be.
        return 0 if bands < 0 else self.resolution - 1 if bands >= self.resolution else int(bands)

    def band(self, index: int) -> tuple[float, float]:
        """The lower and the upper edge of band ``index``."""
        return self.minimum + index * self.step, self.minimum + (index + 1) * self.step


@dataclass(frozen=True, kw_only=True)
class PriorityOverride:
    """Requests with a priority from ``min_priority`` to ``max_priority``, both included, go to ``target_pool``."""

    min_priority: int
    max_priority: int
    target_pool: int


@dataclass(frozen=True)
class Cell:
    """Where a request belongs.

    Attributes:
        row, column: its bands on the two axes.
        pool: number of the pool.
        is_override: its priority decided, not the table.
    """

    row: int
    column: int
    pool: int
    is_override: bool = False


@dataclass(frozen=True)
class Grid:
    """A table of pools: ``mapping[row][column]`` is a pool's number.

    Attributes:
        overrides: the first that has the request's priority counts before the table.
    """

    rows: Axis
    columns: Axis
    mapping: Sequence[Sequence[int]]
    overrides: Sequence[PriorityOverride] = ()

    def select(self, row: float | None, column: float | None, priority: int = 0) -> Cell:
        """The cell of a request; ``None``: the axis' middle."""
        row_index, column_index = self.rows.index(row), self.columns.index(column)
        for override in self.overrides:
            if override.min_priority <= priority <= override.max_priority:
                return Cell(row_index, column_index, override.target_pool, is_override=True)
        return Cell(row_index, column_index, self.mapping[row_index][column_index])


def retry_order(selected: int, priorities: Sequence[int]) -> list[int]:
    """Pools that may take a request of pool ``selected`` which it failed: faster ones, from slow to fast.

    ``priorities`` has a number for each pool; a lower one is faster.
    """
    faster = [pool for pool, priority in enumerate(priorities) if priority < priorities[selected]]
    return sorted(faster, key=lambda pool: (-priorities[pool], pool))


def fallback_order(selected: int, priorities: Sequence[int]) -> list[int]:
    """All pools in the order in which a request of pool ``selected`` is offered to them.

    Its own pool, others as fast, faster ones from slow to fast, since these keep its targets, then slower ones from
    fast to slow.
    """
    own = priorities[selected]
    equal = [pool for pool, priority in enumerate(priorities) if priority == own and pool != selected]
    slower = [pool for pool, priority in enumerate(priorities) if priority > own]
    slower.sort(key=lambda pool: (priorities[pool], pool))
    return [selected, *equal, *retry_order(selected, priorities), *slower]


@dataclass(frozen=True, kw_only=True)
class PoolState:
    """A pool as the global router sees it.

    Attributes:
        obstacle: why no request can run there now, such as that it has no ready worker; empty: one can.
        num_requests: requests that run or wait at its workers, and those on the way there.
        max_requests: so many run at once; 0: not known.
    """

    obstacle: str = ""
    num_requests: int = 0
    max_requests: int = 0

    @property
    def fill(self) -> float:
        """The share of its places that is taken; above 1 requests wait. 0: its size is not known."""
        return self.num_requests / self.max_requests if self.max_requests else 0.0

    @property
    def is_full(self) -> bool:
        """Whether another request would wait."""
        return self.fill >= 1


@dataclass(frozen=True)
class PoolOption:
    """One pool, as it looked when a request's pool was chosen.

    Attributes:
        pool: its number.
        is_chosen: the request goes there.
        why: why it was chosen, or why not.
    """

    pool: int
    is_chosen: bool
    why: str


@dataclass(frozen=True)
class PoolChoice:
    """The pool of one request.

    Attributes:
        pool: its number; ``None``: none can take the request.
        options: all pools in the order in which they were looked at.
    """

    pool: int | None
    options: Sequence[PoolOption]


def choose(
    cell: Cell, priorities: Sequence[int], states: Sequence[PoolState], failed: Collection[int] = frozenset()
) -> PoolChoice:
    """Choose the cell's pool; where it can't take the request or is full, the next that can and is not.

    Where all are full, the one of which the smallest share is taken. ``failed`` had the request and failed it.
    """
    order = fallback_order(cell.pool, priorities)
    refusals = {pool: _refusal(states[pool], is_failed=pool in failed) for pool in order}
    open_pools = [pool for pool in order if not refusals[pool]]
    chosen: int | None = None
    if open_pools:
        free = [pool for pool in open_pools if not states[pool].is_full]
        chosen = free[0] if free else min(open_pools, key=lambda pool: states[pool].fill)
    options = [PoolOption(pool, pool == chosen, refusals[pool] or _why(pool, chosen, cell, states)) for pool in order]
    return PoolChoice(chosen, options)


def _refusal(state: PoolState, *, is_failed: bool) -> str:
    return "it failed this request" if is_failed else state.obstacle


def _why(pool: int, chosen: int | None, cell: Cell, states: Sequence[PoolState]) -> str:
    state = states[pool]
    if pool != chosen:
        return "full" if state.is_full else "another pool comes first"
    if pool != cell.pool:
        return "the least full" if state.is_full else "the first that can take it"
    return "the request's priority names it" if cell.is_override else "the grid names it"
