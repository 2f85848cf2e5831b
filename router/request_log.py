"""The log line and the metrics of one request, collected while it runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter

from quartet.api.chat import ChatPrompt
from quartet.api.openai.requests import Caller
from quartet.api.output import ChoiceOutput
from quartet.api.request import TIMES, ChoiceFinished, GenerateStart, TimeBreakdown, Usage
from quartet.api.reuse import Reuse
from quartet.errors import ServingError
from quartet.telemetry import span_names as names
from quartet.telemetry.logging import MAX_FIELD_LENGTH, FinishedRequest, cut, log_request
from quartet.telemetry.metrics import RouterMetrics, WholeAnswers
from quartet.telemetry.tracing import Attribute, ids_of
from router.policy.base import Placement
from router.prepare import RouterRequest
from router.usage_log import UsageLog, UsageRecord

logger = logging.getLogger(__name__)

# The outcome of a choice that its client continues.
_PLACED = "placed"

# The path of what Generate, a Session or HTTP answers.
_GENERATE = "generate"


class RequestLog:
    """Notes what happens to one request, and writes it when the request has ended.

    Attributes:
        placement: where the last attempt began; ``None``: none has begun.
    """

    def __init__(
        self, request: RouterRequest, metrics: RouterMetrics, *, path: str = _GENERATE, usage: UsageLog | None = None
    ) -> None:
        """``path``: how the client gets the tokens; by default through the call itself. ``usage`` gets a record."""
        self._usage = usage
        self.placement: Placement | None = None
        self._path = path
        self._request = request
        self._metrics = metrics
        self._is_prepared = False
        self._outputs: Collection[ChoiceOutput] = ()
        self._num_choices = 0
        self._relayed_usages: Callable[[], Sequence[Usage]] = tuple

    def prepared(self, outputs: Collection[ChoiceOutput]) -> None:
        """The request is checked and tokenized; ``outputs`` know what each choice used, however it ends."""
        self._note_prepared(len(outputs))
        self._outputs = outputs

    def relayed(self, num_choices: int, usages: Callable[[], Sequence[Usage]]) -> None:
        """The request is checked and tokenized, and runs elsewhere.

        ``usages`` gives what its choices have used so far; nothing: that is not known.
        """
        self._note_prepared(num_choices)
        self._relayed_usages = usages

    def _note_prepared(self, num_choices: int) -> None:
        self._is_prepared = True
        self._num_choices = num_choices
        self._metrics.tokenize_time.observe(self._request.tokenize_s)

    def write(
        self, finished: Sequence[ChoiceFinished], error: BaseException | None = None, *, num_given_to_client: int = 0
    ) -> None:
        """Write the line and update the metrics; called once, at the end.

        Args:
            finished: the ends of the choices that ended well.
            error: the error with which the request failed.
            num_given_to_client: choices that their client continues.
        """
        request, outputs, failure = self._request, self._outputs, "" if error is None else outcome_of(error)
        if len(finished) == self._num_choices:  # their ends have all figures
            usages = [one.usage for one in finished]
            times = [one.time for one in finished]
        else:
            usages = [*(output.usage() for output in outputs), *self._relayed_usages()]
            times = [output.time_breakdown() for output in outputs]
        outcomes: list[str] = [*map(attrgetter("reason"), finished), *[_PLACED] * num_given_to_client]
        if failure:
            # Before the request is prepared, its number of choices is only the client's claim.
            num_failed = self._num_choices - len(finished) if self._is_prepared else 1
            outcomes += [failure] * num_failed
        model = request.pool.key.model_name if self._is_prepared else ""
        for outcome in outcomes:
            self._metrics.requests.count(outcome, model)
        used, longest, asked = _summed(usages), _longest(times), request.asked
        trace_id, span_id = ids_of(request.traceparent)
        line = FinishedRequest(
            request_id=request.request_id,
            trace_id=trace_id,
            span_id=span_id,
            outcome=failure or ",".join(sorted(set(outcomes))) or "cancelled",
            path=self._path,
            tenant=asked.tenant,
            client_request_id=asked.client_request_id,
            num_choices=asked.num_choices,
            media_s=longest.media_s,
            router_queue_s=longest.router_queue_s,
            prefill_s=longest.prefill_s,
            prefill_queue_s=longest.prefill_queue_s,
            decode_queue_s=longest.decode_queue_s,
            transfer_s=longest.transfer_s,
            onboard_s=longest.onboard_s,
            first_token_s=longest.first_token_s,
            total_s=time.monotonic() - request.arrived_at,
        )
        if self._is_prepared:
            line.model = model
            if request.media is not None and request.media.encode_rank is not None:
                line.encode_worker = request.media.encode_rank.worker_id
            line.tokenize_s = request.tokenize_s
        if used is not None:
            self._count_use(used, usages, () if num_given_to_client else times)
            if (reuse := _reuse(outputs)) is not None:
                self._count_reuse(reuse)
                line.num_held_tokens, line.num_matched_tokens = reuse.num_held_tokens, reuse.num_matched_tokens
                line.num_evicted_tokens = reuse.num_evicted_tokens
            line.num_prompt_tokens, line.num_cached_tokens = used.num_prompt_tokens, used.num_cached_tokens
            line.num_output_tokens, line.num_attempts = used.num_output_tokens, used.num_attempts
        self._settle(used)
        if self.placement is not None:
            line.prefill_worker = "" if self.placement.prefill is None else self.placement.prefill.worker_id
            line.decode_worker = self.placement.decode.worker_id
        self._put(line)
        if request.trace is not None:
            request.trace.end(_span_attributes(request, line, finished), longest.first_token_s, error)

    def _put(self, line: FinishedRequest) -> None:
        log_request(logger, line)
        if self._usage is not None:
            self._usage.put(_to_record(line, self._request))

    def _settle(self, used: Usage | None) -> None:
        """Charge the request what it took: nothing, if no attempt began."""
        charge = self._request.charge
        if charge is None:
            return
        if self.placement is None:
            charge.settle(0)
        elif used is not None:
            charge.settle(used.num_prompt_tokens + used.num_output_tokens)

    def _count_use(self, used: Usage, usages: Sequence[Usage], times: Sequence[TimeBreakdown]) -> None:
        """Count tokens and durations; ``times`` are empty if the router does not see the end."""
        model = self._metrics.for_model(self._request.pool.key.model_name)
        if self.placement is not None:
            # The choices share one prompt.
            model.prompt_tokens.inc(used.num_prompt_tokens)
            model.cached_tokens.inc(used.num_cached_tokens)
        # Only one choice is resumed; the tokens that its client brought were shown before.
        num_brought = self._request.num_resumed_tokens
        for usage in usages:
            model.output_tokens.inc(max(usage.num_output_tokens - num_brought, 0))
        for usage, spent in zip(usages, times, strict=False):
            model.duration.observe(spent.total_s or 0.0)
            if spent.first_token_s is not None:
                _observe_whole(model.whole, usage, spent)

    def _count_reuse(self, reuse: Reuse) -> None:
        """Count what became of the prompt's tokens, once, whatever the number of choices."""
        for part, counter in self._metrics.reuse.items():
            if num_tokens := getattr(reuse, f"num_{part}_tokens"):
                counter.inc(num_tokens)


