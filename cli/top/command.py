"""``quartet top``: follows one router, draws what it says, and drains workers on request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

import typer
from rich.text import Text

from cli.options import RouterOptions
from cli.output import describe, json_value, open_console
from cli.top.alerts import find_alerts, find_unknown
from cli.top.fleet import Fleet, WorkerRow
from cli.top.render import draw
from cli.top.terminal import Terminal
from cli.top.view import Action, View
from quartet.client import FleetState
from quartet.errors import (
    InvalidRequestError,
    PermissionDeniedError,
    RouterUnavailableError,
    ServingError,
    UnauthenticatedError,
)

#: A router that says nothing for so many seconds is lost, as at the page; totals come once a second.
MAX_SILENCE_S = 5.0
#: Between two tries to reach a router, in seconds.
RETRY_S = 1.0
#: Seconds over which ``--once`` and ``--json`` measure rates.
ONCE_S = 1.0

_PIPE_WIDTH = 160
# What another try, or another router, would only repeat.
_FINAL = (PermissionDeniedError, UnauthenticatedError, InvalidRequestError)


def top(
    *,
    router: RouterOptions,
    model: Annotated[str, typer.Option("--model", help="Only workers of this model.")] = "",
    is_once: Annotated[bool, typer.Option("--once", help="Print one table, after a second, and leave.")] = False,
    is_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """Show the fleet live: workers, load, rates, alerts; sort and drain by keys. Where this is no terminal: once."""
    is_live = sys.stdin.isatty() and sys.stdout.isatty() and not (is_once or is_json)
    with contextlib.suppress(KeyboardInterrupt):
        if is_live:
            code = asyncio.run(_Top(router, model).run())
            raise typer.Exit(code)
        asyncio.run(_print_once(router, model, is_json=is_json))


async def _print_once(router: RouterOptions, model: str, *, is_json: bool) -> None:
    fleet, began_s = Fleet(), time.monotonic()
    async with aclosing(_states(router, model)) as states:
        async for state in states:
            fleet.take(state, now_s := time.monotonic())
            if state.totals is None or now_s - began_s >= ONCE_S:
                break
    now_s = time.monotonic()
    if is_json:
        print(json.dumps(_to_json(fleet, now_s)))
        return
    console = open_console(pipe_width=_PIPE_WIDTH)
    for line in draw(fleet, View(), now_s=now_s, width=console.width):
        console.print(line, no_wrap=True, crop=False)


def _to_json(fleet: Fleet, now_s: float) -> dict[str, object]:
    router = fleet.totals.points[-1][1].router_id if fleet.totals.points else None
    return {
        "router": router,
        "figures": json_value(fleet.figures()),
        "workers": json_value(fleet.rows(now_s)),
        "alerts": json_value(find_alerts(fleet, now_s)),
        "alerts_not_known": find_unknown(fleet, now_s),
    }


async def _states(router: RouterOptions, model: str) -> AsyncGenerator[FleetState, None]:
    """States of one router until it goes. Raises ``ServingError``; ``RouterUnavailableError``: it went silent, too."""
    async with await router.client() as client, aclosing(client.watch_fleet(model)) as states:
        while True:
            try:
                async with asyncio.timeout(MAX_SILENCE_S):
                    state = await anext(states, None)
            except TimeoutError as error:
                raise RouterUnavailableError(f"the router has said nothing for {MAX_SILENCE_S:g} s") from error
            if state is None:
                raise RouterUnavailableError("the router ended the stream")
            yield state


class _Top:
    """The live screen, from ``run`` to its end."""

    def __init__(self, router: RouterOptions, model: str) -> None:
        self._router = router
        self._model = model
        self._console = open_console(pipe_width=_PIPE_WIDTH)
        self._fleet = Fleet()
        self._view = View()
        self._problem = "no router has answered yet"
        self._changed = asyncio.Event()
        self._is_to_stop = False
        self._exit_code: int | None = None
        self._drains: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """The exit code, once a person or a signal ends it. Raises a ``ServingError`` that no retry would change."""
        self._listen()
        following = asyncio.create_task(self._follow())
        following.add_done_callback(lambda _: self._changed.set())
        try:
            with Terminal(self._console, self._press) as terminal:
                while self._exit_code is None:
                    if following.done():
                        following.result()
                    if self._is_to_stop:
                        self._is_to_stop = False
                        terminal.suspend()
                    self._changed.clear()
                    terminal.show(self._screen())
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1.0):
                            await self._changed.wait()
        finally:
            for task in (following, *self._drains):
                task.cancel()
            await asyncio.wait([following, *self._drains])
        return self._exit_code

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._end, 128 + number)
        loop.add_signal_handler(signal.SIGTSTP, self._stop)
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)

    def _end(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._changed.set()

    def _stop(self) -> None:
        self._is_to_stop = True
        self._changed.set()

    def _screen(self) -> Text:
        width, height = self._console.size
        lines = draw(self._fleet, self._view, now_s=time.monotonic(), width=width, height=height, problem=self._problem)
        return Text("\n", no_wrap=True, end="").join(lines)

    async def _follow(self) -> None:
        """Take states, from the next router when one goes. Ends only by an error that no retry would change."""
        while True:
            try:
                async with aclosing(_states(self._router, self._model)) as states:
                    async for state in states:
                        self._fleet.take(state, time.monotonic())
                        self._problem = ""
                        self._changed.set()
            except _FINAL:
                raise
            except ServingError as error:
                self._problem = error.message
                self._changed.set()
            await asyncio.sleep(RETRY_S)

    def _press(self, keys: list[str]) -> None:
        if not keys:
            self._end(0)
        for key in keys:
            match self._view.press(key, self._fleet.rows(time.monotonic())):
                case Action.QUIT:
                    self._end(0)
                case Action.DRAIN:
                    row, self._view.asked = self._view.asked, None
                    assert row is not None, "it was asked about"
                    task = asyncio.create_task(self._drain(row))
                    self._drains.add(task)
                    task.add_done_callback(self._drains.discard)
        self._changed.set()

    async def _drain(self, row: WorkerRow) -> None:
        self._view.note = f"{row.worker_id} drains"
        try:
            async with await self._router.client() as client:
                outcome = await client.drain_worker(row.address)
        except ServingError as error:
            self._view.note = f"{row.worker_id} was not drained: {describe(error)}"
        else:
            ended = f"{outcome.num_completed} requests ended there, {outcome.num_cancelled} had to go on elsewhere"
            self._view.note = f"{row.worker_id} is drained: {ended}. Its process stays until it gets SIGTERM"
        self._changed.set()
