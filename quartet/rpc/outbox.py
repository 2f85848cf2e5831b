"""What a worker owes one inner stream: pending outputs by slot, merged until the stream takes them.

The engine never waits for a stream. Whatever gathers while a message is being written goes into the next one, so
a slow stream gets fewer, larger messages, and memory stays bounded by the answers themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from quartet.engine.base import Finished, Prefilled, Started
from quartet.engine.sampling import TokenLogprobs
from quartet.errors import RequestCancelledError, ServingError
from quartet.kvcache.layout import HandOff
from quartet.rpc import convert
from quartet.rpc.errors import to_failure
from quartet.rpc.inner import MAX_INNER_MESSAGE_BYTES
from quartet.v1 import decode_pb2, prefill_pb2

ResponseT_co = TypeVar("ResponseT_co", bound=Message, covariant=True)
EndT = TypeVar("EndT", decode_pb2.SlotStarted, decode_pb2.SlotFinished, decode_pb2.SlotFailure)

# Upper bounds of serialized sizes; a varint of 32 bits has at most 5 bytes.
_ROOM_BYTES = MAX_INNER_MESSAGE_BYTES - 64  # less tags and lengths of the four packed columns
_ENTRY_BYTES = 4  # tag and length of an entry of a repeated message, up to 2 MiB
_SLOT_BYTES = 32  # one slot's part of the columns, and the frame of its log probabilities
_TOKEN_BYTES = 5
_LOGPROB_BYTES = 24  # of one token, and 9 more for each alternative
_ALTERNATIVE_BYTES = 9


class Outbox(Protocol[ResponseT_co]):
    """Pending outputs of one stream."""

    ready: asyncio.Event

    def owes(self, slot: int) -> bool:
        """Whether the terminal output of ``slot`` is here, not taken yet."""
        ...

    def failed(self, slot: int, error: ServingError) -> None:
        """Give ``slot`` its terminal failure."""
        ...

    def recall(self, slot: int) -> None:
        """The caller cancelled ``slot``, whose end waits here: take back what it would have to let go of again."""
        ...

    def take(self) -> ResponseT_co | None:
        """The next message, at most 1 MiB; ``None`` and ``ready`` cleared when nothing is pending.

        Asking for the next one says that the one before was written.
        """
        ...

    def close(self) -> None:
        """The stream is gone: let go of everything that was not written."""
        ...


@dataclass(slots=True)
class _Pending:
    offset: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


class DecodeOutbox:
    """Pending columns and side messages of a Decode stream."""

    def __init__(self) -> None:
        """Start with nothing pending."""
        self.ready = asyncio.Event()
        self._tokens: dict[int, _Pending] = {}
        self._tokens_size_bytes = 0
        self._started: dict[int, decode_pb2.SlotStarted] = {}
        self._finished: dict[int, decode_pb2.SlotFinished] = {}
        self._failures: dict[int, decode_pb2.SlotFailure] = {}

    def owes(self, slot: int) -> bool:
        """Whether the terminal output of ``slot`` is here, not taken yet."""
        return slot in self._finished or slot in self._failures

    def tokens(self, slot: int, offset: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Add tokens of ``slot``, the first of which is its output token number ``offset``.

        ``logprobs`` is empty or has one entry a token, the same each time.
        """
        pending = self._tokens.get(slot)
        if pending is None:
            self._tokens[slot] = _Pending(offset, list(token_ids), list(logprobs))
            self._tokens_size_bytes += _SLOT_BYTES
        else:
            pending.token_ids.extend(token_ids)
            pending.logprobs.extend(logprobs)
        self._tokens_size_bytes += _size_bytes(token_ids, logprobs) if logprobs else _TOKEN_BYTES * len(token_ids)
        self.ready.set()

    def started(self, slot: int, started: Started) -> None:
        """Tell that ``slot`` joined the running batch."""
        self._started[slot] = convert.to_slot_started(slot, started)
        self.ready.set()

    def finished(self, slot: int, finished: Finished) -> None:
        """Give ``slot`` its good end, behind the tokens that are pending for it."""
        self._finished[slot] = decode_pb2.SlotFinished(
            slot=slot,
            reason=convert.to_finish_reason(finished.reason),
            num_output_tokens=finished.num_output_tokens,
        )
        self.ready.set()

    def failed(self, slot: int, error: ServingError) -> None:
        """Give ``slot`` its bad end; tokens pending for it still go out before."""
        self._failures[slot] = decode_pb2.SlotFailure(slot=slot, failure=to_failure(error))
        self.ready.set()

    def recall(self, slot: int) -> None:
        """Nothing: what a decode ended with holds nothing."""

    def take(self) -> decode_pb2.DecodeResponse | None:
        """The next message: starts, then tokens up to the size limit, then ends of slots with nothing left."""
        if not (self._tokens or self._started or self._finished or self._failures):
            self.ready.clear()
            return None
        message = decode_pb2.DecodeResponse()
        started, room = _first(self._started, (), _ROOM_BYTES)
        message.started.extend(started)
        if self._started:
            return message  # an end must not overtake a start
        room = self._take_tokens(message, room)
        finished, room = _first(self._finished, self._tokens, room)
        message.finished.extend(finished)
        failures, room = _first(self._failures, self._tokens, room)
        message.failures.extend(failures)
        return message

    def close(self) -> None:
        """The stream is gone: forget everything."""
        for pending in (self._tokens, self._started, self._finished, self._failures):
            pending.clear()
        self._tokens_size_bytes = 0

    def _take_tokens(self, message: decode_pb2.DecodeResponse, room: int) -> int:
        if self._tokens_size_bytes <= room:
            room -= self._tokens_size_bytes
            _add_columns(message, self._tokens)
            self._tokens = {}
            self._tokens_size_bytes = 0
            return room
        parts: dict[int, _Pending] = {}
        for slot, pending in self._tokens.items():
            part = _split(pending, room - _SLOT_BYTES)
            if not part.token_ids:
                break
            parts[slot] = part
            room -= _SLOT_BYTES + _size_bytes(part.token_ids, part.logprobs)
        for slot, part in parts.items():
            self._tokens_size_bytes -= _size_bytes(part.token_ids, part.logprobs)
            if not self._tokens[slot].token_ids:
                del self._tokens[slot]
                self._tokens_size_bytes -= _SLOT_BYTES
        _add_columns(message, parts)
        return room


