"""``quartet trace``: makes a trace of requests, for ``quartet bench --trace`` and all else that reads the format."""

from __future__ import annotations

from pathlib import Path

import typer

from cli.errors import reporting_errors
from cli.traces import options
from cli.traces.arrivals import Arrivals
from cli.traces.format import write_trace
from cli.traces.generate import TraceConfig, generate
from cli.traces.sessions import SessionConfig
from cli.traces.summary import TraceSummary

_ARRIVALS, _SESSIONS = Arrivals(), SessionConfig()


def trace(
    *,
    out: options.OutOption,
    max_requests: options.RequestsOption = None,
    duration_s: options.DurationOption = None,
    seed: options.SeedOption = 0,
    kind: options.KindOption = _ARRIVALS.kind,
    rate: options.RateOption = _ARRIVALS.rate,
    burst_size: options.BurstSizeOption = _ARRIVALS.burst_size,
    burst_spread_s: options.BurstSpreadOption = _ARRIVALS.burst_spread_s,
    num_turns: options.TurnsOption = _SESSIONS.num_turns,
    think_time_s: options.ThinkTimeOption = _SESSIONS.think_time_s,
    message_tokens: options.MessageTokensOption = _SESSIONS.message_tokens,
    output_tokens: options.OutputTokensOption = _SESSIONS.output_tokens,
    system_tokens: options.SystemTokensOption = _SESSIONS.system_tokens,
    num_system_prompts: options.SystemPromptsOption = _SESSIONS.num_system_prompts,
    zipf: options.ZipfOption = _SESSIONS.zipf,
    length_sigma: options.SigmaOption = _SESSIONS.length_sigma,
    max_input_tokens: options.MaxInputTokensOption = _SESSIONS.max_input_tokens,
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
    try:
        write_trace(requests, out)
    except OSError as error:
        typer.secho(f"quartet: can't write {out}: {error.strerror or error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{out}: {TraceSummary.of(requests)}")
