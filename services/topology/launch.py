"""Starts a topology's processes on this host, and ends them all in bounded time.

``LocalTopology`` does it. The functions after it give it what it needs from the host: a run directory, a key for signed
starts, an etcd, the programs that ``make tools`` builds, and free ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
import random
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar

import yaml

from quartet.config import write_secret_file
from quartet.discovery.base import Role
from quartet.discovery.create import DiscoveryConfig, DiscoveryKind, create_registry
from quartet.discovery.etcd_access import EtcdTls
from quartet.discovery.etcd_client import EtcdConfig
from quartet.discovery.file import FileConfig
from quartet.engine.model_source import is_repository_id
from quartet.engine.settings import EngineKind
from quartet.errors import ConfigError, DiscoveryError
from services.topology.child import NO_LIMITS, Child, ChildLimits, is_alive, start_child
from services.topology.groups import found
from services.topology.pacing import StartPacer, Time
from services.topology.topology import (
    LOCAL_TENANT,
    ROUTER,
    ModelNeed,
    ProcessPlan,
    Topology,
    plan_pool_routers,
    plan_routers,
    plan_workers,
    take_tenants,
    with_certificates,
    with_http_identity,
    with_tenants_of,
)

if TYPE_CHECKING:
    from services.topology.certificates import CertificateFiles, RunCertificates

_ETCD = "etcd"

# After the drain: time to close everything and exit.
_EXIT_TIMEOUT_S = 1.0

# A router with a usage log has so long beyond that: to write what waits takes it ``usage_log.CLOSE_TIMEOUT_S`` at most.
_RECORDS_TIMEOUT_S = 6.0

_KILL_TIMEOUT_S = 0.5

_POLL_INTERVAL_S = 0.2

#: In ``Environment.log_dir``: the settings of each process of the newest run, by its name.
SETTINGS_FILE = "settings.yaml"

# Marks a run directory as one of ours.
_MARK = ".quartet-up"

_SECRET_BYTES = 32

#: Where ``make tools`` puts the binaries that the machine lacks. They are preferred to those on the PATH, because their
#: versions are pinned. An installed wheel has no such directory.
TOOLS_DIR = Path(__file__).resolve().parents[2] / ".tools" / "bin"

_LOOPBACK = "127.0.0.1"

# Below the kernel's ephemeral range: otherwise a client that dials a killed server can be given the very port that it
# dials, and keep the server from coming back.
_PORTS = range(20_000, 32_000)

_NUM_PORTS_TRIED = 100

ResultT = TypeVar("ResultT")

# Ports given by this process, each with a socket: its name shows other processes that the port is taken.
_given: dict[int, socket.socket] = {}


class LaunchError(Exception):
    """A process of the topology did not start; the message names it and ends with its last output."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the host provides.

    Attributes:
        variables: environment of the processes.
        num_cores: CPU cores to share.
        run_dir: an empty directory for settings and data; removed at the end.
        cpus: the numbers of the CPUs that there are, for workers that are limited to some; empty: none may be.
        etcd_endpoints: used instead of the topology's endpoints, with its TLS settings, and must answer; empty: the
            topology's endpoints, or else an etcd that is started here.
        log_dir: a directory that keeps what each process printed, appended to ``NAME.log``, and their settings, in
            ``SETTINGS_FILE``; ``None``: neither is kept.
    """

    variables: Mapping[str, str]
    num_cores: int
    run_dir: Path
    cpus: Sequence[int] = ()
    etcd_endpoints: Sequence[str] = ()
    log_dir: Path | None = None


class LaunchObserver(Protocol):
    """Shows what happens."""

    def log_line(self, process: str, line: str) -> None:
        """A process wrote a line."""
        ...

    def progress(self, message: str) -> None:
        """The next thing to do began; ``message`` says what."""
        ...


@dataclass(frozen=True)
class _Start:
    """How a process is started, each time.

    Attributes:
        interval_s: as ``ProcessPlan.start_interval_s``.
    """

    command: Sequence[str]
    variables: Mapping[str, str]
    limits: ChildLimits = NO_LIMITS
    interval_s: float = 0.0


class LocalTopology:
    """The processes of one topology. Call ``start`` once, and ``stop`` even if that failed."""

    def __init__(
        self,
        topology: Topology,
        environment: Environment,
        observer: LaunchObserver,
        *,
        adapt: Callable[[ProcessPlan], ProcessPlan] = lambda plan: plan,
        clock: Time | None = None,
    ) -> None:
        """Nothing is started yet; a router port of 0 becomes a free port, and then so does that of HTTP.

        ``adapt`` may change what a worker runs (another engine, for example), but not its name.
        """
        router = topology.router
        http_port = router.http_port if router.port or not router.http_port else free_port()
        pool_ports = {pool: router.pool_ports.get(pool) or free_port() for pool in topology.pools}
        router = replace(router, port=router.port or free_port(), http_port=http_port, pool_ports=pool_ports)
        self._topology = replace(topology, router=router)
        self._environment = environment
        self._observer = observer
        self._adapt = adapt
        self._children: dict[str, Child] = {}
        #: Set by ``start`` where the topology has ``tls``.
        self.certificates: RunCertificates | None = None
        #: The API keys of the router's HTTP, set as ``certificates`` is.
        self.http_keys_file: Path | None = None
        self._starts: dict[str, _Start] = {}
        self._routers: dict[str, ProcessPlan] = {}
        self._pacer = StartPacer(clock or Time())
        self._log_files = None if environment.log_dir is None else _LogFiles(environment.log_dir)

    @property
    def router_address(self) -> str:
        """``host:port`` of the router; of this host's, if it has one."""
        return self._topology.router_addresses[0]

    @property
    def http_address(self) -> str:
        """``host:port`` of the router's HTTP; empty: it has none."""
        port = self._topology.router.http_port
        return f"{self.router_address.rpartition(':')[0]}:{port}" if port else ""

    @property
    def discovery(self) -> DiscoveryConfig:
        """Where its processes announce themselves, once ``start`` has found or started that."""
        return self._topology.discovery_of("")

    @property
    def children(self) -> Sequence[Child]:
        """All processes started so far; after a restart only the newest process of a name."""
        return tuple(self._children.values())

    @property
    def worker_ids(self) -> Collection[str]:
        """The ids of its workers, as the router that clients call has them."""
        return frozenset(map(_id_of, self._plan_workers()))

    def workers_of(self, name: str) -> Collection[str] | None:
        """Of ``worker_ids`` those that must be ready for the process ``name`` to serve; ``None``: that can't be seen.

        For the router of a pool these are the pool's.
        """
        if name == ROUTER:
            return ()
        plans = self._plan_workers()
        for plan in plan_pool_routers(self._topology):
            if plan.name == name:
                return [_id_of(worker) for worker in plans if worker.pool == plan.pool]
        return next(([_id_of(plan)] for plan in plans if plan.name == name), None)

    async def start(self) -> None:
        """Start every process. Returns before they serve, except that a worker waits for earlier ones on its GPU.

        Raises:
            ConfigError: it can't be started; the message says what to do.
            LaunchError: a worker ended while another one waited for it.
        """
        plans = self._plan_workers()
        _check_engines(plans)
        self._check_secrets(plans)
        _check_models({plan.model for plan in plans if plan.model is not None})
        limits = self._limits(plans)
        if self._topology.tls:
            self.certificates = self._issue_certificates(plans)
        if self._topology.discovery.kind is DiscoveryKind.ETCD:
            await self._provide_etcd()
        if self._topology.signing_keys is None:
            self._topology = replace(self._topology, signing_keys_file=draw_signing_key(self._environment.run_dir))
        # Planned again: now the addresses of etcd and the path of the keys are known.
        plans = [*self._plan_workers(), *plan_routers(self._topology)]
        if self.certificates is not None:
            events_key_file = draw_events_key(self._environment.run_dir)
            plans = [with_certificates(plan, self.certificates.processes[plan.name], events_key_file) for plan in plans]
            if self._topology.router.http_port:
                self.http_keys_file = draw_api_keys(self._environment.run_dir, LOCAL_TENANT)
                router_tls = self.certificates.processes[ROUTER]
                plans[-1] = with_http_identity(plans[-1], router_tls, self.http_keys_file)
        if self._log_files is not None:
            self._log_files.write_settings({plan.name: plan.settings for plan in plans})
        self._routers = {plan.name: plan for plan in plans if plan.role is Role.ROUTER}
        self._observer.progress(f"starting {', '.join(plan.name for plan in plans)}")
        for plan in plans:
            await self._wait_beside(plan)
            start = _Start(
                self._command(plan), self._variables(plan), limits.get(plan.name, NO_LIMITS), plan.start_interval_s
            )
            await self._start(plan.name, start)

    async def restart(self, name: str) -> Child:
        """Start an ended process again, with the same command, settings and ports; etcd also keeps its data."""
        self._children[name].kill_rest()
        return await self._start(name, self._starts[name])

    def use_tenants(self, topology: Topology) -> None:
        """Have its routers take over the tenants of ``topology``, and who may name which, once all are started.

        They do within seconds, and log it. Raises ``OSError``: their files can't be written.
        """
        self._topology = take_tenants(self._topology, topology)
        for plan in plan_routers(self._topology):
            running = self._routers[plan.name]
            changed = with_tenants_of(running, plan)
            if changed != running:
                self._write_settings(changed)
                self._routers[plan.name] = changed

    async def stop(self) -> None:
        """End every process: SIGTERM, then SIGKILL to what has not ended by the drain's end. Ends in bounded time.

        A router may still write what waits for its usage log, for six seconds at most.
        """
        servers = [child for child in self.children if child.name != _ETCD]
        for child in servers:
            child.send(signal.SIGTERM)
        await _wait_ended(servers, self._topology.drain_timeout_s + _EXIT_TIMEOUT_S)
        recording = {name for name, plan in self._routers.items() if _keeps_records(plan)}
        await _wait_ended([child for child in servers if child.name in recording], _RECORDS_TIMEOUT_S)
        for child in servers:
            if child.is_running:
                self._observer.progress(f"killing {child.name}, which did not end")
        # etcd gets no SIGTERM: nothing in it is needed again.
        self.kill()
        await _wait_ended(self.children, _KILL_TIMEOUT_S)
        for child in self.children:
            child.kill_rest()  # also of the processes that were killed just now
        if self._log_files is not None:
            self._log_files.close()
        shutil.rmtree(self._environment.run_dir, ignore_errors=True)

    def kill(self) -> None:
        """End every process at once. ``stop`` must still be called, unless it runs already."""
        for child in self.children:
            child.send(signal.SIGKILL)
            child.kill_rest()

    def _plan_workers(self) -> list[ProcessPlan]:
        return [self._adapt(plan) for plan in plan_workers(self._topology, num_cores=self._environment.num_cores)]

    def _issue_certificates(self, workers: Sequence[ProcessPlan]) -> RunCertificates:
        try:
            # Imported here: only runs with TLS need the package.
            from services.topology.certificates import issue_run_certificates
        except ModuleNotFoundError as error:
            message = f"tls: certificates need the package {error.name}: pip install 'quartet[tls]'"
            raise ConfigError(message) from error
        plans = [*workers, *plan_routers(self._topology)]
        directory = self._environment.run_dir / "certificates"
        roles = {plan.name: plan.role for plan in plans}
        pools = {plan.name: plan.pool for plan in plans if plan.pool}
        return issue_run_certificates(directory, self._topology.namespace, roles, pools)

    def _check_secrets(self, workers: Sequence[ProcessPlan]) -> None:
        secrets, topology = self._topology.secret_files, self._topology
        if secrets is None:
            return
        names = [plan.name for plan in [*workers, *plan_routers(topology)]]
        has_http = topology.has_router and bool(topology.router.http_port)
        if missing := [*secrets.missing(names, has_http=has_http)]:
            raise ConfigError(
                f"secrets: there is no {missing[0]}; `quartet secrets` writes it for the host {topology.host}"
            )

    async def _provide_etcd(self) -> None:
        etcd = self.discovery.etcd
        if self._environment.etcd_endpoints:
            etcd = _at(etcd, self._environment.etcd_endpoints)
        where = ", ".join(etcd.endpoints)
        if self._topology.hosts:
            if fault := await etcd_fault(etcd):
                raise ConfigError(f"discovery.etcd: the etcd at {where}, by which hosts find each other: {fault}")
            self._observer.progress(f"using the etcd at {where}")
            self._topology = replace(self._topology, discovery=replace(self._topology.discovery, etcd=etcd))
            return
        has_certificates = self.certificates is None or etcd.tls is not None
        if has_certificates and await etcd_answers(etcd):
            self._observer.progress(f"using the etcd at {where}")
        elif not self._environment.etcd_endpoints:
            reason = f"no etcd answers at {where}" if has_certificates else "discovery.etcd names no etcd with tls"
            binary = find_etcd()
            if binary is None:
                self._use_files(reason)
            else:
                etcd = await self._start_etcd(etcd, binary, reason)
        elif has_certificates:
            # Do not start another etcd: the user's other processes would not find these workers there.
            raise ConfigError(f"ETCD_ENDPOINTS: no etcd answers at {where}; unset it to have one started here")
        else:
            raise ConfigError(f"ETCD_ENDPOINTS: with tls the etcd at {where} takes the setting discovery.etcd.tls")
        self._topology = replace(self._topology, discovery=replace(self._topology.discovery, etcd=etcd))

    def _use_files(self, reason: str) -> None:
        """Have the processes find each other by files: all run on this host."""
        directory = self._environment.run_dir / "discovery"
        discovery = replace(self._topology.discovery, kind=DiscoveryKind.FILE, file=FileConfig(directory=directory))
        self._topology = replace(self._topology, discovery=discovery)
        self._observer.progress(
            f"{reason}, and this machine has no etcd to start: processes find each other by files in {directory} "
            "(to have others find them, install etcd-server or set ETCD_ENDPOINTS)"
        )

    async def _start_etcd(self, config: EtcdConfig, binary: Path, reason: str) -> EtcdConfig:
        run = self.certificates
        etcd = own_etcd(config, None if run is None else run.etcd_client)
        command = etcd_command(binary, etcd, self._environment.run_dir / "etcd", None if run is None else run.etcd)
        self._observer.progress(f"{reason}: starting one at {etcd.endpoints[0]}")
        # etcd also reads its options from variables ETCD_*, and ETCD_ENDPOINTS is one of ours.
        variables = {name: value for name, value in self._environment.variables.items() if "ETCD_" not in name}
        await self._start(_ETCD, _Start(command, variables))
        return etcd

    async def _start(self, name: str, start: _Start) -> Child:
        if start.interval_s and (delay_s := self._pacer.reserve(start.interval_s)) > 0:
            self._observer.progress(f"{name} starts in {delay_s:.2g} s, so that MPI begins for one worker at a time")
            await self._pacer.sleep(delay_s)
        on_line = partial(self._log_line, name)
        child = await start_child(name, start.command, start.variables, on_line, start.limits)
        self._children[name], self._starts[name] = child, start
        return child

    def _log_line(self, name: str, line: str) -> None:
        self._observer.log_line(name, line)
        if self._log_files is not None and (complaint := self._log_files.write(name, line)):
            self._observer.progress(complaint)

    def _limits(self, plans: Sequence[ProcessPlan]) -> dict[str, ChildLimits]:
        """The limits of each process. CPUs are given in turn, so that two have one in common only if they are too few.

        Raises:
            ConfigError: a worker is to have more CPUs than there are.
        """
        cpus = self._environment.cpus
        turns = itertools.cycle(cpus)
        limits = {}
        for plan in plans:
            wanted = plan.limits.cpus or 0
            if wanted > len(cpus):
                raise ConfigError(
                    f"limits.cpus: {plan.name} is to have {wanted}, and this host has {len(cpus)} to give"
                )
            chosen = tuple(sorted(itertools.islice(turns, wanted)))
            limits[plan.name] = ChildLimits(cpus=chosen, memory_bytes=plan.limits.memory_bytes)
        return limits

    async def _wait_beside(self, plan: ProcessPlan) -> None:
        """Wait until the earlier workers on a GPU of ``plan`` serve: then they have taken their memory."""
        if not plan.after:
            return
        self._observer.progress(f"{plan.name} waits for {', '.join(plan.after)} on the same GPU")
        announced = wait_announced(self._topology.discovery_of(plan.pool), plan.after)
        await while_running([self._children[name] for name in plan.after], announced)

    def _command(self, plan: ProcessPlan) -> list[str]:
        return [sys.executable, "-m", plan.module, "--config", str(self._write_settings(plan))]

    def _write_settings(self, plan: ProcessPlan) -> Path:
        """Write the file of a process, in place of the one before as a whole."""
        path = self._environment.run_dir / f"{plan.name}.yaml"
        new = path.with_suffix(".new")
        new.write_text(yaml.safe_dump(plan.settings), encoding="utf-8")
        return new.replace(path)

    def _variables(self, plan: ProcessPlan) -> dict[str, str]:
        variables = {**self._environment.variables, "PYTHONUNBUFFERED": "1"}
        if plan.num_threads is not None:
            # Libraries read it when they are loaded; without it each starts a thread for every core.
            variables["OMP_NUM_THREADS"] = str(plan.num_threads)
        return {**variables, **plan.environment}


