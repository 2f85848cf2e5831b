"""A client's end of a session: many requests on one stream with a router, each with its own answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TypeAlias

import grpc

from quartet.api.answer import AnswerSink
from quartet.api.convert.answer import (
    from_accepted,
    from_choice_finished,
    from_choice_placement,
    from_session_parsed,
    to_session_start,
)
from quartet.api.convert.request import to_generate_start
from quartet.api.request import Accepted, ChoiceFinished, ChoicePlacement, GenerateStart, Relayed, Resume
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.errors import ProtocolError, RouterUnavailableError, ServingError, StalledStreamError
from quartet.rpc.errors import from_failure
from quartet.streams.convert.messages import from_prompt_logprobs, from_token_logprobs
from quartet.streams.messages import split_tokens
from quartet.streams.slots import SlotCall, SlotClient
from quartet.text.parsed import Parsed
from quartet.v1 import router_pb2, router_pb2_grpc, types_pb2

_Add: TypeAlias = Callable[[int, int, Sequence[int], str, Sequence[TokenLogprobs]], None]

_AddParsed: TypeAlias = Callable[[int, int, Sequence[int], Parsed, Sequence[TokenLogprobs]], None]


class SessionCall:
    """One request of a session; its ``answer`` collects what comes for it.

    Attributes:
        first_sent_at_unix_ns: by choice, when the router gave out its first entry; empty: it has none, or does not say.
    """

    def __init__(self, send_cancel: Callable[[SlotCall], None], num_choices: int, answer: AnswerSink) -> None:
        """``send_cancel`` asks the router to end the request; it is given this."""
        self.is_over = False
        self.first_sent_at_unix_ns: dict[int, int] = {}
        self._send_cancel = send_cancel
        self._num_unfinished = num_choices
        self._answer = answer
        #: Takes more of one choice, as the fields of ``Delta``. Raises ``StalledStreamError``: too much is unread.
        self.add: _Add = answer.add
        self.add_parsed: _AddParsed = answer.add_parsed

    def cancel(self) -> None:
        """Ask the router to end it; what the router still sends goes to the answer. Harmless after its end."""
        if not self.is_over:
            self._send_cancel(self)

    def drop(self, error: ServingError) -> None:
        """End it here at once, and at the router soon."""
        self.cancel()
        self.fail(error)

    def fail(self, error: ServingError) -> None:
        """Fail it, unless it has ended."""
        if not self.is_over:
            self._end()
            self._answer.end(error)

    def accept(self, accepted: Accepted) -> None:
        """The first of its choices is placed."""
        if not self.is_over:
            self._answer.accept(accepted)

    def placed(self, placement: ChoicePlacement) -> None:
        """One more choice is placed."""
        if not self.is_over:
            self._answer.placed(placement)

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Those of its prompt have come."""
        if not self.is_over:
            self._answer.add_prompt_logprobs(logprobs)

    def finish(self, finished: ChoiceFinished) -> bool:
        """One choice has ended; returns whether it was the last. Raises ``ProtocolError`` if all had ended before."""
        if not self._num_unfinished:
            raise ProtocolError("a choice ended twice")
        self._num_unfinished -= 1
        if not self.is_over:
            self._answer.finish(finished)
            if not self._num_unfinished:
                self._end()
                self._answer.end()
        return not self._num_unfinished

    def _end(self) -> None:
        self.is_over = True
        self.add = _ignore
        self.add_parsed = _ignore_parsed


