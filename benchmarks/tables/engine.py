"""Tables of benchmarks.engine."""

from __future__ import annotations

from benchmarks.tables import Report, markdown_table

# Of each workload: what it is, and the ratio that is wanted.
_WORKLOADS = {
    "one_stream": ("one request, 32 tokens in, 128 out", ">= 0.95"),
    "equal_32": ("32 requests, 64 in, 64 out", ">= 1.0"),
    "ragged_32": ("32 requests, 32 to 512 in, 16 to 256 out", ">= 2.2"),
    "prefill": ("32 prompts of 256, one token each; prompt tokens", ">= 1.2"),
    "long_prompt": ("one prompt of 1500, one token; prompt tokens", ""),
    "shared_prefix_32": ("32 requests, 1024 in common and 16 of their own in, 16 out", ">= 4"),
}


def engine_tables(report: Report) -> str:
    """Both sides on every workload that was run."""
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
    """By the clock and by CPU time; nothing where none was measured, as before there was one."""
    if measured.get("ceiling") is None:
        return ""
    return f"{measured['ceiling']:.2f}, {measured['cpu_ceiling']:.2f}"
