"""One of the two versions that ``relay_versions`` measures by turns: servers and clients of the checkout it runs in.

Its first answer is the commit. For each load it gets a ``Turns`` with the ``windows``. It answers ``READY`` before each
of its windows, in which nothing else may run; an order lets it have one. After the last one it answers with the
Router's CPU time in each.

This file is run in older checkouts too, so it uses only what ``relay_measure`` and ``relay_stack`` have had for long.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.children import answer, orders
from benchmarks.progress import LiveLine
from benchmarks.relay_load import Way
from benchmarks.relay_measure import Case, Measurer, Windows
from benchmarks.relay_stack import RelayStack
from quartet.telemetry.provenance import read_commit

#: The answer before a window.
READY = "ready"


class _Turn:
    """Stands where the bare relay does in ``benchmarks.relay``: here it is the other version that has its window."""

    def __init__(self, given: AsyncIterator[Any]) -> None:
        self._given = given

    async def window(self) -> None:
        """Wait for the next turn."""
        answer(READY)
        async for _ in self._given:
            return
        raise asyncio.CancelledError  # the parent has gone


async def _serve() -> None:
    given = orders()
    answer(vars(read_commit()))
    with tempfile.TemporaryDirectory() as directory, LiveLine() as line:
        async with RelayStack(Path(directory) / "log", line.say) as stack:
            async for turns in given:
                answer(await _measure(Measurer(stack, line, Windows(**turns["windows"])), turns, _Turn(given)))


async def _measure(measurer: Measurer, turns: Any, turn: _Turn) -> list[float]:
    """The Router's CPU time in each window: us a token of streams, or else ms a request of one token."""
    way = Way(turns["way"])
    if turns["num_prompt_tokens"] is None:
        case = Case(way=way, num_streams=turns["count"], with_text=way is Way.HTTP)
        return [window.router_cpu_us_per_token for window in await measurer.streams(case, turn)]
    windows = await measurer.requests(way, turns["count"], turns["num_prompt_tokens"], turn)
    return [window.router_cpu_ms_per_request for window in windows]


if __name__ == "__main__":
    uvloop.run(_serve())
