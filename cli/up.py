"""``quartet up``: a whole topology on this host, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.errors import reporting_errors
from cli.launch_display import LaunchDisplay
from cli.readiness import wait_ready
from quartet.config import build
from quartet.media.items import MediaKind
from router.config import RouterConfig
from services.child import Child
from services.launch import Environment, LaunchError, LocalTopology
from services.plan import plan_router, plan_workers
from services.run_directory import make_run_directory
from services.topology import Topology, load_topology

_RUN_PARENT = Path(".run")


def up(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A topology, such as configs/disagg.yaml.")],
    *,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME.NAME=VALUE", help="Change one setting. May be given several times."),
    ] = None,
    router_port: Annotated[
        int | None, typer.Option("--router-port", help="Port of the router; 0 takes a free one.")
    ] = None,
) -> None:
    """Start a topology on this host: etcd if none answers, workers, router. Ctrl-C ends it all."""
    with reporting_errors():
        topology = load_topology(file, assignments or ())
        if router_port is not None:
            topology = topology.with_router_port(router_port)
        num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        # All settings of all processes are checked before the first one starts.
        plan_workers(topology, num_cores=num_cores)
        build(RouterConfig, plan_router(topology).settings, "router.overrides")
        endpoints = os.environ.get("ETCD_ENDPOINTS", "")
        environment = Environment(
            # gRPC's core writes a line of its own whenever a peer stops.
            variables={"GRPC_VERBOSITY": "ERROR", **os.environ},
            num_cores=num_cores,
            run_dir=make_run_directory(_RUN_PARENT, topology.namespace),
            etcd_endpoints=tuple(endpoint for part in endpoints.split(",") if (endpoint := part.strip())),
        )
        exit_code = asyncio.run(_run(topology, environment))
    raise typer.Exit(exit_code)


async def _run(topology: Topology, environment: Environment) -> int:
    display = LaunchDisplay()
    local = LocalTopology(topology, environment, display)
    stop = _StopSignals(on_second=local.kill)
    try:
        if await stop.interrupts(_start(local, topology, display)):
            return 0
        await stop.interrupts(_watch(local, display))
        return 0 if stop.is_set else 1
    finally:
        display.progress("stopping")
        await local.stop()
        display.progress("stopped")


async def _start(local: LocalTopology, topology: Topology, display: LaunchDisplay) -> None:
    """Start everything, wait until it can be used, and say so. Raises ``ConfigError``, ``LaunchError``."""
    await local.start()
    gate = asyncio.create_task(wait_ready(local.router_address, local.worker_ids, display.progress))
    ends = [asyncio.create_task(_ended(child)) for child in local.children]
    try:
        async with asyncio.timeout(topology.start_timeout_s):
            done, _ = await asyncio.wait([gate, *ends], return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError as error:
        raise LaunchError(f"not ready within {topology.start_timeout_s:g} s; {display.last_progress}") from error
    finally:
        for task in (gate, *ends):
            task.cancel()
    if gate not in done:
        raise LaunchError(next(end.result().describe_end() for end in ends if end in done))
    takes_images = any(MediaKind.IMAGE in worker.record.media for worker in gate.result())
    display.ready(local.router_address, takes_images=takes_images)


async def _watch(local: LocalTopology, display: LaunchDisplay) -> None:
    """Tell of every process that ends; return when none is left."""
    for end in asyncio.as_completed([_ended(child) for child in local.children]):
        child = await end
        display.died(child)


async def _ended(child: Child) -> Child:
    await child.wait()
    return child


class _StopSignals:
    """The first one ends what runs, the second one calls ``on_second``."""

    def __init__(self, on_second: Callable[[], None]) -> None:
        self._on_second = on_second
        self._stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._handle)

    @property
    def is_set(self) -> bool:
        return self._stop.is_set()

    async def interrupts(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run ``work`` to its end, or until a signal comes: then it is cancelled. Whether one came."""
        working = asyncio.create_task(work)
        waiting = asyncio.create_task(self._stop.wait())
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if working.done():
            working.result()
            return False
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        return True

    def _handle(self) -> None:
        if self._stop.is_set():
            self._on_second()
        self._stop.set()
