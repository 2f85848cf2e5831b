"""Chaos over real processes: are requests lost, tokens wrong, answers late, blocks held?

Two Prefill, two Decode, two Routers and etcd run on the mock engine, or on torch, then with Encode workers and
pictures. In each episode requests are under way when one or two faults strike: ``kill -9``, SIGTERM, SIGSTOP and
SIGCONT, cut or slow connections, etcd gone with or without its data, or a roll of all workers. Processes start again at
the same addresses. Then the fleet is healed, every answer is compared with that of an undisturbed run, and blocks must
be free within two leases.

    python -m benchmarks.chaos --json FILE [--seed 0] [--episodes 50] [--only N ...] [--engine mock|torch]

Episode N of a seed is always the same one: ``--only N`` repeats it.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import median

from benchmarks.chaos_client import Answer, Clients, draw_asks, draw_picture_asks
from benchmarks.chaos_fleet import ETCD, HAND_OFF_TTL_S, REQUEST_TIMEOUT_S, Fleet, FleetConfig
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from quartet.client import RequestPath
from quartet.engine.settings import EngineKind

# One fleet lives for so many episodes.
_EPISODES_PER_FLEET = 50
_NUM_ASKS = 64
_NUM_TOGETHER = 8
_RECOVERY_TIMEOUT_S = 60.0
# A router says at the timeout that it is over; its client may hear it this much later on a busy machine.
_GRACE_S = 2.0
_PATHS = tuple(RequestPath)


class Fault(StrEnum):
    """What happens to a process."""

    KILL = "kill"  # kill -9
    DRAIN = "drain"  # SIGTERM
    FREEZE = "freeze"  # SIGSTOP, later SIGCONT
    CUT = "cut"  # its connections end, and new ones are refused
    DELAY = "delay"  # its connections are slow
    LOSE = "lose"  # etcd only: kill -9, and its data is gone
    ROLL = "roll"  # all workers, one after the other: SIGTERM, and started again


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault.

    Attributes:
        at_s: when, after the requests began.
        lasts_s: for how long.
        delay_s: of each chunk of bytes, for a delay.
    """

    fault: Fault
    target: str
    at_s: float
    lasts_s: float
    delay_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What one episode does: ``asks`` are numbers of the asks, each with its path."""

    number: int
    strikes: Sequence[Strike]
    asks: Sequence[tuple[int, RequestPath]]


def plan_episode(seed: int, number: int, config: FleetConfig) -> Episode:
    """The episode, which is a function of the arguments alone."""
    rng = random.Random(f"{seed}/{number}")
    strikes = [_draw_strike(rng, config) for _ in range(rng.choice((1, 1, 2)))]
    asks = [(rng.randrange(_NUM_ASKS), rng.choice(_PATHS)) for _ in range(_NUM_TOGETHER)]
    return Episode(number=number, strikes=strikes, asks=asks)


def _draw_strike(rng: random.Random, config: FleetConfig) -> Strike:
    target = rng.choice((*config.workers, *config.workers, *config.routers, ETCD))
    faults = [Fault.KILL, Fault.FREEZE, Fault.CUT, Fault.DELAY, Fault.LOSE if target == ETCD else Fault.DRAIN]
    if target.startswith("prefill"):
        faults.append(Fault.ROLL)
    return Strike(
        fault=rng.choice(faults),
        target=target,
        at_s=rng.uniform(0.0, 0.8),
        lasts_s=rng.choice((rng.uniform(0.05, 0.5), rng.uniform(0.5, 3.0))),
        delay_s=rng.uniform(0.01, 0.3),
    )


@dataclass(frozen=True, kw_only=True)
class EpisodeResult:
    """How one episode went.

    Attributes:
        strikes: what happened, in words.
        breaks: times that clients had to go on elsewhere.
        held: blocks that were not free two leases after all requests had ended, or requests that still ran.
        recovery_s: from the end of the faults until all routers placed at all workers again; ``None``: not within a
            minute, and the next episode has another fleet.
        errors: how lost requests ended, and what had not recovered.
    """

    number: int
    strikes: Sequence[str]
    requests: int
    breaks: int
    lost: int
    wrong: int
    overdue: int
    held: int
    recovery_s: float | None
    errors: Sequence[str] = ()

    @property
    def is_well(self) -> bool:
        """Whether nothing was lost, wrong, late or held."""
        return not (self.lost or self.wrong or self.overdue or self.held or self.recovery_s is None)


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
        lost: requests whose client did not get the whole answer.
        wrong: answers with other tokens than undisturbed ones.
        overdue: requests that ended after their time.
        held: blocks held two leases after the requests.
        faults: how often each fault struck.
        failed: the episodes in which something was lost, wrong, overdue or held.
    """

    seed: int
    engine: str
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
    arguments = parser.parse_args()
    numbers = arguments.only or range(arguments.episodes)
    report = Report("chaos", revision=arguments.commit)
    # Not uvloop: it forks, and then gRPC's handlers of a fork now and then crash the child before its program begins.
    results = asyncio.run(_run(arguments.seed, numbers, arguments.engine))
    report.write(results, arguments.json)
    sys.exit(bool(results.failed))


