"""One choice from its first placement to its end: hop after hop, and on another worker when something breaks."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import TypeAlias, TypeVar

from quartet import errors
from quartet.api.convert.prefill import AskedPrefill
from quartet.api.output import ChoiceOutput
from quartet.api.request import ChoicePlacement, prompt_field
from quartet.discovery.base import Rank, Role, WorkerKey
from quartet.engine.base import FinishReason, Generation
from quartet.engine.sampling import OutputOptions, PromptLogprobs
from quartet.errors import PromptTooLongError, ServingError, WorkerUnavailableError
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.layout import HandOff
from quartet.media.items import MediaFile
from quartet.streams.client import FINAL, outcome_in_time, pause_s
from quartet.streams.messages import DecodeStarted, MediaInput, PrefillOutcome, RequestContext, WorkerStart
from quartet.telemetry import span_names
from router.admission import QueuedRequest
from router.book import Booking, Reservation, numbering
from router.config import AttemptConfig
from router.context import RouterContext
from router.fair_queue import Standing
from router.fleet import DecodeHop
from router.lost_workers import LostWorkers
from router.media.encode import ReadyInputs
from router.media.request import RequestMedia
from router.policy.base import Placement
from router.prepare import RouterRequest, max_sequence_tokens
from router.request_trace import ChoiceTrace
from router.signing import Gang, SignedRun, Signer, SigningTerms
from router.untaken import Untaken

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
ChoiceT = TypeVar("ChoiceT")

#: What follows a placement: it gets the reservation, and the hand-off if the prompt was prefilled elsewhere.
_Attempt: TypeAlias = Callable[[Reservation, HandOff | None], Awaitable[ResultT]]

# Between two attempts at a draining worker, which the router takes to be ready: its reports do not arrive.
_LEAVING_PAUSE_S = 0.25

_NO_MEDIA = frozenset[str]()
_NOTHING_TO_ENCODE = nullcontext()

# The transfer of blocks or embeddings failed; the receiver is healthy.
_TRANSFER = (
    errors.TransferError,
    errors.HandOffNotFoundError,
    errors.HandOffStateError,
    errors.StaleEpochError,
)

# Another namespace has other models and limits, and may lack the router's trust.
_NOT_THERE = (
    errors.ModelNotFoundError,
    errors.UnimplementedError,
    errors.PermissionDeniedError,
    errors.RequestTimeoutError,
    errors.PromptTooLongError,
    errors.UnsupportedFieldError,
    errors.MessageTooLargeError,
)

# The decode worker can't take over what a prefill worker has, however often that prefills.
_MISMATCH = (errors.NoHandOffError, errors.LayoutMismatchError)

_HAND_OFF_FIELD = re.compile(r"(?:media\[\d+\]\.)?hand_off\b")


def attempt_causes() -> set[str]:
    """What may make an attempt necessary, as ``RouterMetrics.attempts`` names it."""
    final = set().union(*map(errors.all_kinds, FINAL)) - {errors.PromptTooLongError}
    return {"first"} | {kind.reason.lower() for kind in errors.all_kinds() - final}


class ChoiceRun:
    """Runs one choice of a request.

    However ``run`` or ``place`` ends, nothing is left behind: no booking, no request on a worker, no hand-off that no
    worker will take. A ``SignedRun`` that ``place`` returned is the caller's.
    """

    def __init__(
        self,
        request: RouterRequest,
        choice: int,
        output: ChoiceOutput,
        context: RouterContext,
        standing: Standing,
        on_placed: Callable[[int, Placement], None],
        avoid: frozenset[str] = frozenset(),
    ) -> None:
        """Prepare to run ``choice``.

        Args:
            request: the request, prepared.
            choice: number of the choice.
            output: takes the workers' output.
            context: what to run on.
            standing: the request's standing in the queue.
            on_placed: called with the choice and its placement when an attempt begins.
            avoid: ids of workers that the first attempt avoids, if other workers can take it.
        """
        # Each choice learns separately how media change the prompt, so this may become a copy.
        self._request = request
        self._choice = choice
        self._output = output
        self._context = context
        self._standing = standing
        self._on_placed = on_placed
        self._hints = RetryHints(avoid=set(avoid))
        self._lost = LostWorkers(context.table, context.config.max_lost_workers)
        self._num_begun = 0
        self._num_charged_tokens = 0
        self._signer: Signer | None = None
        self._gang: Gang | None = None
        self._untaken: Untaken | None = None
        self._inputs: ReadyInputs | None = None
        self._trace = None if request.trace is None else request.trace.choice(choice)
        # Media are where this router had them encoded, so such prompts are computed here.
        self._prefill_namespaces = [] if request.media is not None else list(request.prefill_namespaces)

    async def run(self) -> FinishReason:
        """Generate to the end and return why it ended. The caller still has to finish the output.

        Raises:
            ServingError: the last attempt's error, or why no attempt could be made.
        """
        try:
            return await self._repeat(self._decode)
        finally:
            self._settle()
            if self._trace is not None:
                self._trace.phases.stop(sys.exception())

    async def place(self, signer: Signer, gang: Gang, untaken: Untaken) -> SignedRun | FinishReason:
        """Run the hops before the decode and sign the decode start; or run to the end if that comes first.

        The start is signed once all members of ``gang`` can be, and counts as ``untaken`` from then on. A caller that
        does not give the ``SignedRun`` to the client must call its ``release``.

        Raises:
            PlaceTooLargeError: there is no room for it beside the other members of the gang.
            ServingError: as in ``run``.
        """
        self._signer, self._gang, self._untaken = signer, gang, untaken
        end = None
        try:
            end = await self._repeat(self._sign)
        finally:
            if not isinstance(end, SignedRun):  # else it ends elsewhere, and its worker will report its length
                self._settle()
            if self._trace is not None:
                self._trace.phases.stop(sys.exception())
        if not isinstance(end, SignedRun):
            gang.leave()
        return end

    async def _repeat(self, attempt: _Attempt[ResultT]) -> ResultT | FinishReason:
        """The result of the first ``attempt`` that succeeds, or why the choice has already ended.

        Before ``attempt``, the prompt is prefilled elsewhere if the policy says so.
        """
        cause = "first"
        while (reason := self._reason_ended()) is None:
            media = self._request.media
            if media is not None and media.is_encoded:
                self._trace_wait("media")
            async with _NOTHING_TO_ENCODE if media is None else self._encoded(media):
                reservation, adapter = await self._admit(), self._request.start.adapter
                if adapter:
                    self._context.metrics.note_adapter(adapter, 1)
                try:
                    self._begin(reservation, cause)
                    if self._signer is not None:
                        self._signer.check_size(self._num_tokens)
                    handed_off = await self._prefilled(reservation)
                    if isinstance(handed_off, FinishReason):
                        return handed_off
                    return await attempt(reservation, handed_off)
                except HopFailedError as failure:
                    if self._trace is not None:
                        self._trace.failed(failure.error)
                    self._leave_namespace(failure.error)
                    cause = failure.error.reason.lower()
                    pause_s = self._hints.note(failure, reservation.placement)
                    if self._hints.num_failures >= self._context.config.max_attempts:
                        raise failure.error from failure
                    self._note_lost(failure, reservation)
                finally:
                    if adapter:
                        self._context.metrics.note_adapter(adapter, -1)
                    reservation.release()
                    self._context.admission.wake()
            await self._context.sleep(pause_s)
        return reason

    def _note_lost(self, failure: HopFailedError, reservation: Reservation) -> None:
        """Raises ``WorkersLostError`` as ``LostWorkers.note`` does."""
        booking, key = reservation.decode, WorkerKey(Role.DECODE, reservation.placement.decode.worker_id)
        if failure.hop is Hop.PREFILL and reservation.prefill is not None:
            booking, key = reservation.prefill, WorkerKey(Role.PREFILL, reservation.placement.prefills_at.worker_id)
        self._lost.note(failure.error, key, booking.epoch)

    @property
    def _num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return len(self._request.prompt_token_ids) + len(self._output.token_ids)

    def _reason_ended(self) -> FinishReason | None:
        """Why the choice has already ended: a worker may break after its last token and before it reports the end."""
        output, request = self._output, self._request
        if output.has_stopped:
            return FinishReason.STOP_STRING
        if request.ended_by(output.token_ids):
            return FinishReason.STOP_ID
        return FinishReason.LENGTH if len(output.token_ids) >= request.max_output_tokens else None

    # One attempt: media, a placement, prefill where that is elsewhere, decode.

    @asynccontextmanager
    async def _encoded(self, media: RequestMedia) -> AsyncIterator[None]:
        """Encode one attempt's media and keep them during the block, in which the caller asks for a placement.

        Raises:
            ServingError: they can't be encoded, or with them the prompt is too long.
        """
        async with media.ready() as self._inputs:
            if self._inputs.sizes:
                self._take_prompt(*media.lay_out(self._inputs.sizes))
            yield

    def _trace_wait(self, name: str) -> None:
        if self._trace is not None:
            self._trace.wait(name, self._output.num_attempts, self._num_tokens)

    async def _admit(self) -> Reservation:
        self._trace_wait("queue")
        began = time.monotonic()
        queued = make_queued(
            self._request,
            self._context.config,
            self._standing,
            self._hints,
            self._output.token_ids,
            is_retry=self._num_begun > 0,
            is_handed_in=bool(self._prefill_namespaces),
            gang=self._gang,
        )
        try:
            return await self._context.admission.admit(queued)
        finally:
            # Also if it never got room: then nothing but its wait is known.
            self._output.add_time("router_queue_s", time.monotonic() - began)

    def _begin(self, reservation: Reservation, cause: str) -> None:
        if not self._num_begun:
            self._num_charged_tokens = self._standing.num_tokens
            if self._request.held is not None:
                self._request.held.leave()
        self._num_begun += 1
        placement = reservation.placement
        if self._trace is not None:
            self._trace.placed(placement)
        if self._prefill_namespaces:  # which of its workers will be known later
            placement = replace(placement, prefill=Rank(self._prefill_namespaces[0]))
        self._on_placed(self._choice, placement)
        self._output.begin_attempt()
        self._output.note_expected(reservation.placement.expected)
        self._context.metrics.queue_time.observe(reservation.waited_s)
        self._context.metrics.attempts.labels(cause).inc()

    async def _sign(self, reservation: Reservation, hand_off: HandOff | None) -> SignedRun:
        """Sign the decode start. Raises ``HopFailedError``."""
        signer, gang = self._signer, self._gang
        assert signer is not None and gang is not None, "it is placed for its client"
        if self._trace is not None:
            self._trace.sign()
        terms = SigningTerms(
            request_id=self._request.request_id,
            choice=self._choice,
            hand_off=hand_off,
            deadline=self._request.deadline,
            num_first_tokens=self._num_tokens,
            is_renewed=not gang.is_alone,
            untaken=self._untaken,
            on_end=self._settler(),
        )
        rank = reservation.placement.decode.data_parallel_rank
        try:
            with gang.renewed(hand_off, self._context.hops):
                return await gang.sign(
                    lambda: signer.sign(
                        reservation, terms, lambda number: self._start(reservation.decode, number, rank, hand_off)
                    )
                )
        except BaseException as error:
            self._drop(hand_off)
            if isinstance(error, ServingError):
                raise HopFailedError(Hop.DECODE, error) from error
            raise

    # The prefill hop.

    async def _prefilled(self, reservation: Reservation) -> HandOff | FinishReason | None:
        """Prefill where that is not where it is decoded; ``None``: it is. Errors are those of ``_prefill``."""
        while self._prefill_namespaces:
            outcome = await self._prefill_away(self._prefill_namespaces[0], reservation)
            if outcome is not None:
                return outcome
            del self._prefill_namespaces[0]
        return None if reservation.prefill is None else await self._prefill(reservation)

    async def _prefill_away(self, namespace: str, reservation: Reservation) -> HandOff | FinishReason | None:
        """Prefill in another namespace; ``None``: that can't prefill it.

        Raises:
            HopFailedError: the outcome is invalid.
            ServingError: no other would prefill it either.
        """
        began, key = time.monotonic(), self._request.pool.key
        if self._trace is not None:
            self._trace.hop("prefill hop", namespace)
        start = self._start(reservation.decode, 0, 0, None)
        asked = AskedPrefill(model_name=key.model_name, model_fingerprint=key.fingerprint, start=start)
        timeout_s = self._context.config.prefill_timeout_s
        try:
            prefilled = await self._context.prefill_pools.prefill(namespace, asked, timeout_s=timeout_s)
        except ServingError as error:
            if isinstance(error, FINAL) and not isinstance(error, _NOT_THERE):
                raise
            logger.info("request %s is not prefilled in %s: %s", self._request.request_id, namespace, error)
            return None
        finally:
            self._output.add_time("prefill_s", time.monotonic() - began)
        self._output.note_prefilled(prefilled.outcome.num_cached_tokens, prefilled.outcome.queue_s)
        self._note_prefilled(prefilled.outcome)
        return self._take_outcome(prefilled.outcome)

    def _leave_namespace(self, error: ServingError) -> None:
        """The blocks of the namespace that prefilled can't be had: the next one prefills from now on."""
        if self._prefill_namespaces and isinstance(error, (*_TRANSFER, *_MISMATCH)):
            del self._prefill_namespaces[0]

    async def _prefill(self, reservation: Reservation) -> HandOff | FinishReason:
        """Prefill on a worker that does not decode: returns the hand-off to decode from, or why the choice has ended.

        Raises:
            HopFailedError: the prefill failed, or its outcome is invalid.
            ServingError: the prompt with its media is too long.
        """
        rank, booking = reservation.placement.prefill, reservation.prefill
        assert rank is not None and booking is not None, "it is prefilled elsewhere"
        outcome = await self._prefill_outcome(rank, booking)
        booking.release()
        self._context.admission.wake()
        return self._take_outcome(outcome)

    def _take_outcome(self, outcome: PrefillOutcome) -> HandOff | FinishReason:
        """What to decode from, or why the choice has ended. Errors are those of ``_prefill``."""
        try:
            if self._request.media is not None:
                self._learn_prompt(self._request.media, outcome)
            if outcome.prompt_logprobs is not None:
                self._report_prompt(outcome.prompt_logprobs)
            reason = self._take_first_token(outcome)
        except (ServingError, HopFailedError):
            self._drop(outcome.hand_off)
            raise
        if reason is not None:
            self._drop(outcome.hand_off)
            return reason
        if outcome.hand_off is None:
            raise HopFailedError(Hop.PREFILL, WorkerUnavailableError("the prefill worker handed nothing off"))
        if self._trace is not None:
            self._trace.prefilled()
        return outcome.hand_off

    async def _prefill_outcome(self, rank: Rank, booking: Booking) -> PrefillOutcome:
        media, began, outcome = self._take_media(), time.monotonic(), None
        if self._trace is not None:
            self._trace.hop("prefill hop", rank.worker_id)
        try:
            async with asyncio.timeout(self._context.config.prefill_timeout_s):
                start = self._start(booking, booking.send(), rank.data_parallel_rank, None, media)
                call = self._context.hops.prefill(rank, start)
                self._context.hand_offs.note(rank.worker_id, None, media)
                outcome = await call.outcome()
        except TimeoutError as error:
            silent = WorkerUnavailableError(f"worker {rank.worker_id} did not prefill in time")
            raise HopFailedError(Hop.PREFILL, silent) from error
        except ServingError as error:
            raise self._hop_error(Hop.PREFILL, error, media) from error
        finally:
            self._output.add_time("prefill_s", time.monotonic() - began)
            if outcome is None:
                self._drop_media(media)
        self._output.note_prefilled(
            outcome.num_cached_tokens,
            outcome.queue_s,
            num_evicted_tokens=outcome.num_evicted_tokens,
            onboard_s=outcome.onboard_s,
        )
        self._note_prefilled(outcome)
        return outcome

    def _note_prefilled(self, outcome: PrefillOutcome) -> None:
        if self._trace is not None:
            self._trace.phases.note({span_names.NUM_CACHED_TOKENS: outcome.num_cached_tokens})

    def _learn_prompt(self, media: RequestMedia, outcome: PrefillOutcome) -> None:
        """Take the prompt with its media as the worker laid it out.

        Raises ``HopFailedError``, ``PromptTooLongError``.
        """
        if media.is_encoded and not outcome.prompt_token_ids:
            return
        media_ids = [item.media_id for item in media.items]
        if not outcome.prompt_token_ids or [span.media_id for span in outcome.media] != media_ids:
            silent = WorkerUnavailableError("the prefill worker did not report what the prompt became")
            raise HopFailedError(Hop.PREFILL, silent)
        if not media.is_encoded:  # an encode worker's sizes hold, whatever surrounds them
            media.learn(outcome.media)
        self._take_prompt(outcome.prompt_token_ids, outcome.media)

    def _report_prompt(self, logprobs: PromptLogprobs) -> None:
        """``_take_prompt_logprobs`` of a prefill worker. Raises ``HopFailedError``."""
        try:
            self._take_prompt_logprobs(logprobs)
        except WorkerUnavailableError as error:
            raise HopFailedError(Hop.PREFILL, error) from error

    def _take_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Show those of the prompt. Raises ``WorkerUnavailableError``: they are of another prompt."""
        token_ids = self._request.prompt_token_ids
        if len(logprobs.logprobs) != len(token_ids) - 1:
            raise WorkerUnavailableError(f"the worker gave log probabilities of {len(logprobs.logprobs)} tokens")
        self._output.take_prompt_logprobs(replace(logprobs, token_ids=token_ids))

    def _take_first_token(self, outcome: PrefillOutcome) -> FinishReason | None:
        """Show the first token at once, before the transfer."""
        logprobs = () if outcome.logprobs is None else (outcome.logprobs,)
        self._output.take(len(self._output.token_ids), (outcome.token_id,), logprobs, time.monotonic())
        if self._trace is not None:
            self._trace.first_token(outcome.sent_at_unix_ns)
        if self._output.has_stopped:
            return FinishReason.STOP_STRING
        return outcome.finish_reason

    # The decode hop.

    async def _decode(self, reservation: Reservation, hand_off: HandOff | None) -> FinishReason:
        """Decode to the end, from ``hand_off`` if there is one; returns why it ended. Raises ``HopFailedError``."""
        rank, booking, config = reservation.placement.decode, reservation.decode, self._context.config
        media = self._take_media() if hand_off is None else ()
        is_handed_off, num_given = hand_off is not None, len(self._output.token_ids)
        if self._trace is not None:
            self._trace.hop("decode hop", rank.worker_id)
        book = partial(self._book, booking)
        sink = BookedSink(
            self._output,
            book,
            self._request.num_prompt_tokens,
            is_handed_off,
            self._learn_length,
            self._take_prompt_logprobs,
        )
        call = None
        try:
            start = self._start(booking, booking.send(), rank.data_parallel_rank, hand_off, media)
            call = self._context.hops.decode(rank, start, sink)
            self._context.hand_offs.note(rank.worker_id, hand_off, media)
            finished = await outcome_in_time(
                call, start_timeout_s=config.decode_start_timeout_s, stall_timeout_s=config.decode_stall_timeout_s
            )
            if finished is not None:
                self._output.check_count(finished.num_output_tokens)
        except TimeoutError as error:
            silent = WorkerUnavailableError(f"worker {rank.worker_id} gave no token in time")
            raise HopFailedError(Hop.DECODE, silent) from error
        except ServingError as error:
            raise self._hop_error(Hop.DECODE, error, media) from error
        finally:
            if call is not None:
                call.cancel()
            self._output.book_no_more()
            if self._trace is not None and call is not None:
                self._trace_decode(self._trace, call, num_given)
            if not sink.has_started:
                self._drop(hand_off)
                self._drop_media(media)
        return FinishReason.STOP_STRING if finished is None else finished.reason

    def _trace_decode(self, trace: ChoiceTrace, call: DecodeHop, num_given: int) -> None:
        """A decode has ended, well or badly, before which the choice had ``num_given`` tokens."""
        trace.phases.note({span_names.OUTPUT_TOKENS: len(self._output.token_ids) - num_given})
        first_token_s = self._output.first_token_s
        if not num_given and first_token_s is not None:
            trace.reply(call.first_sent_at_unix_ns, self._request.arrived_at + first_token_s)

    def _book(self, booking: Booking, num_tokens: int) -> int:
        """Its decode rank has ``num_tokens`` tokens of it: book and charge what is more than before.

        Returns:
            The caller need not call again until there are more tokens than this.
        """
        if num_tokens > self._num_charged_tokens > 0:
            self._charge(num_tokens - self._num_charged_tokens)
        return booking.grow_to(num_tokens)

    def _charge(self, num_tokens: int) -> None:
        self._num_charged_tokens += num_tokens
        self._context.admission.charge(self._standing, num_tokens)

    def _settle(self) -> None:
        """It takes no more tokens: its tenant has paid for those that it took, and for no others."""
        if self._num_charged_tokens:
            if num_owed_tokens := self._num_tokens - self._num_charged_tokens:
                self._charge(num_owed_tokens)
            self._num_charged_tokens = 0

    def _settler(self) -> Callable[[int], None]:
        """What settles the account once its worker has reported how many output tokens it had.

        It may live as long as the answer, so it keeps no prompt.
        """
        admission, standing, num_charged_tokens = self._context.admission, self._standing, self._num_charged_tokens
        num_shown_tokens = len(self._output.token_ids)
        num_prompt_tokens, num_least_tokens = len(self._request.prompt_token_ids), self._num_tokens
        num_most_tokens = num_prompt_tokens + self._request.max_output_tokens
        charge = self._request.charge

        def settle(num_output_tokens: int) -> None:
            if charge is not None:  # it has the tokens so far
                charge.add(max(0, min(num_output_tokens, num_most_tokens - num_prompt_tokens) - num_shown_tokens))
            num_tokens = min(max(num_prompt_tokens + num_output_tokens, num_least_tokens), num_most_tokens)
            admission.charge(standing, num_tokens - num_charged_tokens)

        return settle

    def _learn_length(self, num_prompt_tokens: int) -> None:
        media = self._request.media
        if media is not None and not media.is_encoded:
            media.learn_length(num_prompt_tokens)

    # What both hops need.

    def _start(
        self,
        booking: Booking,
        number: int,
        rank: int,
        hand_off: HandOff | None,
        media: Sequence[MediaInput] = (),
    ) -> WorkerStart:
        """The start for one worker.

        Args:
            booking: its booking at that worker.
            number: its number among the starts that this router sends to the worker.
            rank: the data-parallel rank that serves it.
            hand_off: the hand-off to decode from; ``None``: the worker computes the prompt.
            media: the media that the worker needs.
        """
        request, start = self._request, self._request.start
        context = RequestContext(
            request_id=request.request_id,
            attempt=self._output.num_attempts - 1,
            choice=self._choice,
            timeout_s=max(request.deadline - time.monotonic(), 0.0),
            traceparent=request.traceparent if self._trace is None else self._trace.traceparent,
            tenant=start.tenant,
            priority=request.worker_priority,
            session_key=start.session_key,
            router_id=numbering(self._context.router_id, booking.epoch),
            router_request_number=number,
            trust_domain=request.trust_domain,
            sent_at_unix_ns=0 if self._trace is None else self._trace.sent_at_unix_ns,
        )
        token_ids, spans = request.prompt_token_ids, request.spans
        if media and request.media is not None and isinstance(media[0].source, MediaFile):
            # A worker that gets files lays them out itself, even if another worker has reported its layout by now.
            token_ids, spans = request.media.token_ids, ()
        generation = Generation(
            prompt_token_ids=token_ids,
            generated_token_ids=tuple(self._output.token_ids),
            sampling=request.sampling,
            seed=request.seed,
            choice=self._choice,
            adapter=start.adapter,
            cache_salt=request.cache_salt,
            data_parallel_rank=rank,
            media=spans,
            output=self._output_options(),
        )
        return WorkerStart(context=context, generation=generation, hand_off=hand_off, media=tuple(media))

    def _output_options(self) -> OutputOptions:
        """What workers report: of the prompt once, for the first choice."""
        asked = self._request.start.output
        if asked.num_prompt_logprobs is None or not (self._choice or self._output.has_prompt_logprobs):
            return asked
        return replace(asked, num_prompt_logprobs=None)

    def _take_media(self) -> Sequence[MediaInput]:
        """The media that computing the prompt needs; this attempt owns their hand-offs from now on."""
        if self._inputs is None:
            return ()
        self._output.add_time("media_s", self._inputs.encode_s)
        return self._inputs.take()

    def _take_prompt(self, token_ids: Sequence[int], spans: tuple[MediaSpan, ...]) -> None:
        """Take the prompt with its media in it, unless it is already known. Raises ``PromptTooLongError``."""
        if spans != self._request.spans:
            self._request = self._request.with_prompt(token_ids, spans)
            self._output.note_prompt(len(token_ids), self._request.num_media_tokens)

    def _hop_error(self, hop: Hop, error: ServingError, media: Sequence[MediaInput]) -> HopFailedError:
        request = self._request
        if isinstance(error, errors.InvalidRequestError) and _HAND_OFF_FIELD.match(error.field or ""):
            # Clients send no hand-offs, so this is not their fault.
            error = errors.TransferError(error.message) if media else errors.NoHandOffError(error.message)
        if media and request.media is not None:
            error = request.media.client_error(error)
            if isinstance(error, _TRANSFER):
                request.media.failed(media)
            if isinstance(error, PromptTooLongError):
                request.media.forget_sizes()
                error = PromptTooLongError(error.message, field=prompt_field(request.start.prompt))
        return HopFailedError(hop, error, pulls_media=bool(media))

    def _drop(self, hand_off: HandOff | None) -> None:
        """Notify the source of ``hand_off`` that no worker will take it."""
        if hand_off is not None:
            self._context.hops.drop(hand_off)

    def _drop_media(self, media: Sequence[MediaInput]) -> None:
        for item in media:
            if isinstance(item.source, HandOff):
                self._context.hops.drop(item.source)


class BookedSink:
    """Passes the tokens of one decode to the choice's output, and their KV blocks to the book.

    ``take`` is the output's own, so that a token costs no call here.
    """

    __slots__ = (
        "_book_tokens",
        "_is_handed_off",
        "_num_prompt_tokens",
        "_on_length",
        "_output",
        "has_started",
        "take",
        "take_prompt_logprobs",
    )

    def __init__(
        self,
        output: ChoiceOutput,
        book: Callable[[int], int],
        num_prompt_tokens: int,
        is_handed_off: bool,
        on_length: Callable[[int], None],
        take_prompt_logprobs: Callable[[PromptLogprobs], None],
    ) -> None:
        """Start without tokens; ``is_handed_off``: another worker gave the first token.

        ``book`` is called with the number of tokens of prompt and output, once there are more than it last returned;
        ``on_length`` is called with the number of the prompt's tokens if the worker reports it.
        """
        self.has_started = False
        self.take = output.take
        self.take_prompt_logprobs = take_prompt_logprobs
        self._output = output
        self._book_tokens = book
        self._num_prompt_tokens = num_prompt_tokens
        self._is_handed_off = is_handed_off
        self._on_length = on_length
        output.book_by(self._book)

    def started(self, started: DecodeStarted) -> None:
        """The decode began; the worker has taken the hand-off, if any."""
        self.has_started = True
        if started.num_prompt_tokens:
            self._num_prompt_tokens = started.num_prompt_tokens
            self._on_length(started.num_prompt_tokens)
        self._output.note_started(started, is_handed_off=self._is_handed_off)

    def _book(self, num_output_tokens: int) -> int:
        return self._book_tokens(self._num_prompt_tokens + num_output_tokens) - self._num_prompt_tokens


# Where the next attempt should go after one failed; pure.


class Hop(StrEnum):
    """The hop at which an attempt failed."""

    PREFILL = "prefill"
    DECODE = "decode"


class HopFailedError(Exception):
    """An attempt failed at ``hop`` with ``error``; ``pulls_media``: that hop pulls its media's embeddings."""

    def __init__(self, hop: Hop, error: ServingError, *, pulls_media: bool = False) -> None:
        super().__init__(str(error))
        self.hop = hop
        self.error = error
        self.pulls_media = pulls_media


