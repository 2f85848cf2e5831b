"""Fuzz: hostile inputs on every surface of real processes, and whether these crash, hang, stall, grow or hold anything.

An etcd, a Router and one Encode, Prefill and Decode worker run, the latter two with the mock engine. Surfaces take
turns in batches: every method of every service (messages that are likely, wild, broken, huge, in any order, with every
end that a client can make), records in etcd, ZMQ frames to the Router's subscriber, the sockets of shared memory, a
source of hand-offs that lies, and bare TCP. After each batch all processes must still run, answer an ordinary request,
and have turned their event loops: none may have used over 200 ms of CPU time while a timer waited. At the end nothing
may be held, and each process's private memory must be back.

A seed gives the same inputs in the same order, batch by batch; only what processes draw at their start (epochs,
tickets) differs. ``--only`` and ``--first-batch`` run a part again. The exit code is 1 if something was found.

Where there are cores, ``--fleets N`` runs N fleets at once, each with a share of the inputs and a seed of its own.

    python -m benchmarks.fuzz --seed 1 --inputs 1000000 --json FILE [--fleets N] [--only SURFACE ...] [--first-batch 0]
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import Protocol, TypeAlias

import grpc

from benchmarks.fuzz_calls import Caller, Told, draw_script, methods_of, play_all
from benchmarks.fuzz_fleet import DECODE, ENCODE, MAX_STALL_S, PREFILL, ROUTER, Fleet, Memory, Stalls, start_fleet
from benchmarks.fuzz_messages import HUGE_SHARE, MessageMaker
from benchmarks.fuzz_peer import LyingSource
from benchmarks.fuzz_sockets import BareTcp, EtcdRecords, EventFrames, ShmSockets
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser

_DIRECTORY = Path(".run/fuzz")
_BATCH_INPUTS = 1_000
# What a process may have grown by at the end.
_MAX_GROWTH_MB = 50.0
# A warm-up of every surface, with many huge messages: allocators, channels and caches reach the size that they keep.
_WARM_UP_INPUTS, _WARM_UP_HUGE_SHARE = 400, 0.2
_NUM_LOOKS = 5
_NUM_TICKETS = 20
_MAX_LISTED = 200

_WORKERS = (ENCODE, PREFILL, DECODE)
_ALL = (ROUTER, *_WORKERS)
#: By surface, its service and who offers it.
SERVICES: Mapping[str, tuple[str, Sequence[str]]] = {
    "router": ("quartet.v1.RouterService", (ROUTER,)),
    "encode": ("quartet.v1.EncodeService", (ENCODE,)),
    "prefill": ("quartet.v1.PrefillService", (PREFILL,)),
    "decode": ("quartet.v1.DecodeService", (DECODE,)),
    "worker": ("quartet.v1.WorkerService", _WORKERS),
    "transfer": ("quartet.v1.TransferService", _WORKERS),
    "health": ("grpc.health.v1.Health", _ALL),
    "reflection": ("grpc.reflection.v1alpha.ServerReflection", _ALL),
    "channelz": ("grpc.channelz.v1.Channelz", _ALL),
}
#: All surfaces, and how many of each round's batches they get.
SURFACES: Mapping[str, int] = {
    "router": 6, "encode": 2, "prefill": 3, "decode": 3, "worker": 1, "transfer": 3, "health": 1, "reflection": 1,
    "channelz": 1, "etcd": 3, "events": 4, "shm": 1, "source": 1, "tcp": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that must not be.

    Attributes:
        seed: of its fleet.
        batch: the surface's batch after which it showed; ``--seed SEED --only SURFACE --first-batch BATCH`` sends that
            again.
        what: crash, hang, probe, stall, error (in a log), held or memory.
    """

    seed: int
    surface: str
    batch: int
    what: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class SurfaceFigures:
    """What one surface got.

    Attributes:
        inputs: messages, frames, records, connections or answers that were sent.
        codes: statuses of calls by name, where the client waited for them.
        inputs_per_s: while its batches ran, without the checks after them.
    """

    inputs: int
    calls: int
    codes: Mapping[str, int]
    inputs_per_s: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """One run.

    Attributes:
        seeds: one for each fleet.
        inputs_per_s: over the whole run, with all checks; of all fleets together.
        findings: the first of them; ``num_findings`` is how many there were, by kind.
        stalls: by process, the worst fleet's; of those that were started again, since then.
        before, after: memory by process: the most during the warm-up, and the least of some looks at the end; of the
            fleet in which it grew most.
    """

    seeds: Sequence[int]
    inputs: int
    inputs_per_s: float
    surfaces: Mapping[str, SurfaceFigures]
    num_findings: Mapping[str, int]
    findings: Sequence[Finding]
    stalls: Mapping[str, Stalls]
    before: Mapping[str, Memory]
    after: Mapping[str, Memory]


