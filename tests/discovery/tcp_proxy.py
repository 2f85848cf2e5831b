"""A TCP relay that a test can cut, or silence while the connections stay open."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from types import TracebackType

from services.topology.launch import free_port


class TcpProxy:
    """Relays ``endpoint`` to ``target``; with ``tls``, takes TLS and speaks plainly to the target."""

    def __init__(self, target: str, *, tls: ssl.SSLContext | None = None) -> None:
        self.endpoint = f"127.0.0.1:{free_port()}"
        self._target = target
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def __aenter__(self) -> TcpProxy:
        await self.heal()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cut()

    @property
    def num_connections(self) -> int:
        """Connections taken since ``heal``, each with its end at the target."""
        return len(self._connections)

    async def cut(self) -> None:
        """Break every connection and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for relay in self._relays:
            relay.cancel()
        for connection in self._connections:
            connection.transport.abort()
        await asyncio.gather(*self._relays, return_exceptions=True)
        self._connections.clear()

    async def heal(self) -> None:
        """Take connections (again)."""
        host, _, port = self.endpoint.rpartition(":")
        self._server = await asyncio.start_server(self._relay, host, int(port), ssl=self._tls)

    def silence(self) -> None:
        """Pass nothing on any more, while connections stay open and new ones are taken: a cable pulled."""
        self._flowing.clear()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        self._connections.add(writer)
        try:
            target_reader, target_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._connections.add(target_writer)
        for source, sink in ((reader, target_writer), (target_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._relays.add(task)
            task.add_done_callback(self._relays.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await source.read(65536):
                await self._flowing.wait()
                sink.write(piece)
                await sink.drain()
        sink.close()