async def _run(seed: int, numbers: Sequence[int], engine: EngineKind) -> Results:
    is_torch = engine is EngineKind.TORCH
    config = FleetConfig(engine=engine, num_encode=2 if is_torch else 0)
    results: list[EpisodeResult] = []
    faults: Counter[str] = Counter()
    left = deque(numbers)
    with LiveLine() as live:
        while left:
            with tempfile.TemporaryDirectory(prefix="quartet-chaos-") as directory:
                async with Fleet(config, Path(directory), os.environ) as fleet:
                    run = _Run(fleet, seed, is_torch=is_torch)
                    try:
                        await run.learn()
                        for _ in range(min(_EPISODES_PER_FLEET, len(left))):
                            episode = plan_episode(seed, left.popleft(), config)
                            with live.showing(lambda elapsed, _: _progress(results, len(numbers), elapsed)):
                                result = await run.episode(episode)
                            results.append(result)
                            faults.update(strike.fault for strike in episode.strikes)
                            live.say(_line(result))
                            if not result.is_well:
                                live.say(f"    its log: {fleet.keep_log(Path(f'.run/chaos-{episode.number}.log'))}")
                            if result.recovery_s is None:
                                break
                    finally:
                        await run.close()
    return summed(seed, engine, results, faults)


def _progress(results: Sequence[EpisodeResult], num_episodes: int, elapsed_s: float) -> str:
    num_bad = sum(not result.is_well for result in results)
    return f"episode {len(results)} of {num_episodes}, {num_bad} bad, {elapsed_s:.0f} s"


