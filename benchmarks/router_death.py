"""A router is killed under load: does an answer fail or change, and how long is its pause?

64 answers stream through one of two routers, half of them by Generate and half by Session, from one Prefill and two
Decode workers of the mock engine. Once all have begun, that router gets SIGKILL; the client goes on at the other one.
Then every answer is compared with the same request undisturbed.

    python -m benchmarks.router_death --json FILE [--kills N]
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
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from benchmarks.chaos_client import Ask, draw_asks
from benchmarks.chaos_fleet import Fleet, FleetConfig
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from quartet.api.request import ChoiceFinished, Delta
from quartet.client import QuartetClient, RequestPath
from quartet.errors import ServingError

_NUM_STREAMS = 64
_PATHS = (RequestPath.GENERATE, RequestPath.SESSION)
_NUM_TOKENS = range(240, 280)
# The router is killed when each answer has so many; none has ended by then, unless the machine is very busy.
_TOKENS_AT_KILL = 30
# Of a step that decodes: so that the processes, on few cores, have time for 64 streams.
_DECODE_MS = 25.0
_TIMEOUT_S = 300.0
_READY_TIMEOUT_S = 90.0
_BLOCKS_TIMEOUT_S = 30.0
_ENGINE = {"num_blocks": 4096, "mock": {"timing": {"decode_base": _DECODE_MS}}}
_CONFIG = FleetConfig(num_prefill=1, worker_settings={"engine": _ENGINE})


@dataclass(frozen=True, kw_only=True)
class PathResults:
    """What became of the answers by one path.

    Attributes:
        resumed: answers that lost their router.
        failed: answers that ended with an error.
        wrong: answers with other tokens or another text than undisturbed.
        itl_ms: time between two tokens before the kill: of each answer the mean, of these the median.
        pause_ms: longest time without a token around the kill: median, 95th percentile and longest.
        pause_ratio: median pause, in times between two tokens.
    """

    answers: int
    resumed: int
    failed: int
    wrong: int
    itl_ms: float
    pause_p50_ms: float
    pause_p95_ms: float
    pause_max_ms: float
    pause_ratio: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """All answers, of all kills together.

    Attributes:
        generate, session: by path.
        blocks_left: blocks that workers still held when all had ended.
        errors: how failed answers ended.
    """

    kills: int
    generate: PathResults
    session: PathResults
    blocks_left: int
    errors: Sequence[str]


@dataclass
class _Stream:
    """One answer; ``times`` has the arrival of each of its parts, in monotonic seconds."""

    ask: Ask
    path: RequestPath
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)
    lost_routers: Sequence[str] = ()
    killed_at: float = 0.0
    num_tokens_at_kill: int = 0
    error: str | None = None
    is_whole: bool = False
    is_same: bool = False

    @property
    def has_begun(self) -> bool:
        return len(self.token_ids) >= _TOKENS_AT_KILL or self.error is not None

    async def follow(self, client: QuartetClient) -> None:
        try:
            async with client.generate(
                path=self.path,
                token_ids=self.ask.token_ids,
                sampling=self.ask.sampling,
                seed=self.ask.seed,
                timeout_s=_TIMEOUT_S,
            ) as stream:
                async for part in stream:
                    if isinstance(part, Delta):
                        self.token_ids += part.token_ids
                        self.text += part.text
                        self.times.append(time.monotonic())
                    elif isinstance(part, ChoiceFinished):
                        self.is_whole = True
                self.lost_routers = stream.lost_routers
        except ServingError as error:
            self.error = f"{type(error).__name__}: {error.message}"

    @property
    def itl_s(self) -> float:
        """The mean time between two tokens before the kill."""
        times = [at for at in self.times if at <= self.killed_at]
        return (times[-1] - times[0]) / (self.num_tokens_at_kill - 1)

    @property
    def pause_s(self) -> float:
        """The longest time without a token since the kill."""
        return max(later - earlier for earlier, later in pairwise(self.times) if later > self.killed_at)


def main() -> None:
    """Run the command line; the exit code is 1 if an answer failed or changed."""
    parser = make_parser("router_death", __doc__ or "")
    parser.add_argument("--kills", type=int, default=5, metavar="N", help="times that a router is killed")
    arguments = parser.parse_args()
    report = Report("router_death", revision=arguments.commit)
    # Not uvloop: see benchmarks.chaos_episodes.
    results = asyncio.run(_run(arguments.kills))
    report.write(results, arguments.json)
    sys.exit(not is_well(results))


def is_well(results: Results) -> bool:
    """Whether no answer failed or changed, and nothing was left."""
    paths = (results.generate, results.session)
    return not (results.blocks_left or any(path.failed or path.wrong or not path.resumed for path in paths))


async def _run(num_kills: int) -> Results:
    streams: list[_Stream] = []
    with LiveLine() as live:
        async with _fleet(_CONFIG) as fleet:
            for number in range(num_kills):
                live.say(f"kill {number + 1} of {num_kills}")
                streams += await _kill_once(fleet, number)
                await fleet.start("router-0")
                await fleet.wait_ready(_READY_TIMEOUT_S)
            blocks_left = await fleet.num_blocks_held(_BLOCKS_TIMEOUT_S)
    return Results(
        kills=num_kills,
        generate=_of_path(streams, RequestPath.GENERATE),
        session=_of_path(streams, RequestPath.SESSION),
        blocks_left=blocks_left,
        errors=[f"{stream.path}: {stream.error}" for stream in streams if stream.error is not None],
    )


async def _kill_once(fleet: Fleet, number: int) -> list[_Stream]:
    """The answers under which ``router-0`` was killed, compared with undisturbed ones of the other router."""
    asks = draw_asks(random.Random(number), _NUM_STREAMS, num_tokens=_NUM_TOKENS, num_prompt_tokens=range(20, 100))
    streams = [_Stream(ask, _PATHS[number % len(_PATHS)]) for number, ask in enumerate(asks)]
    # The processes themselves, without their proxies: these would add to the pause.
    async with QuartetClient([fleet.grpc_address(name) for name in fleet.config.routers]) as client:
        following = [asyncio.create_task(stream.follow(client)) for stream in streams]
        async with asyncio.timeout(_READY_TIMEOUT_S):
            while not all(stream.has_begun for stream in streams):  # noqa: ASYNC110 - tokens set no event
                await asyncio.sleep(0.005)
        killed_at = time.monotonic()
        for stream in streams:
            stream.killed_at, stream.num_tokens_at_kill = killed_at, len(stream.token_ids)
        await fleet.kill("router-0")
        await asyncio.gather(*following)
        await asyncio.gather(*(_compare(client, stream) for stream in streams))
    return streams


async def _compare(client: QuartetClient, stream: _Stream) -> None:
    whole = await client.complete(
        token_ids=stream.ask.token_ids, sampling=stream.ask.sampling, seed=stream.ask.seed, timeout_s=_TIMEOUT_S
    )
    same = (stream.token_ids, stream.text) == (list(whole.choices[0].token_ids), whole.text)
    stream.is_same = stream.is_whole and same


def _of_path(streams: Sequence[_Stream], path: RequestPath) -> PathResults:
    of_path = [stream for stream in streams if stream.path is path]
    resumed = [stream for stream in of_path if stream.lost_routers]
    itl_s = median([stream.itl_s for stream in resumed])
    pauses_s = sorted(stream.pause_s for stream in resumed)
    return PathResults(
        answers=len(of_path),
        resumed=len(resumed),
        failed=sum(stream.error is not None for stream in of_path),
        wrong=sum(stream.error is None and not stream.is_same for stream in of_path),
        itl_ms=round(itl_s * 1000, 1),
        pause_p50_ms=round(median(pauses_s) * 1000, 1),
        pause_p95_ms=round(quantiles(pauses_s, n=20)[-1] * 1000, 1),
        pause_max_ms=round(pauses_s[-1] * 1000, 1),
        pause_ratio=round(median(pauses_s) / itl_s, 2),
    )


@asynccontextmanager
async def _fleet(config: FleetConfig) -> AsyncIterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="quartet-router-death-") as directory:
        async with Fleet(config, Path(directory), os.environ) as fleet:
            try:
                yield fleet
            except BaseException:
                fleet.keep_log(Path(".run/router_death.log"))
                raise


if __name__ == "__main__":
    main()
