"""What a token and a request cost as they pass through: CPU of Router and Decode, and the latency they add.

One Decode worker runs an engine that only keeps a pace (a step every 2 ms, one token every 20 ms on each stream). The
Router and the clients run in processes of their own. Every way to get tokens is measured with 256 and 1024 streams.

The cost of gRPC alone is measured beside it: each window of the Router comes right after a window of a relay that does
nothing but gRPC, under the same load. The machine's changing speed disturbs the ratio of the two least.

    python -m benchmarks.relay --json FILE [--short] [--ratios] [--only NAME ...] [--runs 5]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.paced_engine import PERIOD, STEP_S
from benchmarks.progress import LiveLine
from benchmarks.relay_floor import Floor, RequestFloor, open_floor
from benchmarks.relay_load import Load, LoadFailedError, Way
from benchmarks.relay_measure import (
    Case,
    Figures,
    IdleFigures,
    Measurer,
    RequestFigures,
    Windows,
    medians,
)
from benchmarks.relay_stack import RelayStack
from benchmarks.report import Report, make_parser

_LOG = Path(".run/benchmark-relay.log")
_STREAMS = (256, 1024)
#: Generate with more streams than one loop can carry has no floor: its cost depends on how many tokens are merged.
FLOORS = ((Way.GENERATE, 256), (Way.SESSION, 256), (Way.SESSION, 1024), (Way.HTTP, 256))
#: Of the closed loop of requests of one token.
NUM_PROMPT_TOKENS, NUM_REQUEST_CLIENTS = 128, 16
_LONG = Windows(warm_up_s=2.0, window_s=5.0, round_size=2, num_rounds=3)
_SHORT = Windows(warm_up_s=0.5, window_s=1.0, round_size=3, num_rounds=1)
#: Both Place ways are the same to the router, which sees no token.
REQUEST_WAYS = {"generate": Way.GENERATE, "session": Way.SESSION, "place": Way.PLACE_PER_CLIENT}
#: Chats with text, by template and tokenizer, have no bare relay: they are compared with each other.
_CHAT_WAYS = {"generate_chat": Way.GENERATE, "http_chat": Way.HTTP}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The load, and how it was measured.

    Figures are medians over all windows: ``windows.round_size * windows.num_rounds`` of each of ``num_runs`` runs. Each
    run has servers of its own.
    """

    step_ms: float
    token_interval_ms: float
    windows: Windows
    num_runs: int
    request_prompt_tokens: int
    request_clients: int


