"""Messages for the fuzzer: likely ones, wild ones, broken ones and huge ones, drawn from the protobuf descriptors.

Everything comes from one ``random.Random``, so a seed gives the same bytes again. Hypothesis would shrink what it
finds, but is made for hundreds of examples, not for a million.
"""

from __future__ import annotations

import base64
import math
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

T = TypeVar("T")

#: Of all bodies, those with a field that is there very often or is very long.
HUGE_SHARE = 0.02

_DURATION = "google.protobuf.Duration"
_MAX_DEPTH = 8

_WILD_TEXTS = (
    "", "\0", "a\0b", " ", "\n" * 50, "\u202e", "\ufeff", "\ufffd", "e\u0301" * 40, "\U0001f469\u200d\U0001f680" * 30,
    "../../etc/passwd", "/", "//", ".", "..", "%00%s%n", "${x}", "{{ 7 * 7 }}", "{% for %}", "'", '"', "\\", "None",
    "-1", "1e309", "x" * 127, "x" * 128, "x" * 129, "x" * 255, "x" * 5_000, "\u00e4" * 3_000, "<|image|>" * 20,
    "<|endoftext|>", "[" * 500, "(a+)+$", "a{1,99999}", '{"type":"object"', "127.0.0.1:1", "localhost:0", "[::]:x",
    "unix:/x", "dns:///x", "tcp://127.0.0.1:1", "http://169.254.169.254/", "file:///etc/passwd", "data:,", "data:x",
    "data:image/png;base64,iVBORw0KGgo=", "data:image/png;base64,*", "http://[::1", "http://a@b:c/", "*", "quartet.v1",
)  # fmt: skip
_PLAIN_TEXTS = ("", "a", "hello", "Once upon a time", "fuzz")
_WILD_FLOATS = (
    0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-45, 1e-300, 1e38, -1e38, 1e300, math.inf, -math.inf, math.nan, 100.0, -0.0001,
)  # fmt: skip
_INT_BOUNDS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SFIXED32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_SINT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_SFIXED64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
}
_FLOATS = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)
_LENGTH_DELIMITED = 2
# Of a huge message, without the rest of it.
_HUGE_BYTES = (10_000, 100_000, 900_000, 1_000_000, 4_000_000, 16_000_000)

# The begin of a long `data:` URL and what follows it over and over: base64, with blanks, escaped, and what is neither.
_LONG_URLS = (
    (b"data:image/png;base64,", b"AAAA"), (b"data:;base64,", b"A "), (b"data:;base64,", b"%41"), (b"data:,", b"%41"),
    (b"data:,", b"a"), (b"data:", b";a"), (b"data:;base64,", b"\xc3\xa4"), (b"file:///", b"%41"), (b"http://a/", b"a"),
)  # fmt: skip

# A picture of one pixel, which headers and decoders take.
_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c63f8cfc0f01f00050001ff5688"
    "98b20000000049454e44ae426082"
)


_DATA_URL = f"data:image/png;base64,{base64.b64encode(_PNG).decode()}"
_URLS = ("http://127.0.0.1:1/a.png", "data:image/png;base64,iVBORw0KGgo=", "file:///etc/passwd", _DATA_URL)
_LONGER_URLS = (
    "data:," + "%41" * 20_000, "data:image/png;base64," + "A A\n" * 20_000, _DATA_URL + "A" * 100_000,
)  # fmt: skip


@dataclass
class Known:
    """What the fuzzed processes know too: a message that names it gets past the first check.

    Attributes:
        model: name of the model.
        fingerprint: of the model.
        worker_ids, epochs, addresses: of the workers.
        tickets: id, secret and epoch of hand-offs, each of some worker.
        signed: signed starts as RouterService.Place gave them: start, key id, MAC.
    """

    model: str = "mock"
    fingerprint: str = ""
    worker_ids: list[str] = field(default_factory=lambda: ["decode-0"])
    epochs: list[int] = field(default_factory=lambda: [1])
    addresses: list[str] = field(default_factory=lambda: ["127.0.0.1:1"])
    tickets: list[tuple[bytes, bytes, int]] = field(default_factory=list)
    signed: list[tuple[bytes, str, bytes]] = field(default_factory=list)


