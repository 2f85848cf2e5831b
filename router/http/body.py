"""Bodies of requests: read within bounds, and parsed when it is their tenant's turn (``quartet.api.openai.steps``)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web

from quartet.api.openai.requests import Caller
from quartet.api.openai.steps import SHORT, STEP_WORK, is_unicode, put_together, take_apart, why_no_json
from quartet.errors import InvalidRequestError, MessageTooLargeError, QueueFullError, RequestTimeoutError
from router.http.config import HttpConfig
from router.http.errors import HttpError

# Bodies up to this length are parsed in one step, in 1 ms at most. They count for no budget.
_SHORT_BODY_BYTES = 32 << 10
# One unit of the intake's work is 0.1 microseconds.
_BYTES_OF_WORK = 4
_RETRY_DELAY_S = 1.0

ResultT = TypeVar("ResultT")


class Bodies:
    """Reads the bodies of requests."""

    def __init__(self, config: HttpConfig, enter: Callable[[str, int], Awaitable[None]]) -> None:
        """``enter`` waits until a tenant may do so much work, as ``Intake.enter``."""
        self._config = config
        self._enter = enter
        self._held: Counter[str] = Counter()
        self._num_held = 0

    @asynccontextmanager
    async def read_json(self, request: web.BaseRequest, caller: Caller) -> AsyncIterator[dict[str, Any]]:
        """The JSON object that ``request`` brings. The tenant pays for parsing it, and for holding it in the block.

        Raises:
            HttpError: it is compressed, or no JSON object.
            MessageTooLargeError: it has too many bytes, or values.
            InvalidRequestError: a text in it is not valid Unicode.
            QueueFullError: too much is held already.
            RequestTimeoutError: it did not come, or was not parsed, in time.
        """
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise HttpError(415, "the body must not be compressed")
        limit = self._config.max_body_bytes
        if (request.content_length or 0) > limit:
            raise _too_large(limit)
        self._expect(request)
        held = [0]
        try:
            yield await self._json_in_time(request, caller, held)
        finally:
            self._release(caller.payer, held[0])

    async def _json_in_time(self, request: web.BaseRequest, caller: Caller, held: list[int]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                return await self._parse(await self._read(request, caller.payer, held), caller.tenant)
        except TimeoutError as error:
            message = f"the body did not come, or had no turn to be parsed, within {self._config.body_timeout_s:g} s"
            raise RequestTimeoutError(message) from error

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
        await self._enter(tenant, min(len(body) // _BYTES_OF_WORK, STEP_WORK))
        try:
            if len(body) <= _SHORT_BODY_BYTES:
                value, rest = SHORT.decode(body.decode()), body
            else:
                rest, taken = await self.in_turns(take_apart(body), tenant)
                await self._enter(tenant, len(rest) // _BYTES_OF_WORK)
                value = put_together(rest, taken)
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"the body is no JSON: {why_no_json(error)}") from error
        if not is_unicode(rest):
            raise InvalidRequestError("a text is not valid Unicode")
        if not isinstance(value, dict):
            raise HttpError(400, "the body must be a JSON object")
        return value

    async def in_turns(self, steps: Generator[int, None, ResultT], tenant: str) -> ResultT:
        """The result of ``steps``; the tenant pays for each, and it is its turn before the next."""
        while True:
            try:
                work = next(steps)
            except StopIteration as end:
                result: ResultT = end.value
                return result
            await self._enter(tenant, work)

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


def _too_large(limit: int) -> MessageTooLargeError:
    return MessageTooLargeError(f"the body has more than {limit} bytes")
