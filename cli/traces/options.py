"""Options of ``quartet trace``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from cli.traces.arrivals import ArrivalKind


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
