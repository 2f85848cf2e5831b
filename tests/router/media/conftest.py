"""A running site, and fetchers that are closed after the test."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest
from aiohttp.abc import AbstractResolver

from router.media.config import MediaConfig
from router.media.fetch import MediaFetcher
from tests.router.media.site import Names, Site

MakeFetcher = Callable[..., MediaFetcher]


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with Site().running() as site:
        yield site


@pytest.fixture
async def make_fetcher() -> AsyncIterator[MakeFetcher]:
    """Makes a fetcher; no name resolves unless a resolver is given."""
    async with AsyncExitStack() as stack:

        def make(
            config: MediaConfig, resolver: AbstractResolver | None = None, ssl_context: ssl.SSLContext | None = None
        ) -> MediaFetcher:
            fetcher = MediaFetcher(config, resolver=resolver or Names(), ssl_context=ssl_context)
            stack.push_async_callback(fetcher.close)
            return fetcher

        yield make