class Surface(Protocol):
    """Somewhere inputs go."""

    async def play(self, draw: random.Random, num_inputs: int) -> None:
        """Send about ``num_inputs``, all drawn from ``draw``."""
        ...


class Rpcs:
    """The methods of one service, at any process that offers it."""

    def __init__(
        self, fleet: Fleet, told: Told, service: str, names: Sequence[str], *, huge_share: float = HUGE_SHARE
    ) -> None:
        self._fleet = fleet
        self._told = told
        self._methods = methods_of(service)
        self._huge_share = huge_share
        self._names = names

    async def play(self, draw: random.Random, num_inputs: int) -> None:
        """Make calls until ``num_inputs`` messages were sent."""
        maker = MessageMaker(draw, self._fleet.known, huge_share=self._huge_share)
        async with AsyncExitStack() as stack:
            callers = []
            for name in self._names:
                callers.append(Caller(self._fleet.addresses[name], self._told))
                stack.push_async_callback(callers[-1].close)
            num_drawn = 0
            while num_drawn < num_inputs:
                scripts = [(draw.choice(callers), draw_script(draw, maker, self._methods)) for _ in range(64)]
                num_drawn += sum(max(1, len(script.messages)) for _, script in scripts)
                await play_all([lambda caller=caller, script=script: caller.play(script) for caller, script in scripts])  # type: ignore[misc]


