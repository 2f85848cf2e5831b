"""How loaded a worker is, as it reports to routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter


@dataclass(frozen=True, kw_only=True)
class RankCounts:
    """What an engine counts of one data-parallel rank and routers want to know: the one list of these fields.

    In use, held, cached and free blocks add up to ``num_total_blocks``.

    Attributes:
        num_running: requests in the running batch.
        num_waiting: requests that wait for it.
        max_running: most requests that the running batch can have; of an encode worker, most items that it is sent at a
            time; 0: unknown.
        num_queued_prefill_tokens: prompt tokens not computed yet, of running and waiting requests.
        num_unbegun_prefill_tokens: of these, the tokens that no step has begun to compute; cached ones that wait count.
        num_spare_prefill_tokens: so many tokens of prompts that come now are computed in the next step, beside a long
            prompt that it does not end; 0: no such prompt is computed, or prompts wait for the rest of it.
        num_decoding: requests that take one token each in every step.
        num_context_tokens: tokens that these have together.
        max_step_tokens: tokens that a step computes at most; 0: unknown.
        step_time: how long steps take, as measured; ``None``: too few were.
        onboard_time: how long blocks take from tiers below the device; ``None``: there are none, or it is unknown.
        num_held_blocks: blocks held for hand-offs.
        num_cached_blocks: blocks kept for reuse that no request uses.
        num_steps: steps done since the start that did something; grows while anything moves.
    """

    num_running: int = 0
    num_waiting: int = 0
    max_running: int = 0
    num_queued_prefill_tokens: int = 0
    num_unbegun_prefill_tokens: int = 0
    num_spare_prefill_tokens: int = 0
    num_decoding: int = 0
    num_context_tokens: int = 0
    max_step_tokens: int = 0
    step_time: StepTime | None = None
    onboard_time: OnboardTime | None = None
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
        num_output_tokens: of each of ``ended``, those of earlier attempts included; empty: the worker's version does
            not say.
    """

    started: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    num_output_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class TransferTotal:
    """What a worker has pulled by one way since it started.

    Attributes:
        way: a name of ``TransferWay``.
        duration_s: of all pulls, each from its first message to its end; those at the same time count each.
    """

    way: str
    size_bytes: int
    duration_s: float

    @property
    def gb_per_s(self) -> float | None:
        """How fast one pull was, over all of them, in 10^9 bytes a second; ``None``: they took no time."""
        return self.size_bytes / self.duration_s / 1e9 if self.duration_s else None


@dataclass(frozen=True, kw_only=True)
class WorkerLoad:
    """A worker's report.

    Attributes:
        worker_id: the worker that reports.
        epoch: names the start of the worker that reports.
        ranks: one entry a data-parallel rank, in order.
        router_progress: by router id, the last ``router_request_number`` of it that ``ranks`` counts in.
        router_arrivals: by router id, the last one whose prompt tokens are in ``ranks``: a start that waits for the
            running batch has arrived, but is not counted in.
        placements: by router id, what became of its placements; a router without news is left out.
        is_draining: nothing new is taken.
        is_healthy: false once health is NOT_SERVING for another reason than draining.
        transfers: what it has pulled, by way; the way used last comes last. Empty: nothing, or it does not say.
    """

    worker_id: str
    epoch: int
    ranks: tuple[RankLoad, ...]
    router_progress: Mapping[str, int] = field(default_factory=dict)
    router_arrivals: Mapping[str, int] = field(default_factory=dict)
    placements: Mapping[str, PlacementProgress] = field(default_factory=dict)
    is_draining: bool = False
    is_healthy: bool = True
    transfers: tuple[TransferTotal, ...] = ()

    @property
    def num_queued_prefill_tokens(self) -> int:
        """Prompt tokens not computed yet, over all ranks."""
        return sum(rank.num_queued_prefill_tokens for rank in self.ranks)


@dataclass(frozen=True)
class NumberedLoad:
    """A report with the number of the last KV batch that was published before it; 0: none was."""

    load: WorkerLoad
    kv_number: int


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step: a part for the ``n`` prompt tokens that it computes, one for those that decode.

    The first is ``prefill_base_s + n (prefill_s_per_token + n prefill_s_per_token2)``, the second, where those that
    decode have ``c`` tokens of context together, ``decode_base_s + decode_s_per_context_token c``. A part that has
    nothing to do takes no time. The defaults are only good for comparing ranks without measurements.
    """

    prefill_base_s: float = 0.01
    prefill_s_per_token: float = 2e-5
    prefill_s_per_token2: float = 0.0
    decode_base_s: float = 0.01
    decode_s_per_context_token: float = 0.0

    def prefill_s(self, num_tokens: int) -> float:
        """The first part."""
        if not num_tokens:
            return 0.0
        return self.prefill_base_s + num_tokens * (self.prefill_s_per_token + num_tokens * self.prefill_s_per_token2)

    def prefill_in_steps_s(self, num_tokens: int, max_step_tokens: int, decode_s: float) -> float:
        """Seconds until ``num_tokens`` prompt tokens are computed, in steps that also take ``decode_s`` each."""
        num_full, rest = divmod(num_tokens, max_step_tokens)
        full_s = num_full * (self.prefill_s(max_step_tokens) + decode_s) if num_full else 0.0
        return full_s + (self.prefill_s(rest) + decode_s if rest else 0.0)

    def decode_s(self, num_context_tokens: int) -> float:
        """The second part."""
        if not num_context_tokens:
            return 0.0
        return self.decode_base_s + self.decode_s_per_context_token * num_context_tokens


@dataclass(frozen=True, kw_only=True)
class OnboardTime:
    """Seconds a token in which blocks come from tiers below the device; 0: unknown, or there is no such tier."""

    host_s_per_token: float = 0.0
    disk_s_per_token: float = 0.0
