"""``quartet up``: start a topology on this host, wait until it serves, and keep it running until Ctrl-C."""

from __future__ import annotations

import asyncio
import difflib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from cli.output import reporting_errors
from cli.up_display import LaunchDisplay, print_names, print_plan
from cli.up_file import TopologyFile
from cli.up_ready import HostShare, ReadyFile
from quartet.client import QuartetClient, WorkerState, WorkerStatus
from quartet.config import build
from quartet.discovery.base import Role
from quartet.engine.settings import EngineKind
from quartet.errors import ConfigError, ServingError
from quartet.media.items import MediaKind
from quartet.rpc.channels import TlsConfig, is_serving
from quartet.shipped import find_shipped, topologies
from quartet.telemetry.provenance import count_usable_cores, usable_cpus
from router.config import RouterConfig
from router.global_router.config import GlobalRouterConfig, without_units
from router.policy.create import PolicyName
from services.topology.launch import Environment, LaunchError, LocalTopology, make_run_directory, while_running
from services.topology.supervisor import RestartConfig, Supervisor
from services.topology.topology import (
    Choices,
    Chosen,
    Topology,
    check_engines,
    check_gpus,
    choose,
    plan_pool_routers,
    plan_router,
    plan_routers,
    plan_workers,
    read_settings,
    trace_arguments,
)
from services.workers.config import WorkerConfig

_RUN_PARENT = Path(".run")
_POLL_INTERVAL_S = 0.2

# Keeps all processes running, given what waits until one serves; see ``_keep``.
_Keep: TypeAlias = Callable[[Callable[[str], Awaitable[None]]], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions(Choices):
    """``Choices`` as options."""

    engine: Annotated[
        EngineKind | None,
        typer.Option(
            "--engine", help="Of every worker. What the file says that this engine does not have is left out."
        ),
    ] = None
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder of a checkpoint, or a Hugging Face repository.")
    ] = None
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="What requests call the model by.")
    ] = None
    replicas: Annotated[
        list[str],
        typer.Option(
            "--replicas",
            metavar="NAME=N",
            help="How many workers of that name or role, on consecutive GPUs; 0 leaves it out. May be given several"
            " times, as the next.",
        ),
    ] = field(default_factory=list)
    gpus: Annotated[
        list[str],
        typer.Option(
            "--gpus",
            metavar="NAME=GPUS",
            help="GPUs of the workers of that name or role, shared out in turn: prefill=0,1 or decode=2-7.",
        ),
    ] = field(default_factory=list)
    engine_args: Annotated[
        list[str],
        typer.Option("--engine-args", metavar="NAME=FILE", help="Their file with arguments of tensorrt_llm.LLM."),
    ] = field(default_factory=list)
    media_paths: Annotated[
        list[Path],
        typer.Option(
            "--allowed-local-media-path",
            metavar="DIR",
            envvar="ALLOWED_LOCAL_MEDIA_PATH",
            help="file: URLs of requests may name what is below it. May be given several times.",
        ),
    ] = field(default_factory=list)
    router_port: Annotated[
        int | None, typer.Option("--router-port", help="Port of the router; 0 takes a free one.")
    ] = None
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="NAME",
            envvar="QUARTET_HOST",
            help="Which of the file's hosts this one is: start its share.",
        ),
    ] = None
    secrets: Annotated[
        Path | None,
        typer.Option("--secrets", metavar="DIR", help="This host's folder of what quartet secrets has written."),
    ] = None
    tls: Annotated[
        bool,
        typer.Option("--tls", help="Make certificates for this run: mTLS for gRPC and etcd, encrypted events."),
    ] = False
    otel: Annotated[
        str | None,
        typer.Option(
            "--otel",
            metavar="[URL]",
            help="Send traces by OTLP to a collector: http://localhost:4317, unless OTEL_EXPORTER_OTLP_ENDPOINT says"
            " otherwise. Logs are JSON then.",
        ),
    ] = None
    enable_otel: Annotated[bool, typer.Option("--enable-otel", help="The same as --otel without a URL.")] = False


