"""What a person sees: the progress of a load on standard error, and then its figures as tables."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from cli.bench.load import Load, Window
from cli.bench.measure import Recorder, Totals
from cli.bench.result import LatencyMs, PointResult
from cli.bench.run import Point, RunObserver
from cli.output import gb_per_s

_LIVE_INTERVAL_S = 0.5
_PLAIN_INTERVAL_S = 5.0
_BAR_WIDTH = 24


class BenchDisplay(RunObserver, AbstractContextManager["BenchDisplay"]):
    """A ``RunObserver`` that shows progress on standard error: live on a terminal, else a line every five seconds.

    It paints three lines of text, which takes 0.1 ms. A table takes 1 ms, in which the client would notice no token.
    """

    def __init__(self, num_loads: int, console: Console | None = None) -> None:
        """``console``: standard error, if none is given."""
        self._console = console or Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._num_loads = num_loads
        self._current: _Current | None = None

    def __enter__(self) -> BenchDisplay:
        """Start to show."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Clear the live lines."""
        self._live.stop()

    def began(self, load: Load, number: int, recorder: Recorder, window: Window) -> None:
        """Show this load from now on."""
        title = f"{load}" if self._num_loads == 1 else f"{number + 1} of {self._num_loads}: {load}"
        self._current = _Current(title, recorder, window)

    def ended(self, point: Point) -> None:
        """Leave one line of it if several loads are run."""
        result = point.result
        if self._num_loads > 1 and self._current is not None:
            self._console.print(
                f"{self._current.title}: {result.output_tokens_per_s:.0f} tok/s, {result.requests.finished} finished,"
                f" {result.requests.failed} failed",
                soft_wrap=True,
            )

    async def follow(self) -> None:
        """Show the progress again and again, until cancelled."""
        while True:
            await asyncio.sleep(_LIVE_INTERVAL_S if self._console.is_terminal else _PLAIN_INTERVAL_S)
            self.show()

    def show(self) -> None:
        """Show what runs now, and the figures since the last call."""
        if self._current is None:
            return
        if self._console.is_terminal:
            self._live.update(self._current.describe("\n"), refresh=True)
        else:
            self._console.print(self._current.describe("; "), soft_wrap=True)


def print_summary(console: Console, title: str, results: Sequence[PointResult]) -> None:
    """Print one load in full, or several in a line each. ``title`` names the model, the path and the workload."""
    console.print(f"\n{title}", style="bold", soft_wrap=True)
    if len(results) == 1:
        _print_point(console, results[0])
    else:
        console.print(f"load: {results[0].load.kind}", highlight=False)
        console.print(_sweep_table(results))
    for result in results:
        for remark in _remarks(result):
            console.print(f"{result.load}: {remark}" if len(results) > 1 else remark, style="yellow", soft_wrap=True)


class _Current:
    """The load that runs, and its sums at the last refresh."""

    def __init__(self, title: str, recorder: Recorder, window: Window) -> None:
        self.title = title
        self._recorder = recorder
        self._window = window
        self._began = time.perf_counter()
        self._last = recorder.totals()

    def describe(self, separator: str) -> Text:
        now = self._recorder.totals()
        step = now.minus(self._last)
        self._last = now
        text = Text()
        text.append(f"{self.title}, {self._window.phase}, {now.at_s - self._began:.0f} s{separator}", style="bold")
        text.append(f"running {self._recorder.num_running}  done {now.finished}  ")
        text.append(f"failed {now.failed}", style="red" if now.failed else "")
        return text.append(separator).append(_rates(step), style="cyan")


def _rates(step: Totals) -> str:
    tokens_per_s, requests_per_s = step.output_tokens / step.at_s, step.finished / step.at_s
    ttft, itl = _mean_ms(step.ttft_s, step.num_ttfts), _mean_ms(step.itl_s, step.num_itls)
    cpu = f"own CPU {100 * step.cpu_s / step.at_s:.0f} %"
    return f"{tokens_per_s:.0f} tok/s  {requests_per_s:.1f} req/s  TTFT {ttft}  ITL {itl}  {cpu}"


def _mean_ms(sum_s: float, count: int) -> str:
    return f"{1e3 * sum_s / count:.1f} ms" if count else "-"


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
    for way, speed in result.transfers.items():
        moved = f"{speed.size_bytes / 1e6:.3g} MB of {speed.num_requests} requests"
        console.print(f"transfer by {gb_per_s(way, speed.gb_per_s)}: {moved}")
    console.print(f"own CPU: {result.client.cpu_share:.0%} of a core")


def _latency_table(result: PointResult) -> Table:
    table = _table("ms", "mean", "p50", "p90", "p99", "max", "count")
    rows = {"TTFT": result.ttft_ms, "ITL": result.itl_ms, "E2E": result.e2e_ms, "send delay": result.send_delay_ms}
    for name, latency in rows.items():
        values = (latency.mean, latency.p50, latency.p90, latency.p99, latency.max)
        table.add_row(name, *map(_format_ms, values), str(latency.count))
    return table


def _hop_table(result: PointResult) -> Table:
    table = _table("hop", "mean ms", "share of the time")
    table.add_column("", width=_BAR_WIDTH)
    for hop, spent in result.hops.items():
        bar = "█" * round(_BAR_WIDTH * spent.share)
        table.add_row(hop.replace("_", " "), _format_ms(spent.mean_ms), f"{spent.share:.1%}", bar)
    return table


def _table(first: str, *others: str) -> Table:
    return Table(first, *(Column(name, justify="right") for name in others))


def _sweep_table(results: Sequence[PointResult]) -> Table:
    """One row a load, in 80 columns."""
    heads = ("load", "req/s", "tok/s", *(f"{name} ms\np50 / p99" for name in ("TTFT", "ITL", "E2E")), "failed", "CPU")
    columns = (Column(head, justify="right", no_wrap=True) for head in heads)
    table = Table(*columns, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
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
