"""A request in the engine, and its sequences."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from tensorrt_llm._stand_in.drawing import Drawer, Guide
from tensorrt_llm._stand_in.kv_blocks import Holding
from tensorrt_llm._stand_in.prompt import PreparedPrompt
from tensorrt_llm._stand_in.switches import SWITCHES
from tensorrt_llm.executor.result import Logprob, RequestOutput, Step
from tensorrt_llm.metrics.enums import MetricNames


class RequestState(enum.Enum):
    """Where a request stands."""

    QUEUED = enum.auto()
    PULLING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclass
class Sequence:
    """One output of a request."""

    index: int
    drawer: Drawer
    cache: Any = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Any]] = field(default_factory=list)
    sum_logprobs: float = 0.0
    num_reported: int = 0
    num_steps: int = 0
    is_done: bool = False
    holdings: list[Holding] = field(default_factory=list)

    def add(self, token_id: int, log_probs: torch.Tensor, num_top: int | None) -> None:
        """Append a token, with the log-probabilities of the ``num_top`` likeliest and its own."""
        self.token_ids.append(token_id)
        self.sum_logprobs += float(log_probs[token_id])
        if num_top is not None:
            self.logprobs.append(ranked(log_probs, token_id, num_top))


@dataclass
class Request:
    """What `generate_async` handed over."""

    request_id: int
    prompt: PreparedPrompt
    params: Any
    streaming: bool
    stream_interval: int
    disagg: Any
    output: RequestOutput
    rank: int
    salt: str
    adapter_path: str | None
    guide: Guide | None
    stop_words: list[tuple[int | str, list[int]]]
    processors: list[Any] = field(default_factory=list)
    state: RequestState = RequestState.QUEUED
    sequences: list[Sequence] = field(default_factory=list)
    is_aborted: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Any]] = field(default_factory=list)
    submitted_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    first_token_at: float | None = None

    @property
    def type(self) -> str:
        """Which phases it is for."""
        kind = self.disagg and self.disagg.request_type
        return kind or "context_and_generation"

    def finish_of(self, seq: Sequence, max_seq_len: int) -> tuple[str | None, int | str | None, int]:
        """Return a sequence's finish reason, stop reason, and how many tokens at its end are no part of the answer."""
        params, last = self.params, seq.token_ids[-1]
        if last == params.end_id and not params.ignore_eos:
            return "stop", None, 0
        for reason, word in self.stop_words:
            if len(seq.token_ids) >= (params.min_tokens or 0) and seq.token_ids[-len(word) :] == word:
                return "stop", reason, 0 if params.include_stop_str_in_output else len(word)
        limit = min(params.max_tokens, max_seq_len - len(self.prompt.token_ids))
        return ("length" if len(seq.token_ids) >= limit else None), None, 0

    def metrics(self, num_tokens: int) -> dict[MetricNames, float]:
        """Times in seconds, of a request that ended."""
        now = time.monotonic()
        first = self.first_token_at or now
        return {
            MetricNames.TTFT: first - self.submitted_at,
            MetricNames.E2E: now - self.submitted_at,
            MetricNames.TPOT: (now - first) / max(num_tokens - 1, 1),
            MetricNames.REQUEST_QUEUE_TIME: (self.started_at or now) - self.submitted_at,
        }

    def report(
        self, seq: Sequence, reason: str | None, stop: int | str | None, num_trimmed: int, disagg: Any = None
    ) -> None:
        """Hand a sequence's new tokens to the handle."""
        new, seq.num_reported = seq.token_ids[seq.num_reported :], len(seq.token_ids)
        self.output.put(
            Step(
                index=seq.index,
                token_ids=list(new),
                logprobs=seq.logprobs[-len(new) :] if seq.logprobs and new else [],
                prompt_logprobs=self.prompt_logprobs,
                sum_logprobs=seq.sum_logprobs,
                num_trimmed=num_trimmed,
                finish_reason=reason,
                stop_reason=stop,
                disaggregated_params=disagg,
                cached_tokens=self.num_cached_tokens,
                decoding_iter=seq.num_steps,
                metrics=self.metrics(len(seq.token_ids)) if reason and self.params.return_perf_metrics else {},
                is_last=all(other.is_done for other in self.sequences),
            )
        )


def ranked(log_probs: torch.Tensor, token_id: int, num_top: int) -> dict[int, Any]:
    """Map the likeliest tokens, and ``token_id`` in releases that always tell it, to their `Logprob`."""
    ids = log_probs.topk(num_top).indices.tolist() if num_top else []
    entry = {other: Logprob(float(log_probs[other]), rank) for rank, other in enumerate(ids, start=1)}
    if token_id not in entry and SWITCHES.drawn_logprob:
        entry[token_id] = Logprob(float(log_probs[token_id]), int((log_probs > log_probs[token_id]).sum()) + 1)
    return entry
