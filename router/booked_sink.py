"""Where a choice's tokens go that pass the router: to its output, and to the book."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quartet.engine.sampling import TokenLogprobs
from quartet.rpc.choice_output import ChoiceOutput
from quartet.rpc.inner import DecodeStarted
from router.book import Booking


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