def log_refused(caller: Caller, error: BaseException, metrics: RouterMetrics) -> None:
    """Write the line of a request that HTTP refused with ``error`` before it ran, and count it, as one choice.

    It has no id, as no other line is about it, and no usage record.
    """
    outcome = outcome_of(error)
    metrics.requests.count(outcome)
    trace_id, span_id = ids_of(caller.traceparent)
    line = FinishedRequest(
        request_id="",
        outcome=outcome,
        path=_GENERATE,
        trace_id=trace_id,
        span_id=span_id,
        tenant=caller.tenant,
        client_request_id=caller.client_request_id,
        total_s=time.monotonic() - caller.received_at,
    )
    log_request(logger, line)


def _observe_whole(whole: WholeAnswers, usage: Usage, spent: TimeBreakdown) -> None:
    """Note what is known only at the end of a choice that had a token."""
    total_s, first_token_s = spent.total_s or 0.0, spent.first_token_s or 0.0
    # What comes before the batch that computes the prompt.
    queue_s = spent.decode_queue_s if spent.prefill_queue_s is None else spent.prefill_queue_s
    before_s = (spent.tokenize_s or 0.0) + (spent.media_s or 0.0) + (spent.router_queue_s or 0.0) + (queue_s or 0.0)
    decode_s = max(total_s - first_token_s, 0.0)
    inference_s = max(total_s - before_s, decode_s)
    whole.observe(usage.num_prompt_tokens, usage.num_output_tokens, inference_s, decode_s)


