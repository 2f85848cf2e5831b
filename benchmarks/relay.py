"""What a token and a request cost on their way through: CPU of Router and Decode, and the latency they add.

One Decode worker on an engine that only keeps a pace (a step every 2 ms, one token every 20 ms on each stream), the
Router, and clients, each in processes of their own. Every way to the tokens is measured with 256 and 1024 streams.

    python -m benchmarks.relay --json FILE [--short] [--only NAME ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.paced_engine import PERIOD, STEP_S
from benchmarks.progress import LiveLine
from benchmarks.relay_clients import AbsentError, LoadFailedError
from benchmarks.relay_floor import Floor, measure_floor
from benchmarks.relay_job import Way
from benchmarks.relay_measure import (
    Case,
    Figures,
    IdleFigures,
    Measurer,
    RequestFigures,
    Windows,
    medians,
    request_medians,
)
from benchmarks.relay_stack import RelayStack
from benchmarks.report import Report, add_report_argument
from benchmarks.request_floor import RequestFloor, measure_request_floor
from quartet.telemetry.provenance import write_report

_LOG = Path(".run/benchmark-relay.log")
_STREAMS = (256, 1024)
# Generate with more streams than one loop can carry has no floor: it hangs on how much is merged.
_FLOORS = ((Way.GENERATE, 256), (Way.SESSION, 256), (Way.SESSION, 1024))
_NUM_PROMPT_TOKENS = 128
_NUM_REQUEST_CLIENTS = 16
_LONG = Windows(warm_up_s=2.0, window_s=5.0, round_size=2, num_rounds=3)
_SHORT = Windows(warm_up_s=0.5, window_s=1.0, round_size=3, num_rounds=1)
#: Both Place ways are one to the router, which sees no token.
_REQUEST_WAYS = {"generate": Way.GENERATE, "session": Way.SESSION, "place": Way.PLACE_PER_CLIENT}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The load, and how it was measured. Figures are medians of ``windows.round_size * windows.num_rounds`` windows."""

    step_ms: float
    token_interval_ms: float
    windows: Windows
    request_prompt_tokens: int
    request_clients: int


@dataclass(frozen=True, kw_only=True)
class Share:
    """Figures of one number of streams, with or without text, by way; a way that is missing is in ``absent``.

    Attributes:
        by_way: all figures.
        decode_cpu_us_per_token: without the engine's thread, which ``decode_engine_cpu_us_per_token`` is.
    """

    router_cpu_us_per_token: Mapping[str, float]
    decode_cpu_us_per_token: Mapping[str, float]
    decode_engine_cpu_us_per_token: Mapping[str, float]
    added_latency_ms_p99: Mapping[str, float]
    by_way: Mapping[str, Figures]


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Figures of one number of streams: token ids only, and with text."""

    ids: Share
    text: Share


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured.

    Attributes:
        floor: what a bare relay spends, by ``generate_256``, ``session_256`` and ``session_1024``; each was measured
            just before the load that it is to be compared with.
        request_floor: what a bare relay spends on a request, by the names of ``requests``; measured likewise.
        absent: ways that the servers don't offer, to what they said.
        failed: loads that could not be measured, and why.
    """

    setting: Setting
    idle: IdleFigures
    floor: Mapping[str, Floor]
    streams_256: Streams
    streams_1024: Streams
    router_cpu_ms_per_request: Mapping[str, float]
    requests: Mapping[str, RequestFigures]
    request_floor: Mapping[str, RequestFloor]
    absent: Mapping[str, str]
    failed: Mapping[str, str]


