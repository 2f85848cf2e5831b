"""A worker process that must not go on: its background tasks end it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quartet.discovery.file import FileRegistration
from quartet.supervision import TaskEndedError
from services.workers.worker import Worker
from tests.router.system import TIMEOUT_S, running_system


async def test_a_registration_that_breaks_is_no_secret_and_its_worker_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="services")
    must_break = asyncio.Event()

    async def keep_alive(_self: FileRegistration) -> None:
        await must_break.wait()
        raise FileNotFoundError("certificates/ca.pem")

    monkeypatch.setattr(FileRegistration, "_keep_alive", keep_alive)
    async with running_system(tmp_path, monkeypatch, "decode-0") as (system, _stub):
        must_break.set()
        with pytest.raises(TaskEndedError, match=r"registration.*ca\.pem"):
            await asyncio.wait_for(system.workers.pop("decode-0").task, TIMEOUT_S)
        await system.wait_workers(lambda known: not known)
    assert "draining" in caplog.text
    [record] = [record for record in caplog.records if "the task registration has ended" in record.message]
    assert record.exc_info is not None


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
