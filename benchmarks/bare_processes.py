"""The processes of a bare relay: worker, router and client with nothing of Quartet between ``read`` and ``write``.

``benchmarks.relay_floor`` and ``benchmarks.request_floor`` say what each of them does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import grpc
import uvloop

from benchmarks.paced_engine import STEP_S
from benchmarks.relay_job import Way
from benchmarks.relay_measure import Windows
from services.topology.launch import free_port

#: gRPC's own types: messages are bytes.
BareCall: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"
BareContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
BareHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_SERVICE = "quartet.floor.Floor"
_TIMEOUT_S = 60.0
_OPTIONS = [
    # By default part of a burst of calls is silently answered CANCELLED.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
    ("grpc.so_reuseport", 0),
]


class BareRole(StrEnum):
    """What a process is."""

    WORKER = "worker"
    ROUTER = "router"
    CLIENT = "client"


@dataclass(frozen=True, kw_only=True)
class BareJob:
    """What all three are told.

    Attributes:
        count: streams, or clients of a closed loop.
        num_prompt_tokens: of each request of a closed loop.
        worker_address, router_address: ``host:port`` that they listen on.
    """

    way: Way
    count: int
    num_prompt_tokens: int = 0
    windows: Windows
    worker_address: str
    router_address: str


@dataclass(frozen=True, kw_only=True)
class BareWindow:
    """What the router says of one window: CPU seconds of its process, and how much of what it counts came meanwhile."""

    duration_s: float
    cpu_s: float
    count: int


class BareRelay:
    """The three processes, while they run."""

    def __init__(self, processes: Mapping[BareRole, Process], windows: Windows) -> None:
        """``processes`` measure ``windows``."""
        self._router = processes[BareRole.ROUTER]
        self._duration_s = windows.round_size * windows.window_s
        self.worker_pid = processes[BareRole.WORKER].pid

    async def begun(self) -> None:
        """Until the first window begins. Raises ``RuntimeError``, ``TimeoutError``: it never did."""
        await self._read_line(_TIMEOUT_S)

    async def windows(self) -> Sequence[BareWindow]:
        """One round of them. Raises ``RuntimeError``, ``TimeoutError``: it failed, or nothing came in one of them."""
        found = [BareWindow(**values) for values in json.loads(await self._read_line(self._duration_s + _TIMEOUT_S))]
        if not all(window.count for window in found):
            raise RuntimeError("the bare relay stood still")
        return found

    async def _read_line(self, timeout_s: float) -> bytes:
        assert self._router.stdout is not None, "made with a pipe"
        async with asyncio.timeout(timeout_s):
            line = await self._router.stdout.readline()
        if not line:
            raise RuntimeError("the bare relay ended without a figure")
        return line


@asynccontextmanager
async def bare_relay(
    module: str, way: Way, count: int, windows: Windows, *, num_prompt_tokens: int = 0
) -> AsyncIterator[BareRelay]:
    """The three roles of ``module``, as processes, for as long as the block lasts."""
    worker_address, router_address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    job = BareJob(
        way=way,
        count=count,
        num_prompt_tokens=num_prompt_tokens,
        windows=windows,
        worker_address=worker_address,
        router_address=router_address,
    )
    processes: dict[BareRole, Process] = {}
    try:
        for role in BareRole:
            command = [sys.executable, "-m", module, role, json.dumps(asdict(job))]
            # They end when their standard input does: with whoever started them.
            processes[role] = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        yield BareRelay(processes, windows)
    finally:
        for process in reversed(processes.values()):
            if process.returncode is None:
                process.kill()
            await process.wait()


def run_bare_role(work: Callable[[BareRole, BareJob], Awaitable[None]]) -> None:
    """Do the part that the command line names until the standard input ends, or ``work`` fails."""
    values = json.loads(sys.argv[2])
    job = BareJob(**values | {"way": Way(values["way"]), "windows": Windows(**values["windows"])})
    uvloop.run(_run(work(BareRole(sys.argv[1]), job)))


async def serve(address: str, methods: dict[str, BareHandler], work: Awaitable[None]) -> None:
    """Serve ``methods`` at ``address`` while ``work`` is done."""
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    server.add_insecure_port(address)
    await server.start()
    try:
        await work
    finally:
        await server.stop(None)


def method_path(method: str) -> str:
    """What a client calls it by."""
    return f"/{_SERVICE}/{method}"


async def paced_steps() -> AsyncIterator[int]:
    """The number of each step of an engine, from 0, when it is due; one that comes late is not made up for."""
    due_at = time.monotonic()
    for step in itertools.count():
        due_at = max(due_at + STEP_S, time.monotonic())
        await asyncio.sleep(max(0.0, due_at - time.monotonic()))
        yield step


async def tell_windows(windows: Windows, count: Callable[[], int]) -> None:
    """As the router: measure a round of windows of this process, in which ``count`` grows, and tell of them."""
    await asyncio.sleep(windows.warm_up_s)
    print("begin", flush=True)
    found: list[BareWindow] = []
    for _ in range(windows.round_size):
        began, num_before, cpu_s = time.monotonic(), count(), time.process_time()
        await asyncio.sleep(windows.window_s)
        found.append(
            BareWindow(
                cpu_s=time.process_time() - cpu_s, count=count() - num_before, duration_s=time.monotonic() - began
            )
        )
    print(json.dumps([asdict(window) for window in found]), flush=True)


async def rest() -> None:
    """Wait to be killed."""
    await asyncio.Event().wait()


async def _run(work: Awaitable[None]) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    working, ended = asyncio.ensure_future(work), asyncio.create_task(reader.read())
    await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        working.result()