@dataclass
class _Found:
    """What was measured so far."""

    windows: dict[Case, list[Figures]] = field(default_factory=dict)
    requests: dict[str, list[RequestFigures]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    floor: dict[str, list[Floor]] = field(default_factory=dict)
    request_floor: dict[str, list[RequestFloor]] = field(default_factory=dict)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay", description=__doc__.partition("\n")[0])
    add_report_argument(parser)
    parser.add_argument("--short", action="store_true", help="one round of three windows of a second: two minutes")
    parser.add_argument("--only", nargs="+", choices=list(Way), metavar="WAY", help=", ".join(Way))
    arguments = parser.parse_args()
    report = Report("relay", packages=("uvloop",))
    ways = tuple(Way(name) for name in arguments.only or Way)
    windows = _SHORT if arguments.short else _LONG
    write_report(report.finish(uvloop.run(_run(windows, ways))), arguments.json)


async def _run(windows: Windows, ways: tuple[Way, ...]) -> Results:
    found = _Found()
    with LiveLine() as line:
        async with RelayStack(_LOG, line.say) as stack:
            measurer = Measurer(stack, line, windows)
            idle = await measurer.idle()
            for _ in range(windows.num_rounds):
                await _round(measurer, line, ways, found)
    return _results(windows, idle, found)


async def _round(measurer: Measurer, line: LiveLine, ways: tuple[Way, ...], found: _Found) -> None:
    for name, way in _REQUEST_WAYS.items():
        if way in ways:
            await _measure_requests(measurer, line, name, found)
    for case in _cases(ways):
        await _measure_streams(measurer, line, case, found)


async def _measure_requests(measurer: Measurer, line: LiveLine, name: str, found: _Found) -> None:
    way = _REQUEST_WAYS[name]
    if way in found.absent:
        return
    load = f"requests of one token, {name}"
    floor = await measure_request_floor(way, _NUM_REQUEST_CLIENTS, _NUM_PROMPT_TOKENS, measurer.windows)
    found.request_floor.setdefault(name, []).append(floor)
    line.say(
        f"{load}, nothing but gRPC: router {floor.router_cpu_ms_per_request:.3f} ms each, "
        f"{floor.requests_per_s:.0f} a second"
    )
    with _noting(line, load, way, found):
        items = await measurer.requests(way, _NUM_REQUEST_CLIENTS, _NUM_PROMPT_TOKENS)
        found.requests.setdefault(name, []).extend(items)
        now = request_medians(items)
        line.say(f"{load}: router {now.router_cpu_ms_per_request:.3f} ms each, {now.requests_per_s:.0f} a second")


async def _measure_streams(measurer: Measurer, line: LiveLine, case: Case, found: _Found) -> None:
    if case.way in found.absent:
        return
    if (case.way, case.num_streams) in _FLOORS and not case.with_text:
        await _measure_floor(measurer.windows, line, case, found)
    with _noting(line, case.name, case.way, found):
        items = await measurer.streams(case)
        found.windows.setdefault(case, []).extend(items)
        now = medians(items)
        line.say(
            f"{case.name}: router {now.router_cpu_us_per_token:.2f} us a token, "
            f"decode {now.decode_cpu_us_per_token:.2f}, p99 +{now.added_latency_ms_p99:.1f} ms, "
            f"{now.tokens_per_s:.0f} tok/s"
        )


async def _measure_floor(windows: Windows, line: LiveLine, case: Case, found: _Found) -> None:
    floor = await measure_floor(case.way, case.num_streams, windows)
    found.floor.setdefault(f"{case.way}_{case.num_streams}", []).append(floor)
    line.say(
        f"{case.way}, {case.num_streams} streams, nothing but gRPC: router {floor.router_cpu_us_per_token:.2f} us a "
        f"token, decode {floor.decode_cpu_us_per_token:.2f}"
    )


@contextmanager
def _noting(line: LiveLine, load: str, way: Way, found: _Found) -> Iterator[None]:
    """Keep what kept ``load`` from being measured, and go on: the report tells it."""
    try:
        yield
    except AbsentError as error:
        found.absent[way] = str(error)
        line.say(f"{load}: absent: {error}")
    except LoadFailedError as error:
        found.failed[load] = str(error)
        line.say(f"{load}: failed: {error}")


def _cases(ways: tuple[Way, ...]) -> list[Case]:
    return [
        Case(way=way, num_streams=num_streams, with_text=with_text)
        for num_streams in _STREAMS
        for with_text in (False, True)
        for way in ways
    ]


def _results(windows: Windows, idle: IdleFigures, found: _Found) -> Results:
    figures = {case: medians(items) for case, items in found.windows.items()}
    requests = {name: request_medians(items) for name, items in found.requests.items()}
    few, many = (
        Streams(ids=_share(figures, num_streams, False), text=_share(figures, num_streams, True))
        for num_streams in _STREAMS
    )
    return Results(
        setting=Setting(
            step_ms=STEP_S * 1e3,
            token_interval_ms=STEP_S * PERIOD * 1e3,
            windows=windows,
            request_prompt_tokens=_NUM_PROMPT_TOKENS,
            request_clients=_NUM_REQUEST_CLIENTS,
        ),
        idle=idle,
        floor={name: _median_floor(items) for name, items in found.floor.items()},
        streams_256=few,
        streams_1024=many,
        router_cpu_ms_per_request={name: item.router_cpu_ms_per_request for name, item in requests.items()},
        requests=requests,
        request_floor={name: _median_request_floor(items) for name, items in found.request_floor.items()},
        absent=found.absent,
        failed=found.failed,
    )


def _median_floor(items: list[Floor]) -> Floor:
    return Floor(
        router_cpu_us_per_token=median(item.router_cpu_us_per_token for item in items),
        decode_cpu_us_per_token=median(item.decode_cpu_us_per_token for item in items),
    )


def _median_request_floor(items: list[RequestFloor]) -> RequestFloor:
    return RequestFloor(
        router_cpu_ms_per_request=median(item.router_cpu_ms_per_request for item in items),
        requests_per_s=median(item.requests_per_s for item in items),
    )


def _share(figures: Mapping[Case, Figures], num_streams: int, with_text: bool) -> Share:
    mine = {
        str(case.way): item
        for case, item in figures.items()
        if case.num_streams == num_streams and case.with_text == with_text
    }
    return Share(
        router_cpu_us_per_token={way: item.router_cpu_us_per_token for way, item in mine.items()},
        decode_cpu_us_per_token={way: item.decode_cpu_us_per_token for way, item in mine.items()},
        decode_engine_cpu_us_per_token={way: item.decode_engine_cpu_us_per_token for way, item in mine.items()},
        added_latency_ms_p99={way: item.added_latency_ms_p99 for way, item in mine.items()},
        by_way=mine,
    )


if __name__ == "__main__":
    main()