@dataclass
class RetryHints:
    """Where the next attempt of one choice should go.

    Attributes:
        avoid: ids of workers that just failed it.
        prefer_prefill: after one failed transfer, the rank that has the blocks cached.
        num_failures: failed attempts; those at workers that were draining or full do not count, since nothing failed.
        is_local: after a hand-off that was impossible: prefill where it is decoded.
    """

    avoid: set[str] = field(default_factory=set)
    prefer_prefill: Rank | None = None
    is_local: bool = False
    num_failures: int = 0
    _leaving: str | None = None
    _num_failed_transfers: int = 0
    _num_failed_media_transfers: int = 0

    @property
    def avoided(self) -> frozenset[str]:
        """Ids of workers that the next attempt avoids, if others can take it."""
        # A worker that left comes back under the same id, and is as good as any then.
        return frozenset(self.avoid if self._leaving is None else {*self.avoid, self._leaving})

    def note(self, failure: HopFailedError, placement: Placement) -> float:
        """Learn from ``failure`` and return the seconds to pause before the next attempt.

        Raises:
            ServingError: the failure's own, when another attempt would fail as well.
        """
        error = failure.error
        if self._is_final(failure, placement):
            raise error
        self.prefer_prefill = None
        if isinstance(error, errors.DrainingError):
            return self._note_leaving(_rank_of(failure, placement).worker_id)
        self.num_failures += not isinstance(error, errors.QueueFullError)
        self._leaving = None
        if isinstance(error, errors.MediaLostError):
            pass  # no worker failed: embeddings are kept for less time than a sequence runs
        elif failure.pulls_media and isinstance(error, _TRANSFER):
            self._note_media_transfer(placement.prefills_at)
        elif _is_mismatch(failure, placement):
            self.is_local = True
        elif failure.hop is Hop.PREFILL and placement.prefill is not None:
            self.avoid.add(placement.prefill.worker_id)
        elif isinstance(error, _TRANSFER) and placement.prefill is not None:
            self._note_transfer(placement.prefill)
        else:
            self.avoid.add(placement.decode.worker_id)
        return pause_s(error, max(self.num_failures, 1))

    def _is_final(self, failure: HopFailedError, placement: Placement) -> bool:
        if not isinstance(failure.error, errors.PromptTooLongError):
            return isinstance(failure.error, FINAL)
        # Workers differ in size, so another may take it. If the worker was already to be avoided, no other was left.
        return _rank_of(failure, placement).worker_id in self.avoid

    def _note_leaving(self, worker_id: str) -> float:
        is_known, self._leaving = self._leaving == worker_id, worker_id
        return _LEAVING_PAUSE_S if is_known else 0.0

    def _note_media_transfer(self, rank: Rank) -> None:
        """Blame the encode worker the first time, then the worker that pulls."""
        self._num_failed_media_transfers += 1
        if self._num_failed_media_transfers > 1:
            self.avoid.add(rank.worker_id)

    def _note_transfer(self, prefill: Rank) -> None:
        self._num_failed_transfers += 1
        if self._num_failed_transfers == 1:
            self.prefer_prefill = prefill
        else:
            self.avoid.add(prefill.worker_id)


