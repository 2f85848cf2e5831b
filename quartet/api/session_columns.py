"""Deltas on their way into a session's messages; for a slow reader merged by choice and counted by request. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, NamedTuple, TypeAlias

from quartet.engine.sampling import TokenLogprobs
from quartet.streams.outbox import TOKEN_BYTES, payload_bytes

#: Slot, choice, token offset, token ids, text, log probabilities. A tuple, because each token makes one, and columns
#: can be made of many tuples without running a line of Python for each.
Entry: TypeAlias = tuple[int, int, int, Sequence[int], str, Sequence[TokenLogprobs]]

# Upper bounds of serialized sizes.
_ENTRY_BYTES = 40  # one entry's part of the columns without tokens and text, and the frame of its log probabilities
_CHARACTER_BYTES = 4


class Columns(NamedTuple):
    """Entries as a message holds them, field by field. A tuple: one is made for each message."""

    slots: Sequence[int]
    choices: Sequence[int]
    offsets: Sequence[int]
    num_tokens: Sequence[int]
    token_ids: Sequence[int]
    texts: Sequence[str]
    logprobs: Sequence[Sequence[TokenLogprobs]]

    @property
    def max_size_bytes(self) -> int:
        """Upper bound of their size in a message."""
        size_bytes = _ENTRY_BYTES * len(self.slots) + TOKEN_BYTES * len(self.token_ids)
        if self.texts:
            size_bytes += _CHARACTER_BYTES * sum(map(len, self.texts))
        if self.logprobs:
            size_bytes += sum(payload_bytes((), logprobs) for logprobs in self.logprobs)
        return size_bytes


def to_columns(entries: Sequence[Entry]) -> Columns:
    """The columns of ``entries``, which are not empty."""
    columns: Any = zip(*entries, strict=True)
    slots, choices, offsets, token_ids, texts, logprobs = columns
    return Columns(
        slots=slots,
        choices=choices,
        offsets=offsets,
        num_tokens=list(map(len, token_ids)),
        token_ids=list(chain.from_iterable(token_ids)),
        texts=texts if any(texts) else (),
        logprobs=logprobs if any(logprobs) else (),
    )


@dataclass(slots=True)
class _PendingChoice:
    offset: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class _PendingRequest:
    num_tokens: int = 0
    size_bytes: int = 0
    choices: dict[int, _PendingChoice] = field(default_factory=dict)


class SessionBacklog:
    """Waiting entries by request, in the order in which the requests began to wait."""

    def __init__(self) -> None:
        """Nothing waits."""
        self._requests: dict[int, _PendingRequest] = {}

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._requests)

    def __contains__(self, slot: object) -> bool:
        """Whether anything of the request in ``slot`` waits."""
        return slot in self._requests

    def add(self, entries: Iterable[Entry]) -> None:
        """Put ``entries`` behind the waiting ones of the same choices."""
        for slot, choice, offset, token_ids, text, logprobs in entries:
            request = self._requests.get(slot)
            if request is None:
                request = self._requests[slot] = _PendingRequest()
            pending = request.choices.get(choice)
            if pending is None:
                pending = request.choices[choice] = _PendingChoice(offset)
            pending.token_ids.extend(token_ids)
            if text:
                pending.texts.append(text)
            pending.logprobs.extend(logprobs)
            request.num_tokens += len(token_ids)
            request.size_bytes += _entry_bytes(token_ids, text, logprobs)

    def beyond(self, max_tokens: int, max_bytes: int) -> list[int]:
        """Slots of the requests with more tokens or bytes waiting than that."""
        requests = self._requests.items()
        return [slot for slot, it in requests if it.num_tokens > max_tokens or it.size_bytes > max_bytes]

    def drop(self, slot: int) -> None:
        """Forget what waits of the request in ``slot``, if anything does."""
        self._requests.pop(slot, None)

    def take(self, room_bytes: int) -> list[Entry]:
        """The first entries, one a choice, that fit into ``room_bytes``; the last one may be a part of an entry."""
        taken: list[Entry] = []
        while self._requests and room_bytes > _ENTRY_BYTES:
            slot, request = next(iter(self._requests.items()))
            choice, pending = next(iter(request.choices.items()))
            entry: Entry = (slot, choice, pending.offset, pending.token_ids, "".join(pending.texts), pending.logprobs)
            room_bytes -= _ENTRY_BYTES
            if _entry_bytes(*entry[3:]) <= room_bytes:
                del request.choices[choice]
            else:
                entry, request.choices[choice] = _split(entry, room_bytes)
                if not any(entry[3:]):
                    break
            taken.append(entry)
            room_bytes -= self._count_out(slot, request, entry)
        return taken

    def _count_out(self, slot: int, request: _PendingRequest, entry: Entry) -> int:
        size_bytes = _entry_bytes(*entry[3:])
        request.num_tokens -= len(entry[3])
        request.size_bytes -= size_bytes
        if not request.choices:
            del self._requests[slot]
        return size_bytes


def _split(entry: Entry, room_bytes: int) -> tuple[Entry, _PendingChoice]:
    """The part that fits into ``room_bytes``, tokens before text (which need not match them), and the rest."""
    slot, choice, offset, token_ids, text, logprobs = entry
    num_tokens = 0
    for token_id, logprob in zip_longest(token_ids, logprobs):  # either may have been left out
        size_bytes = _entry_bytes(() if token_id is None else (token_id,), "", () if logprob is None else (logprob,))
        if size_bytes > room_bytes:
            break
        room_bytes -= size_bytes
        num_tokens += 1
    is_text_next = num_tokens == max(len(token_ids), len(logprobs))
    shown = text.encode()[:room_bytes].decode(errors="ignore") if is_text_next else ""
    part = (slot, choice, offset, token_ids[:num_tokens], shown, logprobs[:num_tokens])
    rest = _PendingChoice(offset + num_tokens, list(token_ids[num_tokens:]), [], list(logprobs[num_tokens:]))
    if len(shown) < len(text):
        rest.texts.append(text[len(shown) :])
    return part, rest


def _entry_bytes(token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]) -> int:
    size_bytes = TOKEN_BYTES * len(token_ids)
    if text:
        size_bytes += len(text) if text.isascii() else len(text.encode())
    if logprobs:
        size_bytes += payload_bytes((), logprobs)
    return size_bytes