class Run:
    """Batches on one fleet after the other: one that lost a process is given up."""

    def __init__(self, seed: int, say: Callable[[str], None]) -> None:
        self.told: dict[str, Told] = {}
        self.time_s: dict[str, float] = {}
        self.findings: list[Finding] = []
        self.num_findings: Counter[str] = Counter()
        self.stalls: dict[str, Stalls] = {}
        self.memory: dict[str, dict[str, Memory]] = {"before": {}, "after": {}}
        self._seed = seed
        self._say = say
        self._num_over: Mapping[str, int] = {}

    @property
    def num_inputs(self) -> int:
        """Inputs sent until now, without the warm-up."""
        return sum(told.num_inputs for told in self.told.values())

    async def warm_up(self, fleet: Fleet, names: Sequence[str]) -> None:
        """Send some inputs that don't count, then take the memory of before."""
        seen = []
        for name in names:
            await self._play(fleet, name, "warm-up", Told(), _WARM_UP_INPUTS, _WARM_UP_HUGE_SHARE)
            seen.append(fleet.memory())
        await self._settled(fleet, names[0], 0)
        # Allocators give back and take anew: the most that they had is what they may have again.
        self.memory["before"] = {name: max((item[name] for item in seen), key=_private_mb) for name in seen[0]}
        self._num_over = {name: stalls.num_over for name, stalls in (await fleet.stalls()).items()}
        fleet.new_errors()

    async def batch(self, fleet: Fleet, surface: str, number: int, num_inputs: int) -> bool:
        """Run one batch and check the fleet; whether it can take another."""
        told, began = self.told.setdefault(surface, Told()), time.monotonic()
        num_hangs = len(told.hangs)
        try:
            await self._play(fleet, surface, str(number), told, num_inputs)
        except* (OSError, grpc.aio.AioRpcError) as group:
            self._find(surface, number, "probe", f"the batch broke off: {group.exceptions!r}")
        self.time_s[surface] = self.time_s.get(surface, 0.0) + time.monotonic() - began
        for hang in told.hangs[num_hangs:]:
            self._find(surface, number, "hang", hang)
        for line in fleet.new_errors():
            self._find(surface, number, "error", line)
        return await self._check(fleet, surface, number)

    async def end(self, fleet: Fleet) -> None:
        """Check that nothing is held, and that memory is back."""
        await self._settled(fleet, "all", 0)
        seen = []
        for _ in range(_NUM_LOOKS):
            await fleet.probe()
            seen.append(fleet.memory())
        after = {name: min((item[name] for item in seen), key=_private_mb) for name in seen[0]}
        self.memory["after"] = after
        for name, before in self.memory["before"].items():
            growth_mb = after[name].private_mb - before.private_mb
            if growth_mb > _MAX_GROWTH_MB:
                self._find("all", 0, "memory", f"{name} has {growth_mb:.0f} MB more than before")

    async def _play(
        self,
        fleet: Fleet,
        surface: str,
        batch: str,
        told: Told,
        num_inputs: int,
        huge_share: float = HUGE_SHARE,
    ) -> None:
        draw = random.Random(f"{self._seed}/{surface}/{batch}")
        if surface in ("transfer", "prefill"):
            await fleet.make_hand_offs(_NUM_TICKETS)
        if surface == "decode":
            await fleet.make_signed_starts(2)
        await _surface(fleet, told, surface, huge_share).play(draw, num_inputs)

    async def _check(self, fleet: Fleet, surface: str, number: int) -> bool:
        if wrong := await fleet.probe():
            self._find(surface, number, "probe", wrong)
        if ended := fleet.ended:
            for how in ended:
                self._find(surface, number, "crash", how)
            return False
        stalls = await fleet.stalls()
        for name, of_process in stalls.items():
            if of_process.num_over > self._num_over.get(name, 0):
                count = of_process.num_over - self._num_over.get(name, 0)
                detail = f"{name}: {count} over {MAX_STALL_S:g} s; the longest until now {of_process.longest_s:.2f} s"
                self._find(surface, number, "stall", detail)
            longest_s = max(of_process.longest_s, self.stalls[name].longest_s if name in self.stalls else 0.0)
            self.stalls[name] = Stalls(longest_s=longest_s, num_over=of_process.num_over)
        self._num_over = {name: of_process.num_over for name, of_process in stalls.items()}
        return True

    async def _settled(self, fleet: Fleet, surface: str, number: int) -> None:
        for held in await fleet.settle():
            self._find(surface, number, "held", held)

    def _find(self, surface: str, batch: int, what: str, detail: str) -> None:
        self.num_findings[what] += 1
        self._say(f"{surface}, batch {batch}: {what}: {detail}")
        if len(self.findings) < _MAX_LISTED:
            self.findings.append(Finding(seed=self._seed, surface=surface, batch=batch, what=what, detail=detail))


@dataclass
class Turns:
    """Whose turn it is: surfaces in rounds, each as often as its weight says."""

    names: Sequence[str]
    first_batch: int = 0
    _next: Counter[str] = field(default_factory=Counter)
    _round: list[str] = field(default_factory=list)

    def take(self) -> tuple[str, int]:
        """The next surface and its batch's number."""
        if not self._round:
            most = max(SURFACES[name] for name in self.names)
            self._round = [name for turn in range(most) for name in self.names if SURFACES[name] > turn]
        name = self._round.pop(0)
        self._next[name] += 1
        return name, self.first_batch + self._next[name] - 1


