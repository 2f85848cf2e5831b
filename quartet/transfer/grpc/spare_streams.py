"""Pull streams that are open before anybody needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from quartet.transfer.grpc.pull_stream import PullStream


class SpareStreams:
    """One open stream for each peer from whom hand-offs came lately.

    A stream belongs to no hand-off before its `begin`, and opening one takes about as long as a question and its
    answer: half a millisecond of a fetch's two. A source does not wait for ever, so spares are given up after a while.
    """

    def __init__(self, open_stream: Callable[[str, float], PullStream]) -> None:
        """Open nothing yet; ``open_stream(address, max_idle_s)`` opens one that is idle for so long at most."""
        self._open_stream = open_stream
        self._spares: dict[str, _Spare] = {}

    def prepare(self, address: str, max_idle_s: float) -> None:
        """Have a stream to ``address`` ready, for the next ``max_idle_s`` at most."""
        spare = self._spares.get(address)
        if spare is not None and spare.stream.is_open:
            return
        if spare is not None:
            spare.timer.cancel()
        stream = self._open_stream(address, max_idle_s)
        timer = asyncio.get_running_loop().call_later(max_idle_s, self._give_up, address)
        self._spares[address] = _Spare(stream, timer)

    def take(self, address: str) -> PullStream | None:
        """The stream to ``address``, which is the caller's from now on; ``None`` where there is none."""
        spare = self._spares.pop(address, None)
        if spare is None:
            return None
        spare.timer.cancel()
        return spare.stream if spare.stream.is_open else None

    def close(self) -> None:
        """Give all of them up."""
        for address in list(self._spares):
            self._give_up(address)

    def _give_up(self, address: str) -> None:
        spare = self._spares.pop(address)
        spare.timer.cancel()
        spare.stream.cancel()


@dataclass(frozen=True)
class _Spare:
    stream: PullStream
    timer: asyncio.TimerHandle
