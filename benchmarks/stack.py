"""A topology for one benchmark: real processes, started on entry, ended on exit, watched meanwhile."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TextIO

import grpc

from benchmarks.children import ROLE_VARIABLE
from benchmarks.processes import Metrics, scrape
from quartet.rpc.channels import create_channel
from quartet.v1 import router_pb2, router_pb2_grpc
from services.topology.launch import Environment, LocalTopology, free_port, make_run_directory
from services.topology.topology import ProcessPlan, Topology

_POLL_S = 0.1
_CALL_TIMEOUT_S = 2.0
_ROUTER = "router"


class Stack:
    """The running processes of one topology, whose router serves its metrics on a port.

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
        """Start nothing before entry. The processes' output goes to the file ``log``, their data beside it.

        ``adapt``: as in ``LocalTopology``.
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
        """Start everything and wait until the router assigns requests to every worker.

        Raises:
            ConfigError: the topology can't be started.
            RuntimeError: a process ended, or some did not serve in time; the message has the last lines of its log.
        """
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = self._log_path.open("w", encoding="utf-8", buffering=1)
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

    @property
    def http_address(self) -> str:
        """``host:port`` of the router's HTTP; empty: it has none."""
        return self._running.http_address

    @property
    def ended(self) -> Sequence[str]:
        """How each process that should still run has ended, with its last output."""
        return [child.describe_end() for child in self._running.children if not child.is_running]

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


def run_by(module: str) -> Callable[[ProcessPlan], ProcessPlan]:
    """For ``Stack``'s ``adapt``: each worker is run by ``module``, which finds its role in ``ROLE_VARIABLE``."""

    def adapt(plan: ProcessPlan) -> ProcessPlan:
        return replace(plan, module=module, environment={**plan.environment, ROLE_VARIABLE: plan.role.value})

    return adapt


@dataclass(frozen=True)
class _Observer:
    log: TextIO
    on_progress: Callable[[str], None]

    def log_line(self, process: str, line: str) -> None:
        print(f"{process}: {line}", file=self.log)

    def progress(self, message: str) -> None:
        self.on_progress(message)
