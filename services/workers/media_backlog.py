"""How much of requests' media waits for the vision tower: what a worker accepts is bounded by it."""

from __future__ import annotations

from collections.abc import Sequence

from quartet.errors import QueueFullError

# What waits is encoded in a second or few.
_RETRY_DELAY_S = 1.0


class MediaBacklog:
    """Counts what waits, and refuses more of it. Lives on the event loop.

    Pixels are bounded besides items, as a file of a kilobyte may take seconds to decode. A request that comes while
    nothing waits is taken however large it is.
    """

    def __init__(self, *, max_items: int, max_pixels: int) -> None:
        """Let so many items wait, and so many pixels that are to be decoded."""
        self._max_items = max_items
        self._max_pixels = max_pixels
        self.num_items = 0
        self.num_pixels = 0

    def enter(self, num_items: int) -> WaitingMedia:
        """Count the items of a new request, to be left by it. Raises ``QueueFullError``: too many wait already."""
        if self.num_items and self.num_items + num_items > self._max_items:
            raise _full("items")
        self.num_items += num_items
        return WaitingMedia(self, num_items)

    def check_pixels(self, num_pixels: int) -> None:
        """Raise ``QueueFullError`` where those would be too many."""
        if num_pixels and self.num_pixels and self.num_pixels + num_pixels > self._max_pixels:
            raise _full("pixels")


class WaitingMedia:
    """What waits of one request."""

    def __init__(self, backlog: MediaBacklog, num_items: int) -> None:
        """Made by ``MediaBacklog.enter``, which counts the items."""
        self._backlog = backlog
        self._num_pixels = dict.fromkeys(range(num_items), 0)

    def add_pixels(self, num_pixels: Sequence[int]) -> None:
        """Count what each of the items is decoded to. Raises ``QueueFullError``: too many wait already."""
        self._backlog.check_pixels(sum(num_pixels))
        for index in self._num_pixels:
            self._num_pixels[index] = num_pixels[index]
            self._backlog.num_pixels += num_pixels[index]

    def leave(self, index: int) -> None:
        """An item waits no more."""
        self._backlog.num_items -= 1
        self._backlog.num_pixels -= self._num_pixels.pop(index)

    def leave_all(self) -> None:
        """No item waits any more. May be called twice."""
        for index in list(self._num_pixels):
            self.leave(index)


def _full(what: str) -> QueueFullError:
    message = f"the worker that encodes media has too many {what} waiting"
    return QueueFullError(message, retry_delay_s=_RETRY_DELAY_S)
