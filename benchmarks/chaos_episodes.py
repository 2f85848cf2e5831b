"""Episodes of chaos, one after the other on fleets in one process: what they do, and how each of them went.

As a child of ``benchmarks.chaos`` it plays the episodes whose numbers its parent sends, and answers with their results.
Several children run at once: each has an event loop of its own for its fleet's clients and proxies, ports that no other
one has, and its own etcd and temporary directory.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from benchmarks import children
from benchmarks.chaos_client import Answer, Clients, draw_asks, draw_picture_asks
from benchmarks.chaos_fleet import ETCD, HAND_OFF_TTL_S, REQUEST_TIMEOUT_S, Fleet, FleetConfig
from quartet.client import RequestPath
from quartet.engine.settings import EngineKind

#: One fleet lives for so many episodes.
EPISODES_PER_FLEET = 50
#: A fleet that takes longer, in seconds, has not recovered.
RECOVERY_TIMEOUT_S = 60.0
_NUM_ASKS = 64
_NUM_TOGETHER = 8
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


class Player(Protocol):
    """A running fleet that episodes can be played on."""

    async def play(self, number: int) -> EpisodeResult:
        """Play one, and leave the fleet whole, unless its result says that it did not recover."""
        ...


async def play_all(
    numbers: AsyncIterator[int],
    start: Callable[[], AbstractAsyncContextManager[Player]],
    on_result: Callable[[EpisodeResult], None],
) -> None:
    """Play the episodes ``numbers``, on one fleet after the other.

    A fleet ends after 50 episodes, or with one from which it does not recover. ``start`` is called only where another
    episode is left.
    """
    number = await anext(numbers, None)
    while number is not None:
        async with start() as fleet:
            for _ in range(EPISODES_PER_FLEET):
                result = await fleet.play(number)
                on_result(result)
                number = await anext(numbers, None)
                if number is None or result.recovery_s is None:
                    break


def fleet_config(engine: EngineKind) -> FleetConfig:
    """What every fleet of a run with ``engine`` consists of."""
    return FleetConfig(engine=engine, num_encode=2 if engine is EngineKind.TORCH else 0)


def log_file(number: int) -> Path:
    """Where the log of the fleet is kept on which this episode did not end well."""
    return Path(f".run/chaos-{number}.log")


@asynccontextmanager
async def _started(seed: int, engine: EngineKind) -> AsyncIterator[_Run]:
    """A fleet of its own, which has given every answer undisturbed."""
    with tempfile.TemporaryDirectory(prefix="quartet-chaos-") as directory:
        async with Fleet(fleet_config(engine), Path(directory), os.environ) as fleet:
            run = _Run(fleet, seed)
            try:
                await run.learn()
                yield run
            finally:
                await run.close()


class _Run:
    """Episodes on one fleet."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        rng, is_torch = random.Random(seed), fleet.config.engine is EngineKind.TORCH
        self._asks = draw_asks(rng, _NUM_ASKS, num_tokens=range(16, 33) if is_torch else range(30, 90))
        if is_torch:
            self._asks[::4] = draw_picture_asks(rng, len(self._asks[::4]))
        self._undisturbed: list[list[int]] = []
        self._fleet, self._seed = fleet, seed
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

    async def play(self, number: int) -> EpisodeResult:
        """Run it and leave the fleet whole; where something was not well, keep the fleet's log."""
        result = await self._episode(plan_episode(self._seed, number, self._fleet.config))
        if not result.is_well:
            self._fleet.keep_log(log_file(number))
        return result

    async def _episode(self, episode: Episode) -> EpisodeResult:
        asking = [asyncio.create_task(self._clients.ask(self._asks[n], path)) for n, path in episode.asks]
        await asyncio.gather(*(self._strike(strike) for strike in episode.strikes))
        began = time.monotonic()
        await self._fleet.heal()  # a second fault may have ended a process that the first one's end had started
        ready = asyncio.create_task(self._fleet.wait_ready(RECOVERY_TIMEOUT_S))
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


def _describe(strike: Strike) -> str:
    slow = f" by {strike.delay_s:.2f} s" if strike.fault is Fault.DELAY else ""
    return f"{strike.fault} {strike.target}{slow} at {strike.at_s:.2f} s for {strike.lasts_s:.2f} s"


async def main() -> None:
    """Play what the parent orders; the arguments are the seed and the engine."""
    seed, engine = children.argument(), EngineKind(children.argument(1))
    await play_all(children.orders(), lambda: _started(seed, engine), children.answer)


if __name__ == "__main__":
    # Not uvloop: it forks, and then gRPC's handlers of a fork now and then crash the child before its program begins.
    asyncio.run(main())
