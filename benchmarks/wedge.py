"""Whether health tells the truth: threads that hang, processes that are frozen, and a fleet that is merely busy.

Two Prefill, two Decode and two Routers on the mock engine answer requests. One after the other, a thread of a process
stands still at each of five places, and each process is frozen with SIGSTOP. Measured is how long it takes until its
probes notice, until a router no longer places requests there, and whether requests go on meanwhile. Then it goes on,
and all must be well again. With ``--saturate`` nothing hangs: more requests than the fleet can take must give no alarm.

The mock engine encodes no pictures. With ``--engine torch`` two Encode workers are struck, one Prefill and one Decode
run beside them, and every request has a picture that nobody has encoded before.

    python -m benchmarks.wedge --json FILE [--engine mock|torch] [--short] [--saturate SECONDS]
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from benchmarks.chaos_client import Ask, Clients, draw_asks, draw_picture_asks
from benchmarks.chaos_fleet import ETCD, READY, Fleet, FleetConfig
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from benchmarks.wedged_process import WEDGE_VARIABLE, Place, wedge_file
from quartet.client import RequestPath
from quartet.engine.settings import EngineKind
from quartet.rpc.channels import create_channel

_MAX_NOTICED_S = 10.0
# Two probes that get no answer for so long count as one that says no, as with most load balancers.
_PROBE_TIMEOUT_S = 2.0
_POLL_S = 0.2
_GIVE_UP_S = 30.0
_READY_TIMEOUT_S = 60.0
# Requests must end while something hangs.
_MIN_ENDED = 10
_NUM_CLIENTS = 12
_NUM_SATURATING = 400
_ROUTER, _OTHER_ROUTER = "router-0", "router-1"
# The product's own limits, and not the short ones of benchmarks.chaos.
_ROUTER_SETTINGS = {
    "heartbeat_timeout_s": 8.0,
    "attempts": {"prefill_timeout_s": 60.0, "decode_start_timeout_s": 60.0, "decode_stall_timeout_s": 60.0},
}


class Health(StrEnum):
    """What a probe said."""

    SERVING = "serving"
    NOT_SERVING = "not serving"
    SILENT = "silent"


_Ask: TypeAlias = Callable[[], Awaitable[Health]]


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A thread of ``target`` that stands still at ``place``; ``None``: the whole process is frozen."""

    target: str
    place: Place | None = None

    def __str__(self) -> str:
        return f"{self.target} {self.place or 'frozen'}"


@dataclass(frozen=True, kw_only=True)
class StrikeResult:
    """What became of one strike. Seconds count from the strike; ``None``: it did not happen within 30 s.

    Attributes:
        probe_s: until /readyz no longer said yes; 0 for etcd, which has none.
        probe: what it said then.
        health_s: until gRPC's health no longer said SERVING.
        health: what it said then.
        unplaced_s: until the router placed no more requests there; 0 for a router or etcd.
        ended: requests that ended well between the strike and its end.
        failed: requests that did not end well.
        recovery_s: from the strike's end until all was ready again.
    """

    strike: str
    probe_s: float | None
    probe: Health
    health_s: float | None
    health: Health
    unplaced_s: float | None
    ended: int
    failed: int
    recovery_s: float | None

    @property
    def is_well(self) -> bool:
        """Whether all was noticed in time, and requests went on."""
        times = (self.probe_s, self.health_s, self.unplaced_s)
        is_noticed = all(seconds is not None and seconds <= _MAX_NOTICED_S for seconds in times)
        return is_noticed and self.ended >= _MIN_ENDED and not self.failed and self.recovery_s is not None


@dataclass(frozen=True, kw_only=True)
class Saturation:
    """A busy fleet.

    Attributes:
        duration_s: how long.
        requests: that ended well.
        failed: that did not.
        probes: answers that were looked at.
        alarms: of these, those that called a process not serving, or a worker not ready.
        silent: of these, those that did not come in time.
    """

    duration_s: float
    requests: int
    failed: int
    probes: int
    alarms: int
    silent: int
    first_alarms: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Results:
    """All strikes, or the saturation alone."""

    strikes: Sequence[StrikeResult]
    saturation: Saturation | None


