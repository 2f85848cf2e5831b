"""``quartet replay``: replays a trace under several policies and shows them side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from cli.bench.output import OutputFiles, describe_run
from cli.output import reporting_errors
from cli.replay.policies import POLICIES, MakePolicy, find_policies
from cli.replay.results import Objectives, PolicyResult, Spread
from cli.replay.simulation import FleetSettings, Simulation
from cli.replay.tiers import TierSettings
from cli.replay.worker import EngineSettings
from cli.traces.format import TraceRequest, read_trace
from quartet.kvcache.retention import RetentionPlan
from quartet.kvcache.tiers import TierPlan

_MS = 1e3
_PACKAGES = ("quartet", "numpy", "xxhash")
_ENGINE, _OBJECTIVES, _FLEET = EngineSettings(), Objectives(), FleetSettings()
_TIERS = TierSettings(host=TierPlan(num_blocks=1))
_PIPE_WIDTH = 180


def _fleet(name: str, help: str, minimum: float = 1) -> Any:
    return typer.Option(name, min=minimum, rich_help_panel="Fleet", help=help)


def _tiers(name: str, help: str, minimum: float) -> Any:
    return typer.Option(name, min=minimum, rich_help_panel="Tiers", help=help)


def _sessions(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, min=0, rich_help_panel="Sessions", help=help, **more)


def _goodput(name: str, help: str) -> Any:
    return typer.Option(name, min=0, rich_help_panel="Goodput", help=help)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is replayed, and how."""

    trace: str
    requests: Sequence[TraceRequest]
    speed: float
    seed: int
    fleet: FleetSettings
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __str__(self) -> str:
        fleet = f"{self.fleet.num_workers} workers"
        if self.fleet.num_prefill_workers:
            fleet += f" and {self.fleet.num_prefill_workers} that only prefill"
        return f"{self.trace}, {len(self.requests)} requests at {self.speed:g}x, {fleet}"


def replay(
    *,
    trace: Annotated[Path, typer.Argument(help="Requests in Mooncake's format; may be gzipped.", dir_okay=False)],
    policy: Annotated[
        str, typer.Option("--policy", metavar="A,B,C", help=f"Policies to replay it under, of {', '.join(POLICIES)}.")
    ] = "kv_aware,round_robin",
    speed: Annotated[float, typer.Option("--speed", help="Requests come so many times as fast.")] = 1.0,
    max_requests: Annotated[int | None, typer.Option("--requests", min=1, help="Only the first so many.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the policies' random choices.")] = 0,
    workers: Annotated[
        int, _fleet("--workers", "Workers that decode, and prefill what others don't.")
    ] = _FLEET.num_workers,
    prefill_workers: Annotated[
        int, _fleet("--prefill-workers", "Workers that only prefill.", 0)
    ] = _FLEET.num_prefill_workers,
    transfer_gb_per_s: Annotated[
        float, _fleet("--transfer-gb-per-s", "How fast KV blocks move between workers.", 0.001)
    ] = _FLEET.transfer_gb_per_s,
    routers: Annotated[int, _fleet("--routers", "Routers, which get the requests in turn.")] = _FLEET.num_routers,
    load_age_ms: Annotated[float, _fleet("--load-age-ms", "How old the load that routers know is.", 0)] = _MS
    * _FLEET.load_age_s,
    bookings_age_ms: Annotated[
        float | None,
        _fleet("--bookings-age-ms", "How old what routers tell each other is; left out: they tell nothing.", 0),
    ] = None,
    num_blocks: Annotated[int, _fleet("--blocks", "KV blocks of each worker.")] = _ENGINE.num_blocks,
    block_size: Annotated[int, _fleet("--block-size", "Tokens of a KV block.")] = _ENGINE.block_size,
    host_blocks: Annotated[
        int, _tiers("--host-blocks", "Blocks of each worker in host memory, for those that its pool evicts.", 0)
    ] = 0,
    disk_blocks: Annotated[int, _tiers("--disk-blocks", "Blocks of each worker on disk, below those.", 0)] = 0,
    host_gb_per_s: Annotated[
        float, _tiers("--host-gb-per-s", "How fast blocks move between the pool and host memory.", 0.001)
    ] = _TIERS.host_gb_per_s,
    disk_gb_per_s: Annotated[
        float, _tiers("--disk-gb-per-s", "How fast between host memory and disk.", 0.001)
    ] = _TIERS.disk_gb_per_s,
    session_ttl: Annotated[
        float,
        _sessions(
            "--session-ttl", "So long workers keep a session's blocks before others'; 0: not.", metavar="SECONDS"
        ),
    ] = 0.0,
    session_share: Annotated[
        float, _sessions("--session-share", "Share of each pool that sessions may keep so, at most.", max=1)
    ] = RetentionPlan.share,
    good_ttft_ms: Annotated[
        float, _goodput("--good-ttft-ms", "It counts requests whose first token takes no longer,")
    ] = _OBJECTIVES.ttft_ms,
    good_itl_ms: Annotated[
        float, _goodput("--good-itl-ms", "and whose tokens take no longer on average.")
    ] = _OBJECTIVES.itl_ms,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the figures there; - is standard output.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", dir_okay=False, help="Draw the policies side by side.")
    ] = None,
) -> None:
    """Replay a trace in virtual time: the router's own policies, index, scheduler and block pool, no network, no model.

    The default timing is that of ai-dynamo/dynamo's mock engine.
    """
    if not 0 < speed < math.inf:
        raise typer.BadParameter("must be above 0, and finite", param_hint="--speed")
    if disk_blocks and not host_blocks:
        raise typer.BadParameter("needs --host-blocks: blocks go to disk from there", param_hint="--disk-blocks")
    if not session_ttl < math.inf:
        raise typer.BadParameter("must be finite", param_hint="--session-ttl")
    if not session_share > 0:
        raise typer.BadParameter("must be above 0", param_hint="--session-share")
    tiers = TierSettings(
        host=TierPlan(num_blocks=host_blocks),
        disk=TierPlan(num_blocks=disk_blocks) if disk_blocks else None,
        host_gb_per_s=host_gb_per_s,
        disk_gb_per_s=disk_gb_per_s,
    )
    output = OutputFiles(json=json_file, plot=plot_file)
    output.check()
    fleet = FleetSettings(
        num_workers=workers,
        num_prefill_workers=prefill_workers,
        transfer_gb_per_s=transfer_gb_per_s,
        num_routers=routers,
        load_age_s=load_age_ms / _MS,
        bookings_age_s=None if bookings_age_ms is None else bookings_age_ms / _MS,
        engine=EngineSettings(
            num_blocks=num_blocks,
            block_size=block_size,
            tiers=tiers if host_blocks else None,
            retention=RetentionPlan(ttl_s=session_ttl, share=session_share) if session_ttl else None,
        ),
        objectives=Objectives(ttft_ms=good_ttft_ms, itl_ms=good_itl_ms),
    )
    with reporting_errors():
        makers = find_policies(policy)
        requests = [replace(item, arrival_s=item.arrival_s / speed) for item in read_trace(trace)[:max_requests]]
        plan = _Plan(trace=trace.name, requests=requests, speed=speed, seed=seed, fleet=fleet)
        results = _run(plan, makers)
        _print_results(output.open_console(_PIPE_WIDTH), str(plan), results)

        def draw(path: Path) -> None:
            # Imported here: matplotlib takes a second, and few users draw.
            from cli.replay.plot import plot

            plot(results, str(plan), path)

        if not output.write(_report(plan, results), draw):
            raise typer.Exit(1)