class SessionClient(SlotClient[router_pb2.SessionRequest, router_pb2.SessionResponse, SessionCall]):
    """The session with one router: it opens at the first request, and again at the next one after a break.

    It never waits for a reader: what comes for a slowly read request collects in its answer.
    """

    def __init__(
        self,
        address: str,
        stub: router_pb2_grpc.RouterServiceAsyncStub,
        to_error: Callable[[grpc.aio.AioRpcError], ServingError],
        *,
        lost_error: type[RouterUnavailableError] = RouterUnavailableError,
    ) -> None:
        """``to_error`` turns a broken stream's status into the error of its requests.

        ``lost_error`` is what they fail with if the stream ends without a status that says more.
        """
        super().__init__(f"the router at {address}", router_pb2.SessionResponse, _nothing, lost_error=lost_error)
        self._stub = stub
        self._to_error = to_error

    def start(
        self,
        start: router_pb2.GenerateStart,
        answer: AnswerSink,
        traceparent: str = "",
        resume: router_pb2.Resume | None = None,
    ) -> SessionCall:
        """Start a request, or resume one choice of it. Never waits or raises: errors come out of ``answer``."""
        num_choices = start.num_choices if start.HasField("num_choices") and resume is None else 1
        return self._begin(
            lambda send_cancel: SessionCall(send_cancel, num_choices, answer),
            lambda slot: [
                router_pb2.SessionRequest(
                    start=router_pb2.SessionStart(slot=slot, start=start, traceparent=traceparent, resume=resume)
                )
            ],
        )

    def relay(
        self, start: GenerateStart, answer: AnswerSink, *, resume: Resume | None, traceparent: str, relayed: Relayed
    ) -> SessionCall:
        """As ``start``, for a router over several pools.

        Raises:
            InvalidRequestError: what the message can't hold; ``field`` is its path.
        """
        message = to_generate_start(start)
        return self._begin(
            lambda send_cancel: SessionCall(send_cancel, start.num_choices if resume is None else 1, answer),
            lambda slot: [
                router_pb2.SessionRequest(start=to_session_start(slot, message, resume, traceparent, relayed))
            ],
        )

    def _open(self) -> grpc.aio.StreamStreamCall[router_pb2.SessionRequest, router_pb2.SessionResponse]:
        return self._stub.Session()

    def _stream_error(self, rpc_error: grpc.aio.AioRpcError) -> ServingError:
        return self._to_error(rpc_error)

    def _cancel_message(self, slot: int) -> router_pb2.SessionRequest:
        return router_pb2.SessionRequest(cancel=types_pb2.Cancel(slot=slot))

    def _receive(self, response: router_pb2.SessionResponse) -> None:
        for opened in response.accepted:
            self._call(opened.slot).accept(from_accepted(opened.accepted))
        for later in response.placed:
            self._call(later.slot).placed(from_choice_placement(later.placement))
        for report in response.prompt_logprobs:
            self._call(report.slot).add_prompt_logprobs(from_prompt_logprobs(report.prompt_logprobs))
        for first in response.first_tokens:
            self._call(first.slot).first_sent_at_unix_ns[first.choice] = first.sent_at_unix_ns
        self._receive_deltas(response)
        if response.parsed:
            self._receive_parsed(response)
        for ended in response.finished:
            if self._call(ended.slot).finish(from_choice_finished(ended.finished)):
                self._end(ended.slot)
        for failed in response.failures:
            self._end(failed.slot).fail(from_failure(failed.failure))

    def _receive_deltas(self, response: router_pb2.SessionResponse) -> None:
        # Slices: to read a repeated field element by element costs as much as the rest of the loop.
        slots = response.slots[:]
        choices = response.choices[:] or repeat(0, len(slots))
        texts = response.texts[:] or repeat("", len(slots))
        parts = split_tokens(response.token_ids[:], response.num_tokens[:])
        logprobs = _LogprobsColumn(response.logprobs) if response.logprobs else None
        calls = self._calls()
        for slot, choice, token_ids, offset, text in zip(
            slots, choices, parts, response.token_offsets[:], texts, strict=True
        ):
            entry_logprobs = logprobs.take(slot, choice) if logprobs else ()
            try:
                calls[slot].add(choice, offset, token_ids, text, entry_logprobs)
            except StalledStreamError as error:
                calls[slot].drop(error)
        if logprobs:
            raise ValueError("log probabilities of nothing")

    def _receive_parsed(self, response: router_pb2.SessionResponse) -> None:
        for message in response.parsed:
            call = self._call(message.slot)
            try:
                # Its tokens came in the columns.
                call.add_parsed(message.choice, 0, (), from_session_parsed(message), ())
            except StalledStreamError as error:
                call.drop(error)


class _LogprobsColumn:
    """One entry for each entry of the columns that has log probabilities, in their order."""

    def __init__(self, entries: Sequence[router_pb2.SessionLogprobs]) -> None:
        self._entries = deque(entries)

    def __len__(self) -> int:
        """Entries that are left."""
        return len(self._entries)

    def take(self, slot: int, choice: int) -> Sequence[TokenLogprobs]:
        """The log probabilities of the next entry of the columns."""
        first = self._entries[0]
        if (first.slot, first.choice) != (slot, choice):
            return ()
        self._entries.popleft()
        return tuple(map(from_token_logprobs, first.tokens))


def _ignore(
    _choice: int, _token_offset: int, _token_ids: Sequence[int], _text: str, _logprobs: Sequence[TokenLogprobs]
) -> None:
    """Drop the deltas: the request has ended."""


def _ignore_parsed(
    _choice: int, _token_offset: int, _token_ids: Sequence[int], _parsed: Parsed, _logprobs: Sequence[TokenLogprobs]
) -> None:
    """The same of reasoning and tool calls."""


def _nothing(_error: ServingError) -> None:
    """Do nothing when the stream breaks: its calls have failed already."""
