"""Topologies of a benchmark's own: real processes, started on entry, ended on exit, watched in between.

``benchmarks.disagg`` compares one Decode worker that prefills too with a Prefill worker before a Decode worker
(``StackMaker``); ``benchmarks.encode`` asks an Encode, a Prefill and a Decode worker (``make_encode_stack``).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import TextIO

import grpc

from benchmarks.processes import Metrics, scrape
from quartet.config import build
from quartet.rpc.channels import create_channel
from quartet.v1 import router_pb2, router_pb2_grpc
from services.launch import Environment, LocalTopology
from services.local_etcd import free_port
from services.plan import ProcessPlan
from services.run_directory import make_run_directory
from services.topology import DEFAULT_MODEL_PATH, Topology

_POLL_S = 0.1
_CALL_TIMEOUT_S = 2.0
_ROUTER = "router"
#: Tokens of a block, of KV and of embeddings.
BLOCK_SIZE = 32
# Room for the longest prompt and some; what it has of earlier prompts is evicted, as in a worker that runs for long.
_NUM_BLOCKS = 288
_MAX_MODEL_LEN = 4608  # the tiny model's
_DTYPE, _DTYPE_BYTES = "float32", 4
_LOGS = Path(".run")
#: The Encode worker's id.
ENCODE = "encode-0"
_ENCODE_LOG = Path(".run/benchmark-encode.log")


class Stack:
    """The running processes of one topology, with a router that has a port for its metrics.

    Attributes:
        pids: process ids by name: ``router``, and workers by their ids.
        worker_addresses: ``host:port`` of the workers' gRPC services, by their ids.
    """

    def __init__(
        self,
        topology: Topology,
        log: Path,
        on_progress: Callable[[str], None],
        *,
        adapt: Callable[[ProcessPlan], ProcessPlan] = lambda plan: plan,
    ) -> None:
        """Nothing runs before entry; their output goes to the file ``log``, their data beside it.

        ``adapt``: as of ``LocalTopology``.
        """
        self.pids: Mapping[str, int] = {}
        self.worker_addresses: Mapping[str, str] = {}
        self._router_http = f"127.0.0.1:{free_port()}"
        overrides = {**topology.router.overrides, "http_address": self._router_http}
        self._topology = replace(topology, router=replace(topology.router, port=0, overrides=overrides))
        self._log_path = log
        self._on_progress = on_progress
        self._adapt = adapt
        self._http_addresses: dict[str, str] = {}
        self._log: TextIO | None = None
        self._local: LocalTopology | None = None

    @property
    def router_address(self) -> str:
        """``host:port`` of the router's gRPC services."""
        return self._running.router_address

    async def __aenter__(self) -> Stack:
        """Start everything and wait until the router places requests at every worker.

        Raises:
            ConfigError: it can't be started.
            RuntimeError: a process ended, or not all served in time; the message says what it said last.
        """
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = self._log_path.open("w", encoding="utf-8")
        environment = Environment(
            variables=dict(os.environ),
            num_cores=os.cpu_count() or 1,
            run_dir=make_run_directory(self._log_path.parent, self._topology.namespace),
        )
        self._local = LocalTopology(
            self._topology, environment, _Observer(self._log, self._on_progress), adapt=self._adapt
        )
        try:
            await self._local.start()
            await self._await_ready()
        except BaseException:
            await self._end()
            raise
        self.pids = {child.name: child.pid for child in self._local.children}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End every process."""
        await self._end()

    async def metrics(self) -> dict[str, Metrics]:
        """The metrics of every process, by name."""
        found = await asyncio.gather(*map(scrape, self._http_addresses.values()))
        return dict(zip(self._http_addresses, found, strict=True))

    @property
    def _running(self) -> LocalTopology:
        assert self._local is not None, "only within `async with`"
        return self._local

    async def _end(self) -> None:
        await self._running.stop()
        if self._log is not None:
            self._log.close()

    async def _await_ready(self) -> None:
        self._on_progress("waiting until all workers are ready")
        deadline = time.monotonic() + self._topology.start_timeout_s
        async with create_channel(self.router_address, None) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            while not await self._is_ready(stub):
                for child in self._running.children:
                    if not child.is_running:
                        raise RuntimeError(child.describe_end())
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not all workers were ready in time; {self._log_path} has their output")
                await asyncio.sleep(_POLL_S)

    async def _is_ready(self, stub: router_pb2_grpc.RouterServiceAsyncStub) -> bool:
        try:
            answer = await stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False  # not listening yet
        ready = [worker.record for worker in answer.workers if worker.state == router_pb2.WORKER_STATE_READY]
        self._http_addresses = {_ROUTER: self._router_http, **{item.worker_id: item.http_address for item in ready}}
        self.worker_addresses = {item.worker_id: item.grpc_address for item in ready}
        return self.worker_addresses.keys() >= set(self._running.worker_ids)


class Side(StrEnum):
    """Which of the two."""

    AGG = "agg"
    DISAGG = "disagg"


class EngineName(StrEnum):
    """What the workers compute with: nothing at all, or the tiny model in PyTorch."""

    STUB = "stub"
    TINY = "tiny"


@dataclass(frozen=True)
class StackMaker:
    """Makes both sides' stacks; workers find each other in ``discovery_directory``."""

    discovery_directory: Path
    on_progress: Callable[[str], None]

    def make(self, engine: EngineName, side: Side) -> Stack:
        """A stack, not started yet."""
        topology = build(Topology, self._settings(engine, side))
        adapt = _stub_plan if engine is EngineName.STUB else _same_plan
        log = _LOGS / f"benchmark-disagg-{engine}-{side}.log"
        return Stack(topology, log, self.on_progress, adapt=adapt)

    def _settings(self, engine: EngineName, side: Side) -> Mapping[str, object]:
        quiet = {"log": {"level": "warning"}}
        roles = ("prefill", "decode") if side is Side.DISAGG else ("decode",)
        return {
            "namespace": f"{engine}-{side}",
            "discovery": {"kind": "file", "file": {"directory": str(self.discovery_directory)}},
            "engine": {
                "num_threads": 1,
                "dtype": _DTYPE,
                "block_size": BLOCK_SIZE,
                "num_blocks": _NUM_BLOCKS,
                "max_model_len": _MAX_MODEL_LEN,
            },
            "router": {"overrides": {**quiet, "policy": {"local_prefill_max_tokens": 0}}},
            "workers": [{"role": role, "overrides": quiet} for role in roles],
            "drain_timeout_s": 0.5,
        }


