"""Tables of benchmarks.overload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import Report, markdown_table


def overload_tables(report: Report) -> str:
    """What became of the load, and then every phase."""
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
