"""How loaded a worker is, as it reports to routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter

from quartet.events.step_time import StepTime


@dataclass(frozen=True, kw_only=True)
class RankCounts:
    """What an engine counts of one data-parallel rank and routers want to know: the one list of these fields.

    In use, held, cached and free blocks add up to ``num_total_blocks``.

    Attributes:
        num_running: requests in the running batch.
        num_waiting: requests that wait for it.
        num_queued_prefill_tokens: prompt tokens not computed yet, of running and waiting requests.
        num_unbegun_prefill_tokens: of these, the tokens that no step has begun to compute; cached ones that wait count.
        num_decoding: requests that take one token each in every step.
        num_context_tokens: tokens that these have together.
        max_step_tokens: tokens that a step computes at most; 0: unknown.
        step_time: how long steps take, as measured; ``None``: too few were.
        num_held_blocks: blocks held for hand-offs.
        num_cached_blocks: blocks kept for reuse that no request uses.
        num_steps: steps done since the start that did something; grows while anything moves.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_queued_prefill_tokens: int = 0
    num_unbegun_prefill_tokens: int = 0
    num_decoding: int = 0
    num_context_tokens: int = 0
    max_step_tokens: int = 0
    step_time: StepTime | None = None
    num_in_use_blocks: int = 0
    num_held_blocks: int = 0
    num_cached_blocks: int = 0
    num_free_blocks: int = 0
    num_total_blocks: int = 0
    num_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class RankLoad(RankCounts):
    """Load of one data-parallel rank, as its worker reports it.

    Attributes:
        step_ends_in_s: seconds until the running step should end; 0: none runs, or nothing is known.
    """

    step_ends_in_s: float = 0.0

    @classmethod
    def of(cls, counts: RankCounts, *, step_ends_in_s: float) -> RankLoad:
        """The load with these counts."""
        return cls(**dict(zip(_NAMES, _values(counts), strict=True)), step_ends_in_s=step_ends_in_s)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that another request can't have now: blocks that are only cached are left out."""
        return self.num_in_use_blocks + self.num_held_blocks


_NAMES = tuple(field.name for field in fields(RankCounts))
_values = attrgetter(*_NAMES)


@dataclass(frozen=True)
class PlacementProgress:
    """What became, within the last seconds, of the starts that one router placed for clients, by their numbers.

    Attributes:
        started: those counted in the ranks' load since.
        ended: those that are in it no more, or never were.
    """

    started: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WorkerLoad:
    """A worker's report.

    Attributes:
        worker_id: the worker that reports.
        epoch: of which start of the worker.
        ranks: one entry a data-parallel rank, in order.
        router_progress: by router id, the last ``router_request_number`` of it that ``ranks`` counts in.
        router_arrivals: by router id, the last one whose prompt tokens are in ``ranks``: a start that waits for the
            running batch has arrived, but is not counted in.
        placements: by router id, what became of its placements; a router without news is left out.
        is_draining: nothing new is taken.
        is_healthy: false once health is NOT_SERVING for another reason than draining.
    """

    worker_id: str
    epoch: int
    ranks: tuple[RankLoad, ...]
    router_progress: Mapping[str, int] = field(default_factory=dict)
    router_arrivals: Mapping[str, int] = field(default_factory=dict)
    placements: Mapping[str, PlacementProgress] = field(default_factory=dict)
    is_draining: bool = False
    is_healthy: bool = True

    @property
    def num_queued_prefill_tokens(self) -> int:
        """Prompt tokens not computed yet, over all ranks."""
        return sum(rank.num_queued_prefill_tokens for rank in self.ranks)


@dataclass(frozen=True)
class NumberedLoad:
    """A report with the number of the last KV batch that was published before it; 0: none was."""

    load: WorkerLoad
    kv_number: int
