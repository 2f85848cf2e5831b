"""Chaos over real processes: are requests lost, tokens wrong, answers late, blocks held?

Two Prefill, two Decode, two Routers and etcd run on the mock engine, or on torch, then with Encode workers and
pictures. In each episode requests are under way when one or two faults strike: ``kill -9``, SIGTERM, SIGSTOP and
SIGCONT, cut or slow connections, etcd gone with or without its data, or a roll of all workers. Processes start again at
the same addresses. Then the fleet is healed, every answer is compared with that of an undisturbed run, and blocks must
be free within two leases.

    python -m benchmarks.chaos --json FILE [--seed 0] [--episodes 50] [--only N ...] [--engine mock|torch] [--fleets 1]

Episode N of a seed is always the same one: ``--only N`` repeats it. Where there are cores, ``--fleets N`` runs N fleets
at once, each in a process of its own; whichever is free takes the next episode. Each of them gets every answer
undisturbed once, before its episodes.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

from benchmarks.chaos_episodes import RECOVERY_TIMEOUT_S, EpisodeResult, fleet_config, log_file, plan_episode
from benchmarks.children import start_child
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from quartet.engine.settings import EngineKind

# A child that says nothing for so long hangs: a fleet's start, its undisturbed answers and an episode take less.
_CHILD_TIMEOUT_S = 600.0

#: Has a fleet play the episode of a number.
Play: TypeAlias = Callable[[int], Awaitable[EpisodeResult]]


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Seconds from the end of the faults until all routers placed at all workers again; 60 if that took longer."""

    median: float
    p99: float
    longest: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """Sums over all episodes.

    Attributes:
        fleets: how many ran at once.
        lost: requests whose client did not get the whole answer.
        wrong: answers with other tokens than undisturbed ones.
        overdue: requests that ended after their time.
        held: blocks held two leases after the requests.
        faults: how often each fault struck.
        failed: the episodes in which something was lost, wrong, overdue or held.
    """

    seed: int
    engine: str
    fleets: int
    episodes: int
    requests: int
    breaks: int
    lost: int
    wrong: int
    overdue: int
    held: int
    recovery_s: Recovery
    faults: Mapping[str, int]
    failed: Sequence[EpisodeResult] = field(default_factory=list)


def main() -> None:
    """Run the command line; the exit code is 1 if anything was lost, wrong, overdue or held."""
    parser = make_parser("chaos", __doc__ or "")
    parser.add_argument("--seed", type=int, default=0, help="of all episodes; default %(default)s")
    parser.add_argument("--episodes", type=int, default=50, help="how many; default %(default)s")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="only these episodes")
    parser.add_argument(
        "--engine", type=EngineKind, choices=(EngineKind.MOCK, EngineKind.TORCH), default=EngineKind.MOCK
    )
    parser.add_argument("--fleets", type=int, default=1, metavar="N", help="at once; default %(default)s")
    arguments = parser.parse_args()
    numbers = arguments.only or range(arguments.episodes)
    if not 1 <= arguments.fleets <= len(numbers):
        parser.error("--fleets: must be at least 1, and at most the number of episodes")
    report = Report("chaos", revision=arguments.commit)
    results = asyncio.run(_run(arguments.seed, numbers, arguments.engine, arguments.fleets))
    report.write(results, arguments.json)
    sys.exit(bool(results.failed))


async def _run(seed: int, numbers: Sequence[int], engine: EngineKind, num_fleets: int) -> Results:
    @asynccontextmanager
    async def start() -> AsyncIterator[Play]:
        async with start_child("benchmarks.chaos_episodes", seed, engine.value) as child:

            async def play(number: int) -> EpisodeResult:
                return EpisodeResult(**await child.ask(number, _CHILD_TIMEOUT_S))

            yield play

    done: list[EpisodeResult] = []
    with LiveLine() as live, live.showing(lambda elapsed, _: _progress(done, len(numbers), num_fleets, elapsed)):

        def take(result: EpisodeResult) -> None:
            done.append(result)
            live.say(_line(result))
            if not result.is_well:
                live.say(f"    its log: {log_file(result.number)}")

        results = await play_on_fleets(numbers, num_fleets, start, take)
    config = fleet_config(engine)
    faults = Counter[str](strike.fault for number in numbers for strike in plan_episode(seed, number, config).strikes)
    return summed(seed, engine, num_fleets, results, faults)


async def play_on_fleets(
    numbers: Sequence[int],
    num_fleets: int,
    start: Callable[[], AbstractAsyncContextManager[Play]],
    on_result: Callable[[EpisodeResult], None],
) -> Sequence[EpisodeResult]:
    """Play the episodes ``numbers`` on so many fleets at once: whichever is free takes the next one.

    ``on_result`` gets each result as it comes; returned are all of them, in order of their numbers. What one fleet
    raises ends the others.
    """
    left, results = deque(numbers), list[EpisodeResult]()

    async def play_what_is_left() -> None:
        async with start() as play:
            while left:
                result = await play(left.popleft())
                results.append(result)
                on_result(result)

    async with asyncio.TaskGroup() as fleets:
        for _ in range(num_fleets):
            fleets.create_task(play_what_is_left())
    return sorted(results, key=lambda result: result.number)


def _progress(done: Sequence[EpisodeResult], num_episodes: int, num_fleets: int, elapsed_s: float) -> str:
    num_bad = sum(not result.is_well for result in done)
    return f"{len(done)} of {num_episodes} episodes, {num_fleets} at once, {num_bad} bad, {elapsed_s:.0f} s"


def _line(result: EpisodeResult) -> str:
    counts = ", ".join(f"{getattr(result, name)} {name}" for name in ("breaks", "lost", "wrong", "overdue", "held"))
    errors = "".join(f"\n    {error}" for error in result.errors)
    return f"{result.number}: {'; '.join(result.strikes)}: {counts}, recovery {result.recovery_s} s{errors}"


def summed(
    seed: int, engine: EngineKind, num_fleets: int, results: Sequence[EpisodeResult], faults: Mapping[str, int]
) -> Results:
    """The sums of ``results`` (one or more); ``faults``: how often each struck."""
    recoveries = sorted(RECOVERY_TIMEOUT_S if result.recovery_s is None else result.recovery_s for result in results)
    return Results(
        seed=seed,
        engine=engine.value,
        fleets=num_fleets,
        episodes=len(results),
        requests=sum(result.requests for result in results),
        breaks=sum(result.breaks for result in results),
        lost=sum(result.lost for result in results),
        wrong=sum(result.wrong for result in results),
        overdue=sum(result.overdue for result in results),
        held=sum(result.held for result in results),
        recovery_s=Recovery(
            median=median(recoveries),
            p99=recoveries[min(len(recoveries) - 1, int(0.99 * len(recoveries)))],
            longest=recoveries[-1],
        ),
        faults=dict(sorted(faults.items())),
        failed=[result for result in results if not result.is_well],
    )


if __name__ == "__main__":
    main()
