"""Which workers hand over to which: counted only while somebody wants to know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from quartet.kvcache.layout import HandOff
from quartet.streams.messages import MediaInput


class HandOffWatch:
    """Counts the hand-offs that workers are sent, by the worker that holds one and the one that takes it.

    Those of starts that a client brings to its worker itself (``Place``) are not seen.
    """

    def __init__(self) -> None:
        """Count nothing yet."""
        self._counts: Counter[tuple[str, str]] | None = None

    @property
    def counts(self) -> Mapping[tuple[str, str], int]:
        """By holder and taker, how many there were since ``begin``; empty while nothing is counted."""
        return self._counts or {}

    def begin(self) -> None:
        """Count from now on, from 0."""
        self._counts = Counter()

    def end(self) -> None:
        """Count nothing any more."""
        self._counts = None

    def note(self, taker: str, hand_off: HandOff | None, media: Sequence[MediaInput] = ()) -> None:
        """The worker ``taker`` is sent a start with these."""
        counts = self._counts
        if counts is None:
            return
        if hand_off is not None:
            counts[hand_off.worker_id, taker] += 1
        for item in media:
            if isinstance(item.source, HandOff):
                counts[item.source.worker_id, taker] += 1
