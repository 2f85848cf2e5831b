"""What a worker owes one inner stream: pending outputs by slot, merged until the stream takes them.

The engine never waits for a stream. Whatever gathers while a message is being written goes into the next one, so
a slow stream gets fewer, larger messages, and memory stays bounded by the answers themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from quartet.engine.base import Finished, Prefilled, Started
from quartet.engine.sampling import TokenLogprobs
from quartet.errors import ServingError
from quartet.kvcache.layout import HandOff
from quartet.rpc import convert
from quartet.rpc.errors import to_failure
from quartet.v1 import decode_pb2, prefill_pb2

# Token ids of one message: at 5 bytes each, plus columns, well under 1 MiB. Log probabilities weigh more.
_MAX_MESSAGE_WEIGHT = 100_000
_LOGPROB_WEIGHT = 3  # of one (token, log probability) pair, in token ids

ResponseT_co = TypeVar("ResponseT_co", bound=Message, covariant=True)


class Outbox(Protocol[ResponseT_co]):
    """Pending outputs of one stream."""

    ready: asyncio.Event

    def failed(self, slot: int, error: ServingError) -> None:
        """Give ``slot`` its terminal failure."""
        ...

    def take(self) -> ResponseT_co | None:
        """The next message, at most 1 MiB; ``None`` and ``ready`` cleared when nothing is pending."""
        ...


@dataclass
class _Pending:
    offset: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class DecodeOutbox:
    """Pending columns and side messages of a Decode stream."""

    def __init__(self) -> None:
        """Start with nothing pending."""
        self.ready = asyncio.Event()
        self._tokens: dict[int, _Pending] = {}
        self._started: list[decode_pb2.SlotStarted] = []
        self._finished: dict[int, decode_pb2.SlotFinished] = {}
        self._failures: dict[int, decode_pb2.SlotFailure] = {}

    def tokens(self, slot: int, offset: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Add tokens of ``slot``, the first of which is its output token number ``offset``."""
        pending = self._tokens.get(slot)
        if pending is None:
            pending = self._tokens[slot] = _Pending(offset)
        pending.token_ids.extend(token_ids)
        pending.logprobs.extend(logprobs)
        self.ready.set()

    def started(self, slot: int, started: Started) -> None:
        """Tell that ``slot`` joined the running batch."""
        self._started.append(convert.to_slot_started(slot, started))
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

    def take(self) -> decode_pb2.DecodeResponse | None:
        """The next message: whole slots' tokens up to the size limit, ends only of slots with no tokens left."""
        if not (self._tokens or self._started or self._finished or self._failures):
            self.ready.clear()
            return None
        message = decode_pb2.DecodeResponse(started=self._started)
        self._started = []
        self._take_tokens(message)
        for ends, target in ((self._finished, message.finished), (self._failures, message.failures)):
            for slot in [slot for slot in ends if slot not in self._tokens]:
                target.append(ends.pop(slot))  # type: ignore[attr-defined]
        return message

    def _take_tokens(self, message: decode_pb2.DecodeResponse) -> None:
        slots: list[int] = []
        num_tokens: list[int] = []
        offsets: list[int] = []
        token_ids: list[int] = []
        weight = 0
        for slot, pending in self._tokens.items():
            room = _room(pending, _MAX_MESSAGE_WEIGHT - weight)
            if room <= 0:
                break
            part = _split(pending, room)
            slots.append(slot)
            num_tokens.append(len(part.token_ids))
            offsets.append(part.offset)
            token_ids.extend(part.token_ids)
            if part.logprobs:
                message.logprobs.append(convert.to_slot_logprobs(slot, part.logprobs))
            weight += _weight(part)
        for slot in slots:
            if not self._tokens[slot].token_ids:
                del self._tokens[slot]
        message.slots.extend(slots)
        message.num_tokens.extend(num_tokens)
        message.token_offsets.extend(offsets)
        message.token_ids.extend(token_ids)


class PrefillOutbox:
    """Pending outputs of a Prefill stream."""

    _MAX_OUTPUTS = 256

    def __init__(self) -> None:
        """Start with nothing pending."""
        self.ready = asyncio.Event()
        self._outputs: dict[int, prefill_pb2.PrefillOutput] = {}
        self._holders: dict[int, int] = {}

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

    def take(self) -> prefill_pb2.PrefillResponse | None:
        """The next message."""
        if not self._outputs:
            self.ready.clear()
            return None
        message = prefill_pb2.PrefillResponse()
        size_bytes = 0
        for slot in list(self._outputs)[: self._MAX_OUTPUTS]:
            # An opaque hand-off may be long; one that is too long by itself was refused when it was offered.
            size_bytes += self._outputs[slot].ByteSize()
            if message.outputs and size_bytes > _MAX_MESSAGE_WEIGHT * 5:
                break
            message.outputs.append(self._outputs.pop(slot))
            self._holders.pop(slot, None)
        return message

    def unsent_holders(self) -> list[int]:
        """Engine ids whose hand-off nobody has been told of; they must be let go when the stream is lost."""
        return list(self._holders.values())


def _weight(pending: _Pending) -> int:
    num_pairs = sum(1 + len(entry.top_token_ids) for entry in pending.logprobs)
    return 4 + len(pending.token_ids) + _LOGPROB_WEIGHT * num_pairs


def _room(pending: _Pending, weight: int) -> int:
    """How many of the tokens pending fit into ``weight``."""
    num_tokens = len(pending.token_ids)
    return min(num_tokens, weight * num_tokens // _weight(pending)) if num_tokens else 0


def _split(pending: _Pending, num_tokens: int) -> _Pending:
    """Take the first ``num_tokens`` tokens off ``pending``."""
    part = _Pending(pending.offset, pending.token_ids[:num_tokens], pending.logprobs[:num_tokens])
    pending.token_ids = pending.token_ids[num_tokens:]
    pending.logprobs = pending.logprobs[num_tokens:]
    pending.offset += num_tokens
    return part
