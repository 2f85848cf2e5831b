"""Deltas on their way into a session's messages; for a slow reader merged by choice and counted by request. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, NamedTuple, TypeAlias

from quartet.engine.sampling import TokenLogprobs
from quartet.streams.outbox import TOKEN_BYTES, payload_bytes
from quartet.text.parsed import Parsed, ParsedBuilder, ToolCallDelta

#: Slot, choice, and reasoning and tool calls of it; its text is in an entry.
ParsedEntry: TypeAlias = tuple[int, int, Parsed]

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
    """The columns of ``entries``."""
    if not entries:
        return _NO_COLUMNS
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


_NO_COLUMNS = Columns((), (), (), (), (), (), ())


def joined(entries: Iterable[ParsedEntry]) -> Mapping[tuple[int, int], ParsedBuilder]:
    """Those of each slot and choice together."""
    builders: dict[tuple[int, int], ParsedBuilder] = {}
    for slot, choice, parsed in entries:
        builder = builders.get((slot, choice))
        if builder is None:
            builder = builders[slot, choice] = ParsedBuilder()
        builder.add(parsed.reasoning, parsed.tool_calls)
    return builders


def parsed_bytes(entries: Iterable[ParsedEntry]) -> int:
    """Upper bound of their size in a message."""
    return sum([_parsed_bytes(parsed) for _, _, parsed in entries])


@dataclass(slots=True)
class _PendingChoice:
    offset: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    parsed: list[Parsed] = field(default_factory=list)

    @property
    def has_columns(self) -> bool:
        """Whether anything but reasoning and tool calls waits."""
        return bool(self.token_ids or self.texts or self.logprobs)


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

    def add_parsed(self, entries: Iterable[ParsedEntry]) -> None:
        """Put ``entries``, whose own entries were added, behind the waiting ones of the same choices."""
        for slot, choice, parsed in entries:
            request = self._requests[slot]
            request.choices[choice].parsed.append(parsed)
            request.size_bytes += _parsed_bytes(parsed)

    def beyond(self, max_tokens: int, max_bytes: int) -> list[int]:
        """Slots of the requests with more tokens or bytes waiting than that."""
        requests = self._requests.items()
        return [slot for slot, it in requests if it.num_tokens > max_tokens or it.size_bytes > max_bytes]

    def drop(self, slot: int) -> None:
        """Forget what waits of the request in ``slot``, if anything does."""
        self._requests.pop(slot, None)

    def take(self, room_bytes: int) -> tuple[list[Entry], list[ParsedEntry]]:
        """The first entries, one a choice, that fit into ``room_bytes``; the last one may be a part of an entry."""
        taken: list[Entry] = []
        parsed: list[ParsedEntry] = []
        while self._requests and room_bytes > _ENTRY_BYTES:
            slot, request = next(iter(self._requests.items()))
            choice, pending = next(iter(request.choices.items()))
            entry: Entry = (slot, choice, pending.offset, pending.token_ids, "".join(pending.texts), pending.logprobs)
            room_bytes -= _ENTRY_BYTES
            if _entry_bytes(*entry[3:]) > room_bytes:
                entry, rest = _split(entry, room_bytes)
                rest.parsed = pending.parsed
                request.choices[choice] = rest
                if not any(entry[3:]):
                    break
                taken.append(entry)
                room_bytes -= self._count_out(request, entry)
                continue
            if pending.has_columns or not pending.parsed:
                taken.append(entry)
                room_bytes -= self._count_out(request, entry)
            shown, left = _split_parsed(pending.parsed, room_bytes)
            if left and not (shown or taken or parsed):
                shown, left = left[:1], left[1:]  # a call whose name alone is too long: it must go on
            parsed += [(slot, choice, part) for part in shown]
            room_bytes -= sum(map(_parsed_bytes, shown))
            request.size_bytes -= sum(map(_parsed_bytes, pending.parsed)) - sum(map(_parsed_bytes, left))
            if left:
                request.choices[choice] = _PendingChoice(pending.offset + len(pending.token_ids), parsed=left)
                break
            del request.choices[choice]
            if not request.choices:
                del self._requests[slot]
        return taken, parsed

    def _count_out(self, request: _PendingRequest, entry: Entry) -> int:
        size_bytes = _entry_bytes(*entry[3:])
        request.num_tokens -= len(entry[3])
        request.size_bytes -= size_bytes
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


def _split_parsed(waiting: Sequence[Parsed], room_bytes: int) -> tuple[list[Parsed], list[Parsed]]:
    """What fits into ``room_bytes``, and the rest."""
    for number, parsed in enumerate(waiting):
        num_bytes = _parsed_bytes(parsed)
        if num_bytes > room_bytes:
            shown, left = _split_one(parsed, room_bytes - _ENTRY_BYTES)
            taken = [*waiting[:number], shown] if shown.reasoning or shown.tool_calls else list(waiting[:number])
            return taken, [left, *waiting[number + 1 :]]
        room_bytes -= num_bytes
    return list(waiting), []


def _split_one(parsed: Parsed, room_bytes: int) -> tuple[Parsed, Parsed]:
    reasoning = _first_bytes(parsed.reasoning, room_bytes)
    if len(reasoning) < len(parsed.reasoning):
        return Parsed("", reasoning), Parsed("", parsed.reasoning[len(reasoning) :], parsed.tool_calls)
    room_bytes -= _text_bytes(reasoning)
    shown: list[ToolCallDelta] = []
    for number, call in enumerate(parsed.tool_calls):
        num_bytes = _call_bytes(call)
        if num_bytes > room_bytes:
            room_bytes -= num_bytes - _text_bytes(call.arguments)
            arguments = _first_bytes(call.arguments, room_bytes)
            rest = [call]
            if arguments:
                shown.append(ToolCallDelta(call.index, call.id, call.name, arguments))
                rest = [ToolCallDelta(call.index, "", "", call.arguments[len(arguments) :], call.is_complete)]
            return Parsed("", reasoning, shown), Parsed("", "", (*rest, *parsed.tool_calls[number + 1 :]))
        shown.append(call)
        room_bytes -= num_bytes
    return Parsed("", reasoning, shown), Parsed()


def _first_bytes(text: str, room_bytes: int) -> str:
    return text.encode()[: max(room_bytes, 0)].decode(errors="ignore")


def _parsed_bytes(parsed: Parsed) -> int:
    return _ENTRY_BYTES + _text_bytes(parsed.reasoning) + sum([_call_bytes(call) for call in parsed.tool_calls])


def _call_bytes(call: ToolCallDelta) -> int:
    return _ENTRY_BYTES + _text_bytes(call.id) + _text_bytes(call.name) + _text_bytes(call.arguments)


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _entry_bytes(token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]) -> int:
    size_bytes = TOKEN_BYTES * len(token_ids)
    if text:
        size_bytes += _text_bytes(text)
    if logprobs:
        size_bytes += payload_bytes((), logprobs)
    return size_bytes
