"""Long JSON, read in steps of a few milliseconds, so that it does not hold up an event loop.

Python's parser takes 2 ns for a byte of text, but 200 ns for each number, list or object, and nothing interrupts it. So
long JSON is gone through in steps: strings and lists of token ids are taken out piece by piece, what else it holds is
counted, and only the short rest goes through the parser at once.

What reads in steps yields the work that it has done since the last yield, in the unit of the router's intake, 0.1
microseconds. A step is so much work, not so many bytes: a long string is found and copied in a fiftieth of the time
that as many bytes of short ones take.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Generator, Sequence
from typing import Any, NoReturn

from quartet.errors import MessageTooLargeError

#: A step ends once it has done so much. What comes last in it takes a millisecond more, if it is long; a string without
#: escapes is copied in one step.
STEP_WORK = 16_000
# Of strings with escapes, ids and other values so much is gone through at once.
_PIECE_BYTES = 16 << 10
# What a string takes, and one that is taken out; beyond that, bytes gone through in a unit of work: if they are only
# found and copied, if values are counted, and if escapes or numbers are read.
_STRING_WORK, _LONG_STRING_WORK = 16, 40
_COPIED_OF_WORK, _COUNTED_OF_WORK, _READ_OF_WORK = 100, 32, 3
# Longer strings of a long body, and lists of token ids, are taken out of it.
_LONG_BYTES = 512
# More than a list of as many ids as any prompt has.
_MAX_LIST_BYTES = 16 << 20
# Of what is left of a long body: numbers, lists and objects, as many as fields of a gRPC message; and bytes. To parse
# the most of both takes 10 ms.
MAX_VALUES, _MAX_REST_BYTES = 32_768, 3 << 20
# Fields with token ids, which do not count as values.
_ID_FIELDS = ("prompt", "tokens")

# A part of a string: no escape is cut in two, also none of two halves of a surrogate pair.
_STRING_PART = re.compile(
    rb'(?:[^"\\]++|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    rb"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})*+"
)
_IN_ID_LISTS = b"0123456789, \t\r\n"
# What a long list of ids begins with; the rest of it is looked at when it is read.
_LONG_LIST = re.compile(rb"\[[0-9, \t\r\n]{%d}" % _LONG_BYTES)
_SPACE = re.compile(rb"[ \t\r\n]*+")
# Half of a surrogate pair without the other, or, where backslashes are escaped, something that looks like it.
# Both begin alike, so that the search is for that: 1 ns for a byte in place of 25.
_MAYBE_LONE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[c-fC-F](?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]))"
)
# A number with more digits is no finite float, and Python takes their square to read a whole one: 90 us for 4,300.
_MAX_DIGITS = 400


def take_apart(body: bytes) -> Generator[int, None, tuple[bytes, list[str | array[int]]]]:
    """Take the long strings and lists of token ids out of ``body``, in steps of three milliseconds at most.

    Returns:
        The rest, with ``NaN`` in the place of each, and what was taken out, in order. Long names of fields stay.

    Raises:
        ValueError: it is no JSON.
        MessageTooLargeError: the rest holds more than ``MAX_VALUES`` values, or is too long.
    """
    return _Body(body).take_apart()


class Work:
    """Work since the last step ended, in 0.1 microseconds."""

    def __init__(self) -> None:
        self.done = 0

    def spend(self, work: int) -> Generator[int, None, None]:
        """Count ``work`` that was done, and end the step if that is enough."""
        self.done += work
        if self.done >= STEP_WORK:
            yield self.end_step()

    def end_step(self) -> int:
        """What to yield at the end of a step."""
        done, self.done = self.done, 0
        return done


class _Body:
    """A body, and how far it was gone through."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._position = 0
        self._kept: list[bytes] = []
        self._num_copied = 0  # bytes that are in `kept`, or were taken out
        self._taken: list[str | array[int]] = []
        self._num_values = 0
        self._work = Work()

    def take_apart(self) -> Generator[int, None, tuple[bytes, list[str | array[int]]]]:
        body, work = self._body, self._work
        while True:
            quote = body.find(b'"', self._position)
            end = len(body) if quote < 0 else quote
            if end - self._position > _LONG_BYTES:
                yield from self._pass_values(end)
            else:
                self._count(end)
            if quote < 0:
                self._kept.append(body[self._num_copied :])
                if sum(map(len, self._kept)) > _MAX_REST_BYTES:
                    why = f"the body has more than {_MAX_REST_BYTES} bytes beside its long texts and lists of token ids"
                    raise MessageTooLargeError(why)
                return b"".join(self._kept), self._taken
            after = self._end_of_short_string(quote + 1)
            if after:
                work.done += _STRING_WORK + (after - quote) // _COUNTED_OF_WORK
                self._position = after
            else:
                yield from self._pass_long_string(quote)
            if work.done >= STEP_WORK:
                yield work.end_step()

    def _pass_values(self, end: int) -> Generator[int, None, None]:
        """Go on to ``end``, before which there is no string, and take out long lists of ids."""
        body = self._body
        while self._position < end:
            before, stop = self._position, min(self._position + _PIECE_BYTES, end)
            found = _LONG_LIST.search(body, before, min(stop + _LONG_BYTES, end))
            if found is None:
                self._count(stop)
            else:
                first = found.start() + 1
                self._count(first)
                last = body.find(b"]", first, min(first + _MAX_LIST_BYTES, end))
                ids = None if last < 0 else (yield from self._read_ids(first, last))
                if ids is not None:
                    self._take(first - 1, last + 1, ids)
                else:  # of other values, which are read with the rest
                    yield from self._pass_plainly(end if last < 0 else last)
            # Ids were paid for as they were read; the few that look like some once more.
            yield from self._work.spend(_STRING_WORK + min(self._position - before, _PIECE_BYTES) // _COUNTED_OF_WORK)

    def _pass_plainly(self, end: int) -> Generator[int, None, None]:
        # In steps, so that a bomb ends at the first of them.
        while self._position < end:
            before = self._position
            self._count(min(before + _PIECE_BYTES, end))
            yield from self._work.spend((self._position - before) // _COUNTED_OF_WORK)

    def _end_of_short_string(self, start: int) -> int:
        """The position after the closing quote of the string that begins at ``start``; 0: it is long, or wrong."""
        body = self._body
        end = body.find(b'"', start, start + _LONG_BYTES + 1)
        if end >= 0 and body.find(b"\\", start, end) >= 0:  # that quote may be a part of the string
            self._work.done += _LONG_STRING_WORK
            part = _STRING_PART.match(body, start, min(start + _LONG_BYTES, len(body)))
            end = start if part is None else part.end()
            if body[end : end + 1] != b'"':
                return 0
        return end + 1

    def _pass_long_string(self, quote: int) -> Generator[int, None, None]:
        body, start = self._body, quote + 1
        end = body.find(b'"', start)
        if end > 0 and body.find(b"\\", start, end) < 0:  # as pictures are: nothing but a copy
            work = _LONG_STRING_WORK + (end - start) // _COPIED_OF_WORK
            if work > STEP_WORK:
                yield self._work.end_step()
            text, after = str(memoryview(body)[start:end], "utf-8"), end + 1
            self._work.done += work
        else:
            self._work.done += _LONG_STRING_WORK
            text, after = yield from self._read_escaped(start)
        if (yield from self._is_name(after)):
            self._position = after
        else:
            self._take(quote, after, text)

    def _take(self, start: int, end: int, value: str | array[int]) -> None:
        self._kept += [self._body[self._num_copied : start], b"NaN"]
        self._taken.append(value)
        self._position = self._num_copied = end

    def _count(self, end: int) -> None:
        """Go on to ``end``, and count the values that begin before it; there is no string."""
        body, start = self._body, self._position
        if body.find(b"N", start, end) >= 0 or body.find(b"I", start, end) >= 0:
            raise ValueError("NaN and Infinity are no JSON")
        self._num_values += body.count(b",", start, end) + body.count(b"[", start, end) + body.count(b"{", start, end)
        if self._num_values > MAX_VALUES:
            raise _too_many()
        self._position = end

    def _read_escaped(self, position: int) -> Generator[int, None, tuple[str, int]]:
        """The string whose first character is at ``position``, and the position after its closing quote."""
        body, pieces = self._body, list[str]()
        while True:
            part = _STRING_PART.match(body, position, min(position + _PIECE_BYTES, len(body)))
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
            yield from self._work.spend((end - position) // _READ_OF_WORK)
            if is_whole:
                return "".join(pieces), end + 1
            position = end

    def _is_name(self, position: int) -> Generator[int, None, bool]:
        """Whether the string that ends at ``position`` is the name of a field."""
        body = self._body
        while True:
            space = _SPACE.match(body, position, min(position + _PIECE_BYTES, len(body)))
            end = position if space is None else space.end()
            if end - position < _PIECE_BYTES:
                return body[end : end + 1] == b":"
            yield from self._work.spend((end - position) // _COUNTED_OF_WORK)
            position = end

    def _read_ids(self, first: int, end: int) -> Generator[int, None, array[int] | None]:
        """The list between ``first`` and ``end``; ``None``: it holds more than unsigned 32-bit numbers."""
        body, position = self._body, first
        ids: array[int] = array("I")
        while True:
            limit = min(position + 2 * _PIECE_BYTES, end)
            stop = body.find(b",", min(position + _PIECE_BYTES, end), limit)
            stop = limit if stop < 0 else stop
            piece = body[position:stop]
            if piece.translate(None, _IN_ID_LISTS) or (stop == limit < end):  # that one is all spaces or one number
                return None
            try:
                values = json.loads(b"[" + piece + b"]")
                ids.extend(values)
            except OverflowError:
                return None
            except json.JSONDecodeError:
                raise ValueError("a list of numbers is malformed") from None
            if not values and (position > first or stop < end):
                raise ValueError("a list of numbers is malformed")
            yield from self._work.spend(len(piece) // _READ_OF_WORK)
            if stop == end:
                return ids
            position = stop + 1


def _too_many() -> MessageTooLargeError:
    return MessageTooLargeError(f"the body has more than {MAX_VALUES} values beside the token ids of its prompts")


def _read_integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("a number has too many digits")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


#: Reads short JSON at once; constants that JSON does not have are refused.
SHORT = json.JSONDecoder(parse_constant=_refuse_constant)


def put_together(rest: bytes, taken: Sequence[str | array[int]]) -> Any:
    """The value of a body of which ``take_apart`` has left ``rest``; long lists of token ids are arrays.

    Raises:
        ValueError: it is no JSON.
        MessageTooLargeError: more than ``MAX_VALUES`` ids are in fields that take none: they would be read at once.
    """
    values = iter(taken)
    decoder = json.JSONDecoder(parse_constant=lambda _name: next(values), parse_int=_read_integer)
    value = decoder.decode(rest.decode())
    num_ids = sum([len(one) for one in taken if isinstance(one, array)])
    if num_ids > MAX_VALUES:
        asked = [value.get(name) for name in _ID_FIELDS] if isinstance(value, dict) else []
        if num_ids - sum(map(_num_ids, asked)) > MAX_VALUES:
            raise _too_many()
    return value


def is_unicode(rest: bytes) -> bool:
    """Whether no text of valid JSON has half of a surrogate pair; what ``take_apart`` took out is checked already."""
    return not (_MAYBE_LONE.search(rest) and _MAYBE_LONE.search(rest.replace(rb"\\", b"  ")))


def why_no_json(error: Exception) -> str:
    """What is wrong with a body that is no JSON, without a word of it."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return "a number has too many digits" if "int_max_str_digits" in str(error) else str(error)[:200]


def _num_ids(value: Any) -> int:
    lists = value if isinstance(value, list) else [value]
    return sum([len(one) for one in lists if isinstance(one, array)])
