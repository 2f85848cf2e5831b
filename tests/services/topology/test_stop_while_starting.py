"""A worker that is stopped before it serves: it ends at once, whatever it waits for."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from quartet.discovery.base import Role
from quartet.discovery.create import DiscoveryConfig
from quartet.discovery.etcd_client import EtcdConfig
from quartet.engine.base import RequestKind
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_engine import StepEngine
from quartet.errors import DiscoveryError
from quartet.transfer.base import Puller
from services.workers import process as worker_process
from services.workers.config import WorkerConfig
from services.workers.process import is_done_before
from tests.engine.fakes import WAIT_S, FakeRunner

#: Less than it takes to give up registering, or to give up an engine that hangs.
PROMPTLY_S = 5.0


class Loading:
    """Takes the place of the engine that the configuration names; its model loads when ``gate`` is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.gate, self.runner = threading.Event(), threading.Event(), FakeRunner()
        monkeypatch.setattr(worker_process, "create_engine", self._create_engine)

    def _create_engine(self, _config: WorkerConfig, kind: RequestKind, puller: Puller) -> StepEngine:
        return StepEngine(self._load, SchedulerConfig(), puller=puller, kinds=frozenset({kind}))

    def _load(self) -> FakeRunner:
        self.began.set()
        assert self.gate.wait(WAIT_S), "the model was never loaded"
        return self.runner


def start_worker(tmp_path: Path, stop: asyncio.Event, etcd: str) -> asyncio.Task[None]:
    config = WorkerConfig(model_path=str(tmp_path), discovery=DiscoveryConfig(etcd=EtcdConfig(endpoints=(etcd,))))
    return asyncio.create_task(worker_process.WorkerProcess(config, Role.DECODE).run(stop))


async def test_a_worker_stopped_while_its_model_loads_does_not_wait_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, loading = asyncio.Event(), Loading(monkeypatch)
    running = start_worker(tmp_path, stop, "127.0.0.1:1")
    assert await asyncio.to_thread(loading.began.wait, WAIT_S)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "quartet-engine"]
    stop.set()
    async with asyncio.timeout(PROMPTLY_S):
        await running
    loading.gate.set()
    await asyncio.to_thread(thread.join, WAIT_S)
    assert loading.runner.num_closes == 1, "a model that comes too late is closed all the same"


async def test_a_worker_stopped_while_it_registers_does_not_wait_for_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, loading = asyncio.Event(), Loading(monkeypatch)
    loading.gate.set()
    was_asked = asyncio.Event()

    async def say_nothing(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        was_asked.set()
        await stop.wait()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        running = start_worker(tmp_path, stop, f"{host}:{port}")
        async with asyncio.timeout(WAIT_S):
            await was_asked.wait()
        stop.set()
        async with asyncio.timeout(PROMPTLY_S):
            await running
    assert loading.runner.num_closes == 1


async def test_work_that_ends_first_is_done_and_its_error_is_raised() -> None:
    stop = asyncio.Event()

    async def fail() -> None:
        raise DiscoveryError("nobody there")

    assert await is_done_before(stop, asyncio.sleep(0))
    with pytest.raises(DiscoveryError):
        await is_done_before(stop, fail())


async def test_cancelling_the_waiting_task_cancels_the_work() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.create_task(is_done_before(asyncio.Event(), work()))
    await began.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()
