"""The one log line about a request, and its metrics, gathered while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import fields

from quartet.api.output import ChoiceOutput
from quartet.api.placement import PlacedChoice
from quartet.api.request import ChoiceFinished, GenerateStart, TimeBreakdown, Usage
from quartet.errors import ServingError
from quartet.telemetry.logging import FinishedRequest, log_request
from quartet.telemetry.metrics import RouterMetrics
from router.policy.base import Placement
from router.prepare import PreparedRequest

logger = logging.getLogger(__name__)

# The outcome of a choice that goes on without the router.
_PLACED = "placed"
_TIMES = tuple(item.name for item in fields(TimeBreakdown))


class RequestLog:
    """Notes what happens to one request; writes when it has ended."""

    def __init__(self, request_id: str, start: GenerateStart, metrics: RouterMetrics, *, path: str = "") -> None:
        """``path``: how its client gets the tokens, where that is not by the call itself."""
        self._path = path
        self._request_id = request_id
        self._start = start
        self._metrics = metrics
        self._request: PreparedRequest | None = None
        self._placement: Placement | None = None
        self._outputs: Sequence[ChoiceOutput] = ()
        self._finished: list[ChoiceFinished] = []
        self._num_given_to_client = 0
        self._failure = ""

    def prepared(self, request: PreparedRequest, outputs: Sequence[ChoiceOutput]) -> None:
        """It is checked and tokenized; ``outputs`` will tell what each choice used, however it ends."""
        self._request = request
        self._outputs = outputs
        self._metrics.observe_tokenize(request.tokenize_s)

    def placed(self, placement: Placement) -> None:
        """An attempt begins there."""
        self._placement = placement

    def finished(self, finished: ChoiceFinished) -> None:
        """One choice ended."""
        self._finished.append(finished)

    def placed_for_client(self, placed: PlacedChoice) -> None:
        """Its client was told how one choice ended, or where to go on with it."""
        if isinstance(placed.next, ChoiceFinished):
            self.finished(placed.next)
        else:
            self._num_given_to_client += 1

    def failed(self, outcome: str) -> None:
        """The request ended badly; ``outcome`` is the error's reason in lower case."""
        self._failure = outcome

    def write(self, total_s: float) -> None:
        """Write the line and count; called once, at the end."""
        if len(self._finished) == len(self._outputs):  # what they ended with says it all
            usages = [finished.usage for finished in self._finished]
            times = [finished.time for finished in self._finished]
        else:
            usages = [output.usage() for output in self._outputs]
            times = [output.time_breakdown() for output in self._outputs]
        longest = _longest(times)
        self._count_outcomes()
        if self._request is not None:
            self._count_use(self._request, usages, times)
        if self._failure:
            outcome = self._failure
        else:
            reasons = {finished.reason.value for finished in self._finished}
            outcome = ",".join(sorted(reasons | ({_PLACED} if self._num_given_to_client else set())))
        placement, request = self._placement, self._request
        line = FinishedRequest(
            request_id=self._request_id,
            outcome=outcome or "cancelled",
            model="" if request is None else request.pool.key.model_name,
            path=self._path,
            tenant=self._start.tenant,
            client_request_id=self._start.client_request_id,
            encode_worker="" if request is None else request.encode_worker,
            prefill_worker="" if placement is None or placement.prefill is None else placement.prefill.worker_id,
            decode_worker="" if placement is None else placement.decode.worker_id,
            num_choices=self._start.num_choices,
            num_prompt_tokens=_most(usage.num_prompt_tokens for usage in usages),
            num_cached_tokens=_most(usage.num_cached_tokens for usage in usages),
            num_output_tokens=sum(usage.num_output_tokens for usage in usages) if usages else None,
            num_attempts=_most(usage.num_attempts for usage in usages),
            tokenize_s=None if request is None else request.tokenize_s,
            media_s=longest.media_s,
            router_queue_s=longest.router_queue_s,
            prefill_s=longest.prefill_s,
            prefill_queue_s=longest.prefill_queue_s,
            decode_queue_s=longest.decode_queue_s,
            transfer_s=longest.transfer_s,
            first_token_s=longest.first_token_s,
            total_s=total_s,
        )
        log_request(logger, line)

    def _count_outcomes(self) -> None:
        for finished in self._finished:
            self._metrics.count_request(finished.reason.value)
        for _ in range(self._num_given_to_client):
            self._metrics.count_request(_PLACED)
        if not self._failure:
            return
        # Before it was prepared, its number of choices is only a client's word.
        num_failed = 1 if self._request is None else len(self._outputs) - len(self._finished)
        for _ in range(num_failed):
            self._metrics.count_request(self._failure)

    def _count_use(self, request: PreparedRequest, usages: list[Usage], times: list[TimeBreakdown]) -> None:
        model = self._metrics.for_model(request.pool.key.model_name)
        if self._placement is not None:
            # The choices share one prompt.
            model.prompt_tokens.inc(max(usage.num_prompt_tokens for usage in usages))
            model.cached_tokens.inc(max(usage.num_cached_tokens for usage in usages))
        for usage, time in zip(usages, times, strict=True):
            model.output_tokens.inc(usage.num_output_tokens)
            if not self._num_given_to_client:  # else its end is not seen here
                model.duration.observe(time.total_s or 0.0)


def first_error(error: BaseException) -> BaseException:
    """Of a group, the error that ended the others."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def outcome_of(error: BaseException) -> str:
    """How a request ended that ended with ``error``, in a word."""
    if isinstance(error, ServingError):
        return error.reason.lower()
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "internal"


def _longest(times: Sequence[TimeBreakdown]) -> TimeBreakdown:
    """Of each part of the time that of the choice which it took most."""
    if len(times) == 1:
        return times[0]
    durations = {name: [vars(time)[name] for time in times if vars(time)[name] is not None] for name in _TIMES}
    return TimeBreakdown(**{name: max(found, default=None) for name, found in durations.items()})


def _most(counts: Iterable[int]) -> int | None:
    return max(counts, default=None)
