"""The log line and the metrics of one request, collected while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import fields

from quartet.api.output import ChoiceOutput
from quartet.api.placement import PlacedChoice
from quartet.api.request import ChoiceFinished, TimeBreakdown, Usage
from quartet.errors import ServingError
from quartet.telemetry.logging import FinishedRequest, log_request
from quartet.telemetry.metrics import RouterMetrics
from router.policy.base import Placement
from router.prepare import RouterRequest

logger = logging.getLogger(__name__)

# The outcome of a choice that its client continues.
_PLACED = "placed"
_TIMES = tuple(item.name for item in fields(TimeBreakdown))


class RequestLog:
    """Notes what happens to one request, and writes it when the request has ended."""

    def __init__(self, request: RouterRequest, metrics: RouterMetrics, *, path: str = "") -> None:
        """``path``: how the client gets the tokens, if not through the call itself."""
        self._path = path
        self._request = request
        self._metrics = metrics
        self._is_prepared = False
        self._placement: Placement | None = None
        self._outputs: Collection[ChoiceOutput] = ()
        self._finished: list[ChoiceFinished] = []
        self._num_given_to_client = 0
        self._failure = ""

    def prepared(self, outputs: Collection[ChoiceOutput]) -> None:
        """The request is checked and tokenized; ``outputs`` know what each choice used, however it ends."""
        self._is_prepared = True
        self._outputs = outputs
        self._metrics.tokenize_time.observe(self._request.tokenize_s)

    def placed(self, placement: Placement) -> None:
        """An attempt begins at ``placement``."""
        self._placement = placement

    def finished(self, finished: ChoiceFinished) -> None:
        """One choice ended."""
        self._finished.append(finished)

    def placed_for_client(self, placed: PlacedChoice) -> None:
        """The client got the end of one choice, or where to continue it."""
        if isinstance(placed.next, ChoiceFinished):
            self.finished(placed.next)
        else:
            self._num_given_to_client += 1

    def failed(self, outcome: str) -> None:
        """The request failed; ``outcome`` is the error's reason in lower case."""
        self._failure = outcome

    def write(self, total_s: float) -> None:
        """Write the line and update the metrics; called once, at the end."""
        if len(self._finished) == len(self._outputs):  # their ends have all figures
            usages = [finished.usage for finished in self._finished]
            times = [finished.time for finished in self._finished]
        else:
            usages = [output.usage() for output in self._outputs]
            times = [output.time_breakdown() for output in self._outputs]
        used, longest, start = _summed(usages), _longest(times), self._request.start
        self._count_outcomes()
        if used is not None:
            self._count_use(used, usages, times)
        line = FinishedRequest(
            request_id=self._request.request_id,
            outcome=self._outcome(),
            path=self._path,
            tenant=start.tenant,
            client_request_id=start.client_request_id,
            num_choices=start.num_choices,
            media_s=longest.media_s,
            router_queue_s=longest.router_queue_s,
            prefill_s=longest.prefill_s,
            prefill_queue_s=longest.prefill_queue_s,
            decode_queue_s=longest.decode_queue_s,
            transfer_s=longest.transfer_s,
            first_token_s=longest.first_token_s,
            total_s=total_s,
        )
        if self._is_prepared:
            line.model = self._request.pool.key.model_name
            line.encode_worker = self._request.encode_worker
            line.tokenize_s = self._request.tokenize_s
        if used is not None:
            line.num_prompt_tokens, line.num_cached_tokens = used.num_prompt_tokens, used.num_cached_tokens
            line.num_output_tokens, line.num_attempts = used.num_output_tokens, used.num_attempts
        if self._placement is not None:
            line.prefill_worker = "" if self._placement.prefill is None else self._placement.prefill.worker_id
            line.decode_worker = self._placement.decode.worker_id
        log_request(logger, line)

    def _outcome(self) -> str:
        if self._failure:
            return self._failure
        outcomes = {finished.reason.value for finished in self._finished}
        if self._num_given_to_client:
            outcomes.add(_PLACED)
        return ",".join(sorted(outcomes)) or "cancelled"

    def _count_outcomes(self) -> None:
        for finished in self._finished:
            self._metrics.requests[finished.reason.value].inc()
        for _ in range(self._num_given_to_client):
            self._metrics.requests[_PLACED].inc()
        if not self._failure:
            return
        # Before the request is prepared, its number of choices is only the client's claim.
        num_failed = len(self._outputs) - len(self._finished) if self._is_prepared else 1
        for _ in range(num_failed):
            self._metrics.requests[self._failure].inc()

    def _count_use(self, used: Usage, usages: Sequence[Usage], times: Sequence[TimeBreakdown]) -> None:
        model = self._metrics.for_model(self._request.pool.key.model_name)
        if self._placement is not None:
            # The choices share one prompt.
            model.prompt_tokens.inc(used.num_prompt_tokens)
            model.cached_tokens.inc(used.num_cached_tokens)
        for usage, time in zip(usages, times, strict=True):
            model.output_tokens.inc(usage.num_output_tokens)
            if not self._num_given_to_client:  # otherwise the router does not see its end
                model.duration.observe(time.total_s or 0.0)


def outcome_of(error: BaseException) -> str:
    """The outcome of a request that ended with ``error``, as one word."""
    if isinstance(error, ServingError):
        return error.reason.lower()
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "internal"


def _summed(usages: Sequence[Usage]) -> Usage | None:
    """What the choices used together: the sum of output tokens, and the highest of the rest. ``None``: no choices."""
    if len(usages) < 2:
        return usages[0] if usages else None
    return Usage(
        num_prompt_tokens=max(usage.num_prompt_tokens for usage in usages),
        num_cached_tokens=max(usage.num_cached_tokens for usage in usages),
        num_output_tokens=sum(usage.num_output_tokens for usage in usages),
        num_attempts=max(usage.num_attempts for usage in usages),
    )


def _longest(times: Sequence[TimeBreakdown]) -> TimeBreakdown:
    """For each part of the time, the longest that any choice took."""
    if len(times) == 1:
        return times[0]
    durations = {name: [vars(time)[name] for time in times if vars(time)[name] is not None] for name in _TIMES}
    return TimeBreakdown(**{name: max(found, default=None) for name, found in durations.items()})
