"""A closed loop: a number of clients, each of which sends its next request when its last one has ended."""

from __future__ import annotations

import asyncio
import time

from cli.bench.sender import Send
from cli.bench.window import Window
from cli.bench.workload import Workload


class ClosedLoop:
    """Keeps as many requests running as it has clients."""

    def __init__(self, send: Send, workload: Workload, window: Window, num_clients: int) -> None:
        """All clients take their requests from the one ``workload``, in the order in which they become free."""
        self._send = send
        self._workload = workload
        self._window = window
        self._num_clients = num_clients

    async def run(self) -> None:
        """Return when the window lets nothing more be sent, or the workload is used up, and all has ended."""
        async with asyncio.TaskGroup() as clients:
            for _ in range(self._num_clients):
                clients.create_task(self._client())

    async def _client(self) -> None:
        while self._window.admit() and (request := self._workload.next()) is not None:
            if pause_s := await self._send(request, time.perf_counter()):
                await self._window.pause(pause_s)
