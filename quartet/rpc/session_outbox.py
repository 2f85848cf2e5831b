"""What a router owes one session: everybody's deltas and side messages, until the stream takes them.

Nobody waits for a session. What gathers between two messages goes out in one; for a reader that is too slow for that,
it is merged by choice and bounded by request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Container
from typing import Final, TypeVar

from quartet.errors import ServingError, SlowReaderError
from quartet.rpc.convert.session import (
    to_session_accepted,
    to_session_failure,
    to_session_finished,
    to_session_placed,
    to_session_response,
)
from quartet.rpc.edge import Accepted, ChoiceFinished, ChoicePlacement
from quartet.rpc.session import SessionLimits
from quartet.rpc.session_backlog import Entry, SessionBacklog, to_columns
from quartet.v1 import router_pb2 as pb

SideT = TypeVar("SideT", pb.SessionAccepted, pb.SessionPlaced, pb.SessionFinished, pb.SessionFailure)

#: A message is at most this long: clients of other makes take 4 MiB unless told otherwise, and what a slow reader has
#: not taken of it can't be taken back.
MAX_SESSION_MESSAGE_BYTES = 1 << 20

_MAX_UNSEEN_ENTRIES = 4096
_ROOM_BYTES = MAX_SESSION_MESSAGE_BYTES - 64  # less tags and lengths of the packed columns
_SIDE_BYTES = 4  # tag and length of a side message


class SessionOutbox:
    """Pending columns and side messages of one session.

    Attributes:
        entries: deltas as they came. Whoever appends calls ``look`` if there are ``look_at`` of them then: a method
            that did both would double the price of a token.
        look_at: so many entries are worth a look.
    """

    def __init__(self, limits: SessionLimits, on_overflow: Callable[[int, ServingError], None]) -> None:
        """``on_overflow`` hears of a request of which too much gathered: it has been given its failure."""
        self.entries: Final[list[Entry]] = []
        self._limits = limits
        self._on_overflow = on_overflow
        self._max_unseen = self.look_at = min(_MAX_UNSEEN_ENTRIES, limits.max_pending_tokens)
        self._backlog = SessionBacklog()
        self._accepted: deque[pb.SessionAccepted] = deque()
        self._placed: deque[pb.SessionPlaced] = deque()
        self._finished: deque[pb.SessionFinished] = deque()
        self._failures: deque[pb.SessionFailure] = deque()
        self._ended: set[int] = set()
        self._waiter: asyncio.Future[None] | None = None
        self._is_writing = False
        self._taken = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is pending."""
        return not (self.entries or self._backlog or self._accepted or self._placed or self._finished or self._failures)

    @property
    def num_ended(self) -> int:
        """Slots whose request has ended, but whose end is here, not taken yet."""
        return len(self._ended)

    def owes(self, slot: int) -> bool:
        """Whether the end of the request in ``slot`` is here, not taken yet."""
        return slot in self._ended

    def accept(self, slot: int, accepted: Accepted) -> None:
        """The request in ``slot`` is placed."""
        self._accepted.append(to_session_accepted(slot, accepted))
        self.wake()

    def place(self, slot: int, placement: ChoicePlacement) -> None:
        """One more of its choices is."""
        self._placed.append(to_session_placed(slot, placement))
        self.wake()

    def finish(self, slot: int, finished: ChoiceFinished, *, is_last: bool) -> None:
        """One of its choices has ended; with the last one, it has."""
        self._finished.append(to_session_finished(slot, finished))
        if is_last:
            self._ended.add(slot)
        self.wake()

    def fail(self, slot: int, error: BaseException) -> None:
        """It has ended badly."""
        self._failures.append(to_session_failure(slot, error))
        self._ended.add(slot)
        self.wake()

    def look(self) -> None:
        """Many entries have come: wake the stream, or, where the message before still is not taken, count them."""
        if not self._is_writing:
            self._release()
            return
        self._gather()
        for slot in self._backlog.beyond(self._limits.max_pending_tokens, self._limits.max_pending_bytes):
            self._backlog.drop(slot)
            # The failure is the end also of those of its choices that ended well and wait here.
            self._finished = deque(item for item in self._finished if item.slot != slot)
            error = SlowReaderError("the session's reader took too little for too long")
            self.fail(slot, error)
            self._on_overflow(slot, error)

    async def room(self) -> None:
        """Until the client has taken enough ends for more requests to be begun, or refused."""
        while len(self._ended) > self._limits.max_requests:
            self._taken.clear()
            await self._taken.wait()

    def wake(self) -> None:
        """Let ``wait`` return."""
        if self.look_at == 1:
            self._release()

    async def wait(self) -> None:
        """Until something is pending, or ``wake`` is called. For one reader, who has written what it took."""
        self._is_writing = False
        if self.is_empty:
            self.look_at = 1
            await self._wait()

    async def pause(self, duration_s: float) -> None:
        """Let more gather for ``duration_s`` seconds, or until there is much. For one reader."""
        timer = asyncio.get_running_loop().call_later(duration_s, self._release)
        try:
            await self._wait()
        finally:
            timer.cancel()

    def take(self) -> pb.SessionResponse | None:
        """The next message, at most 1 MiB; ``None`` when nothing is pending.

        A request's deltas are never before its placement, nor its end before them.
        """
        if self.is_empty:
            return None
        self._is_writing = True
        self.look_at = self._max_unseen
        # What finds no room leaves none to those that come after it.
        accepted, room = _first(self._accepted, (), _ROOM_BYTES)
        placed, room = _first(self._placed, (), room)
        message, room = self._take_deltas(room)
        message.accepted.extend(accepted)
        message.placed.extend(placed)
        finished, room = _first(self._finished, self._backlog, room)
        message.finished.extend(finished)
        failures, room = _first(self._failures, self._backlog, room)
        message.failures.extend(failures)
        if self._ended:
            self._forget_ended()
        return message

    def _take_deltas(self, room: int) -> tuple[pb.SessionResponse, int]:
        """A message with them, and the room that they leave."""
        if not (self.entries or self._backlog) or not room:
            return pb.SessionResponse(), room
        if not self._backlog:
            columns = to_columns(self.entries)
            if columns.max_size_bytes <= room:
                self.entries.clear()
                return to_session_response(columns), room - columns.max_size_bytes
        self._gather()
        entries = self._backlog.take(room)
        if not entries:
            return pb.SessionResponse(), 0
        columns = to_columns(entries)
        # Its bound may be above what the backlog counted, character by character.
        return to_session_response(columns), max(0, room - columns.max_size_bytes)

    def _gather(self) -> None:
        self._backlog.add(self.entries)
        self.entries.clear()

    def _forget_ended(self) -> None:
        self._ended &= {item.slot for pending in (self._finished, self._failures) for item in pending}
        self._taken.set()

    def _release(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        # The stream takes them before long: until then there is nothing to be done about more.
        self.look_at = len(self.entries) + self._max_unseen

    async def _wait(self) -> None:
        assert self._waiter is None, "one reader waits"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


def _first(pending: deque[SideT], held: Container[int], room: int) -> tuple[list[SideT], int]:
    """Take what fits into ``room`` and is not of a ``held`` slot; where one doesn't fit, no room is left."""
    taken: list[SideT] = []
    for _ in range(len(pending)):
        item = pending.popleft()
        size_bytes = item.ByteSize() + _SIDE_BYTES
        if item.slot in held:
            pending.append(item)
        elif size_bytes > room:
            pending.append(item)
            room = 0
        else:
            taken.append(item)
            room -= size_bytes
    return taken, room
