"""A router's end of a session: many requests by slot, one writer, exactly one end for each start.

No request waits for its session's reader. What collects between two messages goes out in one. If the reader is too
slow even for that, it is merged by choice and limited by request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias, TypeVar

from quartet.api.answer import AnswerSink
from quartet.api.convert.answer import (
    from_session_start,
    start_slot,
    to_session_accepted,
    to_session_failure,
    to_session_finished,
    to_session_parsed,
    to_session_placed,
    to_session_prompt_logprobs,
    to_session_response,
)
from quartet.api.request import (
    MAX_CHOICES,
    Accepted,
    ChoiceFinished,
    ChoicePlacement,
    SessionLimits,
    SessionRun,
    SessionStart,
)
from quartet.api.session_columns import Entry, ParsedEntry, SessionBacklog, joined, parsed_bytes, to_columns
from quartet.engine.base import FinishReason
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.errors import (
    DrainingError,
    MessageTooLargeError,
    ProtocolError,
    QueueFullError,
    RequestCancelledError,
    ServingError,
    SessionIdleError,
    SlowReaderError,
)
from quartet.rpc.server import StalledCalls
from quartet.streams.base import ServerStream
from quartet.streams.outbox import ENTRY_BYTES, ROOM_BYTES
from quartet.streams.read_pace import Account
from quartet.streams.wakeable import Wakeable
from quartet.text.parsed import Parsed
from quartet.v1 import router_pb2 as pb

logger = logging.getLogger(__name__)

#: Begins a request whose answer goes to the sink; raises ``ServingError`` if it can't.
Begin: TypeAlias = Callable[[SessionStart, AnswerSink], SessionRun]
SideT = TypeVar(
    "SideT",
    pb.SessionAccepted,
    pb.SessionPlaced,
    pb.SessionPromptLogprobs,
    pb.SessionFirstToken,
    pb.SessionFinished,
    pb.SessionFailure,
)

# After this time a client may try another router, or the next one at this address.
_DRAINING_RETRY_DELAY_S = 1.0

# The event loop's timers count milliseconds, so a wait of less than half of one needs no timer.
_TIMER_RESOLUTION_S = 0.0005
_MAX_UNSEEN_ENTRIES = 4096

# When a session ends, about so many choices are aborted in a turn of the event loop. Each takes the router some 15 us,
# and others wait meanwhile: 4,096 in one turn held the loop for 50 to 80 ms.
_MAX_ABORTED_CHOICES = 64


class SessionStream(ServerStream[pb.SessionRequest, pb.SessionResponse]):
    """Serves one call of Session until the client has half-closed and every request has ended.

    ``serve`` raises in an ``ExceptionGroup``: ``ProtocolError`` for invalid messages; ``DrainingError`` after ``drain``
    was called and the last request has ended, unless the client has half-closed by then; ``SessionIdleError`` where no
    request ran for too long.
    """

    def __init__(
        self, begin: Begin, limits: SessionLimits, stalled: StalledCalls, account: Account | None = None
    ) -> None:
        """Run requests with ``begin``. ``account`` pays for the messages; ``None``: they are free."""
        outbox = SessionOutbox(limits, self._overflowed)
        super().__init__(
            outbox, stalled, account, max_owed_ends=limits.max_requests, idle_timeout_s=limits.idle_timeout_s
        )
        self._begin = begin
        self._limits = limits
        self._outbox = outbox
        self._requests = _Requests(self._account)
        self._is_draining = False
        self._makes_room = False
        self._next_at = 0.0

    def drain(self) -> None:
        """Take no new requests; end when the last request has ended, even if the client doesn't half-close."""
        self._is_draining = True
        self._outbox.wake()

    def end_idle(self) -> bool:
        """End if no request runs, to make room for another session; return whether it will. It does so once only."""
        if self._makes_room or self._is_busy():
            return False
        self._makes_room = True
        self._outbox.wake()
        return True

    def _handle(self, request: pb.SessionRequest, group: asyncio.TaskGroup) -> None:
        match request.WhichOneof("message"):
            case "start":
                self._start(request.start)
            case "cancel":
                self._cancel(request.cancel.slot)
            case _:
                raise ProtocolError("a message must hold a start or cancel", field="message")

    def _refused(self, error: MessageTooLargeError) -> None:
        """Fail the request whose start it was: the others of this session are not at fault."""
        slot = start_slot(error.head)
        if slot is None:
            raise error
        self._check_unused(slot)
        self._outbox.fail(slot, error)

    def _half_closed(self) -> None:
        self._outbox.wake()

    def _start(self, message: pb.SessionStart) -> None:
        slot = message.slot
        self._check_unused(slot)
        try:
            num_choices = _num_choices(message)
            self._check_open(num_choices)
            asked = from_session_start(message)
            request = _Request(asked, self._outbox, self._requests, self._message_bytes)
            run = self._begin(asked, request)
        except ServingError as error:
            self._account.in_vain(self._message_bytes)
            self._outbox.fail(slot, error)
        else:
            self._requests.enter(slot, request, num_choices)
            self._requests.runs[request] = run

    def _check_unused(self, slot: int) -> None:
        # A slot is free only after its end was sent: before that, the client could not distinguish the two requests.
        if slot in self._requests.by_slot or self._outbox.owes(slot):
            raise ProtocolError(f"slot {slot} is still in use", field="start.slot")

    def _check_open(self, num_choices: int) -> None:
        if self._is_draining:
            raise DrainingError("the router is going away", retry_delay_s=_DRAINING_RETRY_DELAY_S)
        if self._requests.num_choices + self._outbox.num_ended + num_choices > self._limits.max_requests:
            raise QueueFullError("the session has as many requests as it may have")

    def _cancel(self, slot: int) -> None:
        request = self._requests.by_slot.get(slot)
        if request is not None and not request.is_cancelled:
            request.is_cancelled = True
            self._requests.runs[request].cancel()

    def _overflowed(self, slot: int, error: ServingError) -> None:
        request = self._requests.leave(slot)
        if request is not None:  # otherwise it ended before
            request.silence()
            self._requests.runs[request].abort(error)

    async def _next(self) -> pb.SessionResponse | None:
        loop, outbox = asyncio.get_running_loop(), self._outbox
        while not self._is_over():
            if self._makes_room or self._has_idled:  # mostly neither, and each message of tokens passes here
                self._check_idle()
            await outbox.wait()
            now = loop.time()
            if now < self._next_at - _TIMER_RESOLUTION_S:
                await outbox.pause(self._next_at - now)
            if (message := outbox.take()) is not None:
                self._next_at = loop.time() + self._limits.tick_s
                return message
        if not self._is_half_closed:
            raise DrainingError("the router is going away", retry_delay_s=_DRAINING_RETRY_DELAY_S)
        return None

    def _check_idle(self) -> None:
        """Raises ``SessionIdleError``: it ends because no request runs."""
        if self._makes_room and not self._is_busy():
            raise SessionIdleError(
                "no request runs in the session, and the router has as many sessions as it may have (its "
                "calls.max_sessions): open another one for the next request"
            )
        if self._is_idle():
            raise SessionIdleError(
                f"no request ran in the session for {self._limits.idle_timeout_s:g} s (the router's "
                "session.idle_timeout_s): open another one for the next request"
            )

    def _is_over(self) -> bool:
        return (self._is_half_closed or self._is_draining) and not self._requests.by_slot and self._outbox.is_empty

    def _is_busy(self) -> bool:
        return bool(self._requests.by_slot or self._requests.runs or not self._outbox.is_empty)

    def _wake(self) -> None:
        self._outbox.wake()

    async def _end(self) -> None:
        """End all running requests, and wait until none holds anything."""
        # This task may be cancelled at the first `await`: every request ends without it.
        requests = deque(self._requests.by_slot.values())
        for request in requests:
            request.silence()
        self._requests.none_runs.clear()
        self._abort_some(requests)
        if self._requests.runs:
            await self._requests.none_runs.wait()

    def _abort_some(self, requests: deque[_Request]) -> None:
        """Abort the first of ``requests``, and the others in the next turns of the event loop."""
        num_choices = 0
        while requests and num_choices < _MAX_ABORTED_CHOICES:
            request = requests.popleft()
            run = self._requests.runs.get(request)
            if run is None or request.is_cancelled:
                continue  # it has ended, or will soon
            num_choices += request.num_choices
            try:
                run.abort(RequestCancelledError("its session is over"))
            except Exception:  # the others must end all the same
                logger.exception("a request of a session that is over can't be aborted")
        if requests:
            asyncio.get_running_loop().call_soon(self._abort_some, requests)