def up(
    topology: Annotated[
        str | None,
        typer.Argument(
            metavar="[TOPOLOGY]",
            help="A file, or the name of a topology that ships with Quartet, such as disagg. Without it, their names.",
        ),
    ] = None,
    *,
    choices: ChoiceOptions,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME.NAME=VALUE",
            help="Change one setting; workers.NAME.KEY is one of the workers of that name, role or number."
            " May be given several times.",
        ),
    ] = None,
    is_dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be started, and start nothing.")
    ] = False,
    is_failing_fast: Annotated[
        bool, typer.Option("--fail-fast", help="End everything when one process ends; else it is started again.")
    ] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log-dir",
            metavar="DIR",
            help="Keep what each process prints, in DIR/NAME.log, and the settings of all.",
        ),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(
            "--ready-file",
            metavar="FILE",
            envvar="QUARTET_READY_FILE",
            help="A file that exists while all of it serves, for probes of containers.",
        ),
    ] = None,
) -> None:
    """Start a topology on this host: etcd if none answers, workers, router. Ctrl-C ends it all.

    Values in the file may name environment variables: ${MODEL_PATH:-models/tiny}.
    """
    with reporting_errors(LaunchError, OSError):
        if topology is None:
            print_names(topologies())
            return
        path = find_topology(topology)

        def read() -> Chosen:
            return choose(read_settings(path, assignments or (), os.environ, choices), choices)

        file = TopologyFile(path, lambda: _with_checked_routers(read().topology))
        chosen = read()
        _check_host(chosen.topology)
        num_cores = count_usable_cores()
        display = LaunchDisplay()
        plans = plan_workers(chosen.topology, num_cores=num_cores)
        for note in chain(chosen.notes, _notes_on_events(chosen.topology, num_cores), check_gpus(plans)):
            display.progress(note)
        if is_dry_run:
            for line in chain(check_engines(plans), trace_arguments(plans, os.environ)):
                display.progress(line)
            print_plan(chosen.topology, num_cores=num_cores)
            return
        restarts = None if is_failing_fast else RestartConfig()
        environment = _environment(chosen.topology, num_cores, log_dir)
        asyncio.run(_run(chosen.topology, environment, display, ReadyFile(ready_file, display), restarts, file))


def find_topology(text: str) -> Path:
    """The file that ``text`` names: an existing one, or a topology that ships with Quartet. Raises ``ConfigError``."""
    file = Path(text)
    if file.is_file():
        return file
    shipped = topologies()
    if text in shipped:
        return shipped[text]
    file = Path(find_shipped(text))
    if file.is_file():
        return file
    near = difflib.get_close_matches(text, shipped)
    hint = f"did you mean {' or '.join(near)}?" if near else "`quartet up` lists those that ship with Quartet"
    raise ConfigError(f"there is no file {text}, and no topology of that name; {hint}")


def _check_host(topology: Topology) -> None:
    if topology.hosts and not topology.host:
        raise ConfigError(f"--host: is missing; the file has the hosts {', '.join(topology.hosts)}, each with a share")


async def wait_ready(
    router_address: str, worker_ids: Collection[str], report: Callable[[str], None], tls: TlsConfig | None = None
) -> Sequence[WorkerStatus]:
    """Wait until the router and the workers serve, and the router assigns requests to all of these workers.

    ``report`` gets what is missing, whenever that changes; ``tls`` is an operator's identity.

    Returns:
        All workers.
    """
    reported = ""
    async with QuartetClient(router_address, tls=tls) as client:
        while missing := await _missing(client, router_address, worker_ids, tls):
            message = f"waiting for {', '.join(missing)}"
            if message != reported:
                report(message)
                reported = message
            await asyncio.sleep(_POLL_INTERVAL_S)
        return await client.list_workers()


def _notes_on_events(topology: Topology, num_cores: int) -> Iterator[str]:
    """A line where the router goes by caches of which workers say nothing. Raises ``ConfigError``."""
    routers = plan_routers(topology) if topology.global_router is None else plan_pool_routers(topology)
    if not any(build(RouterConfig, plan.settings, "router.overrides").policy.reads_caches for plan in routers):
        return
    plans = [plan for plan in plan_workers(topology, num_cores=num_cores) if plan.role is not Role.ENCODE]
    silent = [plan.name for plan in plans if not build(WorkerConfig, plan.settings).engine.publish_events_and_metrics]
    if silent:
        yield (
            f"router.policy: {PolicyName.KV_AWARE} goes by what workers have cached, and {', '.join(silent)} announce "
            "none of it: set engine.publish_events_and_metrics=true for them"
        )


def _environment(topology: Topology, num_cores: int, log_dir: Path | None) -> Environment:
    """What processes get of this host. All settings of all processes are checked first. Raises ``ConfigError``."""
    check_engines(plan_workers(topology, num_cores=num_cores))  # what they warn of they log themselves
    _with_checked_routers(topology)
    endpoints = os.environ.get("ETCD_ENDPOINTS", "")
    return Environment(
        # Without this gRPC's core logs a line whenever a peer stops.
        variables={"GRPC_VERBOSITY": "ERROR", **os.environ},
        num_cores=num_cores,
        run_dir=make_run_directory(_RUN_PARENT, topology.namespace),
        cpus=usable_cpus(),
        etcd_endpoints=tuple(endpoint for part in endpoints.split(",") if (endpoint := part.strip())),
        log_dir=log_dir,
    )


def _with_checked_routers(topology: Topology) -> Topology:
    """``topology``, whose routers' settings are possible. Raises ``ConfigError``."""
    for plan in plan_routers(topology) if topology.global_router is None else plan_pool_routers(topology):
        build(RouterConfig, plan.settings, "router.overrides")
    if topology.global_router is not None:
        build(GlobalRouterConfig, without_units(plan_router(topology).settings), "global_router")
    return topology


