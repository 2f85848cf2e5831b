"""One choice from its first placement to its end: hop after hop, and again elsewhere when something breaks."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from quartet.engine.base import FinishReason
from quartet.errors import ServingError
from quartet.rpc.choice_output import ChoiceOutput
from router.admission import Ticket
from router.attempt_tools import AttemptTools
from router.book import Reservation
from router.choice_hops import ChoiceHops
from router.pending import make_pending
from router.policy.base import Placement
from router.prepared import PreparedRequest
from router.retry import Hop, HopFailedError, RetryHints
from router.sealing import SealedRun, Sealer, SealTerms
from router.together import Together

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
        self, sealer: Sealer, together: Together, reservation: Reservation
    ) -> SealedRun | FinishReason:
        """Raises ``HopFailedError``."""
        sealer.check_size(len(self._hops.request.prompt_token_ids) + len(self._output.token_ids))
        hand_off = await self._hops.hand_off(reservation)
        if isinstance(hand_off, FinishReason):
            return hand_off
        rank = reservation.placement.decode.data_parallel_rank
        num_tokens = len(self._hops.request.prompt_token_ids) + len(self._output.token_ids)
        terms = SealTerms(
            request_id=self._hops.request.request_id,
            choice=self._choice,
            hand_off=hand_off,
            deadline=self._hops.request.deadline,
            num_first_tokens=num_tokens,
            is_kept=not together.is_alone,
        )
        try:
            with together.kept(hand_off, self._tools.hops):
                return await together.seal(
                    lambda: sealer.seal(
                        reservation, terms, lambda number: self._hops.start(reservation.decode, number, rank, hand_off)
                    )
                )
        except BaseException as error:
            self._hops.drop(hand_off)
            if isinstance(error, ServingError):
                raise HopFailedError(Hop.DECODE, error) from error
            raise
