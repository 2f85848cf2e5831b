"""Does ``quartet plan`` foretell what live fleets do? The same trace, in virtual time and in real time.

Each case starts a fleet of real processes: a router, and workers with the engine ``mock``, whose steps take a model's
time. A client plays the trace to it over gRPC, several times with other tokens. Before that each fleet gets other
requests, from which its workers learn how long their steps take. The bar is on the median of the runs.

On a busy machine processes wait for a core, which a replay knows nothing of: with ``--precedence`` (as root, on Linux)
those of the benchmark get one first.

    python -m benchmarks.plan --json FILE [--short] [--only CASE,CASE] [--precedence]
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
import uvloop

from benchmarks.processes import CpuMeter
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from benchmarks.stack import Stack
from cli.bench.load import Load, LoadKind
from cli.bench.measure import DurationHistogram
from cli.bench.run import BenchPlan, Limits, RunObserver, SenderConfig, run_plan
from cli.bench.workload import IntRange, WorkloadConfig
from cli.plan.fleet import Speeds, plan_fleet
from cli.plan.search import Shape
from cli.replay.results import PolicyResult, Spread
from cli.replay.simulation import FleetSettings, Simulation
from cli.traces.format import TraceRequest
from cli.traces.generate import Arrivals, SessionConfig, TraceConfig, generate
from quartet.client import QuartetClient
from quartet.config import build
from services.topology.groups import GroupChoices
from services.topology.topology import Topology, read_settings

#: The bar: how far TTFT p50 and p95 may be from what was foretold, as a share of what was measured.
MAX_ERROR = 0.15

_REPOSITORY = Path(__file__).resolve().parent.parent
_TOPOLOGY = _REPOSITORY / "configs" / "mock_fleet.yaml"
_LOG = Path(".run/benchmark-plan.log")
# So slow that what the processes themselves take, and what else the machine does, is a small part.
_ASSIGNMENTS = (
    "engine.mock.timing.prefill_base=90",
    "engine.mock.timing.prefill_linear=0.375",
    "engine.mock.timing.prefill_square=0",
    "engine.mock.timing.decode_base=60",
    "engine.mock.timing.decode_linear=1200",
    "engine.mock.timing.decode_square=0",
    "engine.scheduler.max_num_batched_tokens=2048",
    # As steps are so long, the router's forecasts of their ends are off by more than by default.
    "router.overrides.policy.margin_s=0.05",
)
_SEED = 1
_IDS = IntRange(100, 600)
_TIMEOUT_S = 300.0
# Of each worker, before the first run: steps of many sizes, prompts of several of them included.
_NUM_WARM_UP = 8
_WARM_UP = WorkloadConfig(prompt_tokens=IntRange(100, 3000), output_tokens=IntRange(8, 24), ids=_IDS)
_NUM_RUNS, _NUM_REQUESTS = 5, 150
_NUM_RUNS_SHORT, _NUM_REQUESTS_SHORT = 1, 12
_MS = 1e3
# As ``nice`` counts: the highest.
_PRIORITY = -20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fleet and its load.

    Attributes:
        rate: requests a second, on average.
    """

    about: str
    shape: Shape
    rate: float

    def trace(self, num_requests: int) -> list[TraceRequest]:
        """The requests: chats over shared system prompts."""
        sessions = SessionConfig(
            think_time_s=8.0,
            message_tokens=600.0,
            output_tokens=30.0,
            system_tokens=500.0,
            num_system_prompts=4,
            length_sigma=0.6,
            max_input_tokens=8_000,
        )
        config = TraceConfig(
            arrivals=Arrivals(rate=self.rate), sessions=sessions, max_requests=num_requests, seed=_SEED
        )
        return list(generate(config))