class _Run:
    """Episodes on one fleet."""

    def __init__(self, fleet: Fleet, seed: int, *, is_torch: bool) -> None:
        rng = random.Random(seed)
        self._asks = draw_asks(rng, _NUM_ASKS, num_tokens=range(16, 33) if is_torch else range(30, 90))
        if is_torch:
            self._asks[::4] = draw_picture_asks(rng, len(self._asks[::4]))
        self._undisturbed: list[list[int]] = []
        self._fleet = fleet
        self._clients = Clients(fleet.router_addresses)

    async def close(self) -> None:
        """Hang up."""
        await self._clients.close()

    async def learn(self) -> None:
        """Get every answer undisturbed. Raises ``RuntimeError`` if one fails even so."""
        for first in range(0, len(self._asks), _NUM_TOGETHER):
            asks = self._asks[first : first + _NUM_TOGETHER]
            for answer in await asyncio.gather(*(self._clients.ask(ask, RequestPath.GENERATE) for ask in asks)):
                if answer.error is not None or answer.num_breaks:
                    raise RuntimeError(f"an undisturbed request failed: {answer}")
                self._undisturbed.append(answer.token_ids)

    async def episode(self, episode: Episode) -> EpisodeResult:
        """Run it and leave the fleet whole."""
        asking = [asyncio.create_task(self._clients.ask(self._asks[n], path)) for n, path in episode.asks]
        await asyncio.gather(*(self._strike(strike) for strike in episode.strikes))
        began = time.monotonic()
        await self._fleet.heal()  # a second fault may have ended a process that the first one's end had started
        ready = asyncio.create_task(self._fleet.wait_ready(_RECOVERY_TIMEOUT_S))
        answers = await asyncio.gather(*asking)
        held_deadline = time.monotonic() + 2 * HAND_OFF_TTL_S
        errors = [
            f"{path}: {answer.error}" for (_, path), answer in zip(episode.asks, answers, strict=True) if answer.error
        ]
        recovery_s: float | None = None
        try:
            recovery_s = round(await ready - began, 3)
        except TimeoutError as error:
            errors.append(f"not recovered: {error}")
        held = await self._fleet.num_blocks_held(max(0.0, held_deadline - time.monotonic()))
        return EpisodeResult(
            number=episode.number,
            strikes=[_describe(strike) for strike in episode.strikes],
            requests=len(answers),
            breaks=sum(answer.num_breaks for answer in answers),
            lost=sum(answer.error is not None for answer in answers),
            wrong=sum(self._is_wrong(n, answer) for (n, _), answer in zip(episode.asks, answers, strict=True)),
            overdue=sum(answer.duration_s > REQUEST_TIMEOUT_S + _GRACE_S for answer in answers),
            held=held,
            recovery_s=recovery_s,
            errors=errors,
        )

    def _is_wrong(self, number: int, answer: Answer) -> bool:
        """Whether it has a token that the undisturbed answer does not have there, or ended well and lacks one."""
        expected = self._undisturbed[number]
        if answer.error is None:
            return answer.token_ids != expected
        return answer.token_ids != expected[: len(answer.token_ids)]

    async def _strike(self, strike: Strike) -> None:
        """Do it, and undo it when its time is over."""
        fleet, target = self._fleet, strike.target
        await asyncio.sleep(strike.at_s)
        match strike.fault:
            case Fault.KILL:
                await fleet.kill(target)
            case Fault.DRAIN:
                await fleet.drain(target)
            case Fault.FREEZE:
                fleet.freeze(target)
            case Fault.CUT:
                await fleet.cut(target)
            case Fault.DELAY:
                fleet.delay(target, strike.delay_s)
            case Fault.LOSE:
                await fleet.kill(target)
                fleet.lose_data()
            case Fault.ROLL:
                for worker in fleet.config.workers:
                    await fleet.drain(worker)
                    await fleet.start(worker)
        await asyncio.sleep(strike.lasts_s)
        await fleet.heal(target)


def _line(result: EpisodeResult) -> str:
    counts = ", ".join(f"{getattr(result, name)} {name}" for name in ("breaks", "lost", "wrong", "overdue", "held"))
    errors = "".join(f"\n    {error}" for error in result.errors)
    return f"{result.number}: {'; '.join(result.strikes)}: {counts}, recovery {result.recovery_s} s{errors}"


def _describe(strike: Strike) -> str:
    slow = f" by {strike.delay_s:.2f} s" if strike.fault is Fault.DELAY else ""
    return f"{strike.fault} {strike.target}{slow} at {strike.at_s:.2f} s for {strike.lasts_s:.2f} s"


def summed(seed: int, engine: EngineKind, results: Sequence[EpisodeResult], faults: Mapping[str, int]) -> Results:
    """The sums of ``results`` (one or more); ``faults``: how often each struck."""
    recoveries = sorted(_RECOVERY_TIMEOUT_S if result.recovery_s is None else result.recovery_s for result in results)
    return Results(
        seed=seed,
        engine=engine.value,
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
