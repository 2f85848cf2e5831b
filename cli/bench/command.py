"""``quartet bench``: load on a router, and what it answers how fast."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer
import uvloop
from rich.console import Console

from cli.bench.display import BenchDisplay
from cli.bench.options import (
    DEFAULT_IDS,
    BenchSeedOption,
    ConcurrencyOption,
    DurationOption,
    IdsOption,
    JsonOption,
    OutputTokensOption,
    PlotOption,
    PromptTokensOption,
    RateOption,
    ReplayOption,
    RequestsOption,
    SweepOption,
    TextOption,
    TraceOption,
    WarmupOption,
    check_outputs,
    make_limits,
    make_loads,
    make_seed,
    make_workload_config,
)
from cli.bench.report import BenchReport
from cli.bench.run import BenchPlan, Point, run_plan
from cli.bench.sender import SenderConfig
from cli.bench.summary import print_summary
from cli.bench.workload import WorkloadConfig
from cli.errors import reporting_errors
from cli.options import (
    DEFAULT_ROUTER,
    ModelOption,
    PathOption,
    RouterOption,
    TemperatureOption,
    TimeoutOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    make_tls,
)
from quartet.client import Model, QuartetClient, RequestPath
from quartet.rpc.channels import TlsConfig
from quartet.telemetry.provenance import write_report

_STDOUT = "-"
_INTERRUPTED = 130  # what a shell says of a command that Ctrl-C ended
_PIPE_WIDTH = 160


@dataclass(frozen=True, kw_only=True)
class _Output:
    """Where figures go beside the table."""

    json: str | None
    plot: Path | None

    @property
    def console(self) -> Console:
        """For tables: standard output, unless that is for JSON only."""
        console = Console(stderr=self.json == _STDOUT, highlight=False)
        return console if console.is_terminal else Console(stderr=console.stderr, highlight=False, width=_PIPE_WIDTH)


def bench(
    *,
    router: RouterOption = [DEFAULT_ROUTER],  # noqa: B006 - Typer copies it
    model: ModelOption = "",
    path: PathOption = RequestPath.GENERATE,
    concurrency: ConcurrencyOption = None,
    rate: RateOption = None,
    replay: ReplayOption = None,
    sweep: SweepOption = None,
    warmup_s: WarmupOption = None,
    duration_s: DurationOption = None,
    max_requests: RequestsOption = None,
    prompt_tokens: PromptTokensOption = None,
    output_tokens: OutputTokensOption = None,
    trace: TraceOption = None,
    is_text: TextOption = False,
    ids: IdsOption = DEFAULT_IDS,
    seed: BenchSeedOption = None,
    temperature: TemperatureOption = None,
    timeout_s: TimeoutOption = None,
    json_file: JsonOption = None,
    plot_file: PlotOption = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
) -> None:
    """Put load on a router and measure what its clients see. Ctrl-C ends it and shows what was measured."""
    check_outputs(json_file, plot_file)
    plan = BenchPlan(
        loads=make_loads(concurrency, rate, replay, sweep, has_trace=trace is not None),
        limits=make_limits(warmup_s, duration_s, max_requests, has_trace=trace is not None),
        workload=make_workload_config(prompt_tokens, output_tokens, trace, ids, is_text=is_text),
        sender=SenderConfig(path=path, model=model, temperature=temperature, timeout_s=timeout_s),
        seed=make_seed(seed),
    )
    report = BenchReport(shlex.join(["quartet", *sys.argv[1:]]), plan, trace=str(trace) if trace else None)
    with reporting_errors():
        used_model, points = uvloop.run(_run(router, make_tls(tls_ca, tls_cert, tls_key), plan))
        raise typer.Exit(_finish(_Output(json=json_file, plot=plot_file), report, plan, used_model, points))


async def _run(routers: list[str], tls: TlsConfig | None, plan: BenchPlan) -> tuple[Model, list[Point]]:
    async with QuartetClient(routers, tls=tls) as client:
        # Before any load: who is not there, or can't take these lengths, need not be measured.
        model = await _find_model(client, plan.sender.model)
        _check_lengths(plan.workload, model)
        with BenchDisplay(len(plan.loads)) as display:
            following = asyncio.create_task(display.follow())
            try:
                return model, await run_plan(client, plan, display)
            finally:
                following.cancel()


async def _find_model(client: QuartetClient, name: str) -> Model:
    models = [await client.get_model(name)] if name else await client.list_models()
    if len(models) == 1:
        return models[0]
    known = ", ".join(model.name for model in models) or "none"
    raise typer.BadParameter(f"name one of the models that are there: {known}", param_hint="--model")


def _check_lengths(workload: WorkloadConfig, model: Model) -> None:
    if workload.trace is not None:
        # What does not fit shows as an error of its status; a trace is not cut to measure.
        return
    num_tokens = workload.prompt_tokens.high + workload.output_tokens.high
    if num_tokens > model.max_model_len:
        raise typer.BadParameter(
            f"together up to {num_tokens} tokens, but {model.name} takes {model.max_model_len}",
            param_hint="--prompt-tokens and --output-tokens",
        )


def _finish(output: _Output, report: BenchReport, plan: BenchPlan, model: Model, points: Sequence[Point]) -> int:
    """Show and write the figures; returns the exit code."""
    results = [point.result for point in points]
    title = f"{model.name}, path {plan.sender.path}, {plan.workload}"
    print_summary(output.console, title, results)
    if not _write(output, report.finish(model, results), points, title):
        return 1
    if any(result.is_interrupted for result in results):
        return _INTERRUPTED
    return 0 if any(result.requests.finished for result in results) else 1


def _write(output: _Output, report: Mapping[str, object], points: Sequence[Point], title: str) -> bool:
    """Write each file that is wanted, whatever becomes of the other; whether all could be."""
    outcomes = []
    if output.json is not None:
        outcomes.append(_try_write(output.json, partial(write_report, report, output.json)))
    if output.plot is not None:
        # It takes a second to import, and few need it.
        from cli.bench.plot import plot

        outcomes.append(_try_write(str(output.plot), partial(plot, points, title, output.plot)))
    return all(outcomes)


def _try_write(name: str, write: Callable[[], None]) -> bool:
    try:
        write()
    except OSError as error:
        typer.secho(f"quartet: can't write {name}: {error.strerror or error}", fg=typer.colors.RED, err=True)
        return False
    return True