#: By name, what is compared.
CASES: Mapping[str, Case] = {
    "aggregated": Case(about="3 workers that do both", shape=Shape(0, 3), rate=2.2),
    "disaggregated": Case(about="2 Prefill, 1 Decode", shape=Shape(2, 1), rate=2.2),
    "busy": Case(about="1 Prefill, 2 Decode, nearly overloaded", shape=Shape(1, 2), rate=2.5),
    "overloaded": Case(about="2 workers that do both, overloaded", shape=Shape(0, 2), rate=3.5),
}


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Milliseconds."""

    ttft_p50: float
    ttft_p95: float
    itl_p50: float
    itl_p95: float

    @classmethod
    def of(cls, ttft_ms: Spread, itl_ms: Spread) -> Latencies:
        """What a plan shows of these."""
        return cls(ttft_p50=ttft_ms.p50, ttft_p95=ttft_ms.p95, itl_p50=itl_ms.p50, itl_p95=itl_ms.p95)


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """The trace played once.

    Attributes:
        others_cores: what everything else on the machine used meanwhile.
        client_cpu_share: of one core.
        num_failed: requests that did not end well.
    """

    latencies: Latencies
    num_failed: int
    others_cores: float
    client_cpu_share: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One case.

    Attributes:
        foretold: by the replay.
        busy: share of the time for which steps ran in the replay, of Prefill workers (0: none) and of the others.
        measured: medians over the runs.
        error: by latency, ``foretold`` over ``measured``, less 1.
        meets_bar: both errors of TTFT are within the bar, and no request of any run failed: those have no TTFT.
    """

    name: str
    about: str
    rate: float
    foretold: Latencies
    busy: tuple[float, float]
    measured: Latencies
    error: Mapping[str, float]
    meets_bar: bool
    runs: Sequence[LiveRun]


@dataclass(frozen=True, kw_only=True)
class Results:
    """All cases."""

    num_requests: int
    num_runs: int
    has_precedence: bool
    bar: float
    cases: Sequence[Outcome]


def main() -> None:
    """Run the command line; the exit code is 1 if a case misses the bar."""
    parser = make_parser("plan", __doc__ or "")
    parser.add_argument(
        "--short", action="store_true", help=f"one run of {_NUM_REQUESTS_SHORT} requests, whose percentiles say little"
    )
    parser.add_argument("--only", type=_cases, metavar="CASE,CASE", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--precedence", action="store_true", help="take cores before all other processes")
    arguments = parser.parse_args()
    report = Report("plan", packages=("numpy", "uvloop"), revision=arguments.commit)
    num_runs, num_requests = (_NUM_RUNS_SHORT, _NUM_REQUESTS_SHORT) if arguments.short else (_NUM_RUNS, _NUM_REQUESTS)
    results = uvloop.run(measure(arguments.only, num_runs, num_requests, has_precedence=arguments.precedence))
    report.write(results, arguments.json)
    sys.exit(not all(outcome.meets_bar for outcome in results.cases))


async def measure(names: Sequence[str], num_runs: int, num_requests: int, *, has_precedence: bool = False) -> Results:
    """Each of the cases ``names``.

    Raises:
        RuntimeError: a fleet can't be started, or ends.
        OSError: ``has_precedence``, and this user may not take it.
    """
    outcomes: list[Outcome] = []
    with LiveLine() as line:
        for name in names:
            line.say(f"{name}: {CASES[name].about}")
            outcomes.append(await _measure(name, num_runs, num_requests, line.say, has_precedence=has_precedence))
    return Results(
        num_requests=num_requests, num_runs=num_runs, has_precedence=has_precedence, bar=MAX_ERROR, cases=outcomes
    )


def foretell(case: Case, num_requests: int) -> PolicyResult:
    """What ``quartet plan`` shows of the fleet and the trace of ``case``."""
    fleet = plan_fleet(
        _TOPOLOGY,
        _TOPOLOGY.name,
        _ASSIGNMENTS,
        Speeds(),
        None,
        num_blocks=None,
        kv_bytes_per_token=None,
        transfer_gb_per_s=FleetSettings.transfer_gb_per_s,
    )
    return Simulation(case.trace(num_requests), fleet.make_policy, fleet.of(case.shape)).run()


def topology(case: Case) -> Topology:
    """The fleet of ``case``, to be started."""
    counts = {"prefill": case.shape.num_prefill, "decode": case.shape.num_decode}
    choices = GroupChoices(replicas=[f"{name}={count}" for name, count in counts.items()])
    return build(Topology, read_settings(_TOPOLOGY, _ASSIGNMENTS, os.environ, choices))


def compare(name: str, case: Case, replayed: PolicyResult, runs: Sequence[LiveRun]) -> Outcome:
    """The replay of a case beside its live runs."""
    foretold = Latencies.of(replayed.ttft_ms, replayed.itl_ms)
    measured = Latencies(
        **{key: median(getattr(run.latencies, key) for run in runs) for key in Latencies.__dataclass_fields__}
    )
    error = {key: getattr(foretold, key) / getattr(measured, key) - 1 for key in Latencies.__dataclass_fields__}
    return Outcome(
        name=name,
        about=case.about,
        rate=case.rate,
        foretold=foretold,
        busy=(replayed.prefill_busy, replayed.decode_busy),
        measured=measured,
        error=error,
        meets_bar=all(abs(error[key]) <= MAX_ERROR for key in ("ttft_p50", "ttft_p95"))
        and not any(run.num_failed for run in runs),
        runs=runs,
    )


def spread_of(histogram: DurationHistogram) -> Spread:
    """Percentiles as replays have them: between two values in order."""
    if not histogram.count:
        return Spread()
    values_s, shares = histogram.distribution()
    counts = np.diff(np.rint(shares * histogram.count), prepend=0.0).astype(int)
    values_ms: npt.NDArray[np.float64] = _MS * np.repeat(values_s, counts)
    p50, p95 = map(float, np.percentile(values_ms, (50, 95)))
    return Spread(mean=float(values_ms.mean()), p50=p50, p95=p95)


def take_precedence(pids: Sequence[int]) -> None:
    """Have all threads of ``pids`` get a core before those of other processes. Raises ``OSError``."""
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(task.name), _PRIORITY)
        # Linux may share cores out to sessions first, whatever the priority within each.
        group = Path(f"/proc/{pid}/autogroup")
        if group.exists():
            try:
                group.write_text(str(_PRIORITY), encoding="ascii")
            except OSError as error:
                if error.errno != errno.EINVAL:  # it is in no session's group, so its own priority counts
                    raise


