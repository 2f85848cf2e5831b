"""Workers under ``trtllm-llmapi-launch``: rank 0 serves, the others work for it, and end with it however it ends.

The test does what the launcher does, with the stand-in's server and ranks: it runs a command on rank 0 without MPI's
variables, a server beside it, and after a command that succeeded asks the server to stop.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quartet.discovery.base import Role
from quartet.engine.sampling import Sampling
from quartet.streams.client import DecodeClient
from services.workers import process as command
from tests import tiny
from tests.engine.trtllm.engines import stand_in
from tests.fakes.driving import STORY, greedy, token_ids_of
from tests.fakes.installation import DIRECTORY
from tests.services.stream_workers import collect, make_start
from tests.services.worker_processes import worker_process
from tests.streams.pulled import PullingDecodeClient

TIMEOUT_S = 60.0
LEADER = "tensorrt_llm.llmapi.mgmn_leader_node"


class Launch:
    """Ranks on this host, with the variables that the launcher sets."""

    def __init__(self, port: int, num_ranks: int) -> None:
        self._variables = {
            **os.environ,
            "PYTHONPATH": str(DIRECTORY / "launcher"),
            "TLLM_SPAWN_PROXY_PROCESS": "1",
            "TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR": f"tcp://127.0.0.1:{port}",
            "TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY": "00" * 32,
            "tllm_mpi_size": str(num_ranks),
        }
        self._processes: list[asyncio.subprocess.Process] = []

    async def run(self, rank: int, *arguments: str) -> asyncio.subprocess.Process:
        """Run a module of Python as ``rank``; rank 0 is told of no MPI."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *arguments),
            env={**self._variables, **({"SLURM_PROCID": str(rank)} if rank else {})},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._processes.append(process)
        return process

    async def end(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.communicate()


@pytest.fixture
async def launch(free_port: Callable[[], int]) -> AsyncIterator[Launch]:
    launch = Launch(free_port(), 2)
    yield launch
    await launch.end()


async def read_until(process: asyncio.subprocess.Process, line: str) -> str:
    """The output up to ``line``."""
    assert process.stdout is not None
    output = ""
    async with asyncio.timeout(TIMEOUT_S):
        while line not in output:
            read = await process.stdout.readline()
            assert read, f"it ended, and said: {output}"
            output += read.decode()
    return output


async def output_of(process: asyncio.subprocess.Process) -> str:
    """The rest of its output, once it has ended."""
    async with asyncio.timeout(TIMEOUT_S):
        return (await process.communicate())[0].decode()


async def test_another_rank_waits_without_serving_and_ends_with_a_rank_0_that_fails(
    launch: Launch, tmp_path: Path
) -> None:
    registry = tmp_path / "registry"
    files = ("--set", "discovery.kind=file", "--set", f"discovery.file.directory={registry}")
    worker = ("services.decode", "--engine", "trtllm", "--model", str(tiny.CHECKPOINT), *files)
    leader = await launch.run(0, LEADER)
    await read_until(leader, "the server waits")
    other = await launch.run(1, *worker, "--tensor-parallel-size", "2")
    said = await read_until(other, "a rank waits")
    assert "rank 1 does not serve: it works for rank 0" in said
    assert "serves on" not in said and not registry.exists()
    # Two ranks were started, and the model would take three.
    first = await launch.run(0, *worker, "--tensor-parallel-size", "3")
    refusal = await output_of(first)
    assert first.returncode == 1
    assert "--tensor-parallel-size: engine.tensor_parallel_size: the model takes 3 ranks" in refusal
    await asyncio.gather(output_of(leader), output_of(other))
    assert (leader.returncode, other.returncode) == (0, 0)


async def test_rank_0_serves_as_a_worker_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_SPAWN_PROXY_PROCESS", "1")
    monkeypatch.setenv("TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR", "tcp://127.0.0.1:10012")
    monkeypatch.setenv("tllm_mpi_size", "2")
    engine = {"kind": "trtllm", "dtype": "float32", "tensor_parallel_size": 2}
    with stand_in():
        expected = greedy(STORY, 8)
        async with worker_process(tmp_path, Role.DECODE, engine=engine) as worker:
            streams = DecodeClient(worker.record.worker_id, worker.channel, lambda _error: None)
            start = make_start(tuple(token_ids_of(STORY)))
            sampling = Sampling(temperature=0.0, max_tokens=8)
            start = replace(start, generation=replace(start.generation, sampling=sampling))
            assert await collect(PullingDecodeClient(streams).start(start)) == expected


@pytest.mark.parametrize(("engine", "level"), [("trtllm", "WARNING"), ("torch", None)])
def test_the_level_of_the_log_is_set_before_the_engine_is_made(
    engine: str, level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    async def run(*_arguments: object) -> None:
        seen.append(os.environ.get("TLLM_LOG_LEVEL"))

    def leave(_code: int) -> None:
        raise InterruptedError

    monkeypatch.setenv("TLLM_LOG_LEVEL", "")  # so that it is put back
    monkeypatch.delenv("TLLM_LOG_LEVEL")
    monkeypatch.setattr(command, "_run", run)
    monkeypatch.setattr(command, "configure", lambda _config: None)
    monkeypatch.setattr(command, "_leave", leave)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _seconds: None)
    monkeypatch.setattr(sys, "argv", ["decode", "--model", "m", "--engine", engine, "--set", "log.level=warning"])
    with pytest.raises(InterruptedError):
        runpy.run_module("services.decode", run_name="__main__")
    assert seen == [level]
