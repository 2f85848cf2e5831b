"""Renders the tables of docs/performance.md and docs/routing.md from benchmarks/results, so no figure is typed by hand.

    python -m benchmarks.table [--check]

A table lies between ``<!-- table: NAME -->`` and ``<!-- end -->``; its figures come from
``benchmarks/results/NAME.json``. One function makes each benchmark's tables, followed by its private functions.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from benchmarks.routing_cases import OTHERS, OURS

#: A report as ``benchmarks.report`` writes it.
Report: TypeAlias = Mapping[str, Any]

_REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = _REPOSITORY / "docs" / "performance.md"
PAGES = (PAGE, _REPOSITORY / "docs" / "routing.md")
RESULTS = _REPOSITORY / "benchmarks" / "results"
_KIB, _MIB = 1 << 10, 1 << 20
_TABLE = re.compile(r"(?P<begin><!-- table: (?P<name>\w+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def main() -> int:
    """Run the command line; the exit code is 1 if ``--check`` finds a page that differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, but fail where a page is not up to date")
    arguments = parser.parse_args()
    if not arguments.check:
        for page in PAGES:
            fill_page(page, RESULTS)
        return 0
    stale = [page for page in PAGES if render_page(text := page.read_text(encoding="utf-8"), RESULTS) != text]
    for page in stale:
        print(f"{page} does not show what {RESULTS} holds: run `python -m benchmarks.table`", file=sys.stderr)
    return int(bool(stale))


def fill_page(page: Path, results: Path) -> None:
    """Render every table of the file ``page`` anew, as ``render_page`` does."""
    page.write_text(render_page(page.read_text(encoding="utf-8"), results), encoding="utf-8")