async def _run(
    topology: Topology,
    environment: Environment,
    display: LaunchDisplay,
    ready_file: ReadyFile,
    restarts: RestartConfig | None,
    file: TopologyFile,
) -> None:
    local = LocalTopology(topology, environment, display)

    async def keep(wait_serving: Callable[[str], Awaitable[None]]) -> None:
        following = asyncio.create_task(file.follow(local, topology, display.progress))
        try:
            await _keep(local, wait_serving, ready_file, restarts)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    running = asyncio.create_task(_serve(local, topology, display, keep))
    stop = asyncio.Event()

    def end() -> None:
        """The first signal ends what runs; each further one kills it."""
        if stop.is_set():
            local.kill()
        stop.set()
        running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, end)
    try:
        await asyncio.wait([running])
        if not stop.is_set():
            running.result()
    finally:
        display.progress("stopping")
        ready_file.remove()
        await local.stop()
        display.progress("stopped")


async def _serve(local: LocalTopology, topology: Topology, display: LaunchDisplay, keep: _Keep) -> None:
    """Start everything, wait until it serves, print how to use it, and ``keep`` it running.

    Raises ``ConfigError``, ``LaunchError``.
    """
    if topology.host:
        await _serve_share(local, topology, display, keep)
        return
    async with _bounded_start(topology, display):
        await local.start()
        ready = wait_ready(local.router_address, local.worker_ids, display.progress, _operator(local))
        workers = await while_running(local.children, ready)
    takes_images = any(MediaKind.IMAGE in worker.record.media for worker in workers)
    display.ready(
        local.router_address,
        certificates=local.certificates,
        takes_images=takes_images,
        http_address=local.http_address,
        http_keys_file=local.http_keys_file,
    )
    await keep(partial(_wait_serving, local))


async def _serve_share(local: LocalTopology, topology: Topology, display: LaunchDisplay, keep: _Keep) -> None:
    """``_serve`` for one of several hosts, which must not fail because another one is not there.

    Its workers must serve in time. Its router may have to wait for workers of another host, and does so as long as it
    takes.
    """
    share = HostShare(local, topology, display.progress)
    async with _bounded_start(topology, display):
        await local.start()
        await while_running(local.children, share.wait_workers(local.worker_ids))
    announcing = asyncio.create_task(_announce_share(share, topology, display))
    try:
        await keep(share.wait_serving)
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)


async def _announce_share(share: HostShare, topology: Topology, display: LaunchDisplay) -> None:
    if topology.has_router:
        await share.wait_router()
    display.share_ready(topology.router_addresses[0])


async def _keep(
    local: LocalTopology,
    wait_serving: Callable[[str], Awaitable[None]],
    ready_file: ReadyFile,
    restarts: RestartConfig | None,
) -> None:
    ready_file.expect([child.name for child in local.children])

    async def wait(name: str) -> None:
        await wait_serving(name)
        ready_file.serves(name)

    await Supervisor(local, ready_file, wait, restarts=restarts).run()


@asynccontextmanager
async def _bounded_start(topology: Topology, display: LaunchDisplay) -> AsyncIterator[None]:
    """Raise ``LaunchError`` where what is inside takes longer than the topology's start may."""
    try:
        async with asyncio.timeout(topology.start_timeout_s):
            yield
    except TimeoutError as error:
        raise LaunchError(f"not ready within {topology.start_timeout_s:g} s; {display.last_progress}") from error


async def _wait_serving(local: LocalTopology, name: str) -> None:
    """Wait until the process ``name`` serves, as its router sees it; not for etcd, which the router does not report."""
    if (worker_ids := local.workers_of(name)) is not None:
        await wait_ready(local.router_address, worker_ids, lambda _message: None, _operator(local))


def _operator(local: LocalTopology) -> TlsConfig | None:
    return None if local.certificates is None else local.certificates.operator


async def _missing(
    client: QuartetClient, router_address: str, worker_ids: Collection[str], tls: TlsConfig | None
) -> list[str]:
    # It may list workers before it serves: it waits for those that it needs.
    missing = [] if await is_serving(router_address, tls) else ["router"]
    try:
        known = {worker.record.worker_id: worker for worker in await client.list_workers()}
    except ServingError:
        # It has just started, or is about to end, which its process reports.
        return ["router", *sorted(worker_ids)]
    missing += [worker_id for worker_id in sorted(worker_ids) if worker_id not in known]
    for worker_id in sorted(set(worker_ids) & set(known)):
        worker = known[worker_id]
        if worker.state is not WorkerState.READY:
            missing.append(f"{worker_id} ({worker.state})")
        elif not await is_serving(worker.record.grpc_address, tls):
            missing.append(f"{worker_id} (not serving)")
    return missing