class PrefillOutbox:
    """Pending outputs of a Prefill stream."""

    def __init__(self, withdraw: Callable[[int], None]) -> None:
        """Start with nothing pending; ``withdraw`` ends the hand-off of an engine id that nobody was told of."""
        self.ready = asyncio.Event()
        self._withdraw = withdraw
        self._outputs: dict[int, prefill_pb2.PrefillOutput] = {}
        self._holders: dict[int, int] = {}
        self._being_written: list[int] = []

    def owes(self, slot: int) -> bool:
        """Whether the output of ``slot`` is here, not taken yet."""
        return slot in self._outputs

    def prefilled(self, slot: int, prefilled: Prefilled, hand_off: HandOff | None) -> None:
        """Give ``slot`` its good end."""
        result = convert.to_prefill_result(prefilled, hand_off)
        self._outputs[slot] = prefill_pb2.PrefillOutput(slot=slot, result=result)
        if hand_off is not None:
            self._holders[slot] = prefilled.id
        self.ready.set()

    def failed(self, slot: int, error: ServingError) -> None:
        """Give ``slot`` its bad end."""
        self._outputs[slot] = prefill_pb2.PrefillOutput(slot=slot, failure=to_failure(error))
        self.ready.set()

    def recall(self, slot: int) -> None:
        """Drop the hand-off of ``slot`` if it was not sent yet; the slot fails then."""
        holder = self._holders.pop(slot, None)
        if holder is not None:
            self._withdraw(holder)
            self.failed(slot, RequestCancelledError("cancelled by the caller"))

    def take(self) -> prefill_pb2.PrefillResponse | None:
        """The next message."""
        self._being_written = []
        if not self._outputs:
            self.ready.clear()
            return None
        message = prefill_pb2.PrefillResponse()
        room = _ROOM_BYTES
        for slot, output in list(self._outputs.items()):
            # One that is too long by itself was refused when it was offered.
            room -= output.ByteSize() + _ENTRY_BYTES
            if message.outputs and room < 0:
                break
            message.outputs.append(self._outputs.pop(slot))
            if slot in self._holders:
                self._being_written.append(self._holders.pop(slot))
        return message

    def close(self) -> None:
        """The stream is gone: end the hand-offs that nobody was told of."""
        for holder in (*self._being_written, *self._holders.values()):
            self._withdraw(holder)
        self._being_written = []
        self._holders.clear()
        self._outputs.clear()


def _size_bytes(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> int:
    """At most so much do these add to a message."""
    size_bytes = _TOKEN_BYTES * len(token_ids)
    for entry in logprobs:
        size_bytes += _LOGPROB_BYTES + _ALTERNATIVE_BYTES * len(entry.top_token_ids)
    return size_bytes


def _split(pending: _Pending, room: int) -> _Pending:
    """Take as many of the first tokens off ``pending`` as fit into ``room`` bytes."""
    num_tokens = max(0, room) // _TOKEN_BYTES
    if pending.logprobs:
        num_tokens = 0
        for entry in pending.logprobs:
            room -= _size_bytes((entry.token_id,), (entry,))
            if room < 0:
                break
            num_tokens += 1
    part = _Pending(pending.offset, pending.token_ids[:num_tokens], pending.logprobs[:num_tokens])
    pending.token_ids = pending.token_ids[num_tokens:]
    pending.logprobs = pending.logprobs[num_tokens:]
    pending.offset += len(part.token_ids)
    return part


def _add_columns(message: decode_pb2.DecodeResponse, tokens: dict[int, _Pending]) -> None:
    parts = tokens.values()
    message.slots.extend(tokens)
    message.num_tokens.extend([len(part.token_ids) for part in parts])
    message.token_offsets.extend([part.offset for part in parts])
    message.token_ids.extend(list(chain.from_iterable([part.token_ids for part in parts])))
    for slot, part in tokens.items():
        if part.logprobs:
            message.logprobs.append(convert.to_slot_logprobs(slot, part.logprobs))


def _first(entries: dict[int, EndT], blocked: Container[int], room: int) -> tuple[list[EndT], int]:
    """Take entries of slots not in ``blocked`` that fit into ``room`` bytes; those, and the room left."""
    taken: list[EndT] = []
    for slot, entry in list(entries.items()):
        size_bytes = entry.ByteSize() + _ENTRY_BYTES
        if size_bytes > room:
            break
        if slot not in blocked:
            taken.append(entries.pop(slot))
            room -= size_bytes
    return taken, room
