"""Bodies of requests: read within bounds, paid for by their tenant, and parsed without holding up the event loop.

Python's parser takes 2 ns for a byte of text, but 200 ns for each number, list or object, and nothing interrupts it. So
a long body is gone through in steps: strings and lists of token ids are taken out piece by piece, what else it holds is
counted, and only the short rest goes through the parser at once.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, NoReturn, TypeVar

from aiohttp import web

from quartet.errors import InvalidRequestError, MessageTooLargeError, QueueFullError, RequestTimeoutError
from router.http.config import HttpConfig
from router.http.errors import HttpError

# Bodies up to this length are parsed in one step, in 1 ms at most. They count for no budget.
_SHORT_BODY_BYTES = 32 << 10
# What one step goes through: less than 1 ms.
_STEP_BYTES = 64 << 10
# Longer strings of a long body, and lists of token ids, are taken out of it.
_LONG_STRING_BYTES, _LONG_LIST_BYTES = 512, 4096
# More than a list of as many ids as any prompt has; and spaces before it.
_MAX_LIST_BYTES, _MAX_SPACE = 16 << 20, 256
# Of what is left of a long body: numbers, lists and objects, as many as fields of a gRPC message; and bytes. To parse
# the most of both takes 10 ms.
MAX_VALUES, _MAX_REST_BYTES = 32_768, 3 << 20
# One unit of the intake's work is 0.1 microseconds.
_BYTES_OF_WORK = 4
_RETRY_DELAY_S = 1.0

# A part of a string: no escape is cut in two, also none of two halves of a surrogate pair.
_STRING_PART = re.compile(
    rb'(?:[^"\\]++|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    rb"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})*+"
)
_NUMBER_LIST = re.compile(rb"\s*:\s*\[")
_NOT_NUMBERS = b"0123456789, \t\r\n"
# Half of a surrogate pair without the other, or something that looks like it.
_MAYBE_LONE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)


ResultT = TypeVar("ResultT")


class Bodies:
    """Reads the bodies of requests."""

    def __init__(self, config: HttpConfig, enter: Callable[[str, int], Awaitable[None]]) -> None:
        """``enter`` waits until a tenant may do so much work, as ``Intake.enter``."""
        self._config = config
        self._enter = enter
        self._held: Counter[str] = Counter()
        self._num_held = 0

    async def read_json(self, request: web.BaseRequest, tenant: str, caller: str) -> dict[str, Any]:
        """The JSON object that ``request`` brings. ``tenant`` pays for parsing it; ``caller`` for holding it meanwhile.

        Raises:
            HttpError: it is compressed, or no JSON object.
            MessageTooLargeError: it has too many bytes, or values.
            InvalidRequestError: a text in it is not valid Unicode.
            QueueFullError: too much is held already.
            RequestTimeoutError: it did not come in time.
        """
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise HttpError(415, "the body must not be compressed")
        limit = self._config.max_body_bytes
        if (request.content_length or 0) > limit:
            raise _too_large(limit)
        self._expect(request)
        held = [0]
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                body = await self._read(request, caller, held)
            return await self._parse(body, tenant)
        except TimeoutError as error:
            message = f"the body did not come within {self._config.body_timeout_s:g} s"
            raise RequestTimeoutError(message) from error
        finally:
            self._release(caller, held[0])

    def _expect(self, request: web.BaseRequest) -> None:
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _read(self, request: web.BaseRequest, caller: str, held: list[int]) -> bytes:
        pieces, size, content = list[bytes](), 0, request.content
        try:
            while piece := await content.readany():
                size += len(piece)
                if size > self._config.max_body_bytes:
                    raise _too_large(self._config.max_body_bytes)
                if size > _SHORT_BODY_BYTES:
                    self._hold(caller, size - held[0], held[0])
                    held[0] = size
                pieces.append(piece)
        except web.RequestPayloadError as error:
            raise HttpError(400, "the body is malformed") from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _parse(self, body: bytes, tenant: str) -> dict[str, Any]:
        # However many bodies have come in one turn of the event loop, only few are parsed in it.
        await self._enter(tenant, min(len(body), _STEP_BYTES) // _BYTES_OF_WORK)
        try:
            if len(body) <= _SHORT_BODY_BYTES:
                value, rest = _SHORT.decode(body.decode()), body
            else:
                rest, taken = await self.in_turns(take_apart(body), tenant)
                await self._enter(tenant, len(rest) // _BYTES_OF_WORK)
                value = put_together(rest, taken)
            if _MAYBE_LONE.search(rest) is not None:
                # What was taken out is checked already.
                json.dumps(json.loads(rest, parse_constant=lambda _name: None), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError("a text is not valid Unicode") from error
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"the body is no JSON: {_why(error)}") from error
        if not isinstance(value, dict):
            raise HttpError(400, "the body must be a JSON object")
        return value

    async def in_turns(self, steps: Generator[None, None, ResultT], tenant: str) -> ResultT:
        """The result of ``steps``; before each but the first it is the tenant's turn."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: ResultT = end.value
                return result
            await self._enter(tenant, _STEP_BYTES // _BYTES_OF_WORK)

    def _hold(self, caller: str, num_bytes: int, num_held: int) -> None:
        """Hold so many bytes more of a body of which ``num_held`` are held. Raises ``QueueFullError``."""
        limit = self._config.max_held_body_bytes
        is_alone = self._num_held == num_held
        if not is_alone and (self._num_held + num_bytes > limit or self._held[caller] + num_bytes > limit // 2):
            raise QueueFullError("too many long requests are being read; try again later", retry_delay_s=_RETRY_DELAY_S)
        self._held[caller] += num_bytes
        self._num_held += num_bytes

    def _release(self, caller: str, num_bytes: int) -> None:
        if not num_bytes:
            return
        self._num_held -= num_bytes
        self._held[caller] -= num_bytes
        if not self._held[caller]:
            del self._held[caller]


def take_apart(body: bytes) -> Generator[None, None, tuple[bytes, list[str | array[int]]]]:
    """Take the long strings and lists of token ids out of ``body``, in steps: each yield comes after less than 1 ms.

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
        for start in range(position, end, _STEP_BYTES):
            num_values += _count(body, start, min(start + _STEP_BYTES, end))
            if num_values > MAX_VALUES:
                raise MessageTooLargeError(f"the body has more than {MAX_VALUES} values")
            if end - start > _STEP_BYTES:
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
        if position - stepped > _STEP_BYTES // 4:
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
        part = _STRING_PART.match(body, position, min(position + _STEP_BYTES, len(body)))
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
        stop = body.find(b",", min(position + _STEP_BYTES, end), end)
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


_SHORT = json.JSONDecoder(parse_constant=_refuse_constant)


def put_together(rest: bytes, taken: Sequence[str | array[int]]) -> Any:
    """The value of a body of which ``take_apart`` has left ``rest``. Raises ``ValueError``: it is no JSON."""
    values = iter(taken)
    return json.JSONDecoder(parse_constant=lambda _name: next(values)).decode(rest.decode())


def _too_large(limit: int) -> MessageTooLargeError:
    return MessageTooLargeError(f"the body has more than {limit} bytes")


def _why(error: Exception) -> str:
    """What is wrong, without a word of the body."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)[:200]