def _is_mismatch(failure: HopFailedError, placement: Placement) -> bool:
    """Whether no prefill worker can hand off to the decode worker of ``placement``, as far as is known."""
    kinds = errors.NoHandOffError if failure.hop is Hop.PREFILL else _MISMATCH
    return isinstance(failure.error, kinds) and placement.prefill is not None


def _rank_of(failure: HopFailedError, placement: Placement) -> Rank:
    """Where it failed."""
    return placement.prefills_at if failure.hop is Hop.PREFILL else placement.decode


async def run_choices(
    request: RouterRequest,
    context: RouterContext,
    choices: Sequence[ChoiceT],
    run: Callable[[ChoiceT, Standing], Coroutine[None, None, None]],
) -> None:
    """Admit ``request`` to the queue as one unit, and ``run`` all its choices; the first error cancels the others.

    Raises:
        QueueFullError: the queue has no room for all of them; no task was made.
    """
    standing = _draw_standing(request, len(choices), context)
    if len(choices) == 1:  # needs no task
        await run(choices[0], standing)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(run(choice, standing))
    finally:
        context.admission.leave(standing)


def _draw_standing(request: RouterRequest, num_choices: int, context: RouterContext) -> Standing:
    num_given_tokens = request.num_prompt_tokens + request.num_resumed_tokens
    num_left_tokens = max(request.max_output_tokens - request.num_resumed_tokens, 0)
    return context.admission.standing(
        request.pool.key,
        priority=request.start.priority,
        tenant=request.start.tenant,
        num_tokens=num_given_tokens + min(num_left_tokens, context.config.reserve_tokens),
        num_choices=num_choices,
        deadline=request.deadline,
    )


