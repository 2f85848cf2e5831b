"""What ``quartet top`` knows of a fleet: rows of workers and figures, from the states that a router sends.

The router's page (``router/page/static/charts.js``, ``fleet.js``) defines figures, windows and words; a test holds both
equal.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from quartet.client import FleetState, FleetTotals, WorkerState, WorkerStatus
from quartet.discovery.base import Role

#: Seconds that lines of figures go back.
KEPT_S = 120.0
#: Seconds that rates, the first token, and what is said of caches and failures are over.
RATE_S, TTFT_S, CACHE_S = 5.0, 15.0, 30.0
#: A worker that is gone is shown for so many seconds: it may come back.
GONE_S = 120.0
GONE = "gone"
#: Words for the states of workers.
STATES: Mapping[str, str] = {
    WorkerState.READY: "ready",
    WorkerState.JOINING: "joining",
    WorkerState.SUSPECT: "no contact",
    WorkerState.DRAINING: "draining",
    WorkerState.INCOMPATIBLE: "other version",
    GONE: "gone",
}

#: Seconds that alerts compare counts and ready workers over.
COUNTS_S, LOST_S = 300.0, 600.0

# Between two kept values, as the page gets them: alerts look back for minutes.
_INTERVAL_S = 0.5

ValueT = TypeVar("ValueT")
_Read: TypeAlias = Callable[[FleetTotals], int]


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    """A worker as it is shown. Counts are sums over data-parallel ranks.

    Attributes:
        state: a key of ``STATES``.
        num_requests: requests of this router that are there.
        num_running: requests that compute, of ``max_running`` at a time; 0: it does not say.
        num_waiting: requests that wait for the batch.
        num_queued_tokens: prompt tokens to compute.
        num_in_use_blocks, num_held_blocks, num_cached_blocks: of ``num_blocks``.
        steps_per_s: of its engine, all ranks together; ``None``: not known yet.
    """

    worker_id: str
    role: Role
    model: str
    address: str
    state: str
    num_requests: int
    num_running: int
    max_running: int
    num_waiting: int
    num_queued_tokens: int
    num_in_use_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_blocks: int
    steps_per_s: float | None

    @property
    def used_share(self) -> float:
        """Share of its blocks that another request can't have now."""
        return (self.num_in_use_blocks + self.num_held_blocks) / self.num_blocks if self.num_blocks else 0.0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What people look at first; ``None``: not known yet.

    Attributes:
        num_failed: requests that failed or were refused in the last ``CACHE_S`` seconds.
        ttft_p50_s: median over ``TTFT_S`` seconds, taken evenly within its bucket.
        cached_share: of prompt tokens, those whose KV was cached, over ``CACHE_S`` seconds.
    """

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    ttft_p50_s: float | None = None
    num_queued: int | None = None
    num_running: int | None = None
    cached_share: float | None = None
    num_failed: int = 0


@dataclass
class Series(Generic[ValueT]):
    """Values of the last ``kept_s`` seconds, oldest first; all but the last are ``_INTERVAL_S`` apart at least."""

    kept_s: float
    points: deque[tuple[float, ValueT]] = field(default_factory=deque)

    def add(self, at_s: float, value: ValueT) -> None:
        """One more; times never go back."""
        if len(self.points) > 1 and self.points[-1][0] - self.points[-2][0] < _INTERVAL_S:
            self.points.pop()
        self.points.append((at_s, value))
        while at_s - self.points[0][0] > self.kept_s:
            self.points.popleft()

    def before(self, seconds: float) -> tuple[float, ValueT]:
        """The last one that is so many seconds older than the newest, or the oldest."""
        limit_s = self.points[-1][0] - seconds
        return next((point for point in reversed(self.points) if point[0] <= limit_s), self.points[0])


@dataclass
class _Track:
    """One epoch of a worker: its last row, its steps, and since when each rank has had requests and made no step."""

    epoch: int
    status: WorkerStatus
    row: WorkerRow
    steps: Series[int]
    rank_steps: list[int]
    rank_has_work: list[bool]
    still_since_s: list[float]
    gone_at_s: float | None = None


class Fleet:
    """Takes states as they come; ``rows``, ``figures`` and what alerts ask are of the moment that is given.

    Attributes:
        totals: what the router has counted, of the last minutes; empty: its version does not say.
        ready: by role, ready workers of the last minutes.
        ready_roles: model and role of the ready workers.
        decoded_models: models that have had a decode worker since the first state.
        lines: figures of the last ``KEPT_S`` seconds.
        began_s: when the first state came.
        counts_began_s: when the first ``totals`` of this router came.
    """

    def __init__(self) -> None:
        self.totals: Series[FleetTotals] = Series(COUNTS_S)
        self.ready: Series[Mapping[Role, int]] = Series(LOST_S)
        self.ready_roles: frozenset[tuple[str, Role]] = frozenset()
        self.decoded_models: set[str] = set()
        self.lines: Series[Figures] = Series(KEPT_S)
        self.began_s: float | None = None
        self.counts_began_s: float | None = None
        self._tracks: dict[str, _Track] = {}

    def take(self, state: FleetState, now_s: float) -> None:
        """One more state came, at ``now_s``, in monotonic seconds."""
        if self.began_s is None:
            self.began_s = now_s
        if state.totals is not None:
            if self.totals.points and self.totals.points[-1][1].router_id != state.totals.router_id:
                self.totals.points.clear()  # another router has counts of its own
                self.lines.points.clear()
            if not self.totals.points:
                self.counts_began_s = now_s
            self.totals.add(now_s, state.totals)
        self.lines.add(now_s, self.figures())
        ready = [worker.record for worker in state.workers if worker.state is WorkerState.READY]
        self.ready.add(now_s, Counter(record.role for record in ready))
        self.ready_roles = frozenset((record.model_name, record.role) for record in ready)
        records = [worker.record for worker in state.workers]
        self.decoded_models.update(record.model_name for record in records if record.role is Role.DECODE)
        self._take_workers(state.workers, now_s)

    def figures(self) -> Figures:
        """The figures of the last state."""
        if not self.totals.points:
            return Figures()
        now = self.totals.points[-1][1]
        then = self.totals.before(CACHE_S)[1]
        num_prompt_tokens = now.num_prompt_tokens - then.num_prompt_tokens
        num_cached_tokens = now.num_cached_tokens - then.num_cached_tokens
        return Figures(
            requests_per_s=self._rate(lambda totals: sum(totals.outcomes.values())),
            tokens_per_s=self._rate(lambda totals: totals.num_output_tokens),
            ttft_p50_s=_median_ttft(now, self.totals.before(TTFT_S)[1]),
            num_queued=now.num_queued,
            num_running=now.num_running,
            cached_share=num_cached_tokens / num_prompt_tokens if num_prompt_tokens > 0 else None,
            num_failed=max(0, now.num_failed - then.num_failed),
        )

    def rows(self, now_s: float) -> list[WorkerRow]:
        """All workers by role and id, with those that went in the last ``GONE_S`` seconds."""
        rows = []
        for worker_id, track in list(self._tracks.items()):
            if track.gone_at_s is not None and now_s - track.gone_at_s > GONE_S:
                del self._tracks[worker_id]
                continue
            rows.append(track.row)
        order = list(Role)
        return sorted(rows, key=lambda row: (order.index(row.role), row.worker_id))

    def stalled_ranks(self, after_s: float, now_s: float) -> list[tuple[str, int, float]]:
        """Worker, rank and seconds of those that have had requests and made no step for ``after_s``."""
        return [
            (worker_id, rank, now_s - since_s)
            for worker_id, track in sorted(self._tracks.items())
            if track.gone_at_s is None
            for rank, since_s in enumerate(track.still_since_s)
            if track.rank_has_work[rank] and now_s - since_s >= after_s
        ]

    def _take_workers(self, workers: Sequence[WorkerStatus], now_s: float) -> None:
        listed = {worker.record.worker_id for worker in workers}
        for worker in workers:
            self._take_worker(worker, now_s)
        for worker_id, track in self._tracks.items():
            if worker_id not in listed and track.gone_at_s is None:
                track.gone_at_s = now_s
                track.row = _row(track.status, None, state=GONE)

    def _take_worker(self, worker: WorkerStatus, now_s: float) -> None:
        record, ranks = worker.record, () if worker.load is None else worker.load.ranks
        steps = [rank.num_steps for rank in ranks]
        track = self._tracks.get(record.worker_id)
        if track is None or track.epoch != record.epoch or len(track.rank_steps) != len(steps):
            row = _row(worker, None)
            track = _Track(record.epoch, worker, row, Series(KEPT_S), steps, [False] * len(steps), [now_s] * len(steps))
            self._tracks[record.worker_id] = track
        had_work, track.rank_has_work = track.rank_has_work, [rank.num_running + rank.num_waiting > 0 for rank in ranks]
        for number, num_steps in enumerate(steps):
            if num_steps != track.rank_steps[number] or not (had_work[number] and track.rank_has_work[number]):
                track.still_since_s[number] = now_s
        track.status, track.rank_steps, track.gone_at_s = worker, steps, None
        track.steps.add(now_s, sum(steps))
        track.row = _row(worker, _per_s(track.steps))

    def _rate(self, read: _Read) -> float | None:
        (then_s, then), (now_s, now) = self.totals.before(RATE_S), self.totals.points[-1]
        return max(0, read(now) - read(then)) / (now_s - then_s) if now_s > then_s else None


def short(value: float) -> str:
    """A number of a few digits: 0.25, 12.3, 950, 12.3k, 4.56M."""
    for limit, divisor, unit in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= limit:
            return f"{_trimmed(value / divisor)}{unit}"
    return _trimmed(value)


def milliseconds(seconds: float) -> str:
    """A time to the first token."""
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.{2 if seconds < 10 else 1}f} s"


def _trimmed(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 and value % 1 else f"{value:.2f}".rstrip("0").rstrip(".")


def _per_s(steps: Series[int]) -> float | None:
    (then_s, then), (now_s, now) = steps.before(RATE_S), steps.points[-1]
    return max(0, now - then) / (now_s - then_s) if now_s > then_s else None


def _median_ttft(now: FleetTotals, then: FleetTotals) -> float | None:
    earlier = then.ttft_counts or (0,) * len(now.ttft_counts)
    counts = [count - before for count, before in zip(now.ttft_counts, earlier, strict=True)]
    rest = sum(counts) / 2
    if rest <= 0:
        return None
    bounds = (0.0, *now.ttft_bounds_s, now.ttft_bounds_s[-1])
    for low, high, count in zip(bounds, bounds[1:], counts, strict=True):
        if count >= rest:
            return low + (high - low) * (rest / count)
        rest -= count
    return None


def _row(worker: WorkerStatus, steps_per_s: float | None, *, state: str = "") -> WorkerRow:
    """A row with its counts; with ``state`` ``GONE``, without any."""
    record = worker.record
    ranks = () if worker.load is None or state == GONE else worker.load.ranks
    return WorkerRow(
        worker_id=record.worker_id,
        role=record.role,
        model=record.model_name,
        address=record.grpc_address,
        state=state or worker.state,
        num_requests=0 if state == GONE else worker.num_requests,
        steps_per_s=steps_per_s,
        num_running=sum(rank.num_running for rank in ranks),
        max_running=sum(rank.max_running for rank in ranks),
        num_waiting=sum(rank.num_waiting for rank in ranks),
        num_queued_tokens=sum(rank.num_queued_prefill_tokens for rank in ranks),
        num_in_use_blocks=sum(rank.num_in_use_blocks for rank in ranks),
        num_held_blocks=sum(rank.num_held_blocks for rank in ranks),
        num_cached_blocks=sum(rank.num_cached_blocks for rank in ranks),
        num_blocks=sum(rank.num_total_blocks for rank in ranks),
    )
