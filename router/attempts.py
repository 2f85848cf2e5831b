"""One choice from its first placement to its end: hop after hop, and again elsewhere when something breaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from quartet.engine.base import FinishReason, Generation
from quartet.errors import ConfigError, ServingError, WorkerUnavailableError
from quartet.kvcache.layout import HandOff
from quartet.rpc.context import RequestContext
from quartet.rpc.edge import ChoiceFinished
from quartet.rpc.inner import InnerStart, PrefillOutcome
from quartet.telemetry.metrics import RouterMetrics
from router.admission import Admission, Ticket
from router.book import Booking, Reservation, numbering
from router.choice_output import ChoiceOutput
from router.hops import Hops
from router.policy.base import Pending, Placement
from router.prepared import PreparedRequest
from router.retry import Hop, HopFailedError, RetryHints

# A silence is noticed up to this share of its limit late.
_STALL_TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class AttemptConfig:
    """Bounds of one choice's attempts.

    Attributes:
        max_attempts: attempts in all; the last one's error is the choice's.
        reserve_tokens: a decode place must have room for the prompt, what was generated, and so many tokens more
            (or what is left to generate, if less).
        prefill_timeout_s: longest prefill hop, the worker's queue included.
        decode_start_timeout_s: longest wait for a decode worker's first word, its queue and the transfer included.
        decode_stall_timeout_s: longest silence of a decode worker after that.
    """

    max_attempts: int = 5
    reserve_tokens: int = 512
    prefill_timeout_s: float = 120.0
    decode_start_timeout_s: float = 120.0
    decode_stall_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name in ("max_attempts", "reserve_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1")
        for name in ("prefill_timeout_s", "decode_start_timeout_s", "decode_stall_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0")


@dataclass(frozen=True, kw_only=True)
class AttemptTools:
    """What attempts are made with; the same for all requests of a router.

    Attributes:
        sleep: pauses between attempts, in seconds.
    """

    router_id: str
    admission: Admission
    hops: Hops
    config: AttemptConfig
    metrics: RouterMetrics
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


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
    ) -> None:
        """``on_placed`` hears of each attempt's placement."""
        self._request = request
        self._choice = choice
        self._output = output
        self._tools = tools
        self._ticket = ticket
        self._on_placed = on_placed
        self._hints = RetryHints()

    async def run(self) -> ChoiceFinished:
        """Generate to the end.

        Raises:
            ServingError: the last attempt's error, or why no attempt could be made.
        """
        cause = "first"
        while (reason := self._reason_ended()) is None:
            reservation = await self._admit()
            try:
                self._begin(reservation, cause)
                reason = await self._attempt(reservation)
                break
            except HopFailedError as failure:
                cause = failure.error.reason.lower()
                if self._output.num_attempts >= self._tools.config.max_attempts:
                    raise failure.error from failure
                pause_s = self._hints.note(failure, reservation.placement)
            finally:
                reservation.release()
                self._tools.admission.wake()
            await self._tools.sleep(pause_s)
        return self._output.finish(reason)

    async def _admit(self) -> Reservation:
        began = time.monotonic()
        try:
            return await self._tools.admission.admit(
                self._ticket, self._pending(), is_retry=self._output.num_attempts > 0
            )
        finally:
            # Also of those that never got room: how long they waited is all there is to know of them.
            self._output.note_wait(time.monotonic() - began)

    def _begin(self, reservation: Reservation, cause: str) -> None:
        self._output.num_attempts += 1
        self._tools.metrics.observe_queue(reservation.waited_s)
        self._tools.metrics.count_attempt(cause)
        self._on_placed(reservation.placement)

    def _reason_ended(self) -> FinishReason | None:
        """Why there is nothing left to do: a worker may break after its last token and before its last word."""
        if self._request.ended_by(self._output.token_ids):
            return FinishReason.STOP_ID
        is_full = len(self._output.token_ids) >= self._request.max_output_tokens
        return FinishReason.LENGTH if is_full else None

    def _pending(self) -> Pending:
        num_generated = len(self._output.token_ids)
        num_tokens = len(self._request.prompt_token_ids) + num_generated
        num_left = min(self._request.max_output_tokens - num_generated, self._tools.config.reserve_tokens)
        # The last token needs no room, as nothing attends to it.
        num_most_tokens = len(self._request.prompt_token_ids) + self._request.max_output_tokens - 1
        return Pending(
            num_tokens=num_tokens,
            num_reserved_tokens=min(num_tokens + num_left, num_most_tokens),
            num_most_tokens=num_most_tokens,
            adapter=self._request.start.adapter,
            avoid=frozenset(self._hints.avoid),
            prefer_prefill=self._hints.prefer_prefill,
        )

    async def _attempt(self, reservation: Reservation) -> FinishReason:
        """Raises ``HopFailedError``."""
        hand_off: HandOff | None = None
        if reservation.placement.prefill is not None and reservation.prefill is not None:
            outcome = await self._prefill(reservation, reservation.prefill)
            reservation.prefill.release()
            reason = self._take_outcome(outcome)
            hand_off = outcome.hand_off
            if reason is not None:
                self._drop(hand_off)
                return reason
            if hand_off is None:
                raise HopFailedError(Hop.PREFILL, WorkerUnavailableError("the prefill worker handed nothing off"))
        return await self._decode(reservation, hand_off)

    async def _prefill(self, reservation: Reservation, booking: Booking) -> PrefillOutcome:
        place, config = reservation.placement.prefill, self._tools.config
        assert place is not None
        began, outcome = time.monotonic(), None
        try:
            async with asyncio.timeout(config.prefill_timeout_s):
                hop = self._tools.hops.prefill(place, self._start(booking, place.data_parallel_rank))
                outcome = await hop.outcome()
        except TimeoutError as error:
            silent = WorkerUnavailableError(f"worker {place.worker_id} did not prefill in time")
            raise HopFailedError(Hop.PREFILL, silent) from error
        except ServingError as error:
            raise HopFailedError(Hop.PREFILL, error) from error
        finally:
            self._output.note_prefill(time.monotonic() - began, outcome)
        return outcome

    def _take_outcome(self, outcome: PrefillOutcome) -> FinishReason | None:
        """Show the first token at once: it waits for no transfer."""
        logprobs = () if outcome.logprobs is None else (outcome.logprobs,)
        self._output.take(len(self._output.token_ids), (outcome.token_id,), logprobs)
        if self._output.has_stopped:
            return FinishReason.STOP_STRING
        return outcome.finish_reason

    async def _decode(self, reservation: Reservation, hand_off: HandOff | None) -> FinishReason:
        place, config, booking = reservation.placement.decode, self._tools.config, reservation.decode
        is_taken = False
        num_prompt_tokens = len(self._request.prompt_token_ids)
        call = None
        try:
            call = self._tools.hops.decode(place, self._start(booking, place.data_parallel_rank, hand_off))
            loop, next_look = asyncio.get_running_loop(), 0.0
            async with asyncio.timeout(config.decode_start_timeout_s) as watch:
                while True:
                    progress = await call.next()
                    # Moving the timer for each token would cost more than the token's text.
                    if (now := loop.time()) >= next_look:
                        next_look = now + config.decode_stall_timeout_s * _STALL_TOLERANCE
                        watch.reschedule(now + config.decode_stall_timeout_s * (1 + _STALL_TOLERANCE))
                    if progress.started is not None:
                        is_taken = True
                        self._output.note_started(progress.started, is_handed_off=hand_off is not None)
                    self._output.take(progress.token_offset, progress.token_ids, progress.logprobs)
                    booking.hold(num_prompt_tokens + len(self._output.token_ids))
                    if self._output.has_stopped:
                        return FinishReason.STOP_STRING
                    if progress.finished is not None:
                        return progress.finished.reason
        except TimeoutError as error:
            silent = WorkerUnavailableError(f"worker {place.worker_id} gave no token in time")
            raise HopFailedError(Hop.DECODE, silent) from error
        except ServingError as error:
            raise HopFailedError(Hop.DECODE, error) from error
        finally:
            if call is not None:
                call.cancel()
            if not is_taken:
                self._drop(hand_off)

    def _drop(self, hand_off: HandOff | None) -> None:
        if hand_off is not None:
            self._tools.hops.drop(hand_off)

    def _start(self, booking: Booking, rank: int, hand_off: HandOff | None = None) -> InnerStart:
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
            router_request_number=booking.send(),
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
