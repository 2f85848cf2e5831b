"""``quartet replay``: replays a trace under several policies and shows them side by side."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from cli.bench.options import check_outputs
from cli.output import open_console, reporting_errors, try_write
from cli.replay.policies import POLICIES, MakePolicy, find_policies
from cli.replay.results import Objectives, PolicyResult, Spread
from cli.replay.simulation import FleetSettings, Simulation
from cli.replay.worker import EngineSettings
from cli.traces.format import TraceRequest, read_trace
from quartet.telemetry.provenance import read_commit, read_machine, read_versions, write_report

_STDOUT = "-"
_MS = 1e3
_PACKAGES = ("quartet", "numpy", "xxhash")
_ENGINE, _OBJECTIVES, _FLEET = EngineSettings(), Objectives(), FleetSettings()
_PIPE_WIDTH = 180


def _fleet(name: str, help: str, minimum: float = 1) -> Any:
    return typer.Option(name, min=minimum, rich_help_panel="Fleet", help=help)


def _goodput(name: str, help: str) -> Any:
    return typer.Option(name, min=0, rich_help_panel="Goodput", help=help)


TraceArgument: TypeAlias = Annotated[
    Path, typer.Argument(help="Requests in Mooncake's format; may be gzipped.", dir_okay=False)
]
PolicyOption: TypeAlias = Annotated[
    str, typer.Option("--policy", metavar="A,B,C", help=f"Policies to replay it under, of {', '.join(POLICIES)}.")
]
SpeedOption: TypeAlias = Annotated[float, typer.Option("--speed", help="Requests come so many times as fast.")]
RequestsOption: TypeAlias = Annotated[int | None, typer.Option("--requests", min=1, help="Only the first so many.")]
SeedOption: TypeAlias = Annotated[int, typer.Option("--seed", min=0, help="Of the policies' random choices.")]
WorkersOption: TypeAlias = Annotated[int, _fleet("--workers", "Workers that decode, and prefill what others don't.")]
PrefillWorkersOption: TypeAlias = Annotated[int, _fleet("--prefill-workers", "Workers that only prefill.", 0)]
TransferOption: TypeAlias = Annotated[
    float, _fleet("--transfer-gb-per-s", "How fast KV blocks move between workers.", 0.001)
]
RoutersOption: TypeAlias = Annotated[int, _fleet("--routers", "Routers, which get the requests in turn.")]
LoadAgeOption: TypeAlias = Annotated[float, _fleet("--load-age-ms", "How old the load that routers know is.", 0)]
BlocksOption: TypeAlias = Annotated[int, _fleet("--blocks", "KV blocks of each worker.")]
BlockSizeOption: TypeAlias = Annotated[int, _fleet("--block-size", "Tokens of a KV block.")]
GoodTtftOption: TypeAlias = Annotated[
    float, _goodput("--good-ttft-ms", "It counts requests whose first token takes no longer,")
]
GoodItlOption: TypeAlias = Annotated[float, _goodput("--good-itl-ms", "and whose tokens take no longer on average.")]
JsonOption: TypeAlias = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the figures there; - is standard output.")
]
PlotOption: TypeAlias = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", dir_okay=False, help="Draw the policies side by side.")
]


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
    trace: TraceArgument,
    policy: PolicyOption = "kv_aware,round_robin",
    speed: SpeedOption = 1.0,
    max_requests: RequestsOption = None,
    seed: SeedOption = 0,
    workers: WorkersOption = _FLEET.num_workers,
    prefill_workers: PrefillWorkersOption = _FLEET.num_prefill_workers,
    transfer_gb_per_s: TransferOption = _FLEET.transfer_gb_per_s,
    routers: RoutersOption = _FLEET.num_routers,
    load_age_ms: LoadAgeOption = _MS * _FLEET.load_age_s,
    num_blocks: BlocksOption = _ENGINE.num_blocks,
    block_size: BlockSizeOption = _ENGINE.block_size,
    good_ttft_ms: GoodTtftOption = _OBJECTIVES.ttft_ms,
    good_itl_ms: GoodItlOption = _OBJECTIVES.itl_ms,
    json_file: JsonOption = None,
    plot_file: PlotOption = None,
) -> None:
    """Replay a trace in virtual time: the router's own policies, index, scheduler and block pool, no network, no model.

    The default timing is that of ai-dynamo/dynamo's mock engine.
    """
    if not 0 < speed < math.inf:
        raise typer.BadParameter("must be above 0, and finite", param_hint="--speed")
    check_outputs(json_file, plot_file)
    fleet = FleetSettings(
        num_workers=workers,
        num_prefill_workers=prefill_workers,
        transfer_gb_per_s=transfer_gb_per_s,
        num_routers=routers,
        load_age_s=load_age_ms / _MS,
        engine=EngineSettings(num_blocks=num_blocks, block_size=block_size),
        objectives=Objectives(ttft_ms=good_ttft_ms, itl_ms=good_itl_ms),
    )
    with reporting_errors():
        makers = find_policies(policy)
        requests = [replace(item, arrival_s=item.arrival_s / speed) for item in read_trace(trace)[:max_requests]]
        plan = _Plan(trace=trace.name, requests=requests, speed=speed, seed=seed, fleet=fleet)
        results = _run(plan, makers)
        # Standard output is for JSON only where --json names it.
        console = open_console(pipe_width=_PIPE_WIDTH, stderr=json_file == _STDOUT)
        _print_results(console, str(plan), results)
        _write(plan, results, json_file, plot_file)


def _run(plan: _Plan, makers: Mapping[str, MakePolicy]) -> dict[str, PolicyResult]:
    results: dict[str, PolicyResult] = {}
    with _progress_bar(Console(stderr=True)) as progress:
        for name, make_policy in makers.items():
            bar = progress.add_task(name, total=len(plan.requests))
            simulation = Simulation(plan.requests, make_policy, plan.fleet, plan.seed)
            results[name] = simulation.run(partial(_show_progress, progress, bar))
    return results


def _show_progress(progress: Progress, bar: TaskID, num_ended: int) -> None:
    progress.update(bar, completed=num_ended)


def _write(plan: _Plan, results: Mapping[str, PolicyResult], json_file: str | None, plot_file: Path | None) -> None:
    if json_file is not None:
        _write_one(json_file, partial(write_report, _report(plan, results), json_file))
    if plot_file is not None:
        # Imported here: matplotlib takes a second, and few users draw.
        from cli.replay.plot import plot

        _write_one(str(plot_file), partial(plot, results, str(plan), plot_file))


def _write_one(name: str, write: Callable[[], None]) -> None:
    if not try_write(name, write):
        raise typer.Exit(1)


def _report(plan: _Plan, results: Mapping[str, PolicyResult]) -> Mapping[str, object]:
    return {
        "benchmark": "replay",
        "command": shlex.join(["quartet", *sys.argv[1:]]),
        "started_at": plan.started_at.isoformat(timespec="seconds"),
        "commit": asdict(read_commit()),
        "versions": read_versions(_PACKAGES),
        "machine": asdict(read_machine()),
        "trace": plan.trace,
        "num_requests": len(plan.requests),
        "speed": plan.speed,
        "seed": plan.seed,
        "fleet": asdict(plan.fleet),
        "policies": {name: asdict(result) for name, result in results.items()},
    }


def _progress_bar(console: Console) -> Progress:
    """Shows how many requests have ended, by policy."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def _print_results(console: Console, title: str, results: Mapping[str, PolicyResult]) -> None:
    """Print one row a policy."""
    table = Table(title=title, title_justify="left", caption="milliseconds: mean / p50 / p90 / p99")
    table.add_column("policy")
    for name in (
        *("TTFT", "ITL", "E2E", "reuse", "imbalance"),
        *("tok/s", "good/s", "completed", "refused", "CPU s"),
    ):
        table.add_column(name, justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            _spread(result.ttft_ms),
            _spread(result.itl_ms, digits=2),
            _spread(result.e2e_ms),
            f"{result.reuse_ratio:.3f}",
            f"{result.imbalance:.2f}",
            f"{result.output_tokens_per_s:.0f}",
            f"{result.goodput_per_s:.2f}",
            str(result.requests_completed),
            str(result.requests_refused),
            f"{result.cpu_s:.1f}",
        )
    console.print(table)


def _spread(spread: Spread, digits: int = 0) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99))
