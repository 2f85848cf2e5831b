"""``quartet plan``: replays a trace on fleets of many sizes, shows them, and says which one to start."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from cli.bench.output import OutputFiles, describe_run
from cli.options import ModelOption, RouterOptions
from cli.output import reporting_errors
from cli.plan.fleet import DEFAULT_KV_BYTES, MeasuredFleet, PlannedFleet, Speeds, plan_fleet
from cli.plan.search import Plan, Shape, Target, Tried, find, judge
from cli.replay.results import Spread
from cli.replay.simulation import FleetSettings, GivenUpError, Patience, Simulation
from cli.traces.format import TraceRequest, read_trace
from cli.up import find_topology
from quartet.errors import ConfigError

#: Whose speeds count where neither a topology nor a running fleet is given.
DEFAULT_TOPOLOGY = "mock_fleet"

# Of policy.margin_s, as shares of a step. Routers' forecasts of a step's end are off by a few per cent of it; with the
# second one plans came true (benchmarks/plan.py).
_LEAST_MARGIN, _GOOD_MARGIN = 0.03, 0.1
# With fewer, p95 rests on four requests at most.
_FEW_REQUESTS = 100
_MS = 1e3
_PACKAGES = ("quartet", "numpy", "xxhash")
_PERCENTS = (50, 95, 99)
_PIPE_WIDTH = 180


def _target(latency: str, percent: int) -> Any:
    what = {"ttft": "first tokens come", "itl": "further tokens follow the last"}[latency]
    return typer.Option(
        f"--{latency}-p{percent}",
        metavar="MS",
        rich_help_panel="Targets",
        help=f"{percent} % of {what} within so many ms.",
    )


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What the fleet must achieve, in milliseconds; ``None``: it does not matter."""

    ttft_p50: Annotated[float | None, _target("ttft", 50)] = None
    ttft_p95: Annotated[float | None, _target("ttft", 95)] = None
    ttft_p99: Annotated[float | None, _target("ttft", 99)] = None
    itl_p50: Annotated[float | None, _target("itl", 50)] = None
    itl_p95: Annotated[float | None, _target("itl", 95)] = None
    itl_p99: Annotated[float | None, _target("itl", 99)] = None

    def targets(self) -> list[Target]:
        """Those that are given. Raises ``typer.BadParameter``: none is, or one is impossible."""
        found = list[Target]()
        for latency in ("ttft", "itl"):
            for percent in _PERCENTS:
                limit_ms = getattr(self, f"{latency}_p{percent}")
                if limit_ms is not None:
                    _check_positive(limit_ms, f"--{latency}-p{percent}")
                    found.append(Target(latency=latency, percent=percent, limit_ms=limit_ms))
        if not found:
            raise typer.BadParameter(
                "at least one is needed, such as --ttft-p95 2000 --itl-p95 50", param_hint="--ttft-p95 and others"
            )
        return found


def _speed(name: str, metavar: str, help: str) -> Any:
    return typer.Option(name, metavar=metavar, rich_help_panel="Speeds", help=help)


