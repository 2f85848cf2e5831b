"""A whole Quartet as real processes: etcd, encode, prefill and decode workers, a router; killed and asked at will.

Its methods block, each for a bounded time. In a running event loop call those that wait with ``asyncio.to_thread``.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc
import yaml

from quartet.config import override
from quartet.rpc.channels import TlsConfig, channel_credentials
from quartet.v1 import kv_events_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.topology.launch import draw_events_key, draw_signing_key, free_port
from tests import tiny
from tests.e2e.fork_server import ForkServer
from tests.e2e.process import Metrics, ServiceProcess, wait_until
from tests.etcd_server import EtcdServer

START_TIMEOUT_S = 150.0
_CALL_TIMEOUT_S = 90.0
_STATES = ("used", "held", "cached", "free")

Settings: TypeAlias = Mapping[str, object]
WorkerState: TypeAlias = router_pb2.WorkerState.ValueType


#: Of a router: every prompt goes to a prefill worker.
REMOTE_PREFILL: Settings = {"policy.local_prefill_max_tokens": 0}
#: Of a router: no prompt of these tests does.
LOCAL_PREFILL: Settings = {"policy.name": "least_loaded", "policy.local_prefill_max_tokens": 4096}


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """What differs from one stack to the next; settings are dotted names of WorkerConfig and RouterConfig.

    Attributes:
        worker: settings of every worker.
        roles: by role, settings of its workers beside these.
        routers: settings of each router by its process name; the one called ``router`` is asked for workers.
        tls: certificates by process name; all or none.
        operator: identity with which the stack itself asks, where there is TLS.
        launcher: modules that run each worker's.
        environment: of each worker, beside ours.
    """

    num_encode: int = 0
    num_prefill: int = 1
    num_decode: int = 1
    worker: Settings = field(default_factory=dict)
    roles: Mapping[str, Settings] = field(default_factory=dict)
    routers: Mapping[str, Settings] = field(default_factory=lambda: {"router": REMOTE_PREFILL})
    tls: Mapping[str, TlsConfig] = field(default_factory=dict)
    operator: TlsConfig | None = None
    launcher: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def worker_names(self) -> list[str]:
        """``prefill-0`` and so on: worker ids and process names."""
        counts = {"encode": self.num_encode, "prefill": self.num_prefill, "decode": self.num_decode}
        return [f"{role}-{number}" for role, count in counts.items() for number in range(count)]


@dataclass(frozen=True)
class BlockCounts:
    """Blocks of one pool of a worker by state."""

    used: int
    held: int
    cached: int
    free: int

    @property
    def total(self) -> int:
        """All blocks of the pool."""
        return self.used + self.held + self.cached + self.free

    @property
    def is_idle(self) -> bool:
        """Whether no process has any."""
        return self.used == self.held == 0


class Stack:
    """Started by ``start`` or ``with``; ``close`` leaves no process."""

    def __init__(self, config: StackConfig, directory: Path, etcd_binary: Path, fork_server: ForkServer) -> None:
        """Files of all processes go to ``directory``; ``fork_server`` forks all but etcd."""
        self.config = config
        self.etcd = EtcdServer(etcd_binary, directory / "etcd")
        self.processes: dict[str, ServiceProcess] = {}
        self._directory = directory
        self._signing_keys_file = draw_signing_key(directory)
        self._events_key_file = draw_events_key(directory) if config.tls else None
        for name in config.worker_names:
            module = f"services.{name.partition('-')[0]}"
            self.processes[name] = self._process(
                name,
                module,
                self._worker_settings(name),
                fork_server,
                launcher=config.launcher,
                environment=config.environment,
            )
        for name in config.routers:
            self.processes[name] = self._process(name, "router", self._router_settings(name), fork_server)

    @property
    def router_address(self) -> str:
        """Where clients dial."""
        return self.processes["router"].grpc_address

    def start(self) -> None:
        """Start everything and wait until the router has every worker ready. On failure nothing is left."""
        try:
            self.etcd.start()
            for name in self.processes:
                self.spawn(name)
            self.wait_ready()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill what runs."""
        for process in self.processes.values():
            process.kill()
        self.etcd.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def spawn(self, name: str) -> None:
        """Start a process that does not run; don't wait for it."""
        self.processes[name].spawn()

    def kill(self, name: str) -> None:
        """``kill -9``."""
        self.processes[name].kill()

    def terminate(self, name: str) -> None:
        """SIGTERM; see ``ServiceProcess.wait`` for its end."""
        self.processes[name].signal(signal.SIGTERM)

    def freeze(self, *names: str) -> None:
        """SIGSTOP, until ``thaw``."""
        for name in names:
            self.processes[name].signal(signal.SIGSTOP)

    def thaw(self, *names: str) -> None:
        """SIGCONT to those of these that have not ended."""
        for name in names:
            if self.processes[name].is_running:
                self.processes[name].signal(signal.SIGCONT)

    def restart_dead(self) -> None:
        """Start every process that has ended, and wait until all is well again."""
        dead = [name for name, process in self.processes.items() if not process.is_running]
        for name in dead:
            self.spawn(name)
        if dead:
            self.wait_ready()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until every process that was started is ready and every router has exactly those workers."""
        running = {name: process for name, process in self.processes.items() if process.is_running}
        for process in running.values():
            process.wait_ready(timeout_s)
        expected = {name: router_pb2.WORKER_STATE_READY for name in self.config.worker_names if name in running}
        for router in self.config.routers:
            self.wait_states(expected, timeout_s, router)

    def wait_states(self, expected: Mapping[str, WorkerState], timeout_s: float, router: str = "router") -> None:
        """Wait until the router knows exactly these workers, in these states."""
        wait_until(
            lambda: self.worker_states(router) == dict(expected),
            timeout_s,
            lambda: f"{router} sees {expected}, but {self.worker_states(router)}\n{self.logs()}",
        )

    def worker_states(self, router: str = "router") -> dict[str, WorkerState]:
        """By worker id, as the router lists them."""
        return {status.record.worker_id: status.state for status in self.list_workers(router)}

    def list_workers(self, router: str = "router") -> list[router_pb2.WorkerStatus]:
        """The router's answer to ListWorkers."""
        with self.channel(router) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            response = stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=_CALL_TIMEOUT_S)
        return list(response.workers)

    def load(self, name: str) -> kv_events_pb2.RankLoad:
        """A worker's own word on its load, now."""
        with self.channel(name) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            load = stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=_CALL_TIMEOUT_S).load
        return load.ranks[0]

    def metrics(self, name: str) -> Metrics:
        """What the process's /metrics says."""
        return self.processes[name].metrics()

    def block_counts(self, name: str) -> BlockCounts:
        """Blocks of the pool that its load reports, by state as /metrics says."""
        return _block_counts(self.metrics(name))

    def embedding_counts(self, name: str) -> BlockCounts:
        """Blocks of its pool of embeddings, by state as /metrics says."""
        return _embedding_counts(self.metrics(name))

    def wait_blocks_returned(self, *names: str, timeout_s: float) -> None:
        """Wait until no request holds a block of these workers (by default of all that run), by load and by metrics.

        A test waits for less than a hand-off's time to live if what it did must give blocks back, and not that time.
        """
        workers = names or tuple(name for name in self.config.worker_names if self.processes[name].is_running)

        def is_returned() -> bool:
            return all(self._is_idle(name) for name in workers)

        wait_until(is_returned, timeout_s, lambda: f"all blocks returned, but {self._loads_by_name(workers)}")
        for name in workers:
            counts = self.block_counts(name)
            assert counts.total == self.load(name).num_total_blocks, f"{name} lost blocks: {counts}"

    def channel(self, name: str, tls: TlsConfig | None = None) -> grpc.Channel:
        """A blocking channel to a process, with the operator's identity where there is TLS and none is given."""
        address = self.processes[name].grpc_address
        identity = tls or self.config.operator
        if identity is None:
            return grpc.insecure_channel(address)
        return grpc.secure_channel(address, channel_credentials(identity))

    def logs(self) -> str:
        """The end of every process's log."""
        return "\n".join(process.log_tail() for process in self.processes.values())

    def _is_idle(self, name: str) -> bool:
        # The worker's own word is of this moment; its metrics may be a second old, before the blocks were taken.
        load = self.load(name)
        busy = load.num_running + load.num_waiting + load.num_in_use_blocks + load.num_held_blocks
        if busy:
            return False
        metrics = self.metrics(name)
        return _block_counts(metrics).is_idle and _embedding_counts(metrics).is_idle

    def _loads_by_name(self, names: tuple[str, ...]) -> dict[str, tuple[object, ...]]:
        return {name: (self.load(name), self.block_counts(name), self.embedding_counts(name)) for name in names}

    def _process(
        self,
        name: str,
        module: str,
        settings: dict[str, Any],
        fork_server: ForkServer,
        *,
        launcher: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> ServiceProcess:
        path = self._directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(settings))
        return ServiceProcess(
            name,
            module,
            path,
            grpc_address=settings["server"]["address"],
            http_address=settings["http_address"],
            launcher=launcher,
            environment=environment,
            fork_server=fork_server,
        )

    def _worker_settings(self, name: str) -> dict[str, Any]:
        base: dict[str, Any] = {
            "worker_id": name,
            "model_name": tiny.NAME,
            "model_path": str(tiny.CHECKPOINT),
            # A start takes all of their memory, and the end gives it back: that is most of what a worker costs.
            "engine": {"num_threads": 1, "num_blocks": 256, "dtype": "float32"},
            "drain_timeout_s": 20.0,
        }
        role = self.config.roles.get(name.partition("-")[0], {})
        return _with(base | self._process_settings(name), {**self.config.worker, **role})

    def _router_settings(self, name: str) -> dict[str, Any]:
        return _with(self._process_settings(name), self.config.routers[name])

    def _process_settings(self, name: str) -> dict[str, Any]:
        server: dict[str, Any] = {"address": f"127.0.0.1:{free_port()}"}
        if self.config.tls:
            tls = self.config.tls[name]
            server["tls"] = {
                "ca_file": str(tls.ca_file),
                "cert_file": str(tls.cert_file),
                "key_file": str(tls.key_file),
            }
        return {
            "server": server,
            "http_address": f"127.0.0.1:{free_port()}",
            "signing_keys_file": str(self._signing_keys_file),
            "events_key_file": str(self._events_key_file) if self._events_key_file else None,
            "discovery": {"kind": "etcd", "etcd": {"endpoints": [self.etcd.endpoint], "namespace": "e2e"}},
        }


def _block_counts(metrics: Metrics) -> BlockCounts:
    samples = metrics.samples("quartet_worker_blocks")
    return BlockCounts(*(int(samples.get(frozenset({("rank", "0"), ("state", state)}), 0)) for state in _STATES))


def _embedding_counts(metrics: Metrics) -> BlockCounts:
    samples = metrics.samples("quartet_encode_blocks")
    return BlockCounts(*(int(samples.get(frozenset({("state", state)}), 0)) for state in _STATES))


def _with(settings: dict[str, Any], overrides: Settings) -> dict[str, Any]:
    for name, value in overrides.items():
        settings = override(settings, f"{name}={yaml.safe_dump(value, default_flow_style=True).strip()}")
    return settings
