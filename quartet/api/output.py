"""What one choice has given so far: tokens of all its attempts, their text, and where its time went."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quartet.api.answer import DeltaSink
from quartet.api.request import ChoiceFinished, Resume, TimeBreakdown, Usage
from quartet.engine.base import FinishReason
from quartet.engine.sampling import TokenLogprobs
from quartet.errors import InvalidRequestError, WorkerUnavailableError
from quartet.streams.messages import DecodeStarted
from quartet.text.text_stream import TextDelta, TextStream


class Durations(Protocol):
    """Takes observations, in seconds."""

    def observe(self, amount: float) -> None:
        """Count one."""
        ...


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """What the outputs of one request's choices have in common.

    Attributes:
        num_prompt_tokens: with those of media where these are known.
        num_media_tokens: of these, those that media fill.
        num_placeholders: tokens of the prompt that stand for media whose own number is unknown.
        arrived_at: monotonic seconds.
        tokenize_s: seconds that template and tokenizer took.
        omits_token_ids: text only.
        ttft: told the time from arrival to the first token that is shown.
        itl: told, for each part that is shown, the time since the one before, divided by its tokens.
    """

    num_prompt_tokens: int
    arrived_at: float
    tokenize_s: float
    omits_token_ids: bool
    ttft: Durations
    itl: Durations
    num_media_tokens: int = 0
    num_placeholders: int = 0


class ChoiceOutput:
    """Turns tokens into deltas and keeps the accounts of one choice.

    Attributes:
        token_ids: all tokens that came, those included that are still held back from the client.
        num_attempts: attempts begun.
        num_shown: tokens shown to the client.
    """

    __slots__ = (
        "_choice",
        "_is_over",
        "_last_tokens_at",
        "_logprobs",
        "_makes_text",
        "_matches",
        "_num_cached_tokens",
        "_num_given_bytes",
        "_num_given_tokens",
        "_num_media_tokens",
        "_num_prompt_tokens",
        "_num_timed",
        "_observe_itl",
        "_omits_token_ids",
        "_owed_text",
        "_settings",
        "_sink",
        "_stop_string",
        "_text",
        "_times",
        "num_attempts",
        "num_shown",
        "token_ids",
    )

    def __init__(self, settings: OutputSettings, choice: int, text: TextStream, sink: DeltaSink) -> None:
        """What may be shown goes to ``sink``."""
        self.token_ids: list[int] = []
        self.num_attempts = 0
        self.num_shown = 0
        self._settings = settings
        self._choice = choice
        self._text = text
        self._matches = text.has_stop_strings
        self._sink = sink
        # Here, as they are looked at for each token.
        self._makes_text = text.makes_text
        self._observe_itl = settings.itl.observe
        self._omits_token_ids = settings.omits_token_ids
        self._last_tokens_at = settings.arrived_at
        self._stop_string: str | None = None
        self._is_over = False
        self._num_timed = self._num_given_tokens = self._num_given_bytes = 0
        self._owed_text = ""
        self._logprobs: deque[TokenLogprobs] = deque()
        self._num_cached_tokens: int | None = None
        self._num_prompt_tokens, self._num_media_tokens = settings.num_prompt_tokens, settings.num_media_tokens
        self._times: dict[str, float] = {}

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string ended it."""
        return self._stop_string is not None

    def take(self, offset: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], now: float) -> bool:
        """Take tokens, the first of which is output token number ``offset``; those that are here already are dropped.

        ``logprobs`` is empty or has one entry a token; ``now`` is monotonic seconds.

        Returns:
            Whether more is wanted: neither a stop string nor ``finish`` has ended it.

        Raises:
            WorkerUnavailableError: tokens before ``offset`` are missing: the attempt is broken.
        """
        known = self.token_ids
        if offset != len(known):
            num_known = len(known) - offset
            if num_known < 0:
                raise WorkerUnavailableError("the worker left out tokens")
            token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]
        if not token_ids or self._is_over:
            return not self._is_over
        known.extend(token_ids)
        if self._matches:
            self._logprobs.extend(logprobs)
            self._deliver(self._text.push(token_ids), now)
            return self._stop_string is None
        # Nothing is ever held back: tokens go as they came.
        text = self._text.push_text(token_ids) if self._makes_text else ""
        self._show(token_ids, len(token_ids), text, logprobs, now)
        return True

    def resume(self, resume: Resume) -> None:
        """Go on after what was given elsewhere; called before anything else.

        Raises:
            InvalidRequestError: no text of these tokens has so many bytes; ``field`` is named.
        """
        self.num_attempts = resume.attempt
        self.token_ids.extend(resume.generated_token_ids)
        self.num_shown = self._num_timed = len(self.token_ids)
        delta = self._text.push(self.token_ids)
        self._stop_string, self._is_over = delta.stop_string, delta.stop_string is not None
        known = delta.text.encode()
        # What waits here for a stop string to end or to fail had been given out, if more tokens had come by then.
        self._num_given_tokens = self.num_shown - delta.num_tokens
        self._num_given_bytes = max(resume.num_text_bytes - len(known), 0)
        try:
            self._owed_text = known[resume.num_text_bytes :].decode()
        except UnicodeDecodeError as error:
            message = "the text given ends within a character"
            raise InvalidRequestError(message, field="resume.num_text_bytes") from error

    def begin_attempt(self) -> None:
        """One more attempt begins; the choice was told of as placed."""
        self.num_attempts += 1
        self._give_owed()

    def note_wait(self, waited_s: float) -> None:
        """It waited in the router."""
        self._add_time("router_queue_s", waited_s)

    def note_media(self, duration_s: float) -> None:
        """Media were fetched or encoded for it."""
        self._add_time("media_s", duration_s)

    def note_prompt(self, num_prompt_tokens: int, num_media_tokens: int) -> None:
        """A worker told how many tokens the prompt has, and how many of them media fill."""
        self._num_prompt_tokens, self._num_media_tokens = num_prompt_tokens, num_media_tokens

    def note_prefill(self, duration_s: float) -> None:
        """A prefill hop ended."""
        self._add_time("prefill_s", duration_s)

    def note_prefilled(self, num_cached_tokens: int, queue_s: float) -> None:
        """A prefill hop ended well."""
        self._add_time("prefill_queue_s", queue_s)
        self._note_cached(num_cached_tokens)

    def note_started(self, started: DecodeStarted, *, is_handed_off: bool) -> None:
        """A decode worker began with it."""
        self._add_time("decode_queue_s", started.queue_s)
        if started.num_prompt_tokens:
            settings = self._settings
            num_grown = started.num_prompt_tokens - settings.num_prompt_tokens
            num_media_tokens = settings.num_media_tokens + settings.num_placeholders + num_grown
            self.note_prompt(started.num_prompt_tokens, num_media_tokens)
        if is_handed_off:
            self._add_time("transfer_s", started.transfer_s)
        else:
            self._note_cached(started.num_cached_tokens)

    def finish(self, reason: FinishReason) -> ChoiceFinished:
        """Give out what was held back, and the end. Tokens that a worker still has on the way come too late."""
        self._is_over = True
        self._give_owed()
        self._deliver(self._text.finish(), time.monotonic())
        if self.has_stopped:
            reason = FinishReason.STOP_STRING
        time_breakdown = self.time_breakdown()
        self._times["total_s"] = time_breakdown.total_s or 0.0
        return ChoiceFinished(
            choice=self._choice, reason=reason, stop_string=self._stop_string, usage=self.usage(), time=time_breakdown
        )

    def usage(self) -> Usage:
        """What it used so far, finished or not."""
        return Usage(
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=min(self._num_cached_tokens or 0, self._num_prompt_tokens),
            num_output_tokens=self.num_shown,
            num_attempts=self.num_attempts,
            num_media_tokens=self._num_media_tokens,
        )

    def time_breakdown(self) -> TimeBreakdown:
        """Where its time went: until its end, or until now where it has none."""
        total_s = time.monotonic() - self._settings.arrived_at
        return TimeBreakdown(tokenize_s=self._settings.tokenize_s, **{"total_s": total_s, **self._times})

    def _deliver(self, delta: TextDelta, now: float) -> None:
        if delta.is_empty:
            return
        if self._num_given_tokens or self._num_given_bytes:
            delta = self._leave_out_given(delta)
        logprobs: list[TokenLogprobs] = []
        if self._logprobs:
            logprobs = [self._logprobs.popleft() for _ in range(min(delta.num_tokens, len(self._logprobs)))]
        if delta.stop_string is not None:
            self._stop_string, self._is_over = delta.stop_string, True
        self._show(delta.token_ids, delta.num_tokens, delta.text, logprobs, now)

    def _give_owed(self) -> None:
        text, self._owed_text = self._owed_text, ""
        if text:
            self._sink.add(self._choice, self.num_shown, (), text, ())

    def _leave_out_given(self, delta: TextDelta) -> TextDelta:
        """``delta`` without what the client had before it resumed."""
        num_tokens = min(self._num_given_tokens, delta.num_tokens)
        self._num_given_tokens -= num_tokens
        text = delta.text.encode()
        num_bytes = min(self._num_given_bytes, len(text))
        self._num_given_bytes -= num_bytes
        shown = text[num_bytes:].decode(errors="ignore")
        return TextDelta(shown, delta.token_ids[num_tokens:], delta.stop_string)

    def _show(
        self,
        token_ids: Sequence[int],
        num_tokens: int,
        text: str,
        logprobs: Sequence[TokenLogprobs],
        now: float,
    ) -> None:
        """A part leaves now: what was held back counts as late as the client sees it."""
        offset = self.num_shown
        self.num_shown = num_shown = offset + num_tokens
        if self._omits_token_ids:
            token_ids = ()
        if not (token_ids or text or logprobs):
            return
        num_timed = self._num_timed
        if num_shown != num_timed:
            since_last_s = now - self._last_tokens_at
            self._last_tokens_at = now
            if num_timed:
                self._observe_itl(since_last_s / (num_shown - num_timed))
            else:
                self._times["first_token_s"] = since_last_s
                self._settings.ttft.observe(since_last_s)
            self._num_timed = num_shown
        self._sink.add(self._choice, offset, token_ids, text, logprobs)

    def _note_cached(self, num_tokens: int) -> None:
        # Later attempts find what the first one computed.
        if self._num_cached_tokens is None:
            self._num_cached_tokens = num_tokens

    def _add_time(self, name: str, seconds: float) -> None:
        self._times[name] = self._times.get(name, 0.0) + seconds
