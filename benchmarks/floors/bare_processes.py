"""The processes of a bare relay: worker, router and client, with none of Quartet's code between ``read`` and ``write``.

``benchmarks.floors.relay_floor`` and ``benchmarks.floors.request_floor`` say what each process does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import grpc
import uvloop

from benchmarks.paced_engine import STEP_S
from benchmarks.processes import process_cpu_s
from benchmarks.relay_load import Way
from benchmarks.relay_measure import SETTLE_S, Windows
from quartet.rpc.channels import yielding_poller
from services.topology.launch import free_port

#: gRPC's own types: messages are bytes.
BareCall: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"
BareContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
BareHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_SERVICE = "quartet.floor.Floor"
_TIMEOUT_S = 60.0
_OPTIONS = [
    # By default gRPC silently answers part of a burst of calls with CANCELLED.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
    ("grpc.so_reuseport", 0),
]


class BareRole(StrEnum):
    """The part that a process plays."""

    WORKER = "worker"
    ROUTER = "router"
    CLIENT = "client"


@dataclass(frozen=True, kw_only=True)
class BareJob:
    """The job that all three processes are given.

    Attributes:
        count: streams, or clients of a closed loop.
        num_prompt_tokens: of each request of a closed loop.
        worker_address, router_address: ``host:port`` where they listen.
    """

    way: Way
    count: int
    num_prompt_tokens: int = 0
    windows: Windows
    worker_address: str
    router_address: str


@dataclass(frozen=True, kw_only=True)
class BareWindow:
    """One window of the router.

    Attributes:
        cpu_s, worker_cpu_s: CPU seconds of the router's process, and of the worker's.
        count: how much the router's counter grew in the window.
    """

    duration_s: float
    cpu_s: float
    worker_cpu_s: float
    count: int


class Order(StrEnum):
    """Orders to the running processes, a line each."""

    LOAD = "load"  # make the load; the processes start in this state
    REST = "rest"  # make no load: another measurement has the machine
    MEASURE = "measure"  # only for the router: measure one window and report it


class BareControl:
    """The latest orders to one of the processes."""

    def __init__(self) -> None:
        """The load begins at once."""
        self._is_loaded = asyncio.Event()
        self._is_loaded.set()
        self._measurements: asyncio.Queue[None] = asyncio.Queue()

    def obey(self, order: Order) -> None:
        """Take ``order``."""
        if order is Order.MEASURE:
            self._measurements.put_nowait(None)
        elif order is Order.LOAD:
            self._is_loaded.set()
        else:
            self._is_loaded.clear()

    async def loaded(self) -> None:
        """Return when the process should make load."""
        await self._is_loaded.wait()

    async def measurement(self) -> None:
        """Return when the router should measure a window."""
        await self._measurements.get()


class BareRelay:
    """The three processes, while they run."""

    def __init__(self, processes: Mapping[BareRole, Process], windows: Windows) -> None:
        """The windows that ``processes`` measure are as long as ``windows`` says."""
        self._processes = processes
        self._router = processes[BareRole.ROUTER]
        self._worker_pid = processes[BareRole.WORKER].pid
        self._duration_s = windows.window_s

    async def begun(self) -> None:
        """Wait until all are connected and warm, then rest. Raises ``RuntimeError``, ``TimeoutError``: they failed."""
        await self._read_line(_TIMEOUT_S)
        self._tell(Order.REST, self._processes.values())

    async def window(self) -> BareWindow:
        """Make load for one window. Raises ``RuntimeError``, ``TimeoutError``: a process failed, or was silent."""
        self._tell(Order.LOAD, self._processes.values())
        await asyncio.sleep(SETTLE_S)
        worker_cpu_s = process_cpu_s(self._worker_pid)
        self._tell(Order.MEASURE, [self._router])
        values = json.loads(await self._read_line(self._duration_s + _TIMEOUT_S))
        worker_cpu_s = process_cpu_s(self._worker_pid) - worker_cpu_s
        self._tell(Order.REST, self._processes.values())
        return BareWindow(**values, worker_cpu_s=worker_cpu_s)

    def _tell(self, order: Order, processes: Iterable[Process]) -> None:
        for process in processes:
            assert process.stdin is not None, "made with a pipe"
            process.stdin.write(f"{order}\n".encode())

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
    """Run the three roles of ``module`` as processes while the block runs."""
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
            # Each process ends with its standard input, and so with the process that started it.
            processes[role] = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        yield BareRelay(processes, windows)
    finally:
        for process in reversed(processes.values()):
            if process.returncode is None:
                process.kill()
            await process.wait()


def run_bare_role(work: Callable[[BareRole, BareJob, BareControl], Awaitable[None]]) -> None:
    """Play the role that the command line names until the standard input ends, or ``work`` fails."""
    values = json.loads(sys.argv[2])
    job = BareJob(**values | {"way": Way(values["way"]), "windows": Windows(**values["windows"])})
    uvloop.run(_run(work, BareRole(sys.argv[1]), job))


async def serve(address: str, methods: dict[str, BareHandler], work: Awaitable[None]) -> None:
    """Serve ``methods`` at ``address`` while ``work`` runs."""
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    server.add_insecure_port(address)
    await server.start()
    try:
        await work
    finally:
        await server.stop(None)


def method_path(method: str) -> str:
    """The path by which a client calls ``method``."""
    return f"/{_SERVICE}/{method}"


async def paced_steps(control: BareControl) -> AsyncIterator[int]:
    """The number of each step of an engine, from 0, when it is due. Later steps don't make up for a late one."""
    due_at = time.monotonic()
    for step in itertools.count():
        await control.loaded()
        due_at = max(due_at + STEP_S, time.monotonic())
        await asyncio.sleep(max(0.0, due_at - time.monotonic()))
        yield step


async def tell_windows(control: BareControl, windows: Windows, count: Callable[[], int]) -> None:
    """In the router: measure a window of this process when told to, and report how much ``count`` grew in it.

    A window goes on until ``count`` has grown.
    """
    await asyncio.sleep(windows.warm_up_s)
    print("begin", flush=True)
    while True:
        await control.measurement()
        began, num_before, cpu_s = time.monotonic(), count(), time.process_time()
        while True:
            await asyncio.sleep(windows.window_s)
            if count() > num_before:  # otherwise the machine is far too busy
                break
        cpu_s = time.process_time() - cpu_s
        told = {"cpu_s": cpu_s, "count": count() - num_before, "duration_s": time.monotonic() - began}
        print(json.dumps(told), flush=True)


async def rest() -> None:
    """Wait to be killed."""
    await asyncio.Event().wait()


async def _run(work: Callable[[BareRole, BareJob, BareControl], Awaitable[None]], role: BareRole, job: BareJob) -> None:
    # The Router's poller yields (``router.__main__``). This one must too, or the ratio would show that difference.
    with yielding_poller() if role is BareRole.ROUTER else nullcontext():
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        control = BareControl()
        working = asyncio.ensure_future(work(role, job, control))
        ended = asyncio.create_task(_obey(reader, control))
        await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()


async def _obey(reader: asyncio.StreamReader, control: BareControl) -> None:
    while line := await reader.readline():
        control.obey(Order(line.decode().strip()))
