"""Keeps clients from sending messages that are refused as fast as they can.

gRPC hands over a message whole, however large, and copies it on the event loop: some 10 ms for 12 MB. To measure one
with many fields takes as long. No tenant pays for what is refused. So the connection that sent it waits, for longer the
more of it comes: for its refusal, and before its next calls are read, because a client need not wait for the refusal.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextvars import ContextVar

from quartet.errors import QueueFullError

#: The event loop copies so many bytes of messages in a second.
COPIED_BYTES_PER_S = 800 << 20

# What is refused may take so much of the event loop, whoever sends it: of others' requests fewer than one in
# a hundred are to meet it.
_SHARE = 1 / 160
# A client that sends one by mistake is answered at once.
_FREE_S = 3.0
_MAX_WAIT_S = 15.0
# Calls of one connection that wait to be read, each with up to 64 KiB in gRPC; further ones are refused.
_MAX_UNREAD = 64
# Who has paid is forgotten so often, because all that are known have to be looked at.
_FORGET_INTERVAL_S = 0.1

# Whoever refuses a message may know only the object that it became, and to ask that for its size writes it anew.
_long_message_bytes: ContextVar[int] = ContextVar("long_message_bytes", default=0)


class RefusalPace:
    """Delays what follows refused messages: the refusals of all, and the next calls of connections that sent them."""

    def __init__(self, share: float = _SHARE, free_s: float = _FREE_S, max_wait_s: float = _MAX_WAIT_S) -> None:
        """What is refused may take ``share`` of the event loop.

        Who owes at most ``free_s`` seconds does not wait, and nobody waits longer than ``max_wait_s``.
        """
        self._share = share
        self._free_s = free_s
        self._max_wait_s = max_wait_s
        self._ends_at = 0.0
        # When each connection will have paid for what it sent, were there no free seconds.
        self._paid_at: dict[str, float] = {}
        self._num_unread: Counter[str] = Counter()
        self._forgets_at = 0.0

    def __bool__(self) -> bool:
        """Whether some connection may have to wait."""
        return bool(self._paid_at)

    async def wait_to_read(self, peer: str) -> None:
        """Wait until the connection ``peer`` has paid for what was refused to it.

        Raises:
            QueueFullError: many of its calls wait already.
        """
        wait_s = self._paid_at.get(peer, 0.0) - time.monotonic() - self._free_s
        if wait_s <= 0:
            return
        if self._num_unread[peer] >= _MAX_UNREAD:
            raise QueueFullError(f"{_MAX_UNREAD} calls of this connection wait, after messages of it that were refused")
        self._num_unread[peer] += 1
        try:
            await asyncio.sleep(wait_s)
        finally:
            self._num_unread[peer] -= 1
            if not self._num_unread[peer]:
                del self._num_unread[peer]

    async def wait(self, peer: str, error: Exception, size_bytes: int, measure_s: float = 0.0) -> None:
        """Wait as long as the message that was refused with ``error`` costs, and those before it.

        Args:
            peer: the connection that sent it.
            error: the refusal.
            size_bytes: of the message.
            measure_s: what it took to find that it must be refused, in seconds of CPU time.
        """
        forget_frames(error)
        cost_s = (size_bytes / COPIED_BYTES_PER_S + measure_s) / self._share
        now = time.monotonic()
        self._forget_paid(now)
        # Connections that have to pay share what refusals may take; each knows how many there are.
        self._paid_at[peer] = self._later(self._paid_at.get(peer, 0.0), cost_s * max(1, len(self._paid_at)), now)
        self._ends_at = self._later(self._ends_at, cost_s, now)
        wait_s = self._ends_at - now - self._free_s
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def _later(self, ends_at: float, cost_s: float, now: float) -> float:
        return min(max(ends_at, now) + cost_s, now + self._free_s + self._max_wait_s)

    def _forget_paid(self, now: float) -> None:
        if now >= self._forgets_at:
            self._forgets_at = now + _FORGET_INTERVAL_S
            self._paid_at = {peer: paid_at for peer, paid_at in self._paid_at.items() if paid_at > now}


def note_message(size_bytes: int) -> None:
    """The current task reads a long message of so many bytes."""
    _long_message_bytes.set(size_bytes)


def take_message_bytes() -> int:
    """The bytes of the long message that the current task has read since it was last asked; 0: none."""
    if size_bytes := _long_message_bytes.get():
        _long_message_bytes.set(0)
    return size_bytes


def forget_frames(error: BaseException) -> None:
    """Let go what the frames of a refusal know: its message. Else that may stay until garbage is collected."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
