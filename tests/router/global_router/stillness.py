"""Routers that stand still: their connections stay, and nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quartet.v1 import router_pb2 as pb
from router.servicer import RouterServicer


class Stillness:
    """Lets the router of one namespace answer no question about its workers while it lasts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, namespace: str, *, lasts: bool) -> None:
        """It does not stop what runs, nor gRPC's answers to pings."""
        self._namespace = namespace
        self._passed = asyncio.Event()
        if not lasts:
            self._passed.set()
        list_workers, watch_workers = RouterServicer.ListWorkers, RouterServicer.WatchWorkers

        async def list_late(servicer: RouterServicer, request: pb.ListWorkersRequest, context: Any) -> Any:
            await self._wait(servicer)
            return await list_workers(servicer, request, context)

        async def watch_late(
            servicer: RouterServicer, request: pb.WatchWorkersRequest, context: Any
        ) -> AsyncIterator[pb.WatchWorkersResponse]:
            await self._wait(servicer)
            async for response in watch_workers(servicer, request, context):
                await self._wait(servicer)
                yield response

        monkeypatch.setattr(RouterServicer, "ListWorkers", list_late)
        monkeypatch.setattr(RouterServicer, "WatchWorkers", watch_late)

    def begin(self) -> None:
        """From now on nothing is answered."""
        self._passed.clear()

    def end(self) -> None:
        """Everything is."""
        self._passed.set()

    async def _wait(self, servicer: RouterServicer) -> None:
        if servicer._namespace == self._namespace:
            await self._passed.wait()
