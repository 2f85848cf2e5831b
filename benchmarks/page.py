"""What an open page costs the router: its CPU time with the page open, less that with it closed.

Two Prefill and four Decode workers on the mock engine run, first idle, then under a fixed open loop of streamed chats.
In each state windows with the page closed and with the page open take turns, in the order closed, open, open, closed,
so that neither a drift nor a neighbour's work counts for one of them. Loading the page is part of an open window.

The idle router's page is open in Chromium. To draw moving hand-offs without a GPU keeps Chromium busy on the cores of
the router, whose requests then take it more CPU time. So under load a reader that takes what the page takes, and draws
nothing, is measured as well: it stands for a page on another machine.

    python -m benchmarks.page --json FILE [--window 60] [--rounds 2]

It needs Chromium and its driver (Debian: chromium, chromium-driver).
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp
import uvloop
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from benchmarks.processes import process_cpu_s
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from benchmarks.stack import Stack
from quartet.config import build
from services.topology.topology import Topology

_DRIVER = "/usr/bin/chromedriver"
_LOG = Path(".run") / "benchmark-page.log"
_TIMEOUT_S = 60.0
_CHATS_PER_S = 4.0
_NUM_TOKENS = 64
_MAX_CPU_S_PER_MINUTE = 0.6
# CPU time of a router that has just started, or whose load has, is another.
_SETTLE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows of one state, in CPU seconds of the router a minute.

    Attributes:
        closed, opened: each window with the page closed, and open, in order.
        page: the median of the open ones less that of the closed ones.
    """

    closed: Sequence[float]
    opened: Sequence[float]
    page: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was measured.

    Attributes:
        window_s: length of each window.
        num_workers: what the page showed.
        idle: nothing else was asked of the router, and the page was open in the browser.
        busy: ``chats_per_s`` chats of ``num_tokens`` tokens each were streamed, and a reader took what a page takes.
        busy_in_browser: the same with the page in the browser, which drew it on the router's cores.
        browser: the browser and its version.
    """

    window_s: float
    num_workers: int
    chats_per_s: float
    num_tokens: int
    browser: str
    idle: Windows
    busy: Windows
    busy_in_browser: Windows


def main() -> None:
    """Run the command line; the exit code is 1 if the page costs more than it may."""
    parser = make_parser("page", __doc__ or "")
    parser.add_argument("--window", type=float, default=60.0, metavar="SECONDS", help="of each; default %(default)g")
    parser.add_argument(
        "--rounds", type=int, default=2, help="two windows of each kind in a round; default %(default)d"
    )
    arguments = parser.parse_args()
    report = Report("page", packages=("aiohttp", "uvloop", "selenium"), revision=arguments.commit)
    results = uvloop.run(measure(arguments.window, arguments.rounds))
    report.write(results, arguments.json)
    sys.exit(max(results.idle.page, results.busy.page) > _MAX_CPU_S_PER_MINUTE)


async def measure(window_s: float, num_rounds: int) -> Results:
    """All windows of both states."""
    with LiveLine() as line:
        async with Stack(_topology(), _LOG, line.say) as stack, _Page(f"http://{stack.http_address}/") as page:
            line.say("idle")
            idle = await _windows(stack, page, window_s, num_rounds)
            async with _load(url := f"http://{stack.http_address}"), aiohttp.ClientSession(url) as session:
                line.say("under load")
                busy = await _windows(stack, _Reader(session), window_s, num_rounds)
                line.say("under load, in the browser")
                busy_in_browser = await _windows(stack, page, window_s, num_rounds)
            return Results(
                window_s=window_s,
                num_workers=len(stack.worker_addresses),
                chats_per_s=_CHATS_PER_S,
                num_tokens=_NUM_TOKENS,
                browser=page.browser,
                idle=idle,
                busy=busy,
                busy_in_browser=busy_in_browser,
            )


async def _windows(stack: Stack, page: _Page | _Reader, window_s: float, num_rounds: int) -> Windows:
    closed, opened = list[float](), list[float]()
    await asyncio.sleep(min(_SETTLE_S, window_s))
    for _ in range(num_rounds):
        for is_open in (False, True, True, False):
            began_s = process_cpu_s(stack.pids["router"])
            # Opening and closing take part of the window, which both kinds have.
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(asyncio.sleep(window_s))
                tasks.create_task(page.show() if is_open else page.hide())
            used_s = (process_cpu_s(stack.pids["router"]) - began_s) * 60.0 / window_s
            (opened if is_open else closed).append(round(used_s, 4))
            await page.hide()
    return Windows(closed=closed, opened=opened, page=round(median(opened) - median(closed), 4))


class _Reader:
    """Takes what an open page takes."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._reading: asyncio.Task[None] | None = None

    async def show(self) -> None:
        """Fetch the page's files, and read its states from now on."""
        shell = await self._get("/")
        for path in re.findall(r'(?:src|href)="(page/\S+)"', shell):
            script = await self._get(f"/{path}")
            for module in re.findall(r'from "\./(\w+\.js)"', script):
                await self._get(f"/page/{module}")
        self._reading = asyncio.create_task(self._read())

    async def hide(self) -> None:
        """Read no more."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
            self._reading = None

    async def _get(self, path: str) -> str:
        async with self._session.get(path) as answer:
            answer.raise_for_status()
            return await answer.text()

    async def _read(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.get("/page/state", timeout=timeout) as answer:
            async for _ in answer.content:
                pass


class _Page:
    """Chromium with the page, or with nothing. Its driver blocks, so each call has a thread."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._driver: Chrome | None = None
        self.browser = ""

    async def __aenter__(self) -> _Page:
        self._driver = await asyncio.to_thread(_start_chromium)
        capabilities = self._driver.capabilities
        self.browser = f"{capabilities['browserName']} {capabilities['browserVersion']}"
        return self

    async def __aexit__(self, *_error: object) -> None:
        await asyncio.to_thread(self._chrome.quit)

    async def show(self) -> None:
        """Load the page, and see that it is live."""
        await asyncio.to_thread(self._chrome.get, self._url)
        await asyncio.to_thread(WebDriverWait(self._chrome, _TIMEOUT_S).until, _is_live)

    async def hide(self) -> None:
        """Leave the page."""
        await asyncio.to_thread(self._chrome.get, "about:blank")

    @property
    def _chrome(self) -> Chrome:
        assert self._driver is not None, "only within `async with`"
        return self._driver


