"""``quartet trace``: makes a trace of requests, for ``quartet bench --trace`` and other readers of the format."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cli.output import try_write
from cli.traces.format import TraceSummary, write_trace
from cli.traces.generate import Arrivals, SessionConfig, TraceConfig, generate


def trace(
    *,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="FILE", dir_okay=False, help="File to write; gzipped where it ends in .gz."),
    ],
    max_requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="The trace ends after so many requests.")
    ] = None,
    duration_s: Annotated[
        float | None, typer.Option("--duration", metavar="SECONDS", help="The trace ends after so long.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same trace.")] = 0,
    arrivals: Arrivals,
    sessions: SessionConfig,
) -> None:
    """Make a trace in Mooncake's format: sessions whose prompts extend each other, over shared system prompts."""
    if max_requests is None and duration_s is None:
        raise typer.BadParameter("one of them must say where the trace ends", param_hint="--requests or --duration")
    config = TraceConfig(
        arrivals=arrivals, sessions=sessions, max_requests=max_requests, duration_s=duration_s, seed=seed
    )
    requests = list(generate(config))
    if not try_write(str(out), partial(write_trace, requests, out)):
        raise typer.Exit(1)
    typer.echo(f"{out}: {TraceSummary.of(requests)}")
