"""What one choice has given so far: tokens of all its attempts, their text, and where its time went."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from quartet.engine.base import FinishReason
from quartet.engine.sampling import TokenLogprobs
from quartet.errors import WorkerUnavailableError
from quartet.rpc.edge import ChoiceFinished, TimeBreakdown, Usage
from quartet.rpc.inner import DecodeStarted, PrefillOutcome
from quartet.telemetry.metrics import ModelMetrics
from quartet.text.text_stream import TextDelta, TextStream
from router.answer import Answer
from router.prepared import PreparedRequest


class ChoiceOutput:
    """Turns tokens into deltas and keeps the accounts of one choice.

    Attributes:
        token_ids: all tokens that came, those included that are still held back from the client.
        num_attempts: attempts begun.
    """

    def __init__(self, request: PreparedRequest, choice: int, metrics: ModelMetrics, answer: Answer) -> None:
        """What may be shown goes to ``answer``."""
        self.token_ids: list[int] = []
        self.num_attempts = 0
        self._request = request
        self._choice = choice
        self._metrics = metrics
        self._answer = answer
        self._last_tokens_at = request.arrived_at
        options = request.start.text_options
        self._text = TextStream(
            None if options.omit_text else request.text.tokenizer,
            options.stop_strings,
            include_stop=options.include_stop_string,
            skip_special_tokens=not options.show_special_tokens,
            prompt_tail=request.prompt_tail,
        )
        self._omits_token_ids = options.omit_token_ids
        self._stop_string: str | None = None
        self._num_shown = 0
        self._num_timed = 0
        self._logprobs: deque[TokenLogprobs] = deque()
        self._num_cached_tokens: int | None = None
        self._times: dict[str, float] = {}

    @property
    def num_shown(self) -> int:
        """Tokens shown to the client."""
        return self._num_shown

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string ended it."""
        return self._stop_string is not None

    def take(self, offset: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Take tokens, the first of which is output token number ``offset``; those that are here already are dropped.

        Raises:
            WorkerUnavailableError: tokens before ``offset`` are missing: the attempt is broken.
        """
        num_known = len(self.token_ids) - offset
        if num_known < 0:
            raise WorkerUnavailableError("the worker left out tokens")
        if num_known:
            token_ids = token_ids[num_known:]
        if not token_ids or self.has_stopped:
            return
        self.token_ids.extend(token_ids)
        if logprobs:
            self._logprobs.extend(logprobs[num_known:])
        self._deliver(self._text.push(token_ids))

    def note_wait(self, waited_s: float) -> None:
        """It waited in the router."""
        self._add_time("router_queue_s", waited_s)

    def note_prefill(self, duration_s: float, outcome: PrefillOutcome | None) -> None:
        """A prefill hop ended, well with ``outcome``."""
        self._add_time("prefill_s", duration_s)
        if outcome is not None:
            self._add_time("prefill_queue_s", outcome.queue_s)
            self._note_cached(outcome.num_cached_tokens)

    def note_started(self, started: DecodeStarted, *, is_handed_off: bool) -> None:
        """A decode worker began with it."""
        self._add_time("decode_queue_s", started.queue_s)
        if is_handed_off:
            self._add_time("transfer_s", started.transfer_s)
        else:
            self._note_cached(started.num_cached_tokens)

    def finish(self, reason: FinishReason) -> ChoiceFinished:
        """Give out what was held back, and the end."""
        self._deliver(self._text.finish())
        if self.has_stopped:
            reason = FinishReason.STOP_STRING
        time_breakdown = self.time_breakdown()
        self._times["total_s"] = time_breakdown.total_s or 0.0
        return ChoiceFinished(
            choice=self._choice, reason=reason, stop_string=self._stop_string, usage=self.usage(), time=time_breakdown
        )

    def usage(self) -> Usage:
        """What it used so far, finished or not."""
        num_prompt_tokens = len(self._request.prompt_token_ids)
        return Usage(
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=min(self._num_cached_tokens or 0, num_prompt_tokens),
            num_output_tokens=self._num_shown,
            num_attempts=self.num_attempts,
        )

    def time_breakdown(self) -> TimeBreakdown:
        """Where its time went: until its end, or until now where it has none."""
        total_s = time.monotonic() - self._request.arrived_at
        return TimeBreakdown(tokenize_s=self._request.tokenize_s, **{"total_s": total_s, **self._times})

    def _deliver(self, delta: TextDelta) -> None:
        if delta.is_empty:
            return
        logprobs: list[TokenLogprobs] = []
        if self._logprobs:
            logprobs = [self._logprobs.popleft() for _ in range(min(delta.num_tokens, len(self._logprobs)))]
        token_ids = () if self._omits_token_ids else delta.token_ids
        offset = self._num_shown
        self._num_shown += delta.num_tokens
        self._stop_string = delta.stop_string or self._stop_string
        if token_ids or delta.text or logprobs:
            self._observe()
            self._answer.add(self._choice, offset, token_ids, delta.text, logprobs)

    def _observe(self) -> None:
        """A delta leaves now: what was held back counts as late as the client sees it."""
        num_tokens = self._num_shown - self._num_timed
        if not num_tokens:
            return
        now = time.monotonic()
        since_last_s, self._last_tokens_at = now - self._last_tokens_at, now
        if self._num_timed:
            self._metrics.itl.observe(since_last_s / num_tokens)
        else:
            self._times["first_token_s"] = since_last_s
            self._metrics.ttft.observe(since_last_s)
        self._num_timed = self._num_shown

    def _note_cached(self, num_tokens: int) -> None:
        # Later attempts find what the first one computed.
        if self._num_cached_tokens is None:
            self._num_cached_tokens = num_tokens

    def _add_time(self, name: str, seconds: float) -> None:
        self._times[name] = self._times.get(name, 0.0) + seconds
