"""A storm of cancels: does work go on for clients that are gone, and is the fleet as well as before?

Two Prefill and two Decode on the mock engine, or with Encode and pictures on torch, get hundreds of requests for
endless answers at once, by all three paths. Each is cancelled at a random moment: by a cancel message, by dropping the
call, or by the death of the client's process. After each round a probe must be answered as fast as in an idle fleet, no
block may be held, and workers' traces say what was computed for whom: after an engine has got a cancel, the step that
runs may end, and no other one may begin.

    python -m benchmarks.cancel_storm --json FILE [--short] [--engine mock|torch]
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import median

from benchmarks.cancel_clients import draw_endless, generate
from benchmarks.chaos_client import Ask, draw_asks
from benchmarks.chaos_fleet import HAND_OFF_TTL_S, Fleet, FleetConfig
from benchmarks.children import start_child
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from benchmarks.traced_worker import TRACE_VARIABLE, Traced, media_key, read_traces
from quartet.client import QuartetClient, RequestPath
from quartet.discovery.base import Role
from quartet.engine.settings import EngineKind
from quartet.errors import ServingError

_PATHS = tuple(RequestPath)
_MAX_SLOWER_S = 1.0
_NUM_PROBES = 5
_PROBE_TOKENS = 16
# Cancels that the last clients sent have reached all engines by then, unless something is lost.
_SETTLE_TIMEOUT_S = 2 * HAND_OFF_TTL_S + 3.0
_TRACED = "benchmarks.traced_worker"
# So that prompts and the waits between phases take long enough to be struck.
_SLOW = {"speed_up": 0.5}


class Way(StrEnum):
    """How a request is cancelled."""

    MESSAGE = "message"
    DROP = "drop"
    VANISH = "vanish"


class Phase(StrEnum):
    """How far a request had got when its client cancelled it."""

    QUEUE = "queue"  # in the router's queue, or a worker's
    ENCODE = "encode"
    PREFILL = "prefill"
    TRANSFER = "transfer"  # prefilled, and not in a decode step yet
    DECODE = "decode"


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """One request and when its client cancelled it, in monotonic seconds."""

    ask: Ask
    path: RequestPath
    way: Way
    at: float


@dataclass(frozen=True, kw_only=True)
class PhaseResult:
    """What was computed for the requests that were cancelled in one phase.

    Attributes:
        cancels: requests.
        most_steps: after an engine got a request's cancel, the most steps that ended with that request in them.
        most_tokens: and the most tokens.
        median_last_s: from the client's cancel to the end of the last step for it, of those that had a later one.
        longest_last_s: the longest such time.
    """

    cancels: int
    most_steps: int
    most_tokens: int
    median_last_s: float
    longest_last_s: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """Sums over all rounds.

    Attributes:
        rounds: storms.
        cancels: requests cancelled, by path and way.
        phases: by the phase in which a cancel struck.
        missed: requests that an engine went on with because no cancel reached it: path, way and phase.
        held: blocks that were not free, or requests that still ran, two leases after a round.
        idle_probe_s: longest time of a probe in the idle fleet.
        probe_s: the first probe's time after each round.
        failed_probes: probes with no answer or another one.
    """

    engine: str
    rounds: int
    requests: int
    cancels: Mapping[str, int]
    phases: Mapping[str, PhaseResult]
    missed: Sequence[str]
    held: int
    idle_probe_s: float
    probe_s: Sequence[float]
    failed_probes: int
    errors: Sequence[str]


def main() -> None:
    """Run the command line; the exit code is 1 unless all went well."""
    parser = make_parser("cancel_storm", __doc__ or "")
    parser.add_argument("--short", action="store_true", help="one round of 90 requests; 24 on torch")
    parser.add_argument(
        "--engine", type=EngineKind, choices=(EngineKind.MOCK, EngineKind.TORCH), default=EngineKind.MOCK
    )
    arguments = parser.parse_args()
    is_torch = arguments.engine is EngineKind.TORCH
    plan = _Plan(
        engine=arguments.engine,
        num_rounds=1 if arguments.short else 4,
        num_requests=(24 if is_torch else 90) if arguments.short else (90 if is_torch else 300),
        num_pictures=2 if is_torch else 0,
        window_s=4.0 if is_torch else 2.0,
    )
    report = Report("cancel_storm", revision=arguments.commit)
    # Not uvloop: see benchmarks.chaos_episodes.
    results = asyncio.run(_run(plan))
    report.write(results, arguments.json)
    sys.exit(not (is_clean(results) and is_prompt(results)))


def is_clean(results: Results) -> bool:
    """Whether nothing was left, and at most one step was computed after each cancel."""
    is_over = all(phase.most_steps <= 1 for phase in results.phases.values())
    return is_over and not (results.missed or results.held or results.failed_probes or results.errors)


def is_prompt(results: Results) -> bool:
    """Whether probes after the rounds were as fast as in an idle fleet, but for a second."""
    return max(results.probe_s) <= results.idle_probe_s + _MAX_SLOWER_S


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """How much to do.

    Attributes:
        num_pictures: two of three requests of a group of this size have a picture.
        window_s: requests are cancelled within so many seconds after they were sent.
    """

    engine: EngineKind
    num_rounds: int
    num_requests: int
    num_pictures: int
    window_s: float

    @property
    def fleet(self) -> FleetConfig:
        is_torch = self.engine is EngineKind.TORCH
        # Room for a part of the requests: the others wait in the router.
        engine = {"num_blocks": 512} if is_torch else {"num_blocks": 2048, "mock": _SLOW}
        settings = {"engine": engine}
        return FleetConfig(
            engine=self.engine,
            num_encode=1 if is_torch else 0,
            num_routers=2,
            worker_settings=settings,
            modules=dict.fromkeys(("encode", "prefill", "decode"), _TRACED),
        )


async def _run(plan: _Plan) -> Results:
    with tempfile.TemporaryDirectory(prefix="quartet-storm-") as name:
        folder = Path(name)
        async with Fleet(plan.fleet, folder, {**os.environ, TRACE_VARIABLE: name}) as fleet:
            storm = _Storm(plan, fleet)
            with LiveLine() as live:
                await storm.probe_idle()
                for number in range(plan.num_rounds):
                    await storm.round(number)
                    live.say(f"round {number}: probe {storm.probe_s[-1]:.3f} s, {storm.held} held")
                if storm.held or storm.errors:
                    live.say(f"log: {fleet.keep_log(Path('.run/cancel_storm.log'))}")
        return storm.results(read_traces(folder))


@dataclass
class _Storm:
    """Rounds on one fleet."""

    plan: _Plan
    fleet: Fleet
    cancelled: list[Cancelled] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    idle_s: list[float] = field(default_factory=list)
    probe_s: list[float] = field(default_factory=list)
    held: int = 0
    failed_probes: int = 0
    _expected: list[int] = field(default_factory=list)

    async def probe_idle(self) -> None:
        """Measure probes before anything else."""
        for _ in range(_NUM_PROBES):
            self.idle_s.append(await self._probe())

    async def round(self, number: int) -> None:
        """Send requests, cancel them all, and look at what is left."""
        rng = random.Random(number)
        # About as many vanish as are cancelled in each other way.
        num_vanish = self.plan.num_requests // 9
        num_rest = self.plan.num_requests // 3 - num_vanish
        async with AsyncExitStack() as exits:
            client = await exits.enter_async_context(QuartetClient(self.fleet.router_addresses))
            works: list[Awaitable[None]] = []
            for path in _PATHS:
                vanishing = self._vanish(exits, path, f"{number}/{path}/vanish", num_vanish, rng.random())
                works.append(await vanishing)
                for ask in draw_endless(f"{number}/{path}", num_rest, num_pictures=self._num_pictures(num_rest)):
                    way = rng.choice((Way.MESSAGE, Way.DROP))
                    works.append(self._cancel(client, ask, path, way, rng.random() * self.plan.window_s))
            await asyncio.gather(*works)
            self.probe_s.append(await self._probe())
        self.held += await self.fleet.num_blocks_held(_SETTLE_TIMEOUT_S)

    def results(self, traces: Sequence[Traced]) -> Results:
        """All there is to say."""
        histories = gather_histories(traces, self.cancelled)
        by_phase: defaultdict[Phase, list[tuple[Cancelled, History]]] = defaultdict(list)
        for cancelled in self.cancelled:
            history = histories[str(cancelled.ask.seed)]
            by_phase[history.phase_at(cancelled.at, len(cancelled.ask.token_ids))].append((cancelled, history))
        ways: defaultdict[str, int] = defaultdict(int)
        for cancelled in self.cancelled:
            ways[f"{cancelled.path} {cancelled.way}"] += 1
        return Results(
            engine=self.plan.engine.value,
            rounds=self.plan.num_rounds,
            requests=len(self.cancelled),
            cancels=dict(sorted(ways.items())),
            phases={phase.value: _phase_result(by_phase[phase]) for phase in Phase if by_phase[phase]},
            missed=[
                f"{cancelled.path} {cancelled.way} {phase}, last step after {history.last_s(cancelled.at)} s"
                for phase, requests in by_phase.items()
                for cancelled, history in requests
                if history.is_missed(len(cancelled.ask.token_ids))
            ],
            held=self.held,
            idle_probe_s=round(max(self.idle_s), 3),
            probe_s=[round(seconds, 3) for seconds in self.probe_s],
            failed_probes=self.failed_probes,
            errors=self.errors,
        )

    def _num_pictures(self, num_requests: int) -> int:
        return num_requests * 2 // 3 if self.plan.num_pictures else 0

    async def _vanish(
        self, exits: AsyncExitStack, path: RequestPath, seed: str, count: int, moment: float
    ) -> asyncio.Task[None]:
        """Start a process of clients; the task lets it send and kills it."""
        num_pictures = self._num_pictures(count)
        child = await exits.enter_async_context(
            start_child("benchmarks.cancel_clients", list(self.fleet.router_addresses), path, seed, count, num_pictures)
        )
        await child.read()

        async def send_and_kill() -> None:
            child.send("go")
            await asyncio.sleep(0.2 + moment * self.plan.window_s)
            at = time.monotonic()
            os.kill(child.pid, signal.SIGKILL)
            self.cancelled += [
                Cancelled(ask=ask, path=path, way=Way.VANISH, at=at)
                for ask in draw_endless(seed, count, num_pictures=num_pictures)
            ]

        return asyncio.create_task(send_and_kill())

    async def _cancel(self, client: QuartetClient, ask: Ask, path: RequestPath, way: Way, after_s: float) -> None:
        """Send ``ask`` and cancel it after ``after_s`` seconds."""
        stream = generate(client, ask, path)

        async def follow() -> None:
            async for _ in stream:
                pass

        following = asyncio.create_task(follow())
        await asyncio.sleep(after_s)
        self.cancelled.append(Cancelled(ask=ask, path=path, way=way, at=time.monotonic()))
        if way is Way.MESSAGE:
            await stream.cancel()
        else:
            following.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await following
        except ServingError as error:
            self.errors.append(f"{path} {way}: {type(error).__name__}: {error.message}")
        await stream.aclose()

    async def _probe(self) -> float:
        """Seconds until a short request is answered, whatever is still under way."""
        [ask] = draw_asks(random.Random("probe"), 1, num_tokens=range(_PROBE_TOKENS, _PROBE_TOKENS + 1))
        began = time.monotonic()
        try:
            async with QuartetClient(self.fleet.router_addresses) as client:
                completion = await client.complete(
                    token_ids=ask.token_ids, sampling=ask.sampling, seed=1, timeout_s=30.0
                )
                token_ids = list(completion.choices[0].token_ids)
        except ServingError:
            token_ids = []
        self._expected = self._expected or token_ids
        self.failed_probes += not token_ids or token_ids != self._expected
        return time.monotonic() - began


# What the traces say of one request; pure.


@dataclass(kw_only=True)
class History:
    """The trace of one request and its media, by role: each list is in order of time."""

    submits: defaultdict[Role, list[float]] = field(default_factory=lambda: defaultdict(list))
    cancels: list[tuple[str, float]] = field(default_factory=list)
    steps: list[tuple[Traced, int]] = field(default_factory=list)

    def phase_at(self, at: float, num_prompt_tokens: int) -> Phase:
        """How far it had got."""
        if any(step.began_at <= at for step, _ in self._steps_of(Role.DECODE)):
            return Phase.DECODE
        begun = [(step, count) for step, count in self._steps_of(Role.PREFILL) if step.began_at <= at]
        if begun:
            num_done = sum(count for step, count in begun if step.ended_at <= at)
            return Phase.TRANSFER if num_done >= num_prompt_tokens else Phase.PREFILL
        # An item that is encoded is in the tower's queue or in the tower.
        is_submitted = bisect_right(self.submits[Role.ENCODE], at) > 0
        is_encoded = any(step.ended_at <= at for step, _ in self._steps_of(Role.ENCODE))
        return Phase.ENCODE if is_submitted and not is_encoded else Phase.QUEUE

    def after_cancel(self) -> tuple[int, int]:
        """Steps that ended, and tokens that were computed, after the engine that computed them got the cancel."""
        late = [
            count
            for worker, at in self.cancels
            for step, count in self.steps
            if step.worker == worker and step.ended_at > at
        ]
        return len(late), sum(late)

    def last_s(self, at: float) -> float | None:
        """Seconds from ``at`` to the end of the last step with it; ``None``: no step ended after ``at``."""
        ended_at = max((step.ended_at for step, _ in self.steps), default=at)
        return ended_at - at if ended_at > at else None

    def is_missed(self, num_prompt_tokens: int) -> bool:
        """Whether an engine had begun it and never got a cancel. A prefill may have ended before."""
        cancelled = {worker for worker, _ in self.cancels}
        decoded = {step.worker for step, _ in self._steps_of(Role.DECODE)}
        num_prefilled = sum(count for _, count in self._steps_of(Role.PREFILL))
        prefilled = {step.worker for step, _ in self._steps_of(Role.PREFILL) if num_prefilled < num_prompt_tokens}
        return not (decoded | prefilled) <= cancelled

    def _steps_of(self, role: Role) -> list[tuple[Traced, int]]:
        return [(step, count) for step, count in self.steps if step.role is role]


def gather_histories(traces: Iterable[Traced], cancelled: Iterable[Cancelled]) -> Mapping[str, History]:
    """By seed, the history of each of the requests ``cancelled``, also of those that no worker ever got."""
    seeds = {}
    for one in cancelled:
        seeds[str(one.ask.seed)] = str(one.ask.seed)
        seeds |= {media_key(file): str(one.ask.seed) for file in one.ask.media}
    histories: defaultdict[str, History] = defaultdict(History)
    for traced in traces:
        for key, count in traced.num_tokens.items():
            history = histories[seeds.get(key, "")]
            if traced.what == "submit":
                history.submits[traced.role].append(traced.began_at)
            elif traced.what == "cancel":
                history.cancels.append((traced.worker, traced.began_at))
            else:
                history.steps.append((traced, count))
    return histories


def _phase_result(requests: Sequence[tuple[Cancelled, History]]) -> PhaseResult:
    after = [history.after_cancel() for _, history in requests]
    last_s = [seconds for cancelled, history in requests if (seconds := history.last_s(cancelled.at)) is not None]
    return PhaseResult(
        cancels=len(requests),
        most_steps=max(num_steps for num_steps, _ in after),
        most_tokens=max(num_tokens for _, num_tokens in after),
        median_last_s=round(median(last_s), 3) if last_s else 0.0,
        longest_last_s=round(max(last_s), 3) if last_s else 0.0,
    )


if __name__ == "__main__":
    main()
