"""Builds what a step gives out, with the times that only the engine thread knows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quartet.engine.base import Failed, Finished, Prefilled, RequestKind, Started, StepLogprobs, StepOutput
from quartet.engine.running import RunningRequest
from quartet.engine.schedule import TokenOut
from quartet.errors import ServingError
from quartet.events.kv import RankEvents, StoredBlocks
from quartet.transfer.base import FetchResult


@dataclass
class _Times:
    """Clock readings of one request, in seconds, and what its transfer cost."""

    submitted_at: float
    started_at: float = 0.0
    transfer_s: float = 0.0
    transfer_bytes: int = 0

    @property
    def queue_s(self) -> float:
        return max(0.0, self.started_at - self.submitted_at - self.transfer_s)


class OutputBuilder:
    """Collects one step's outcomes at a time. Knows a request from ``submit`` until its end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[int, _Times] = {}
        self._clear()

    def submit(self, id: int, submitted_at: float) -> None:
        """Take note of a request; ``submitted_at`` is a reading of the clock."""
        self._times[id] = _Times(submitted_at)

    def take_fetch(self, id: int, result: FetchResult) -> None:
        """Take note of what was pulled for a request."""
        self._times[id].transfer_s = result.duration_s
        self._times[id].transfer_bytes = result.size_bytes

    def start(self, started: Iterable[RunningRequest]) -> None:
        """Say that these are about to be in a step for the first time."""
        now = self._clock()
        for running in started:
            times = self._times[running.id]
            times.started_at = now
            self._started.append(
                Started(running.id, running.num_cached_tokens, times.queue_s, times.transfer_s, times.transfer_bytes)
            )

    def fail(self, id: int, error: ServingError) -> None:
        """Say that a request ended badly, or was refused."""
        self._times.pop(id, None)
        self._failed.append(Failed(id, error))

    def take_tokens(self, outs: Iterable[TokenOut]) -> None:
        """Give out what a step sampled."""
        now = self._clock()
        for out in outs:
            if out.running.request.kind is RequestKind.PREFILL:
                self._prefilled.append(self._to_prefilled(out, now))
            else:
                self._add_token(out)

    def build(
        self, kv_events: Sequence[RankEvents] = (), kv_snapshot: Sequence[StoredBlocks] | None = None
    ) -> StepOutput | None:
        """What came since the last call, with what became of the blocks; ``None`` for nothing."""
        has_kv = kv_events or kv_snapshot is not None
        if not (self._ids or self._started or self._prefilled or self._failed or has_kv):
            return None
        output = StepOutput(
            ids=self._ids,
            num_tokens=[1] * len(self._ids),
            token_offsets=self._offsets,
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            started=self._started,
            finished=self._finished,
            prefilled=self._prefilled,
            failed=self._failed,
            kv_events=kv_events,
            kv_snapshot=kv_snapshot,
        )
        self._clear()
        return output

    def _clear(self) -> None:
        # New lists each time: the consumer keeps the old ones.
        self._ids: list[int] = []
        self._offsets: list[int] = []
        self._token_ids: list[int] = []
        self._logprobs: list[StepLogprobs] = []
        self._started: list[Started] = []
        self._finished: list[Finished] = []
        self._prefilled: list[Prefilled] = []
        self._failed: list[Failed] = []

    def _add_token(self, out: TokenOut) -> None:
        id = out.running.id
        self._ids.append(id)
        self._offsets.append(out.offset)
        self._token_ids.append(out.sampled.token_id)
        if out.sampled.logprobs is not None:
            self._logprobs.append(StepLogprobs(id, (out.sampled.logprobs,)))
        if out.finished is not None:
            del self._times[id]
            self._finished.append(Finished(id, out.finished, out.offset + 1))

    def _to_prefilled(self, out: TokenOut, now: float) -> Prefilled:
        times = self._times.pop(out.running.id)
        return Prefilled(
            id=out.running.id,
            token_id=out.sampled.token_id,
            num_cached_tokens=out.running.num_cached_tokens,
            queue_s=times.queue_s,
            compute_s=now - times.started_at,
            finished=out.finished,
            block_ids=out.held_block_ids,
            num_tokens=out.num_held_tokens,
            logprobs=out.sampled.logprobs,
        )