SHORT = (
    Strike(target="decode-0", place=Place.STEP),
    Strike(target=_OTHER_ROUTER, place=Place.REPORTS),
    Strike(target="prefill-0"),
)
ALL = (
    Strike(target="decode-0", place=Place.STEP),
    Strike(target="prefill-0", place=Place.INBOX),
    Strike(target="decode-1", place=Place.OUTPUTS),
    Strike(target="prefill-1", place=Place.EVENTS),
    Strike(target=_OTHER_ROUTER, place=Place.REPORTS),
    Strike(target="decode-0"),
    Strike(target="prefill-0"),
    Strike(target=_OTHER_ROUTER),
    Strike(target=ETCD),
)
#: With the engine ``torch``.
ENCODE = (
    Strike(target="encode-0", place=Place.TOWER),
    Strike(target="encode-1", place=Place.EVENTS),
    Strike(target="encode-0"),
)


def main() -> None:
    """Run the command line; the exit code is 1 if something was not noticed, noticed wrongly, or stopped requests."""
    parser = make_parser("wedge", __doc__ or "")
    parser.add_argument("--short", action="store_true", help="three strikes, all at once")
    parser.add_argument("--saturate", type=float, metavar="SECONDS", help="only keep the fleet busy for so long")
    parser.add_argument(
        "--engine", type=EngineKind, choices=(EngineKind.MOCK, EngineKind.TORCH), default=EngineKind.MOCK
    )
    arguments = parser.parse_args()
    is_torch = arguments.engine is EngineKind.TORCH
    if is_torch and (arguments.short or arguments.saturate):
        parser.error("--engine torch: only for all strikes")
    report = Report("wedge", revision=arguments.commit)
    # Not uvloop: see benchmarks.chaos_episodes.
    if arguments.saturate:
        results = asyncio.run(_run_saturated(arguments.saturate))
    else:
        groups = [SHORT] if arguments.short else [(strike,) for strike in (ENCODE if is_torch else ALL)]
        results = asyncio.run(_run(groups, arguments.engine))
    report.write(results, arguments.json)
    sys.exit(not is_well(results))


def is_well(results: Results) -> bool:
    """Whether health told the truth."""
    saturation = results.saturation
    is_calm = saturation is None or not (saturation.alarms or saturation.failed)
    return is_calm and all(strike.is_well for strike in results.strikes)


@asynccontextmanager
async def _fleet(engine: EngineKind = EngineKind.MOCK) -> AsyncIterator[tuple[Fleet, Path]]:
    """A fleet, and the folder for files that wedge it."""
    num_encode, num_others = (2, 1) if engine is EngineKind.TORCH else (0, 2)
    config = FleetConfig(
        engine=engine,
        num_encode=num_encode,
        num_prefill=num_others,
        num_decode=num_others,
        router_settings=_ROUTER_SETTINGS,
        modules=dict.fromkeys(("encode", "prefill", "decode", "router"), "benchmarks.wedged_process"),
    )
    with tempfile.TemporaryDirectory(prefix="quartet-wedge-") as name:
        folder = Path(name)
        async with Fleet(config, folder, {**os.environ, WEDGE_VARIABLE: name}) as fleet:
            yield fleet, folder


async def _run(groups: Sequence[Sequence[Strike]], engine: EngineKind) -> Results:
    """Strike by each of ``groups``, whose strikes come together."""
    results: list[StrikeResult] = []
    with LiveLine() as live:
        async with _fleet(engine) as (fleet, folder):
            load = _Load(fleet)
            async with load.running(_NUM_CLIENTS):
                for strikes in groups:
                    await load.wait_ended(_MIN_ENDED)
                    group = await _strike_together(fleet, folder, load, strikes)
                    for result in group:
                        live.say(_line(result))
                    results += group
            if not all(result.is_well for result in results):
                live.say(f"log: {fleet.keep_log(Path('.run/wedge.log'))}")
    return Results(strikes=results, saturation=None)


