"""The table of benchmarks.prefixes."""

from __future__ import annotations

from benchmarks.tables import Report, markdown_table


def prefixes_tables(report: Report) -> str:
    """A row a policy."""
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