async def fuzz(
    seed: int,
    num_inputs: int,
    names: Sequence[str],
    say: Callable[[str], None],
    *,
    first_batch: int = 0,
    batch_inputs: int = _BATCH_INPUTS,
    directory: Path = _DIRECTORY,
    on_run: Callable[[Run], None] = lambda run: None,
) -> Results:
    """Send about ``num_inputs`` to the surfaces ``names``.

    Raises:
        ConfigError: this machine has no etcd.
        RuntimeError: a process ended at its start.
    """
    run, turns, began = Run(seed, say), Turns(names, first_batch), time.monotonic()
    on_run(run)
    while run.num_inputs < num_inputs:
        async with _fleet(run, directory, names, say) as fleet:
            is_whole = True
            while is_whole and (left := num_inputs - run.num_inputs) > 0:
                surface, number = turns.take()
                is_whole = await run.batch(fleet, surface, number, min(batch_inputs, left))
            if is_whole:
                await run.end(fleet)
    figures = {
        name: SurfaceFigures(
            inputs=told.num_inputs,
            calls=told.num_calls,
            codes=dict(told.codes),
            inputs_per_s=round(told.num_inputs / run.time_s[name], 1),
        )
        for name, told in run.told.items()
    }
    return Results(
        seeds=[seed],
        inputs=run.num_inputs,
        inputs_per_s=round(run.num_inputs / (time.monotonic() - began), 1),
        surfaces=figures,
        num_findings=dict(run.num_findings),
        findings=run.findings,
        stalls=run.stalls,
        before=run.memory["before"],
        after=run.memory["after"],
    )


@asynccontextmanager
async def _fleet(run: Run, directory: Path, names: Sequence[str], say: Callable[[str], None]) -> AsyncIterator[Fleet]:
    await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
    async with start_fleet(directory, say) as fleet:
        await run.warm_up(fleet, names)
        yield fleet


def _private_mb(memory: Memory) -> float:
    return memory.private_mb


def _surface(fleet: Fleet, told: Told, name: str, huge_share: float) -> Surface:
    if name in SERVICES:
        return Rpcs(fleet, told, *SERVICES[name], huge_share=huge_share)
    others: Mapping[str, Callable[[Fleet, Told], Surface]] = {
        "etcd": EtcdRecords,
        "events": EventFrames,
        "shm": ShmSockets,
        "source": LyingSource,
        "tcp": BareTcp,
    }
    return others[name](fleet, told)


def merge(parts: Sequence[Results]) -> Results:
    """The results of fleets that ran at the same time."""
    names = list(dict.fromkeys(name for part in parts for name in part.surfaces))
    processes = list(dict.fromkeys(name for part in parts for name in part.after))
    stalled = list(dict.fromkeys(name for part in parts for name in part.stalls))
    worst = {name: max(parts, key=lambda part, name=name: _growth_mb(part, name)) for name in processes}  # type: ignore[misc]
    return Results(
        seeds=[seed for part in parts for seed in part.seeds],
        inputs=sum(part.inputs for part in parts),
        inputs_per_s=round(sum(part.inputs_per_s for part in parts), 1),
        surfaces={name: _merged([part.surfaces[name] for part in parts if name in part.surfaces]) for name in names},
        num_findings=dict(sum((Counter(part.num_findings) for part in parts), Counter())),
        findings=[finding for part in parts for finding in part.findings][:_MAX_LISTED],
        stalls={
            name: Stalls(
                longest_s=max(part.stalls[name].longest_s for part in parts if name in part.stalls),
                num_over=sum(part.stalls[name].num_over for part in parts if name in part.stalls),
            )
            for name in stalled
        },
        before={name: worst[name].before[name] for name in processes},
        after={name: worst[name].after[name] for name in processes},
    )


def _growth_mb(part: Results, process: str) -> float:
    return part.after[process].private_mb - part.before[process].private_mb