async def _measure(
    name: str, num_runs: int, num_requests: int, say: Callable[[str], None], *, has_precedence: bool
) -> Outcome:
    case = CASES[name]
    replayed = foretell(case, num_requests)
    runs: list[LiveRun] = []
    async with Stack(topology(case), _LOG, say) as stack, QuartetClient(stack.router_address) as client:
        if has_precedence:
            take_precedence([os.getpid(), *stack.pids.values()])
        await _warm_up(client, case.shape.size)
        for number in range(num_runs):
            meter = CpuMeter({"client": os.getpid(), **stack.pids})
            latencies, num_failed, cpu_share = await _play(client, case.trace(num_requests), number)
            if stack.ended:
                raise RuntimeError("; ".join(stack.ended))
            runs.append(
                LiveRun(
                    latencies=latencies,
                    num_failed=num_failed,
                    others_cores=meter.read().others_share,
                    client_cpu_share=cpu_share,
                )
            )
            say(f"  {number}: {_describe(latencies)}, others used {runs[-1].others_cores:.2f} cores")
    outcome = compare(name, case, replayed, runs)
    say(f"  foretold: {_describe(outcome.foretold)}")
    return outcome


async def _warm_up(client: QuartetClient, num_workers: int) -> None:
    plan = BenchPlan(
        loads=(Load(LoadKind.CONCURRENCY, 2 * num_workers),),
        limits=Limits(warmup_s=0.0, duration_s=None, max_requests=_NUM_WARM_UP * num_workers),
        workload=_WARM_UP,
        sender=SenderConfig(timeout_s=_TIMEOUT_S),
        seed=10_000,
    )
    await run_plan(client, plan, RunObserver())


async def _play(client: QuartetClient, trace: Sequence[TraceRequest], seed: int) -> tuple[Latencies, int, float]:
    plan = BenchPlan(
        loads=(Load(LoadKind.REPLAY, 1.0),),
        limits=Limits(warmup_s=0.0, duration_s=None, max_requests=None),
        workload=WorkloadConfig(prompt_tokens=_IDS, output_tokens=_IDS, ids=_IDS, trace=trace),
        sender=SenderConfig(timeout_s=_TIMEOUT_S),
        seed=seed,
    )
    [point] = await run_plan(client, plan, RunObserver())
    measured = point.measured
    latencies = Latencies.of(spread_of(measured.ttft), spread_of(measured.itl))
    return latencies, len(trace) - measured.finished, point.result.client.cpu_share


def _describe(latencies: Latencies) -> str:
    return (
        f"TTFT {latencies.ttft_p50:.0f} / {latencies.ttft_p95:.0f} ms, "
        f"ITL {latencies.itl_p50:.1f} / {latencies.itl_p95:.1f} (p50 / p95)"
    )


def _cases(names: str) -> list[str]:
    found = names.split(",")
    for name in found:
        if name not in CASES:
            raise argparse.ArgumentTypeError(f"there is no case {name!r}; there are {', '.join(CASES)}")
    return found


if __name__ == "__main__":
    main()
