"""A TCP proxy that cuts, refuses and delays connections on command."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 1 << 16


class TcpProxy:
    """Passes bytes both ways between clients of one address and a server at another.

    Attributes:
        delay_s: how long each chunk of bytes waits before it is passed on.
        is_cut: new connections are closed at once.
    """

    def __init__(self, host: str, target_host: str, port: int) -> None:
        """It listens on ``port`` of ``host`` within ``async with`` and dials the same port of ``target_host``."""
        self.delay_s = 0.0
        self.is_cut = False
        self._host, self._target_host, self._port = host, target_host, port
        self._server: asyncio.Server | None = None
        self._passing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Listen. Raises ``OSError``."""
        self._server = await asyncio.start_server(self._accept, self._host, self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening, and end every connection."""
        assert self._server is not None, "it was entered"
        self._server.close()
        await self._end_all()

    async def cut(self) -> None:
        """End every connection, and refuse new ones until ``heal``."""
        self.is_cut = True
        await self._end_all()

    def heal(self) -> None:
        """Pass everything on at once again."""
        self.is_cut, self.delay_s = False, 0.0

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.close()
            return
        task = asyncio.create_task(self._pass(reader, writer))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass both ways until one side ends; then end the other."""
        with contextlib.closing(writer), contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(self._target_host, self._port)
            with contextlib.closing(far_writer):
                ways = [
                    asyncio.create_task(self._copy(reader, far_writer)),
                    asyncio.create_task(self._copy(far_reader, writer)),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(chunk)
                await writer.drain()

    async def _end_all(self) -> None:
        passing = list(self._passing)
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)
