"""The table of benchmarks.routing_cost."""

from __future__ import annotations

from benchmarks.tables import Report, markdown_table


def routing_cost_tables(report: Report) -> str:
    """A row a policy: the parts of what routing a request costs, in microseconds."""
    rows: list[list[object]] = []
    for name, cost in report["policies"].items():
        rest_us = cost["total_us"] - cost["snapshot_us"] - cost["assign_us"]
        parts = (report["hash_us"], cost["snapshot_us"], cost["assign_us"], rest_us, report["routing_us"][name])
        rows.append([f"`{name}`", *(f"{part:.0f}" for part in parts), "<= 500" if name == "kv_aware" else ""])
    head = [
        "us of CPU a request",
        "naming its blocks",
        "places shown",
        "choice, look-up",
        "queue, book, index",
    ]
    table = markdown_table([*head, "all", "goal"], rows)
    return (
        f"{table}\n{report['num_prompt_tokens']} tokens, {report['num_workers']} workers, an index of "
        f"{report['num_blocks']:,} blocks. The look-up alone takes {report['lookup_us']:.0f} us; taking in one load "
        f"report {report['report_us']:.0f} us.\n"
    )
