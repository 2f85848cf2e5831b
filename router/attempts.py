"""One choice from its first placement to its end: hop after hop, and again elsewhere when something breaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from quartet.api.output import ChoiceOutput
from quartet.api.request import prompt_field
from quartet.engine.base import FinishReason, Generation
from quartet.engine.sampling import TokenLogprobs
from quartet.errors import PromptTooLongError, ServingError, WorkerUnavailableError
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.layout import HandOff
from quartet.media.items import MediaFile
from quartet.streams.client import outcome_in_time
from quartet.streams.messages import DecodeStarted, MediaInput, PrefillOutcome, RequestContext, WorkerStart
from router.admission import Ticket
from router.book import Booking, Reservation, numbering
from router.config import AttemptConfig
from router.context import AttemptTools
from router.media.encode import ReadyInputs
from router.policy.base import Pending, Placement
from router.prepare import PreparedRequest, max_sequence_tokens
from router.retry import TRANSFER, Hop, HopFailedError, RetryHints
from router.signing import SignedRun, Signer, SigningTerms, Together

ResultT = TypeVar("ResultT")


class ChoiceRun:
    """Runs one choice.

    Whatever way ``run`` ends, nothing is left behind: no booking, no request on a worker, no hand-off that nobody
    will take.
    """

    def __init__(
        self,
        request: PreparedRequest,
        choice: int,
        output: ChoiceOutput,
        tools: AttemptTools,
        ticket: Ticket,
        on_placed: Callable[[Placement], None],
        avoid: frozenset[str] = frozenset(),
    ) -> None:
        """``on_placed`` hears of each attempt's placement; ``avoid`` names workers not to begin at, if others can."""
        self._hops = ChoiceHops(request, choice, output, tools)
        self._choice = choice
        self._output = output
        self._tools = tools
        self._ticket = ticket
        self._on_placed = on_placed
        self._hints = RetryHints(avoid=set(avoid))
        self._num_begun = 0
        self._together: Together | None = None

    async def run(self) -> FinishReason:
        """Generate to the end, and say what that was; the output is not finished yet.

        Raises:
            ServingError: the last attempt's error, or why no attempt could be made.
        """
        return await self._repeat(self._attempt)

    async def place(self, signer: Signer, together: Together) -> SignedRun | FinishReason:
        """Go as far as a client needs to go on by itself, or to the end if that comes first; raises as ``run`` does.

        It is signed when all that are placed ``together`` with it can be. Whoever gets a ``SignedRun`` and does not
        give it to the client lets go of it.

        Raises:
            PlaceTooLargeError: there is no room for it beside the others.
        """
        self._together = together
        end = await self._repeat(partial(self._place_attempt, signer, together))
        if not isinstance(end, SignedRun):
            together.leave()
        return end

    async def _repeat(self, attempt: Callable[[Reservation], Awaitable[ResultT]]) -> ResultT | FinishReason:
        """What the first ``attempt`` that goes well gives, or why there is nothing left to do."""
        cause = "first"
        while (reason := self._reason_ended()) is None:
            async with self._hops.media_ready():
                reservation = await self._admit()
                try:
                    self._begin(reservation, cause)
                    return await attempt(reservation)
                except HopFailedError as failure:
                    cause = failure.error.reason.lower()
                    if self._num_begun >= self._tools.config.max_attempts:
                        raise failure.error from failure
                    pause_s = self._hints.note(failure, reservation.placement)
                finally:
                    reservation.release()
                    self._tools.admission.wake()
            await self._tools.sleep(pause_s)
        return reason

    async def _admit(self) -> Reservation:
        began = time.monotonic()
        pending = make_pending(
            self._hops.request,
            self._tools.config,
            self._hints,
            self._output.token_ids,
            is_placed=self._together is not None,
        )
        try:
            return await self._tools.admission.admit(
                self._ticket, pending, is_retry=self._num_begun > 0, together=self._together
            )
        finally:
            # Also of those that never got room: how long they waited is all there is to know of them.
            self._output.note_wait(time.monotonic() - began)

    def _begin(self, reservation: Reservation, cause: str) -> None:
        self._num_begun += 1
        self._on_placed(reservation.placement)
        self._output.begin_attempt()
        self._tools.metrics.observe_queue(reservation.waited_s)
        self._tools.metrics.count_attempt(cause)

    def _reason_ended(self) -> FinishReason | None:
        """Why there is nothing left to do: a worker may break after its last token and before its last word."""
        if self._output.has_stopped:
            return FinishReason.STOP_STRING
        if self._hops.request.ended_by(self._output.token_ids):
            return FinishReason.STOP_ID
        is_full = len(self._output.token_ids) >= self._hops.request.max_output_tokens
        return FinishReason.LENGTH if is_full else None

    async def _attempt(self, reservation: Reservation) -> FinishReason:
        """Raises ``HopFailedError``."""
        hand_off = await self._hops.hand_off(reservation)
        return hand_off if isinstance(hand_off, FinishReason) else await self._hops.decode(reservation, hand_off)

    async def _place_attempt(
        self, signer: Signer, together: Together, reservation: Reservation
    ) -> SignedRun | FinishReason:
        """Raises ``HopFailedError``."""
        signer.check_size(len(self._hops.request.prompt_token_ids) + len(self._output.token_ids))
        hand_off = await self._hops.hand_off(reservation)
        if isinstance(hand_off, FinishReason):
            return hand_off
        rank = reservation.placement.decode.data_parallel_rank
        num_tokens = len(self._hops.request.prompt_token_ids) + len(self._output.token_ids)
        terms = SigningTerms(
            request_id=self._hops.request.request_id,
            choice=self._choice,
            hand_off=hand_off,
            deadline=self._hops.request.deadline,
            num_first_tokens=num_tokens,
            is_kept=not together.is_alone,
        )
        try:
            with together.kept(hand_off, self._tools.hops):
                return await together.sign(
                    lambda: signer.sign(
                        reservation, terms, lambda number: self._hops.start(reservation.decode, number, rank, hand_off)
                    )
                )
        except BaseException as error:
            self._hops.drop(hand_off)
            if isinstance(error, ServingError):
                raise HopFailedError(Hop.DECODE, error) from error
            raise


