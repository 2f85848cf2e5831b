"""One live line on standard error while a benchmark runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

_INTERVAL_S = 0.5


class LiveLine(AbstractContextManager["LiveLine"]):
    """Shows the progress; without a terminal, it writes only the lines given to ``say``.

    It paints twice a second, so it costs the measurement almost nothing.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveLine:
        """Start showing."""
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the line."""
        self._live.stop()

    def say(self, text: str) -> None:
        """Write a line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def showing(self, describe: Callable[[float, float], str]) -> Iterator[None]:
        """Show ``describe(elapsed, interval)``, both in seconds, while the block runs."""
        following = asyncio.create_task(self._follow(describe))
        try:
            yield
        finally:
            following.cancel()

    def rounds(self, name: str, num_rounds: int) -> Iterator[int]:
        """The numbers of ``num_rounds`` rounds, from 0; shows the one that runs."""
        number = 0
        with self.showing(lambda elapsed, _: f"{name}: round {number} of {num_rounds}, {elapsed:.0f} s"):
            for number in range(num_rounds):
                yield number

    async def _follow(self, describe: Callable[[float, float], str]) -> None:
        began = last = time.monotonic()
        while True:
            await asyncio.sleep(_INTERVAL_S)
            now = time.monotonic()
            self._live.update(Text(describe(now - began, now - last)), refresh=self._console.is_terminal)
            last = now