class SessionOutbox(Wakeable):
    """Pending columns and side messages of one session.

    Attributes:
        entries: deltas as they came. After appending one, call ``poll`` if there are ``poll_at`` of them: one method
            for both would double the cost of a token.
        poll_at: the number of entries at which ``poll`` must be called.
        parsed: reasoning and tool calls, each before the entry that it came with.
    """

    def __init__(self, limits: SessionLimits, on_overflow: Callable[[int, ServingError], None]) -> None:
        """``on_overflow`` is called with a request for which too much waits, after its failure was added here."""
        super().__init__()
        self.entries: Final[list[Entry]] = []
        self.parsed: Final[list[ParsedEntry]] = []
        self._limits = limits
        self._on_overflow = on_overflow
        self._max_unseen = self.poll_at = min(_MAX_UNSEEN_ENTRIES, limits.max_pending_tokens)
        self._backlog = SessionBacklog()
        self._accepted: deque[pb.SessionAccepted] = deque()
        self._placed: deque[pb.SessionPlaced] = deque()
        self._prompt_logprobs: deque[pb.SessionPromptLogprobs] = deque()
        self._first_tokens: deque[pb.SessionFirstToken] = deque()
        self._finished: deque[pb.SessionFinished] = deque()
        self._failures: deque[pb.SessionFailure] = deque()
        self._ended: set[int] = set()
        self._is_writing = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is pending."""
        return not (
            self.entries
            or self._backlog
            or self._accepted
            or self._placed
            or self._prompt_logprobs
            or self._finished
            or self._failures
        )

    @property
    def num_ended(self) -> int:
        """Slots whose request has ended, and whose end waits here."""
        return len(self._ended)

    def owes(self, slot: int) -> bool:
        """Whether the end of the request in ``slot`` waits here."""
        return slot in self._ended

    def accept(self, slot: int, accepted: Accepted) -> None:
        """The request in ``slot`` is placed."""
        self._accepted.append(to_session_accepted(slot, accepted))
        self.wake()

    def placed(self, slot: int, placement: ChoicePlacement) -> None:
        """One more choice of the request in ``slot`` is placed."""
        self._placed.append(to_session_placed(slot, placement))
        self.wake()

    def prompt_logprobs(self, slot: int, logprobs: PromptLogprobs) -> None:
        """Those of the prompt of the request in ``slot``; they come before its deltas."""
        self._prompt_logprobs.append(to_session_prompt_logprobs(slot, logprobs))
        self.wake()

    def first_token(self, slot: int, choice: int) -> None:
        """The first entry of a choice comes now, and its client wants to know when. An entry follows, which wakes."""
        self._first_tokens.append(pb.SessionFirstToken(slot=slot, choice=choice, sent_at_unix_ns=time.time_ns()))

    def finish(self, slot: int, finished: ChoiceFinished, *, is_last: bool) -> None:
        """One choice of the request in ``slot`` has ended; with the last one, the request has."""
        self._finished.append(to_session_finished(slot, finished))
        if is_last:
            self._ended.add(slot)
        self.wake()

    def fail(self, slot: int, error: BaseException) -> None:
        """The request in ``slot`` has failed."""
        self._failures.append(to_session_failure(slot, error))
        self._ended.add(slot)
        self.wake()

    def poll(self) -> None:
        """Many entries have come: wake the stream, or, if the message before is still not taken, count them."""
        if not self._is_writing:
            self._release()
            return
        self._gather()
        slots = dict.fromkeys(self._backlog.beyond(self._limits.max_pending_tokens, self._limits.max_pending_bytes))
        if not slots:
            return
        # The failure is also the end of those of its choices that ended well and wait here. One pass for all slots:
        # thousands of both may wait.
        self._finished = deque(item for item in self._finished if item.slot not in slots)
        for slot in slots:
            self._backlog.drop(slot)
            error = SlowReaderError("the session's reader took too little for too long")
            self.fail(slot, error)
            self._on_overflow(slot, error)

    def wake(self) -> None:
        """Let ``wait`` return."""
        if self.poll_at == 1:
            self._release()

    async def wait(self) -> None:
        """Wait until something is pending or ``wake`` is called. For one reader, which has written what it took."""
        self._is_writing = False
        if self.is_empty:
            self.poll_at = 1
            await self._woken()

    async def pause(self, duration_s: float) -> None:
        """Let more collect for ``duration_s`` seconds, or until there is much. For one reader."""
        timer = asyncio.get_running_loop().call_later(duration_s, self._release)
        try:
            await self._woken()
        finally:
            timer.cancel()

    def take(self) -> pb.SessionResponse | None:
        """The next message, at most 1 MiB; ``None`` when nothing is pending.

        A request's placement comes before its deltas, and its end comes after them.
        """
        if self.is_empty:
            return None
        self._is_writing = True
        self.poll_at = self._max_unseen
        before, room = self._take_before(ROOM_BYTES)
        message, room = self._take_deltas(room)
        if before is not None:
            message.MergeFrom(before)
        if self._finished:
            finished, room = _first(self._finished, self._backlog, room)
            message.finished.extend(finished)
        if self._failures:
            failures, room = _first(self._failures, self._backlog, room)
            message.failures.extend(failures)
        if self._ended:
            self._forget_ended()
        return message

    def _take_before(self, room: int) -> tuple[pb.SessionResponse | None, int]:
        """A message with what comes before deltas, and the room that it leaves; ``None``: nothing does, mostly."""
        if not (self._accepted or self._placed or self._prompt_logprobs or self._first_tokens):
            return None, room
        # A part without room leaves none for later parts.
        accepted, room = _first(self._accepted, (), room)
        placed, room = _first(self._placed, (), room)
        reports, room = _first(self._prompt_logprobs, (), room)
        first_tokens, room = _first(self._first_tokens, (), room)
        message = pb.SessionResponse(
            accepted=accepted, placed=placed, prompt_logprobs=reports, first_tokens=first_tokens
        )
        return message, room

    def _take_deltas(self, room: int) -> tuple[pb.SessionResponse, int]:
        """A message with the deltas, and the room that they leave."""
        if not (self.entries or self._backlog) or not room:
            return pb.SessionResponse(), room
        if not self._backlog:
            columns = to_columns(self.entries)
            size_bytes = columns.max_size_bytes
            if self.parsed:
                size_bytes += parsed_bytes(self.parsed)
            if size_bytes <= room:
                message = to_session_response(columns)
                if self.parsed:
                    message.parsed.extend(_to_parsed(self.parsed))
                    self.parsed.clear()
                self.entries.clear()
                return message, room - size_bytes
        self._gather()
        entries, parsed = self._backlog.take(room)
        if not (entries or parsed):
            return pb.SessionResponse(), 0
        columns = to_columns(entries)
        message = to_session_response(columns)
        message.parsed.extend(_to_parsed(parsed))
        # Its upper bound may be above the backlog's count, character by character.
        return message, max(0, room - columns.max_size_bytes - parsed_bytes(parsed))

    def _gather(self) -> None:
        self._backlog.add(self.entries)
        self._backlog.add_parsed(self.parsed)
        self.entries.clear()
        self.parsed.clear()

    def _forget_ended(self) -> None:
        self._ended &= {item.slot for pending in (self._finished, self._failures) for item in pending}

    def _release(self) -> None:
        self._wake()
        # The stream takes them soon; until then there is nothing to do about more.
        self.poll_at = len(self.entries) + self._max_unseen


@dataclass
class _Requests:
    """The requests of one session: ``by_slot`` has those without an end yet, ``runs`` those that may hold something.

    ``account`` pays for their messages. ``none_runs`` is set when the last request in ``runs`` ends. ``num_choices``
    counts the choices of ``by_slot``.
    """

    account: Account
    by_slot: dict[int, _Request] = field(default_factory=dict)
    runs: dict[_Request, SessionRun] = field(default_factory=dict)
    none_runs: asyncio.Event = field(default_factory=asyncio.Event)
    num_choices: int = 0

    def enter(self, slot: int, request: _Request, num_choices: int) -> None:
        """``request`` has begun in ``slot``, and counts as ``num_choices``."""
        self.by_slot[slot] = request
        request.num_choices = num_choices
        self.num_choices += num_choices

    def leave(self, slot: int) -> _Request | None:
        """The request in ``slot`` has ended; ``None``: it had before."""
        request = self.by_slot.pop(slot, None)
        if request is not None:
            self.num_choices -= request.num_choices
        return request


class _Entries(Protocol):
    """Takes the entries of a request's answer."""

    def append(self, entry: Entry, /) -> None:
        """Take one."""
        ...

    def __len__(self) -> int:
        """Entries of all requests that wait to be sent."""
        ...