# The hops of one choice's attempts: prefill and decode, each with all that it takes and leaves.


class ChoiceHops:
    """What one choice has workers do. Whatever way a hop ends, nothing that it was given is left held.

    Attributes:
        request: whose choice it is, with its prompt as it is known by now.
    """

    def __init__(self, request: PreparedRequest, choice: int, output: ChoiceOutput, tools: AttemptTools) -> None:
        """What comes goes to ``output``."""
        self.request = request
        self._choice = choice
        self._output = output
        self._tools = tools
        self._inputs: ReadyInputs | None = None

    @asynccontextmanager
    async def media_ready(self) -> AsyncIterator[None]:
        """Has one attempt's media encoded, and keeps them for it. A rank is asked for within.

        Raises:
            ServingError: they can't be encoded, or with them the prompt is too long.
        """
        media = self.request.media
        if media is None:
            yield
            return
        async with media.ready() as self._inputs:
            if self._inputs.sizes:
                self._take_prompt(*media.lay_out(self._inputs.sizes))
            yield

    async def hand_off(self, reservation: Reservation) -> HandOff | FinishReason | None:
        """Prefill where that is elsewhere: what to decode from, or why there is nothing to decode.

        Raises:
            HopFailedError: no prefill, or none that makes sense.
            ServingError: with its media the prompt is too long.
        """
        if reservation.prefill is None:
            return None
        media = self._media()
        outcome = await self._prefill(reservation, reservation.prefill, media)
        reservation.prefill.release()
        try:
            self._learn_prompt(outcome)
            reason = self._take_outcome(outcome)
        except ServingError:
            self.drop(outcome.hand_off)
            raise
        if reason is not None:
            self.drop(outcome.hand_off)
            return reason
        if outcome.hand_off is None:
            raise HopFailedError(Hop.PREFILL, WorkerUnavailableError("the prefill worker handed nothing off"))
        return outcome.hand_off

    async def decode(self, reservation: Reservation, hand_off: HandOff | None) -> FinishReason:
        """Decode to the end, from ``hand_off`` if there is one, and say what that was. Raises ``HopFailedError``."""
        rank, booking = reservation.placement.decode, reservation.decode
        media = self._media() if hand_off is None else ()
        sink = BookedSink(
            self._output, booking, self.request.num_prompt_tokens, hand_off is not None, self._learn_length
        )
        call = None
        try:
            start = self.start(booking, booking.send(), rank.data_parallel_rank, hand_off, media)
            call = self._tools.hops.decode(rank, start, sink)
            finished = await outcome_in_time(
                call,
                start_timeout_s=self._tools.config.decode_start_timeout_s,
                stall_timeout_s=self._tools.config.decode_stall_timeout_s,
            )
        except TimeoutError as error:
            silent = WorkerUnavailableError(f"worker {rank.worker_id} gave no token in time")
            raise HopFailedError(Hop.DECODE, silent) from error
        except ServingError as error:
            raise self._hop_error(Hop.DECODE, error, media) from error
        finally:
            if call is not None:
                call.cancel()
            if not sink.has_started:
                self.drop(hand_off)
                self._drop_media(media)
        return FinishReason.STOP_STRING if finished is None else finished.reason

    def start(
        self,
        booking: Booking,
        number: int,
        rank: int,
        hand_off: HandOff | None = None,
        media: Sequence[MediaInput] = (),
    ) -> WorkerStart:
        """What a worker is told to begin with; ``number`` is that of the start among the router's to it."""
        order = StartOrder(
            choice=self._choice,
            attempt=self._output.num_attempts - 1,
            booking=booking,
            number=number,
            rank=rank,
            generated_token_ids=self._output.token_ids,
            hand_off=hand_off,
            media=media,
        )
        return make_worker_start(self.request, order, self._tools.router_id)

    def drop(self, hand_off: HandOff | None) -> None:
        """Nobody will take ``hand_off``."""
        if hand_off is not None:
            self._tools.hops.drop(hand_off)

    async def _prefill(self, reservation: Reservation, booking: Booking, media: Sequence[MediaInput]) -> PrefillOutcome:
        rank, config = reservation.placement.prefill, self._tools.config
        assert rank is not None
        began, outcome = time.monotonic(), None
        try:
            async with asyncio.timeout(config.prefill_timeout_s):
                start = self.start(booking, booking.send(), rank.data_parallel_rank, media=media)
                outcome = await self._tools.hops.prefill(rank, start).outcome()
        except TimeoutError as error:
            silent = WorkerUnavailableError(f"worker {rank.worker_id} did not prefill in time")
            raise HopFailedError(Hop.PREFILL, silent) from error
        except ServingError as error:
            raise self._hop_error(Hop.PREFILL, error, media) from error
        finally:
            self._output.note_prefill(time.monotonic() - began)
            if outcome is None:
                self._drop_media(media)
        self._output.note_prefilled(outcome.num_cached_tokens, outcome.queue_s)
        return outcome

    def _learn_prompt(self, outcome: PrefillOutcome) -> None:
        """Of a worker that laid media out: the prompt with them. Raises ``HopFailedError``, ``PromptTooLongError``."""
        request = self.request
        if request.media is None or (request.media.is_encoded and not outcome.prompt_token_ids):
            return
        media_ids = [item.media_id for item in request.media.items]
        if not outcome.prompt_token_ids or [span.media_id for span in outcome.media] != media_ids:
            self.drop(outcome.hand_off)
            silent = WorkerUnavailableError("the prefill worker did not tell what the prompt became")
            raise HopFailedError(Hop.PREFILL, silent)
        if not request.media.is_encoded:  # what was encoded fills as much as its encoder said, whatever is put around
            request.media.learn(outcome.media)
        self._take_prompt(outcome.prompt_token_ids, outcome.media)

    def _learn_length(self, num_prompt_tokens: int) -> None:
        if self.request.media is not None and not self.request.media.is_encoded:
            self.request.media.learn_length(num_prompt_tokens)

    def _take_prompt(self, token_ids: Sequence[int], spans: tuple[MediaSpan, ...]) -> None:
        """What the prompt is with its media in it, unless that is known. Raises ``PromptTooLongError``."""
        if spans != self.request.spans:
            self.request = self.request.with_prompt(token_ids, spans)
            self._output.note_prompt(len(token_ids), self.request.num_media_tokens)

    def _take_outcome(self, outcome: PrefillOutcome) -> FinishReason | None:
        """Show the first token at once: it waits for no transfer."""
        logprobs = () if outcome.logprobs is None else (outcome.logprobs,)
        self._output.take(len(self._output.token_ids), (outcome.token_id,), logprobs, time.monotonic())
        if self._output.has_stopped:
            return FinishReason.STOP_STRING
        return outcome.finish_reason

    def _media(self) -> Sequence[MediaInput]:
        """What computing the prompt takes of media; hand-offs are this attempt's from now on."""
        if self._inputs is None:
            return ()
        self._output.note_media(self._inputs.encode_s)
        return self._inputs.take()

    def _hop_error(self, hop: Hop, error: ServingError, media: Sequence[MediaInput]) -> HopFailedError:
        if media and self.request.media is not None:
            error = self.request.media.client_error(error)
            if isinstance(error, TRANSFER):
                self.request.media.failed(media)
            if isinstance(error, PromptTooLongError):
                self.request.media.forget_sizes()
                error = PromptTooLongError(error.message, field=prompt_field(self.request.start.prompt))
        return HopFailedError(hop, error, pulls_media=bool(media))

    def _drop_media(self, media: Sequence[MediaInput]) -> None:
        for item in media:
            if isinstance(item.source, HandOff):
                self._tools.hops.drop(item.source)


