"""The HTTP way of the relay benchmark: a client that does little but count events, and bodies of its requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from quartet.v1 import router_pb2

_EVENT_END = b"\n\n"
# What an event with text holds, and no other.
_TEXT = b'"text":"'
_LENGTH = b"content-length:"
#: An event of the real router, in its chunk.
EVENT = b"c8\r\n" + b"data: {" + b" " * 191 + b"}\n\n\r\n"


class HttpFailedError(Exception):
    """A request was not answered with 200, or its connection broke; the message says how."""


def completion_body(start: router_pb2.GenerateStart, *, streams: bool) -> bytes:
    """The body of a request of /v1/completions that asks for the same as ``start``, with text."""
    body: dict[str, Any] = {
        "prompt": list(start.token_ids.ids),
        "max_tokens": start.sampling.max_tokens,
        "ignore_eos": True,
        "seed": start.seed,
        "stream": streams,
    }
    return json.dumps(body).encode()


def chat_body(text: str, seed: int) -> bytes:
    """The body of a request of /v1/chat/completions for one token."""
    messages = [{"role": "user", "content": text}]
    return json.dumps({"messages": messages, "max_tokens": 1, "ignore_eos": True, "seed": seed}).encode()


class EventCounter(asyncio.Protocol):
    """One streamed answer. ``ended`` is done when its connection is over, with an error if it was no stream."""

    def __init__(self, request: bytes, on_open: Callable[[], None], on_tokens: Callable[[int], None]) -> None:
        """Send ``request``; call ``on_open`` at the head of the answer, ``on_tokens`` with events."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._on_open = on_open
        self._on_tokens = on_tokens
        self._is_open = False
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        transport.write(self._request)  # type: ignore[attr-defined]  # uvloop's are of no such class

    def data_received(self, data: bytes) -> None:
        """Count the events that are whole."""
        data = self._rest + data
        if not self._is_open:
            head, found, data = data.partition(b"\r\n\r\n")
            if not found:
                self._rest = head
                return
            if b" 200 " not in head[:16]:
                self.connection_lost(HttpFailedError(head[:200].decode(errors="replace")))
                return
            self._is_open = True
            self._on_open()
        whole, _, self._rest = data.rpartition(_EVENT_END)
        if num_tokens := whole.count(_TEXT):
            self._on_tokens(num_tokens)

    def connection_lost(self, exc: Exception | None) -> None:
        """The answer is over."""
        if not self.ended.done():
            self.ended.set_exception(exc or HttpFailedError("the stream ended"))


async def open_stream(
    address: str, path: str, body: bytes, on_open: Callable[[], None], on_tokens: Callable[[int], None]
) -> tuple[asyncio.BaseTransport, EventCounter]:
    """A streamed answer to ``body`` from ``address``, on a connection of its own."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    request = make_request(path, body)
    return await loop.create_connection(lambda: EventCounter(request, on_open, on_tokens), host, int(port))


def make_request(path: str, body: bytes) -> bytes:
    """A request with the headers of an ordinary client."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer unused\r\nUser-Agent: relay\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class HttpAsker:
    """Asks one request after the other on one connection."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str, body: bytes) -> None:
        """Ask, and read the whole answer. Raises ``HttpFailedError``: it is no 200."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(make_request(path, body))
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(_LENGTH)[2].partition(b"\r\n")[0])
        answer = await reader.readexactly(length)
        if b" 200 " not in head[:16]:
            raise HttpFailedError(answer[:200].decode(errors="replace"))

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
