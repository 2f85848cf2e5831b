"""The processes that chaos strikes: etcd, workers and routers, each behind a proxy of ours, on fixed addresses.

A process listens on 127.0.0.1; peers and clients dial the same port of 127.0.0.2, where its proxy listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import grpc
import yaml

from benchmarks.chaos_proxy import TcpProxy
from quartet.discovery.etcd_client import EtcdConfig
from quartet.engine.settings import EngineKind
from quartet.rpc.channels import create_channel
from quartet.v1 import kv_events_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.topology.child import Child, start_child
from services.topology.launch import draw_signing_key, etcd_command, find_etcd, free_port

ETCD = "etcd"
#: Seconds: a hand-off that is not renewed lives so long.
HAND_OFF_TTL_S = 1.0
#: Seconds: a silent worker's record lives so long; etcd allows no less.
LEASE_TTL_S = 2
#: Longest time of a request, in seconds.
REQUEST_TIMEOUT_S = 40.0

_HOST, _PROXY_HOST = "127.0.0.1", "127.0.0.2"
_CALL_TIMEOUT_S = 2.0
# A drain of 5 s, and the time of a freeze meanwhile.
_END_TIMEOUT_S = 20.0
_POLL_S = 0.05
#: A worker's state in which routers place requests there.
READY = "WORKER_STATE_READY"
_MODEL_PATH = "models/tiny/checkpoint"


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """What runs: ``prefill-0`` and so on, and ``router-0``.

    Attributes:
        worker_settings: of all workers, over those of this module; the same for ``router_settings``.
        modules: the module that serves a role, instead of the product's own; it gets the role as first argument.
    """

    engine: EngineKind = EngineKind.MOCK
    num_encode: int = 0
    num_prefill: int = 2
    num_decode: int = 2
    num_routers: int = 2
    worker_settings: Mapping[str, Any] = field(default_factory=dict)
    router_settings: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)

    @property
    def workers(self) -> Sequence[str]:
        """Names of the workers, which are their ids."""
        counts = {"encode": self.num_encode, "prefill": self.num_prefill, "decode": self.num_decode}
        return [f"{role}-{number}" for role, count in counts.items() for number in range(count)]

    @property
    def routers(self) -> Sequence[str]:
        """Names of the routers."""
        return [f"router-{number}" for number in range(self.num_routers)]


@dataclass
class _Process:
    """One process of the fleet; it keeps its command and address over restarts."""

    name: str
    port: int
    http_port: int
    command: Sequence[str]
    proxy: TcpProxy
    child: Child | None = None


class Fleet:
    """Everything runs within ``async with``, unless it was struck."""

    def __init__(self, config: FleetConfig, directory: Path, variables: Mapping[str, str]) -> None:
        """Files go to ``directory``, which exists; processes get the environment ``variables``."""
        self.config = config
        self._directory = directory
        self._variables = {**variables, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        self._log: TextIO | None = None
        self._exits = AsyncExitStack()
        self._processes: dict[str, _Process] = {}
        self._replaced: list[Child] = []

    @property
    def router_addresses(self) -> Sequence[str]:
        """``host:port`` of each router's proxy."""
        return [f"{_PROXY_HOST}:{self._processes[name].port}" for name in self.config.routers]

    def grpc_address(self, name: str) -> str:
        """``host:port`` of the process itself, without its proxy."""
        return f"{_HOST}:{self._processes[name].port}"

    def http_address(self, name: str) -> str:
        """``host:port`` of its probes."""
        return f"{_HOST}:{self._processes[name].http_port}"

    async def worker_states(self, router: str) -> Mapping[str, str]:
        """The state that ``router`` shows of each worker; empty: it does not answer."""
        workers = await self._list_workers(router)
        return {one.record.worker_id: router_pb2.WorkerState.Name(one.state) for one in workers}

    async def worker_ports(self, router: str) -> Mapping[str, int]:
        """Where ``router`` finds each worker; empty: it does not answer."""
        return {
            one.record.worker_id: int(one.record.grpc_address.rpartition(":")[2])
            for one in await self._list_workers(router)
        }

    async def __aenter__(self) -> Self:
        """Start everything, and wait until all routers have all workers.

        Raises:
            RuntimeError: this machine has no etcd.
            TimeoutError: the fleet did not become ready.
        """
        try:
            self._log = self._exits.enter_context((self._directory / "fleet.log").open("w", encoding="utf-8"))
            self._signing_keys_file = draw_signing_key(self._directory)
            await self._add_etcd()
            for name in (*self.config.workers, *self.config.routers):
                await self._add(name)
            await asyncio.gather(*(self.start(name) for name in self._processes))
            await self.wait_ready(90.0)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill everything."""
        await self._end()

    async def start(self, name: str) -> None:
        """Start a process that does not run, with the command and address that it always has."""
        process = self._processes[name]
        if process.child is None or not process.child.is_running:
            process.child = await start_child(name, process.command, self._variables, partial(self._log_line, name))

    async def replace(self, name: str) -> Child:
        """Start another process with the id of a worker, at another address; returns the old one, which goes on."""
        replaced = self._child(name)
        self._replaced.append(replaced)
        await self._add(name)
        await self.start(name)
        return replaced

    async def kill(self, name: str) -> None:
        """``kill -9``, and wait for its end."""
        await self._stop(name, signal.SIGKILL)

    async def drain(self, name: str) -> None:
        """SIGTERM, and wait for its end."""
        await self._stop(name, signal.SIGTERM)

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        self._child(name).send(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        self._child(name).send(signal.SIGCONT)

    async def cut(self, name: str) -> None:
        """End all connections to it, and refuse new ones."""
        await self._processes[name].proxy.cut()

    def delay(self, name: str, seconds: float) -> None:
        """Hold back everything that its connections carry."""
        self._processes[name].proxy.delay_s = seconds

    def lose_data(self) -> None:
        """Delete the data of etcd, which does not run."""
        shutil.rmtree(self._directory / ETCD, ignore_errors=True)

    async def heal(self, *names: str) -> None:
        """Undo everything that was done to these processes, by default to all."""
        for name in names or self._processes:
            process = self._processes[name]
            process.proxy.heal()
            self.thaw(name)
            await self.start(name)

    async def wait_ready(self, timeout_s: float) -> float:
        """Wait until all routers place at all workers; returns when they did, in monotonic seconds.

        Raises:
            TimeoutError: says what a router has.
        """
        names = set(self.config.workers)
        for router in self.config.routers:
            deadline = time.monotonic() + timeout_s
            while (states := await self.worker_states(router)) != dict.fromkeys(names, READY):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{router} has only {states or 'no workers'}")
                await asyncio.sleep(_POLL_S)
        return time.monotonic()

    async def num_blocks_held(self, timeout_s: float) -> int:
        """Blocks that workers hold or use once ``timeout_s`` seconds have passed, or none earlier."""
        deadline = time.monotonic() + timeout_s
        while True:
            num_held = sum(await asyncio.gather(*map(self._num_held, self.config.workers)))
            if not num_held or time.monotonic() > deadline:
                return num_held
            await asyncio.sleep(_POLL_S)

    def keep_log(self, copy: Path) -> Path:
        """Copy the log so far to the file ``copy``, and return it."""
        copy.parent.mkdir(exist_ok=True)
        return Path(shutil.copy(self._directory / "fleet.log", copy))

    async def _list_workers(self, router: str) -> Sequence[router_pb2.WorkerStatus]:
        try:
            async with create_channel(self.grpc_address(router), None) as channel:
                stub = router_pb2_grpc.RouterServiceStub(channel)
                response = await stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return ()
        return response.workers

    async def _num_held(self, worker: str) -> int:
        try:
            async with create_channel(self.grpc_address(worker), None) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                response = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return 1  # it does not say
        return sum(map(_held, response.load.ranks))

    async def _add_etcd(self) -> None:
        binary = find_etcd()
        if binary is None:
            raise RuntimeError("this machine has no etcd: run `make tools`")
        port = free_port()
        command = etcd_command(binary, EtcdConfig(endpoints=(f"{_HOST}:{port}",)), self._directory / ETCD)
        await self._add_process(ETCD, port, 0, command)

    async def _add(self, name: str) -> None:
        port, http_port = free_port(), free_port()
        is_router = name in self.config.routers
        settings = self._router_settings() if is_router else self._worker_settings(name)
        own_settings = self.config.router_settings if is_router else self.config.worker_settings
        etcd = {"endpoints": [f"{_PROXY_HOST}:{self._processes[ETCD].port}"], "namespace": "chaos"}
        settings |= {
            "server": {"address": f"{_HOST}:{port}", "namespace": "chaos"},
            "http_address": f"{_HOST}:{http_port}",
            "signing_keys_file": str(self._signing_keys_file),
            "drain_timeout_s": 5.0,
            "discovery": {"kind": "etcd", "etcd": {**etcd, "lease_ttl_s": LEASE_TTL_S, "request_timeout_s": 1.0}},
        }
        path = self._directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(_merged(settings, own_settings)), encoding="utf-8")
        role = name.partition("-")[0]
        module = ["router" if is_router else f"services.{role}"]
        if role in self.config.modules:
            module = [self.config.modules[role], role]
        await self._add_process(name, port, http_port, [sys.executable, "-m", *module, "--config", str(path)])

    async def _add_process(self, name: str, port: int, http_port: int, command: Sequence[str]) -> None:
        proxy = await self._exits.enter_async_context(TcpProxy(_PROXY_HOST, _HOST, port))
        self._processes[name] = _Process(name, port, http_port, command, proxy)

    def _worker_settings(self, name: str) -> dict[str, Any]:
        engine: dict[str, Any] = {"kind": self.config.engine.value, "num_blocks": 1024}
        if self.config.engine is EngineKind.TORCH:
            engine |= {"num_threads": 1, "dtype": "float32"}
        return {
            "worker_id": name,
            "model_path": _MODEL_PATH,
            "model_name": "tiny",
            "engine": engine,
            "advertise_host": _PROXY_HOST,
            "transfer": {"hand_off_ttl_s": HAND_OFF_TTL_S, "max_pull_s": 4.0, "stall_timeout_s": 1.0},
        }

    def _router_settings(self) -> dict[str, Any]:
        return {
            "policy": {"local_prefill_max_tokens": 0},
            "attempts": {
                "max_attempts": 20,
                "prefill_timeout_s": 5.0,
                "decode_start_timeout_s": 5.0,
                "decode_stall_timeout_s": 2.0,
            },
            "admission": {"unavailable_timeout_s": REQUEST_TIMEOUT_S},
            "heartbeat_timeout_s": 2.5,
        }

    def _child(self, name: str) -> Child:
        child = self._processes[name].child
        assert child is not None, "it was started"
        return child

    async def _stop(self, name: str, number: signal.Signals) -> None:
        """Send a signal and wait for the process's end. Raises ``TimeoutError``: it goes on."""
        child = self._child(name)
        child.send(number)
        async with asyncio.timeout(_END_TIMEOUT_S):
            await child.wait()

    async def _end(self) -> None:
        children = [process.child for process in self._processes.values() if process.child is not None]
        children += [child for child in self._replaced if child.is_running]
        for child in children:
            child.send(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(child.wait() for child in children)), 10.0)
        await self._exits.aclose()

    def _log_line(self, name: str, line: str) -> None:
        assert self._log is not None, "it was entered"
        if not self._log.closed:  # a process that was killed may still have output in its pipe
            self._log.write(f"{name}: {line}\n")
            self._log.flush()


def _merged(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(settings)
    for name, value in others.items():
        is_part = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if is_part else value
    return merged


def _held(load: kv_events_pb2.RankLoad) -> int:
    return load.num_in_use_blocks + load.num_held_blocks + load.num_running + load.num_waiting