# What a worker is told to begin an attempt with.


@dataclass(frozen=True, kw_only=True)
class StartOrder:
    """One attempt's hop to one worker.

    Attributes:
        number: of the start among the router's to that worker.
        rank: data-parallel rank that serves it.
        generated_token_ids: what the choice has given so far.
        hand_off: what it decodes from; ``None``: its prompt is computed there.
        media: what that takes.
    """

    choice: int
    attempt: int
    booking: Booking
    number: int
    rank: int
    generated_token_ids: Sequence[int]
    hand_off: HandOff | None = None
    media: Sequence[MediaInput] = ()


def make_worker_start(request: PreparedRequest, order: StartOrder, router_id: str) -> WorkerStart:
    """The start of ``order``, by the router of that id."""
    start = request.start
    context = RequestContext(
        request_id=request.request_id,
        attempt=order.attempt,
        choice=order.choice,
        timeout_s=max(request.deadline - time.monotonic(), 0.0),
        traceparent=request.traceparent,
        tenant=start.tenant,
        priority=start.priority,
        session_key=start.session_key,
        router_id=numbering(router_id, order.booking.epoch),
        router_request_number=order.number,
    )
    token_ids, spans = request.prompt_token_ids, request.spans
    if order.media and request.media is not None and isinstance(order.media[0].source, MediaFile):
        # Also where another worker told by now what becomes of it.
        token_ids, spans = request.media.token_ids, ()
    generation = Generation(
        prompt_token_ids=token_ids,
        generated_token_ids=tuple(order.generated_token_ids),
        sampling=request.sampling,
        seed=request.seed,
        choice=order.choice,
        adapter=start.adapter,
        cache_salt=start.cache_salt,
        data_parallel_rank=order.rank,
        media=spans,
        output=start.output,
    )
    return WorkerStart(context=context, generation=generation, hand_off=order.hand_off, media=tuple(order.media))