class _Request:
    """Passes one request's answer to the outbox, until its end is there."""

    # There are thousands, and each is out of the CPU cache when a token comes: without a dictionary they are denser.
    __slots__ = (
        "_entries",
        "_is_over",
        "_num_open",
        "_outbox",
        "_ran",
        "_requests",
        "_size_bytes",
        "_slot",
        "is_cancelled",
        "num_choices",
    )

    def __init__(self, asked: SessionStart, outbox: SessionOutbox, requests: _Requests, size_bytes: int) -> None:
        """It leaves ``requests`` with its end, and tells their account whether it ran; a start of ``size_bytes``."""
        self.is_cancelled = False
        self._ran = False
        self.num_choices = 0
        self._size_bytes = size_bytes
        self._slot = asked.slot
        self._num_open = asked.start.num_choices if asked.resume is None else 1
        self._outbox = outbox
        self._entries: _Entries = outbox.entries
        if asked.relayed is not None and asked.relayed.sent_at_unix_ns:
            self._entries = _FirstEntries(self, outbox, self._num_open)
        self._requests = requests
        self._is_over = False

    def accept(self, accepted: Accepted) -> None:
        """The first of its choices is placed, or it has ended before; then it has no placement."""
        if accepted.choices and not self._ran:
            self._ran = True
            self._requests.account.ran()
        if not self._is_over:
            self._outbox.accept(self._slot, accepted)

    def placed(self, placement: ChoicePlacement) -> None:
        """One more choice is placed."""
        if not self._is_over:
            self._outbox.placed(self._slot, placement)

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Take those of the prompt."""
        if not self._is_over:
            self._outbox.prompt_logprobs(self._slot, logprobs)

    def add(
        self, choice: int, token_offset: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Take more of one choice."""
        if self._is_over:
            return
        entries = self._entries
        entries.append((self._slot, choice, token_offset, token_ids, text, logprobs))
        if len(entries) >= self._outbox.poll_at:
            self._outbox.poll()

    def add_parsed(
        self,
        choice: int,
        token_offset: int,
        token_ids: Sequence[int],
        parsed: Parsed,
        logprobs: Sequence[TokenLogprobs],
    ) -> None:
        """Take more of one choice."""
        if not self._is_over:
            self._outbox.parsed.append((self._slot, choice, parsed))
            self.add(choice, token_offset, token_ids, parsed.text, logprobs)

    def finish(self, finished: ChoiceFinished) -> None:
        """One choice has ended; with the last one, the client's request has."""
        if self._is_over:
            return
        if finished.reason is FinishReason.CANCELLED and self._ran and not finished.usage.num_output_tokens:
            self._ran = False
            self._requests.account.ran_in_vain()
        self._num_open -= 1
        is_last = self._num_open == 0
        if is_last:
            self._leave()
        self._outbox.finish(self._slot, finished, is_last=is_last)

    def end(self, error: BaseException | None = None) -> None:
        """The request no longer runs."""
        self.stop_timing()  # what does it refers to this
        if not self._ran:
            self._requests.account.in_vain(self._size_bytes)
        del self._requests.runs[self]
        if not self._requests.runs:
            self._requests.none_runs.set()
        if not self._is_over:
            assert error is not None, "it ends with its last choice, or badly"
            self._leave()
            self._outbox.fail(self._slot, error)

    def stop_timing(self) -> None:
        """No more first entries of its choices are to be noted."""
        self._entries = self._outbox.entries

    def silence(self) -> None:
        """The client has the request's end, or is gone: drop what still comes."""
        self._is_over = True

    def _leave(self) -> None:
        self._is_over = True
        self._requests.leave(self._slot)


