"""Drains under load: is an answer lost or changed, and how long does a drain take, when every worker is rolled?

Endless answers stream from two Prefill and two Decode workers by all three paths. One worker after the other gets
SIGTERM and is started again, as a rolling update does. Then every answer is compared with that of an undisturbed
fleet. Answers are far longer than a drain may take, so each of them must leave both Decode workers.

    python -m benchmarks.drain --json FILE [--short]
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.chaos_client import Ask, draw_asks
from benchmarks.chaos_fleet import Fleet, FleetConfig
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from benchmarks.stopwatch import Stopwatch
from quartet.api.request import ChoiceFinished, Delta
from quartet.client import QuartetClient, RequestPath
from quartet.errors import ServingError

MAX_DRAIN_S = 5.0
_PATHS = tuple(RequestPath)
# More than any answer gets before the last worker is back.
_ENDLESS = 30_000
_TIMEOUT_S = 600.0
_READY_TIMEOUT_S = 60.0
# Every answer goes on for so many tokens after the last roll.
_LAST_TOKENS = 20
_SETTINGS = {"drain_timeout_s": 300.0, "engine": {"num_blocks": 8192, "max_model_len": 2 * _ENDLESS}}
_ROUTER_SETTINGS = {"attempts": {"max_attempts": 2}, "max_request_timeout_s": 2 * _TIMEOUT_S}


@dataclass(frozen=True, kw_only=True)
class Drain:
    """One worker's drain: seconds from SIGTERM until its process had ended.

    Attributes:
        own_s: of these, without the time in which some process of the machine waited for a CPU.
    """

    worker: str
    duration_s: float
    own_s: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """What became of the answers.

    Attributes:
        streams: answers under way during all rolls.
        failed: answers that ended, well or badly, before they were cancelled.
        wrong: answers with other tokens than undisturbed ones.
        tokens: in all answers together.
        errors: how failed answers ended.
        pause_s: longest time without a new token, of each answer: median and longest.
    """

    streams: int
    failed: int
    wrong: int
    tokens: int
    drains: Sequence[Drain]
    slowest_drain_s: float
    median_pause_s: float
    longest_pause_s: float
    errors: Sequence[str]


@dataclass
class _Stream:
    """One endless answer."""

    ask: Ask
    path: RequestPath
    token_ids: list[int] = field(default_factory=list)
    arrived_at: float = 0.0
    longest_pause_s: float = 0.0
    error: str | None = None

    async def follow(self, client: QuartetClient) -> None:
        """Take tokens until cancelled."""
        try:
            async with client.generate(
                path=self.path,
                token_ids=self.ask.token_ids,
                sampling=self.ask.sampling,
                seed=self.ask.seed,
                timeout_s=_TIMEOUT_S,
                omit_text=True,
            ) as stream:
                async for part in stream:
                    if isinstance(part, Delta):
                        self._take(part.token_ids)
                    elif isinstance(part, ChoiceFinished):
                        self.error = f"finished after {len(self.token_ids)} tokens: {part.reason}"
        except ServingError as error:
            self.error = f"{type(error).__name__}: {error.message}"

    def _take(self, token_ids: Sequence[int]) -> None:
        now = time.monotonic()
        if self.token_ids:
            self.longest_pause_s = max(self.longest_pause_s, now - self.arrived_at)
        self.arrived_at = now
        self.token_ids += token_ids


def main() -> None:
    """Run the command line; the exit code is 1 if an answer failed or changed, or a drain took too long."""
    parser = make_parser("drain", __doc__ or "")
    parser.add_argument("--short", action="store_true", help="12 streams, one Prefill and one Decode drained")
    arguments = parser.parse_args()
    report = Report("drain", revision=arguments.commit)
    # Not uvloop: see benchmarks.chaos_episodes.
    results = asyncio.run(_run(12, ("prefill-0", "decode-0")) if arguments.short else _run(64, None))
    report.write(results, arguments.json)
    sys.exit(not is_well(results))


def is_well(results: Results) -> bool:
    """Whether nothing was lost or changed, and each drain was short."""
    return not (results.failed or results.wrong or results.slowest_drain_s > MAX_DRAIN_S)


async def _run(num_streams: int, workers: Sequence[str] | None) -> Results:
    """Drain ``workers``, by default all, under ``num_streams`` streams."""
    asks = draw_asks(random.Random(0), num_streams, num_tokens=range(_ENDLESS, _ENDLESS + 1))
    streams = [_Stream(ask, _PATHS[number % len(_PATHS)]) for number, ask in enumerate(asks)]
    config = FleetConfig(num_routers=1, worker_settings=_SETTINGS, router_settings=_ROUTER_SETTINGS)
    with LiveLine() as live:
        async with _fleet(config) as fleet:
            drains = await _roll(fleet, streams, workers or config.workers, live)
        # Tokens of the mock engine do not depend on its speed, so this takes a part of the time.
        fast = {"num_blocks": 32_768, "max_model_len": 2 * _ENDLESS, "mock": {"speed_up": 20.0}}
        quiet = FleetConfig(num_prefill=0, num_decode=1, num_routers=1, worker_settings={"engine": fast})
        async with _fleet(quiet) as fleet:
            live.say("comparing with undisturbed answers")
            expected = await _undisturbed(fleet, streams)
    pauses = [stream.longest_pause_s for stream in streams]
    return Results(
        streams=len(streams),
        failed=sum(stream.error is not None for stream in streams),
        wrong=sum(stream.token_ids != tokens for stream, tokens in zip(streams, expected, strict=True)),
        tokens=sum(len(stream.token_ids) for stream in streams),
        drains=drains,
        slowest_drain_s=max(drain.duration_s for drain in drains),
        median_pause_s=round(median(pauses), 3),
        longest_pause_s=round(max(pauses), 3),
        errors=[f"{stream.path}: {stream.error}" for stream in streams if stream.error is not None],
    )


@asynccontextmanager
async def _fleet(config: FleetConfig) -> AsyncIterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="quartet-drain-") as directory:
        async with Fleet(config, Path(directory), os.environ) as fleet:
            try:
                yield fleet
            except BaseException:
                fleet.keep_log(Path(".run/drain.log"))
                raise


async def _roll(fleet: Fleet, streams: Sequence[_Stream], workers: Sequence[str], live: LiveLine) -> list[Drain]:
    """Drain ``workers`` one after the other and start each again, with ``streams`` under way."""
    drains: list[Drain] = []
    async with QuartetClient(fleet.router_addresses) as client:
        following = [asyncio.create_task(stream.follow(client)) for stream in streams]
        await _grow(streams)
        for worker in workers:
            began, watch = time.monotonic(), Stopwatch()
            await fleet.drain(worker)
            duration_s, own_s = time.monotonic() - began, watch.seconds
            drains.append(Drain(worker=worker, duration_s=round(duration_s, 3), own_s=round(own_s, 3)))
            live.say(f"{worker} drained in {drains[-1].duration_s:.2f} s")
            if worker != workers[-1]:
                await fleet.start(worker)
                await fleet.wait_ready(_READY_TIMEOUT_S)
        await _grow(streams)
        for task in following:
            task.cancel()
        await asyncio.wait(following)
    return drains


async def _grow(streams: Sequence[_Stream]) -> None:
    """Wait until every stream that has not failed has some more tokens."""
    goals = [len(stream.token_ids) + _LAST_TOKENS for stream in streams]
    async with asyncio.timeout(_READY_TIMEOUT_S):
        while any(  # noqa: ASYNC110 - tokens set no event
            stream.error is None and len(stream.token_ids) < goal for stream, goal in zip(streams, goals, strict=True)
        ):
            await asyncio.sleep(0.05)


async def _undisturbed(fleet: Fleet, streams: Sequence[_Stream]) -> list[list[int]]:
    """As many tokens of the same requests as ``streams`` have."""

    async def ask(client: QuartetClient, stream: _Stream) -> list[int]:
        if not stream.token_ids:
            return []
        sampling = Ask(token_ids=(), num_tokens=len(stream.token_ids), seed=0).sampling
        completion = await client.complete(
            token_ids=stream.ask.token_ids,
            sampling=sampling,
            seed=stream.ask.seed,
            timeout_s=_TIMEOUT_S,
            omit_text=True,
        )
        return list(completion.choices[0].token_ids)

    async with QuartetClient(fleet.router_addresses) as client:
        return await asyncio.gather(*(ask(client, stream) for stream in streams))


if __name__ == "__main__":
    main()
