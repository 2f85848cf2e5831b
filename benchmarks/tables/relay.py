"""Tables of benchmarks.relay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.tables import Report, markdown_table

_MISSING = "not measured"
_ROUTER, _DECODE, _REQUEST = "router_cpu_us_per_token", "decode_cpu_us_per_token", "router_cpu_ms_per_request"
_PLACE = ("place_per_request", "place_per_client")


@dataclass(frozen=True)
class _Wanted:
    """A figure that something is wanted of.

    Attributes:
        path: where it stands in the report.
        limit, goal: the most that it may be, and what is hoped for after that.
        floor: where a bare relay's figure, to set it against, stands in the report; empty: there is none.
    """

    what: str
    path: str
    limit: str
    goal: str = ""
    floor: str = ""

    def row(self, report: Report) -> list[object]:
        measured = _look_up(report, self.path)
        if not self.floor:
            return [self.what, _figure(measured), self.limit, self.goal, "", ""]
        alone = _look_up(report, self.floor)
        ratio = None if measured is None or not alone else measured / alone
        return [self.what, _figure(measured), self.limit, self.goal, _figure(alone), _figure(ratio)]


def _per_token(way: str, num_streams: int, content: str, figure: str, limit: str, goal: str = "") -> _Wanted:
    process = "Router" if figure == _ROUTER else "Decode"
    return _Wanted(
        f"{way}, {num_streams} streams, {content}: {process} us a token",
        f"streams_{num_streams}.{content}.{figure}.{way}",
        limit,
        goal,
        # A relay has no way for tokens that don't pass it.
        "" if way in _PLACE else f"floor.{way}_{num_streams}.{figure}",
    )


def _per_request(way: str, limit: str, goal: str = "") -> _Wanted:
    what = f"{way}, a request of one token: Router ms"
    return _Wanted(what, f"{_REQUEST}.{way}", limit, goal, f"request_floor.{way}.{_REQUEST}")


_WANTED = (
    _per_token("generate", 256, "ids", _ROUTER, "<= 30", "26"),
    _per_token("generate", 256, "text", _ROUTER, "<= 36"),
    _per_token("session", 256, "ids", _ROUTER, "<= 4"),
    _per_token("session", 256, "text", _ROUTER, "<= 8"),
    _per_token("session", 1024, "ids", _ROUTER, "<= 2"),
    _per_token("session", 1024, "text", _ROUTER, "<= 6"),
    *(_per_token(way, num_streams, "ids", _ROUTER, "0") for num_streams in (256, 1024) for way in _PLACE),
    _per_token("generate", 256, "ids", _DECODE, "<= 4"),
    _per_token("session", 256, "ids", _DECODE, "<= 4"),
    _per_token("session", 1024, "ids", _DECODE, "<= 4"),
    *(_per_token(way, num_streams, "ids", _DECODE, "stated") for num_streams in (256, 1024) for way in _PLACE),
    _per_request("generate", "<= 0.8", "0.5"),
    _per_request("session", "<= 0.4", "0.2"),
    _per_request("place", "stated"),
)


def relay_tables(report: Report) -> str:
    """What is wanted, every load, one-token requests, and what could not be measured."""
    wanted = markdown_table(
        ["what", "measured", "wanted", "goal", "nothing but gRPC (ids)", "times that"],
        [wanted.row(report) for wanted in _WANTED],
    )
    loads = markdown_table(
        [
            "streams",
            "way",
            "Router us",
            "Decode us",
            "engine us",
            "added p50, p99 (ms)",
            "tok/s made, had",
            "tok a message",
            "CPU",
        ],
        list(_load_rows(report)),
    )
    requests = markdown_table(
        ["one-token requests", "Router ms", "Decode ms", "requests/s", "CPU"],
        [_request_row(way, figures) for way, figures in report["requests"].items()],
    )
    idle = report["idle"]
    without = f"Without any load: router {idle['router_share']:.3f} of a core, decode {idle['decode_share']:.3f}.\n"
    return "\n".join([wanted, loads, requests, without, *_gaps(report)])


def _look_up(report: Report, path: str) -> float | None:
    value: Any = report
    for key in path.split("."):
        value = value.get(key)
        if value is None:
            return None
    return float(value)


def _figure(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.2f}"


def _load_rows(report: Report) -> Iterator[list[object]]:
    for num_streams in (256, 1024):
        for content in ("ids", "text"):
            for way, figures in report[f"streams_{num_streams}"][content]["by_way"].items():
                yield _load_row(f"{num_streams}, {content}", way, figures)


def _load_row(streams: str, way: str, figures: Mapping[str, float]) -> list[object]:
    return [
        streams,
        way,
        f"{figures['router_cpu_us_per_token']:.2f}",
        f"{figures['decode_cpu_us_per_token']:.2f}",
        f"{figures['decode_engine_cpu_us_per_token']:.2f}",
        f"{figures['added_latency_ms_p50']:.1f}, {figures['added_latency_ms_p99']:.1f}",
        f"{figures['made_tokens_per_s']:.0f}, {figures['tokens_per_s']:.0f}",
        f"{figures['tokens_per_message']:.1f}",
        f"router {figures['router_share']:.2f}, decode {figures['decode_share']:.2f}, "
        f"client {figures['client_share']:.2f}; others {figures['others_share']:.2f}",
    ]


def _request_row(way: str, figures: Mapping[str, float]) -> list[object]:
    return [
        way,
        f"{figures['router_cpu_ms_per_request']:.3f}",
        f"{figures['decode_cpu_ms_per_request']:.3f}",
        f"{figures['requests_per_s']:.0f}",
        f"router {figures['router_share']:.2f}, client {figures['client_share']:.2f}; "
        f"others {figures['others_share']:.2f}",
    ]


def _gaps(report: Report) -> Iterator[str]:
    gaps = {**report["absent"], **report["failed"]}
    if gaps:
        yield "".join(f"- {load} was not measured: {why}\n" for load, why in gaps.items())