class _FirstEntries:
    """Stands for the outbox's entries until each choice of a traced request has one: later ones cost nothing more."""

    def __init__(self, request: _Request, outbox: SessionOutbox, num_choices: int) -> None:
        self._request = request
        self._outbox = outbox
        self._num_choices = num_choices
        self._begun: set[int] = set()

    def append(self, entry: Entry, /) -> None:
        """Take one; if it is its choice's first, note that."""
        slot, choice = entry[:2]
        if choice not in self._begun:
            self._begun.add(choice)
            self._outbox.first_token(slot, choice)
            if len(self._begun) == self._num_choices:
                self._request.stop_timing()
        self._outbox.entries.append(entry)

    def __len__(self) -> int:
        """As of the outbox's."""
        return len(self._outbox.entries)


def _num_choices(message: pb.SessionStart) -> int:
    """What the start counts as; an impossible number of choices is refused later, with its field."""
    if message.HasField("resume") or not message.start.HasField("num_choices"):
        return 1
    return min(max(message.start.num_choices, 1), MAX_CHOICES)


def _to_parsed(entries: Iterable[ParsedEntry]) -> list[pb.SessionParsed]:
    """One side message for each choice."""
    return [
        to_session_parsed(slot, choice, builder.reasoning, builder.tool_calls)
        for (slot, choice), builder in joined(entries).items()
    ]


def _first(pending: deque[SideT], held: Container[int], room: int) -> tuple[list[SideT], int]:
    """Take what fits into ``room`` and is not of a ``held`` slot; if one item doesn't fit, no room is left."""
    taken: list[SideT] = []
    for _ in range(len(pending)):
        item = pending.popleft()
        size_bytes = item.ByteSize() + ENTRY_BYTES
        if item.slot in held:
            pending.append(item)
        elif size_bytes > room:
            pending.append(item)
            room = 0
        else:
            taken.append(item)
            room -= size_bytes
    return taken, room
