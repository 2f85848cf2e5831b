"""Options of ``quartet replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from cli.replay.policies import POLICIES


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
