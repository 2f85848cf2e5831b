"""The spans of one request in the router: phases that follow each other without a gap, and hops among them.

Each is made when it has ended. The phases until a request is prepared are the request's; then each choice has its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from quartet.discovery.base import Rank
from quartet.errors import RequestTimeoutError, ServingError
from quartet.streams.messages import RequestContext
from quartet.telemetry import span_names as names
from quartet.telemetry.logging import name_trace
from quartet.telemetry.tracing import NO_ATTRIBUTES, Attribute, Trace
from router.policy.base import Placement


class RequestTrace:
    """One sampled request.

    Attributes:
        prepare: its phases until its choices run.
    """

    def __init__(self, trace: Trace, received_at: float, arrived_at: float, sent_at_unix_ns: int = 0) -> None:
        """Its first byte came at ``received_at``, and it at ``arrived_at``; in monotonic seconds, as all times here.

        The router that relays it sent it at ``sent_at_unix_ns``; 0: none does, or it does not say.
        """
        self._trace = trace
        self._received_at = received_at
        self._arrived_at = arrived_at
        self._sent_at_unix_ns = sent_at_unix_ns
        self._first_token_at: float | None = None
        self._branches: list[Phases] = []
        self._unname: Callable[[], None] | None = None
        self.prepare = Phases(trace, {}, received_at)
        self.prepare.begin("read")

    def choice(self, number: int) -> ChoiceTrace:
        """The trace of a choice that begins to run."""
        self.prepare.end()
        choice = ChoiceTrace(self._trace, number, self.prepare.ended_at)
        self._branches.append(choice.phases)
        return choice

    def begin_encode(self, context: RequestContext, worker_id: str) -> Phases:
        """An encode begins: ``context`` is told of its span, which the caller ends."""
        hop = Phases(self._trace, {names.WORKER: worker_id, names.ATTEMPT: context.attempt}, time.monotonic())
        self._branches.append(hop)
        context.traceparent = hop.begin("encode hop", is_parent=True)
        context.sent_at_unix_ns = self._trace.to_unix_ns(hop.ended_at)
        return hop

    def relays(self) -> RelayTrace:
        """The trace of relays that begin, of all choices."""
        self.prepare.end()
        return self._relays(self.prepare.ended_at)

    def relays_alone(self, before: RelayTrace) -> RelayTrace:
        """The trace of one choice that goes on alone after relays that failed; it pauses first."""
        before.phases.end()
        relays = self._relays(before.phases.ended_at)
        relays.phases.begin("pause")
        return relays

    def shown(self, at: float) -> None:
        """A relayed choice's first token was shown."""
        self._first_token_at = at

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
        """The request has ended; ``first_token_s`` is from its arrival; ``None``: no token was shown.

        What ``shown`` said goes before that: a relayed request's times are those of its pool.
        """
        self.prepare.end(error)
        for phases in self._branches:
            phases.end(error if isinstance(error, RequestTimeoutError) else None)
        if self._unname is not None:
            self._unname()
        first_token_at = self._first_token_at
        if first_token_at is None and first_token_s is not None:
            first_token_at = self._arrived_at + first_token_s
        self._trace.way_here("send", self._sent_at_unix_ns, self._received_at)
        self._trace.end(
            self._received_at,
            time.monotonic(),
            attributes,
            events=[] if first_token_at is None else [(names.FIRST_TOKEN, first_token_at, NO_ATTRIBUTES)],
            error=error,
            is_server=True,
        )

    def _relays(self, begin: float) -> RelayTrace:
        relays = RelayTrace(self._trace, begin)
        self._branches.append(relays.phases)
        return relays


class PrefillTrace:
    """A sampled prefill for the router of another namespace.

    Attributes:
        choice: its phases and hops.
    """

    def __init__(self, trace: Trace, context: RequestContext, arrived_at: float) -> None:
        """It arrived with ``context``, at ``arrived_at``."""
        self._trace = trace
        self._context = context
        self._arrived_at = arrived_at
        self.choice = ChoiceTrace(trace, context.choice, arrived_at, context.attempt)
        self.choice.phases.begin("read")

    def end(self, error: BaseException | None) -> None:
        """It has ended."""
        self.choice.phases.end(error)
        context, now = self._context, time.monotonic()
        self._trace.way_here("send", context.sent_at_unix_ns, self._arrived_at)
        attributes: dict[str, Attribute] = {names.REQUEST_ID: context.request_id, names.CHOICE: context.choice}
        self._trace.end(self._arrived_at, now, attributes, error=error, is_server=True)


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

    def end(self, error: BaseException | None = None, *, at: float | None = None) -> None:
        """End the one that runs, if one does; ``at`` is when; ``None``: now."""
        if not self._name:
            return
        ended_at, name, self._name = time.monotonic() if at is None else at, self._name, ""
        self._trace.span(name, self.ended_at, ended_at, self._attributes, span_id=self._span_id, error=error)
        self.ended_at = ended_at

    def stop(self, error: BaseException | None) -> None:
        """End the one that runs, unless it was cancelled: the request's end ends that, and knows why."""
        if not isinstance(error, asyncio.CancelledError):
            self.end(error)