@dataclass(frozen=True, kw_only=True)
class Share:
    """Figures for one number of streams, with or without text, by way.

    Attributes:
        by_way: all figures.
        decode_cpu_us_per_token: without the engine's thread, which ``decode_engine_cpu_us_per_token`` gives.
    """

    router_cpu_us_per_token: Mapping[str, float]
    decode_cpu_us_per_token: Mapping[str, float]
    decode_engine_cpu_us_per_token: Mapping[str, float]
    added_latency_ms_p99: Mapping[str, float]
    by_way: Mapping[str, Figures]


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Figures for one number of streams: token ids only, and with text."""

    ids: Share
    text: Share


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How far apart the ratios to gRPC are.

    Attributes:
        runs: for each run, the median over its windows.
        lowest, highest: over all windows.
    """

    runs: Sequence[float]
    lowest: float
    highest: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured.

    Attributes:
        ratio_to_grpc: the Router's CPU time over that of a bare relay's router. ``generate_256``, ``session_256`` and
            ``session_1024`` are for a token, without text; ``http_256`` is for a token with text, over a bare relay
            that pushes events through aiohttp; ``request_generate``, ``request_session`` and ``request_place`` are for
            a request of one token. A window's ratio is to the bare relay's window right before it; a run's ratio is
            the median over its windows; this is the median over the runs.
        ratio_to_grpc_spread: by the same names.
        floor: CPU time of a bare relay, by ``generate_256``, ``session_256`` and ``session_1024``.
        request_floor: CPU time of a bare relay for a request, by the names of ``requests``.
        failed: loads that could not be measured, with the reason.
    """

    setting: Setting
    idle: IdleFigures
    ratio_to_grpc: Mapping[str, float]
    ratio_to_grpc_spread: Mapping[str, Spread]
    floor: Mapping[str, Floor]
    streams_256: Streams
    streams_1024: Streams
    router_cpu_ms_per_request: Mapping[str, float]
    requests: Mapping[str, RequestFigures]
    request_floor: Mapping[str, RequestFloor]
    failed: Mapping[str, str]


@dataclass
class _Found:
    """The measurements so far; ``ratios`` of each run, by the names of ``Results.ratio_to_grpc``, window by window."""

    idle: list[IdleFigures] = field(default_factory=list)
    ratios: list[dict[str, list[float]]] = field(default_factory=list)
    windows: dict[Case, list[Figures]] = field(default_factory=dict)
    requests: dict[str, list[RequestFigures]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    floor: dict[str, list[Floor]] = field(default_factory=dict)
    request_floor: dict[str, list[RequestFloor]] = field(default_factory=dict)


def main() -> None:
    """Run the command line."""
    parser = make_parser("relay", __doc__)
    parser.add_argument("--short", action="store_true", help="one round of three windows of a second: two minutes")
    parser.add_argument("--runs", type=int, default=1, help="whole runs, each with servers of its own (1)")
    parser.add_argument("--ratios", action="store_true", help="only loads that have a bare relay beside them")
    parser.add_argument("--only", nargs="+", choices=list(Way), metavar="WAY", help=", ".join(Way))
    arguments = parser.parse_args()
    report = Report("relay", packages=("uvloop",), revision=arguments.commit)
    ways = tuple(Way(name) for name in arguments.only or Way)
    windows = _SHORT if arguments.short else _LONG
    cases = [case for case in _cases(ways) if _has_floor(case) or not arguments.ratios]
    report.write(uvloop.run(_run(windows, ways, cases, arguments.runs)), arguments.json)


def spreads(runs: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Spread]:
    """The spread of each ratio over ``runs``, by name. A run has one ratio a window, and may lack some names."""
    found: dict[str, Spread] = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        of_runs = [run[name] for run in runs if name in run]
        every = [ratio for ratios in of_runs for ratio in ratios]
        found[name] = Spread(runs=[median(ratios) for ratios in of_runs], lowest=min(every), highest=max(every))
    return found


async def _run(windows: Windows, ways: tuple[Way, ...], cases: Sequence[Case], num_runs: int) -> Results:
    found = _Found()
    with LiveLine() as line:
        for number in range(num_runs):
            if num_runs > 1:
                line.say(f"run {number + 1} of {num_runs}")
            found.ratios.append({})
            async with RelayStack(_LOG, line.say) as stack:
                measurer = Measurer(stack, line, windows)
                found.idle.append(await measurer.idle())
                for _ in range(windows.num_rounds):
                    await _round(measurer, line, ways, cases, found)
    return _results(windows, num_runs, found)


async def _round(
    measurer: Measurer, line: LiveLine, ways: tuple[Way, ...], cases: Sequence[Case], found: _Found
) -> None:
    for name, way in REQUEST_WAYS.items():
        if way in ways:
            await _measure_requests(measurer, line, name, found)
    for name, way in _CHAT_WAYS.items():
        if way in ways and Way.HTTP in ways:
            await _measure_chats(measurer, line, name, found)
    for case in cases:
        await _measure_streams(measurer, line, case, found)


async def _measure_requests(measurer: Measurer, line: LiveLine, name: str, found: _Found) -> None:
    way, load = REQUEST_WAYS[name], f"requests of one token, {name}"
    async with open_floor(
        way, Load.REQUESTS, NUM_REQUEST_CLIENTS, measurer.windows, num_prompt_tokens=NUM_PROMPT_TOKENS
    ) as bare:
        with _noting(line, load, found):
            items = await measurer.requests(way, NUM_REQUEST_CLIENTS, NUM_PROMPT_TOKENS, bare)
            found.requests.setdefault(name, []).extend(items)
            alone = [window.per_request() for window in bare.found]
            found.request_floor.setdefault(name, []).extend(alone)
            beside = _compare(f"request_{name}", "router_cpu_ms_per_request", items, alone, found)
            now = medians(items)
            line.say(
                f"{load}: router {now.router_cpu_ms_per_request:.3f} ms each, {now.requests_per_s:.0f} a second{beside}"
            )


async def _measure_chats(measurer: Measurer, line: LiveLine, name: str, found: _Found) -> None:
    load = f"chats of one token, {name}"
    with _noting(line, load, found):
        items = await measurer.requests(_CHAT_WAYS[name], NUM_REQUEST_CLIENTS, NUM_PROMPT_TOKENS, is_chat=True)
        found.requests.setdefault(name, []).extend(items)
        now = medians(items)
        line.say(f"{load}: router {now.router_cpu_ms_per_request:.3f} ms each, {now.requests_per_s:.0f} a second")


async def _measure_streams(measurer: Measurer, line: LiveLine, case: Case, found: _Found) -> None:
    with _noting(line, case.name, found):
        if _has_floor(case):
            name = f"{case.way}_{case.num_streams}"
            async with open_floor(case.way, Load.STREAMS, case.num_streams, measurer.windows) as bare:
                items = await measurer.streams(case, bare)
            alone = [window.per_token(case.num_streams) for window in bare.found]
            found.floor.setdefault(name, []).extend(alone)
            beside = _compare(name, "router_cpu_us_per_token", items, alone, found)
        else:
            items, beside = await measurer.streams(case), ""
        found.windows.setdefault(case, []).extend(items)
        now = medians(items)
        line.say(
            f"{case.name}: router {now.router_cpu_us_per_token:.2f} us a token, "
            f"decode {now.decode_cpu_us_per_token:.2f}, p99 +{now.added_latency_ms_p99:.1f} ms, "
            f"{now.tokens_per_s:.0f} tok/s{beside}"
        )


def _compare(name: str, figure: str, ours: Sequence[object], alone: Sequence[object], found: _Found) -> str:
    """Keep the ratios of ``figure``, window by window; returns a short text on their median."""
    ratios = [getattr(mine, figure) / getattr(theirs, figure) for mine, theirs in zip(ours, alone, strict=True)]
    found.ratios[-1].setdefault(name, []).extend(ratios)
    return f"; {median(ratios):.2f} times nothing but gRPC"


@contextmanager
def _noting(line: LiveLine, load: str, found: _Found) -> Iterator[None]:
    """If ``load`` can't be measured, keep the reason for the report and go on."""
    try:
        yield
    except LoadFailedError as error:
        found.failed[load] = str(error)
        line.say(f"{load}: failed: {error}")


