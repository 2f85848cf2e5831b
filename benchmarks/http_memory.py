"""What an open stream of HTTP takes of the router's memory: the growth of a process with the face over a stub.

The pipeline accepts each request at once and gives it one token; then nothing more comes. A client in a process of its
own opens the streams, with the headers of OpenAI's client and a prompt of 340 characters.

    python -m benchmarks.http_memory --json FILE [--streams 1000]
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import uvloop
from prometheus_client import CollectorRegistry

from benchmarks.children import start_child
from benchmarks.report import Report, make_parser
from quartet.api.answer import AnswerSink
from quartet.api.request import Accepted, AskedStart
from quartet.telemetry.metrics import RouterMetrics
from router.generate import Pipeline
from router.http.config import HttpConfig
from router.http.server import HttpServer
from router.rate_limits import RateLimits

_WARM_UP_STREAMS = 100
_REQUEST_ID = "0" * 32
_TIMEOUT_S = 60.0
_SETTLE_S = 0.5
_KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was measured, after ``_WARM_UP_STREAMS`` streams were open already."""

    num_streams: int
    kib_before: int
    kib_after: int
    bytes_per_stream: float


class _Run:
    """A request that never ends."""

    request_id = _REQUEST_ID


class _StubPipeline:
    """Accepts everything, and gives each request one token."""

    def __init__(self) -> None:
        self.context = SimpleNamespace(
            table=SimpleNamespace(pool=lambda _name, _now: None, pool_of_adapter=lambda _name, _now: None),
            intake=SimpleNamespace(enter=_enter),
            metrics=RouterMetrics(CollectorRegistry()),
            limits=RateLimits(),
        )

    def generate(
        self, start: AskedStart, sink: AnswerSink, *, on_queued: Callable[[], None], **_caller: object
    ) -> _Run:
        """Accept ``start``; nothing keeps it."""
        on_queued()
        sink.accept(Accepted(request_id=_REQUEST_ID, choices=(), num_prompt_tokens=1, seed=0))
        sink.add(0, 0, (5,), " word", ())
        return _Run()

    async def drop_all(self, _runs: Iterable[_Run]) -> None:
        """Nothing is held."""


def main() -> None:
    """Run the command line."""
    parser = make_parser("http_memory", __doc__ or "")
    parser.add_argument("--streams", type=int, default=1_000, help="streams that are measured; default %(default)d")
    arguments = parser.parse_args()
    report = Report("http_memory", packages=("aiohttp", "uvloop"), revision=arguments.commit)
    report.write(uvloop.run(_measure(arguments.streams)), arguments.json)


async def _measure(num_streams: int) -> Results:
    server = HttpServer(
        HttpConfig(),
        cast(Pipeline, _StubPipeline()),
        CollectorRegistry(),
        namespace="benchmark",
        stall_timeout_s=_TIMEOUT_S,
        is_ready=lambda: True,
    )
    address = f"127.0.0.1:{await server.start()}"
    job = {"address": address, "counts": [_WARM_UP_STREAMS, num_streams]}
    async with start_child("benchmarks.http_memory_client", job) as client:
        await client.ask("open", _TIMEOUT_S)
        before = await _resident_kib()
        await client.ask("open", _TIMEOUT_S)
        after = await _resident_kib()
    await server.drain(0.1)
    return Results(
        num_streams=num_streams,
        kib_before=before,
        kib_after=after,
        bytes_per_stream=(after - before) * _KIB / num_streams,
    )


async def _resident_kib() -> int:
    await asyncio.sleep(_SETTLE_S)
    gc.collect()
    with open("/proc/self/status", encoding="ascii") as status:  # noqa: ASYNC230 - the kernel makes it at once
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))


async def _enter(_tenant: str, _work: int) -> None:
    """It is everybody's turn."""


if __name__ == "__main__":
    main()
