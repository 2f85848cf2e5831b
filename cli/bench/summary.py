"""The figures as tables for a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from cli.bench.result import LatencyMs, PointResult

_BAR_WIDTH = 24


def print_summary(console: Console, title: str, results: Sequence[PointResult]) -> None:
    """One load in full; of several a line each. ``title`` says what was asked of whom."""
    console.print(f"\n{title}", style="bold", soft_wrap=True)
    if len(results) == 1:
        _print_point(console, results[0])
    else:
        console.print(f"load: {results[0].load.kind}", highlight=False)
        console.print(_sweep_table(results))
    for result in results:
        for remark in _remarks(result):
            console.print(f"{result.load}: {remark}" if len(results) > 1 else remark, style="yellow", soft_wrap=True)


def _print_point(console: Console, result: PointResult) -> None:
    counts = result.requests
    cached = f", {result.cached_tokens / result.prompt_tokens:.1%} cached" if result.prompt_tokens else ""
    console.print(
        f"{result.load}: {counts.sent} requests in {result.window_s:.1f} s: {counts.finished} finished,"
        f" {counts.failed} failed, {counts.cut_off} cut off\n"
        f"{result.requests_per_s:.2f} requests/s, {result.output_tokens_per_s:.1f} output tokens/s,"
        f" {result.prompt_tokens_per_s:.1f} prompt tokens/s{cached}",
        soft_wrap=True,
    )
    console.print(_latency_table(result))
    if result.hops:
        console.print(_hop_table(result))
    console.print(f"own CPU: {result.client.cpu_share:.0%} of a core")


def _latency_table(result: PointResult) -> Table:
    table = Table("ms")
    for name in ("mean", "p50", "p90", "p99", "max", "count"):
        table.add_column(name, justify="right")
    rows = {"TTFT": result.ttft_ms, "ITL": result.itl_ms, "E2E": result.e2e_ms, "send delay": result.send_delay_ms}
    for name, latency in rows.items():
        values = (latency.mean, latency.p50, latency.p90, latency.p99, latency.max)
        table.add_row(name, *map(_format_ms, values), str(latency.count))
    return table


def _hop_table(result: PointResult) -> Table:
    table = Table("hop")
    table.add_column("mean ms", justify="right")
    table.add_column("share of the time", justify="right")
    table.add_column("", width=_BAR_WIDTH)
    for hop, time in result.hops.items():
        bar = "█" * round(_BAR_WIDTH * time.share)
        table.add_row(hop.replace("_", " "), _format_ms(time.mean_ms), f"{time.share:.1%}", bar)
    return table


def _sweep_table(results: Sequence[PointResult]) -> Table:
    """Narrow enough for 80 columns."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("load", "req/s", "tok/s", "TTFT ms", "ITL ms", "E2E ms", "failed", "CPU"):
        table.add_column(name if not name.endswith("ms") else f"{name}\np50 / p99", justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            f"{result.load.value:g}",
            f"{result.requests_per_s:.2f}",
            f"{result.output_tokens_per_s:.1f}",
            *map(_format_pair, (result.ttft_ms, result.itl_ms, result.e2e_ms)),
            str(result.requests.failed),
            f"{result.client.cpu_share:.0%}",
        )
    return table


def _remarks(result: PointResult) -> list[str]:
    """What a reader must know before trusting the figures."""
    remarks = [
        f"{error.count} failed with {' '.join(filter(None, (error.status, error.reason)))}, such as: {error.example}"
        for error in result.errors
    ]
    if result.is_interrupted:
        remarks.append("interrupted: these are the figures so far")
    if not result.requests.sent:
        remarks.append("nothing was measured: no request was sent after the warm-up")
    if result.requests.cut_off and not result.is_interrupted:
        remarks.append(f"{result.requests.cut_off} requests had not ended in time: the slowest are missing above")
    if result.client.is_near_limit:
        remarks.append(
            f"THIS CLIENT WAS NEAR ITS LIMIT: it used {result.client.cpu_share:.0%} of a core, so the figures may be"
            " its own and not the server's; run several at once, each with a part of the load"
        )
    return remarks


def _format_pair(latency: LatencyMs) -> str:
    return f"{_format_ms(latency.p50)} / {_format_ms(latency.p99)}"


def _format_ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
