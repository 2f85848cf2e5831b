"""How events and statistics are fetched: upstream has had two ways, and which one 1.2.1 has is not known."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from tensorrt_llm._stand_in.control import WAIT_S
from tensorrt_llm._stand_in.switches import SWITCHES

Item = dict[str, Any]

#: How often upstream moves what the engine reports into the queue. Short for tests, and in proportion to the fetch
#: timeout that they are made with.
DISPATCH_S = 0.2


class Source:
    """Items of an engine, waiting to be fetched; `was_put` says that there are some."""

    def __init__(self, drain: Callable[[], list[Item]]) -> None:
        self._drain = drain
        self._waiting: list[Item] = []
        self._condition = threading.Condition()
        self._listeners: set[Callable[[], None]] = set()

    def was_put(self) -> None:
        """Wake the threads that wait for items."""
        with self._condition:
            self._condition.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def take(self) -> Item | None:
        """Return the next item, if any."""
        with self._condition:
            self._waiting = self._waiting or self._drain()
            return self._waiting.pop(0) if self._waiting else None

    def take_all(self, timeout: float | None) -> list[Item]:
        """Wait for an item for at most ``timeout`` seconds; return all there are."""
        with self._condition:
            self._condition.wait_for(self._has_items, WAIT_S if timeout is None else timeout)
            items, self._waiting = self._waiting + self._drain(), []
            return items

    async def take_soon(self, timeout: float | None) -> Item | None:
        """Return the next item, or ``None`` when ``timeout`` seconds brought none."""
        loop, is_woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(is_woken.set)

        with self._condition:
            self._listeners.add(wake)
        try:
            async with asyncio.timeout(WAIT_S if timeout is None else timeout):
                while (item := self.take()) is None:
                    await is_woken.wait()
                    is_woken.clear()
                return item
        except TimeoutError:
            return None
        finally:
            with self._condition:
                self._listeners.discard(wake)

    def _has_items(self) -> bool:
        self._waiting = self._waiting or self._drain()
        return bool(self._waiting)


class IterationResult:
    """What ``get_..._async`` returns: an iterator of items, or of lists of them."""

    def __init__(self, source: Source | None, items: list[Item], timeout: float | None) -> None:
        self._source, self._items, self.timeout = source, items, timeout
        self.is_done = False

    def __aiter__(self) -> IterationResult:
        return self

    @property
    def _is_hasty(self) -> bool:
        """Whether its time is over before the dispatcher has surely been there once."""
        return self.timeout is not None and self.timeout < 2 * DISPATCH_S

    async def __anext__(self) -> Item | list[Item]:
        item = None
        if self._items:
            item = self._items.pop(0)
        elif self._source is not None and not self.is_done and not self._is_hasty:
            item = await self._source.take_soon(self.timeout)
        if item is None:
            self.is_done = True
            raise StopAsyncIteration
        return [item] if SWITCHES.kv_event_lists else item


class Feed:
    """One of `LLM`'s two feeds."""

    def __init__(self, source: Source, *, must_have_begun: bool) -> None:
        self._source, self._must_have_begun = source, must_have_begun
        self._result: IterationResult | None = None

    def begin(self) -> None:
        """A request was submitted: the queue's iterator is there, and one that ended goes on."""
        if self._result is None:
            self._result = IterationResult(self._source, [], 2.0)
        self._result.is_done = False

    def fetch_async(self, timeout: float | None) -> IterationResult:
        """What ``get_..._async(timeout)`` does; over RPC it blocks."""
        if SWITCHES.kv_event_form == "rpc":
            return IterationResult(None, self._source.take_all(timeout), timeout)
        if self._result is None:
            assert not self._must_have_begun, "KV cache event iteration result is not properly instantiated."
            return IterationResult(None, [], timeout)
        self._result.timeout = timeout
        return self._result

    def fetch(self, timeout: float | None) -> list[Item]:
        """What ``get_...(timeout)`` does: over RPC one fetch, else all until it is quiet for ``timeout`` seconds."""
        if SWITCHES.kv_event_form == "rpc":
            return self._source.take_all(timeout)
        if self._result is None:
            assert not self._must_have_begun, "KV cache event iteration result is not properly instantiated."
            return []
        gathered: list[Item] = []
        while items := self._source.take_all(timeout):
            gathered += items
        return gathered