@dataclass(frozen=True, kw_only=True)
class SpeedOptions(Speeds):
    """``Speeds`` as options."""

    prefill_tokens_per_s: Annotated[
        float | None, _speed("--prefill-tokens-per-s", "N", "Prompt tokens that a worker computes a second.")
    ] = None
    prefill_base_ms: Annotated[
        float | None, _speed("--prefill-base-ms", "MS", "What a step with prompts takes beside that.")
    ] = None
    decode_step_ms: Annotated[
        float | None, _speed("--decode-step-ms", "MS", "A step that gives each running request a token.")
    ] = None
    decode_ms_per_1k: Annotated[
        float | None,
        _speed("--decode-ms-per-1k", "MS", "What it takes beside that for each 1,000 tokens of all these requests."),
    ] = None

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the option."""
        for name in ("prefill_tokens_per_s", "decode_step_ms"):
            if getattr(self, name) is not None:
                _check_positive(getattr(self, name), _option(name))
        for name in ("prefill_base_ms", "decode_ms_per_1k"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise typer.BadParameter("must be at least 0, and finite", param_hint=_option(name))


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What is planned.

    Attributes:
        num_left_out: requests that no worker can hold.
        speed: requests come so many times as fast as in the trace.
    """

    trace: str
    requests: Sequence[TraceRequest]
    num_left_out: int
    speed: float
    seed: int
    fleet: PlannedFleet
    targets: Sequence[Target]
    max_workers: int
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __str__(self) -> str:
        wanted = ", ".join(f"{target} <= {target.limit_ms:g} ms" for target in self.targets)
        return f"{self.trace}, {self._load()}; steps {self.fleet.speeds_from}{self._policy()}; wanted: {wanted}"

    def warnings(self) -> list[str]:
        """Why its figures may say less than they seem to."""
        found = list[str]()
        count = len(self.requests)
        if count < _FEW_REQUESTS:
            slowest = [max(1, count * (100 - percent) // 100) for percent in (95, 99)]
            found.append(
                f"Only {_count(count)}: p95 of TTFT rests on the slowest {slowest[0]} of them, p99 on the slowest "
                f"{slowest[1]}. Some hundred say more."
            )
        num_tokens = round(median(request.num_input_tokens for request in self.requests))
        step_ms, policy = self.fleet.prompt_step_ms(num_tokens), self.fleet.policy
        if policy.reads_caches and _MS * policy.margin_s < _LEAST_MARGIN * step_ms:
            found.append(
                f"A step with a prompt of {num_tokens} tokens takes {step_ms:.4g} ms, for which policy.margin_s, "
                f"{_MS * policy.margin_s:g} ms, is short. Live, prompts may come too late for the next step and have a "
                f"longer TTFT: try --set router.overrides.policy.margin_s={_GOOD_MARGIN * step_ms / _MS:.2g}."
            )
        return found

    def _policy(self) -> str:
        """Named where nobody chose it."""
        name = self.fleet.policy.name
        return "" if self.fleet.topology else f"; policy {name}, the default, as there is no --topology"

    def _load(self) -> str:
        count, rate = _count(len(self.requests)), _rate(self.requests)
        if rate < math.inf:
            return f"{count} at {self.speed:.3g}x ({rate:.3g} a second)"
        return count if len(self.requests) == 1 else f"{count}, all at once"


def plan(
    *,
    trace: Annotated[Path, typer.Argument(help="Requests in Mooncake's format; may be gzipped.", dir_okay=False)],
    targets: TargetOptions,
    max_workers: Annotated[
        int, typer.Option("--max-workers", min=1, max=256, help="Try fleets of up to so many workers.")
    ] = 8,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="R", help="R requests a second, by changing the trace's pace.")
    ] = None,
    speed: Annotated[float | None, typer.Option("--speed", help="Requests come so many times as fast.")] = None,
    max_requests: Annotated[int | None, typer.Option("--requests", min=1, help="Only the first so many.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the policy's random choices.")] = 0,
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            metavar="NAME|FILE",
            help=f"Its engines, policy and, where these are mock, speeds. By default {DEFAULT_TOPOLOGY}.",
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME.NAME=VALUE", help="As for quartet up.")
    ] = None,
    is_from_fleet: Annotated[
        bool,
        typer.Option(
            "--from-fleet",
            help="Speeds and sizes as a running fleet reports them (--router).",
            rich_help_panel="Speeds",
        ),
    ] = False,
    speeds: SpeedOptions,
    num_blocks: Annotated[int | None, typer.Option("--blocks", min=1, help="KV blocks of each worker.")] = None,
    transfer_gb_per_s: Annotated[
        float, typer.Option("--transfer-gb-per-s", min=0.001, help="How fast KV blocks move between workers.")
    ] = FleetSettings.transfer_gb_per_s,
    kv_bytes_per_token: Annotated[
        int | None,
        typer.Option(
            "--kv-bytes-per-token", min=1, help=f"Of what moves. By default {DEFAULT_KV_BYTES}, or the mock's."
        ),
    ] = None,
    router: RouterOptions,
    model: ModelOption = "",
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the figures there; - is standard output.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", dir_okay=False, help="Draw the fleets that were tried.")
    ] = None,
) -> None:
    """Find the fewest Prefill and Decode workers for a trace and latency targets, by replays in virtual time.

    Shows all fleets that it tried, and says whether to disaggregate at all.
    """
    if rate is not None and speed is not None:
        raise typer.BadParameter("each of them sets the pace: give one", param_hint="--rate and --speed")
    if is_from_fleet and assignments and topology is None:
        raise typer.BadParameter("needs --topology: a running fleet has no settings to change", param_hint="--set")
    for value, option in ((rate, "--rate"), (speed, "--speed")):
        if value is not None:
            _check_positive(value, option)
    wanted = targets.targets()
    output = OutputFiles(json=json_file, plot=plot_file)
    output.check()
    with reporting_errors():
        measured = None
        if is_from_fleet:
            measured = asyncio.run(_ask(router, model))
        elif topology is None:
            topology = DEFAULT_TOPOLOGY
        fleet = plan_fleet(
            None if topology is None else find_topology(topology),
            topology or "",
            assignments or (),
            speeds,
            measured,
            num_blocks=num_blocks,
            kv_bytes_per_token=kv_bytes_per_token,
            transfer_gb_per_s=transfer_gb_per_s,
        )
        given = read_trace(trace)[:max_requests]
        fitting = _fitting(given, fleet.max_request_tokens)
        factor = _factor(fitting, rate, speed)
        requests = [replace(request, arrival_s=request.arrival_s / factor) for request in fitting]
        _check_values(wanted, requests)
        job = _Job(
            trace=trace.name,
            requests=requests,
            num_left_out=len(given) - len(requests),
            speed=factor,
            seed=seed,
            fleet=fleet,
            targets=wanted,
            max_workers=max_workers,
        )
        found = _search(job)
        _print_plan(output.open_console(_PIPE_WIDTH), job, found)

        def draw(path: Path) -> None:
            # Imported here: matplotlib takes a second, and few users draw.
            from cli.plan.plot import plot

            plot(found, wanted, str(job), path)

        if not output.write(_report(job, found), draw):
            raise typer.Exit(1)


