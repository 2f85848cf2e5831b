"""``quartet bench`` and its command ``compare``: put load on a router, and measure what its clients see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from cli.app import spread_groups
from cli.bench.compare import compare
from cli.bench.display import BenchDisplay, print_summary
from cli.bench.folder import (
    DEPLOYMENT_FILE,
    REPORT_FILE,
    FolderOptions,
    ResultFolder,
    describe_deployment,
    parse_labels,
)
from cli.bench.options import (
    DEFAULT_CONCURRENCY,
    DEFAULT_DURATION_S,
    DEFAULT_IDS,
    DEFAULT_LENGTH,
    DEFAULT_WARMUP_S,
    make_limits,
    make_loads,
    make_seed,
    make_workload_config,
)
from cli.bench.output import OutputFiles, describe_run
from cli.bench.ready import NotReadyError, Wait
from cli.bench.result import PointResult
from cli.bench.run import BenchPlan, Observers, Point, SenderConfig, run_plan
from cli.bench.workload import WorkloadConfig
from cli.options import ModelOption, PathOption, RouterOptions, TemperatureOption, TimeoutOption
from cli.output import print_styled, reporting_errors
from quartet.client import Model, QuartetClient, RequestPath

_INTERRUPTED = 130  # what a shell says of a command that Ctrl-C ended
_PIPE_WIDTH = 160
# The report names their versions.
_PACKAGES = ("quartet", "grpcio", "protobuf", "uvloop", "numpy")


def _panel(name: str) -> Callable[..., Any]:
    return partial(typer.Option, rich_help_panel=name)


_load, _lengths, _output = map(_panel, ("Load", "Prompts and answers", "Output"))
_CONCURRENCY = _load(
    "--concurrency",
    help="Closed loop: this many clients, each with one request at a time.",
    min=1,
    show_default=str(DEFAULT_CONCURRENCY),
)
_RATE = _load("--rate", help="Open loop: requests a second, Poisson, however many run.")
_REPLAY = _load("--replay", help="Open loop: the trace's own times; 2: twice as fast.", metavar="SPEED")
_SWEEP = _load(
    "--sweep", help="One run for each concurrency, or for each rate, one after the other.", metavar="1,2,4|rate=1,2,4"
)
_WARMUP = _load(
    "--warmup",
    help="Load before anything counts.",
    metavar="SECONDS",
    min=0,
    show_default=f"{DEFAULT_WARMUP_S:g}; 0 with --trace, whose every request counts",
)
_DURATION = _load(
    "--duration",
    help="How long requests are sent.",
    metavar="SECONDS",
    show_default=f"{DEFAULT_DURATION_S:g}, unless --requests, --rounds or --trace ends it",
)
_REQUESTS = _load("--requests", help="How many requests are sent.", min=1)
_ROUNDS = _load("--rounds", help="How many requests are sent for each client of a closed loop.", min=1)
_WAIT = _load(
    "--wait",
    help="Time to become ready: a router that serves, workers, and a first answer. Without it, it must serve now.",
    metavar="SECONDS",
    min=0,
)
_length = partial(_lengths, metavar="N|LOW-HIGH", show_default=DEFAULT_LENGTH)
_PROMPT_TOKENS = _length("--prompt-tokens", help="Length of prompts; an even draw from a range.")
_OUTPUT_TOKENS = _length("--output-tokens", help="Length of answers, exactly: end-of-sequence is ignored.")
_TRACE = _lengths(
    "--trace",
    help="Lengths and shared prefixes from a trace in Mooncake's format, each request once.",
    exists=True,
    dir_okay=False,
)
_TEXT = _lengths("--text", help="Send random words, about one a token, not token ids.")
_IDS = _lengths("--token-ids", help="Token ids that prompts are drawn from.", metavar="LOW-HIGH")
_SEED = _lengths("--seed", help="Of prompts, lengths and arrivals.", min=0, show_default="another each time")
_JSON = _output("--json", help="Write all figures; - is standard output, and only that.", metavar="FILE")
_PLOT = _output("--plot", help="Draw a picture.", metavar="FILE.png", dir_okay=False)
_OUT = _output("--out", help="Write a folder: figures, and one folder for each load.", metavar="DIR", file_okay=False)
_LOG_DIR = _output(
    "--log-dir",
    help="That of quartet up: copy what the processes wrote during each load, and their settings, to --out.",
    metavar="DIR",
    file_okay=False,
)
_LABEL = _output("--label", help="Say more of the deployment, for --out. May be given again.", metavar="NAME=VALUE")

bench = typer.Typer(name="bench", add_completion=False)
bench.command("compare")(compare)


@bench.callback(invoke_without_command=True)
@spread_groups
def measure(
    context: typer.Context,
    *,
    router: RouterOptions,
    model: ModelOption = "",
    path: PathOption = RequestPath.GENERATE,
    concurrency: Annotated[int | None, _CONCURRENCY] = None,
    rate: Annotated[float | None, _RATE] = None,
    replay: Annotated[float | None, _REPLAY] = None,
    sweep: Annotated[str | None, _SWEEP] = None,
    warmup_s: Annotated[float | None, _WARMUP] = None,
    duration_s: Annotated[float | None, _DURATION] = None,
    max_requests: Annotated[int | None, _REQUESTS] = None,
    rounds: Annotated[int | None, _ROUNDS] = None,
    wait_s: Annotated[float | None, _WAIT] = None,
    prompt_tokens: Annotated[str | None, _PROMPT_TOKENS] = None,
    output_tokens: Annotated[str | None, _OUTPUT_TOKENS] = None,
    trace: Annotated[Path | None, _TRACE] = None,
    is_text: Annotated[bool, _TEXT] = False,
    ids: Annotated[str, _IDS] = DEFAULT_IDS,
    seed: Annotated[int | None, _SEED] = None,
    temperature: TemperatureOption = None,
    timeout_s: TimeoutOption = None,
    json_file: Annotated[str | None, _JSON] = None,
    plot_file: Annotated[Path | None, _PLOT] = None,
    out: Annotated[Path | None, _OUT] = None,
    log_dir: Annotated[Path | None, _LOG_DIR] = None,
    labels: Annotated[list[str] | None, _LABEL] = None,
) -> None:
    """Put load on a router and measure what its clients see. Ctrl-C ends it and shows what was measured."""
    if context.invoked_subcommand is not None:
        return
    started_at, began = datetime.now(UTC), time.monotonic()
    output = OutputFiles(json=json_file, plot=plot_file)
    output.check()
    loads = make_loads(concurrency, rate, replay, sweep, has_trace=trace is not None)
    plan = BenchPlan(
        loads=loads,
        limits=make_limits(warmup_s, duration_s, max_requests, rounds, loads=loads, has_trace=trace is not None),
        workload=make_workload_config(prompt_tokens, output_tokens, trace, ids, is_text=is_text),
        sender=SenderConfig(path=path, model=model, temperature=temperature, timeout_s=timeout_s),
        seed=make_seed(seed),
    )
    options = FolderOptions(path=out, log_dir=log_dir, labels=parse_labels(labels or ()))
    options.prepare()
    provenance = describe_run("bench", started_at, _PACKAGES)
    with reporting_errors(NotReadyError):
        used_model, points, folder = uvloop.run(_run(router, plan, wait_s, options, provenance))
        duration_s = time.monotonic() - began
        report = provenance | _report(plan, trace, duration_s, used_model, [point.result for point in points])
        code = _finish(output, report, plan, used_model, points)
        if folder is not None:
            folder.write(REPORT_FILE, report)
            code = code if folder.is_complete else 1
        raise typer.Exit(code)


def _report(
    plan: BenchPlan, trace: Path | None, duration_s: float, model: Model, results: Sequence[PointResult]
) -> dict[str, object]:
    """The JSON of one command: what was run, against what, and what came out. docs/bench.md describes its keys."""
    workload = plan.workload
    return {
        "duration_s": duration_s,
        "model": {
            "name": model.name,
            "fingerprint": model.fingerprint,
            "num_prefill_workers": model.num_prefill_workers,
            "num_decode_workers": model.num_decode_workers,
        },
        "path": plan.sender.path.value,
        "workload": {
            "prompt_tokens": None if trace else str(workload.prompt_tokens),
            "output_tokens": None if trace else str(workload.output_tokens),
            "trace": str(trace) if trace else None,
            "is_text": workload.is_text,
            "temperature": plan.sender.temperature,
            "seed": plan.seed,
        },
        "limits": asdict(plan.limits),
        "is_interrupted": any(result.is_interrupted for result in results),
        "points": [asdict(result) for result in results],
    }


async def _run(
    router: RouterOptions,
    plan: BenchPlan,
    wait_s: float | None,
    options: FolderOptions,
    provenance: dict[str, object],
) -> tuple[Model, list[Point], ResultFolder | None]:
    """Wait for the deployment if that is wanted, then run ``plan``; returns the folder of results if there is one."""
    if plan.sender.path is RequestPath.DIRECT:
        # The client would import it, with tokenizers, at the first request, whose latency would then have that in it.
        import quartet.client.direct  # noqa: F401
    wait = None if wait_s is None else Wait(wait_s, partial(print_styled, err=True))
    routers = await (asyncio.to_thread(router.addresses) if wait is None else wait.find_routers(router))
    async with QuartetClient(routers, tls=router.tls) as client:
        if wait is not None:
            await wait.until_serving(client, routers, router.tls, plan)
        # Before any load: report a router that does not answer, or a model that can't take these lengths.
        model = await _find_model(client, plan.sender.model)
        _check_lengths(plan.workload, model)
        folder = None
        if options.path is not None:
            options.check_logs()
            folder = ResultFolder(options.path, options.log_dir)
            folder.write(DEPLOYMENT_FILE, provenance | await describe_deployment(client, model, options))
        return model, await _measure(client, plan, folder), folder


async def _measure(client: QuartetClient, plan: BenchPlan, folder: ResultFolder | None) -> list[Point]:
    with BenchDisplay(len(plan.loads)) as display:
        following = asyncio.create_task(display.follow())
        try:
            return await run_plan(client, plan, Observers(display, *([folder] if folder else [])))
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
        # A request of a trace that does not fit is sent all the same, and shows among the errors.
        return
    num_tokens = workload.prompt_tokens.high + workload.output_tokens.high
    if num_tokens > model.max_model_len:
        raise typer.BadParameter(
            f"together up to {num_tokens} tokens, but {model.name} takes {model.max_model_len}",
            param_hint="--prompt-tokens and --output-tokens",
        )


def _finish(
    output: OutputFiles, report: Mapping[str, object], plan: BenchPlan, model: Model, points: Sequence[Point]
) -> int:
    """Show and write the figures; return the exit code."""
    results = [point.result for point in points]
    title = f"{model.name}, path {plan.sender.path}, {plan.workload}"
    print_summary(output.open_console(_PIPE_WIDTH), title, results)

    def draw(path: Path) -> None:
        # Imported here: matplotlib takes a second, and few users draw.
        from cli.bench.plot import plot

        plot(points, title, path)

    if not output.write(report, draw):
        return 1
    if any(result.is_interrupted for result in results):
        return _INTERRUPTED
    return 0 if any(result.requests.finished for result in results) else 1
