"""A caller that speaks HTTP/2 by hand, to do what gRPC's own clients never do."""

from __future__ import annotations

import asyncio
import struct

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING = 0, 1, 4, 6
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_INITIAL_WINDOW_SIZE = 4  # a setting
_EMPTY_MESSAGE = b"\0" * 5  # not compressed, no bytes


class Asked:
    """One call, whose answer is not read any further than asked for here. It answers pings, so it counts as alive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._has_headers = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def answer_begins(self) -> None:
        """Wait for the headers of the answer: a first message follows them as soon as there is a window for it."""
        await self._has_headers.wait()

    def close(self) -> None:
        """Hang up."""
        self._reading.cancel()
        self._writer.close()

    async def _read(self) -> None:
        while True:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == _HEADERS:
                self._has_headers.set()
            elif head[3] == _PING and not head[4] & _ACK:
                self._writer.write(_frame(_PING, _ACK, 0, payload))


async def ask(address: str, method: str, *, window_bytes: int) -> Asked:
    """Call ``method`` with an empty message; the server may send ``window_bytes`` of the answer's messages."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": address,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    writer.write(
        _PREFACE
        + _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, window_bytes))
        + _frame(_HEADERS, _END_HEADERS, 1, b"".join(_field(name, value) for name, value in headers.items()))
        + _frame(_DATA, _END_STREAM, 1, _EMPTY_MESSAGE)
    )
    return Asked(reader, writer)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _field(name: str, value: str) -> bytes:
    """A header as HPACK's literal without index; both texts are shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