def _is_live(chrome: Chrome) -> bool:
    return chrome.find_element(By.ID, "live").get_attribute("data-state") == "live"


def _start_chromium() -> Chrome:
    options = ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    return Chrome(options=options, service=Service(_DRIVER))


@asynccontextmanager
async def _load(url: str) -> AsyncIterator[None]:
    """Chats at even times, whatever becomes of those before."""
    async with aiohttp.ClientSession(url) as session:
        asking = asyncio.create_task(_ask_evenly(session))
        try:
            yield
        finally:
            asking.cancel()
            await asyncio.wait([asking])
        if not asking.cancelled():
            asking.result()


async def _ask_evenly(session: aiohttp.ClientSession) -> None:
    loop = asyncio.get_running_loop()
    began, number = loop.time(), 0
    async with asyncio.TaskGroup() as tasks:
        while True:
            await asyncio.sleep(began + number / _CHATS_PER_S - loop.time())
            tasks.create_task(_ask(session, number))
            number += 1


async def _ask(session: aiohttp.ClientSession, number: int) -> None:
    messages = [{"role": "user", "content": f"Chat number {number}. " + "Once upon a time there was a rabbit. " * 20}]
    body = {"messages": messages, "max_tokens": _NUM_TOKENS, "ignore_eos": True, "stream": True}
    async with session.post("/v1/chat/completions", data=json.dumps(body)) as answer:
        answer.raise_for_status()
        await answer.read()


def _topology() -> Topology:
    settings = {
        "namespace": "page",
        "model": {"path": "models/tiny/checkpoint", "name": "mock"},
        "engine": {"kind": "mock", "num_blocks": 16_384, "max_model_len": 131_072},
        "router": {"port": 0, "http_port": 1},  # free ones
        "workers": [{"role": "prefill", "replicas": 2}, {"role": "decode", "replicas": 4}],
        "drain_timeout_s": 1.0,
    }
    return build(Topology, settings)


if __name__ == "__main__":
    main()
