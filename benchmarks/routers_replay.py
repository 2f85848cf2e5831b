"""Several routers on one fleet, in replays: how much later do first tokens come than with one router?

Eight workers, load reports 50 ms old, kv_aware. Each seed decides ties and has requests of its own: so many of the
recorded trace, from another place in it, at 1.5x. Without ``--trace`` it has a generated one. Time is virtual, so the
machine changes only how long the benchmark takes. FILE is written anew after each replay.

    python -m benchmarks.routers_replay --json FILE [--trace FILE] [--plot FILE.png] [--seeds 5] [--requests 500]
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from statistics import mean

from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from benchmarks.routing_cases import CASES
from cli.replay.results import Spread
from cli.replay.simulation import FleetSettings, Simulation
from cli.traces.format import TraceRequest, read_trace
from quartet.discovery.base import Rank
from router.policy.base import Decision, Option, Peers, Pending, Snapshot
from router.policy.kv_aware import KvAwareConfig, KvAwarePolicy, PeerConfig

_STDOUT = "-"
_NUM_WORKERS, _LOAD_AGE_S, _TOLD_S = 8, 0.05, 0.002
_SPEED, _STRIDE = 1.5, 2_400
_NUM_ROUTERS = (1, 2, 4, 8, 16)
# Parts are tried with these, and with fewer seeds.
_PART_ROUTERS, _NUM_PART_SEEDS = (4, 16), 3
# A restarted router has no index for as long as eight workers' snapshots of 2.2 million blocks take to come, beside
# other work. The recorded requests come together, every 2 s of a replay: those of the eighth second meet each rebuild.
_RESTART_EVERY_S, _RESTART_AT_S, _REBUILD_S = 10.0, 7.0, 2.1
# With at least two workers a router, and with fewer.
_MOST, _MOST_WITH_MANY_ROUTERS = 1.15, 1.3


class Rule(StrEnum):
    """By what routers keep out of each other's way."""

    #: As routers do: by turns where they tell each other, else by each rank's own router.
    OWN = "own"
    #: Each rank is one router's first, also where they tell each other.
    OWNERS = "owners"
    #: By nothing but what they are told.
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Routers, and how they share the workers.

    Attributes:
        told_s: so old is what routers tell each other; ``None``: they tell nothing.
        part: the part of the design that is tried; empty: none, it is as routers are.
        without_index_s: the first router has no index for so long of every ten seconds; 0: it keeps it.
        limit: of the mean TTFT over one router's; ``None``: nothing is wanted.
    """

    name: str
    num_routers: int
    told_s: float | None = _TOLD_S
    rule: Rule = Rule.OWN
    peers: PeerConfig = field(default_factory=PeerConfig)
    part: str = ""
    without_index_s: float = 0.0
    limit: float | None = None

    @property
    def fleet(self) -> FleetSettings:
        """What the requests are replayed on."""
        return FleetSettings(
            num_workers=_NUM_WORKERS,
            num_routers=self.num_routers,
            load_age_s=_LOAD_AGE_S,
            bookings_age_s=self.told_s,
        )


def _setups() -> list[Setup]:
    several = [
        Setup(
            name=f"telling_{number}",
            num_routers=number,
            limit=None if number == 1 else _MOST if 2 * number <= _NUM_WORKERS else _MOST_WITH_MANY_ROUTERS,
        )
        for number in _NUM_ROUTERS
    ]
    silent = [Setup(name=f"silent_{number}", num_routers=number, told_s=None) for number in _NUM_ROUTERS[1:]]
    restarted = [
        Setup(name="restarted_4", num_routers=4, without_index_s=_REBUILD_S),
        Setup(name="blind_4", num_routers=4, without_index_s=_RESTART_EVERY_S),
    ]
    return [*several, *silent, *restarted, *(part for number in _PART_ROUTERS for part in _parts(number))]


def _parts(num_routers: int) -> list[Setup]:
    return [
        Setup(
            name=f"at_once_{num_routers}",
            num_routers=num_routers,
            told_s=0.0,
            rule=Rule.NONE,
            part="told in no time, no turns",
        ),
        Setup(
            name=f"no_turns_{num_routers}", num_routers=num_routers, rule=Rule.NONE, part="told after 2 ms, no turns"
        ),
        Setup(
            name=f"owners_{num_routers}",
            num_routers=num_routers,
            rule=Rule.OWNERS,
            peers=PeerConfig(report_s=0.003, doubt_s=0.0),
            part="the same, and each rank is first one router's, the next may have it 3 ms later",
        ),
        Setup(
            name=f"short_turns_{num_routers}",
            num_routers=num_routers,
            peers=PeerConfig(turn_s=0.003, open_s=0.001),
            part="told after 2 ms, turns of 3 ms, open for 1",
        ),
        Setup(
            name=f"late_{num_routers}",
            num_routers=num_routers,
            told_s=0.005,
            peers=PeerConfig(turn_s=0.005, open_s=0.002),
            part="told after 5 ms, turns of 5 ms, open for 2: some still meet",
        ),
    ]


#: By name, in the order of the tables.
SETUPS: Mapping[str, Setup] = {setup.name: setup for setup in _setups()}
_ONE, _WITH_INDEX = "telling_1", "telling_4"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A replay that is still to run."""

    setup: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """One replay.

    Attributes:
        requests_without_index: by worker, what the first router sent while it had no index.
    """

    setup: str
    seed: int
    ttft_ms: Spread
    reuse_ratio: float
    requests_completed: int
    requests_without_index: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Over:
    """A mean TTFT over another setup's with the same seed: mean, least and most of the seeds."""

    mean: float
    least: float
    most: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """The runs of one setup.

    Attributes:
        part, without_index_s, limit: as in ``Setup``.
        ttft_ms_mean, ttft_ms_p99: means over the runs.
        over_one: over one router's.
        over_with_index: over that of as many routers that all keep their index; ``None``: this is that.
        requests_without_index: sums over the runs.
    """

    name: str
    num_routers: int
    tells: bool
    part: str
    without_index_s: float
    num_runs: int
    ttft_ms_mean: float
    ttft_ms_p99: float
    over_one: Over
    over_with_index: Over | None
    limit: float | None
    requests_without_index: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured; ``trace`` names the recorded one, if there was any."""

    trace: str
    num_workers: int
    num_requests: int
    rows: Sequence[Row]
    runs: Sequence[Run]


def main() -> None:
    """Run the command line."""
    parser = make_parser("routers_replay", __doc__)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the recorded trace")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw mean TTFT against the number of routers")
    parser.add_argument("--seeds", type=int, default=5, help=f"replays of each row; of parts {_NUM_PART_SEEDS} at most")
    parser.add_argument("--requests", type=int, default=500, help="of each replay")
    parser.add_argument("--processes", type=int, default=2, help="replays at a time")
    arguments = parser.parse_args()
    report = Report("routers_replay", packages=("numpy", "xxhash"), revision=arguments.commit)
    trace: Path | None = arguments.trace
    runs: list[Run] = []

    def results() -> Results:
        return Results(
            trace="" if trace is None else trace.name,
            num_workers=_NUM_WORKERS,
            num_requests=arguments.requests,
            rows=rows_of(runs),
            runs=sorted(runs, key=lambda run: (list(SETUPS).index(run.setup), run.seed)),
        )

    def save() -> None:
        if arguments.json != _STDOUT:
            report.write(results(), arguments.json)

    _replay_all(find_jobs(arguments.seeds), trace, arguments.requests, arguments.processes, runs, save)
    report.write(results(), arguments.json)
    if arguments.plot is not None:
        plot(results().rows, arguments.plot)


def find_jobs(num_seeds: int) -> list[Job]:
    """All replays, with the seed outermost, so that a file of an interrupted run has something of each row."""
    return [
        Job(setup=setup.name, seed=seed)
        for seed in range(num_seeds)
        for setup in SETUPS.values()
        if not setup.part or seed < _NUM_PART_SEEDS
    ]


def replay(job: Job, trace: Path | None, num_requests: int) -> Run:
    """Run one replay. Raises ``TraceError``."""
    setup, policies = SETUPS[job.setup], list[_Policy]()

    def make_policy(rng: random.Random) -> _Policy:
        policies.append(_Policy(setup, rng))
        return policies[-1]

    requests = requests_of(trace, job.seed, num_requests)
    result = Simulation(requests, make_policy, setup.fleet, job.seed).run()
    return Run(
        setup=job.setup,
        seed=job.seed,
        ttft_ms=result.ttft_ms,
        reuse_ratio=result.reuse_ratio,
        requests_completed=result.requests_completed,
        requests_without_index=list(policies[0].num_without_index.values()),
    )


def requests_of(trace: Path | None, seed: int, num_requests: int) -> list[TraceRequest]:
    """The requests that ``seed`` has of ``trace``, or of a generated one. Raises ``TraceError``."""
    if trace is None:
        return CASES["bursty"].requests(None, seed)[:num_requests]
    recorded = _recorded(trace)
    first = seed * _STRIDE % max(len(recorded) - num_requests, 1)
    begins_at = recorded[first].arrival_s
    return [
        replace(request, arrival_s=(request.arrival_s - begins_at) / _SPEED)
        for request in recorded[first : first + num_requests]
    ]


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """A row for each setup that ran with a seed with which one router ran, too."""
    by_seed = {(run.setup, run.seed): run for run in runs}
    rows = []
    for setup in SETUPS.values():
        ran = [run for run in runs if run.setup == setup.name and (_ONE, run.seed) in by_seed]
        if not ran:
            continue
        by_worker = [run.requests_without_index for run in ran]
        pairs = [(run, by_seed[_WITH_INDEX, run.seed]) for run in ran if (_WITH_INDEX, run.seed) in by_seed]
        rows.append(
            Row(
                name=setup.name,
                num_routers=setup.num_routers,
                tells=setup.told_s is not None,
                part=setup.part,
                without_index_s=setup.without_index_s,
                num_runs=len(ran),
                ttft_ms_mean=mean(run.ttft_ms.mean for run in ran),
                ttft_ms_p99=mean(run.ttft_ms.p99 for run in ran),
                over_one=_over([(run, by_seed[_ONE, run.seed]) for run in ran]),
                over_with_index=_over(pairs) if setup.without_index_s and pairs else None,
                limit=setup.limit,
                requests_without_index=[sum(counts) for counts in zip(*by_worker, strict=True)],
            )
        )
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw mean TTFT over one router's against the number of routers, telling and silent, with the limits."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    whole = [row for row in rows if not row.part and not row.without_index_s]
    for label, colour, lines in (
        ("routers that tell each other", "#219ebc", [row for row in whole if row.tells]),
        ("silent routers", "#d1495b", [row for row in whole if not row.tells or row.num_routers == 1]),
    ):
        means = [row.over_one.mean for row in lines]
        spans = [
            [row.over_one.mean - row.over_one.least for row in lines],
            [row.over_one.most - row.over_one.mean for row in lines],
        ]
        numbers = [row.num_routers for row in lines]
        axes.errorbar(numbers, means, yerr=spans, marker="o", capsize=4, color=colour, label=label)
    for limit in sorted({row.limit for row in whole if row.limit is not None}):
        numbers = [row.num_routers for row in whole if row.limit == limit]
        axes.hlines(limit, min(numbers) / 1.2, max(numbers) * 1.2, colors="#264653", linestyles="dashed")
        axes.annotate(f"at most {limit:g}", (min(numbers) / 1.2, limit), xytext=(0, 4), textcoords="offset points")
    axes.set_xscale("log", base=2)
    axes.set_xticks(_NUM_ROUTERS, [str(number) for number in _NUM_ROUTERS])
    axes.set_xlabel(f"routers, on {_NUM_WORKERS} workers")
    axes.set_ylabel("mean TTFT over one router's")
    axes.set_ylim(bottom=0.9)
    axes.legend(loc="upper left", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


class _Policy:
    """kv_aware, as ``setup`` has it; the first router is without its index at times."""

    name = "kv_aware"

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self._setup = setup
        self._policy = KvAwarePolicy(rng, KvAwareConfig(peers=setup.peers))
        self.num_without_index: dict[Rank, int] = {}

    def assign(self, queued: Sequence[Pending], snapshot: Snapshot) -> Decision:
        since_restart_s = (snapshot.now - _RESTART_AT_S) % _RESTART_EVERY_S
        has_none = snapshot.peers.number == 0 and since_restart_s < self._setup.without_index_s
        if has_none:
            queued = [replace(pending, num_cached_tokens={}, lower_tokens={}) for pending in queued]
        decision = self._policy.assign(queued, self._seen(snapshot))
        if not self.num_without_index:
            self.num_without_index = {candidate.rank: 0 for candidate in snapshot.decode}
        if has_none:
            for placement in decision.placements:
                if placement is not None:
                    self.num_without_index[placement.decode] += 1
        return decision

    def explain(self, pending: Pending, snapshot: Snapshot) -> Sequence[Option]:
        return self._policy.explain(pending, self._seen(snapshot))

    def _seen(self, snapshot: Snapshot) -> Snapshot:
        match self._setup.rule:
            case Rule.OWN:
                return snapshot
            case Rule.OWNERS:
                return replace(snapshot, peers=replace(snapshot.peers, tell_bookings=False))
            case Rule.NONE:
                return replace(snapshot, peers=Peers())


def _replay_all(
    jobs: Sequence[Job],
    trace: Path | None,
    num_requests: int,
    num_processes: int,
    runs: list[Run],
    save: Callable[[], None],
) -> None:
    began = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    with LiveLine() as line, ProcessPoolExecutor(num_processes, spawn) as pool:
        futures = [pool.submit(replay, job, trace, num_requests) for job in jobs]
        try:
            for number, future in enumerate(as_completed(futures), 1):
                run = future.result()
                runs.append(run)
                save()
                left_s = (time.monotonic() - began) / number * (len(jobs) - number)
                line.say(
                    f"{number} of {len(jobs)}: {run.setup}, seed {run.seed}: TTFT mean {run.ttft_ms.mean:.1f} ms; "
                    f"some {left_s / 60:.0f} min left"
                )
        finally:
            pool.shutdown(cancel_futures=True)


def _over(pairs: Sequence[tuple[Run, Run]]) -> Over:
    ratios = [run.ttft_ms.mean / other.ttft_ms.mean for run, other in pairs]
    return Over(mean=mean(ratios), least=min(ratios), most=max(ratios))


@cache
def _recorded(trace: Path) -> list[TraceRequest]:
    return read_trace(trace)


if __name__ == "__main__":
    main()