def _merged(parts: Sequence[SurfaceFigures]) -> SurfaceFigures:
    return SurfaceFigures(
        inputs=sum(part.inputs for part in parts),
        calls=sum(part.calls for part in parts),
        codes=dict(sum((Counter(part.codes) for part in parts), Counter())),
        inputs_per_s=round(sum(part.inputs_per_s for part in parts), 1),
    )


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What one fleet of several is to do; ``number``: its place in ``_Seen``."""

    number: int
    seed: int
    num_inputs: int
    names: Sequence[str]
    first_batch: int


#: Inputs and findings until now, of each fleet: two numbers each.
_Seen: TypeAlias = "SynchronizedArray[int]"


class _Child:
    """A process of its own for each fleet: the client's side of one keeps a core busy."""

    seen: _Seen

    @staticmethod
    def prepare(seen: _Seen) -> None:
        """Called once in each process."""
        _Child.seen = seen

    @staticmethod
    def run(order: _Order) -> Results:
        """Fuzz one fleet."""

        async def run() -> Results:
            runs: list[Run] = []
            watching = asyncio.create_task(_Child._watch(runs, 2 * order.number))
            try:
                return await fuzz(
                    order.seed,
                    order.num_inputs,
                    order.names,
                    lambda line: print(f"seed {order.seed}: {line}", file=sys.stderr, flush=True),
                    first_batch=order.first_batch,
                    directory=_DIRECTORY / str(order.seed),
                    on_run=runs.append,
                )
            finally:
                watching.cancel()

        return asyncio.run(run())

    @staticmethod
    async def _watch(runs: Sequence[Run], index: int) -> None:
        while True:
            if runs:
                _Child.seen[index : index + 2] = [runs[0].num_inputs, sum(runs[0].num_findings.values())]
            await asyncio.sleep(1.0)


async def _fuzz_fleets(num_fleets: int, seed: int, num_inputs: int, names: Sequence[str], first_batch: int) -> Results:
    """Run so many fleets at once, with seeds from ``seed`` on."""
    orders = [
        _Order(
            number=number,
            seed=seed + number,
            num_inputs=num_inputs // num_fleets + (number < num_inputs % num_fleets),
            names=names,
            first_batch=first_batch,
        )
        for number in range(num_fleets)
    ]
    context, loop = multiprocessing.get_context("spawn"), asyncio.get_running_loop()
    seen: _Seen = context.Array("q", 2 * num_fleets)
    with (
        LiveLine() as line,
        line.showing(lambda elapsed, _: _describe(sum(seen[::2]), sum(seen[1::2]), num_inputs, elapsed)),
        ProcessPoolExecutor(num_fleets, context, _Child.prepare, (seen,)) as executor,
    ):
        return merge(await asyncio.gather(*(loop.run_in_executor(executor, _Child.run, order) for order in orders)))


def main() -> None:
    """Run the command line."""
    parser = make_parser("fuzz", __doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inputs", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--fleets", type=int, default=1, metavar="N", help="at once, with seeds from SEED on")
    parser.add_argument("--only", nargs="+", choices=SURFACES, default=list(SURFACES), metavar="SURFACE")
    parser.add_argument("--first-batch", type=int, default=0, metavar="BATCH", help="of each surface")
    arguments = parser.parse_args()
    if not 1 <= arguments.fleets <= arguments.inputs:
        parser.error("--fleets: must be at least 1, and at most --inputs")
    report = Report("fuzz", revision=arguments.commit)
    results = asyncio.run(
        _fuzz_fleets(arguments.fleets, arguments.seed, arguments.inputs, arguments.only, arguments.first_batch)
    )
    report.write(results, arguments.json)
    sys.exit(1 if results.findings else 0)


def _describe(num_inputs: int, num_findings: int, num_wanted: int, elapsed_s: float) -> str:
    rate = num_inputs / max(elapsed_s, 0.001)
    return f"{num_inputs:,} of {num_wanted:,} inputs, {rate:.0f} a second, {num_findings} findings"


if __name__ == "__main__":
    main()
