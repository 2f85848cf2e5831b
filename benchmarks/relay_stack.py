"""The servers of the relay benchmarks: a Router and one Decode worker on the paced engine, as processes."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import grpc
import yaml

from benchmarks.paced_clock import PacedClock
from benchmarks.paced_engine import PERIOD
from quartet.config import build
from quartet.rpc.channels import create_channel
from quartet.v1 import router_pb2, router_pb2_grpc
from services.topology.child import Child, start_child
from services.topology.launch import free_port
from services.topology.topology import ProcessPlan, Topology, plan_router, plan_workers

ROUTER, DECODE = "router", "decode"

_READY_TIMEOUT_S = 30.0
_POLL_S = 0.05
_CALL_TIMEOUT_S = 2.0
_STOP_TIMEOUT_S = 5.0
# Room for whatever clients ask for: admission is not what is measured.
_NUM_BLOCKS, _MAX_MODEL_LEN = 1 << 20, 1 << 20


class RelayStack:
    """Both processes, from entry to exit. Discovery is a directory: nothing else runs beside them.

    Attributes:
        router_address: ``host:port``.
        clock: when the engine gave out what.
        pids: ``router`` and ``decode``, within ``async with``.
    """

    def __init__(self, log: Path, on_progress: Callable[[str], None], *, period: int = PERIOD) -> None:
        """Nothing runs before entry; output goes to the file ``log``, a stream's token comes every ``period`` steps."""
        self._period = period
        self._on_progress = on_progress
        self._directory = Path(tempfile.mkdtemp(prefix="quartet-relay-"))
        clock_path = self._directory / "clock"
        self.clock_path = clock_path
        self.clock = PacedClock(clock_path, create=True)
        self.pids: Mapping[str, int] = {}
        self._port = free_port()
        self.router_address = f"127.0.0.1:{self._port}"
        self._children: list[Child] = []
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_path = log
        self._log = log.open("w", encoding="utf-8")

    async def __aenter__(self) -> RelayStack:
        """Start both, and wait until the router places requests.

        Raises:
            RuntimeError: one ended, or they were not ready in time; the message says what was said last.
        """
        try:
            topology = self._topology()
            [worker] = plan_workers(topology, num_cores=1)
            pace = ["--clock", str(self.clock_path), "--period", str(self._period)]
            decode = await self._start(DECODE, ["-m", "benchmarks.paced_engine", *pace, *self._config(worker)])
            plan = plan_router(topology)
            router = await self._start(ROUTER, ["-m", plan.module, *self._config(plan)])
            await self._await_ready()
        except BaseException:
            await self._stop()
            raise
        self.pids = {ROUTER: router.pid, DECODE: decode.pid}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End both."""
        await self._stop()

    def _topology(self) -> Topology:
        sign = {"signing_keys_file": str(self._write_signing_key())}
        settings = {
            "namespace": "relay",
            "discovery": {"kind": "file", "file": {"directory": str(self._directory / "workers")}},
            "engine": {"num_blocks": _NUM_BLOCKS, "max_model_len": _MAX_MODEL_LEN},
            "router": {"port": self._port, "overrides": sign},
            "workers": [{"role": "decode", "overrides": sign}],
            "drain_timeout_s": 0.2,
        }
        return build(Topology, settings)

    def _write_signing_key(self) -> Path:
        """Place is only offered with a key."""
        path = self._directory / "sign-keys"
        path.touch(mode=0o600)
        path.write_text(f"relay {secrets.token_hex(32)}\n", encoding="utf-8")
        return path

    def _config(self, plan: ProcessPlan) -> list[str]:
        path = self._directory / f"{plan.name}.yaml"
        path.write_text(yaml.safe_dump(plan.settings), encoding="utf-8")
        return ["--config", str(path)]

    async def _start(self, name: str, arguments: list[str]) -> Child:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *arguments]
        child = await start_child(name, command, environment, lambda line: print(f"{name}: {line}", file=self._log))
        self._children.append(child)
        return child

    async def _await_ready(self) -> None:
        self._on_progress("waiting until the router places requests")
        deadline = time.monotonic() + _READY_TIMEOUT_S
        async with create_channel(self.router_address, None) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            while not await _is_ready(stub):
                for child in self._children:
                    if not child.is_running:
                        raise RuntimeError(child.describe_end())
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not ready within {_READY_TIMEOUT_S:g} s; {self._log_path} has their output")
                await asyncio.sleep(_POLL_S)

    async def _stop(self) -> None:
        for child in self._children:
            child.send(signal.SIGTERM)
        ending = [asyncio.create_task(child.wait()) for child in self._children]
        if ending:
            await asyncio.wait(ending, timeout=_STOP_TIMEOUT_S)
        for child in self._children:
            child.send(signal.SIGKILL)
        await asyncio.gather(*ending)
        self._log.close()
        shutil.rmtree(self._directory, ignore_errors=True)


async def _is_ready(stub: router_pb2_grpc.RouterServiceAsyncStub) -> bool:
    try:
        answer = await stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=_CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return False  # not listening yet
    return any(worker.state == router_pb2.WORKER_STATE_READY for worker in answer.workers)
