"""Texts by key: what is fetched once is kept, up to a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from quartet.api.text_cache import TextCache
from tests.text.builders import byte_level_backend

_FILES = {"tokenizer.json": byte_level_backend().to_str().encode()}


async def fetch() -> Mapping[str, bytes]:
    return _FILES


async def test_the_text_fetched_first_is_evicted_for_a_new_one() -> None:
    cache: TextCache[str] = TextCache(max_texts=2)
    first = await cache.get("a", fetch)
    assert await cache.get("b", fetch) is not first
    assert cache.known("a") is first
    await cache.get("c", fetch)
    assert cache.known("a") is None
    assert cache.known("b") is not None and cache.known("c") is not None


async def test_a_caller_cancelled_in_the_same_turn_as_the_fetch_is_cancelled() -> None:
    fetching = asyncio.Event()

    async def fetch_for_ever() -> Mapping[str, bytes]:
        fetching.set()
        await asyncio.Event().wait()
        return _FILES

    cache: TextCache[str] = TextCache()
    async with asyncio.timeout(30):
        caller = asyncio.create_task(cache.get("a", fetch_for_ever))
        await fetching.wait()
        closing = asyncio.create_task(cache.close())
        await asyncio.sleep(0)  # now the fetch is cancelled, and its caller does not know yet
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await closing
