"""What the choices of a request have given so far: tokens of all attempts, their text, their times and their ends."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quartet.api.answer import AnswerSink, DeltaSink
from quartet.api.parsing import ParsingSink
from quartet.api.request import Accepted, ChoiceFinished, Resume, TextOptions, TimeBreakdown, Usage
from quartet.api.reuse import ExpectedReuse, Reuse, reuse_of
from quartet.engine.base import FinishReason
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.errors import InvalidRequestError, RequestCancelledError, ServingError, WorkerUnavailableError
from quartet.streams.messages import DecodeStarted
from quartet.text.parsed import OutputParsing
from quartet.text.stop_strings import StopStrings
from quartet.text.text_stream import TextDelta, TextStream
from quartet.text.tokenizer import Tokenizer
from quartet.transfer.base import TransferWay

_MAX_BYTES = 2**64 - 1


class Durations(Protocol):
    """Takes observations, in seconds."""

    def observe(self, amount: float) -> None:
        """Count one."""
        ...


class _Unobserved:
    def observe(self, amount: float) -> None:
        """Count nothing."""


_UNOBSERVED = _Unobserved()


@dataclass(kw_only=True)
class OutputSettings:
    """What the outputs of one request's choices share.

    Not frozen, as ``GenerateStart`` is not.

    Attributes:
        num_prompt_tokens: tokens of the prompt, with those of media if their number is known.
        num_media_tokens: the ones among them that media fill.
        num_placeholders: tokens of the prompt that stand for media with an unknown number of tokens.
        arrived_at: in monotonic seconds.
        tokenize_s: seconds that template and tokenizer took.
        omits_token_ids: text only.
        ttft: observes the time from arrival to the first token shown.
        itl: observes, for each part shown, the time since the part before, divided by its tokens.
    """

    num_prompt_tokens: int
    arrived_at: float
    tokenize_s: float
    omits_token_ids: bool
    ttft: Durations = _UNOBSERVED
    itl: Durations = _UNOBSERVED
    num_media_tokens: int = 0
    num_placeholders: int = 0


class ChoiceOutput:
    """Turns one choice's tokens into deltas, and counts its tokens and times.

    Attributes:
        token_ids: all tokens that came, including those not yet shown to the client.
        num_attempts: attempts begun.
        has_prompt_logprobs: those of the prompt were shown, or a client that resumes has them.
        reuse: what became of its cached tokens; ``None``: unknown, or its prompt was not computed.
    """

    __slots__ = (
        "_book",
        "_choice",
        "_detokenizer",
        "_expected",
        "_is_over",
        "_is_plain",
        "_is_timed",
        "_itl",
        "_last_tokens_at",
        "_logprobs",
        "_matches",
        "_num_cached_tokens",
        "_num_given_bytes",
        "_num_given_tokens",
        "_num_hidden",
        "_num_media_tokens",
        "_num_prompt_tokens",
        "_num_spare_tokens",
        "_num_untimed",
        "_omits_token_ids",
        "_owed_text",
        "_parsing",
        "_settings",
        "_sink",
        "_stop_string",
        "_text",
        "_texts",
        "_times",
        "_transfer_bytes",
        "_transfer_way",
        "has_prompt_logprobs",
        "num_attempts",
        "reuse",
        "token_ids",
    )

    def __init__(
        self,
        settings: OutputSettings,
        choice: int,
        text: TextStream,
        sink: DeltaSink,
        parsing: ParsingSink | None = None,
    ) -> None:
        """``sink`` takes all that may be shown; it is ``parsing`` if the text is parsed."""
        self.token_ids: list[int] = []
        self.num_attempts = 0
        self.has_prompt_logprobs = False
        self.reuse: Reuse | None = None
        self._expected: ExpectedReuse | None = None
        self._settings = settings
        self._choice = choice
        self._text = text
        self._matches = text.has_stop_strings
        self._parsing = parsing
        # Copied to attributes of this object, because each token needs them: as objects, as a bound method would be one
        # more, and with hundreds of streams a token finds each of its objects in no cache of the CPU.
        self._sink = sink
        self._detokenizer = text.detokenizer
        self._texts: Mapping[int, str] = {}  # of tokens that the detokenizer need not see next
        self._itl = settings.itl
        self._omits_token_ids = settings.omits_token_ids
        self._last_tokens_at = settings.arrived_at
        self._stop_string: str | None = None
        self._is_over = False
        self._is_plain = False  # whether a token only has to be counted and shown, as most tokens do after the first
        self._is_timed = False  # whether a part with tokens was shown
        self._num_hidden = 0  # tokens that came, but were not shown
        self._num_untimed = 0  # tokens shown, but in a part with neither ids nor text
        self._book: Callable[[int], int]  # from ``book_by``
        # Tokens until the book must count them: small numbers, which CPython has once. No book does yet.
        self._num_spare_tokens = sys.maxsize
        self._num_given_tokens = self._num_given_bytes = 0
        self._owed_text = ""
        self._logprobs: deque[TokenLogprobs] = deque()
        self._num_cached_tokens: int | None = None
        self._num_prompt_tokens, self._num_media_tokens = settings.num_prompt_tokens, settings.num_media_tokens
        self._times: dict[str, float] = {}
        self._transfer_bytes = 0
        self._transfer_way: TransferWay | None = None

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string ended the choice."""
        return self._stop_string is not None

    @property
    def first_token_s(self) -> float | None:
        """From arrival to the first token shown; ``None``: none was."""
        return self._times.get("first_token_s")

    def take(self, offset: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], now: float) -> bool:
        """Take tokens, the first of them output token number ``offset``; drop those that are already here.

        ``logprobs`` is empty or has one entry a token; ``now`` is monotonic seconds.

        Returns:
            Whether the choice needs more: neither a stop string nor ``finish`` has ended it.

        Raises:
            WorkerUnavailableError: tokens before ``offset`` are missing, so the attempt is broken.
        """
        known, num_tokens = self.token_ids, len(token_ids)
        if self._is_plain and offset == len(known) and num_tokens:
            known.extend(token_ids)
            self._num_spare_tokens -= num_tokens
            if self._num_spare_tokens < 0:
                self._book_more()
            self._itl.observe((now - self._last_tokens_at) / num_tokens)
            self._last_tokens_at = now
            text = self._texts.get(token_ids[0]) if num_tokens == 1 else None
            if text is None:
                text = "" if self._detokenizer is None else self._push(token_ids)
            self._sink.add(self._choice, offset, token_ids, text, logprobs)
            return True
        num_known = len(known) - offset
        if num_known < 0:
            raise WorkerUnavailableError("the worker left out tokens")
        if not self._is_over:
            self._take_new(token_ids[num_known:], logprobs[num_known:], now)
        return not self._is_over

    def take_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Take those of the prompt, with its tokens; drop them if an earlier attempt gave them."""
        if not (self.has_prompt_logprobs or self._is_over):
            self.has_prompt_logprobs = True
            self._sink.add_prompt_logprobs(logprobs)

    def check_count(self, num_tokens: int) -> None:
        """Check that all tokens came: a worker that ended the choice counts ``num_tokens`` of all attempts.

        Raises:
            WorkerUnavailableError: another number came, so the attempt is broken.
        """
        if num_tokens != len(self.token_ids):
            raise WorkerUnavailableError(f"{len(self.token_ids)} of {num_tokens} output tokens came")

    def resume(self, resume: Resume) -> Iterator[int]:
        """Continue after the tokens that the client already has; called before anything else.

        The iterator does it step by step. Before each step it gives what that costs, see ``TextStream.push_in_steps``.

        Raises:
            InvalidRequestError: these tokens can't give that many bytes of text; names ``field``.
        """
        parsing = self._parsing
        self.num_attempts = resume.attempt
        self.token_ids.extend(resume.generated_token_ids)
        self._is_timed = self.has_prompt_logprobs = bool(self.token_ids)
        delta = yield from self._text.push_in_steps(self.token_ids)
        self._stop_string, self._is_over = delta.stop_string, delta.stop_string is not None
        # Text held back here, because it may begin a stop string, was shown if more tokens had come by then.
        self._num_given_tokens = len(self.token_ids) - delta.num_tokens
        if parsing is not None:
            yield from parsing.resume(delta.text, resume)
            return
        known = delta.text.encode()
        self._num_given_bytes = max(resume.num_text_bytes - len(known), 0)
        try:
            self._owed_text = known[resume.num_text_bytes :].decode()
        except UnicodeDecodeError as error:
            message = "the text given ends within a character"
            raise InvalidRequestError(message, field="resume.num_text_bytes") from error

    def begin_attempt(self) -> None:
        """One more attempt begins; the sink already has the choice's placement."""
        self.num_attempts += 1
        self._give_owed()

    def book_by(self, book: Callable[[int], int]) -> None:
        """From now on, call ``book`` with the number of tokens here once it is above what ``book`` last returned."""
        self._book, self._num_spare_tokens = book, -len(self.token_ids)

    def book_no_more(self) -> None:
        """Let go of what ``book_by`` was given: it refers to this, and only the garbage collector would free both."""
        self._num_spare_tokens = sys.maxsize
        del self._book

    def add_time(self, name: str, seconds: float) -> None:
        """The choice spent ``seconds`` more on what the field ``name`` of ``TimeBreakdown`` counts."""
        self._times[name] = self._times.get(name, 0.0) + seconds

    def note_prompt(self, num_prompt_tokens: int, num_media_tokens: int) -> None:
        """A worker reported how many tokens the prompt has, and how many of them media fill."""
        self._num_prompt_tokens, self._num_media_tokens = num_prompt_tokens, num_media_tokens

    def note_expected(self, expected: ExpectedReuse | None) -> None:
        """What the router expects of the attempt that begins; ``None``: it knows nothing."""
        self._expected = expected

    def note_prefilled(
        self, num_cached_tokens: int, queue_s: float, *, num_evicted_tokens: int = 0, onboard_s: float = 0.0
    ) -> None:
        """A prefill hop ended well."""
        self.add_time("prefill_queue_s", queue_s)
        if onboard_s:
            self.add_time("onboard_s", onboard_s)
        self._note_cached(num_cached_tokens, num_evicted_tokens)

    def note_started(self, started: DecodeStarted, *, is_handed_off: bool) -> None:
        """A decode worker began the choice."""
        self.add_time("decode_queue_s", started.queue_s)
        if started.onboard_s:
            self.add_time("onboard_s", started.onboard_s)
        if started.num_prompt_tokens:
            settings = self._settings
            num_grown = started.num_prompt_tokens - settings.num_prompt_tokens
            num_media_tokens = settings.num_media_tokens + settings.num_placeholders + num_grown
            self.note_prompt(started.num_prompt_tokens, num_media_tokens)
        if is_handed_off:
            self.add_time("transfer_s", started.transfer_s)
            if started.transfer_bytes:
                # Bounded as the message's field is: workers may say anything.
                self._transfer_bytes = min(self._transfer_bytes + started.transfer_bytes, _MAX_BYTES)
                self._transfer_way = started.transfer_way
        else:
            self._note_cached(started.num_cached_tokens, started.num_evicted_tokens)

    def finish(self, reason: FinishReason) -> ChoiceFinished:
        """Show what was held back, and end the choice. Tokens still on their way from a worker come too late."""
        self._is_over, self._is_plain = True, False
        self._give_owed()
        self._deliver(self._text.finish(), time.monotonic())
        if self.has_stopped:
            reason = FinishReason.STOP_STRING
        if self._parsing is not None:
            reason = self._parsing.finish(self._num_shown, reason)
        time_breakdown = self.time_breakdown()
        self._times["total_s"] = time_breakdown.total_s or 0.0
        return ChoiceFinished(
            choice=self._choice, reason=reason, stop_string=self._stop_string, usage=self.usage(), time=time_breakdown
        )

    def usage(self) -> Usage:
        """What the choice has used so far, finished or not."""
        return Usage(
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=min(self._num_cached_tokens or 0, self._num_prompt_tokens),
            num_output_tokens=self._num_shown,
            num_attempts=self.num_attempts,
            num_media_tokens=self._num_media_tokens,
            num_evicted_tokens=0 if self.reuse is None else self.reuse.num_evicted_tokens,
        )

    def time_breakdown(self) -> TimeBreakdown:
        """Where the choice's time went: until its end, or until now if it still runs."""
        total_s = time.monotonic() - self._settings.arrived_at
        return TimeBreakdown(
            tokenize_s=self._settings.tokenize_s,
            transfer_bytes=self._transfer_bytes,
            transfer_way=self._transfer_way,
            **{"total_s": total_s, **self._times},
        )

    @property
    def _num_shown(self) -> int:
        return len(self.token_ids) - self._num_hidden

    def _take_new(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], now: float) -> None:
        if not token_ids:
            return
        self.token_ids.extend(token_ids)
        self._num_hidden += len(token_ids)
        self._num_spare_tokens -= len(token_ids)
        if self._num_spare_tokens < 0:
            self._book_more()
        if self._matches:
            self._logprobs.extend(logprobs)
            self._deliver(self._text.push(token_ids), now)
        else:  # nothing is ever held back
            text = "" if self._detokenizer is None else self._push(token_ids)
            self._show(token_ids, len(token_ids), text, logprobs, now)

    def _book_more(self) -> None:
        num_tokens = len(self.token_ids)
        self._num_spare_tokens = self._book(num_tokens) - num_tokens

    def _push(self, token_ids: Sequence[int]) -> str:
        """The text of tokens where there are no stop strings; not all tokens need this after it."""
        assert self._detokenizer is not None, "there is a text"
        text = self._detokenizer.push(token_ids)
        self._texts = self._detokenizer.texts
        return text

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
        if self._owed_text:
            text, self._owed_text = self._owed_text, ""
            self._sink.add(self._choice, self._num_shown, (), text, ())
        elif self._parsing is not None and self._parsing.owes:
            self._parsing.give_owed(self._num_shown)

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
        """Show a part now; tokens held back until now count from when the client sees them."""
        offset = self._num_shown
        self._num_hidden -= num_tokens
        self._num_untimed += num_tokens
        if self._omits_token_ids:
            token_ids = ()
        if not (token_ids or text or logprobs):
            return
        if self._num_untimed:
            since_last_s = now - self._last_tokens_at
            self._last_tokens_at = now
            if self._is_timed:
                self._itl.observe(since_last_s / self._num_untimed)
            else:
                self._times["first_token_s"] = since_last_s
                self._settings.ttft.observe(since_last_s)
            self._num_untimed = 0
            self._is_timed = True
            self._is_plain = not (self._matches or self._omits_token_ids or self._is_over)
        self._sink.add(self._choice, offset, token_ids, text, logprobs)

    def _note_cached(self, num_tokens: int, num_evicted_tokens: int) -> None:
        # Later attempts find the first attempt's tokens in the cache.
        if self._num_cached_tokens is None:
            self._num_cached_tokens = num_tokens
            if self._expected is not None:
                self.reuse = reuse_of(self._expected, num_tokens, num_evicted_tokens)


