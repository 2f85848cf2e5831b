"""What a worker still has to write on one Decode or Prefill stream: outputs by slot, merged until they are taken.

The engine never waits for a stream. Whatever gathers while a message is being written goes into the next one, so
a slow stream gets fewer, larger messages, and memory stays bounded by the answers themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from quartet.engine.base import Finished, Generation, Prefilled, Started
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.errors import RequestCancelledError, ServingError
from quartet.kvcache.layout import HandOff
from quartet.rpc.channels import MAX_STREAM_MESSAGE_BYTES
from quartet.rpc.errors import to_failure
from quartet.streams.convert.messages import (
    to_finish_reason,
    to_prefill_result,
    to_slot_logprobs,
    to_slot_prompt_logprobs,
    to_slot_started,
)
from quartet.v1 import decode_pb2, prefill_pb2

ResponseT_co = TypeVar("ResponseT_co", bound=Message, covariant=True)
EndT = TypeVar(
    "EndT",
    decode_pb2.SlotStarted,
    decode_pb2.SlotPromptLogprobs,
    decode_pb2.SlotFinished,
    decode_pb2.SlotFailure,
)

# Upper bounds of serialized sizes.
#: Bytes of a message without the tags and lengths of its packed columns.
ROOM_BYTES = MAX_STREAM_MESSAGE_BYTES - 64

#: Tag and length of an entry of a repeated message, up to 2 MiB.
ENTRY_BYTES = 4

#: A token id: a varint of 32 bits.
TOKEN_BYTES = 5
_SLOT_BYTES = 32  # one slot's part of the columns, and the frame of its log probabilities
_LOGPROB_BYTES, _ALTERNATIVE_BYTES = 24, 9  # of one token, and of each alternative to it


class Outbox(Protocol[ResponseT_co]):
    """Pending outputs of one stream."""

    ready: asyncio.Event

    @property
    def num_ended(self) -> int:
        """Terminal outputs that are here, not taken yet."""
        ...

    def owes(self, slot: int) -> bool:
        """Whether the terminal output of ``slot`` is here, not taken yet."""
        ...

    def failed(self, slot: int, error: ServingError) -> None:
        """Give ``slot`` its terminal failure."""
        ...

    def recall(self, slot: int) -> None:
        """The caller cancelled ``slot``, whose end waits here: take back a hand-off that it would have to release."""
        ...

    def take(self) -> ResponseT_co | None:
        """The next message, at most 1 MiB; ``None`` and ``ready`` cleared when nothing is pending.

        Asking for the next one says that the one before was written.
        """
        ...

    def close(self) -> None:
        """The stream is gone: release everything that was not written."""
        ...


class DecodeOutbox:
    """Pending columns and side messages of a Decode stream."""

    def __init__(self) -> None:
        """Start with nothing pending."""
        self.ready = asyncio.Event()
        self._step: _Step | None = None  # all tokens that are pending, or
        self._tokens: dict[int, _PendingTokens] = {}  # those of several steps by slot
        self._tokens_size_bytes = 0
        self._started: dict[int, decode_pb2.SlotStarted] = {}
        self._prompt_logprobs: dict[int, decode_pb2.SlotPromptLogprobs] = {}
        self._first_tokens: dict[int, int] = {}
        self._finished: dict[int, decode_pb2.SlotFinished] = {}
        self._failures: dict[int, decode_pb2.SlotFailure] = {}

    @property
    def num_ended(self) -> int:
        """Terminal outputs that are here, not taken yet."""
        return len(self._finished) + len(self._failures)

    def owes(self, slot: int) -> bool:
        """Whether the terminal output of ``slot`` is here, not taken yet."""
        return slot in self._finished or slot in self._failures

    def tokens(self, slot: int, offset: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Add tokens of ``slot`` from its output token number ``offset`` on.

        ``logprobs`` is empty or has one entry a token, the same each time.
        """
        self._spill()
        pending = self._tokens.get(slot)
        if pending is None:
            self._tokens[slot] = _PendingTokens(offset, list(token_ids), list(logprobs))
            self._tokens_size_bytes += _SLOT_BYTES
        else:
            pending.token_ids.extend(token_ids)
            pending.logprobs.extend(logprobs)
        self._tokens_size_bytes += payload_bytes(token_ids, logprobs) if logprobs else TOKEN_BYTES * len(token_ids)
        self.ready.set()

    def step(
        self, slots: Sequence[int], num_tokens: Sequence[int], offsets: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Add a step's tokens without log probabilities, in the columns of the message: no loop over them here."""
        if self._step is None and not self._tokens:
            self._step = _Step(slots, num_tokens, offsets, token_ids)
            self._tokens_size_bytes = _SLOT_BYTES * len(slots) + TOKEN_BYTES * len(token_ids)
            self.ready.set()
            return
        for slot, offset, part in _Step(slots, num_tokens, offsets, token_ids).parts():
            self.tokens(slot, offset, part, ())

    def started(self, slot: int, started: Started, num_prompt_tokens: int = 0) -> None:
        """Say that ``slot`` joined the running batch; ``num_prompt_tokens`` where its prompt is not as it came."""
        self._started[slot] = to_slot_started(slot, started, num_prompt_tokens)
        self.ready.set()

    def prompt_logprobs(self, slot: int, logprobs: PromptLogprobs) -> None:
        """Add those of the prompt of ``slot``, before its first token."""
        self._prompt_logprobs[slot] = to_slot_prompt_logprobs(slot, logprobs)
        self.ready.set()

    def first_token(self, slot: int, sent_at_unix_ns: int) -> None:
        """The first token of ``slot``, a traced request, was added just now."""
        self._first_tokens[slot] = sent_at_unix_ns

    def finished(self, slot: int, finished: Finished) -> None:
        """Give ``slot`` its good end, behind the tokens that are pending for it."""
        self._finished[slot] = decode_pb2.SlotFinished(
            slot=slot,
            reason=to_finish_reason(finished.reason),
            num_output_tokens=finished.num_output_tokens,
        )
        self.ready.set()

    def failed(self, slot: int, error: ServingError) -> None:
        """Give ``slot`` its bad end; tokens pending for it still go out before."""
        self._failures[slot] = decode_pb2.SlotFailure(slot=slot, failure=to_failure(error))
        self.ready.set()

    def recall(self, slot: int) -> None:
        """No-op: the end of a decode holds nothing."""

    def take(self) -> decode_pb2.DecodeResponse | None:
        """The next message: starts, then tokens up to the size limit, then ends of slots with nothing left.

        Log probabilities of prompts come between starts and tokens.
        """
        if not (
            self._step or self._tokens or self._started or self._finished or self._failures or self._prompt_logprobs
        ):
            self.ready.clear()
            return None
        message = decode_pb2.DecodeResponse()
        room = ROOM_BYTES
        # Most messages hold only tokens: what is empty costs no call.
        if self._started:
            started, room = _first(self._started, (), room)
            message.started.extend(started)
            if self._started:
                return message  # an end must not overtake a start
        if self._prompt_logprobs:
            reports, room = _first(self._prompt_logprobs, (), room)
            message.prompt_logprobs.extend(reports)
            if self._prompt_logprobs:
                return message  # nor a token its prompt
        if self._step is not None or self._tokens:
            room = self._take_tokens(message, room)
        if self._first_tokens:
            room = self._take_first_tokens(message, room)
        if self._finished:
            finished, room = _first(self._finished, self._tokens, room)
            message.finished.extend(finished)
        if self._failures:
            failures, room = _first(self._failures, self._tokens, room)
            message.failures.extend(failures)
        return message

    def close(self) -> None:
        """The stream is gone: forget everything."""
        for pending in (self._tokens, self._started, self._prompt_logprobs, self._finished, self._failures):
            pending.clear()
        self._first_tokens.clear()
        self._step = None
        self._tokens_size_bytes = 0

    def _spill(self) -> None:
        """More comes before the step was taken: sort it by slot, to be merged."""
        if self._step is not None:
            step, self._step = self._step, None
            self._tokens = {slot: _PendingTokens(offset, list(part), []) for slot, offset, part in step.parts()}

    def _take_first_tokens(self, message: decode_pb2.DecodeResponse, room: int) -> int:
        """Say when those came whose tokens are on their way; where there is no room, that is left out for good."""
        for slot in [slot for slot in self._first_tokens if slot not in self._tokens]:
            sent_at_unix_ns = self._first_tokens.pop(slot)
            if room >= _SLOT_BYTES:
                message.first_tokens.add(slot=slot, sent_at_unix_ns=sent_at_unix_ns)
                room -= _SLOT_BYTES
        return room

    def _take_tokens(self, message: decode_pb2.DecodeResponse, room: int) -> int:
        if self._tokens_size_bytes <= room:
            room -= self._tokens_size_bytes
            if self._step is not None:
                message.slots.extend(self._step.slots)
                message.num_tokens.extend(self._step.num_tokens)
                message.token_offsets.extend(self._step.offsets)
                message.token_ids.extend(self._step.token_ids)
                self._step = None
            else:
                _add_columns(message, self._tokens)
                self._tokens = {}
            self._tokens_size_bytes = 0
            return room
        self._spill()
        parts: dict[int, _PendingTokens] = {}
        for slot, pending in self._tokens.items():
            part = _split(pending, room - _SLOT_BYTES)
            if not part.token_ids:
                break
            parts[slot] = part
            room -= _SLOT_BYTES + payload_bytes(part.token_ids, part.logprobs)
        for slot, part in parts.items():
            self._tokens_size_bytes -= payload_bytes(part.token_ids, part.logprobs)
            if not self._tokens[slot].token_ids:
                del self._tokens[slot]
                self._tokens_size_bytes -= _SLOT_BYTES
        _add_columns(message, parts)
        return room


class PrefillOutbox:
    """Pending outputs of a Prefill stream."""

    def __init__(self, withdraw: Callable[[int], None]) -> None:
        """Start with nothing pending; ``withdraw`` ends the hand-off of an engine id that was not written."""
        self.ready = asyncio.Event()
        self._withdraw = withdraw
        self._outputs: dict[int, prefill_pb2.PrefillOutput] = {}
        self._holders: dict[int, int] = {}
        self._being_written: list[int] = []

    @property
    def num_ended(self) -> int:
        """Outputs that are here, not taken yet."""
        return len(self._outputs)

    def owes(self, slot: int) -> bool:
        """Whether the output of ``slot`` is here, not taken yet."""
        return slot in self._outputs

    def prefilled(
        self,
        slot: int,
        prefilled: Prefilled,
        hand_off: HandOff | None,
        expanded: Generation | None = None,
        *,
        sent_at_unix_ns: int = 0,
    ) -> None:
        """Give ``slot`` its good end; ``expanded`` has its prompt where that is not as it came.

        ``sent_at_unix_ns`` is now, or 0 if the request is not traced.
        """
        result = to_prefill_result(prefilled, hand_off, expanded, sent_at_unix_ns=sent_at_unix_ns)
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
        room = ROOM_BYTES
        for output in self._outputs.values():
            # One that is too long by itself was refused when it was offered.
            room -= output.ByteSize() + ENTRY_BYTES
            if message.outputs and room < 0:
                break
            message.outputs.append(output)
        for output in message.outputs:
            del self._outputs[output.slot]
            if output.slot in self._holders:
                self._being_written.append(self._holders.pop(output.slot))
        return message

    def close(self) -> None:
        """The stream is gone: end the hand-offs that were not written."""
        for holder in (*self._being_written, *self._holders.values()):
            self._withdraw(holder)
        self._being_written = []
        self._holders.clear()
        self._outputs.clear()


def payload_bytes(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> int:
    """Bytes that these add to a message at most; ``logprobs`` may be empty."""
    size_bytes = TOKEN_BYTES * len(token_ids)
    for entry in logprobs:
        size_bytes += _LOGPROB_BYTES + _ALTERNATIVE_BYTES * len(entry.top_token_ids)
    return size_bytes


@dataclass(slots=True)
class _PendingTokens:
    offset: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class _Step:
    """One engine step's columns; a slot comes once."""

    slots: Sequence[int]
    num_tokens: Sequence[int]
    offsets: Sequence[int]
    token_ids: Sequence[int]

    def parts(self) -> Iterator[tuple[int, int, Sequence[int]]]:
        """Slot, offset and tokens of each."""
        begin = 0
        for slot, num_tokens, offset in zip(self.slots, self.num_tokens, self.offsets, strict=True):
            yield slot, offset, self.token_ids[begin : begin + num_tokens]
            begin += num_tokens


def _split(pending: _PendingTokens, room: int) -> _PendingTokens:
    """Take as many of the first tokens off ``pending`` as fit into ``room`` bytes."""
    num_tokens = max(0, room) // TOKEN_BYTES
    if pending.logprobs:
        num_tokens = 0
        for entry in pending.logprobs:
            room -= payload_bytes((entry.token_id,), (entry,))
            if room < 0:
                break
            num_tokens += 1
    part = _PendingTokens(pending.offset, pending.token_ids[:num_tokens], pending.logprobs[:num_tokens])
    pending.token_ids = pending.token_ids[num_tokens:]
    pending.logprobs = pending.logprobs[num_tokens:]
    pending.offset += len(part.token_ids)
    return part


def _add_columns(message: decode_pb2.DecodeResponse, tokens: dict[int, _PendingTokens]) -> None:
    parts = tokens.values()
    message.slots.extend(tokens)
    message.num_tokens.extend([len(part.token_ids) for part in parts])
    message.token_offsets.extend([part.offset for part in parts])
    message.token_ids.extend(list(chain.from_iterable([part.token_ids for part in parts])))
    for slot, part in tokens.items():
        if part.logprobs:
            message.logprobs.append(to_slot_logprobs(slot, part.logprobs))


def _first(entries: dict[int, EndT], blocked: Container[int], room: int) -> tuple[list[EndT], int]:
    """Take entries of slots not in ``blocked`` that fit into ``room`` bytes; those, and the room left."""
    taken: list[EndT] = []
    for slot, entry in entries.items():
        size_bytes = entry.ByteSize() + ENTRY_BYTES
        if size_bytes > room:
            break
        if slot not in blocked:
            taken.append(entry)
            room -= size_bytes
    for entry in taken:
        del entries[entry.slot]
    return taken, room
