"""What one message may hold, checked before it is parsed: to parse and convert it costs time by the field.

A message of 12 MB can hold six million empty fields, and each becomes objects in memory. Bytes are cheap: a picture of
60 MB is one field. So fields are counted, and the bytes of text apart from those of files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from quartet.errors import MessageTooLargeError, ProtocolError

#: Bytes of the longest text that a message may hold, whatever the model: to parse it takes 10 ms.
MAX_TEXT_BYTES = 16 << 20

#: Bytes of a message that is short enough to be parsed unseen, in less than 3 ms whatever it holds: protobuf takes some
#: 11 ns for a field of 2 bytes, and the walk here 300.
UNCHECKED_BYTES = 256 << 10

#: Bytes of the longest message to the standard services (health, reflection, channelz): they take a name or a number.
MAX_STANDARD_BYTES = 4 << 10

#: Bytes of packed numbers that a message may hold, whatever the model: 1,048,576 token ids, whatever their values. To
#: parse it takes 15 ms.
MAX_NUMBER_BYTES = 5 << 20

# Of a field: its tag and its length, or its number. Most have two or three.
_FRAME_BYTES = 16

# A refused message keeps so many bytes, which say which slot of a stream it is for.
_HEAD_BYTES = 32

# The kinds of fields on the wire, and the bytes after their tag. A group is a begin, its fields, and an end.
_VARINT, _FIXED64, _LENGTH, _GROUP, _END_GROUP, _FIXED32 = range(6)
_NUM_BYTES = {_FIXED64: 8, _FIXED32: 4, _GROUP: 0, _END_GROUP: 0}
_MAX_VARINT_BYTES = 10


@dataclass(frozen=True, kw_only=True)
class MaxBytes:
    """Bytes that a message may hold of each kind.

    Attributes:
        text: of all text, apart from files.
        numbers: of packed numbers.
        has_files: it may hold files, which are bounded by what gRPC takes only.
    """

    text: int = MAX_TEXT_BYTES
    numbers: int = MAX_NUMBER_BYTES
    has_files: bool = True


@dataclass(frozen=True)
class MessageLimits:
    """Bounds of each message that a server is sent.

    Attributes:
        max_fields: fields in it, those of the messages within included.
        max_bytes: gives the bytes of each kind. It is asked for long messages only.
        file_fields: full names of fields with text that may be as long as a file; ``bytes`` fields always may, but for
            ``number_fields``.
        number_fields: full names of ``bytes`` fields that hold packed numbers.
    """

    max_fields: int = 32_768
    max_bytes: Callable[[], MaxBytes] = MaxBytes
    file_fields: frozenset[str] = frozenset()
    number_fields: frozenset[str] = frozenset()

    def check(self, message_type: Descriptor, message: bytes) -> None:
        """Refuse ``message`` before it is parsed.

        Raises:
            MessageTooLargeError: it holds too much; its ``head`` has the message's first bytes.
            ProtocolError: it is malformed.
        """
        most = self.max_bytes()
        max_bytes = most.text + most.numbers + self.max_fields * _FRAME_BYTES
        if not most.has_files and len(message) > max_bytes:  # what can't be a file takes no time
            what = f"{len(message)} bytes, more than the {max_bytes} allowed where no model takes files"
            raise MessageTooLargeError(f"the message has {what}", head=message[:_HEAD_BYTES])
        try:
            num_text_bytes, num_number_bytes = self._measure(
                _shape(message_type, self.file_fields, self.number_fields), message
            )
        except LookupError:
            raise ProtocolError("the message is malformed") from None
        for what, num_bytes, limit in (
            ("numbers, such as token ids", num_number_bytes, most.numbers),
            ("text", num_text_bytes, most.text),
        ):
            if num_bytes > limit:
                text = f"the message has {num_bytes} bytes of {what}, more than the {limit} allowed"
                raise MessageTooLargeError(text, head=message[:_HEAD_BYTES])

    def _measure(self, shape: _Shape, message: bytes) -> tuple[int, int]:
        """The bytes of text, and of numbers. Raises ``LookupError`` where the message is malformed."""
        num_left, num_bytes = self.max_fields, [0, 0, 0]
        open_messages = [(0, len(message), shape)]
        while open_messages:
            position, end, shape = open_messages.pop()
            while position < end:
                num_left -= 1
                if num_left < 0:
                    text = f"the message has more than {self.max_fields} fields"
                    raise MessageTooLargeError(text, head=message[:_HEAD_BYTES])
                # Nearly all tags and lengths have one byte: a call for each would double the time.
                tag, position = message[position], position + 1
                if tag > 127:
                    tag, position = _varint(message, position - 1)
                if tag & 7 != _LENGTH:
                    position = _skip(tag & 7, message, position)
                    continue
                size, position = message[position], position + 1
                if size > 127:
                    size, position = _varint(message, position - 1)
                if size > end - position:
                    raise IndexError
                inner = shape.get(tag >> 3, _TEXT)
                if isinstance(inner, int):
                    num_bytes[inner] += size
                    position += size
                else:
                    open_messages.append((position + size, end, shape))
                    end, shape = position + size, inner
        return num_bytes[_TEXT], num_bytes[_NUMBERS]


# By field number, the fields of a message within, or what its bytes are. Unknown fields count as text.
_Shape: TypeAlias = "Mapping[int, _Shape | int]"
_TEXT, _NUMBERS, _FILE = range(3)


def limited_parser(deserialize: Callable[[bytes], Any] | None, limits: MessageLimits) -> Callable[[bytes], Any] | None:
    """``deserialize``, the ``FromString`` of a message type, for messages within ``limits`` only.

    Others raise as ``MessageLimits.check`` does. What is no such function is returned as it is.
    """
    message_type: Descriptor | None = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)
    if deserialize is None or message_type is None:
        return deserialize

    def parse(message: bytes) -> Any:
        if len(message) > UNCHECKED_BYTES:
            began = time.thread_time()
            try:
                limits.check(message_type, message)
            except (MessageTooLargeError, ProtocolError) as error:
                error.size_bytes, error.measure_s = len(message), time.thread_time() - began
                raise
        return deserialize(message)

    return parse


def _skip(kind: int, message: bytes, position: int) -> int:
    """The position after a field of one number. Raises ``LookupError`` where it is malformed."""
    if kind == _VARINT:
        return _varint(message, position)[1]
    return position + _NUM_BYTES[kind]


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """The number at ``position``, and the position after it. Raises ``LookupError`` where it is malformed."""
    byte = message[position]
    if byte < 128:
        return byte, position + 1
    value, shift = byte & 127, 7
    for index in range(position + 1, position + _MAX_VARINT_BYTES):
        byte = message[index]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, index + 1
        shift += 7
    raise IndexError


@lru_cache(maxsize=256)
def _shape(message_type: Descriptor, file_fields: frozenset[str], number_fields: frozenset[str]) -> _Shape:
    shapes: dict[str, dict[int, Any]] = {}

    def fill(descriptor: Descriptor) -> dict[int, Any]:
        if descriptor.full_name not in shapes:
            shape = shapes[descriptor.full_name] = {}
            for item in descriptor.fields:
                if item.message_type is not None:
                    shape[item.number] = fill(item.message_type)
                elif item.full_name in number_fields:
                    shape[item.number] = _NUMBERS
                elif item.type == FieldDescriptor.TYPE_BYTES or item.full_name in file_fields:
                    shape[item.number] = _FILE
                elif item.type != FieldDescriptor.TYPE_STRING:
                    shape[item.number] = _NUMBERS  # packed
        return shapes[descriptor.full_name]

    return fill(message_type)