# Where a choice's tokens go that pass the router: to its output, and to the book.


class BookedSink:
    """Brings what a decode gives to its choice's output, and what it holds to the book."""

    __slots__ = (
        "_booking",
        "_is_handed_off",
        "_num_held_tokens",
        "_num_prompt_tokens",
        "_on_length",
        "_output",
        "has_started",
    )

    def __init__(
        self,
        output: ChoiceOutput,
        booking: Booking,
        num_prompt_tokens: int,
        is_handed_off: bool,
        on_length: Callable[[int], None],
    ) -> None:
        """Nothing has come yet; ``is_handed_off``: its first token came from elsewhere.

        ``on_length`` is told how many tokens the prompt has, where the worker says so.
        """
        self.has_started = False
        self._output = output
        self._booking = booking
        self._num_prompt_tokens = num_prompt_tokens
        self._num_held_tokens = 0
        self._is_handed_off = is_handed_off
        self._on_length = on_length

    def started(self, started: DecodeStarted) -> None:
        """It runs; a hand-off was taken."""
        self.has_started = True
        if started.num_prompt_tokens:
            self._num_prompt_tokens = started.num_prompt_tokens
            self._on_length(started.num_prompt_tokens)
        self._output.note_started(started, is_handed_off=self._is_handed_off)

    def take(self, offset: int, token_ids: list[int], logprobs: Sequence[TokenLogprobs], now: float) -> bool:
        """Tokens came; whether more are wanted."""
        output = self._output
        is_more_wanted = output.take(offset, token_ids, logprobs, now)
        num_tokens = self._num_prompt_tokens + len(output.token_ids)
        if num_tokens > self._num_held_tokens:
            self._num_held_tokens = self._booking.hold(num_tokens)
        return is_more_wanted