def _span_attributes(
    request: RouterRequest, line: FinishedRequest, finished: Sequence[ChoiceFinished]
) -> Mapping[str, Attribute]:
    """The attributes of the request's span: what ``line`` says, in the words of OpenTelemetry where these have any."""
    found: dict[str, Attribute | None] = {
        **_asked_attributes(request),
        names.PROVIDER: "quartet",
        names.REQUEST_MODEL: cut(request.asked.model, MAX_FIELD_LENGTH),
        names.RESPONSE_MODEL: line.model,
        names.RESPONSE_ID: line.request_id,
        names.FINISH_REASONS: sorted({str(one.reason) for one in finished}) or None,
        names.NUM_CHOICES: line.num_choices if line.num_choices > 1 else None,
        names.INPUT_TOKENS: line.num_prompt_tokens,
        names.OUTPUT_TOKENS: line.num_output_tokens,
        names.CACHE_READ_TOKENS: line.num_cached_tokens,
        names.REQUEST_ID: line.request_id,
        names.CLIENT_REQUEST_ID: line.client_request_id,
        names.TENANT: line.tenant,
        names.PATH: line.path,
        names.OUTCOME: line.outcome,
        names.NUM_ATTEMPTS: line.num_attempts,
        names.PREFILL_WORKER: line.prefill_worker,
        names.DECODE_WORKER: line.decode_worker,
    }
    return {name: value for name, value in found.items() if value is not None and value != ""}


def _asked_attributes(request: RouterRequest) -> dict[str, Attribute | None]:
    """What the client asked for, as far as it was read."""
    start = vars(request).get("start")
    if not isinstance(start, GenerateStart):
        return {}
    sampling = start.sampling
    return {
        names.OPERATION: "chat" if isinstance(start.prompt, ChatPrompt) else "text_completion",
        names.MAX_TOKENS: sampling.max_tokens,
        names.TEMPERATURE: sampling.temperature,
        names.TOP_P: sampling.top_p,
    }


def _reuse(outputs: Collection[ChoiceOutput]) -> Reuse | None:
    """Of the choice that found most cached, as ``_summed`` has it."""
    known = [output.reuse for output in outputs if output.reuse is not None]
    return max(known, key=attrgetter("num_cached_tokens"), default=None)


def outcome_of(error: BaseException) -> str:
    """The outcome of a request that ended with ``error``, as one word."""
    if isinstance(error, ServingError):
        return error.reason.lower()
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "internal"


def _to_record(line: FinishedRequest, request: RouterRequest) -> UsageRecord:
    key, resume, num_output_tokens = request.key, request.resume, line.num_output_tokens or 0
    return UsageRecord(
        time=time.time(),
        request_id=line.request_id,
        client_request_id=line.client_request_id,
        tenant=line.tenant,
        key_id="" if key is None else key.id,
        model=line.model,
        path=line.path,
        num_prompt_tokens=line.num_prompt_tokens or 0,
        num_cached_tokens=line.num_cached_tokens or 0,
        num_output_tokens=num_output_tokens,
        # What ended before its tokens were looked at shows no output either.
        num_resumed_tokens=min(request.num_resumed_tokens, num_output_tokens),
        resumed_choice=None if resume is None else resume.choice,
        duration_s=line.total_s or 0.0,
        outcome=line.outcome,
    )


def _summed(usages: Sequence[Usage]) -> Usage | None:
    """What the choices used together: the sum of output tokens, and the highest of the rest. ``None``: no choices."""
    if len(usages) < 2:
        return usages[0] if usages else None
    return Usage(
        num_prompt_tokens=max(usage.num_prompt_tokens for usage in usages),
        num_cached_tokens=max(usage.num_cached_tokens for usage in usages),
        num_output_tokens=sum(usage.num_output_tokens for usage in usages),
        num_attempts=max(usage.num_attempts for usage in usages),
        num_evicted_tokens=max(usage.num_evicted_tokens for usage in usages),
    )


def _longest(times: Sequence[TimeBreakdown]) -> TimeBreakdown:
    """For each part of the time, the longest that any choice took."""
    if len(times) == 1:
        return times[0]
    durations = {name: [vars(time)[name] for time in times if vars(time)[name] is not None] for name in TIMES}
    longest = {name: max(found, default=None) for name, found in durations.items()}
    return TimeBreakdown(**longest, transfer_bytes=0, transfer_way=None)