def render_page(page: str, results: Path) -> str:
    """``page`` with every table rendered anew from the JSON files in ``results``; a table without a file says so.

    Raises:
        KeyError: the page has a table that this module can't render.
    """

    def render(found: re.Match[str]) -> str:
        make, source = _TABLES[found["name"]], results / f"{found['name']}.json"
        if not source.exists():
            return f"{found['begin']}\nnot measured yet\n\n{found['end']}"
        report = json.loads(source.read_text(encoding="utf-8"))
        return f"{found['begin']}\n{make(report)}\n{_describe(report)}\n{found['end']}"

    return _TABLE.sub(render, page)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown, with a line break at its end."""
    lines = [list(head), ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _describe(report: Report) -> str:
    """The command, the code's revision, time and machine."""
    machine, commit = report["machine"], report["commit"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    revision = (commit["revision"] or "unknown")[:12] + (" with changes" if commit["is_dirty"] else "")
    load = report["load_average"]
    return (
        f"`{report['command']}` on {report['started_at'][:10]}, commit {revision}; {machine['cpu_model']}, "
        f"{machine['num_cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB; {versions}. Load average "
        f"{load['before']:.1f} before, {load['after']:.1f} after.\n"
    )


def overload_tables(report: Report) -> str:
    """The overload's outcome, then every phase."""
    peak, over, setting = report["peak"], report["overload"], report["setting"]
    rows = [("sweep", phase) for phase in report["sweep"]]
    rows += [("peak, before", peak["before"]), ("**overload**", over["phase"]), ("peak, after", peak["after"])]
    phases = markdown_table(
        [
            "phase",
            "clients",
            "tok/s",
            "tok per CPU s",
            "TTFT p50, p99 (ms)",
            "waited",
            "queued",
            "blocks",
            "failed",
            "CPU",
        ],
        [_phase_row(name, phase, setting) for name, phase in rows],
    )
    best = max(peak[name]["load"]["tokens_per_s"] for name in ("before", "after"))
    verdict = markdown_table(
        ["at twice the peak's load", "measured", "wanted"],
        [
            ["finished tok/s over the mean of the two peaks", f"{over['ratio']:.2f}", ">= 0.9"],
            ["over the better of the two", f"{over['tokens_per_s'] / best:.2f}", ""],
            ["over the sweep's best window", f"{over['ratio_to_sweep']:.2f}", ""],
            ["hand-offs expired", over["hand_offs_expired"], "0"],
            ["requests preempted", over["preemptions"], "0"],
            ["prompts prefilled twice", over["prompts_prefilled_twice"], "0"],
            ["tokens computed again", over["phase"]["evidence"]["tokens_computed_again"], "0"],
            ["requests finished, failed, refused", _requests(over), ""],
        ],
    )
    return f"{verdict}\n{phases}"


def _requests(over: Mapping[str, Any]) -> str:
    return f"{over['requests_finished']}, {over['requests_failed']}, {over['requests_refused']}"


def _phase_row(name: str, phase: Mapping[str, Any], setting: Mapping[str, Any]) -> list[object]:
    load, cpu = phase["load"], phase["cpu"]
    shares = ", ".join(f"{process} {share:.2f}" for process, share in cpu["share"].items())
    num_tokens = load["requests_finished"] * setting["workload"]["num_output_tokens"]
    server_cpu_s = sum(used_s for process, used_s in cpu["cpu_s"].items() if process != "client")
    return [
        name,
        load["concurrency"],
        f"{load['tokens_per_s']:.0f}",
        f"{num_tokens / server_cpu_s:.0f}",
        f"{load['ttft_ms_p50']:.0f}, {load['ttft_ms_p99']:.0f}",
        f"{phase['evidence']['requests_waited']} of {load['requests_finished']}",
        phase["extremes"]["queued_requests"],
        f"{phase['extremes']['decode_blocks']} of {setting['num_decode_blocks']}",
        load["requests_failed"] + load["requests_refused"],
        f"{shares}; others {cpu['others_share']:.2f}",
    ]


_MISSING = "not measured"


_ROUTER, _DECODE, _REQUEST = "router_cpu_us_per_token", "decode_cpu_us_per_token", "router_cpu_ms_per_request"


_PLACE = ("place_per_request", "place_per_client")


@dataclass(frozen=True)
class _Wanted:
    """A figure that has a limit.

    Attributes:
        path: its path in the report.
        limit, goal: the most that it may be, and the target after that.
        floor: the path of a bare relay's figure to compare with; empty: there is none.
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
        # Tokens do not pass the relay on this way, so it has no figure to compare with.
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


# By the names of ``ratio_to_grpc``: what the ratio is of, the most that it may be, and the target after that.
_RATIOS = {
    "generate_256": ("generate, 256 streams: a token", "<= 1.35", ""),
    "session_256": ("session, 256 streams: a token", "<= 1.7", ""),
    "session_1024": ("session, 1024 streams: a token", "<= 2.8", ""),
    "request_generate": ("generate, a request of one token", "<= 2.6", "2.0"),
    "request_session": ("session, a request of one token", "<= 3.2", "2.5"),
    "request_place": ("place, a request of one token", "stated", ""),
}


def relay_tables(report: Report) -> str:
    """Ratios to gRPC alone, limits, every load, one-token requests, and what could not be measured."""
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
    return "\n".join([*_ratios(report), wanted, loads, requests, without, *_gaps(report)])


def _ratios(report: Report) -> Iterator[str]:
    if ratios := report.get("ratio_to_grpc"):
        rows = []
        for name, ratio in ratios.items():
            what, limit, goal = _RATIOS[name]
            spread = report["ratio_to_grpc_spread"][name]
            runs = f"{min(spread['runs']):.2f}, {max(spread['runs']):.2f}"
            rows.append([what, f"{ratio:.2f}", limit, goal, runs, f"{spread['lowest']:.2f}, {spread['highest']:.2f}"])
        head = ["Router's CPU time over nothing but gRPC's", "median", "wanted", "goal"]
        yield markdown_table([*head, "runs: lowest, highest", "windows: lowest, highest"], rows)


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


def many_streams_tables(report: Report) -> str:
    """A row for each way to open the streams."""
    table = markdown_table(
        [
            "way",
            "opened at once",
            "refused or lost",
            "open together",
            "all accepted (s)",
            "all with a token (s)",
            "Router KiB a stream",
            "Decode KiB a stream",
        ],
        [_burst_row(way, burst) for way, burst in report["bursts"].items()],
    )
    absent = "".join(f"- {way} was not measured: {why}\n" for way, why in report["absent"].items())
    return f"{table}\n{absent}" if absent else table


def _burst_row(way: str, burst: Mapping[str, Any]) -> list[object]:
    outcome = burst["outcome"]
    return [
        way,
        burst["num_streams"],
        burst["num_refused_or_lost"],
        outcome["max_open"],
        f"{outcome['accepted_s']:.1f}",
        f"{outcome['first_token_s']:.1f}",
        f"{burst['router']['per_stream'] / _KIB:.1f}",
        f"{burst['decode']['per_stream'] / _KIB:.1f}",
    ]


_NUM_FUNCTIONS = 8


# The table leaves out threads that use less of a core.
_MIN_SHARE = 0.005


def profile_tables(report: Report) -> str:
    """For each way and process, the functions with the most time of their own."""
    parts = [
        _profile_describe(way, process, profile)
        for way, profiles in report["profiles"].items()
        for process, profile in profiles.items()
    ]
    return "\n".join([*parts, *(f"- {way} was not recorded: {why}\n" for way, why in report["absent"].items())])


def _profile_describe(way: str, process: str, profile: Mapping[str, Any]) -> str:
    threads = sorted(profile["threads"].items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {share:.2f}" for name, share in threads if share >= _MIN_SHARE)
    table = markdown_table(
        [f"{process}, {way}", "own time", "with what it calls"],
        [
            [f"`{item['function']}`", f"{item['self_share']:.1%}", f"{item['total_share']:.1%}"]
            for item in profile["functions"][:_NUM_FUNCTIONS]
        ],
    )
    return f"{table}\nThreads, in cores: {shares}; {profile['num_samples']} samples.\n"


def index_tables(report: Report) -> str:
    """The limits, then a row for each size."""
    rebuild, hash_us = report["rebuild"], report["hash_us"]
    [bar] = [case for case in report["cases"] if _size(case) == "1 M" and case["num_workers"] == 1000]
    bars = markdown_table(
        ["", "measured", "wanted"],
        [
            ["lookup, 1 M blocks, 1000 workers, p50 (us)", f"{bar['lookup_us']['p50']:.1f}", "<= 10"],
            ["blocks inserted a second, same size", f"{bar['inserts_per_s'] / 1e6:.1f} M", ">= 2 M"],
            [
                f"rebuild of {rebuild['num_blocks'] / 1e6:.1f} M blocks from {rebuild['num_workers']} workers (s)",
                f"{report['rebuild_s']:.2f}",
                "< 3",
            ],
            ["hashing a prompt of 8192 tokens, p50 (us): list, array", _both(hash_us), ""],
        ],
    )
    sizes = markdown_table(
        [
            "blocks",
            "workers",
            "lookup p50, p99 (us)",
            "with predictions",
            "predict (us)",
            "inserts/s",
            "removes/s",
            "longest store (ms)",
            "bytes a block",
        ],
        [_index_row(case) for case in report["cases"]],
    )
    return f"{bars}\n{sizes}"


def _index_row(case: Mapping[str, Any]) -> list[object]:
    return [
        _size(case),
        case["num_workers"],
        *(f"{case[name]['p50']:.1f}, {case[name]['p99']:.1f}" for name in ("lookup_us", "predicted_lookup_us")),
        f"{case['predict_us']:.0f}",
        *(f"{case[name] / 1e6:.1f} M" for name in ("inserts_per_s", "removes_per_s")),
        f"{case['longest_store_ms']:.0f}",
        f"{case['bytes_per_block']:.0f}",
    ]


def _size(case: Mapping[str, Any]) -> str:
    return f"{case['num_blocks'] / 1e6:.0f} M"


def _both(hash_us: Mapping[str, Any]) -> str:
    return ", ".join(f"{hash_us[kind]['p50']:.0f}" for kind in ("list", "array"))


def transfer_tables(report: Report) -> str:
    """The limits, then a row for each size and temperature."""
    warm = report["warm"]
    bars = markdown_table(
        ["warm, 64 MiB", "measured", "wanted"],
        [
            ["shm over memcpy of the same round", f"{warm['share_of_memcpy']['shm']:.2f}", ">= 0.6"],
            ["grpc, GB/s", f"{warm['gb_per_s']['grpc']:.2f}", ">= 0.7"],
        ],
    )
    return f"{bars}\n{speeds_table([report, *report['others']])}"


def speeds_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A row for each of ``runs`` and each temperature."""
    return markdown_table(
        [
            "blocks",
            "piece",
            "",
            "shm GB/s",
            "grpc GB/s",
            "memcpy GB/s",
            "shm over memcpy",
            "CPU s per GB, shm: puller, source",
            "grpc: puller, source",
        ],
        [_speed_row(run, temperature) for run in runs for temperature in ("warm", "cold")],
    )


def _speed_row(run: Mapping[str, Any], temperature: str) -> list[object]:
    figures = run[temperature]
    speed = figures["gb_per_s"]
    return [
        f"{run['size_bytes'] / _MIB:g} MiB",
        f"{run['piece_size_bytes'] // _KIB} KiB",
        temperature,
        f"{speed['shm']:.1f}",
        f"{speed['grpc']:.2f}",
        f"{speed['memcpy']:.1f}",
        f"{figures['share_of_memcpy']['shm']:.2f}",
        *(_cpu(figures["cpu_s_per_gb"][way]) for way in ("shm", "grpc")),
    ]


def _cpu(cpu_s_per_gb: Mapping[str, float]) -> str:
    return f"{cpu_s_per_gb['puller']:.2f}, {cpu_s_per_gb['source']:.2f}"


_DISAGG_PARTS = ("route", "prefill", "transfer", "join", "first_message", "edge")


_WANTED_MS = 3


def disagg_tables(report: Report) -> str:
    """The cost, then the parts of the second token's time."""
    overhead = markdown_table(
        [
            "stub engine, prompt",
            "agg: 1st, 2nd token (ms)",
            "disagg",
            "moved",
            "copying alone (ms)",
            "own cost",
            "wanted",
        ],
        [_disagg_row(length, figures) for length, figures in report["stub"].items()],
    )
    parts = markdown_table(
        [
            "disaggregated, prompt",
            *(part.replace("_", " ") for part in _DISAGG_PARTS),
            "second token (ms)",
            "aggregated",
        ],
        [
            [f"{engine}, {length}", *_parts(figures)]
            for engine in ("stub", "tiny")
            for length, figures in report[engine].items()
        ],
    )
    return f"{overhead}\n{parts}"


def _disagg_row(length: str, figures: Mapping[str, Any]) -> list[str]:
    return [
        length,
        *(f"{figures['ttft_ms'][side]:.1f}, {figures['second_token_ms'][side]:.1f}" for side in ("agg", "disagg")),
        f"{figures['transfer_bytes'] / _MIB:.0f} MiB",
        f"{figures['copy_ms']:.1f}",
        f"{figures['overhead_ms']:.1f}",
        f"<= {_WANTED_MS}",
    ]


def _parts(figures: Mapping[str, Any]) -> list[str]:
    disagg, second = figures["parts_ms"]["disagg"], figures["second_token_ms"]
    return [*(f"{disagg[part]:.1f}" for part in _DISAGG_PARTS), f"{second['disagg']:.1f}", f"{second['agg']:.1f}"]


_LOADS = {"batch_1": "one after the other", "batch_8": "three streams of eight at a time"}


_PROMPTS = {
    "new": "image and text are new",
    "cached_embeddings": "again with another salt: embeddings are cached",
    "cached_prefix": "again: KV is cached too",
    "text": "as many tokens of new text",
    "photo_new": "a photo and text are new",
    "photo_cached_embeddings": "the photo again with another salt: embeddings are cached",
}


_ENCODE_PARTS = ("media", "route", "prefill", "edge")


def encode_tables(report: Report) -> str:
    """What one Encode worker does, what the first token waits for, and how fast embeddings move."""
    rates = markdown_table(
        ["images", "a second", "CPU ms each", "in a batch", "before the tower (ms)", "in the tower (ms)", "others"],
        [[what, *_rate(report["worker"][load])] for load, what in _LOADS.items()],
    )
    times = markdown_table(
        ["prompt", "TTFT p50, p90 (ms)", *_ENCODE_PARTS],
        [[what, *_time(report, prompt)] for prompt, what in _PROMPTS.items()],
    )
    return f"{rates}\n{times}\n{speeds_table([report['pulls']])}"


def _rate(figures: Mapping[str, float]) -> list[str]:
    return [
        f"{figures['images_per_s']:.0f}",
        f"{figures['cpu_ms_per_image']:.1f}",
        f"{figures['mean_batch_size']:.1f}",
        f"{figures['before_tower_ms']:.1f}",
        f"{figures['tower_ms']:.1f}",
        f"{figures['others_share']:.2f}",
    ]


def _time(report: Mapping[str, Any], prompt: str) -> list[str]:
    ttft_ms, parts_ms = report["ttft_ms"][prompt], report["parts_ms"][prompt]
    return [f"{ttft_ms['p50']:.1f}, {ttft_ms['p90']:.1f}", *(f"{parts_ms[part]:.1f}" for part in _ENCODE_PARTS)]


# For each workload: its description, and the ratio that is wanted.
_WORKLOADS = {
    "one_stream": ("one request, 32 tokens in, 128 out", ">= 0.95"),
    "equal_32": ("32 requests, 64 in, 64 out", ">= 1.0"),
    "ragged_32": ("32 requests, 32 to 512 in, 16 to 256 out", ">= 2.2"),
    "prefill": ("32 prompts of 256, one token each; prompt tokens", ">= 1.2"),
    "long_prompt": ("one prompt of 1500, one token; prompt tokens", ""),
    "shared_prefix_32": ("32 requests, 1024 in common and 16 of their own in, 16 out", ">= 4"),
}


def engine_tables(report: Report) -> str:
    """Both sides on every workload that ran."""
    rows = []
    for name, measured in report["workloads"].items():
        what, wanted = _WORKLOADS[name]
        rows.append(
            [
                f"`{name}`: {what}",
                f"{measured['quartet']['tokens_per_s']:.0f}",
                f"{measured['generate']['tokens_per_s']:.0f}",
                f"{measured['ratio']:.2f}",
                f"{measured['cpu_ratio']:.2f}",
                _ceiling(measured),
                wanted,
                f"{measured['num_ties']} of {measured['num_outputs']}",
            ]
        )
    head = ["workload", "Quartet tok/s", "`generate` tok/s", "ratio", "by CPU time", "ceiling", "wanted", "ties"]
    return markdown_table(head, rows)


def _ceiling(measured: Report) -> str:
    """By the clock and by CPU time; empty if none was measured, as in reports from before there was a ceiling."""
    if measured.get("ceiling") is None:
        return ""
    return f"{measured['ceiling']:.2f}, {measured['cpu_ceiling']:.2f}"


_NONE = "-"


def routing_tables(report: Report) -> str:
    """Mean and p99 TTFT of every policy on every case, then limits and measured figures."""
    head = ["", *(f"`{name}`" for name in (OURS, *OTHERS))]
    means = markdown_table(
        ["mean TTFT (ms)", *head[1:], "runs"],
        [[*_routing_row(row, "ttft_mean", ".1f"), _num_runs(row)] for row in report["rows"]],
    )
    tails = markdown_table(
        ["p99 TTFT (ms)", *head[1:]], [_routing_row(row, "ttft_p99", ".0f") for row in report["rows"]]
    )
    bars = markdown_table(["", "ratio", "measured", "wanted"], [_bar(report, bar) for bar in report["bars"]])
    return f"{means}\n{tails}\n{bars}\n{_notes(report)}\n"


def _routing_row(row: Mapping[str, Any], name: str, form: str) -> list[object]:
    policies = row["policies"]
    return [row["about"], *(format(policies[key][name], form) if key in policies else _NONE for key in (OURS, *OTHERS))]


def _bar(report: Report, bar: Mapping[str, Any]) -> list[object]:
    [about] = [row["about"] for row in report["rows"] if row["name"] == bar["case"]]
    measured = f"{bar['measured']:.3f}"
    return [
        about,
        bar["what"],
        measured if bar["measured"] <= bar["limit"] else f"**{measured}**",
        f"<= {bar['limit']}",
    ]


def _num_runs(row: Mapping[str, Any]) -> str:
    """How many runs each mean is over, in the order of the columns."""
    counts = [row["policies"][name]["num_runs"] for name in (OURS, *OTHERS) if name in row["policies"]]
    return str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))


