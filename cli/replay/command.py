"""``quartet replay``: what a trace's requests would see of a fleet under each policy, in virtual time."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from cli.bench.options import check_outputs
from cli.errors import reporting_errors
from cli.replay import options
from cli.replay.display import print_results, progress_bar
from cli.replay.policies import find_policies
from cli.replay.results import Objectives, PolicyResult
from cli.replay.simulation import FleetSettings, MakePolicy, Simulation
from cli.replay.worker import EngineSettings
from cli.traces.format import TraceRequest, read_trace
from quartet.telemetry.provenance import read_commit, read_machine, read_versions, write_report

_STDOUT = "-"
_MS = 1e3
_PACKAGES = ("quartet", "numpy", "xxhash")
_ENGINE, _OBJECTIVES, _FLEET = EngineSettings(), Objectives(), FleetSettings()
_PIPE_WIDTH = 180


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is replayed, how."""

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
    trace: options.TraceArgument,
    policy: options.PolicyOption = "kv_aware,round_robin",
    speed: options.SpeedOption = 1.0,
    max_requests: options.RequestsOption = None,
    seed: options.SeedOption = 0,
    workers: options.WorkersOption = _FLEET.num_workers,
    prefill_workers: options.PrefillWorkersOption = _FLEET.num_prefill_workers,
    transfer_gb_per_s: options.TransferOption = _FLEET.transfer_gb_per_s,
    routers: options.RoutersOption = _FLEET.num_routers,
    load_age_ms: options.LoadAgeOption = _MS * _FLEET.load_age_s,
    num_blocks: options.BlocksOption = _ENGINE.num_blocks,
    block_size: options.BlockSizeOption = _ENGINE.block_size,
    good_ttft_ms: options.GoodTtftOption = _OBJECTIVES.ttft_ms,
    good_itl_ms: options.GoodItlOption = _OBJECTIVES.itl_ms,
    json_file: options.JsonOption = None,
    plot_file: options.PlotOption = None,
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
        print_results(_console(json_file), str(plan), results)
        _write(plan, results, json_file, plot_file)


def _run(plan: _Plan, makers: Mapping[str, MakePolicy]) -> dict[str, PolicyResult]:
    results: dict[str, PolicyResult] = {}
    with progress_bar(Console(stderr=True)) as progress:
        for name, make_policy in makers.items():
            bar = progress.add_task(name, total=len(plan.requests))
            simulation = Simulation(plan.requests, make_policy, plan.fleet, plan.seed)
            results[name] = simulation.run(partial(_show_progress, progress, bar))
    return results


def _show_progress(progress: Progress, bar: TaskID, num_ended: int) -> None:
    progress.update(bar, completed=num_ended)


def _console(json_file: str | None) -> Console:
    """For the table: standard output, unless that is for JSON only."""
    console = Console(stderr=json_file == _STDOUT, highlight=False)
    return console if console.is_terminal else Console(stderr=console.stderr, highlight=False, width=_PIPE_WIDTH)


def _write(plan: _Plan, results: Mapping[str, PolicyResult], json_file: str | None, plot_file: Path | None) -> None:
    if json_file is not None:
        _write_one(json_file, partial(write_report, _report(plan, results), json_file))
    if plot_file is not None:
        # It takes a second to import, and few need it.
        from cli.replay.plot import plot

        _write_one(str(plot_file), partial(plot, results, str(plan), plot_file))


def _write_one(name: str, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        typer.secho(f"quartet: can't write {name}: {error.strerror or error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from error


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
