"""The spans of one request in the router: phases that follow each other without a gap, and hops among them.

Each is made when it has ended. The phases until a request is prepared are the request's; then each choice has its own.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType

from quartet.errors import ServingError
from quartet.streams.messages import RequestContext
from quartet.telemetry import span_names as names
from quartet.telemetry.logging import MAX_FIELD_LENGTH, cut, name_trace
from quartet.telemetry.tracing import Attribute, Trace
from router.policy.base import Placement


class RequestTrace:
    """One sampled request.

    Attributes:
        prepare: its phases until its choices run.
    """

    def __init__(self, trace: Trace, received_at: float, arrived_at: float) -> None:
        """Its first byte came at ``received_at``, and it at ``arrived_at``; in monotonic seconds, as all times here."""
        self._trace = trace
        self._received_at = received_at
        self._arrived_at = arrived_at
        self._was_relayed = False
        self._unname: Callable[[], None] | None = None
        self.prepare = Phases(trace, {}, received_at)
        self.prepare.begin("read")

    def choice(self, number: int) -> ChoiceTrace:
        """The trace of a choice that begins to run."""
        self.prepare.end()
        return ChoiceTrace(self._trace, number, self.prepare.ended_at)

    def begin_encode(self, context: RequestContext, worker_id: str) -> Phases:
        """An encode begins: ``context`` is told of its span, which the caller ends."""
        hop = Phases(self._trace, {names.WORKER: worker_id, names.ATTEMPT: context.attempt}, time.monotonic())
        context.traceparent = hop.begin("encode hop", is_parent=True)
        context.sent_at_unix_ns = self._trace.to_unix_ns(hop.ended_at)
        return hop

    def begin_relay(self, namespace: str) -> tuple[Phases, str]:
        """Another router begins to run it, or a choice of it: the span, which the caller ends, and its traceparent."""
        self.prepare.end()
        begin = time.monotonic() if self._was_relayed else self.prepare.ended_at
        self._was_relayed = True
        hop = Phases(self._trace, {names.NAMESPACE: namespace}, begin)
        return hop, hop.begin("relay hop", is_parent=True)

    def name_in_logs(self) -> None:
        """Let lines that the current task logs name the request's span, until it has ended."""
        self._unname = name_trace(self._trace.trace_id, self._trace.span_id)

    async def named_in_logs(self, run: Callable[[], Awaitable[None]]) -> None:
        """Run ``run``; what it logs names the request's span. A task cancelled before it begins calls nothing."""
        self.name_in_logs()
        await run()

    def end(
        self, attributes: Mapping[str, Attribute], first_token_s: float | None, error: BaseException | None
    ) -> None:
        """The request has ended; ``first_token_s`` is from its arrival; ``None``: no token was shown."""
        self.prepare.end(error)
        if self._unname is not None:
            self._unname()
        events = [] if first_token_s is None else [(names.FIRST_TOKEN, self._arrived_at + first_token_s)]
        self._trace.end(
            self._received_at,
            time.monotonic(),
            attributes if error is None else {**attributes, names.ERROR_TYPE: _type_of(error)},
            events=events,
            error=_text_of(error),
            is_server=True,
        )


class PrefillTrace(AbstractContextManager["PrefillTrace"]):
    """A sampled prefill for the router of another namespace, until the end of the block.

    Attributes:
        choice: its phases and hops.
    """

    def __init__(self, trace: Trace, context: RequestContext, arrived_at: float) -> None:
        """It arrived with ``context``, at ``arrived_at``."""
        self._trace = trace
        self._context = context
        self._arrived_at = arrived_at
        self.choice = ChoiceTrace(trace, context.choice, arrived_at)
        self.choice.phases.begin("read")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.choice.phases.end(error)
        context, now = self._context, time.monotonic()
        self._trace.way_here("send", context.sent_at_unix_ns, self._arrived_at)
        attributes: dict[str, Attribute] = {names.REQUEST_ID: context.request_id, names.CHOICE: context.choice}
        if error is not None:
            attributes[names.ERROR_TYPE] = _type_of(error)
        self._trace.end(self._arrived_at, now, attributes, error=_text_of(error), is_server=True)


