"""The hops of one choice's attempts: prefill and decode, each with all that it takes and leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from quartet.engine.base import FinishReason
from quartet.errors import PromptTooLongError, ServingError, WorkerUnavailableError
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.layout import HandOff
from quartet.rpc.check_start import prompt_field
from quartet.rpc.choice_output import ChoiceOutput
from quartet.rpc.inner import InnerStart, MediaInput, PrefillOutcome
from quartet.rpc.outcome_in_time import outcome_in_time
from router.attempt_tools import AttemptTools
from router.book import Booking, Reservation
from router.booked_sink import BookedSink
from router.encoding import ReadyInputs
from router.inner_starts import StartOrder, make_inner_start
from router.prepared import PreparedRequest
from router.retry import TRANSFER, Hop, HopFailedError


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
        """Has one attempt's media encoded, and keeps them for it. A place is asked for within.

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
        place, booking = reservation.placement.decode, reservation.decode
        media = self._media() if hand_off is None else ()
        sink = BookedSink(
            self._output, booking, self.request.num_prompt_tokens, hand_off is not None, self._learn_length
        )
        call = None
        try:
            start = self.start(booking, booking.send(), place.data_parallel_rank, hand_off, media)
            call = self._tools.hops.decode(place, start, sink)
            finished = await outcome_in_time(
                call,
                start_timeout_s=self._tools.config.decode_start_timeout_s,
                stall_timeout_s=self._tools.config.decode_stall_timeout_s,
            )
        except TimeoutError as error:
            silent = WorkerUnavailableError(f"worker {place.worker_id} gave no token in time")
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
    ) -> InnerStart:
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
        return make_inner_start(self.request, order, self._tools.router_id)

    def drop(self, hand_off: HandOff | None) -> None:
        """Nobody will take ``hand_off``."""
        if hand_off is not None:
            self._tools.hops.drop(hand_off)

    async def _prefill(self, reservation: Reservation, booking: Booking, media: Sequence[MediaInput]) -> PrefillOutcome:
        place, config = reservation.placement.prefill, self._tools.config
        assert place is not None
        began, outcome = time.monotonic(), None
        try:
            async with asyncio.timeout(config.prefill_timeout_s):
                start = self.start(booking, booking.send(), place.data_parallel_rank, media=media)
                outcome = await self._tools.hops.prefill(place, start).outcome()
        except TimeoutError as error:
            silent = WorkerUnavailableError(f"worker {place.worker_id} did not prefill in time")
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
