"""``quartet trace``: makes a trace of requests, for ``quartet bench --trace`` and other readers of the format."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from cli.output import reporting_errors, try_write
from cli.traces.format import TraceSummary, write_trace
from cli.traces.generate import ArrivalKind, Arrivals, SessionConfig, TraceConfig, generate

_ARRIVALS, _SESSIONS = Arrivals(), SessionConfig()


def _arrivals(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, rich_help_panel="Arrivals", help=help, **more)


def _sessions(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, rich_help_panel="Sessions; lengths are in tokens, and lognormal", help=help, **more)


OutOption: TypeAlias = Annotated[
    Path, typer.Option("--out", metavar="FILE", dir_okay=False, help="File to write; gzipped where it ends in .gz.")
]
RequestsOption: TypeAlias = Annotated[
    int | None, typer.Option("--requests", min=1, help="The trace ends after so many requests.")
]
DurationOption: TypeAlias = Annotated[
    float | None, typer.Option("--duration", metavar="SECONDS", help="The trace ends after so long.")
]
SeedOption: TypeAlias = Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same trace.")]
KindOption: TypeAlias = Annotated[ArrivalKind, _arrivals("--arrivals", "How requests follow each other.")]
RateOption: TypeAlias = Annotated[float, _arrivals("--rate", "Requests a second, on average.")]
BurstSizeOption: TypeAlias = Annotated[int, _arrivals("--burst-size", "Requests of one burst.")]
BurstSpreadOption: TypeAlias = Annotated[
    float, _arrivals("--burst-spread", "Time within which a burst's requests come.", metavar="SECONDS")
]
TurnsOption: TypeAlias = Annotated[float, _sessions("--turns", "Requests of a session, on average.")]
ThinkTimeOption: TypeAlias = Annotated[
    float, _sessions("--think-time", "From one turn to the next, on average.", metavar="SECONDS")
]
MessageTokensOption: TypeAlias = Annotated[
    float, _sessions("--message-tokens", "What the user adds in a turn, on average.")
]
OutputTokensOption: TypeAlias = Annotated[float, _sessions("--output-tokens", "Length of answers, on average.")]
SystemTokensOption: TypeAlias = Annotated[
    float, _sessions("--system-tokens", "Length of system prompts, on average; 0: there are none.")
]
SystemPromptsOption: TypeAlias = Annotated[int, _sessions("--system-prompts", "How many system prompts there are.")]
ZipfOption: TypeAlias = Annotated[
    float, _sessions("--zipf", "The n-th system prompt is drawn in proportion to n^-ZIPF; 0: all are as likely.")
]
SigmaOption: TypeAlias = Annotated[
    float, _sessions("--length-sigma", "Of the logarithm of lengths; 0: all are the mean.")
]
MaxInputTokensOption: TypeAlias = Annotated[
    int, _sessions("--max-input-tokens", "No prompt is longer: its session ends.")
]


def trace(
    *,
    out: OutOption,
    max_requests: RequestsOption = None,
    duration_s: DurationOption = None,
    seed: SeedOption = 0,
    kind: KindOption = _ARRIVALS.kind,
    rate: RateOption = _ARRIVALS.rate,
    burst_size: BurstSizeOption = _ARRIVALS.burst_size,
    burst_spread_s: BurstSpreadOption = _ARRIVALS.burst_spread_s,
    num_turns: TurnsOption = _SESSIONS.num_turns,
    think_time_s: ThinkTimeOption = _SESSIONS.think_time_s,
    message_tokens: MessageTokensOption = _SESSIONS.message_tokens,
    output_tokens: OutputTokensOption = _SESSIONS.output_tokens,
    system_tokens: SystemTokensOption = _SESSIONS.system_tokens,
    num_system_prompts: SystemPromptsOption = _SESSIONS.num_system_prompts,
    zipf: ZipfOption = _SESSIONS.zipf,
    length_sigma: SigmaOption = _SESSIONS.length_sigma,
    max_input_tokens: MaxInputTokensOption = _SESSIONS.max_input_tokens,
) -> None:
    """Make a trace in Mooncake's format: sessions whose prompts extend each other, over shared system prompts."""
    if max_requests is None and duration_s is None:
        raise typer.BadParameter("one of them must say where the trace ends", param_hint="--requests or --duration")
    with reporting_errors():
        arrivals = Arrivals(kind=kind, rate=rate, burst_size=burst_size, burst_spread_s=burst_spread_s)
        sessions = SessionConfig(
            num_turns=num_turns,
            think_time_s=think_time_s,
            message_tokens=message_tokens,
            output_tokens=output_tokens,
            system_tokens=system_tokens,
            num_system_prompts=num_system_prompts,
            zipf=zipf,
            length_sigma=length_sigma,
            max_input_tokens=max_input_tokens,
        )
        config = TraceConfig(
            arrivals=arrivals, sessions=sessions, max_requests=max_requests, duration_s=duration_s, seed=seed
        )
        _write(config, out)


def _write(config: TraceConfig, out: Path) -> None:
    requests = list(generate(config))
    if not try_write(str(out), partial(write_trace, requests, out)):
        raise typer.Exit(1)
    typer.echo(f"{out}: {TraceSummary.of(requests)}")
