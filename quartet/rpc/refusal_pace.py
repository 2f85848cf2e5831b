"""Keeps clients from sending messages that are too large as fast as they can.

gRPC hands over a message whole, however large, and copies it on the event loop: some 10 ms for 12 MB. No tenant pays
for what is refused. So its sender waits for the refusal, or until more is read, for longer the more of it comes.
"""

from __future__ import annotations

import asyncio
import time

from quartet.errors import MessageTooLargeError

# What is refused may take a fiftieth of the event loop.
_BYTES_PER_S = 16 << 20
# A client that sends one by mistake is answered at once.
_FREE_S = 1.0
_MAX_WAIT_S = 5.0


class RefusalPace:
    """Delays what follows refused messages, so that so many bytes of them come in a second."""

    def __init__(self) -> None:
        """Nothing was refused yet."""
        self._ends_at = 0.0

    async def wait(self, error: MessageTooLargeError) -> None:
        """Wait as long as the message that was refused with ``error`` costs, and those before it; at most 5 s."""
        error.__traceback__ = None  # its frames know the message
        now = time.monotonic()
        self._ends_at = max(self._ends_at, now) + error.size_bytes / _BYTES_PER_S
        self._ends_at = min(self._ends_at, now + _FREE_S + _MAX_WAIT_S)
        wait_s = self._ends_at - now - _FREE_S
        if wait_s > 0:
            await asyncio.sleep(wait_s)