def _run(plan: _Plan, makers: Mapping[str, MakePolicy]) -> dict[str, PolicyResult]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:  # how many requests have ended, by policy

        def run(name: str, make_policy: MakePolicy) -> PolicyResult:
            bar = progress.add_task(name, total=len(plan.requests))
            simulation = Simulation(plan.requests, make_policy, plan.fleet, plan.seed)
            return simulation.run(lambda num_ended: progress.update(bar, completed=num_ended))

        return {name: run(name, make_policy) for name, make_policy in makers.items()}


def _report(plan: _Plan, results: Mapping[str, PolicyResult]) -> Mapping[str, object]:
    return {
        **describe_run("replay", plan.started_at, _PACKAGES),
        "trace": plan.trace,
        "num_requests": len(plan.requests),
        "speed": plan.speed,
        "seed": plan.seed,
        "fleet": asdict(plan.fleet),
        "policies": {name: asdict(result) for name, result in results.items()},
    }


def _print_results(console: Console, title: str, results: Mapping[str, PolicyResult]) -> None:
    """Print one row a policy."""
    heads = ("TTFT", "ITL", "E2E", "reuse", "imbalance", "tok/s", "good/s", "completed", "refused", "CPU s")
    columns = (Column(head, justify="right") for head in heads)
    caption = "milliseconds: mean / p50 / p90 / p99"
    table = Table("policy", *columns, title=title, title_justify="left", caption=caption)
    for name, result in results.items():
        table.add_row(
            name,
            _spread(result.ttft_ms),
            _spread(result.itl_ms, digits=2),
            _spread(result.e2e_ms),
            _reuse(result),
            f"{result.imbalance:.2f}",
            f"{result.output_tokens_per_s:.0f}",
            f"{result.goodput_per_s:.2f}",
            str(result.requests_completed),
            str(result.requests_refused),
            f"{result.cpu_s:.1f}",
        )
    console.print(table)


def _reuse(result: PolicyResult) -> str:
    """In all, and what of it came from lower tiers."""
    tiers = {"host": result.host_ratio, "disk": result.disk_ratio}
    below = [f"{ratio:.3f} {name}" for name, ratio in tiers.items() if ratio]
    return f"{result.reuse_ratio:.3f}" + (f" ({', '.join(below)})" if below else "")


def _spread(spread: Spread, digits: int = 0) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99))
