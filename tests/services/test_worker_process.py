"""Worker processes: when one must not go on, and when none may begin."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quartet.discovery.base import Role, WorkerRecord
from quartet.discovery.file import FileRegistration
from quartet.engine.settings import EngineKind, EngineSettings
from quartet.errors import ConfigError
from quartet.kvcache.hand_off import HandOffTicket
from quartet.kvcache.layout import OpaquePayload
from quartet.supervision import TaskEndedError
from services.workers import process as worker_processes
from services.workers.config import WorkerConfig
from services.workers.process import WorkerProcess
from services.workers.worker import Worker
from tests.router.system import TIMEOUT_S, System, running_system


async def test_a_registration_that_breaks_is_no_secret_and_its_worker_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="services")
    must_break = asyncio.Event()

    keep_alive = FileRegistration._keep_alive

    async def break_worker(self: FileRegistration) -> None:
        if not isinstance(self.record, WorkerRecord):
            await keep_alive(self)
        await must_break.wait()
        raise FileNotFoundError("certificates/ca.pem")

    monkeypatch.setattr(FileRegistration, "_keep_alive", break_worker)
    async with running_system(tmp_path, monkeypatch, "decode-0") as (system, _stub):
        must_break.set()
        with pytest.raises(TaskEndedError, match=r"registration.*ca\.pem"):
            await asyncio.wait_for(system.workers.pop("decode-0").task, TIMEOUT_S)
        await system.wait_workers(lambda known: not known)
    assert "draining" in caplog.text
    [record] = [record for record in caplog.records if "the task registration has ended" in record.message]
    assert record.exc_info is not None


@pytest.mark.parametrize(
    ("engine", "watched"),
    [
        (EngineSettings(kind=EngineKind.TORCH, device="cuda:1"), [("2,3", 1)]),
        (EngineSettings(kind=EngineKind.TRTLLM), [("2,3", None)]),
        (EngineSettings(kind=EngineKind.TORCH), []),
        (EngineSettings(kind=EngineKind.MOCK), []),
    ],
)
def test_only_the_gpus_that_the_engine_uses_are_watched(
    engine: EngineSettings, watched: list[tuple[str, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, int | None]] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setattr(worker_processes, "watch_gpus", lambda _registry, *gpus: found.append(gpus))
    WorkerProcess(WorkerConfig(model_path="model", engine=engine), Role.DECODE)._watch_gpus()
    assert found == watched


@pytest.mark.parametrize("is_taken", [True, False])
async def test_the_end_of_a_hand_off_is_reported_although_the_engine_says_nothing(
    is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, poked = WorkerProcess(WorkerConfig(model_path="model"), Role.PREFILL), asyncio.Event()
    ended: list[tuple[int, bool]] = []

    class Parts:
        memory = None

        def hand_off_ended(self, holder: int, *, was_taken: bool) -> None:
            ended.append((holder, was_taken))

    monkeypatch.setattr(process, "_poke", poked.set)
    source = process._source(Parts())  # type: ignore[arg-type]
    source.advertise("127.0.0.1:1")
    made = source.offer(7, (), OpaquePayload("engine", b""))
    ticket = HandOffTicket(made.hand_off_id, made.secret, made.epoch)
    if is_taken:
        source.begin(ticket, ())
        source.finish(ticket)
    else:
        source.abort(ticket)
    async with asyncio.timeout(TIMEOUT_S):
        await poked.wait()
    assert ended == [(7, is_taken)]
    source.close()


@pytest.mark.parametrize("method", ["consume", "watch_health"])
async def test_any_background_task_that_just_returns_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    must_end = asyncio.Event()

    async def work(*_arguments: object) -> None:
        await must_end.wait()

    monkeypatch.setattr(Worker, method, work)
    async with running_system(tmp_path, monkeypatch, "decode-0") as (system, _stub):
        must_end.set()
        with pytest.raises(TaskEndedError):
            await asyncio.wait_for(system.workers.pop("decode-0").task, TIMEOUT_S)


async def test_a_prefill_worker_whose_blocks_no_transfer_reaches_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = System(tmp_path, unreachable=["prefill-0"])
    monkeypatch.setattr(worker_processes, "create_engine", system.create_engine)
    system.start_worker("prefill-0")
    with pytest.raises(ConfigError, match=r"^engine\.device: .*can't go to another worker"):
        await asyncio.wait_for(system.workers["prefill-0"].task, TIMEOUT_S)


async def test_what_a_loaded_model_left_is_put_aside_before_anything_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Parts:
        async def start(self) -> None:
            order.append("start")

        async def close(self) -> None:
            order.append("close")

    async def find(_self: WorkerProcess) -> None:
        pass

    async def serve(_self: WorkerProcess, *_arguments: object) -> None:
        order.append("serve")

    monkeypatch.setattr(WorkerProcess, "_find_model", find)
    monkeypatch.setattr(WorkerProcess, "_make_parts", lambda _self: Parts())
    monkeypatch.setattr(WorkerProcess, "_serve", serve)
    process = WorkerProcess(WorkerConfig(model_path="model"), Role.PREFILL, on_loaded=lambda: order.append("put aside"))
    await asyncio.wait_for(process.run(asyncio.Event()), TIMEOUT_S)
    assert order == ["start", "put aside", "serve", "close"]