class _LogFiles:
    """What ``Environment.log_dir`` keeps."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, TextIO] = {}
        self._is_broken = False

    def write_settings(self, settings: Mapping[str, object]) -> None:
        """Write the settings of each process in place of those of an earlier run. Raises ``ConfigError``."""
        path = self._directory / SETTINGS_FILE
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.write_text(yaml.safe_dump(dict(settings)), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--log-dir: cannot write {path}: {error.strerror}") from error

    def write(self, name: str, line: str) -> str:
        """Append ``line``; returns a complaint at the first that can't be written: a full disk ends no process."""
        if self._is_broken:
            return ""
        path = self._directory / f"{name}.log"
        try:
            if name not in self._files:
                self._files[name] = path.open("a", buffering=1, encoding="utf-8")
            self._files[name].write(f"{line}\n")
        except OSError as error:
            self._is_broken = True
            return f"--log-dir: cannot write {path}: {error.strerror}; no more lines are kept"
        return ""

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._files.clear()


def make_run_directory(parent: Path, namespace: str) -> Path:
    """Make ``PARENT/NAMESPACE-PID``, and remove the run directories of topologies that were killed.

    Raises:
        ConfigError: the directory can't be made.
    """
    try:
        return _make(parent, namespace)
    except OSError as error:
        raise ConfigError(f"cannot make a directory in {parent.absolute()}: {error.strerror}") from error