def make_outputs(
    choices: Iterable[int],
    sink: DeltaSink,
    options: TextOptions,
    tokenizer: Tokenizer | None,
    prompt_tail: Sequence[int],
    settings: OutputSettings,
    parsing: OutputParsing | None = None,
) -> dict[int, ChoiceOutput]:
    """The outputs of one request's choices, by choice.

    Args:
        choices: their numbers.
        sink: takes all that may be shown.
        options: the client's wishes for the text.
        tokenizer: makes the text; ``None``: no text, whatever ``options`` say.
        prompt_tail: the prompt's last few token ids, which the text continues.
        settings: what they share.
        parsing: how reasoning and tool calls are found in the text; ``None``: they stay in it.
    """
    outputs = {}
    stops = StopStrings(options.stop_strings) if options.stop_strings else None
    for choice in choices:
        text = TextStream(
            None if options.omit_text else tokenizer,
            stops,
            include_stop=options.include_stop_string,
            skip_special_tokens=not options.show_special_tokens,
            shown=frozenset() if parsing is None else parsing.format.shown,
            prompt_tail=prompt_tail,
        )
        if parsing is None or not text.makes_text:
            outputs[choice] = ChoiceOutput(settings, choice, text, sink)
        else:
            parser = ParsingSink(parsing, choice, sink)
            outputs[choice] = ChoiceOutput(settings, choice, text, parser, parser)
    return outputs