async def _strike_together(
    fleet: Fleet, folder: Path, load: _Load, strikes: Sequence[Strike]
) -> Sequence[StrikeResult]:
    ended, failed = load.num_ended, len(load.failures)
    seen = await asyncio.gather(*(_notice(fleet, folder, strike) for strike in strikes))
    await load.wait_ended(_MIN_ENDED)
    num_ended = load.num_ended - ended
    for strike in strikes:
        _undo(fleet, folder, strike)
    recovery_s: float | None = None
    began = time.monotonic()
    try:
        recovery_s = round(await fleet.wait_ready(_READY_TIMEOUT_S) - began, 3)
    except TimeoutError as error:
        load.failures.append(str(error))
    num_failed = len(load.failures) - failed
    return [
        StrikeResult(strike=str(strike), ended=num_ended, failed=num_failed, recovery_s=recovery_s, **vars(noticed))
        for strike, noticed in zip(strikes, seen, strict=True)
    ]


@dataclass
class _Noticed:
    """The middle of a ``StrikeResult``."""

    probe_s: float | None = 0.0
    probe: Health = Health.SERVING
    health_s: float | None = 0.0
    health: Health = Health.SERVING
    unplaced_s: float | None = 0.0


async def _notice(fleet: Fleet, folder: Path, strike: Strike) -> _Noticed:
    """Strike, and wait until all who should notice have noticed."""
    noticed, target = _Noticed(), strike.target
    if strike.place is None:
        fleet.freeze(target)
    else:
        wedge_file(folder, strike.place, target).touch()
    began = time.monotonic()
    if target == ETCD:
        return noticed
    looking = [
        _until_not(Health.SERVING, began, partial(_ask_readyz, fleet.http_address(target))),
        _until_not(Health.SERVING, began, partial(_ask_health, fleet.grpc_address(target))),
    ]
    if target in fleet.config.workers:
        looking.append(_until_not(Health.SERVING, began, partial(_ask_router, fleet, target)))
    (noticed.probe_s, noticed.probe), (noticed.health_s, noticed.health), *others = await asyncio.gather(*looking)
    for noticed.unplaced_s, _ in others:
        pass
    return noticed


def _undo(fleet: Fleet, folder: Path, strike: Strike) -> None:
    if strike.place is None:
        fleet.thaw(strike.target)
    else:
        wedge_file(folder, strike.place, strike.target).unlink()


async def _until_not(health: Health, began: float, ask: _Ask) -> tuple[float | None, Health]:
    """Seconds since ``began`` when the answer is no longer ``health``, and the answer."""
    last = health
    while time.monotonic() - began < _GIVE_UP_S:
        before, last = last, await ask()
        if last is not health and (last is not Health.SILENT or before is last):
            return round(time.monotonic() - began, 3), last
        await asyncio.sleep(_POLL_S)
    return None, health


async def _ask_readyz(address: str) -> Health:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(b"GET /readyz HTTP/1.0\r\n\r\n")
                status = (await reader.readline()).split()
            finally:
                writer.close()
    except (TimeoutError, OSError):
        return Health.SILENT
    return Health.SERVING if status[1:2] == [b"200"] else Health.NOT_SERVING


async def _ask_health(address: str) -> Health:
    try:
        async with create_channel(address, None) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return Health.SILENT
    return Health.SERVING if response.status == HealthCheckResponse.SERVING else Health.NOT_SERVING


async def _ask_router(fleet: Fleet, worker: str) -> Health:
    """Whether the router places requests at ``worker``."""
    states = await fleet.worker_states(_ROUTER)
    if not states:
        return Health.SERVING  # it does not answer now: ask again
    return Health.SERVING if states.get(worker) == READY else Health.NOT_SERVING


