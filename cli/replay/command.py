"""``quartet replay``: what a trace's requests would see of a fleet under each policy, in virtual time."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cli.errors import reporting_errors
from cli.replay.display import print_results, progress_bar
from cli.replay.policies import POLICIES, find_policies
from cli.replay.results import Objectives, PolicyResult
from cli.replay.simulation import FleetSettings, MakePolicy, Simulation
from cli.replay.worker import EngineSettings
from cli.traces.format import TraceRequest, read_trace
from quartet.telemetry.provenance import read_commit, read_machine, read_versions, write_report

_STDOUT = "-"
_MS = 1e3
_PACKAGES = ("quartet", "numpy", "xxhash")
_ENGINE, _OBJECTIVES = EngineSettings(), Objectives()
_PIPE_WIDTH = 180


def _fleet(name: str, help: str, minimum: float = 1) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(name, min=minimum, rich_help_panel="Fleet", help=help)
    return option


def replay(
    *,
    trace: Annotated[Path, typer.Argument(help="Requests in Mooncake's format; may be gzipped.", dir_okay=False)],
    policy: Annotated[
        str, typer.Option("--policy", metavar="A,B,C", help=f"Policies to replay it under, of {', '.join(POLICIES)}.")
    ] = "kv_aware,round_robin",
    speed: Annotated[float, typer.Option("--speed", help="Requests come so many times as fast.")] = 1.0,
    max_requests: Annotated[int | None, typer.Option("--requests", min=1, help="Only the first so many.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the policies' random choices.")] = 0,
    workers: Annotated[int, _fleet("--workers", "Workers, which prefill and decode.")] = 8,
    routers: Annotated[int, _fleet("--routers", "Routers, which get the requests in turn.")] = 1,
    load_age_ms: Annotated[float, _fleet("--load-age-ms", "How old the load that routers know is.", 0)] = 0.0,
    num_blocks: Annotated[int, _fleet("--blocks", "KV blocks of each worker.")] = _ENGINE.num_blocks,
    block_size: Annotated[int, _fleet("--block-size", "Tokens of a KV block.")] = _ENGINE.block_size,
    ttft_objective_ms: Annotated[
        float, typer.Option("--good-ttft-ms", help="Goodput counts requests whose first token takes no longer.")
    ] = _OBJECTIVES.ttft_ms,
    itl_objective_ms: Annotated[
        float, typer.Option("--good-itl-ms", help="And whose tokens take no longer on average.")
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
    if speed <= 0:
        raise typer.BadParameter("must be above 0", param_hint="--speed")
    with reporting_errors():
        makers = find_policies(policy)
        requests = [replace(item, arrival_s=item.arrival_s / speed) for item in read_trace(trace)[:max_requests]]
        settings = FleetSettings(
            num_workers=workers,
            num_routers=routers,
            load_age_s=load_age_ms / _MS,
            engine=EngineSettings(num_blocks=num_blocks, block_size=block_size),
            objectives=Objectives(ttft_ms=ttft_objective_ms, itl_ms=itl_objective_ms),
        )
        started_at = datetime.now(UTC)
        results = _run(requests, makers, settings, seed)
        title = f"{trace.name}, {len(requests)} requests at {speed:g}x, {workers} workers"
        console = Console(stderr=json_file == _STDOUT, highlight=False)
        if not console.is_terminal:
            console = Console(stderr=json_file == _STDOUT, highlight=False, width=_PIPE_WIDTH)
        print_results(console, title, results)
        if json_file is not None:
            report = {
                "benchmark": "replay",
                "command": shlex.join(["quartet", *sys.argv[1:]]),
                "started_at": started_at.isoformat(timespec="seconds"),
                "commit": asdict(read_commit()),
                "versions": read_versions(_PACKAGES),
                "machine": asdict(read_machine()),
                "trace": trace.name,
                "num_requests": len(requests),
                "speed": speed,
                "seed": seed,
                "fleet": asdict(settings),
                "policies": {name: asdict(result) for name, result in results.items()},
            }
            write_report(report, json_file)
        if plot_file is not None:
            # It takes a second to import, and few need it.
            from cli.replay.plot import plot

            plot(results, title, plot_file)


def _run(
    requests: Sequence[TraceRequest], makers: Mapping[str, MakePolicy], settings: FleetSettings, seed: int
) -> dict[str, PolicyResult]:
    results: dict[str, PolicyResult] = {}
    with progress_bar(Console(stderr=True)) as progress:
        for name, make_policy in makers.items():
            bar = progress.add_task(name, total=len(requests))
            simulation = Simulation(requests, make_policy, settings, seed)
            results[name] = simulation.run(lambda num_ended, bar=bar: progress.update(bar, completed=num_ended))  # type: ignore[misc]
    return results
