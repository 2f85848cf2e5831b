"""TensorRT-LLM's statistics of a step, of which any part may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LlmRankStats:
    """What the record of one step says; ``None``: nothing.

    Attributes:
        rank: attention-data-parallel rank that it is of; 1.2 does not say.
        iteration: number of the step.
        latency_s: that it took.
        num_active: requests that were taken up, paused ones included.
        num_queued: requests that weren't.
        num_scheduled: requests that the step computed for: ``num_context`` of them prompts, which had
            ``num_context_tokens`` in the step, and ``num_generating``.
        max_step_tokens: tokens that a step computes at most.
        num_total_blocks, num_used_blocks, num_free_blocks: of KV on the device; what is only kept for reuse is free.
        num_reused_blocks, num_missed_blocks: ever, of prompts.
    """

    rank: int | None = None
    iteration: int | None = None
    latency_s: float | None = None
    num_active: int | None = None
    num_queued: int | None = None
    num_paused: int | None = None
    num_scheduled: int | None = None
    num_context: int | None = None
    num_generating: int | None = None
    num_context_tokens: int | None = None
    max_step_tokens: int | None = None
    num_total_blocks: int | None = None
    num_used_blocks: int | None = None
    num_free_blocks: int | None = None
    num_reused_blocks: int | None = None
    num_missed_blocks: int | None = None

    @property
    def did_something(self) -> bool:
        """Whether the step computed anything; without a word on that, it is believed to have."""
        return self.num_scheduled is None or self.num_scheduled > 0

    def of_every_rank(self) -> LlmRankStats:
        """What holds for ranks that the record is not of: they step together, and have equal pools."""
        nothing = dict.fromkeys((field.name for field in fields(self)), None)
        return replace(
            LlmRankStats(**nothing),
            iteration=self.iteration,
            latency_s=self.latency_s,
            max_step_tokens=self.max_step_tokens,
            num_total_blocks=self.num_total_blocks,
        )


def read_record(record: object) -> LlmRankStats | None:
    """What ``record`` says; ``None`` for something that is none."""
    if not isinstance(record, Mapping):
        return None
    batching, cache = _part(record, "inflightBatchingStats"), _part(record, "kvCacheStats")
    latency_ms = _number(record, "iterLatencyMS")
    return LlmRankStats(
        rank=_count(record, "attentionDpRank"),
        iteration=_count(record, "iter"),
        latency_s=None if latency_ms is None else latency_ms / 1e3,
        num_active=_count(record, "numActiveRequests"),
        num_queued=_count(record, "numQueuedRequests"),
        num_paused=_count(batching, "numPausedRequests"),
        num_scheduled=_count(batching, "numScheduledRequests"),
        num_context=_count(batching, "numContextRequests"),
        num_generating=_count(batching, "numGenRequests"),
        num_context_tokens=_count(batching, "numCtxTokens"),
        max_step_tokens=_count(record, "maxNumTokensRuntime") or _count(record, "maxNumTokensStatic"),
        num_total_blocks=_count(cache, "maxNumBlocks"),
        num_used_blocks=_count(cache, "usedNumBlocks"),
        num_free_blocks=_count(cache, "freeNumBlocks"),
        num_reused_blocks=_count(cache, "reusedBlocks"),
        num_missed_blocks=_count(cache, "missedBlocks"),
    )


def _part(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = record.get(name)
    return part if isinstance(part, Mapping) else {}


def _number(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and value >= 0 else None


def _count(record: Mapping[str, Any], name: str) -> int | None:
    value = _number(record, name)
    return None if value is None else int(value)