def _notes(report: Report) -> str:
    revisions = sorted({(run["revision"] or "unknown")[:12] for run in report["runs"]})
    return (
        "Each run has a seed of its own, which decides ties and generated traces; *runs* says how many figures are the "
        f"means of, where they differ in the order of the columns. Replayed at commit {', '.join(revisions)}."
    )


def prefixes_tables(report: Report) -> str:
    """A row for each policy."""
    rows: list[list[object]] = []
    for name, found in report["policies"].items():
        ttft, ratio = found["ttft_ms"], report["mean_ttft_ratio"].get(name)
        rows.append(
            [
                f"`{name}`",
                *(f"{ttft[figure]:.1f}" for figure in ("mean", "p50", "p90", "p99")),
                "" if ratio is None else f"{ratio:.2f}",
                "<= 0.8" if name == "kv_aware" else "",
                f"{found['e2e_ms']['mean']:.0f}",
                f"{found['reuse_ratio']:.2f}",
                f"{found['requests_finished']}, {found['requests_failed']}",
            ]
        )
    head = ["", "mean TTFT (ms)", "p50", "p90", "p99", "mean over round robin's", "wanted"]
    return markdown_table([*head, "whole answer (ms)", "reuse", "finished, failed"], rows)


def routing_cost_tables(report: Report) -> str:
    """A row for each policy: the parts of the cost of routing a request, in microseconds."""
    rows: list[list[object]] = []
    for name, cost in report["policies"].items():
        rest_us = cost["total_us"] - cost["snapshot_us"] - cost["assign_us"]
        parts = (report["hash_us"], cost["snapshot_us"], cost["assign_us"], rest_us, report["routing_us"][name])
        rows.append([f"`{name}`", *(f"{part:.0f}" for part in parts), "<= 500" if name == "kv_aware" else ""])
    head = [
        "us of CPU a request",
        "naming its blocks",
        "ranks shown",
        "choice, look-up",
        "queue, book, index",
    ]
    table = markdown_table([*head, "all", "goal"], rows)
    return (
        f"{table}\n{report['num_prompt_tokens']} tokens, {report['num_workers']} workers, an index of "
        f"{report['num_blocks']:,} blocks. The look-up alone takes {report['lookup_us']:.0f} us; taking in one load "
        f"report {report['report_us']:.0f} us.\n"
    )


