"""What a token costs a global router, beside what it costs the router of its pool: both relay the same tokens.

One Decode worker runs an engine that only keeps a pace, its pool's router makes the messages of a session, and the
global router passes them on to the client, by a session too. CPU time of both routers is read in the same windows.

    python -m benchmarks.global_router --json FILE [--streams 256] [--short]
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.processes import CpuMeter
from benchmarks.progress import LiveLine
from benchmarks.relay_load import Clients, Way
from benchmarks.relay_measure import Case, open_load, stream_jobs
from benchmarks.relay_stack import POOL_ROUTER, ROUTER, RelayStack
from benchmarks.report import Report, make_parser

_LOG = Path(".run/benchmark-global-router.log")
_WARM_UP_S = 2.0
# Windows of each load, and the seconds of each.
_SHORT, _LONG = (3, 2.0), (9, 5.0)
#: Goal: the global router's CPU time a token over that of the pool's router.
MAX_RATIO = 1.0


@dataclass(frozen=True, kw_only=True)
class Window:
    """CPU time of each router for a token that reached the client."""

    global_cpu_us_per_token: float
    pool_cpu_us_per_token: float
    tokens_per_s: float

    @property
    def ratio(self) -> float:
        """The global router's over the pool router's."""
        return self.global_cpu_us_per_token / self.pool_cpu_us_per_token


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one load.

    Attributes:
        ratio: median over the windows.
    """

    ratio: float
    windows: Sequence[Window]


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured, by ``ids`` (token ids only) and ``text``."""

    num_streams: int
    window_s: float
    goal: float
    loads: Mapping[str, Figures]


def main() -> None:
    """Run the command line; the exit code is 1 if the global router costs more than it may."""
    parser = make_parser("global_router", __doc__ or "")
    parser.add_argument("--streams", type=int, default=256, help="open streams; default %(default)d")
    parser.add_argument("--short", action="store_true", help="three windows of two seconds: half a minute")
    arguments = parser.parse_args()
    report = Report("global_router", packages=("uvloop",), revision=arguments.commit)
    num_windows, window_s = _SHORT if arguments.short else _LONG
    results = uvloop.run(measure(arguments.streams, num_windows, window_s))
    report.write(results, arguments.json)
    sys.exit(max(figures.ratio for figures in results.loads.values()) > MAX_RATIO)


async def measure(num_streams: int, num_windows: int, window_s: float) -> Results:
    """Both loads. Raises ``LoadFailedError``: one can't be opened, or requests failed."""
    loads = {}
    with LiveLine() as line:
        async with RelayStack(_LOG, line.say, with_pool=True) as stack:
            for name in ("ids", "text"):
                case = Case(way=Way.SESSION, num_streams=num_streams, with_text=name == "text")
                line.say(case.name)
                async with open_load(stack, stream_jobs(stack, case)) as clients:
                    await asyncio.sleep(min(_WARM_UP_S, window_s))
                    windows = [await _window(stack, clients, window_s) for _ in range(num_windows)]
                loads[name] = Figures(ratio=median(window.ratio for window in windows), windows=windows)
    return Results(num_streams=num_streams, window_s=window_s, goal=MAX_RATIO, loads=loads)


async def _window(stack: RelayStack, clients: Clients, window_s: float) -> Window:
    await clients.begin()
    meter = CpuMeter(stack.pids)
    await asyncio.sleep(window_s)
    use = meter.read()
    counted = await clients.end()
    num_tokens = counted.num_tokens * use.duration_s / counted.duration_s
    return Window(
        global_cpu_us_per_token=1e6 * use.cpu_s[ROUTER] / num_tokens,
        pool_cpu_us_per_token=1e6 * use.cpu_s[POOL_ROUTER] / num_tokens,
        tokens_per_s=num_tokens / use.duration_s,
    )


if __name__ == "__main__":
    main()