# What a policy is told of a request.

_NO_MEDIA = frozenset[str]()


def draw_ticket(request: PreparedRequest, num_choices: int, tools: AttemptTools) -> Ticket:
    """The standing in the queue of ``request``, of which ``num_choices`` choices run."""
    num_output_tokens = min(request.max_output_tokens, tools.config.reserve_tokens)
    return tools.admission.ticket(
        request.pool.key,
        priority=request.start.priority,
        tenant=request.start.tenant,
        num_tokens=request.num_prompt_tokens + num_output_tokens,
        num_choices=num_choices,
        deadline=request.deadline,
    )


def make_pending(
    request: PreparedRequest,
    config: AttemptConfig,
    hints: RetryHints,
    generated_token_ids: Sequence[int] = (),
    *,
    is_placed: bool = False,
) -> Pending:
    """One choice of ``request``, after ``generated_token_ids``; what is cached of it is still to be said.

    ``is_placed``: its client goes on with it alone.
    """
    num_generated = len(generated_token_ids)
    # The last token needs no room, as nothing attends to it.
    num_most_tokens = request.num_prompt_tokens + request.max_output_tokens - 1
    num_tokens = request.num_prompt_tokens + num_generated
    if request.num_unknown_tokens:
        num_most_tokens = min(num_most_tokens, max_sequence_tokens(request.pool) - 1)
        num_tokens = _cap_unknown(request, num_generated, num_most_tokens)
    num_left = min(request.max_output_tokens - num_generated, config.reserve_tokens)
    return Pending(
        num_tokens=num_tokens,
        num_reserved_tokens=min(num_tokens + num_left, num_most_tokens),
        num_most_tokens=num_most_tokens,
        adapter=request.start.adapter,
        needs_media=_NO_MEDIA if request.media is None else request.media.needs,
        # A signature protects no media: they are not held for as long as a client may take.
        is_remote=is_placed and request.media is not None,
        avoid=frozenset(hints.avoid),
        prefer_prefill=hints.prefer_prefill,
        priority=request.start.priority,
        arrived_at=request.arrived_at,
        session_key=request.start.session_key,
        sequence_hashes=request.sequence_hashes(generated_token_ids),
    )


def _cap_unknown(request: PreparedRequest, num_generated: int, num_most_tokens: int) -> int:
    """Tokens to prefill at most: of a prompt that may be too long for every rank, those of one that is not."""
    pool, num_least_tokens = request.pool, len(request.prompt_token_ids) + num_generated
    num_tokens = min(request.num_prompt_tokens + num_generated, num_most_tokens)
    if pool.num_prefill_tokens:
        num_tokens = min(num_tokens, pool.num_prefill_tokens)
    return max(num_tokens, num_least_tokens)