def make_queued(
    request: RouterRequest,
    config: AttemptConfig,
    standing: Standing,
    hints: RetryHints,
    generated_token_ids: Sequence[int] = (),
    *,
    is_retry: bool = False,
    is_handed_in: bool = False,
    gang: Gang | None = None,
) -> QueuedRequest:
    """One choice of ``request``, after ``generated_token_ids``, for the queue.

    Args:
        request: the request, prepared.
        config: limits of its attempts.
        standing: the request's standing in the queue.
        hints: workers to avoid or to prefer.
        generated_token_ids: the tokens that the choice has.
        is_retry: an attempt was made before.
        is_handed_in: another namespace prefills it.
        gang: choices whose client continues alone, this one included; ``None``: the router runs the choice.
    """
    num_generated = len(generated_token_ids)
    num_prompt_tokens = request.num_prompt_tokens
    # The last token needs no room, because no later token attends to it.
    num_most_tokens = num_prompt_tokens + request.max_output_tokens - 1
    num_tokens = num_prompt_tokens + num_generated
    if request.num_unknown_tokens:
        num_most_tokens = min(num_most_tokens, max_sequence_tokens(request.pool) - 1)
        num_tokens = _cap_unknown(request, num_generated, num_most_tokens)
    num_left = min(request.max_output_tokens - num_generated, config.reserve_tokens)
    return QueuedRequest(
        standing=standing,
        is_retry=is_retry,
        gang=gang,
        num_tokens=num_tokens,
        num_reserved_tokens=min(num_tokens + num_left, num_most_tokens),
        num_most_tokens=num_most_tokens,
        adapter=request.start.adapter,
        needs_media=_NO_MEDIA if request.media is None else request.media.needs,
        sampling_fields=request.sampling_fields,
        is_local=hints.is_local or is_handed_in,
        is_handed_in=is_handed_in,
        # A signature does not protect media: workers do not hold them as long as a client may take.
        is_remote=gang is not None and request.media is not None,
        avoid=hints.avoided,
        prefer_prefill=hints.prefer_prefill,
        arrived_at=request.arrived_at,
        session_key=request.start.session_key,
        held=request.held,
        sequence_hashes=request.sequence_hashes(generated_token_ids),
    )


def _cap_unknown(request: RouterRequest, num_generated: int, num_most_tokens: int) -> int:
    """The most tokens to prefill, for a prompt that at least one worker can hold."""
    pool, num_least_tokens = request.pool, len(request.prompt_token_ids) + num_generated
    num_tokens = min(request.num_prompt_tokens + num_generated, num_most_tokens)
    if pool.num_prefill_tokens:
        num_tokens = min(num_tokens, pool.num_prefill_tokens)
    return max(num_tokens, num_least_tokens)


def to_choice_placement(choice: int, placement: Placement) -> ChoicePlacement:
    """The placement of a choice, as its client gets it."""
    return ChoicePlacement(
        choice=choice,
        prefill=placement.prefill,
        decode=placement.decode,
        num_matched_tokens=placement.num_cached_tokens,
        cost=placement.cost,
        num_held_tokens=0 if placement.expected is None else placement.expected.num_held_tokens,
    )
