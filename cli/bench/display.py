"""What goes on, on standard error: a live line on a terminal, a plain one now and then elsewhere."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cli.bench.load import Load
from cli.bench.measure import Recent, Recorder, Totals
from cli.bench.run import Point
from cli.bench.window import Window

_LIVE_INTERVAL_S = 0.5
_PLAIN_INTERVAL_S = 5.0


class BenchDisplay(AbstractContextManager["BenchDisplay"]):
    """A ``RunObserver`` that shows numbers of the last moment.

    It paints three lines of text, which takes 0.1 ms. A table takes 1 ms, during which no token's arrival is noticed.
    """

    def __init__(self, num_loads: int, console: Console | None = None) -> None:
        """``console``: standard error, if none is given."""
        self._console = console or Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._num_loads = num_loads
        self._current: _Current | None = None

    def __enter__(self) -> BenchDisplay:
        """Begin to show."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the live lines away."""
        self._live.stop()

    def began(self, load: Load, number: int, recorder: Recorder, window: Window) -> None:
        """Show this load from now on."""
        title = f"{load}" if self._num_loads == 1 else f"{number + 1} of {self._num_loads}: {load}"
        self._current = _Current(title, recorder, window)

    def ended(self, point: Point) -> None:
        """Leave one line of it where there are more loads to come."""
        result = point.result
        if self._num_loads > 1 and self._current is not None:
            self._console.print(
                f"{self._current.title}: {result.output_tokens_per_s:.0f} tok/s, {result.requests.finished} finished,"
                f" {result.requests.failed} failed",
                soft_wrap=True,
            )

    async def follow(self) -> None:
        """Show what goes on, again and again, until cancelled."""
        while True:
            await asyncio.sleep(_LIVE_INTERVAL_S if self._console.is_terminal else _PLAIN_INTERVAL_S)
            self.show()

    def show(self) -> None:
        """Show what goes on now, and what came of it since the last time."""
        if self._current is None:
            return
        if self._console.is_terminal:
            self._live.update(self._current.describe("\n"), refresh=True)
        else:
            self._console.print(self._current.describe("; "), soft_wrap=True)


class _Current:
    """The load that runs, and what it had come to when somebody last looked."""

    def __init__(self, title: str, recorder: Recorder, window: Window) -> None:
        self.title = title
        self._recorder = recorder
        self._window = window
        self._began = time.perf_counter()
        self._last = recorder.totals()

    def describe(self, separator: str) -> Text:
        now = self._recorder.totals()
        step = now.minus(self._last)
        recent = self._recorder.recent
        self._last, self._recorder.recent = now, Recent()
        text = Text()
        text.append(f"{self.title}, {self._window.phase}, {now.at_s - self._began:.0f} s{separator}", style="bold")
        text.append(f"running {self._recorder.num_running}  done {now.finished}  ")
        text.append(f"failed {now.failed}", style="red" if now.failed else "")
        return text.append(separator).append(_rates(step, recent), style="cyan")


def _rates(step: Totals, recent: Recent) -> str:
    tokens_per_s, requests_per_s = step.output_tokens / step.at_s, step.finished / step.at_s
    ttft, itl = _mean_ms(recent.ttft_s, recent.num_ttfts), _mean_ms(recent.itl_s, recent.num_itls)
    cpu = f"own CPU {100 * step.cpu_s / step.at_s:.0f} %"
    return f"{tokens_per_s:.0f} tok/s  {requests_per_s:.1f} req/s  TTFT {ttft}  ITL {itl}  {cpu}"


def _mean_ms(sum_s: float, count: int) -> str:
    return f"{1e3 * sum_s / count:.1f} ms" if count else "-"
