"""A web site on loopback that gives files, and a resolver that says where hosts are."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from quartet.media.items import MediaUrl
from router.media.config import MediaConfig
from router.media.fetch import MediaFetcher
from tests.media.pictures import make_file

PNG = make_file("PNG")
FINGERPRINT = bytes(32)
LOOPBACK = ("127.0.0.0/8", "::1/128")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Site:
    """Counts what it is asked for. What it answers at a path is given to ``serve``."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.port = 0
        self._handlers: dict[str, Handler] = {}

    def serve(self, path: str, handler: Handler) -> str:
        """Answer at ``path`` with ``handler``; returns its URL."""
        self._handlers[path] = handler
        return self.url(path)

    def give(self, path: str, body: bytes = PNG, status: int = 200, **headers: str) -> str:
        """Answer at ``path`` with that; returns its URL."""

        async def answer(request: web.Request) -> web.Response:
            return web.Response(
                body=body, status=status, headers={name.replace("_", "-"): headers[name] for name in headers}
            )

        return self.serve(path, answer)

    def url(self, path: str, host: str = "127.0.0.1", scheme: str = "http") -> str:
        """Of ``path`` here, whatever ``host`` is."""
        return f"{scheme}://{host}:{self.port}{path}"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path_qs)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return await self._handlers[request.path](request)

    @asynccontextmanager
    async def running(self, host: str = "127.0.0.1", ssl_context: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
        """Serves until the context ends."""
        runner = web.ServerRunner(web.Server(self._answer), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, host, 0, ssl_context=ssl_context)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()


class Names(AbstractResolver):
    """Answers look-ups of each host in turn from its list; the last answer stays."""

    def __init__(self, **answers: Sequence[Sequence[str]]) -> None:
        self.answers = {name.replace("_", "."): list(each) for name, each in answers.items()}
        self.num_lookups = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        self.num_lookups += 1
        if host not in self.answers:
            raise OSError("no such host")
        answers = self.answers[host]
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        pass


def loopback_config(site: Site, **settings: object) -> MediaConfig:
    """Allows the site, and nothing else unless ``settings`` say so."""
    given: dict[str, object] = {
        "allowed_schemes": ("http",),
        "allowed_hosts": (f"127.0.0.1:{site.port}", f"pictures.test:{site.port}"),
        "allowed_private_networks": LOOPBACK,
    }
    return MediaConfig(**{**given, **settings})  # type: ignore[arg-type]


async def fetch_one(fetcher: MediaFetcher, url: str, field: str = "media[0].url") -> bytes:
    """The bytes that ``url`` leads to."""
    [item] = await fetcher.fetch([MediaUrl(url)], [field], FINGERPRINT)
    return item.file.data


def num_open_files() -> int:
    """Descriptors of this process, sockets included."""
    return len(os.listdir("/proc/self/fd"))


async def settle_to(num_files: int) -> None:
    """Run the loop until its pending closes are done and no more than ``num_files`` descriptors are open."""
    for _ in range(10_000):
        if num_open_files() <= num_files:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{num_open_files()} files are open, not {num_files}")
