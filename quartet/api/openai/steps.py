"""Long JSON, read in steps of a few milliseconds, so that it does not hold up an event loop.

Python's parser takes 2 ns for a byte of text, but 200 ns for each number, list or object, and nothing interrupts it. So
long JSON is gone through in steps: strings and lists of token ids are taken out piece by piece, what else it holds is
counted, and only the short rest goes through the parser at once.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Generator, Sequence
from typing import Any, NoReturn

from quartet.errors import MessageTooLargeError

#: Bytes that one step goes through, in three milliseconds at most; a string without escapes is copied in one step.
STEP_BYTES = 64 << 10
# Longer strings of a long body, and lists of token ids, are taken out of it.
_LONG_STRING_BYTES, _LONG_LIST_BYTES = 512, 4096
# More than a list of as many ids as any prompt has; and spaces before it.
_MAX_LIST_BYTES, _MAX_SPACE = 16 << 20, 256
# Of what is left of a long body: numbers, lists and objects, as many as fields of a gRPC message; and bytes. To parse
# the most of both takes 10 ms.
MAX_VALUES, _MAX_REST_BYTES = 32_768, 3 << 20

# A part of a string: no escape is cut in two, also none of two halves of a surrogate pair.
_STRING_PART = re.compile(
    rb'(?:[^"\\]++|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    rb"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})*+"
)
_NUMBER_LIST = re.compile(rb"\s*:\s*\[")
_NOT_NUMBERS = b"0123456789, \t\r\n"


def take_apart(body: bytes) -> Generator[None, None, tuple[bytes, list[str | array[int]]]]:
    """Take the long strings and lists of token ids out of ``body``, in steps of a few milliseconds at most.

    Returns:
        The rest, with ``NaN`` in the place of each, and what was taken out, in order.

    Raises:
        ValueError: it is no JSON.
        MessageTooLargeError: the rest holds more than ``MAX_VALUES`` values, or is too long.
    """
    kept: list[bytes] = []
    taken: list[str | array[int]] = []
    copied = position = stepped = num_values = 0
    while True:
        quote = body.find(b'"', position)
        end = len(body) if quote < 0 else quote
        if end - position > _LONG_LIST_BYTES and (bounds := _number_list(body, position, end)) is not None:
            taken.append((yield from _read_ids(body, *bounds)))
            kept += [body[copied : bounds[0] - 1], b"NaN"]
            copied = position = stepped = bounds[1] + 1
            continue
        # In steps, so that a bomb ends at the first of them.
        for start in range(position, end, STEP_BYTES):
            num_values += _count(body, start, min(start + STEP_BYTES, end))
            if num_values > MAX_VALUES:
                raise MessageTooLargeError(f"the body has more than {MAX_VALUES} values")
            if end - start > STEP_BYTES:
                yield
        if quote < 0:
            kept.append(body[copied:])
            if sum(map(len, kept)) > _MAX_REST_BYTES:
                raise MessageTooLargeError(f"the body has more than {_MAX_REST_BYTES} bytes beside its long texts")
            return b"".join(kept), taken
        part = _STRING_PART.match(body, quote + 1, min(quote + 1 + _LONG_STRING_BYTES, len(body)))
        position = quote + 1 if part is None else part.end()
        if body[position : position + 1] == b'"':  # a short one, which stays
            position += 1
        else:
            text, position = yield from _read_string(body, quote + 1)
            taken.append(text)
            kept += [body[copied:quote], b"NaN"]
            copied = position
        if position - stepped > STEP_BYTES // 4:
            stepped = position
            yield


def _read_string(body: bytes, position: int) -> Generator[None, None, tuple[str, int]]:
    """The string whose first character is at ``position``, and the position after its closing quote."""
    end = body.find(b'"', position)
    if end > 0 and body.find(b"\\", position, end) < 0:  # as pictures are: nothing but a copy
        yield
        return str(memoryview(body)[position:end], "utf-8"), end + 1
    pieces = list[str]()
    while True:
        part = _STRING_PART.match(body, position, min(position + STEP_BYTES, len(body)))
        end = position if part is None else part.end()
        is_whole = body[end : end + 1] == b'"'
        if not is_whole:
            for _ in range(3):  # don't cut a character in two
                if end < len(body) and body[end] & 0xC0 == 0x80:
                    end -= 1
        if end == position and not is_whole:
            raise ValueError("a string has no end, or an escape in it is wrong")
        piece = body[position:end]
        pieces.append(json.loads(b'"' + piece + b'"') if b"\\" in piece else piece.decode())
        if is_whole:
            return "".join(pieces), end + 1
        position = end
        yield


def _number_list(body: bytes, position: int, end: int) -> tuple[int, int] | None:
    """Where a list of whole numbers begins and ends that stands at ``position``, behind a name; brackets apart."""
    begin = _NUMBER_LIST.match(body, position, min(position + _MAX_SPACE, end))
    if begin is None:
        return None
    first, last = begin.end(), body.find(b"]", begin.end(), min(begin.end() + _MAX_LIST_BYTES, end))
    is_long = last - first > _LONG_LIST_BYTES and body.find(b"[", first, last) < 0
    # What comes after its beginning is looked at when it is read.
    return (first, last) if is_long and not body[first : first + _MAX_SPACE].translate(None, _NOT_NUMBERS) else None


def _read_ids(body: bytes, position: int, end: int) -> Generator[None, None, array[int]]:
    ids: array[int] = array("I")
    while position < end:
        stop = body.find(b",", min(position + STEP_BYTES, end), end)
        stop = end if stop < 0 else stop
        try:
            ids.extend(json.loads(b"[" + body[position:stop] + b"]"))
        except (OverflowError, TypeError):
            raise ValueError("a long list must hold nothing but unsigned 32-bit numbers") from None
        position = stop + 1
        yield
    return ids


def _count(body: bytes, start: int, end: int) -> int:
    """Values that begin in a part of ``body`` in which there is no string."""
    if body.find(b"N", start, end) >= 0 or body.find(b"I", start, end) >= 0:
        raise ValueError("NaN and Infinity are no JSON")
    return body.count(b",", start, end) + body.count(b"[", start, end) + body.count(b"{", start, end)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


#: Reads short JSON at once; constants that JSON does not have are refused.
SHORT = json.JSONDecoder(parse_constant=_refuse_constant)


def put_together(rest: bytes, taken: Sequence[str | array[int]]) -> Any:
    """The value of a body of which ``take_apart`` has left ``rest``. Raises ``ValueError``: it is no JSON."""
    values = iter(taken)
    return json.JSONDecoder(parse_constant=lambda _name: next(values)).decode(rest.decode())