class Phases:
    """Spans of which each begins where the one before ended.

    Attributes:
        ended_at: when the last one ended.
    """

    __slots__ = ("_attributes", "_common", "_name", "_span_id", "_trace", "ended_at")

    def __init__(self, trace: Trace, common: Mapping[str, Attribute], begin: float) -> None:
        """The first one will begin at ``begin``; all have the attributes ``common``."""
        self._trace = trace
        self._common = common
        self._name = ""  # of the one that has begun; empty: none has
        self._span_id = 0
        self._attributes: dict[str, Attribute] = {}
        self.ended_at = begin

    def begin(self, name: str, attributes: Mapping[str, Attribute] | None = None, *, is_parent: bool = False) -> str:
        """End the one that runs, and begin the next.

        Returns:
            If it ``is_parent``, the traceparent that names it for another process; else that of the request.
        """
        self.end()
        self._name = name
        self._attributes = {**self._common, **attributes} if attributes else {**self._common}
        self._span_id = self._trace.draw() if is_parent else 0
        return self._trace.traceparent_of(self._span_id) if is_parent else self._trace.traceparent

    def note(self, attributes: Mapping[str, Attribute]) -> None:
        """Add attributes to the one that runs."""
        self._attributes.update(attributes)

    def end(self, error: BaseException | None = None) -> None:
        """End the one that runs, if one does."""
        if not self._name:
            return
        now, name, self._name = time.monotonic(), self._name, ""
        if error is not None:
            self._attributes[names.ERROR_TYPE] = _type_of(error)
        self._trace.span(
            name,
            self.ended_at,
            now,
            self._attributes,
            span_id=self._span_id,
            error=_text_of(error),
        )
        self.ended_at = now


class ChoiceTrace:
    """One choice of a sampled request.

    Attributes:
        phases: what it does, one after the other.
        traceparent, sent_at_unix_ns: for the start that is made now.
    """

    def __init__(self, trace: Trace, number: int, begin: float) -> None:
        """The request is prepared since ``begin``."""
        self._trace = trace
        self._begin = begin
        self._common: dict[str, Attribute] = {names.CHOICE: number, names.ATTEMPT: 0}
        self.phases = Phases(trace, self._common, begin)
        self.traceparent = trace.traceparent
        self.sent_at_unix_ns = 0

    def wait(self, name: str, attempt: int, num_tokens: int) -> None:
        """Attempt number ``attempt`` waits for something, with so many tokens of prompt and output."""
        self._common[names.ATTEMPT] = attempt
        self.phases.begin(name, {names.NUM_TOKENS: num_tokens})

    def placed(self, placement: Placement) -> None:
        """The wait has ended: the policy has chosen."""
        noted: dict[str, Attribute] = {names.DECODE_WORKER: placement.decode.worker_id}
        if placement.prefill is not None:
            noted[names.PREFILL_WORKER] = placement.prefill.worker_id
        if placement.num_cached_tokens:
            noted[names.NUM_MATCHED_TOKENS] = placement.num_cached_tokens
        if placement.cost is not None:
            noted[names.COST] = placement.cost
        self.phases.note(noted)

    def hop(self, name: str, worker_id: str) -> None:
        """A call to a worker begins. To make its start is part of its way."""
        self.traceparent = self.phases.begin(name, {names.WORKER: worker_id}, is_parent=True)
        self.sent_at_unix_ns = self._trace.to_unix_ns(self.phases.ended_at)

    def sign(self) -> None:
        """Its start is signed for its client."""
        self.traceparent = self.phases.begin("sign")
        self.sent_at_unix_ns = self._trace.to_unix_ns(self.phases.ended_at)

    def reply(self, sent_at_unix_ns: int, shown_at: float) -> None:
        """The first token of an attempt, which its worker sent then, was shown; 0: the worker does not say when.

        The span lies beside the hop's: a hop whose worker died before it sent its spans is to show no gap.
        """
        if sent_at_unix_ns:
            begin = min(self._trace.from_unix_ns(sent_at_unix_ns), shown_at)
            self._trace.span("reply", begin, shown_at, {**self._common})

    def failed(self, error: ServingError) -> None:
        """An attempt failed; what follows is the pause before the next."""
        self.phases.end(error)
        self.phases.begin("pause")


def _text_of(error: BaseException | None) -> str:
    return "" if error is None else cut(str(error) or type(error).__name__, MAX_FIELD_LENGTH)


def _type_of(error: BaseException) -> str:
    return error.reason.lower() if isinstance(error, ServingError) else type(error).__name__