class _Load:
    """Clients that ask one request after the other, as a load balancer would let them: at a ready router.

    Attributes:
        num_ended: requests that ended well.
        failures: how the others ended.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.num_ended = 0
        self.failures: list[str] = []
        self._clients = Clients(fleet.router_addresses[:1])
        self._rng = random.Random(0)
        self._has_pictures = bool(fleet.config.num_encode)
        self._asks = draw_asks(self._rng, 64, num_tokens=range(30, 90))
        self._numbers = itertools.count()
        self._paths = tuple(RequestPath)

    @asynccontextmanager
    async def running(self, num_clients: int) -> AsyncIterator[None]:
        """Ask within the block."""
        asking = [asyncio.create_task(self._ask()) for _ in range(num_clients)]
        try:
            yield
        finally:
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)
            await self._clients.close()

    async def wait_ended(self, count: int) -> None:
        """Wait until ``count`` more requests have ended, or for long."""
        goal, deadline = self.num_ended + count, time.monotonic() + _GIVE_UP_S
        while self.num_ended < goal and time.monotonic() < deadline:  # noqa: ASYNC110 - many tasks count
            await asyncio.sleep(_POLL_S)

    async def _ask(self) -> None:
        while True:
            number = next(self._numbers)
            path = self._paths[number % len(self._paths)]
            answer = await self._clients.ask(self._draw(number), path)
            if answer.error is None:
                self.num_ended += 1
            else:
                self.failures.append(f"{path}: {answer.error}")

    def _draw(self, number: int) -> Ask:
        if self._has_pictures:  # a picture that was encoded before needs no encoder
            return draw_picture_asks(self._rng, 1)[0]
        return self._asks[number % len(self._asks)]


async def _run_saturated(seconds: float) -> Results:
    with LiveLine() as live:
        async with _fleet() as (fleet, _):
            load = _Load(fleet)
            async with load.running(_NUM_SATURATING):
                with live.showing(lambda elapsed, _: f"{elapsed:.0f} s, {load.num_ended} requests"):
                    saturation = await _watch(fleet, load, seconds)
            if saturation.alarms or saturation.failed:
                live.say(f"log: {fleet.keep_log(Path('.run/wedge.log'))}")
    return Results(strikes=[], saturation=saturation)


async def _watch(fleet: Fleet, load: _Load, seconds: float) -> Saturation:
    """Probe all processes while ``load`` runs."""
    began = time.monotonic()
    heard: list[tuple[str, Health]] = []
    asks: dict[str, _Ask] = {}
    for name in (*fleet.config.workers, *fleet.config.routers):
        asks[f"{name} /readyz"] = partial(_ask_readyz, fleet.http_address(name))
        asks[f"{name} health"] = partial(_ask_health, fleet.grpc_address(name))
    for worker in fleet.config.workers:
        asks[f"{worker} in {_ROUTER}"] = partial(_ask_router, fleet, worker)
    while time.monotonic() - began < seconds:
        heard += zip(asks, await asyncio.gather(*(ask() for ask in asks.values())), strict=True)
        await asyncio.sleep(1.0)
    alarms = [name for name, health in heard if health is Health.NOT_SERVING]
    return Saturation(
        duration_s=round(time.monotonic() - began, 1),
        requests=load.num_ended,
        failed=len(load.failures),
        probes=len(heard),
        alarms=len(alarms),
        silent=sum(health is Health.SILENT for _, health in heard),
        first_alarms=[*alarms[:10], *load.failures[:10]],
    )


def _line(result: StrikeResult) -> str:
    return (
        f"{result.strike}: /readyz {result.probe} after {result.probe_s} s, health {result.health} after "
        f"{result.health_s} s, not placed at after {result.unplaced_s} s; {result.ended} requests ended, "
        f"{result.failed} failed, recovery {result.recovery_s} s"
    )


if __name__ == "__main__":
    main()
