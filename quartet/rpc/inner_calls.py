"""Requests on an inner stream as the router's side sees them: from the start to the terminal output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from quartet.engine.sampling import TokenLogprobs
from quartet.errors import RequestCancelledError, ServingError, WorkerUnavailableError
from quartet.kvcache.layout import HandOff
from quartet.rpc.inner import DecodeFinished, DecodeProgress, DecodeStarted, PrefillOutcome


class InnerCall:
    """What both kinds share. ``is_over``: nothing that still comes for it matters."""

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
    """One decode: ``next`` gives what has gathered. For one reader."""

    def __init__(self, send_cancel: Callable[[], None]) -> None:
        """Begin with nothing gathered."""
        super().__init__(send_cancel)
        self._progress = DecodeProgress()
        self._has_progress = False

    async def next(self) -> DecodeProgress:
        """Wait for more; the last one has ``finished`` set. Cancelled here, it loses nothing.

        Raises:
            ServingError: it ended badly; tokens that came before are given out first.
        """
        while not self._has_progress:
            if self._error is not None:
                raise self._error
            assert not self.is_over, "nothing comes after the end"
            await self._wait()
        progress, self._progress, self._has_progress = self._progress, DecodeProgress(), False
        return progress

    def take_tokens(self, offset: int, token_ids: list[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Gather tokens that begin at ``offset``, the list included; a hole ends this attempt, not the stream."""
        if self.is_over or not token_ids:
            return
        progress = self._progress
        if progress.token_ids:
            self._merge(offset, token_ids, logprobs)
        else:
            progress.token_offset, progress.token_ids = offset, token_ids
            progress.logprobs.extend(logprobs)
        self._tell_progress()

    def start(self, started: DecodeStarted) -> None:
        """It joined the running batch."""
        self._progress.started = started
        self._tell_progress()

    def finish(self, finished: DecodeFinished) -> None:
        """End it well, unless it is over."""
        if not self.is_over:
            self._progress.finished = finished
            self.is_over = True
            self._tell_progress()

    def _merge(self, offset: int, token_ids: list[int], logprobs: Sequence[TokenLogprobs]) -> None:
        num_known = len(self._progress.token_ids)
        try:
            self._progress.merge_tokens(offset, token_ids)
        except IndexError as hole:
            self.cancel()
            self.fail(WorkerUnavailableError(f"the worker lost tokens: {hole}"))
            return
        num_new = len(self._progress.token_ids) - num_known
        if logprobs and num_new:
            self._progress.logprobs.extend(logprobs[-num_new:])

    def _tell_progress(self) -> None:
        self._has_progress = True
        self._wake()


class PrefillCall(InnerCall):
    """One prefill: ``outcome`` gives its one output. A hand-off that nobody took goes to ``drop``."""

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