def draw_signing_key(directory: Path) -> Path:
    """Write a new key for signed starts to a file in ``directory`` that only its owner can read; returns its path.

    Raises:
        OSError: the file exists already or can't be written.
    """
    line = f"{secrets.token_hex(4)} {secrets.token_hex(_SECRET_BYTES)}\n"
    return write_secret_file(directory / "signing_keys", line.encode())


def draw_events_key(directory: Path) -> Path:
    """Write a new key for events (``quartet.events.curve``) as ``draw_signing_key`` does; returns its path."""
    return write_secret_file(directory / "events_key", f"{secrets.token_hex(_SECRET_BYTES)}\n".encode())


def draw_api_keys(directory: Path, *tenants: str) -> Path:
    """Write a new API key for each of ``tenants`` (``router.http.keys``) as ``draw_signing_key`` does."""
    lines = [f"{tenant} {secrets.token_hex(_SECRET_BYTES)}\n" for tenant in tenants]
    return write_secret_file(directory / "http_keys", "".join(lines).encode())


async def while_running(children: Iterable[Child], work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of ``work``. Raises ``LaunchError`` if one of ``children`` has ended by then, and cancels ``work``."""
    working = asyncio.create_task(work)
    ends = {asyncio.create_task(child.wait()): child for child in children}
    try:
        await asyncio.wait([working, *ends], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, *ends):
            task.cancel()
    for child in ends.values():
        if not child.is_running:
            raise LaunchError(child.describe_end())
    return working.result()


async def wait_announced(discovery: DiscoveryConfig, worker_ids: Collection[str]) -> None:
    """Wait until all of ``worker_ids`` have registered: each does once its engine is loaded and it takes requests.

    A registry that can't be reached is polled again.
    """
    missing = set(worker_ids)
    registry = create_registry(discovery)
    try:
        while missing:
            # An etcd that was just started does not answer yet.
            with contextlib.suppress(DiscoveryError):
                missing -= {record.worker_id for record in await registry.workers()}
            if missing:
                await asyncio.sleep(_POLL_INTERVAL_S)
    finally:
        await registry.close()


def find_etcd() -> Path | None:
    """The ``etcd`` binary; ``None``: this machine has none."""
    return _find("etcd")


def find_grpcurl() -> Path | None:
    """The ``grpcurl`` binary; ``None``: this machine has none."""
    return _find("grpcurl")


async def etcd_answers(config: EtcdConfig) -> bool:
    """Whether one of its endpoints answers a read. Takes at most its request timeout for each endpoint."""
    return not await etcd_fault(config)


async def etcd_fault(config: EtcdConfig) -> str:
    """Why none of its endpoints answers a read; empty: one does."""
    registry = create_registry(DiscoveryConfig(etcd=config))
    try:
        await registry.routers()  # which is all that some users of etcd may read
    except DiscoveryError as error:
        return str(error)
    finally:
        await registry.close()
    return ""


def own_etcd(config: EtcdConfig, tls: EtcdTls | None = None) -> EtcdConfig:
    """``config`` for an etcd that is started here: on a free loopback port, dialled with ``tls``, without users."""
    return replace(config, endpoints=(f"{_LOOPBACK}:{free_port()}",), tls=tls, user="", password_file=None)


def etcd_command(
    binary: Path, config: EtcdConfig, data_dir: Path, certificates: CertificateFiles | None = None
) -> Sequence[str]:
    """The command that serves ``config``'s one endpoint, alone, with its data in ``data_dir``.

    With ``certificates`` it lets in only clients that show one of the same authority, and as a peer only itself.
    """
    scheme = "http" if certificates is None else "https"
    client, peer = f"{scheme}://{config.endpoints[0]}", f"{scheme}://{_LOOPBACK}:{free_port()}"
    options = {
        "name": "quartet",
        "data-dir": str(data_dir),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"quartet={peer}",
        "heartbeat-interval": "100",  # ms; together with the next line a lone member leads after half a second
        "election-timeout": "500",
        "logger": "zap",
        # etcd logs errors with stack traces even at a healthy start and end; what kills it has the level fatal.
        "log-level": "fatal",
    }
    if certificates is not None:
        options |= _etcd_tls_options(certificates)
    return [str(binary), *(f"--{name}={value}" for name, value in options.items())]


def _etcd_tls_options(certificates: CertificateFiles) -> dict[str, str]:
    files = {"cert-file": str(certificates.cert_file), "key-file": str(certificates.key_file)}
    files |= {"trusted-ca-file": str(certificates.ca_file), "client-cert-auth": "true"}
    # The other holders of its authority's certificates are clients, not members.
    own_name = {"peer-cert-allowed-cn": certificates.cert_file.stem}
    return {**files, **{f"peer-{name}": value for name, value in files.items()}, **own_name}


def free_port() -> int:
    """A TCP port of 127.0.0.1 with no listener, outside the range of clients' ports; never the same one twice.

    The port is reserved until this process ends, as its user may not listen yet: no other process of this project gets
    it from here.

    Raises:
        OSError: no port was free in 100 tries.
    """
    for port in random.SystemRandom().sample(_PORTS, _NUM_PORTS_TRIED):
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((_LOOPBACK, port))
                _given[port] = _reserve(port)
            except OSError:
                continue
            return port
    raise OSError(f"no free port in {_NUM_PORTS_TRIED} tries")


def _id_of(worker: ProcessPlan) -> str:
    return f"{worker.pool}.{worker.name}" if worker.pool else worker.name


def _check_engines(plans: Sequence[ProcessPlan]) -> None:
    """Raise ``ConfigError`` where a worker's engine is PyTorch's and that is not installed."""
    if importlib.util.find_spec("torch") is not None:
        return
    for plan in plans:
        if found(plan.settings, "engine").get("kind") == EngineKind.TORCH.value:
            raise ConfigError(
                f"engine.kind: {plan.name} needs PyTorch, which is not installed: pip install 'quartet[torch]' "
                "(--engine mock does without)"
            )


def _check_models(models: Collection[ModelNeed]) -> None:
    """Raise ``ConfigError`` for the first model folder that is missing. Workers find repositories themselves."""
    for model in sorted(models):
        path = Path(model.path)
        # ``models/tinny`` is a misspelled folder, not a repository, if there is a folder ``models``.
        if is_repository_id(model.path) and not Path(path.parts[0]).is_dir():
            continue
        if not path.is_dir():
            raise ConfigError(f"model.path: there is no folder {model.path}")
        needed = "config.json" if model.has_weights else "tokenizer.json"
        if not (path / needed).is_file():
            raise ConfigError(f"model.path: {model.path} holds no {needed}: is it a Hugging Face checkpoint?")


def _at(etcd: EtcdConfig, endpoints: Sequence[str]) -> EtcdConfig:
    """``etcd`` at the endpoints of the environment. Raises ``ConfigError`` if they don't fit its other settings."""
    try:
        return replace(etcd, endpoints=tuple(endpoints))
    except ConfigError as error:
        raise ConfigError(f"ETCD_ENDPOINTS: {error}; the topology's settings of etcd are in discovery.etcd") from error


def _keeps_records(plan: ProcessPlan) -> bool:
    """Whether a router writes usage records."""
    return found(plan.settings, *([plan.section] if plan.section else [])).get("usage_log") is not None


async def _wait_ended(children: Collection[Child], timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(child.wait() for child in children))


def _make(parent: Path, namespace: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    for other in parent.glob("*-*"):
        pid = other.name.rpartition("-")[2]
        # Remove only marked directories: ``parent`` may hold models and other files too.
        if pid.isdecimal() and (other / _MARK).is_file() and not is_alive(int(pid)):
            shutil.rmtree(other, ignore_errors=True)
    directory = parent / f"{namespace}-{os.getpid()}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    (directory / _MARK).touch()
    return directory.resolve()


def _find(name: str) -> Path | None:
    own = TOOLS_DIR / name
    if own.is_file() and os.access(own, os.X_OK):
        return own
    on_path = shutil.which(name)
    return Path(on_path) if on_path else None


def _reserve(port: int) -> socket.socket:
    """Hold a socket name that only one process of a network namespace can have. Raises ``OSError`` if one has it."""
    name = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            name.bind(f"\0quartet-port-{port}")
        except OSError:
            name.close()
            raise
    return name