class MessageMaker:
    """Draws messages. ``known`` may change meanwhile; the same seed still draws the same choices."""

    def __init__(self, draw: random.Random, known: Known, *, huge_share: float = HUGE_SHARE) -> None:
        self._draw = draw
        self._huge_share = huge_share
        self._hints = _make_hints(draw, known)

    def body(self, descriptor: Descriptor) -> bytes:
        """The bytes of one input of this type: most parse, some don't."""
        kind = self._draw.random()
        if kind < self._huge_share and _growing_fields(descriptor):
            return self._huge(descriptor)
        if kind < 0.72:
            return self.message(descriptor).SerializeToString()
        if kind < 0.76:
            return self._draw.randbytes(self._draw.choice((0, 1, 2, 7, 40, 300, 5_000)))
        return self.broken(self.message(descriptor).SerializeToString())

    def message(self, descriptor: Descriptor, *, oneof: str | None = None) -> Message:
        """A message that parses. ``oneof``: the field that is set of its first oneof."""
        wildness = self._draw.choice((0.0, 0.0, 0.01, 0.05, 0.3, 1.0))
        density = self._draw.choice((0.05, 0.2, 0.5, 0.9))
        return self._fill(descriptor, wildness, density, 0, oneof)

    def broken(self, data: bytes) -> bytes:
        """``data`` cut off, with bytes changed, inserted or repeated, or with a length that lies."""
        draw, whole = self._draw, bytearray(data)
        if not whole:
            return draw.randbytes(3)
        for _ in range(draw.choice((1, 1, 2, 5))):
            at = draw.randrange(len(whole) + 1)
            match draw.randrange(6):
                case 0:
                    del whole[at:]
                case 1 if at < len(whole):
                    whole[at] ^= 1 << draw.randrange(8)
                case 2:
                    whole[at:at] = draw.randbytes(draw.randrange(1, 9))
                case 3:
                    whole += whole[at:][:1000]
                case 4:
                    whole[at:at] = b"\xff" * 9 + b"\x01"
                case _:
                    whole[at:at] = _tag(draw.randrange(1, 20), draw.randrange(8))
        return bytes(whole)

    def _fill(
        self, descriptor: Descriptor, wildness: float, density: float, depth: int, oneof: str | None = None
    ) -> Message:
        message = GetMessageClass(descriptor)()
        if descriptor.full_name == _DURATION:
            self._fill_duration(message, wildness)
            return message
        skipped: set[str] = set()
        for number, group in enumerate(descriptor.oneofs):
            names = [item.name for item in group.fields]
            is_optional = len(names) == 1
            chosen = oneof if oneof is not None and number == 0 else self._draw.choice(names)
            skipped.update(name for name in names if name != chosen)
            if not is_optional and self._draw.random() > wildness / 2:
                self._set(message, descriptor.fields_by_name[chosen], wildness, density, depth)
                skipped.add(chosen)
        for item in descriptor.fields:
            if item.name in skipped or depth > _MAX_DEPTH:
                continue
            if self._draw.random() < (0.95 if item.name in _WANTED else density):
                self._set(message, item, wildness, density, depth)
        return message

    def _set(self, message: Message, item: FieldDescriptor, wildness: float, density: float, depth: int) -> None:
        target: Any = message
        if item.message_type is not None and item.message_type.GetOptions().map_entry:
            self._set_map(getattr(target, item.name), item.message_type, wildness)
        elif item.is_repeated:
            count = self._count(wildness)
            if item.message_type is not None:
                filled = [self._fill(item.message_type, wildness, density, depth + 1) for _ in range(min(count, 30))]
            else:
                filled = [self._value(item, wildness) for _ in range(count)]
            getattr(target, item.name).extend(filled)
        elif item.message_type is not None:
            getattr(target, item.name).CopyFrom(self._fill(item.message_type, wildness, density, depth + 1))
            getattr(target, item.name).SetInParent()
        else:
            setattr(target, item.name, self._value(item, wildness))

    def _set_map(self, values: Any, entry: Descriptor, wildness: float) -> None:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for _ in range(min(self._count(wildness), 300)):
            values[self._value(key, wildness)] = self._value(value, wildness)

    def _count(self, wildness: float) -> int:
        if self._draw.random() < wildness / 5:
            return self._draw.choice((0, 17, 100, 1_000, 5_000))
        return self._draw.choice((0, 1, 1, 1, 2, 3))

    def _value(self, item: FieldDescriptor, wildness: float) -> Any:
        if self._draw.random() >= wildness and (hint := self._hints.get(item.name)) is not None:
            value = hint()
            if _fits(item, value):
                return value
        return self._wild(item) if self._draw.random() < wildness else self._plain(item)

    def _wild(self, item: FieldDescriptor) -> Any:
        draw = self._draw
        if item.type in _INT_BOUNDS:
            low, high = _INT_BOUNDS[item.type]
            value = draw.choice((low, high, low + 1, high - 1, 0, 1, 2**16, 2**31 - 1, draw.randint(low, high)))
            return min(max(value, low), high)
        if item.type in _FLOATS:
            return draw.choice(_WILD_FLOATS)
        if item.type == FieldDescriptor.TYPE_BOOL:
            return draw.random() < 0.5
        if item.enum_type is not None:
            return draw.choice([*[value.number for value in item.enum_type.values], 99, -1, 2**31 - 1])
        if item.type == FieldDescriptor.TYPE_BYTES:
            return draw.randbytes(draw.choice((0, 1, 3, 15, 16, 17, 32, 64, 1000)))
        return draw.choice(_WILD_TEXTS)

    def _plain(self, item: FieldDescriptor) -> Any:
        draw = self._draw
        if item.type in _INT_BOUNDS:
            return draw.randrange(4)
        if item.type in _FLOATS:
            return draw.choice((0.0, 0.5, 0.9, 1.0))
        if item.type == FieldDescriptor.TYPE_BOOL:
            return draw.random() < 0.3
        if item.enum_type is not None:
            return draw.choice(item.enum_type.values).number
        if item.type == FieldDescriptor.TYPE_BYTES:
            return draw.randbytes(16)
        return draw.choice(_PLAIN_TEXTS)

    def _fill_duration(self, message: Any, wildness: float) -> None:
        if self._draw.random() < wildness:
            message.seconds = self._draw.choice((-1, 2**63 - 1, -(2**63), 315_576_000_001, 0, 10**9))
            message.nanos = self._draw.choice((-1, 2**31 - 1, -(2**31), 999_999_999, 10**9))
        else:
            message.seconds, message.nanos = self._draw.choice((0, 1, 3)), self._draw.choice((1_000_000, 500_000_000))

    def _huge(self, descriptor: Descriptor) -> bytes:
        """A likely message with one field, somewhere in it, that is there very often or is very long."""
        *path, last = self._draw.choice(_growing_fields(descriptor))
        top = (path or [last])[0]
        oneof = top.name if top.containing_oneof is not None else None
        base = self._fill(descriptor, 0.0, 0.2, 0, oneof)
        data = self._repeat(last, self._draw.choice(_HUGE_BYTES))
        for item in reversed(path):
            data = _field(item.number, data)
        # Behind a message a field of it adds to what it has.
        return base.SerializeToString() + data

    def _repeat(self, item: FieldDescriptor, size: int) -> bytes:
        if item.name == "url":
            begin, again = self._draw.choice(_LONG_URLS)
            return _field(item.number, begin + again * (size // len(again)))
        if item.type in _TEXTS and (not item.is_repeated or self._draw.random() < 0.5):
            again = self._draw.choice((b"a ", b"\0", b"<|image|>", b"x", b"0123456789"))
            return _field(item.number, again * (size // len(again)))
        if item.message_type is not None or item.type in _TEXTS:
            inner = b"" if self._draw.random() < 0.5 else self._draw.choice((b"\x08\x01", b"\x0a\x01a", b"\x0a\x00"))
            one = _field(item.number, inner)
        elif item.type in _FLOATS or item.type in (FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_FIXED32):
            return _field(item.number, self._draw.randbytes(size // 8 * 8))
        else:
            return _field(item.number, bytes([self._draw.randrange(128)]) * size)
        return one * (size // len(one))


_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
# Without these nothing else of a message is looked at.
_WANTED = frozenset({
    "start", "generation", "prompt_token_ids", "hand_off_id", "secret", "worker_epoch", "worker_id", "epoch", "address",
    "payload", "ticket", "signed_start", "key_id", "mac", "layout", "time_to_live", "num_tokens", "items", "file",
    "data", "kind", "target", "events", "sequence_hashes", "tier", "ids", "max_tokens",
})  # fmt: skip


def _make_hints(draw: random.Random, known: Known) -> Mapping[str, Callable[[], Any]]:
    def of(*values: Any) -> Callable[[], Any]:
        return lambda: draw.choice(values)

    def any_of(values: Callable[[], Sequence[T]], default: T) -> Callable[[], T]:
        # Drawn before it is looked up: what is known must not change what is drawn next.
        def pick() -> T:
            at, found = draw.random(), values()
            return found[int(at * len(found))] if found else default

        return pick

    def ticket(part: int, default: Any) -> Callable[[], Any]:
        return any_of(lambda: [item[part] for item in known.tickets[-4:]], default)

    def signed(part: int, default: Any) -> Callable[[], Any]:
        return any_of(lambda: [item[part] for item in known.signed[-4:]], default)

    def token_ids() -> bytes:
        count = draw.choice((1, 1, 5, 40, 200))
        return struct.pack(f"<{count}I", *(draw.randrange(200) for _ in range(count)))

    no_id = bytes(16)
    return {
        "model": lambda: known.model,
        "name": of("", "mock", "tiny"),
        "model_fingerprint": any_of(lambda: [known.fingerprint, ""], ""),
        "worker_id": any_of(lambda: known.worker_ids, ""),
        "epoch": any_of(lambda: known.epochs, 1),
        "worker_epoch": ticket(2, 1),
        "hand_off_id": ticket(0, no_id),
        "secret": ticket(1, no_id),
        "signed_start": signed(0, b""),
        "key_id": signed(1, ""),
        "mac": signed(2, b""),
        "address": any_of(lambda: known.addresses, "127.0.0.1:1"),
        "prompt_token_ids": token_ids,
        "generated_token_ids": lambda: b"" if draw.random() < 0.7 else token_ids(),
        "ids": lambda: draw.randrange(200),
        "max_tokens": of(1, 1, 2, 8, 40),
        "min_tokens": of(0, 0, 1),
        "num_choices": of(1, 1, 1, 2, 4),
        "logprobs": of(0, 1, 5),
        "num_prompt_logprobs": of(0, 1, 5),
        "slot": of(0, 0, 1, 1, 2, 3),
        "attempt": of(0, 1),
        "data_parallel_rank": of(0),
        "tenant": of("", "a", "b"),
        "priority": of(0, 0, 1, 2**31 - 1),
        "adapter": of(""),
        "cache_salt": of("", "salt"),
        "role": of("user", "system", "assistant"),
        "target": of(1, 2, 3),
        "kind": of(1, 2),
        "data": lambda: draw.choice((_PNG, _PNG[: draw.randrange(len(_PNG))], b"", token_ids())),
        "embeddings": lambda: draw.choice((_PNG, b"", b"\x10\0\0\0\0\0\0\0{}")),
        "url": lambda: draw.choice(_LONGER_URLS if draw.random() < 0.02 else _URLS),
        "temperature": of(0.0, 0.7, 1.0),
        "top_p": of(1.0, 0.9),
        "min_p": of(0.0, 0.1),
        "repetition_penalty": of(1.0, 1.1),
        "way": of(1, 2),
        "ways": of(1, 2),
        "pieces": of(0, 0, 1, 2, 5),
        "request_id": of("", "", "0123456789abcdef0123456789abcdef"),
        "service": of("", "quartet.v1.RouterService", "quartet.v1.DecodeService", "nobody"),
        "file_containing_symbol": of("quartet.v1.RouterService", "quartet.v1.Delta", "nobody"),
        "file_by_filename": of("quartet/v1/types.proto", "nobody"),
        "tier": of(1, 2, 3),
        "engine": of("trtllm", "mock"),
    }


@cache
def _growing_fields(descriptor: Descriptor, depth: int = 0) -> list[list[FieldDescriptor]]:
    """The way to every field in the message, and in those in it, that has no size of its own."""
    found = []
    for item in descriptor.fields:
        if item.is_repeated or item.type in _TEXTS:
            found.append([item])
        if item.message_type is not None and depth < _MAX_DEPTH:
            found += [[item, *path] for path in _growing_fields(item.message_type, depth + 1)]
    return found


def _fits(item: FieldDescriptor, value: Any) -> bool:
    if item.type == FieldDescriptor.TYPE_STRING:
        return isinstance(value, str)
    if item.type == FieldDescriptor.TYPE_BYTES:
        return isinstance(value, bytes)
    if item.type in _FLOATS:
        return isinstance(value, float)
    if item.type in _INT_BOUNDS:
        low, high = _INT_BOUNDS[item.type]
        return isinstance(value, int) and low <= value <= high
    return item.enum_type is not None and isinstance(value, int)


def _field(number: int, data: bytes) -> bytes:
    return _tag(number, _LENGTH_DELIMITED) + _varint(len(data)) + data


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    data.append(value)
    return bytes(data)
