"""Starts a topology's processes on this host, and ends them all in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import yaml

from quartet.discovery.create import DiscoveryConfig, DiscoveryKind, create_registry
from quartet.discovery.etcd_client import EtcdConfig
from quartet.engine.model_source import is_repository_id
from quartet.errors import ConfigError, DiscoveryError
from services.topology.child import Child, start_child
from services.topology.topology import ModelNeed, ProcessPlan, Topology, plan_router, plan_workers

_ETCD = "etcd"

# After the drain: time to take everything down and to leave.
_EXIT_TIMEOUT_S = 1.0

_KILL_TIMEOUT_S = 0.5


class LaunchError(Exception):
    """A process of the topology did not come up; the message says which, and the last that it said."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the host gives.

    Attributes:
        variables: environment of the processes.
        num_cores: CPU cores to share.
        run_dir: an empty directory for settings and data; removed at the end.
        etcd_endpoints: used instead of the topology's own, with its TLS settings, and must answer; empty: the
            topology's, or an etcd that is started.
    """

    variables: Mapping[str, str]
    num_cores: int
    run_dir: Path
    etcd_endpoints: Sequence[str] = ()


class LaunchObserver(Protocol):
    """Is told what happens."""

    def log_line(self, process: str, line: str) -> None:
        """A process wrote a line."""
        ...

    def progress(self, message: str) -> None:
        """What is being done now."""
        ...


class LocalTopology:
    """The processes of one topology. Start it once; whatever happens, ``stop`` it."""

    def __init__(
        self,
        topology: Topology,
        environment: Environment,
        observer: LaunchObserver,
        *,
        adapt: Callable[[ProcessPlan], ProcessPlan] = lambda plan: plan,
    ) -> None:
        """Nothing is started yet; a router port of 0 becomes a free one.

        ``adapt`` may change what each worker runs, as to give it another engine, but not its name.
        """
        port = topology.router.port or free_port()
        self._topology = topology.with_router_port(port)
        self._environment = environment
        self._observer = observer
        self._adapt = adapt
        self._children: dict[str, Child] = {}
        self._commands: dict[str, _Command] = {}

    @property
    def router_address(self) -> str:
        """``host:port`` of the router."""
        return f"127.0.0.1:{self._topology.router.port}"

    @property
    def children(self) -> Sequence[Child]:
        """All processes started so far; of one that was started again, the last."""
        return tuple(self._children.values())

    @property
    def worker_ids(self) -> Collection[str]:
        """Of the workers that belong to it."""
        return frozenset(plan.name for plan in self._plan_workers())

    async def start(self) -> None:
        """Start every process; none of them may serve yet, but those whose GPU another one is to share.

        Raises:
            ConfigError: it can't be started, and what to do about it.
            LaunchError: one ended that another one had to wait for.
        """
        plans = self._plan_workers()
        _check_models({plan.model for plan in plans if plan.model is not None})
        if self._topology.discovery.kind is DiscoveryKind.ETCD:
            await self._provide_etcd()
        if self._topology.signing_keys_file is None:
            self._topology = self._topology.with_signing_keys(draw_signing_key(self._environment.run_dir))
        # Planned again: now it is known where etcd and the keys are.
        plans = [*self._plan_workers(), plan_router(self._topology)]
        self._observer.progress(f"starting {', '.join(plan.name for plan in plans)}")
        for number, plan in enumerate(plans):
            await self._wait_beside(plan, plans[:number])
            await self._start(plan.name, self._command(plan), self._variables(plan))

    async def restart(self, name: str) -> Child:
        """Start a process that has ended once more: the same command, settings, ports and, of etcd, data."""
        self._children[name].kill_rest()
        command = self._commands[name]
        return await self._start(name, command.words, command.variables)

    async def stop(self) -> None:
        """End every process: SIGTERM, then SIGKILL to what has not ended by the drain's end. Ends in bounded time."""
        servers = [child for child in self.children if child.name != _ETCD]
        for child in servers:
            child.send(signal.SIGTERM)
        await _wait_ended(servers, self._topology.drain_timeout_s + _EXIT_TIMEOUT_S)
        for child in servers:
            if child.is_running:
                self._observer.progress(f"killing {child.name}, which did not end")
        # Its own etcd holds nothing that is needed again.
        self.kill()
        await _wait_ended(self.children, _KILL_TIMEOUT_S)
        for child in self.children:
            child.kill_rest()  # of those that were killed just now, too
        shutil.rmtree(self._environment.run_dir, ignore_errors=True)

    def kill(self) -> None:
        """End every process at once; ``stop`` still has to be called, or is already waiting for this."""
        for child in self.children:
            child.send(signal.SIGKILL)
            child.kill_rest()

    def _plan_workers(self) -> list[ProcessPlan]:
        return [self._adapt(plan) for plan in plan_workers(self._topology, num_cores=self._environment.num_cores)]

    async def _provide_etcd(self) -> None:
        etcd = self._topology.discovery.etcd
        if self._environment.etcd_endpoints:
            etcd = replace(etcd, endpoints=tuple(self._environment.etcd_endpoints))
        where = ", ".join(etcd.endpoints)
        if await etcd_answers(etcd):
            self._observer.progress(f"using the etcd at {where}")
        elif self._environment.etcd_endpoints:
            # Whoever names one means that one: workers in another would be found by nobody.
            raise ConfigError(f"ETCD_ENDPOINTS: no etcd answers at {where}; unset it to have one started here")
        else:
            etcd = await self._start_etcd(own_etcd(etcd), where)
        self._topology = self._topology.with_etcd(etcd)

    async def _start_etcd(self, etcd: EtcdConfig, where: str) -> EtcdConfig:
        binary = find_etcd()
        if binary is None:
            raise ConfigError(
                f"no etcd answers at {where}, and this machine has none to start: run `make tools`, "
                "install etcd-server, or set ETCD_ENDPOINTS"
            )
        self._observer.progress(f"no etcd answers at {where}: starting one at {etcd.endpoints[0]}")
        # It reads every option from ETCD_* too, and ETCD_ENDPOINTS is ours.
        variables = {name: value for name, value in self._environment.variables.items() if "ETCD_" not in name}
        await self._start(_ETCD, etcd_command(binary, etcd, self._environment.run_dir / "etcd"), variables)
        return etcd

    async def _start(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> Child:
        child = await start_child(name, command, variables, partial(self._observer.log_line, name))
        self._children[name], self._commands[name] = child, _Command(command, variables)
        return child

    async def _wait_beside(self, plan: ProcessPlan, earlier: Sequence[ProcessPlan]) -> None:
        """Wait until those that have a GPU of ``plan`` have what they need of it: they serve."""
        beside = [other.name for other in earlier if set(other.gpus) & set(plan.gpus)]
        if not beside:
            return
        self._observer.progress(f"{plan.name} waits for {', '.join(beside)} on the same GPU")
        ends = [asyncio.create_task(self._children[name].wait()) for name in beside]
        announced = asyncio.create_task(wait_announced(self._topology.namespaced_discovery, beside))
        try:
            await asyncio.wait([announced, *ends], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (announced, *ends):
                task.cancel()
        for name in beside:
            if not self._children[name].is_running:
                raise LaunchError(self._children[name].describe_end())

    def _command(self, plan: ProcessPlan) -> list[str]:
        path = self._environment.run_dir / f"{plan.name}.yaml"
        path.write_text(yaml.safe_dump(plan.settings), encoding="utf-8")
        return [sys.executable, "-m", plan.module, "--config", str(path)]

    def _variables(self, plan: ProcessPlan) -> dict[str, str]:
        variables = {**self._environment.variables, "PYTHONUNBUFFERED": "1"}
        if plan.num_threads is not None:
            # Libraries read it when they are loaded, and would start a thread a core each.
            variables["OMP_NUM_THREADS"] = str(plan.num_threads)
        return {**variables, **plan.environment}


@dataclass(frozen=True)
class _Command:
    words: Sequence[str]
    variables: Mapping[str, str]


def _check_models(models: Collection[ModelNeed]) -> None:
    """Raise ``ConfigError`` for the first that is not there. What names a repository its process looks for."""
    for model in sorted(models):
        path = Path(model.path)
        # Of models/tinny no repository is meant where models is a folder.
        if is_repository_id(model.path) and not Path(path.parts[0]).is_dir():
            continue
        if not path.is_dir():
            raise ConfigError(f"model.path: there is no folder {model.path}")
        needed = "config.json" if model.has_weights else "tokenizer.json"
        if not (path / needed).is_file():
            raise ConfigError(f"model.path: {model.path} holds no {needed}: is it a Hugging Face checkpoint?")


async def _wait_ended(children: Collection[Child], timeout_s: float) -> None:
    if children:
        waiting = [asyncio.create_task(child.wait()) for child in children]
        _, pending = await asyncio.wait(waiting, timeout=timeout_s)
        for task in pending:
            task.cancel()


# Which workers have announced themselves: each does once its engine is loaded and it takes requests.

_POLL_INTERVAL_S = 0.2


async def wait_announced(discovery: DiscoveryConfig, worker_ids: Collection[str]) -> None:
    """Wait until all of ``worker_ids`` are in the registry; while that can't be reached, they are not."""
    missing = set(worker_ids)
    registry = create_registry(discovery)
    try:
        while missing:
            # An etcd that has just been started does not answer yet.
            with contextlib.suppress(DiscoveryError):
                missing -= {record.worker_id for record in await registry.workers()}
            if missing:
                await asyncio.sleep(_POLL_INTERVAL_S)
    finally:
        await registry.close()


# The directory of one running topology: the files that its processes read, and its etcd's data.

_MARK = ".quartet-up"


def make_run_directory(parent: Path, namespace: str) -> Path:
    """Make ``PARENT/NAMESPACE-PID``, and remove those of topologies that were killed before they could.

    Raises:
        ConfigError: it can't be made.
    """
    try:
        return _make(parent, namespace)
    except OSError as error:
        raise ConfigError(f"cannot make a directory in {parent.absolute()}: {error.strerror}") from error


def _make(parent: Path, namespace: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    for other in parent.glob("*-*"):
        pid = other.name.rpartition("-")[2]
        # Only what is marked as ours: the folder is shared with models and whatever else.
        if pid.isdecimal() and (other / _MARK).is_file() and not _is_alive(int(pid)):
            shutil.rmtree(other, ignore_errors=True)
    directory = parent / f"{namespace}-{os.getpid()}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    (directory / _MARK).touch()
    return directory.resolve()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# A key for the signed starts of one running topology.

_SECRET_BYTES = 32


def draw_signing_key(directory: Path) -> Path:
    """Write a new key to a file in ``directory`` that only its owner can read, and return the path.

    Raises:
        OSError: there is such a file already, or it can't be written.
    """
    path = directory / "signing_keys"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{secrets.token_hex(4)} {secrets.token_hex(_SECRET_BYTES)}\n")
    return path


# Finds the programs that Quartet starts but does not contain: etcd and grpcurl.
#
# ``make tools`` puts what the machine lacks into ``.tools/bin`` of the repository; that copy is preferred,
# because its version is pinned.

#: Where ``make tools`` puts its binaries. Absent in an installed wheel, where the PATH alone counts.
TOOLS_DIR = Path(__file__).resolve().parents[2] / ".tools" / "bin"


def find_etcd() -> Path | None:
    """Return the ``etcd`` binary to start, or ``None`` if this machine has none."""
    return _find("etcd")


def find_grpcurl() -> Path | None:
    """Return the ``grpcurl`` binary, or ``None`` if this machine has none."""
    return _find("grpcurl")


def _find(name: str) -> Path | None:
    own = TOOLS_DIR / name
    if own.is_file() and os.access(own, os.X_OK):
        return own
    on_path = shutil.which(name)
    return Path(on_path) if on_path else None


# The etcd of a topology on one host: one that answers already, or one of its own.

_LOOPBACK = "127.0.0.1"

# Below the kernel's ephemeral range: a client that dials a server just killed can otherwise be given the very
# port it dials, and keep the server from coming back.
_PORTS = range(20_000, 32_000)

_NUM_PORTS_TRIED = 100


async def etcd_answers(config: EtcdConfig) -> bool:
    """Whether one of its endpoints answers a read; takes no longer than its request timeout for each."""
    registry = create_registry(DiscoveryConfig(etcd=config))
    try:
        await registry.workers()
    except DiscoveryError:
        return False
    finally:
        await registry.close()
    return True


def own_etcd(config: EtcdConfig) -> EtcdConfig:
    """``config`` for an etcd of one's own, on a free loopback port, without TLS."""
    endpoint = f"{_LOOPBACK}:{free_port()}"
    return replace(config, endpoints=(endpoint,), ca_file=None, cert_file=None, key_file=None)


def etcd_command(binary: Path, config: EtcdConfig, data_dir: Path) -> Sequence[str]:
    """The command that serves ``config``'s one endpoint, alone, with its data in ``data_dir``."""
    client = f"http://{config.endpoints[0]}"
    peer = f"http://{_LOOPBACK}:{free_port()}"
    options = {
        "name": "quartet",
        "data-dir": str(data_dir),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"quartet={peer}",
        "heartbeat-interval": "50",  # ms; with the next one a lone member is its leader in half a second
        "election-timeout": "500",
        "logger": "zap",
        # At a healthy start and end it logs errors with stack traces; why it died is what it calls fatal.
        "log-level": "fatal",
    }
    return [str(binary), *(f"--{name}={value}" for name, value in options.items())]


# By this process, each with what tells other processes of this project so.
_given: dict[int, socket.socket] = {}


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now and that no client is given by chance; never the same twice.

    Whoever got it may not listen yet: until this process ends, no other one is given it here either.

    Raises:
        OSError: there is none.
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


def _reserve(port: int) -> socket.socket:
    """Hold a name that only one process of a network namespace can have. Raises ``OSError``: another one has it."""
    name = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            name.bind(f"\0quartet-port-{port}")
        except OSError:
            name.close()
            raise
    return name