class RunningChoices:
    """The choices of one running request: their outputs, and the ends that its sink already has.

    Attributes:
        outputs: by choice; empty until the request is ready to run.
        is_accepted: the sink has the request's ``Accepted``.
    """

    def __init__(self, choices: Sequence[int], sink: AnswerSink, arrived_at: float) -> None:
        """``choices`` are their numbers; ``arrived_at`` is the request's arrival, in monotonic seconds."""
        self.outputs: Mapping[int, ChoiceOutput] = {}
        self.is_accepted = False
        self._choices = choices
        self._sink = sink
        self._arrived_at = arrived_at
        self._finished: dict[int, ChoiceFinished] = {}

    @property
    def finished(self) -> Sequence[ChoiceFinished]:
        """The ends of the choices that have ended."""
        return tuple(self._finished.values())

    def accept(self, accepted: Accepted) -> None:
        """Give the sink the request's ``Accepted``; called once."""
        self.is_accepted = True
        self._sink.accept(accepted)

    def finish(self, finished: ChoiceFinished) -> None:
        """Give the sink the end of one choice."""
        self._finished[finished.choice] = finished
        self._sink.finish(finished)

    def settle(
        self, work: asyncio.Task[None], *, cancelled: Callable[[], Accepted] | None, dropped: ServingError | None = None
    ) -> BaseException | None:
        """Report to the sink how ``work``, the task that ran the request, ended.

        Args:
            work: the task, which is done.
            cancelled: set if the client cancelled the request: returns its ``Accepted`` if nothing was placed yet, or
                raises ``ServingError``. Choices that have not ended then get their end.
            dropped: the error of a task that was cancelled although the client did not cancel the request; ``None``:
                ``RequestCancelledError``, because most likely the client no longer reads.

        Returns:
            The error with which the request failed.
        """
        error: BaseException | None = None
        if not work.cancelled():
            error = first_error(work.exception())
        elif cancelled is not None:
            try:
                self._finish_cancelled(cancelled)
            except ServingError as refusal:
                error = refusal
        else:
            error = dropped or RequestCancelledError("the request was dropped")
        self._sink.end(error)
        return error

    def _finish_cancelled(self, cancelled: Callable[[], Accepted]) -> None:
        """Give the client ``Accepted`` and an end of each choice, even if nothing was placed."""
        if not self.is_accepted:
            self.accept(cancelled())
        for choice in self._choices:
            if choice not in self._finished:
                self.finish(self._cancelled_end(choice))

    def _cancelled_end(self, choice: int) -> ChoiceFinished:
        if choice in self.outputs:
            return self.outputs[choice].finish(FinishReason.CANCELLED)
        usage = Usage(num_prompt_tokens=0, num_cached_tokens=0, num_output_tokens=0, num_attempts=0)
        time_breakdown = TimeBreakdown(total_s=time.monotonic() - self._arrived_at)
        return ChoiceFinished(choice=choice, reason=FinishReason.CANCELLED, usage=usage, time=time_breakdown)


def first_error(error: BaseException | None) -> BaseException | None:
    """The error that ended the others of a group; ``error`` itself if it is no group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