def harness_tables(report: Report) -> str:
    """A row for each figure: the harness before and the one after it, measured in alternation."""
    rows = []
    for figure in report["figures"]:
        before, after = (sorted(figure[side]) for side in ("before", "after"))
        rows.append([figure["name"], _middle(before), _middle(after), len(before), len(after)])
    head = ["figure", "before: median (lowest, highest)", "after", "runs before", "after"]
    return markdown_table(head, rows)


def _middle(values: Sequence[float]) -> str:
    return f"{median(values):.3g} ({values[0]:.3g}, {values[-1]:.3g})"


def total_tables(report: Report) -> str:
    """A row for each benchmark, and their sum, including the time between them."""
    rows = [[run["name"], f"{run['duration_s']:.0f}", _outcome(run["is_done"])] for run in report["runs"]]
    rows.append(["all", f"{report['duration_s']:.0f}", ""])
    return markdown_table(["benchmark", "seconds", ""], rows)


def _outcome(is_done: bool) -> str:
    return "" if is_done else "failed"


_TABLES: Mapping[str, Callable[[Report], str]] = {
    "overload": overload_tables,
    "relay": relay_tables,
    "many_streams": many_streams_tables,
    "profile": profile_tables,
    "index": index_tables,
    "transfer": transfer_tables,
    "disagg": disagg_tables,
    "encode": encode_tables,
    "engine": engine_tables,
    "routing": routing_tables,
    "prefixes": prefixes_tables,
    "routing_cost": routing_cost_tables,
    "total": total_tables,
    "harness": harness_tables,
}


if __name__ == "__main__":
    sys.exit(main())
