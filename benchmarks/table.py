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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from benchmarks.retention_replay import LOADS as RETENTION_LOADS
from benchmarks.routing_cases import OTHERS, OURS
from benchmarks.tiers_replay import BELOW, LOADS

#: A report as ``benchmarks.report`` writes it, and what one row of a table shows of it.
Report: TypeAlias = Mapping[str, Any]
Row: TypeAlias = Mapping[str, Any]
#: The columns of a table by their heads: a format of the row's values (``{load[tokens_per_s]:.0f}``), or a function.
Columns: TypeAlias = Mapping[str, str | Callable[[Row], object]]

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


def _table(columns: Columns, rows: Iterable[Row]) -> str:
    """A row for each of ``rows``."""
    return markdown_table(
        list(columns),
        [[cell.format_map(row) if isinstance(cell, str) else cell(row) for cell in columns.values()] for row in rows],
    )


def _bars(head: str, bars: Iterable[tuple[str, str, str]], report: Report) -> str:
    """A row for each bar: what it is of, a format of the measured figure, and what is wanted."""
    return markdown_table(
        [head, "measured", "wanted"], [[what, form.format_map(report), goal] for what, form, goal in bars]
    )


def _describe(report: Report) -> str:
    """The command, the code's revision, time and machine."""
    machine, commit = report["machine"], report["commit"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    revision = (commit["revision"] or "unknown")[:12] + (" with changes" if commit["is_dirty"] else "")
    cores = f"{machine['num_cores']} cores"
    if machine.get("num_usable_cores", machine["num_cores"]) != machine["num_cores"]:
        cores = f"{machine['num_usable_cores']} of {cores}"
    load = report.get("load_average")  # figures gathered from several commands have none
    busy = f" Load average {load['before']:.1f} before, {load['after']:.1f} after." if load else ""
    return (
        f"`{report['command']}` on {report['started_at'][:10]}, commit {revision}; {machine['cpu_model']}, "
        f"{cores}, {machine['memory_bytes'] / 2**30:.0f} GiB; {versions}.{busy}\n"
    )


def overload_tables(report: Report) -> str:
    """The overload's outcome, then every phase."""
    peak, over = report["peak"], report["overload"]
    best = max(peak[name]["load"]["tokens_per_s"] for name in ("before", "after"))
    verdict = _bars("at twice the peak's load", _OVERLOAD_BARS, {**over, "best": over["tokens_per_s"] / best})
    phases = [("sweep", phase) for phase in report["sweep"]]
    phases += [("peak, before", peak["before"]), ("**overload**", over["phase"]), ("peak, after", peak["after"])]
    rows = [{"name": name, "setting": report["setting"], **phase} for name, phase in phases]
    return f"{verdict}\n{_table(_PHASE_COLUMNS, rows)}"


_OVERLOAD_BARS = (
    ("finished tok/s over the mean of the two peaks", "{ratio:.2f}", ">= 0.9"),
    ("over the better of the two", "{best:.2f}", ""),
    ("over the sweep's best window", "{ratio_to_sweep:.2f}", ""),
    ("hand-offs expired", "{hand_offs_expired}", "0"),
    ("requests preempted", "{preemptions}", "0"),
    ("prompts prefilled twice", "{prompts_prefilled_twice}", "0"),
    ("tokens computed again", "{phase[evidence][tokens_computed_again]}", "0"),
    ("requests finished, failed, refused", "{requests_finished}, {requests_failed}, {requests_refused}", ""),
)


def _tokens_per_cpu_s(phase: Row) -> str:
    num_tokens = phase["load"]["requests_finished"] * phase["setting"]["workload"]["num_output_tokens"]
    server_cpu_s = sum(used_s for process, used_s in phase["cpu"]["cpu_s"].items() if process != "client")
    return f"{num_tokens / server_cpu_s:.0f}"


def _cpu_shares(phase: Row) -> str:
    shares = ", ".join(f"{process} {share:.2f}" for process, share in phase["cpu"]["share"].items())
    return f"{shares}; others {phase['cpu']['others_share']:.2f}"


_PHASE_COLUMNS: Columns = {
    "phase": "{name}",
    "clients": "{load[concurrency]}",
    "tok/s": "{load[tokens_per_s]:.0f}",
    "tok per CPU s": _tokens_per_cpu_s,
    "TTFT p50, p99 (ms)": "{load[ttft_ms_p50]:.0f}, {load[ttft_ms_p99]:.0f}",
    "waited": "{evidence[requests_waited]} of {load[requests_finished]}",
    "queued": "{extremes[queued_requests]}",
    "blocks": "{extremes[decode_blocks]} of {setting[num_decode_blocks]}",
    "failed": lambda phase: phase["load"]["requests_failed"] + phase["load"]["requests_refused"],
    "CPU": _cpu_shares,
}


_MISSING = "not measured"
_ROUTER, _DECODE, _REQUEST = "router_cpu_us_per_token", "decode_cpu_us_per_token", "router_cpu_ms_per_request"
# Tokens do not pass the relay on these ways, so they have no figure of a bare relay to compare with.
_PLACE = ("place_per_request", "place_per_client")
_PLACE_LOADS = [(way, num_streams) for num_streams in (256, 1024) for way in _PLACE]

# The figures per token that have a limit: way, streams, content, process, figure, the most that it may be, and the
# target after that.
_TOKEN_LIMITS = (
    ("generate", 256, "ids", "Router", _ROUTER, "<= 30", "26"),
    ("generate", 256, "text", "Router", _ROUTER, "<= 36", ""),
    ("http", 256, "text", "Router", _ROUTER, "that + 12", "27"),
    ("session", 256, "ids", "Router", _ROUTER, "<= 4", ""),
    ("session", 256, "text", "Router", _ROUTER, "<= 8", ""),
    ("session", 1024, "ids", "Router", _ROUTER, "<= 2", ""),
    ("session", 1024, "text", "Router", _ROUTER, "<= 6", ""),
    *((*load, "ids", "Router", _ROUTER, "0", "") for load in _PLACE_LOADS),
    ("generate", 256, "ids", "Decode", _DECODE, "<= 4", ""),
    ("session", 256, "ids", "Decode", _DECODE, "<= 4", ""),
    ("session", 1024, "ids", "Decode", _DECODE, "<= 4", ""),
    *((*load, "ids", "Decode", _DECODE, "stated", "") for load in _PLACE_LOADS),
)
_REQUEST_LIMITS = (("generate", "<= 0.8", "0.5"), ("session", "<= 0.4", "0.2"), ("place", "stated", ""))

# By the names of ``ratio_to_grpc``: what the ratio is of, the most that it may be, and the target after that.
_RATIOS = {
    "generate_256": ("generate, 256 streams: a token", "<= 1.35", ""),
    "http_256": ("http, 256 streams: a token", "stated", ""),
    "session_256": ("session, 256 streams: a token", "<= 1.7", ""),
    "session_1024": ("session, 1024 streams: a token", "<= 2.8", ""),
    "request_generate": ("generate, a request of one token", "<= 2.6", "2.0"),
    "request_session": ("session, a request of one token", "<= 3.2", "2.5"),
    "request_place": ("place, a request of one token", "stated", ""),
}


def relay_tables(report: Report) -> str:
    """Ratios to gRPC alone, limits, every load, one-token requests, and what could not be measured."""
    wanted = markdown_table(
        ["what", "measured", "wanted", "goal", "nothing but gRPC (ids)", "times that"], list(_wanted_rows(report))
    )
    loads = [
        {"streams": f"{num_streams}, {content}", "way": way, **figures}
        for num_streams in (256, 1024)
        for content in ("ids", "text")
        for way, figures in report[f"streams_{num_streams}"][content]["by_way"].items()
    ]
    requests = [{"way": way, **figures} for way, figures in report["requests"].items()]
    without = "Without any load: router {router_share:.3f} of a core, decode {decode_share:.3f}.\n"
    parts = [wanted, _table(_LOAD_COLUMNS, loads), _table(_REQUEST_COLUMNS, requests)]
    return "\n".join([*_ratios(report), *parts, without.format_map(report["idle"]), *_gaps(report)])


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


def _wanted_rows(report: Report) -> Iterator[list[str]]:
    for way, num_streams, content, process, figure, limit, goal in _TOKEN_LIMITS:
        measured = report[f"streams_{num_streams}"][content][figure].get(way)
        what = f"{way}, {num_streams} streams, {content}: {process} us a token"
        alone = report["floor"].get(f"{way}_{num_streams}", {}).get(figure)
        beside = ["", ""] if way in _PLACE else _beside(measured, alone)
        yield [what, _figure(measured), limit, goal, *beside]
    for way, limit, goal in _REQUEST_LIMITS:
        measured = report[_REQUEST].get(way)
        alone = report.get("request_floor", {}).get(way, {}).get(_REQUEST)
        what = f"{way}, a request of one token: Router ms"
        yield [what, _figure(measured), limit, goal, *_beside(measured, alone)]


def _beside(measured: float | None, alone: float | None) -> list[str]:
    """The figure of the bare relay, and how many times that was measured."""
    return [_figure(alone), _figure(None if measured is None or not alone else measured / alone)]


def _figure(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.2f}"


_LOAD_COLUMNS: Columns = {
    "streams": "{streams}",
    "way": "{way}",
    "Router us": "{router_cpu_us_per_token:.2f}",
    "Decode us": "{decode_cpu_us_per_token:.2f}",
    "engine us": "{decode_engine_cpu_us_per_token:.2f}",
    "added p50, p99 (ms)": "{added_latency_ms_p50:.1f}, {added_latency_ms_p99:.1f}",
    "tok/s made, had": "{made_tokens_per_s:.0f}, {tokens_per_s:.0f}",
    "tok a message": "{tokens_per_message:.1f}",
    "CPU": "router {router_share:.2f}, decode {decode_share:.2f}, client {client_share:.2f}; others {others_share:.2f}",
}
_REQUEST_COLUMNS: Columns = {
    "one-token requests": "{way}",
    "Router ms": "{router_cpu_ms_per_request:.3f}",
    "Decode ms": "{decode_cpu_ms_per_request:.3f}",
    "requests/s": "{requests_per_s:.0f}",
    "CPU": "router {router_share:.2f}, client {client_share:.2f}; others {others_share:.2f}",
}


def _gaps(report: Report) -> Iterator[str]:
    if failed := report["failed"]:
        yield "".join(f"- {load} was not measured: {why}\n" for load, why in failed.items())


def relay_versions_tables(report: Report) -> str:
    """A row for each load, and which commit was the one before."""
    rows = []
    for name, load in report["loads"].items():
        unit = "ms" if name.startswith("request_") else "us"
        before, after = (f"{median(load[side]):.2f} {unit}" for side in ("before", "after"))
        rows.append({**load, "what": _RATIOS[name][0], "before": before, "after": after})
    return f"{_table(_VERSIONS_COLUMNS, rows)}\nBefore: commit {report['before']['revision'][:12]}.\n"


_VERSIONS_COLUMNS: Columns = {
    "Router's CPU time": "{what}",
    "before": "{before}",
    "after": "{after}",
    "after over before": "{times:.3f}",
    "with a certainty of 95 %": "{lowest:.3f} to {highest:.3f}",
}


def many_streams_tables(report: Report) -> str:
    """A row for each way to open the streams."""
    return _table(_BURST_COLUMNS, [{"way": way, **burst} for way, burst in report["bursts"].items()])


_BURST_COLUMNS: Columns = {
    "way": "{way}",
    "opened at once": "{num_streams}",
    "refused or lost": "{num_refused_or_lost}",
    "open together": "{outcome[max_open]}",
    "all accepted (s)": "{outcome[accepted_s]:.1f}",
    "all with a token (s)": "{outcome[first_token_s]:.1f}",
    "Router KiB a stream": lambda burst: f"{burst['router']['per_stream'] / _KIB:.1f}",
    "Decode KiB a stream": lambda burst: f"{burst['decode']['per_stream'] / _KIB:.1f}",
}


def clients_tables(report: Report) -> str:
    """A row for each client and number of streams."""
    rows = []
    for load in report["loads"]:
        for client, windows in load["windows"].items():
            costs = [window["client_cpu_us_per_token"] for window in windows]
            middle = {figure: median(window[figure] for window in windows) for figure in windows[0]}
            rows.append({**load, "client": client, "lowest": min(costs), "highest": max(costs), **middle})
    goes = "; ".join(f"{load['num_streams']} streams: {load['times']:.2f}" for load in report["loads"])
    return (
        f"{_table(_CLIENTS_COLUMNS, rows)}\nCPU time a token of the Python client over the Go client's "
        f"({report['go']}), median of the rounds: {goes}.\n"
    )


_CLIENTS_COLUMNS: Columns = {
    "streams": "{num_streams}",
    "client": "{client}",
    "client us a token": "{client_cpu_us_per_token:.2f}",
    "lowest, highest": "{lowest:.2f}, {highest:.2f}",
    "Router us a token": "{router_cpu_us_per_token:.2f}",
    "tok/s made, had": "{made_tokens_per_s:.0f}, {tokens_per_s:.0f}",
    "client's share of a core": "{client_share:.2f}",
    "others": "{others_share:.2f}",
}


def global_router_tables(report: Report) -> str:
    """A row for each load."""
    rows = []
    for name, load in report["loads"].items():
        ratios = [one["global_cpu_us_per_token"] / one["pool_cpu_us_per_token"] for one in load["windows"]]
        middle = {figure: median(window[figure] for window in load["windows"]) for figure in load["windows"][0]}
        rows.append({**report, "name": name, "lowest": min(ratios), "highest": max(ratios), **load, **middle})
    return _table(_GLOBAL_COLUMNS, rows)


_GLOBAL_COLUMNS: Columns = {
    "load": "{num_streams} streams, {name}",
    "global router's CPU time over the pool router's": "{ratio:.2f}",
    "wanted": "<= {goal:.1f}",
    "windows: lowest, highest": "{lowest:.2f}, {highest:.2f}",
    "global router us a token": "{global_cpu_us_per_token:.1f}",
    "pool's router us a token": "{pool_cpu_us_per_token:.1f}",
    "tok/s": "{tokens_per_s:.0f}",
}


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
    return "\n".join(parts)


def _profile_describe(way: str, process: str, profile: Row) -> str:
    threads = sorted(profile["threads"].items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {share:.2f}" for name, share in threads if share >= _MIN_SHARE)
    columns: Columns = {
        f"{process}, {way}": "`{function}`",
        "own time": "{self_share:.1%}",
        "with what it calls": "{total_share:.1%}",
    }
    table = _table(columns, profile["functions"][:_NUM_FUNCTIONS])
    return f"{table}\nThreads, in cores: {shares}; {profile['num_samples']} samples.\n"


def index_tables(report: Report) -> str:
    """The limits, then a row for each size."""
    cases = [{"size": f"{case['num_blocks'] / 1e6:.0f} M", **case} for case in report["cases"]]
    [bar] = [case for case in cases if case["size"] == "1 M" and case["num_workers"] == 1000]
    rebuild = f"rebuild of {report['rebuild']['num_blocks'] / 1e6:.1f} M blocks"
    bars = (
        ("lookup, 1 M blocks, 1000 workers, p50 (us)", "{bar[lookup_us][p50]:.1f}", "<= 10"),
        ("blocks inserted a second, same size", _millions(bar["inserts_per_s"]), ">= 2 M"),
        (f"{rebuild} from {report['rebuild']['num_workers']} workers (s)", "{rebuild_s:.2f}", "< 3"),
        (
            "hashing a prompt of 8192 tokens, p50 (us): list, array",
            "{hash_us[list][p50]:.0f}, {hash_us[array][p50]:.0f}",
            "",
        ),
    )
    return f"{_bars('', bars, {**report, 'bar': bar})}\n{_table(_INDEX_COLUMNS, cases)}"


def _millions(count: float) -> str:
    return f"{count / 1e6:.1f} M"


_INDEX_COLUMNS: Columns = {
    "blocks": "{size}",
    "workers": "{num_workers}",
    "lookup p50, p99 (us)": "{lookup_us[p50]:.1f}, {lookup_us[p99]:.1f}",
    "with predictions": "{predicted_lookup_us[p50]:.1f}, {predicted_lookup_us[p99]:.1f}",
    "predict (us)": "{predict_us:.0f}",
    "inserts/s": lambda case: _millions(case["inserts_per_s"]),
    "removes/s": lambda case: _millions(case["removes_per_s"]),
    "longest store (ms)": "{longest_store_ms:.0f}",
    "bytes a block": "{bytes_per_block:.0f}",
}


def transfer_tables(report: Report) -> str:
    """The limits, then a row for each size and temperature."""
    bars = (
        ("shm over memcpy of the same round", "{share_of_memcpy[shm]:.2f}", ">= 0.6"),
        ("grpc, GB/s", "{gb_per_s[grpc]:.2f}", ">= 0.7"),
    )
    return f"{_bars('warm, 64 MiB', bars, report['warm'])}\n{speeds_table([report, *report['others']])}"


def speeds_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A row for each of ``runs`` and each temperature."""
    temperatures = ("warm", "cold")
    return _table(_SPEED_COLUMNS, [{**run, "temperature": name, **run[name]} for run in runs for name in temperatures])


_SPEED_COLUMNS: Columns = {
    "blocks": lambda run: f"{run['size_bytes'] / _MIB:g} MiB",
    "piece": lambda run: f"{run['piece_size_bytes'] // _KIB} KiB",
    "": "{temperature}",
    "shm GB/s": "{gb_per_s[shm]:.1f}",
    "grpc GB/s": "{gb_per_s[grpc]:.2f}",
    "memcpy GB/s": "{gb_per_s[memcpy]:.1f}",
    "shm over memcpy": "{share_of_memcpy[shm]:.2f}",
    "CPU s per GB, shm: puller, source": "{cpu_s_per_gb[shm][puller]:.2f}, {cpu_s_per_gb[shm][source]:.2f}",
    "grpc: puller, source": "{cpu_s_per_gb[grpc][puller]:.2f}, {cpu_s_per_gb[grpc][source]:.2f}",
}


def disagg_tables(report: Report) -> str:
    """The cost, then the parts of the second token's time."""
    stub = [{"prompt": length, **figures} for length, figures in report["stub"].items()]
    parts = [
        {"prompt": f"{engine}, {length}", **figures}
        for engine in ("stub", "tiny")
        for length, figures in report[engine].items()
    ]
    return f"{_table(_DISAGG_COLUMNS, stub)}\n{_table(_DISAGG_PART_COLUMNS, parts)}"


_DISAGG_COLUMNS: Columns = {
    "stub engine, prompt": "{prompt}",
    "agg: 1st, 2nd token (ms)": "{ttft_ms[agg]:.1f}, {second_token_ms[agg]:.1f}",
    "disagg": "{ttft_ms[disagg]:.1f}, {second_token_ms[disagg]:.1f}",
    "moved": lambda figures: f"{figures['transfer_bytes'] / _MIB:.0f} MiB",
    "copying alone (ms)": "{copy_ms:.1f}",
    "own cost": "{overhead_ms:.1f}",
    "wanted": "<= 3",
}
_DISAGG_PART_COLUMNS: Columns = {
    "disaggregated, prompt": "{prompt}",
    "route": "{parts_ms[disagg][route]:.1f}",
    "prefill": "{parts_ms[disagg][prefill]:.1f}",
    "transfer": "{parts_ms[disagg][transfer]:.1f}",
    "join": "{parts_ms[disagg][join]:.1f}",
    "first message": "{parts_ms[disagg][first_message]:.1f}",
    "api": "{parts_ms[disagg][api]:.1f}",
    "second token (ms)": "{second_token_ms[disagg]:.1f}",
    "aggregated": "{second_token_ms[agg]:.1f}",
}


# Measurements of other shapes only show that the benchmark works.
_GPU_SHAPE = "qwen3-8b"
_GPU_FORMS = {2: "two GPUs", 1: "one GPU, shared"}
_NOT_RUN = "not run"


def gpu_hand_off_tables(report: Report) -> str:
    """A row for each figure, with all its measurements; the newest mixed load of each form; what measured them."""
    rows = _gpu_rows(report)
    figures = markdown_table(
        ["figure", *_GPU_FORMS.values(), "wanted", "measured before by hand"],
        [
            [what, *(_gpu_cell(rows, name, num_gpus, form) for num_gpus in _GPU_FORMS), *others]
            for name, what, form, *others in _GPU_FIGURES
        ],
    )
    mixed = {num_gpus: _gpu_measured(rows, "mixed", num_gpus)[-1:] for num_gpus in _GPU_FORMS}
    loads = [_gpu_load(num_gpus, found[0]["figures"]) for num_gpus, found in mixed.items() if found]
    return "\n".join([figures, *loads, _gpu_sources(rows)])


def gpu_engine_tables(report: Report) -> str:
    """A row for each figure, with all its measurements; what measured them."""
    rows = _gpu_rows(report)
    figures = markdown_table(
        ["figure", "measured", "wanted", "vLLM 0.25.1", "before"],
        [[what, _gpu_cell(rows, name, 1, form), *others] for name, what, form, *others in _GPU_ENGINE_FIGURES],
    )
    return f"{figures}\n{_gpu_sources(rows, {1: 'one GPU', 2: 'two GPUs'})}"


# The row, what the figure is, its form; what is wanted, vLLM's figure, and ours of before.
_GPU_ENGINE_FIGURES = (
    ("one", "1 x 32 -> 256, tok/s", "{tokens_per_s:,.0f}", ">= 215, goal 239", "194", "20"),
    ("many", "64 x 128 -> 256, tok/s", "{tokens_per_s:,.0f}", ">= 9,700, goal 10,300", "9,244", "3,377"),
    ("large", "256 x 1,024 -> 256, tok/s", "{tokens_per_s:,.0f}", ">= 5,900, goal 6,300", "5,997", "2,060"),
    (
        "prefill",
        "32 x 4,096 -> 1, input tok/s",
        "{input_tokens_per_s:,.0f}",
        ">= 39,000, goal 41,500",
        "41,500",
        "32,700",
    ),
    ("sampled", "64 x 128 -> 256 with sampling: tok/s over greedy", "{ratio:.3f}", ">= 0.93", "", "about 0.3"),
    ("guided", "the same, all rows following a JSON schema: tok/s over none", "{ratio:.3f}", "", "", ""),
    ("guided", "half of the rows", "{half_ratio:.3f}", "", "", ""),
    *(
        (
            "sampler",
            f"sampler alone, {what} logits, ms a step (of the best token alone)",
            f"{{cases[{number}][device_ms]:.2f}} ({{cases[{number}][greedy_device_ms]:.2f}})",
            wanted,
            "",
            "",
        )
        for number, what, wanted in (
            (0, "1 row of flat", ""),
            (2, "64 rows of flat", "<= 0.4"),
            (3, "64 rows of peaked", "<= 0.4"),
            (4, "256 rows of flat", ""),
        )
    ),
    *(
        (
            "chunk",
            f"attention of a layer, 2,048 tokens after {context}, us (read in blocks; flash attention on copies)",
            f"{{{case}[engine_us]:.0f}} ({{{case}[paged_us]:.0f}}; {{{case}[flash_us]:.0f}})",
            "",
            "",
            "",
        )
        for case, context in zip(
            (f"cases[{number}]" for number in range(4)), ("0", "2,048", "8,192", "16,384"), strict=True
        )
    ),
    ("start", "from weights loaded to ready, kernels compiled before, s", "{warm_s:.1f}", "<= 15", "", ""),
    ("start", "with a share of the free memory, s", "{share_s:.1f}", "<= 15", "", ""),
    ("start", "with nothing compiled, s", "{cold_s:.1f}", "", "", ""),
    (
        "stack",
        "64 streams through all processes: tok/s over the engine alone",
        "{ratio:.2f}",
        ">= 0.93",
        "",
        "",
    ),
    ("stack", "the engine alone, tok/s", "{engine_tokens_per_s:,.0f}", "", "", ""),
)


def _gpu_rows(report: Report) -> list[Row]:
    return [row for row in report["rows"] if row["shape"] == _GPU_SHAPE]


def _gpu_sources(rows: Sequence[Row], forms: Mapping[int, str] = _GPU_FORMS) -> str:
    return "".join(f"- {row['row']}, {forms[row['num_gpus']]} ({row['gpus'][0]}): {_describe(row)}" for row in rows)


def _gpu_measured(rows: Sequence[Row], name: str, num_gpus: int) -> list[Row]:
    """All measurements of a row, the newest last."""
    return [row for row in rows if (row["row"], row["num_gpus"]) == (name, num_gpus)]


def _gpu_cell(rows: Sequence[Row], name: str, num_gpus: int, form: str) -> str:
    found = _gpu_measured(rows, name, num_gpus)
    return "; ".join(_gpu_figure(form, row) for row in found) or _NOT_RUN


def _gpu_card(row: Row) -> str:
    """``H100`` of ``NVIDIA H100 80GB HBM3``."""
    name = str(row["gpus"][0]).removeprefix("NVIDIA ")
    return name.partition(" ")[0]


def _gpu_figure(form: str, row: Row) -> str:
    try:
        value = form.format_map(_finished(row["figures"]))
    except IndexError:  # it was measured before this pool was among those that are pulled
        return _NOT_RUN
    return value if value == _NOT_RUN else f"{value} ({_gpu_card(row)})"


def _finished(figures: Row) -> Row:
    """With words for the ratios of a mixed load that was cut before it had any."""
    ratios = ("itl_ratio", "tokens_ratio")
    return {
        **figures,
        **{name: f"{figures[name]:.3f}" if figures[name] else _NOT_RUN for name in ratios if name in figures},
    }


# The row, what the figure is, its form; what is wanted with two GPUs; what was measured before by hand.
_GPU_FIGURES = (
    ("pull", "pull of 4 GiB in blocks of 2.25 MiB, GB/s", "{pools[0][gb_per_s]:.0f}", ">= 365", "NVLink 397"),
    ("pull", "its copying alone", "{pools[0][copy_gb_per_s]:.0f}", "", ""),
    ("pull", "one plain copy of it, in the same process", "{pools[0][plain_gb_per_s]:.0f}", "", ""),
    ("pull", "pull of 16 GiB in blocks of 2.25 MiB, GB/s", "{pools[3][gb_per_s]:.0f}", ">= 365", ""),
    ("pull", "its copying alone", "{pools[3][copy_gb_per_s]:.0f}", "", ""),
    ("pull", "pull of the 500 blocks of 8,000 tokens", "{pools[1][gb_per_s]:.0f}", "", ""),
    ("pull", "its copying alone", "{pools[1][copy_gb_per_s]:.0f}", "", ""),
    ("pull", "pull of 1 GiB in pieces of 64 KiB", "{pools[2][gb_per_s]:.0f}", "", "NIXL 13"),
    ("pull", "its copying alone", "{pools[2][copy_gb_per_s]:.0f}", "", ""),
    ("busy", "pull of the 500 blocks while both decode 64 streams", "{pools[0][pulls][gb_per_s]:.0f}", ">= 180", ""),
    ("busy", "one plain copy meanwhile", "{pools[0][pulls][plain_gb_per_s]:.0f}", "", ""),
    ("busy", "reader's step: longer by, %", "{pools[0][reader][slower_percent]:.1f}", "<= 6", ""),
    ("busy", "owner's step: longer by, %", "{pools[0][owner][slower_percent]:.1f}", "", ""),
    ("busy", "pull of 4 GiB while both decode", "{pools[2][pulls][gb_per_s]:.0f}", ">= 180", ""),
    ("busy", "reader's step: longer by, %", "{pools[2][reader][slower_percent]:.1f}", "<= 6", ""),
    ("busy", "owner's step: longer by, %", "{pools[2][owner][slower_percent]:.1f}", "", ""),
    ("busy", "pull in pieces of 64 KiB while both decode", "{pools[1][pulls][gb_per_s]:.0f}", "", ""),
    ("busy", "reader's step: longer by, %", "{pools[1][reader][slower_percent]:.1f}", "", ""),
    ("busy", "owner's step: longer by, %", "{pools[1][owner][slower_percent]:.1f}", "", ""),
    ("busy", "reader's step without pulls, ms", "{pools[0][reader][quiet_ms]:.1f}", "", ""),
    ("first_step", "8,000 tokens: prefill's end to first decode step, ms", "{wait_ms_p50:.1f}", "<= 15, goal 8", ""),
    ("first_step", "p99", "{wait_ms_p99:.1f}", "", ""),
    ("first_step", "moving its blocks: ms, GB/s", "{transfer_ms:.1f}, {transfer_gb_per_s:.0f}", "", ""),
    ("mixed", "p99 between tokens, disaggregated over aggregated", "{itl_ratio}", "<= 0.333", ""),
    ("mixed", "tokens/s, disaggregated over aggregated", "{tokens_ratio}", ">= 0.97", ""),
)


def _gpu_load(num_gpus: int, mixed: Row) -> str:
    columns = {_GPU_FORMS[num_gpus]: lambda side: _gpu_side(side["name"], mixed["best"]), **_GPU_SIDE_COLUMNS}
    return f"{_table(columns, mixed['sides'])}\n{_GPU_LOAD.format_map(mixed)}"


_GPU_LOAD = (
    "{num_streams} streams, and {prompts_per_s:.2f} prompts of {num_prompt_tokens:,} tokens a second; one GPU prefills "
    "{prefill_tokens_per_s:,.0f} tokens/s. The aggregated one that counts is bold.\n"
)


def _gpu_side(name: str, best: str | None) -> str:
    num_tokens = name.partition("_")[2]
    what = f"aggregated, steps of {int(num_tokens):,} tokens" if num_tokens else "disaggregated"
    return f"**{what}**" if name == best else what


_GPU_SIDE_COLUMNS: Columns = {
    "tok/s": "{tokens_per_s:.0f}",
    "of requests that ended": "{finished_per_s:.0f}",
    "between tokens p50, p99, longest (ms)": "{itl[p50]:.1f}, {itl[p99]:.1f}, {itl[max]:.0f}",
    "of the streams alone p99": "{stream_itl[p99]:.1f}",
    "first token of prompts p50, p99 (ms)": "{prompt_ttft[p50]:.0f}, {prompt_ttft[p99]:.0f}",
    "prompts": "{num_prompts}",
    "waiting at the end": "{num_waiting}",
    "failed": lambda side: sum(side["failed"].values()),
    "moved, GB": lambda side: ", ".join(f"{way} {size / 1e9:.1f}" for way, size in side["transfer_bytes"].items()),
}


_LOADS = {"batch_1": "one after the other", "batch_8": "three streams of eight at a time"}
_PROMPTS = {
    "new": "image and text are new",
    "cached_embeddings": "again with another salt: embeddings are cached",
    "cached_prefix": "again: KV is cached too",
    "text": "as many tokens of new text",
    "photo_new": "a photo and text are new",
    "photo_cached_embeddings": "the photo again with another salt: embeddings are cached",
}


def encode_tables(report: Report) -> str:
    """What one Encode worker does, what the first token waits for, and how fast embeddings move."""
    rates = [{"what": what, **report["worker"][load]} for load, what in _LOADS.items()]
    times = [
        {"what": what, "ttft_ms": report["ttft_ms"][prompt], **report["parts_ms"][prompt]}
        for prompt, what in _PROMPTS.items()
    ]
    return f"{_table(_RATE_COLUMNS, rates)}\n{_table(_TTFT_COLUMNS, times)}\n{speeds_table([report['pulls']])}"


_RATE_COLUMNS: Columns = {
    "images": "{what}",
    "a second": "{images_per_s:.0f}",
    "CPU ms each": "{cpu_ms_per_image:.1f}",
    "in a batch": "{mean_batch_size:.1f}",
    "before the tower (ms)": "{before_tower_ms:.1f}",
    "in the tower (ms)": "{tower_ms:.1f}",
    "others": "{others_share:.2f}",
}
_TTFT_COLUMNS: Columns = {
    "prompt": "{what}",
    "TTFT p50, p90 (ms)": "{ttft_ms[p50]:.1f}, {ttft_ms[p90]:.1f}",
    "media": "{media:.1f}",
    "route": "{route:.1f}",
    "prefill": "{prefill:.1f}",
    "api": "{api:.1f}",
}


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
    return _table(_ENGINE_COLUMNS, [{"name": name, **measured} for name, measured in report["workloads"].items()])


def _ceiling(measured: Row) -> str:
    """By the clock and by CPU time; empty if none was measured, as in reports from before there was a ceiling."""
    if measured.get("ceiling") is None:
        return ""
    return f"{measured['ceiling']:.2f}, {measured['cpu_ceiling']:.2f}"


_ENGINE_COLUMNS: Columns = {
    "workload": lambda measured: f"`{measured['name']}`: {_WORKLOADS[measured['name']][0]}",
    "Quartet tok/s": "{quartet[tokens_per_s]:.0f}",
    "`generate` tok/s": "{generate[tokens_per_s]:.0f}",
    "ratio": "{ratio:.2f}",
    "by CPU time": "{cpu_ratio:.2f}",
    "ceiling": _ceiling,
    "wanted": lambda measured: _WORKLOADS[measured["name"]][1],
    "ties": "{num_ties} of {num_outputs}",
}


def tiers_tables(report: Report) -> str:
    """What a hit of each tier saves, and what tiers cost."""
    wanted, gpus = report["wanted_ratio"], report["gpus"]
    rows = [{"tier": tier, "wanted": wanted if tier == "host" else None, **report[tier]} for tier in ("host", "disk")]
    head = f"{report['prompt_tokens']:,} tokens, all but the last block from"
    hits = _table({head: "{tier}", **_TIER_COLUMNS}, rows)
    cost = report["cost"]
    clock = f"the clock ({', '.join(gpus)})" if gpus else "the CPU"
    row = {"clock": clock, "num_alternations": len(cost["without"]), "ratio": cost["ratio"]}
    sides = {"without": median(cost["without"]), "with_tiers": median(cost["with_tiers"])}
    return f"{hits}\n{_table(_TIER_COST_COLUMNS, [row | sides])}"


def _is_loaded(hit: Row) -> bool:
    return bool(hit["num_loaded_tokens"])


_TIER_COLUMNS: Columns = {
    "first token after, ms": lambda row: f"{1e3 * row['loaded_s']:.1f}",
    "computed, ms": lambda row: f"{1e3 * row['computed_s']:.0f}",
    "ratio": "{ratio:.3f}",
    "wanted": lambda row: f"<= 1/{round(1 / row['wanted'])}" if row["wanted"] else "",
    "cached in the pool, ms": lambda row: f"{1e3 * row['cached_s']:.1f}",
    "GB/s": "{gb_per_s:.2f}",
    "rounds": lambda row: len(row["hits"]),
    "of these, loaded": lambda row: sum(map(_is_loaded, row["hits"])),
}
_TIER_COST_COLUMNS: Columns = {
    "nothing evicted, tokens a second of": "{clock}",
    "without tiers": "{without:.0f}",
    "with": "{with_tiers:.0f}",
    "ratio": "{ratio:.3f}",
    "wanted": ">= 0.97",
    "alternations": "{num_alternations}",
}


def gpu_short_tables(report: Report) -> str:
    """First tokens of prompts whose last few tokens are computed, by a graph and launched one by one."""
    return _table(_GPU_SHORT_COLUMNS, [{**case, "gpus": report["gpus"]} for case in report["cases"]])


_GPU_SHORT_COLUMNS: Columns = {
    "cached tokens": "{context:,}",
    "computed": "{num_tokens}",
    "first token by a graph, ms": lambda row: f"{1e3 * row['graph_s']:.1f}",
    "launched one by one, ms": lambda row: f"{1e3 * row['launched_s']:.1f}",
    "ratio": lambda row: f"{row['graph_s'] / row['launched_s']:.2f}",
    "the engine takes": lambda row: "the graph" if row["is_graph"] else "launches",
}


def tiers_replay_tables(report: Report) -> str:
    """A row for each replay: what is below the pools, and what comes of it."""
    rows = [
        {"about": LOADS[run["load"]].about, "name": BELOW[run["below"]], **run}
        for run in report["runs"]
        if run["below"] in BELOW
    ]
    return _table(_TIERS_REPLAY_COLUMNS, rows)


def _is_wanted_of_tiers(run: Row) -> bool:
    return (run["load"], run["below"]) == ("conversation", "host")


def _tiers_ratio(run: Row) -> str:
    if run["ratio"] is None:
        return ""
    ratio = f"{run['ratio']:.2f}"
    return f"**{ratio}**" if _is_wanted_of_tiers(run) and run["ratio"] > _MOST_OF_DEVICE else ratio


_MOST_OF_DEVICE = 0.8
_TIERS_REPLAY_COLUMNS: Columns = {
    "": "{about}",
    "below the pool": "{name}",
    "mean TTFT (ms)": "{result[ttft_ms][mean]:.1f}",
    "of that without": _tiers_ratio,
    "wanted": lambda run: f"<= {_MOST_OF_DEVICE}" if _is_wanted_of_tiers(run) else "",
    "p50": "{result[ttft_ms][p50]:.0f}",
    "p90": "{result[ttft_ms][p90]:.0f}",
    "p99": "{result[ttft_ms][p99]:.0f}",
    "reuse": "{result[reuse_ratio]:.3f}",
    "from the host": "{result[host_ratio]:.3f}",
    "from disk": "{result[disk_ratio]:.3f}",
    "blocks lost": "{result[blocks_dropped]:,}",
}


def retention_replay_tables(report: Report) -> str:
    """A row for each replay: how long sessions live, and what they and others see of it."""
    rows = [{"about": RETENTION_LOADS[run["load"]].about, **run} for run in report["runs"]]
    return _table(_RETENTION_REPLAY_COLUMNS, rows)


def _mean_and_p99(name: str) -> Callable[[Row], str]:
    def show(run: Row) -> str:
        spread = run["result"][name]
        return f"{spread['mean']:.1f}, {spread['p99']:.0f}" if spread["mean"] else ""

    return show


_RETENTION_REPLAY_COLUMNS: Columns = {
    "": "{about}",
    "time to live": lambda run: f"{run['ttl_s']:g} s" if run["ttl_s"] else "none",
    "mean TTFT (ms)": "{result[ttft_ms][mean]:.1f}",
    "of that without": lambda run: "" if run["ratio"] is None else f"{run['ratio']:.2f}",
    "p50": "{result[ttft_ms][p50]:.0f}",
    "p99": "{result[ttft_ms][p99]:.0f}",
    "sessions: mean, p99": _mean_and_p99("session_ttft_ms"),
    "others: mean, p99": _mean_and_p99("other_ttft_ms"),
    "reuse": "{result[reuse_ratio]:.3f}",
}


_NONE = "-"


def routing_tables(report: Report) -> str:
    """Mean and p99 TTFT of every policy on every case, then limits and measured figures."""
    names = [f"`{name}`" for name in (OURS, *OTHERS)]
    means = markdown_table(
        ["mean TTFT (ms)", *names, "runs"],
        [[*_routing_row(row, "ttft_mean", ".1f"), _num_runs(row)] for row in report["rows"]],
    )
    tails = markdown_table(["p99 TTFT (ms)", *names], [_routing_row(row, "ttft_p99", ".0f") for row in report["rows"]])
    abouts = {row["name"]: row["about"] for row in report["rows"]}
    bars = _table(_BAR_COLUMNS, [{"about": abouts[bar["case"]], **bar} for bar in report["bars"]])
    return f"{means}\n{tails}\n{bars}\n{_notes(report)}\n"


def _routing_row(row: Row, name: str, form: str) -> list[object]:
    policies = row["policies"]
    return [row["about"], *(format(policies[key][name], form) if key in policies else _NONE for key in (OURS, *OTHERS))]


def _measured(bar: Row) -> str:
    return f"{bar['measured']:.3f}" if bar["measured"] <= bar["limit"] else f"**{bar['measured']:.3f}**"


_BAR_COLUMNS: Columns = {"": "{about}", "ratio": "{what}", "measured": _measured, "wanted": "<= {limit}"}


def _num_runs(row: Row) -> str:
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
    ratios = {name: f"{ratio:.2f}" for name, ratio in report["mean_ttft_ratio"].items()}
    rows = [{"name": name, "ratio": ratios.get(name, ""), **found} for name, found in report["policies"].items()]
    return _table(_PREFIXES_COLUMNS, rows)


_PREFIXES_COLUMNS: Columns = {
    "": "`{name}`",
    "mean TTFT (ms)": "{ttft_ms[mean]:.1f}",
    "p50": "{ttft_ms[p50]:.1f}",
    "p90": "{ttft_ms[p90]:.1f}",
    "p99": "{ttft_ms[p99]:.1f}",
    "mean over round robin's": "{ratio}",
    "wanted": lambda found: "<= 0.8" if found["name"] == OURS else "",
    "whole answer (ms)": "{e2e_ms[mean]:.0f}",
    "reuse": "{reuse_ratio:.2f}",
    "finished, failed": "{requests_finished}, {requests_failed}",
}


def routers_tables(report: Report) -> str:
    """A row for each number of routers, as they are and silent."""
    return f"{_table(_ROUTERS_COLUMNS, report['fleets'])}\n{_TELLING.format_map(report['telling'])}"


_TELLING = "CPU of a start that goes alone: {tell_us:.0f} us to tell of it, {hear_us:.0f} us to hear of it.\n"


_ROUTERS_COLUMNS: Columns = {
    "routers": lambda found: f"{found['num_routers']}{', silent' if found['is_silent'] else ''}",
    "mean TTFT (ms)": "{ttft_ms_mean:.0f}",
    "p50": "{ttft_ms_p50:.0f}",
    "p99": "{ttft_ms_p99:.0f}",
    "mean over one router's": "{ttft_ratio:.2f}",
    "routers' CPU (ms a request)": "{router_cpu_ms:.2f}",
    "finished, failed": "{requests_finished}, {requests_failed}",
}


def routers_replay_tables(report: Report) -> str:
    """By number of routers, those that tell each other and silent ones; then parts of the design, and lost indexes."""
    rows = report["rows"]
    kept = [row for row in rows if not row["without_index_s"]]
    whole, tried = [row for row in kept if not row["part"]], [row for row in kept if row["part"]]
    silent = {row["num_routers"]: row for row in whole if not row["tells"]}
    telling = {row["num_routers"]: row for row in whole if row["tells"]}
    numbers = sorted({row["num_routers"] for row in tried})
    parts: dict[str, dict[int, Row]] = {
        "they tell nothing": silent,
        "told after 2 ms, turns of 4 ms, open for 2": telling,
    }
    for row in tried:
        parts.setdefault(row["part"], {})[row["num_routers"]] = row
    ways = [
        [what, *(_over(by_number[number]["over_one"]) if number in by_number else "" for number in numbers)]
        for what, by_number in parts.items()
    ]
    tables = (
        _table(
            _ROUTERS_REPLAY_COLUMNS, [{**row, "silent": silent.get(row["num_routers"])} for row in telling.values()]
        ),
        markdown_table(["mean TTFT over one router's", *(f"{number} routers" for number in numbers)], ways),
        _table(_WITHOUT_INDEX_COLUMNS, [row for row in rows if row["without_index_s"]]),
    )
    return "\n".join(
        (*tables, f"{report['num_requests']:,} requests of {report['trace'] or 'a generated trace'} for each seed.\n")
    )


def _over(over: Row | None) -> str:
    return "" if over is None else "{mean:.2f} ({least:.2f}, {most:.2f})".format_map(over)


def _over_limit(row: Row) -> str:
    over = _over(row["over_one"])
    return f"**{over}**" if row["limit"] is not None and row["over_one"]["mean"] > row["limit"] else over


_ROUTERS_REPLAY_COLUMNS: Columns = {
    "routers": "{num_routers}",
    "mean TTFT (ms)": "{ttft_ms_mean:.0f}",
    "p99": "{ttft_ms_p99:.0f}",
    "mean over one router's (least, most)": lambda row: "1" if row["num_routers"] == 1 else _over_limit(row),
    "wanted": lambda row: "" if row["limit"] is None else f"<= {row['limit']}",
    "silent: mean TTFT (ms)": lambda row: f"{row['silent']['ttft_ms_mean']:.0f}" if row["silent"] else "",
    "over one router's": lambda row: _over(row["silent"] and row["silent"]["over_one"]),
    "seeds": "{num_runs}",
}
_RESTART_EVERY_S = 10.0
_WITHOUT_INDEX_COLUMNS: Columns = {
    "one of 4 routers has no index": lambda row: (
        "at any time" if row["without_index_s"] == _RESTART_EVERY_S else f"for {row['without_index_s']:g} s of every 10"
    ),
    "mean TTFT (ms)": "{ttft_ms_mean:.0f}",
    "over that with it (least, most)": lambda row: _over(row["over_with_index"]),
    "requests that it sent meanwhile": lambda row: sum(row["requests_without_index"]),
    "to each worker": lambda row: ", ".join(map(str, sorted(row["requests_without_index"]))),
    "seeds": "{num_runs}",
}


def routing_cost_tables(report: Report) -> str:
    """A row for each policy: the parts of the cost of routing a request, in microseconds."""
    rows = [
        {"name": name, "hash_us": report["hash_us"], "all_us": report["routing_us"][name], **cost}
        for name, cost in report["policies"].items()
    ]
    return f"{_table(_COST_COLUMNS, rows)}\n{_COST_SETTING.format_map(report)}"


_COST_COLUMNS: Columns = {
    "us of CPU a request": "`{name}`",
    "naming its blocks": "{hash_us:.0f}",
    "ranks shown": "{snapshot_us:.0f}",
    "choice, look-up": "{assign_us:.0f}",
    "queue, book, index": lambda cost: f"{cost['total_us'] - cost['snapshot_us'] - cost['assign_us']:.0f}",
    "all": "{all_us:.0f}",
    "goal": lambda cost: "<= 500" if cost["name"] == OURS else "",
}
_COST_SETTING = (
    "{num_prompt_tokens} tokens, {num_workers} workers, an index of {num_blocks:,} blocks. The look-up alone takes "
    "{lookup_us:.0f} us; taking in one load report {report_us:.0f} us.\n"
)


def harness_tables(report: Report) -> str:
    """A row for each figure: the harness before and the one after it, measured in alternation."""
    return _table(_HARNESS_COLUMNS, report["figures"])


def _middle(values: Sequence[float]) -> str:
    """The median with the lowest and the highest of ``values``, or the only one of them, or nothing."""
    if len(values) < 2:
        return "".join(map(_short, values))
    return f"{_short(median(values))} ({_short(min(values))}, {_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


_HARNESS_COLUMNS: Columns = {
    "figure": "{name}",
    "before: median (lowest, highest)": lambda figure: _middle(figure["before"]),
    "after": lambda figure: _middle(figure["after"]),
    "runs before": lambda figure: len(figure["before"]),
    "runs after": lambda figure: len(figure["after"]),
}


def ratios_tables(report: Report) -> str:
    """A row for each ratio to gRPC: its median over the runs, and how far apart runs and windows are."""
    rows = [
        {"name": name, "ratio": ratio, "wanted": _RATIO_BARS.get(name, ""), **report["ratio_to_grpc_spread"][name]}
        for name, ratio in report["ratio_to_grpc"].items()
    ]
    return _table(_RATIO_COLUMNS, rows)


_RATIO_BARS = {
    "request_generate": "<= 2.6",
    "request_session": "<= 3.2",
    "generate_256": "<= 1.35",
    "session_256": "<= 1.7",
    "session_1024": "<= 2.8",
}
_RATIO_COLUMNS: Columns = {
    "times nothing but gRPC": "`{name}`",
    "median of the runs": "{ratio:.2f}",
    "runs": lambda row: ", ".join(f"{ratio:.2f}" for ratio in sorted(row["runs"])),
    "windows, lowest and highest": "{lowest:.2f}, {highest:.2f}",
    "wanted": "{wanted}",
}


def rebuild_tables(report: Report) -> str:
    """A row for each figure before and after the layout changed."""
    return _table(_REBUILD_COLUMNS, report["figures"])


_REBUILD_COLUMNS: Columns = {
    "figure": "{name}",
    "before": lambda figure: _middle(figure["before"]),
    "after": lambda figure: _middle(figure["after"]),
    "wanted": "{wanted}",
}


def isolation_tables(report: Report) -> str:
    """A row for each attack, and the commands of those that the newest one did not measure."""
    rows = [{"name": name, **outcome} for name, outcome in report["outcomes"].items()]
    earlier: dict[str, list[str]] = {}
    for row in rows:
        if "run" in row and row["run"]["started_at"] != report["started_at"]:
            earlier.setdefault(_describe(row["run"]), []).append(f"`{row['name']}`")
    runs = "".join(f"- {', '.join(names)}: {described}" for described, names in earlier.items())
    return f"{_table(_ISOLATION_COLUMNS, rows)}{runs and chr(10)}{runs}"


def _both(outcome: Row, show: Callable[[Row], str]) -> str:
    """A figure of the processes' cores, attacked; burnt. Empty where it was not measured."""
    cores = [outcome[window].get("cores") for window in ("attacked", "burnt")]
    return "; ".join(map(show, cores)) if all(cores) else ""


def _cores_used(cores: Row) -> str:
    used = {name: one["cores"] for name, one in cores.items()}
    router, tenant, other = (used.get(name, 0.0) for name in ("router", "tenant", "other"))
    workers = sum(used.values()) - router - tenant - other
    return f"{router:.2f} + {workers:.2f} + {tenant + other:.2f}"


def _router_waited(cores: Row) -> str:
    return f"{cores['router']['main_waited']:.0%}" if "router" in cores else ""


def _workers_waited(cores: Row) -> str:
    workers = [one["busiest_waited"] for name, one in cores.items() if name not in ("router", "tenant", "other")]
    return ", ".join(f"{waited:.0%}" for waited in workers)


def _failed(outcome: Row) -> str:
    failed = outcome["attacked"]["failed"]
    return ", ".join(f"{count} {status}" for status, count in failed.items()) or "none"


def _ended(outcome: Row) -> str:
    ended = outcome["attacked"].get("ended", {})
    return ", ".join(f"{count:,} {name}" for name, count in ended.items())


def _slowest(outcome: Row) -> str:
    """Where the slowest requests were, attacked; burnt. Empty where it was not measured."""
    both = [outcome[window].get("slowest_ms") for window in ("attacked", "burnt")]
    return "; ".join(" + ".join(f"{spent_ms:.0f}" for spent_ms in one.values()) for one in both) if all(both) else ""


_ISOLATION_COLUMNS: Columns = {
    "attack": "`{name}`",
    "p50, p99 attacked (ms)": "{attacked[ttft_ms_p50]:.0f}, {attacked[ttft_ms_p99]:.0f}",
    "p50, p99 burnt (ms)": "{burnt[ttft_ms_p50]:.0f}, {burnt[ttft_ms_p99]:.0f}",
    "times (<= 3)": "{ratio:.1f}",
    "requests": "{attacked[requests]}",
    "failed": _failed,
    "choices of both tenants that ended": _ended,
    "router's longest stall (ms)": lambda row: (
        f"{row['attacked']['router_stall_ms']:.0f}" if "router_stall_ms" in row["attacked"] else ""
    ),
    "slowest 20th (ms): line + begin + queue + prefill, attacked; burnt": _slowest,
    "attacker's client (cores)": "{attacked[other_share]:.2f}",
    "cores of router + workers + clients: attacked; burnt": lambda row: _both(row, _cores_used),
    "router's loop ready without a core: attacked; burnt": lambda row: _both(row, _router_waited),
    "workers' busiest threads, the same": lambda row: _both(row, _workers_waited),
}


def chaos_tables(report: Report) -> str:
    """What went wrong, and how often each fault struck."""
    faults = ", ".join(f"{count} {name}" for name, count in report["faults"].items())
    return f"{_table(_CHAOS_COLUMNS, [report])}\nFaults: {faults}.\n"


_CHAOS_COLUMNS: Columns = {
    "engine": "{engine}",
    "fleets at once": lambda report: str(report.get("fleets", 1)),  # older results had one and do not say so
    "episodes": "{episodes}",
    "requests": "{requests}",
    "times that clients went on elsewhere": "{breaks}",
    "lost": "{lost}",
    "wrong": "{wrong}",
    "overdue": "{overdue}",
    "held": "{held}",
    "recovery: median, p99, longest (s)": "{recovery_s[median]:.1f}, {recovery_s[p99]:.1f}, {recovery_s[longest]:.1f}",
}


def fuzz_tables(report: Report) -> str:
    """What is wanted, a row for each surface, and one for each process."""
    surfaces = [{"name": name, **surface} for name, surface in report["surfaces"].items()]
    processes = [
        {
            "name": name,
            "before_mb": report["before"][name]["private_mb"],
            "after_mb": after["private_mb"],
            "stall_ms": 1000 * report["stalls"].get(name, {"longest_s": 0.0})["longest_s"],
        }
        for name, after in report["after"].items()
    ]
    most = {
        "stall_ms": max(process["stall_ms"] for process in processes),
        "findings_count": sum(report["num_findings"].values()),
        "growth_mb": max(process["after_mb"] - process["before_mb"] for process in processes),
        **report,
    }
    bars = _bars("figure", _FUZZ_BARS, most)
    return f"{bars}\n{_table(_FUZZ_COLUMNS, surfaces)}\n{_table(_FUZZ_PROCESS_COLUMNS, processes)}"


_FUZZ_BARS = (
    ("inputs", "{inputs:,}", "1,000,000"),
    ("crashes, hangs and errors logged", "{findings_count}", "0"),
    ("longest stall of an event loop, in its thread's CPU time (ms)", "{stall_ms:.0f}", "<= 200"),
    ("most memory that a process has more than before (MB)", "{growth_mb:.0f}", "<= 50"),
)
_FUZZ_COLUMNS: Columns = {
    "surface": "`{name}`",
    "inputs": "{inputs:,}",
    "inputs a second": "{inputs_per_s:.0f}",
    "answers": lambda surface: ", ".join(f"{count} {code}" for code, count in surface["codes"].items()),
}
_FUZZ_PROCESS_COLUMNS: Columns = {
    "process": "{name}",
    "longest stall (ms)": "{stall_ms:.0f}",
    "private memory before, after (MB)": "{before_mb:.0f}, {after_mb:.0f}",
}


def guided_tables(report: Report) -> str:
    """What is wanted, each round, and what each schema costs alone."""
    bars = _bars("32 streams, five ordinary schemas", _GUIDED_BARS, report)
    rounds = [{"number": number, **row} for number, row in enumerate(report["rounds"], 1)]
    whole = {"name": "all 32 streams at once", "mask_us": report["batch_us"], "num_tokens": None, "compile_ms": None}
    costs = [{"name": name, **cost} for name, cost in report["schemas"].items()] + [whole]
    return f"{bars}\n{_table(_GUIDED_ROUND_COLUMNS, rounds)}\n{_table(_GUIDED_COST_COLUMNS, costs)}"


_GUIDED_BARS = (
    ("tokens per CPU second over those of the same unguided, median of the rounds", "{ratio:.3f}", ">= 0.9"),
    ("tokens per CPU second: guided, unguided", "{guided_per_cpu_s:.0f}, {plain_per_cpu_s:.0f}", ""),
    ("answers to ten schemas that are valid", "{answers[num_valid]} of {answers[num_answers]}", "all"),
)
_GUIDED_ROUND_COLUMNS: Columns = {
    "round": "{number}",
    "tokens": "{num_tokens:,}",
    "per CPU second, guided": "{guided_per_cpu_s:.0f}",
    "unguided": "{plain_per_cpu_s:.0f}",
    "ratio": "{ratio:.3f}",
    "a second, guided": "{guided_per_s:.0f}",
    "unguided ": "{plain_per_s:.0f}",
}


def _three(times: Row | None, form: str) -> str:
    return "" if times is None else ", ".join(format(times[name], form) for name in ("p50", "p99", "max"))


_GUIDED_COST_COLUMNS: Columns = {
    "schema": "{name}",
    "tokens of an answer": lambda cost: "" if cost["num_tokens"] is None else f"{cost['num_tokens']:.0f}",
    "to compile: p50, p99, longest (ms)": lambda cost: _three(cost["compile_ms"], ".1f"),
    "a token and its mask: p50, p99, longest (us)": lambda cost: _three(cost["mask_us"], ".0f"),
}


def schemas_tables(report: Report) -> str:
    """What the suite says of each part, the refused keywords, and each instance that is wrong."""
    parts = [{"name": name, **report[name]} for name in ("main", "optional")]
    keywords = dict.fromkeys(name for part in parts for name in part["refused_by_keyword"])
    others = dict.fromkeys(name for part in parts for name in part["refused_otherwise"])
    tables = [_table(_SUITE_COLUMNS, parts)]
    for head, kind, names in (
        ("refused keyword", "refused_by_keyword", keywords),
        ("refused for another reason", "refused_otherwise", others),
    ):
        rows = [
            [f"`{name}`" if "keyword" in head else name, *(part[kind].get(name, 0) for part in parts)] for name in names
        ]
        tables.append(markdown_table([head, "main: schemas", "optional: schemas"], rows))
    wrongs = [
        [what, f"`{wrong['file']}`", wrong["schema"].replace("|", "\\|"), wrong["instance"], wrong["reason"] or "?"]
        for what, kind in (("accepted", "accepted_though_invalid"), ("refused", "refused_though_valid"))
        for part in parts
        for wrong in part[kind]
    ]
    tables.append(markdown_table(["", "file", "schema", "instance", "why"], wrongs))
    return "\n".join(tables)


def _count_explained(part: Row) -> str:
    refused = part["refused_though_valid"]
    return f"{len(refused)}, {sum(not wrong['reason'] for wrong in refused)}"


_SUITE_COLUMNS: Columns = {
    "part": "{name}",
    "schemas": "{num_schemas}",
    "compiled": "{num_compiled}",
    "refused by keyword": "{num_refused_by_keyword}",
    "refused otherwise": lambda part: sum(part["refused_otherwise"].values()),
    "invalid instances": "{num_invalid}",
    "accepted (0)": lambda part: len(part["accepted_though_invalid"]),
    "valid instances": "{num_valid}",
    "refused, unexplained (0)": _count_explained,
    "accepted in another order only": "{num_reordered}",
    "as 1, not as 1.0": "{num_whole}",
}


def total_tables(report: Report) -> str:
    """A row for each benchmark, and their sum, including the time between them."""
    everything = {"name": "all", "duration_s": report["duration_s"], "is_done": True}
    return _table(_TOTAL_COLUMNS, [*report["runs"], everything])


_TOTAL_COLUMNS: Columns = {
    "benchmark": "{name}",
    "seconds": "{duration_s:.0f}",
    "": lambda run: "" if run["is_done"] else "failed",
}


def storm_tables(report: Report) -> str:
    """What is wanted, and a row for each phase in which cancels struck."""
    phases = [{"name": name, **phase} for name, phase in report["phases"].items()]
    slowest = {"slowest": max(report["probe_s"]), "num_missed": len(report["missed"]), **report}
    return f"{_bars('figure', _STORM_BARS, slowest)}\n{_table(_STORM_COLUMNS, phases)}"


_STORM_BARS = (
    ("requests cancelled", "{requests}", "stated"),
    ("requests that an engine went on with", "{num_missed}", "0"),
    ("blocks held two leases after a round, in all rounds", "{held}", "0"),
    ("slowest probe in the idle fleet, s", "{idle_probe_s:.2f}", "stated"),
    ("slowest probe after a round, s", "{slowest:.2f}", "at most 1 more"),
)
_STORM_COLUMNS: Columns = {
    "phase": "{name}",
    "cancels": "{cancels}",
    "steps after the engine got the cancel, at most": "{most_steps}",
    "tokens in them, at most": "{most_tokens}",
    "from the client's cancel to the last step's end: median, longest (ms)": lambda phase: (
        f"{1000 * phase['median_last_s']:.0f}, {1000 * phase['longest_last_s']:.0f}"
    ),
}


def drain_tables(report: Report) -> str:
    """What is wanted, and a row for each drain."""
    return f"{_bars('figure', _DRAIN_BARS, report)}\n{_table(_DRAIN_COLUMNS, report['drains'])}"


_DRAIN_BARS = (
    ("endless answers", "{streams}", "stated"),
    ("failed", "{failed}", "0"),
    ("with other tokens than undisturbed", "{wrong}", "0"),
    ("slowest drain, s", "{slowest_drain_s:.2f}", "<= 5"),
    ("longest time without a token, s: median of the answers", "{median_pause_s:.2f}", "stated"),
    ("longest time without a token, s: of all answers", "{longest_pause_s:.2f}", "stated"),
)
_DRAIN_COLUMNS: Columns = {"worker": "{worker}", "SIGTERM to its end, s": "{duration_s:.2f}"}


def router_death_tables(report: Report) -> str:
    """What is wanted, and a row for each path."""
    rows = [{"path": path, **report[path]} for path in ("generate", "session")]
    return f"{_bars('figure', _ROUTER_DEATH_BARS, report)}\n{_table(_ROUTER_DEATH_COLUMNS, rows)}"


_ROUTER_DEATH_BARS = (
    ("routers killed", "{kills}", "stated"),
    ("blocks that workers held at the end", "{blocks_left}", "0"),
)
_ROUTER_DEATH_COLUMNS: Columns = {
    "path": "{path}",
    "answers that lost their router": "{resumed}",
    "failed": "{failed}",
    "with other tokens or text": "{wrong}",
    "between two tokens, ms": "{itl_ms:.1f}",
    "pause, ms: median": "{pause_p50_ms:.0f}",
    "95th percentile": "{pause_p95_ms:.0f}",
    "longest": "{pause_max_ms:.0f}",
    "median pause, in tokens": "{pause_ratio:.0f}",
}


def wedge_tables(report: Report) -> str:
    """A row for each strike."""
    return _table(_WEDGE_COLUMNS, report["strikes"])


def _noticed(strike: Row, by: str) -> str:
    return f"{strike[by]}, {strike[f'{by}_s']:.1f}" if strike[f"{by}_s"] else ""


_WEDGE_COLUMNS: Columns = {
    "what hangs": "{strike}",
    "/readyz says, after s": lambda strike: _noticed(strike, "probe"),
    "gRPC health says, after s": lambda strike: _noticed(strike, "health"),
    "not placed at after s": lambda strike: f"{strike['unplaced_s']:.1f}" if strike["unplaced_s"] else "",
    "requests that ended meanwhile": "{ended}",
    "failed": "{failed}",
    "all ready again after s": "{recovery_s:.1f}",
}


def saturation_tables(report: Report) -> str:
    """What is wanted of a fleet that is merely busy."""
    return _bars("figure", _SATURATION_BARS, report["saturation"])


_SATURATION_BARS = (
    ("seconds at saturation", "{duration_s:.0f}", "stated"),
    ("requests that ended well", "{requests:,}", "stated"),
    ("requests that failed", "{failed}", "0"),
    ("probes", "{probes:,}", "stated"),
    ("of these, alarms", "{alarms}", "0"),
    ("of these, not answered in 2 s", "{silent}", "stated"),
)


def page_tables(report: Report) -> str:
    """A row for each state of the router."""
    return _table(_PAGE_COLUMNS, [{**report[name], "what": what, "wanted": goal} for name, what, goal in _PAGE_STATES])


_PAGE_STATES = (
    ("idle", "idle, in Chromium", "<= 0.6"),
    ("busy", "under load, by a reader that draws nothing", "<= 0.6"),
    ("busy_in_browser", "under load, in Chromium on the router's cores", "stated"),
)
_PAGE_COLUMNS: Columns = {
    "the router is": "{what}",
    "page closed": lambda row: _span(row["closed"]),
    "page open": lambda row: _span(row["opened"]),
    "open less closed": "{page:.2f}",
    "wanted": "{wanted}",
}


def _span(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}, {max(values):.2f})"


def tracing_tables(report: Report) -> str:
    """What each state costs, and what follows from that with its limits."""
    states = [{"what": name, **use} for name, use in report["states"].items()]
    report = {**report, **_not_sampled_by_workers(report["states"])}
    bounds = [
        {"what": what, "measured": report[name], "wanted": goal.format(**report)}
        for name, what, goal in _TRACING_BOUNDS
    ]
    return _table(_TRACING_COLUMNS, states) + "\n" + _table(_TRACING_BOUND_COLUMNS, bounds)


def _not_sampled_by_workers(states: Mapping[str, Row]) -> Row:
    """What a request that is not sampled costs the router and all workers that it goes to: one measured for each."""
    off, idle = states["off"], states["not sampled"]
    router_us, worker_us = (idle[name] - off[name] for name in ("router_us", "worker_us"))
    return {f"not_sampled_{count}_us": router_us + count * worker_us for count in (2, 3)}


_TRACING_COLUMNS: Columns = {
    "traces": "{what}",
    "router, µs a request": "{router_us:.1f}",
    "decode worker, µs a request": "{worker_us:.1f}",
    "decode worker, µs a token": "{token_us:.3f}",
    "spans of the two": "{router_spans:.0f} + {worker_spans:.0f}",
}
_TRACING_BOUNDS = (
    ("not_sampled_us", "a request that is not sampled, router and one worker", "<= 20"),
    ("not_sampled_2_us", "the same over Prefill and Decode, computed", "<= 20"),
    ("not_sampled_3_us", "the same over Encode, Prefill and Decode, computed", "<= 20"),
    ("router_span_us", "a span of the router", "<= 70"),
    ("worker_span_us", "a span of the worker", "<= 70"),
    ("token_us", "a token of a sampled request", "0; rounds of one state differ by {token_spread_us:.3f}"),
)
_TRACING_BOUND_COLUMNS: Columns = {"more than with traces off": "{what}", "µs": "{measured:.3g}", "wanted": "{wanted}"}


def plan_tables(report: Report) -> str:
    """Each fleet, foretold and measured."""
    return _table(_PLAN_COLUMNS, report["cases"])


def _foretold_and_measured(latency: str) -> Callable[[Row], str]:
    """Both, and how far they are apart; the lowest and the highest run."""

    def show(case: Row) -> str:
        runs = [run["latencies"][latency] for run in case["runs"]]
        return (
            f"{case['foretold'][latency]:.0f} / {case['measured'][latency]:.0f} "
            f"({min(runs):.0f}, {max(runs):.0f}): {case['error'][latency]:+.1%}"
        )

    return show


def _num_others(case: Row) -> str:
    return f"{median(run['others_cores'] for run in case['runs']):.1f}"


_PLAN_COLUMNS: Columns = {
    "fleet": "{about}",
    "requests/s": "{rate:g}",
    "TTFT p50": _foretold_and_measured("ttft_p50"),
    "TTFT p95": _foretold_and_measured("ttft_p95"),
    "ITL p50": _foretold_and_measured("itl_p50"),
    "ITL p95": _foretold_and_measured("itl_p95"),
    "TTFT within 15 %": lambda case: "yes" if case["meets_bar"] else "**no**",
    "others": _num_others,
}


_TABLES: Mapping[str, Callable[[Report], str]] = {
    "overload": overload_tables,
    "relay": relay_tables,
    "relay_versions": relay_versions_tables,
    "many_streams": many_streams_tables,
    "clients": clients_tables,
    "global_router": global_router_tables,
    "profile": profile_tables,
    "index": index_tables,
    "index_busy": index_tables,
    "transfer": transfer_tables,
    "disagg": disagg_tables,
    "gpu_engine": gpu_engine_tables,
    "gpu_hand_off": gpu_hand_off_tables,
    "encode": encode_tables,
    "engine": engine_tables,
    "tiers": tiers_tables,
    "tiers_gpu": tiers_tables,
    "gpu_short": gpu_short_tables,
    "tiers_replay": tiers_replay_tables,
    "retention_replay": retention_replay_tables,
    "routing": routing_tables,
    "prefixes": prefixes_tables,
    "routers": routers_tables,
    "routers_replay": routers_replay_tables,
    "routing_cost": routing_cost_tables,
    "guided": guided_tables,
    "schemas": schemas_tables,
    "total": total_tables,
    "harness": harness_tables,
    "ratios": ratios_tables,
    "rebuild": rebuild_tables,
    "cancel_storm": storm_tables,
    "cancel_storm_torch": storm_tables,
    "drain": drain_tables,
    "router_death": router_death_tables,
    "wedge": wedge_tables,
    "wedge_torch": wedge_tables,
    "saturation": saturation_tables,
    "saturation_busy": saturation_tables,
    "isolation_before": isolation_tables,
    "isolation": isolation_tables,
    "isolation_5_cores": isolation_tables,
    "chaos": chaos_tables,
    "chaos_torch": chaos_tables,
    "fuzz": fuzz_tables,
    "page": page_tables,
    "plan": plan_tables,
    "tracing": tracing_tables,
}


if __name__ == "__main__":
    sys.exit(main())
