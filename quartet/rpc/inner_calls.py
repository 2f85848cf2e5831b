"""Requests on an inner stream as the router's side sees them: from the start to the terminal output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from quartet.engine.sampling import TokenLogprobs
from quartet.errors import RequestCancelledError, ServingError
from quartet.kvcache.layout import HandOff
from quartet.rpc.inner import DecodeFinished, DecodeSink, DecodeStarted, PrefillOutcome


class InnerCall:
    """What both kinds share. ``is_over``: nothing that still comes for it matters."""

    # There are thousands, and each token touches one after long: without a dictionary they lie closer together.
    __slots__ = ("_error", "_is_cancelled", "_send_cancel", "_waiter", "is_over")

    def __init__(self, send_cancel: Callable[[], None]) -> None:
        """``send_cancel`` asks the worker to end it."""
        self._send_cancel = send_cancel
        # An `asyncio.Event` does the same, at twice the price for each token.
        self._waiter: asyncio.Future[None] | None = None
        self._error: ServingError | None = None
        self._is_cancelled = False
        self.is_over = False

    def cancel(self) -> None:
        """Ask the worker to end it; harmless when it has ended. Nobody needs to wait for the end."""
        if not self.is_over and not self._is_cancelled:
            self._is_cancelled = True
            self._send_cancel()

    def fail(self, error: ServingError) -> None:
        """End it badly, unless it is over."""
        if not self.is_over:
            self._error = error
            self.is_over = True
            self._wake()

    async def _wait(self) -> None:
        """Until the next ``_wake``. For one reader."""
        assert self._waiter is None, "one reader waits"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class DecodeCall(InnerCall):
    """One decode: what it gives goes to its sink, and ``outcome`` waits for its end.

    Attributes:
        heard_at: when the worker last said something of it, monotonic seconds; ``None`` before its first word.
    """

    __slots__ = ("_outcome", "_sink", "heard_at")

    def __init__(self, send_cancel: Callable[[], None], sink: DecodeSink) -> None:
        """Nothing has come yet."""
        super().__init__(send_cancel)
        self.heard_at: float | None = None
        self._sink = sink
        self._outcome: DecodeFinished | None = None

    async def outcome(self) -> DecodeFinished | None:
        """Wait for the end; ``None``: the sink wanted no more. For one reader; cancelled here, it loses nothing.

        Raises:
            ServingError: it ended badly, after all tokens that came before have gone to the sink.
        """
        while not self.is_over:
            await self._wait()
        if self._error is not None:
            raise self._error
        return self._outcome

    def take_tokens(self, offset: int, token_ids: list[int], logprobs: Sequence[TokenLogprobs], now: float) -> None:
        """Bring tokens that begin at ``offset`` to the sink. What it makes no sense of ends this decode, not others."""
        if self.is_over:
            return
        self.heard_at = now
        try:
            is_enough = not self._sink.take(offset, token_ids, logprobs, now)
        except ServingError as error:
            self.cancel()
            self.fail(error)
            return
        if is_enough:
            self.cancel()
            self.is_over = True
            self._wake()

    def start(self, started: DecodeStarted, now: float) -> None:
        """It joined the running batch."""
        if not self.is_over:
            self.heard_at = now
            self._sink.started(started)

    def finish(self, finished: DecodeFinished) -> None:
        """End it well, unless it is over."""
        if not self.is_over:
            self._outcome = finished
            self.is_over = True
            self._wake()


class PrefillCall(InnerCall):
    """One prefill: ``outcome`` gives its one output. A hand-off that nobody took goes to ``drop``."""

    __slots__ = ("_drop", "_is_taken", "_outcome")

    def __init__(self, send_cancel: Callable[[], None], drop: Callable[[HandOff], None]) -> None:
        """``drop`` is given the hand-off when it comes after nobody waits any more."""
        super().__init__(send_cancel)
        self._drop = drop
        self._outcome: PrefillOutcome | None = None
        self._is_taken = False

    async def outcome(self) -> PrefillOutcome:
        """Wait for the output. A caller that is cancelled here leaves nothing behind.

        Raises:
            ServingError: it ended badly; ``RequestCancelledError`` at once after ``cancel``.
        """
        try:
            while not self.is_over:
                await self._wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._error is not None:
            raise self._error
        assert self._outcome is not None, "woken with one or the other"
        self._is_taken = True
        return self._outcome

    def cancel(self) -> None:
        """End it: what the worker still brings, or has brought and nobody took, is dropped. No-op once it was taken."""
        if self._is_taken:
            return
        super().cancel()
        outcome, self._outcome = self._outcome, None
        if outcome is not None and outcome.hand_off is not None:
            self._drop(outcome.hand_off)
        if self._error is None:
            self._error = RequestCancelledError("cancelled by the caller")
        self.is_over = True
        self._wake()

    def succeed(self, outcome: PrefillOutcome) -> None:
        """End it well, or drop what comes too late."""
        if self.is_over:
            if outcome.hand_off is not None:
                self._drop(outcome.hand_off)
            return
        self._outcome = outcome
        self.is_over = True
        self._wake()