class HopTrace:
    """Hops that follow each other, each with one that begins with its start and ends with its answer.

    Attributes:
        phases: what is done, one after the other.
        traceparent, sent_at_unix_ns: for the start that is made now.
    """

    def __init__(self, trace: Trace, common: dict[str, Attribute], begin: float) -> None:
        """What is before ends at ``begin``; all spans have the attributes ``common``."""
        self._trace = trace
        self._common = common
        self.phases = Phases(trace, common, begin)
        self.traceparent = trace.traceparent
        self.sent_at_unix_ns = 0

    def reply(self, sent_at_unix_ns: int, shown_at: float) -> None:
        """The first token of an attempt, which was sent then, was shown; 0: who sent it does not say when.

        The span lies beside the hop's: a hop whose worker died before it sent its spans is to show no gap.
        """
        if sent_at_unix_ns:
            begin = min(self._trace.from_unix_ns(sent_at_unix_ns), shown_at)
            self._trace.span("reply", begin, shown_at, {**self._common})

    def failed(self, error: ServingError) -> None:
        """An attempt failed; what follows is the pause before the next."""
        self.phases.end(error)
        self.phases.begin("pause")

    def _hop(self, name: str, attributes: Mapping[str, Attribute]) -> None:
        """Begin a hop. To make its start is part of its way."""
        self.traceparent = self.phases.begin(name, attributes, is_parent=True)
        self.sent_at_unix_ns = self._trace.to_unix_ns(self.phases.ended_at)


class RelayTrace(HopTrace):
    """What a global router does for a sampled request, or for one choice of it, at one pool after another."""

    def __init__(self, trace: Trace, begin: float) -> None:
        """What is before ends at ``begin``."""
        super().__init__(trace, {}, begin)

    def hop(self, namespace: str, attempt: int) -> None:
        """A pool gets it; its first attempt there has this number."""
        self._hop("relay hop", {names.NAMESPACE: namespace, names.ATTEMPT: attempt})


class ChoiceTrace(HopTrace):
    """One choice of a sampled request."""

    def __init__(self, trace: Trace, number: int, begin: float, attempt: int = 0) -> None:
        """The request is prepared since ``begin``; its first attempt here has the number ``attempt``."""
        super().__init__(trace, {names.CHOICE: number, names.ATTEMPT: attempt}, begin)
        self._shown_at: float | None = None

    def wait(self, name: str, attempt: int, num_tokens: int) -> None:
        """Attempt number ``attempt`` waits for something, with so many tokens of prompt and output."""
        self._common[names.ATTEMPT] = attempt
        self.phases.begin(name, {names.NUM_TOKENS: num_tokens})

    def placed(self, placement: Placement) -> None:
        """The wait has ended: the policy has chosen."""
        self._placed(placement, placement.prefill, placement.decode)

    def prefill_placed(self, placement: Placement) -> None:
        """The same of a prefill for another router: its policy sees workers that prefill as ones that decode."""
        self._placed(placement, placement.decode, None)

    def hop(self, name: str, worker_id: str) -> None:
        """A call to a worker begins."""
        self._hop(name, {names.WORKER: worker_id})

    def first_token(self, sent_at_unix_ns: int) -> None:
        """The first token of a prefill, which its worker sent then, was shown now."""
        self._shown_at = time.monotonic()
        self.reply(sent_at_unix_ns, self._shown_at)

    def prefilled(self) -> None:
        """A prefill hop has ended well, when its token was shown: what follows begins there, and leaves no gap."""
        self.phases.end(at=self._shown_at)

    def sign(self) -> None:
        """Its start is signed for its client."""
        self.traceparent = self.phases.begin("sign")
        self.sent_at_unix_ns = self._trace.to_unix_ns(self.phases.ended_at)

    def _placed(self, placement: Placement, prefill: Rank | None, decode: Rank | None) -> None:
        ranks = {names.PREFILL_WORKER: prefill, names.DECODE_WORKER: decode}
        noted: dict[str, Attribute] = {name: rank.worker_id for name, rank in ranks.items() if rank is not None}
        if placement.num_cached_tokens:
            noted[names.NUM_MATCHED_TOKENS] = placement.num_cached_tokens
        if placement.cost is not None:
            noted[names.COST] = placement.cost
        self.phases.note(noted)
