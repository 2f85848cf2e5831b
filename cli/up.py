"""``quartet up``: a whole topology on this host, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.errors import reporting_errors
from cli.launch_display import LaunchDisplay
from cli.plan_table import print_plan
from cli.readiness import wait_ready
from cli.up_options import AssignmentsOption, EngineOption, MediaPathsOption, ModelOption, ServedModelNameOption
from quartet.client import WorkerStatus
from quartet.config import build
from quartet.media.items import MediaKind
from router.config import RouterConfig
from services.topology.child import Child
from services.topology.launch import Environment, LaunchError, LocalTopology, make_run_directory
from services.topology.supervisor import RestartConfig, Supervisor
from services.topology.topology import ROUTER, Choices, Topology, choose, plan_router, plan_workers, read_settings

_RUN_PARENT = Path(".run")


def up(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A topology, such as configs/disagg.yaml.")],
    *,
    engine: EngineOption = None,
    model: ModelOption = None,
    served_model_name: ServedModelNameOption = None,
    media_paths: MediaPathsOption = None,
    assignments: AssignmentsOption = None,
    router_port: Annotated[
        int | None, typer.Option("--router-port", help="Port of the router; 0 takes a free one.")
    ] = None,
    is_dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be started, and start nothing.")
    ] = False,
    is_failing_fast: Annotated[
        bool, typer.Option("--fail-fast", help="End everything when one process ends; else it is started again.")
    ] = False,
) -> None:
    """Start a topology on this host: etcd if none answers, workers, router. Ctrl-C ends it all."""
    with reporting_errors():
        choices = Choices(
            engine=engine,
            model=model,
            served_model_name=served_model_name,
            media_paths=media_paths or (),
            router_port=router_port,
        )
        chosen = choose(read_settings(file, assignments or ()), choices)
        num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        display = LaunchDisplay()
        for note in chosen.notes:
            display.progress(note)
        if is_dry_run:
            print_plan(chosen.topology, num_cores=num_cores)
            return
        restarts = None if is_failing_fast else RestartConfig()
        exit_code = asyncio.run(_run(chosen.topology, _environment(chosen.topology, num_cores), display, restarts))
    raise typer.Exit(exit_code)


def _environment(topology: Topology, num_cores: int) -> Environment:
    """Of this host; before it is made all settings of all processes are checked. Raises ``ConfigError``."""
    plan_workers(topology, num_cores=num_cores)
    build(RouterConfig, plan_router(topology).settings, "router.overrides")
    endpoints = os.environ.get("ETCD_ENDPOINTS", "")
    return Environment(
        # gRPC's core writes a line of its own whenever a peer stops.
        variables={"GRPC_VERBOSITY": "ERROR", **os.environ},
        num_cores=num_cores,
        run_dir=make_run_directory(_RUN_PARENT, topology.namespace),
        etcd_endpoints=tuple(endpoint for part in endpoints.split(",") if (endpoint := part.strip())),
    )


async def _run(
    topology: Topology, environment: Environment, display: LaunchDisplay, restarts: RestartConfig | None
) -> int:
    local = LocalTopology(topology, environment, display)
    stop = _StopSignals(on_second=local.kill)
    try:
        if await stop.interrupts(_start(local, topology, display)):
            return 0
        await stop.interrupts(Supervisor(local, display, partial(_wait_serving, local), restarts=restarts).run())
        return 0
    finally:
        display.progress("stopping")
        await local.stop()
        display.progress("stopped")


async def _start(local: LocalTopology, topology: Topology, display: LaunchDisplay) -> None:
    """Start everything, wait until it can be used, and say so. Raises ``ConfigError``, ``LaunchError``."""
    try:
        async with asyncio.timeout(topology.start_timeout_s):
            await local.start()
            workers = await _ready_workers(local, display)
    except TimeoutError as error:
        raise LaunchError(f"not ready within {topology.start_timeout_s:g} s; {display.last_progress}") from error
    takes_images = any(MediaKind.IMAGE in worker.record.media for worker in workers)
    display.ready(local.router_address, takes_images=takes_images)


async def _ready_workers(local: LocalTopology, display: LaunchDisplay) -> Sequence[WorkerStatus]:
    """All workers, once everything serves. Raises ``LaunchError``: a process ended before."""
    gate = asyncio.create_task(wait_ready(local.router_address, local.worker_ids, display.progress))
    ends = [asyncio.create_task(_ended(child)) for child in local.children]
    try:
        done, _ = await asyncio.wait([gate, *ends], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (gate, *ends):
            task.cancel()
    if gate not in done:
        raise LaunchError(next(end.result().describe_end() for end in ends if end in done))
    return gate.result()


async def _wait_serving(local: LocalTopology, name: str) -> None:
    """Wait until a process of ``local`` serves, as its router sees it; an etcd is seen by nobody there."""
    if name in local.worker_ids or name == ROUTER:
        await wait_ready(local.router_address, {name} - {ROUTER}, lambda _message: None)


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
