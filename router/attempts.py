"""One choice from its first placement to its end: hop after hop, and again elsewhere when something breaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from quartet.engine.base import FinishReason, Generation
from quartet.errors import ServingError, WorkerUnavailableError
from quartet.kvcache.layout import HandOff
from quartet.rpc.choice_output import ChoiceOutput
from quartet.rpc.context import RequestContext
from quartet.rpc.inner import InnerStart, PrefillOutcome
from quartet.rpc.outcome_in_time import outcome_in_time
from router.admission import Ticket
from router.attempt_tools import AttemptTools
from router.book import Booking, Reservation, numbering
from router.booked_sink import BookedSink
from router.pending import make_pending
from router.policy.base import Placement
from router.prepared import PreparedRequest
from router.retry import Hop, HopFailedError, RetryHints
from router.sealing import SealedRun, Sealer, SealTerms
from router.together import Together

ResultT = TypeVar("ResultT")


def draw_ticket(request: PreparedRequest, num_choices: int, tools: AttemptTools) -> Ticket:
    """The standing in the queue of ``request``, of which ``num_choices`` choices run."""
    num_output_tokens = min(request.max_output_tokens, tools.config.reserve_tokens)
    return tools.admission.ticket(
        request.pool.key,
        priority=request.start.priority,
        tenant=request.start.tenant,
        num_tokens=len(request.prompt_token_ids) + num_output_tokens,
        num_choices=num_choices,
        deadline=request.deadline,
    )


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
        self._request = request
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

    async def place(self, sealer: Sealer, together: Together) -> SealedRun | FinishReason:
        """Go as far as a client needs to go on by itself, or to the end if that comes first; raises as ``run`` does.

        It is sealed when all that are placed ``together`` with it can be. Whoever gets a ``SealedRun`` and does not
        give it to the client lets go of it.

        Raises:
            PlaceTooLargeError: there is no room for it beside the others.
        """
        self._together = together
        end = await self._repeat(partial(self._place_attempt, sealer, together))
        if not isinstance(end, SealedRun):
            together.leave()
        return end

    async def _repeat(self, attempt: Callable[[Reservation], Awaitable[ResultT]]) -> ResultT | FinishReason:
        """What the first ``attempt`` that goes well gives, or why there is nothing left to do."""
        cause = "first"
        while (reason := self._reason_ended()) is None:
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
        pending = make_pending(self._request, self._tools.config, self._hints, self._output.token_ids)
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
        if self._request.ended_by(self._output.token_ids):
            return FinishReason.STOP_ID
        is_full = len(self._output.token_ids) >= self._request.max_output_tokens
        return FinishReason.LENGTH if is_full else None

    async def _attempt(self, reservation: Reservation) -> FinishReason:
        """Raises ``HopFailedError``."""
        hand_off = await self._hand_off(reservation)
        return hand_off if isinstance(hand_off, FinishReason) else await self._decode(reservation, hand_off)

    async def _place_attempt(
        self, sealer: Sealer, together: Together, reservation: Reservation
    ) -> SealedRun | FinishReason:
        """Raises ``HopFailedError``."""
        sealer.check_size(len(self._request.prompt_token_ids) + len(self._output.token_ids))
        hand_off = await self._hand_off(reservation)
        if isinstance(hand_off, FinishReason):
            return hand_off
        rank = reservation.placement.decode.data_parallel_rank
        num_tokens = len(self._request.prompt_token_ids) + len(self._output.token_ids)
        terms = SealTerms(
            request_id=self._request.request_id,
            choice=self._choice,
            hand_off=hand_off,
            deadline=self._request.deadline,
            num_first_tokens=num_tokens,
            is_kept=not together.is_alone,
        )
        try:
            with together.kept(hand_off, self._tools.hops):
                return await together.seal(
                    lambda: sealer.seal(
                        reservation, terms, lambda number: self._start(reservation.decode, number, rank, hand_off)
                    )
                )
        except BaseException as error:
            self._drop(hand_off)
            if isinstance(error, ServingError):
                raise HopFailedError(Hop.DECODE, error) from error
            raise

    async def _hand_off(self, reservation: Reservation) -> HandOff | FinishReason | None:
        """Prefill where that is elsewhere: what to decode from, or why there is nothing to decode."""
        if reservation.prefill is None:
            return None
        outcome = await self._prefill(reservation, reservation.prefill)
        reservation.prefill.release()
        reason = self._take_outcome(outcome)
        if reason is not None:
            self._drop(outcome.hand_off)
            return reason
        if outcome.hand_off is None:
            raise HopFailedError(Hop.PREFILL, WorkerUnavailableError("the prefill worker handed nothing off"))
        return outcome.hand_off

    async def _prefill(self, reservation: Reservation, booking: Booking) -> PrefillOutcome:
        place, config = reservation.placement.prefill, self._tools.config
        assert place is not None
        began = time.monotonic()
        try:
            async with asyncio.timeout(config.prefill_timeout_s):
                hop = self._tools.hops.prefill(place, self._start(booking, booking.send(), place.data_parallel_rank))
                outcome = await hop.outcome()
        except TimeoutError as error:
            silent = WorkerUnavailableError(f"worker {place.worker_id} did not prefill in time")
            raise HopFailedError(Hop.PREFILL, silent) from error
        except ServingError as error:
            raise HopFailedError(Hop.PREFILL, error) from error
        finally:
            self._output.note_prefill(time.monotonic() - began)
        self._output.note_prefilled(outcome.num_cached_tokens, outcome.queue_s)
        return outcome

    def _take_outcome(self, outcome: PrefillOutcome) -> FinishReason | None:
        """Show the first token at once: it waits for no transfer."""
        logprobs = () if outcome.logprobs is None else (outcome.logprobs,)
        self._output.take(len(self._output.token_ids), (outcome.token_id,), logprobs, time.monotonic())
        if self._output.has_stopped:
            return FinishReason.STOP_STRING
        return outcome.finish_reason

    async def _decode(self, reservation: Reservation, hand_off: HandOff | None) -> FinishReason:
        place, booking = reservation.placement.decode, reservation.decode
        sink = BookedSink(self._output, booking, len(self._request.prompt_token_ids), hand_off is not None)
        call = None
        try:
            start = self._start(booking, booking.send(), place.data_parallel_rank, hand_off)
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
            raise HopFailedError(Hop.DECODE, error) from error
        finally:
            if call is not None:
                call.cancel()
            if not sink.has_started:
                self._drop(hand_off)
        return FinishReason.STOP_STRING if finished is None else finished.reason

    def _drop(self, hand_off: HandOff | None) -> None:
        if hand_off is not None:
            self._tools.hops.drop(hand_off)

    def _start(self, booking: Booking, number: int, rank: int, hand_off: HandOff | None = None) -> InnerStart:
        request, start = self._request, self._request.start
        context = RequestContext(
            request_id=request.request_id,
            attempt=self._output.num_attempts - 1,
            choice=self._choice,
            timeout_s=max(request.deadline - time.monotonic(), 0.0),
            traceparent=request.traceparent,
            tenant=start.tenant,
            priority=start.priority,
            session_key=start.session_key,
            router_id=numbering(self._tools.router_id, booking.epoch),
            router_request_number=number,
        )
        generation = Generation(
            prompt_token_ids=request.prompt_token_ids,
            generated_token_ids=tuple(self._output.token_ids),
            sampling=request.sampling,
            seed=request.seed,
            choice=self._choice,
            adapter=start.adapter,
            cache_salt=start.cache_salt,
            data_parallel_rank=rank,
            output=start.output,
        )
        return InnerStart(context=context, generation=generation, hand_off=hand_off)