def tiny_block_bytes() -> int:
    """Bytes of one block of the tiny model's KV cache."""
    config = json.loads((DEFAULT_MODEL_PATH / "config.json").read_text(encoding="utf-8"))["text_config"]
    num_values = config["num_hidden_layers"] * 2 * BLOCK_SIZE * config["num_key_value_heads"] * config["head_dim"]
    return int(num_values * _DTYPE_BYTES)


def make_encode_stack(
    discovery_directory: Path, on_progress: Callable[[str], None], *, log: Path = _ENCODE_LOG
) -> Stack:
    """A stack, not started yet: workers find each other in that directory, output goes to the file ``log``."""
    quiet = {"log": {"level": "warning"}}
    settings = {
        "namespace": "encode",
        "discovery": {"kind": "file", "file": {"directory": str(discovery_directory)}},
        "engine": {"dtype": "float32", "num_threads": 1, "block_size": BLOCK_SIZE},
        "router": {"overrides": {**quiet, "policy": {"local_prefill_max_tokens": 0}}},
        "workers": [{"role": role, "overrides": quiet} for role in ("encode", "prefill", "decode")],
        "drain_timeout_s": 0.5,
    }
    return Stack(build(Topology, settings), log, on_progress)


@dataclass(frozen=True)
class _Observer:
    log: TextIO
    on_progress: Callable[[str], None]

    def log_line(self, process: str, line: str) -> None:
        print(f"{process}: {line}", file=self.log)

    def progress(self, message: str) -> None:
        self.on_progress(message)


def _same_plan(plan: ProcessPlan) -> ProcessPlan:
    return plan


def _stub_plan(plan: ProcessPlan) -> ProcessPlan:
    return replace(plan, module=plan.module.replace("services.", "benchmarks.stub_engine."))
