"""The router as a process of its own."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from pathlib import Path

import pytest

from quartet.rpc.health_check import is_serving

_TIMEOUT_S = 30.0


async def start(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "router", *arguments, stdout=PIPE, stderr=STDOUT)


async def read_until(process: Process, marker: str) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(_TIMEOUT_S):
        while line := (await process.stdout.readline()).decode():
            if marker in line:
                return line
    raise AssertionError(f"it ended without saying {marker!r}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_says_where_it_serves_and_ends_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    config = tmp_path / "router.yaml"
    config.write_text(
        f"server: {{address: '127.0.0.1:0'}}\ndiscovery: {{kind: file, file: {{directory: {tmp_path}}}}}\n"
    )
    process = await start("--config", str(config), "--set", "drain_timeout_s=3")
    try:
        line = await read_until(process, "router serving on ")
        address = line.split("router serving on ")[1].split()[0]
        assert await is_serving(address)
        assert await is_serving(address, service="quartet.v1.RouterService")
        process.send_signal(number)
        async with asyncio.timeout(_TIMEOUT_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("server.address=0.0.0.0:0", "insecure"),
        ("polciy=round_robin", "did you mean policy"),
        ("policy=best", "policy"),
        ("attempts.max_attempts=0", "max_attempts"),
        ("admission.queue_timeout_s=0", "queue_timeout_s"),
        ("drain_timeout_s=0", "drain_timeout_s"),
    ],
)
async def test_an_impossible_setting_ends_it_with_one_line_that_names_it(setting: str, said: str) -> None:
    process = await start("--set", setting)
    async with asyncio.timeout(_TIMEOUT_S):
        output, _ = await process.communicate()
    assert process.returncode == 1
    assert said in output.decode()
    assert len(output.decode().strip().splitlines()) == 1


async def test_it_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, router.__main__; assert not {'torch', 'transformers'} & set(sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    async with asyncio.timeout(_TIMEOUT_S):
        assert await process.wait() == 0
