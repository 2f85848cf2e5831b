"""Finds stop strings in text that arrives in pieces, and holds back what may yet become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quartet.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What a piece of text brought.

    Attributes:
        text: characters that may be shown now, in order.
        stop_string: the stop string that ended the text; ``None`` while there was none.
    """

    text: str
    stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether the text has ended; nothing more will be shown."""
        return self.stop_string is not None


class StopMatcher:
    """Ends a text at the first stop string that is complete.

    Of several that are complete at the same character the longest counts (it begins first). That is where
    a generation that is looked at character by character stops, so the result is the same however the
    text was split, and no match waits for a longer one.
    """

    def __init__(self, stop_strings: Sequence[str], include_stop: bool = False) -> None:
        """Prepare to look for ``stop_strings``; ``include_stop`` shows the one found.

        Raises:
            InvalidRequestError: a stop string is empty.
        """
        if not all(stop_strings):
            raise InvalidRequestError("a stop string must not be empty", field="text_options.stop_strings")
        self._stop_strings = tuple(stop_strings)
        self._include_stop = include_stop
        self._first_characters = frozenset(stop_string[0] for stop_string in stop_strings)
        self._max_held = max(map(len, stop_strings), default=1) - 1
        self._held = ""
        self._has_stopped = False

    @property
    def num_held(self) -> int:
        """Characters held back, because they may be the beginning of a stop string."""
        return len(self._held)

    def push(self, text: str) -> StopMatch:
        """Take the next characters and return what may be shown; after a match always nothing."""
        if self._has_stopped:
            return StopMatch("")
        if not self._held and self._first_characters.isdisjoint(text):
            return StopMatch(text)
        pending = self._held + text
        if any(stop_string in pending for stop_string in self._stop_strings):
            return self._stop(pending)
        num_shown = self._num_certain(pending)
        self._held = pending[num_shown:]
        return StopMatch(pending[:num_shown])

    def finish(self) -> StopMatch:
        """Return what was held back: nothing can complete it any more."""
        held, self._held = self._held, ""
        return StopMatch(held)

    def _stop(self, pending: str) -> StopMatch:
        """End at the first of the stop strings, of which ``pending`` holds at least one."""
        self._has_stopped = True
        self._held = ""
        ends = {stop: pending.find(stop) + len(stop) for stop in self._stop_strings if stop in pending}
        stop_string = min(ends, key=lambda stop: (ends[stop], -len(stop)))
        end = ends[stop_string]
        return StopMatch(pending[: end if self._include_stop else end - len(stop_string)], stop_string)

    def _num_certain(self, pending: str) -> int:
        """Number of characters before the longest end of ``pending`` that begins a stop string.

        What is passed over here is never looked at again, so the work is linear in the text.
        """
        for begin in range(max(0, len(pending) - self._max_held), len(pending)):
            if pending[begin] in self._first_characters:
                end = pending[begin:]
                if any(stop_string.startswith(end) for stop_string in self._stop_strings):
                    return begin
        return len(pending)
