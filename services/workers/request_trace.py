"""The spans of one request in a worker, made from the times that the engine reports."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from quartet.engine.base import Prefilled, Started
from quartet.errors import ServingError
from quartet.streams.messages import RequestContext
from quartet.telemetry import span_names as names
from quartet.telemetry.tracing import NO_ATTRIBUTES, Attribute, Trace, Tracer


class WorkerTrace:
    """One sampled request, and the worker's own span of it. Times are monotonic seconds."""

    def __init__(self, trace: Trace, context: RequestContext, arrived_at: float, *, is_signed: bool = False) -> None:
        """It has arrived with ``context``."""
        self.trace = trace
        self.arrived_at = arrived_at
        self._sent_at_unix_ns = context.sent_at_unix_ns
        self._way = "take up" if is_signed else "send"
        self._attributes: dict[str, Attribute] = {
            names.REQUEST_ID: context.request_id,
            names.CHOICE: context.choice,
            names.ATTEMPT: context.attempt,
        }

    def note(self, attributes: Mapping[str, Attribute]) -> None:
        """Add attributes to the worker's span."""
        self._attributes.update(attributes)

    def end(self, outcome: str, error: ServingError | None = None) -> None:
        """It has ended; called once. The way of its start is shown now: before, it might have been refused."""
        self.trace.way_here(self._way, self._sent_at_unix_ns, self.arrived_at)
        self._attributes[names.OUTCOME] = outcome
        now = time.monotonic()
        self.trace.end(self.arrived_at, now, self._attributes, events=self._events(now, outcome), error=error)

    def _events(self, now: float, outcome: str) -> Sequence[tuple[str, float, Mapping[str, Attribute]]]:
        """What happened within the span, which ends ``now`` with ``outcome``."""
        return ()


class GenerationTrace(WorkerTrace):
    """A prefill or decode, whose time is divided without a gap into media, queue, pull, onboard, compute and generate.

    Attributes:
        reports_first_token: who sent the start wants to know when its first token came.
    """

    def __init__(
        self,
        trace: Trace,
        context: RequestContext,
        arrived_at: float,
        source: str,
        num_given: int = 0,
        *,
        is_signed: bool = False,
    ) -> None:
        """``source`` is the worker whose hand-off it takes over; empty: it computes its prompt.

        Other workers gave ``num_given`` output tokens before.
        """
        super().__init__(trace, context, arrived_at, is_signed=is_signed)
        self._num_given = num_given
        self.reports_first_token = bool(context.sent_at_unix_ns) and not source
        self._source = source
        self._phase_at = arrived_at
        self._is_scheduled = self._is_prefilled = False
        self._first_token_at: float | None = None

    def media_ready(self) -> None:
        """Its media have come: the engine gets it now."""
        self._phase("media", time.monotonic())

    def started(self, started: Started) -> None:
        """A decode joined the running batch."""
        self.note({names.NUM_CACHED_TOKENS: started.num_cached_tokens})
        at = self._phase_at + started.queue_s + started.transfer_s + started.onboard_s
        if started.transfer_s:
            pulled_at = at - started.onboard_s - started.queue_after_transfer_s
            self._phase("queue", pulled_at - started.transfer_s)
            self._phase("pull", pulled_at, self._pull_attributes(started))
        self._scheduled(at, started.onboard_s)

    def first_token(self) -> int:
        """A decode's first token has come, now, which is returned as Unix time in nanoseconds."""
        now = self._first_token_at = time.monotonic()
        if not self._source:
            self._phase("compute", now)
        return self.trace.to_unix_ns(now)

    def finished(self, num_output_tokens: int) -> None:
        """A decode is complete, with so many output tokens, those of other workers included."""
        self.note({names.OUTPUT_TOKENS: num_output_tokens - self._num_given})

    def prefilled(self, prefilled: Prefilled) -> int:
        """A prefill is complete, now, which is returned as Unix time in nanoseconds."""
        self.note({names.NUM_CACHED_TOKENS: prefilled.num_cached_tokens})
        self._scheduled(self._phase_at + prefilled.queue_s + prefilled.onboard_s, prefilled.onboard_s)
        now = self._first_token_at = time.monotonic()
        self._phase("compute", now)
        self._is_prefilled = True
        return self.trace.to_unix_ns(now)

    def end(self, outcome: str, error: ServingError | None = None) -> None:
        """As ``WorkerTrace.end``, and the phase that runs ends."""
        if self._is_prefilled:
            pass  # what follows is the way of its result
        elif not self._is_scheduled:
            self._phase("queue", time.monotonic())
        elif self._source or self._first_token_at is not None:
            self._phase("generate", time.monotonic())
        else:
            self._phase("compute", time.monotonic())
        super().end(outcome, error)

    def _events(self, now: float, outcome: str) -> Sequence[tuple[str, float, Mapping[str, Attribute]]]:
        end = (names.END, now, {names.OUTCOME: outcome})
        if self._first_token_at is None:
            return (end,)
        return (names.FIRST_TOKEN, self._first_token_at, NO_ATTRIBUTES), end

    def _scheduled(self, at: float, onboard_s: float) -> None:
        """The engine runs it since ``at``, which came after ``onboard_s`` seconds of loading blocks."""
        self._phase("queue", at - onboard_s)
        if onboard_s:
            self._phase("onboard", at)
        self._is_scheduled = True

    def _pull_attributes(self, started: Started) -> Mapping[str, Attribute]:
        attributes: dict[str, Attribute] = {
            names.SOURCE_WORKER: self._source,
            names.TRANSFER_BYTES: started.transfer_bytes,
        }
        if started.transfer_way is not None:
            attributes[names.TRANSFER_WAY] = started.transfer_way.value
        return attributes

    def _phase(self, name: str, end: float, attributes: Mapping[str, Attribute] | None = None) -> None:
        """What was done until ``end``, since the phase before."""
        end = min(end, time.monotonic())
        if end > self._phase_at:
            self.trace.span(name, self._phase_at, end, attributes or {})
            self._phase_at = end


def begin_trace(tracer: Tracer, name: str, context: RequestContext) -> Trace | None:
    """The trace of a request that has arrived and has an id; ``None``: it is not sampled.

    ``name`` is that of the worker's span, which ``context`` names from now on.
    """
    trace = tracer.begin(name, context.traceparent, context.request_id)
    context.traceparent = trace.traceparent
    return trace if trace.is_sampled else None
