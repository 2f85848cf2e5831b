"""The file that says that all processes of ``quartet up`` serve."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cli.up_ready import ReadyFile
from quartet.errors import ConfigError
from services.topology.child import Child, start_child
from services.topology.launch import LaunchError
from services.topology.supervisor import RestartConfig, Supervisor
from services.workers.config import EXIT_REPLACED
from tests.e2e.process import wait_until


class Observer:
    def __init__(self) -> None:
        self.messages: list[str] = []

    def log_line(self, process: str, line: str) -> None: ...

    def progress(self, message: str) -> None:
        self.messages.append(message)

    def died(self, child: Child) -> None:
        self.messages.append(f"{child.name} died")


class Processes:
    """Two that sleep; each is started again as it was."""

    def __init__(self) -> None:
        self._children: dict[str, Child] = {}

    @property
    def children(self) -> Sequence[Child]:
        return tuple(self._children.values())

    async def restart(self, name: str) -> Child:
        return await self.start(name, "sleep", "600")

    async def start(self, name: str, *command: str) -> Child:
        self._children[name] = await start_child(name, command, {"PATH": "/usr/bin:/bin"}, lambda _line: None)
        return self._children[name]

    async def end(self) -> None:
        for child in self.children:
            child.send(signal.SIGKILL)
            await child.wait()


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, condition, 60.0, lambda: "what was waited for")


@pytest.mark.parametrize("restarts", [RestartConfig(first_delay_s=0.01), None])
async def test_the_file_is_there_while_all_serve(restarts: RestartConfig | None, tmp_path: Path) -> None:
    path, processes, observer = tmp_path / "ready", Processes(), Observer()
    serving = {name: asyncio.Event() for name in ("router", "decode-0")}
    for name in serving:
        await processes.restart(name)
    path.touch()  # of a run that was killed
    ready = ReadyFile(path, observer)
    ready.expect([*serving])

    async def wait(name: str) -> None:
        await serving[name].wait()
        ready.serves(name)

    running = asyncio.create_task(Supervisor(processes, ready, wait, restarts=restarts).run())
    try:
        assert not path.exists()
        serving["router"].set()
        serving["decode-0"].set()
        await until(path.exists)
        serving["decode-0"].clear()
        [child] = [child for child in processes.children if child.name == "decode-0"]
        child.send(signal.SIGKILL)
        if restarts is None:
            with pytest.raises(LaunchError, match="decode-0"):
                await running
            ready.remove()  # as the end of `quartet up` does
            assert not path.exists()
        else:
            await until(lambda: "decode-0 died" in observer.messages)
            assert not path.exists()
            serving["decode-0"].set()
            await until(path.exists)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await processes.end()


async def test_the_file_goes_with_a_worker_whose_id_another_process_has(tmp_path: Path) -> None:
    path, end, processes, observer = tmp_path / "ready", tmp_path / "end", Processes(), Observer()
    await processes.start("decode-0", "sh", "-c", f"until [ -e '{end}' ]; do sleep 0.05; done; exit {EXIT_REPLACED}")
    await processes.restart("router")
    ready = ReadyFile(path, observer)
    ready.expect(["router", "decode-0"])

    async def wait(name: str) -> None:
        ready.serves(name)

    running = asyncio.create_task(Supervisor(processes, ready, wait, restarts=RestartConfig()).run())
    try:
        await until(path.exists)
        end.touch()
        await until(lambda: "decode-0 died" in observer.messages)
        assert not path.exists()
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await processes.end()


def test_a_file_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--ready-file: cannot write .*No such file"):
        ReadyFile(tmp_path / "none" / "ready", Observer())


def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ready = ReadyFile(None, Observer())
    ready.expect(["router"])
    ready.serves("router")
    ready.remove()
    assert list(tmp_path.iterdir()) == []