def _cases(ways: tuple[Way, ...]) -> list[Case]:
    return [
        Case(way=way, num_streams=num_streams, with_text=with_text)
        for num_streams in _STREAMS
        for with_text in (False, True)
        for way in ways
        if with_text or way is not Way.HTTP  # which always has text
    ]


def _has_floor(case: Case) -> bool:
    return (case.way, case.num_streams) in FLOORS and case.with_text is (case.way is Way.HTTP)


def _results(windows: Windows, num_runs: int, found: _Found) -> Results:
    figures = {case: medians(items) for case, items in found.windows.items()}
    requests = {name: medians(items) for name, items in found.requests.items()}
    spread = spreads(found.ratios)
    few, many = (
        Streams(ids=_share(figures, num_streams, False), text=_share(figures, num_streams, True))
        for num_streams in _STREAMS
    )
    return Results(
        setting=Setting(
            step_ms=STEP_S * 1e3,
            token_interval_ms=STEP_S * PERIOD * 1e3,
            windows=windows,
            num_runs=num_runs,
            request_prompt_tokens=NUM_PROMPT_TOKENS,
            request_clients=NUM_REQUEST_CLIENTS,
        ),
        idle=medians(found.idle),
        ratio_to_grpc={name: median(item.runs) for name, item in spread.items()},
        ratio_to_grpc_spread=spread,
        floor={name: medians(items) for name, items in found.floor.items()},
        streams_256=few,
        streams_1024=many,
        router_cpu_ms_per_request={name: item.router_cpu_ms_per_request for name, item in requests.items()},
        requests=requests,
        request_floor={name: medians(items) for name, items in found.request_floor.items()},
        failed=found.failed,
    )


def _share(figures: Mapping[Case, Figures], num_streams: int, with_text: bool) -> Share:
    mine = {
        str(case.way): item
        for case, item in figures.items()
        if case.num_streams == num_streams and case.with_text == with_text
    }
    names = [item.name for item in fields(Share) if item.name != "by_way"]
    return Share(by_way=mine, **{name: {way: getattr(item, name) for way, item in mine.items()} for name in names})


if __name__ == "__main__":
    main()