def _search(job: _Job) -> Plan:
    """Replay the trace on as many fleets as it takes; progress goes to standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    patience = _patience(job.targets, len(job.requests))
    with Progress(*columns, console=Console(stderr=True)) as progress:  # how many requests have ended, by fleet

        def try_shape(shape: Shape, is_whole: bool) -> Tried:
            bar = progress.add_task(str(shape), total=len(job.requests))
            simulation = Simulation(job.requests, job.fleet.make_policy, job.fleet.of(shape), job.seed)
            try:
                result = simulation.run(
                    lambda num_ended: progress.update(bar, completed=num_ended), () if is_whole else patience
                )
            except GivenUpError as error:
                progress.update(bar, description=f"{shape}: given up")
                why = _why_given_up(error, len(job.requests))
                return Tried(shape=shape, result=None, given_up=why, given_up_at_s=error.at_s)
            return judge(shape, result, job.targets)

        return find(try_shape, job.max_workers)


async def _ask(router: RouterOptions, model: str) -> MeasuredFleet:
    async with await router.client() as client:
        return MeasuredFleet.of(await client.list_workers(model))


def _count(num_requests: int) -> str:
    return "1 request" if num_requests == 1 else f"{num_requests} requests"


def _rate(requests: Sequence[TraceRequest]) -> float:
    """Requests a second; infinite: all come at the same time."""
    duration_s = requests[-1].arrival_s - requests[0].arrival_s
    return len(requests) / duration_s if duration_s else math.inf


def _factor(requests: Sequence[TraceRequest], rate: float | None, speed: float | None) -> float:
    if rate is None:
        return speed or 1.0
    if _rate(requests) == math.inf:
        raise ConfigError("--rate: the requests that are replayed all come at the same time")
    return rate / _rate(requests)


def _fitting(requests: Sequence[TraceRequest], max_tokens: int) -> list[TraceRequest]:
    """Those that a worker can hold.

    Raises:
        ConfigError: none of them.
    """
    found = [request for request in requests if request.num_input_tokens + request.num_output_tokens <= max_tokens]
    if not found:
        raise ConfigError(f"TRACE: a worker holds {max_tokens} tokens, and each request has more")
    return found


def _check_values(targets: Sequence[Target], requests: Sequence[TraceRequest]) -> None:
    """Raises ``ConfigError``: a target is on the time between tokens, and no answer has two."""
    for target in targets:
        if target.latency == "itl" and not _has_itl(requests):
            raise ConfigError(f"--itl-p{target.percent}: there are no values: all answers in the trace have one token")


def _has_itl(requests: Sequence[TraceRequest]) -> bool:
    return any(request.num_output_tokens > 1 for request in requests)


def _patience(targets: Sequence[Target], num_requests: int) -> list[Patience]:
    """What ends a replay whose percentile is above its limit whatever comes."""
    return [
        Patience(
            ttft_s=target.limit_ms / _MS,
            # With one more the percentile, between the two values next to it in order, is above the limit.
            most_late=num_requests - math.floor((num_requests - 1) * target.percent / 100) - 1,
        )
        for target in targets
        if target.latency == "ttft"
    ]


def _why_given_up(error: GivenUpError, num_requests: int) -> str:
    share = error.num_late / num_requests
    return f"given up: {share:.1%} of first tokens later than {_MS * error.patience.ttft_s:g} ms"


def _print_plan(console: Console, job: _Job, found: Plan) -> None:
    """The table of all fleets that were tried, the answer, and the command."""
    heads = ("TTFT", "ITL", "Prefill busy", "Decode busy", "of the tightest")
    caption = "milliseconds: p50 / p95 / p99; busy: share of the time, the mean over the workers"
    table = Table(
        Column("Prefill", justify="right"),
        Column("Decode", justify="right"),
        *(Column(head, justify="right") for head in heads),
        "targets",
        caption=caption,
    )
    for tried in found.tried:
        table.add_row(*_row(tried, has_itl=_has_itl(job.requests)), style="bold" if tried is found.chosen else None)
    console.print(str(job), soft_wrap=True)
    console.print(table)
    if job.num_left_out:
        num_given = len(job.requests) + job.num_left_out
        console.print(
            f"Left out, as a worker takes no longer ones: {job.num_left_out} of {num_given} requests.", soft_wrap=True
        )
    for warning in job.warnings():
        console.print(f"Note: {warning}", soft_wrap=True)
    console.print(found.verdict(), soft_wrap=True)
    if found.chosen is not None:
        console.print(str(job.fleet.how_to_start(found.chosen.shape)), soft_wrap=True, markup=False)


def _row(tried: Tried, *, has_itl: bool) -> list[str]:
    shape, result = tried.shape, tried.result
    counts = [str(shape.num_prefill), str(shape.num_decode)]
    if result is None:
        return [*counts, "", "", "", "", "", tried.given_up]
    return [
        *counts,
        _spread(result.ttft_ms),
        _spread(result.itl_ms, digits=1) if has_itl else "no values",
        "" if shape.is_aggregated else f"{result.prefill_busy:.0%}",
        f"{result.decode_busy:.0%}",
        f"{tried.strain:.0%}",
        "met" if tried.meets else tried.reason,
    ]


def _spread(spread: Spread, digits: int = 0) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in (spread.p50, spread.p95, spread.p99))


def _report(job: _Job, found: Plan) -> Mapping[str, object]:
    chosen = found.chosen
    start = None if chosen is None else job.fleet.how_to_start(chosen.shape)
    return {
        **describe_run("plan", job.started_at, _PACKAGES),
        "trace": job.trace,
        "num_requests": len(job.requests),
        "num_left_out": job.num_left_out,
        "speed": job.speed,
        "seed": job.seed,
        "steps": job.fleet.speeds_from,
        "policy": asdict(job.fleet.policy),
        "fleet": _without_counts(job.fleet.settings),
        "targets": [asdict(target) for target in job.targets],
        "max_workers": job.max_workers,
        "warnings": job.warnings(),
        "tried": [_tried(tried, has_itl=_has_itl(job.requests)) for tried in found.tried],
        "aggregated": _counts(found.aggregated),
        "disaggregated": _counts(found.disaggregated),
        "beside": _counts(found.beside),
        "chosen": _counts(chosen),
        "verdict": found.verdict(),
        "start": None if start is None else start.command or None,
        "start_otherwise": None if start is None else start.otherwise or None,
    }


def _without_counts(settings: FleetSettings) -> Mapping[str, object]:
    left_out = ("num_workers", "num_prefill_workers", "objectives")
    return {name: value for name, value in asdict(settings).items() if name not in left_out}


def _tried(tried: Tried, *, has_itl: bool) -> Mapping[str, object]:
    result = None if tried.result is None else asdict(tried.result)
    if result is not None and not has_itl:
        result["itl_ms"] = None
    return {
        **asdict(tried.shape),
        "meets": tried.meets,
        "strain": None if tried.result is None else tried.strain,
        "reason": tried.reason,
        "result": result,
    }


def _counts(tried: Tried | None) -> Mapping[str, int] | None:
    return None if tried is None else asdict(tried.shape)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_positive(value: float, option: str) -> None:
    if not 0 < value < math.inf:
        raise typer.BadParameter("must be above 0, and finite", param_hint=option)
