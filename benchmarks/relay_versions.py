"""What a change costs a token and a request: the Router's CPU time in two versions, whose windows come by turns.

Runs of ``benchmarks.relay`` of one version differ by a tenth or more, so two runs don't show a change of a twentieth.
Here both versions serve at once, and each window of one comes right before or after a window of the other.

    python -m benchmarks.relay_versions --before CHECKOUT --json FILE [--pairs 30] [--only LOAD ...]

CHECKOUT is another checkout of this project, with an environment of its own in ``.venv``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.children import Child, start_program
from benchmarks.relay import FLOORS, NUM_PROMPT_TOKENS, NUM_REQUEST_CLIENTS, REQUEST_WAYS
from benchmarks.relay_load import Way
from benchmarks.relay_measure import Windows
from benchmarks.relay_versions_side import READY
from benchmarks.report import Report, make_parser
from quartet.telemetry.provenance import Commit

_HERE = Path(__file__).resolve().parent
_START_TIMEOUT_S = 120.0
# How often at most the true median may lie outside of what is told, and the fewest pairs that can tell it.
_MAX_ERROR, _MIN_PAIRS = 0.05, 6


@dataclass(frozen=True, kw_only=True)
class Turns:
    """What both sides do for one load.

    Attributes:
        count: streams, or clients of the closed loop.
        num_prompt_tokens: of requests of one token; ``None``: the load is streams that don't end.
    """

    way: Way
    count: int
    num_prompt_tokens: int | None = None


LOADS: Mapping[str, Turns] = {
    f"request_{name}": Turns(way=way, count=NUM_REQUEST_CLIENTS, num_prompt_tokens=NUM_PROMPT_TOKENS)
    for name, way in REQUEST_WAYS.items()
} | {f"{way}_{num_streams}": Turns(way=way, count=num_streams) for way, num_streams in FLOORS}


@dataclass(frozen=True, kw_only=True)
class Change:
    """One load.

    Attributes:
        before, after: the Router's CPU time in each window, in pairs: ms a request, or us a token of streams.
        times: median of the pairs' ratios, after over before.
        lowest, highest: between these the true median lies with a certainty of 95 %, where there are six pairs.
    """

    before: Sequence[float]
    after: Sequence[float]
    times: float
    lowest: float
    highest: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured.

    Attributes:
        before: the other commit.
        loads: by the names of ``ratio_to_grpc`` of ``benchmarks.relay``.
    """

    before: Commit
    windows: Windows
    loads: Mapping[str, Change]


def main() -> None:
    """Run the command line."""
    parser = make_parser("relay_versions", __doc__)
    parser.add_argument("--before", required=True, type=Path, metavar="CHECKOUT", help="another checkout, with .venv")
    parser.add_argument("--pairs", type=int, default=30, metavar="N", help="windows of each version (30)")
    parser.add_argument("--only", nargs="+", choices=list(LOADS), metavar="LOAD", help=", ".join(LOADS))
    arguments = parser.parse_args()
    if arguments.pairs < _MIN_PAIRS:
        parser.error(f"--pairs: at least {_MIN_PAIRS}, else nothing is certain by 95 %")
    python = arguments.before / ".venv" / "bin" / "python"
    if not python.is_file():
        parser.error(f"--before: there is no {python}")
    report = Report("relay_versions", packages=("uvloop",), revision=arguments.commit)
    windows = Windows(warm_up_s=0.5, window_s=1.0, round_size=arguments.pairs, num_rounds=1)
    results = uvloop.run(compare(arguments.before.resolve(), python.absolute(), arguments.only or list(LOADS), windows))
    report.write(results, arguments.json)


async def compare(before: Path, python: Path, names: Sequence[str], windows: Windows) -> Results:
    """Measure this version against the checkout ``before``, which ``python`` runs."""
    found: dict[str, Change] = {}
    async with (
        _start_side(before, python) as (theirs, their_commit),
        _start_side(_HERE.parent, Path(sys.executable)) as (ours, _),
    ):
        for name in names:
            found[name] = change = await _by_turns(theirs, ours, LOADS[name], windows)
            text = f"{name}: {change.times:.3f} times before ({change.lowest:.3f} to {change.highest:.3f})"
            print(text, file=sys.stderr, flush=True)
    return Results(before=their_commit, windows=windows, loads=found)


@asynccontextmanager
async def _start_side(checkout: Path, python: Path) -> AsyncIterator[tuple[Child, Commit]]:
    # In the checkout, and by the path of this version's side: ``-P`` keeps this version's modules out.
    command = ["env", "-C", str(checkout), str(python), "-P", str(_HERE / "relay_versions_side.py")]
    async with start_program(command, name=f"the side of {checkout}") as child:
        yield child, Commit(**await child.read(_START_TIMEOUT_S))


async def _by_turns(theirs: Child, ours: Child, turns: Turns, windows: Windows) -> Change:
    order = {**vars(turns), "windows": vars(windows)}
    for side in (theirs, ours):
        assert await side.ask(order) == READY
    results: dict[Child, list[float]] = {}
    for number in range(windows.round_size):
        # Each is as often the second of a pair as the first.
        for side in (theirs, ours) if number % 2 else (ours, theirs):
            results[side] = await side.ask("go")  # READY for the next window; after the last, the figures
    return make_change(results[theirs], results[ours])


def make_change(before: Sequence[float], after: Sequence[float]) -> Change:
    """What pairs of windows show."""
    ratios = sorted(mine / other for mine, other in zip(after, before, strict=True))
    first, error = 0, 2 * 0.5 ** len(ratios)
    # How many ratios are below the true median is binomial, whatever their distribution is.
    while (error := error + 2 * math.comb(len(ratios), first + 1) * 0.5 ** len(ratios)) <= _MAX_ERROR:
        first += 1
    return Change(before=before, after=after, times=median(ratios), lowest=ratios[first], highest=ratios[-1 - first])


if __name__ == "__main__":
    main()
