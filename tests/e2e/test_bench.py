"""``quartet bench`` against real services: its figures, and its end by Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import signal
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import pytest

from quartet.client import QuartetClient
from tests import tiny
from tests.e2e.fork_server import ForkServer
from tests.e2e.stack import Stack
from tests.e2e.up import QUARTET

NUM_REQUESTS, NUM_TOKENS = 6, 12
END_TIMEOUT_S = 60.0


async def start_bench(quartet: Path, stack: Stack, *options: str) -> Process:
    command = ("bench", "--router", stack.router_address, "--json", "-", *options)
    return await asyncio.create_subprocess_exec(quartet, *command, stdout=PIPE, stderr=PIPE)


async def read_report(bench: Process, exit_code: int) -> Any:
    async with asyncio.timeout(END_TIMEOUT_S):
        out, err = await bench.communicate()
    assert bench.returncode == exit_code, err.decode()
    return json.loads(out)


async def wait_for_requests(client: QuartetClient, counts: range) -> None:
    """Wait until the router counts a number of requests that is among ``counts``."""
    async with asyncio.timeout(END_TIMEOUT_S):
        async for workers in client.watch_workers():
            if sum(worker.num_requests for worker in workers) in counts:
                return


@pytest.mark.parametrize(
    "load",
    [
        "--concurrency 3 --plot {picture}",
        "--rate 3",
        "--concurrency 3 --path session",
        "--concurrency 3 --path direct",
    ],
)
async def test_every_token_is_counted_and_the_hops_are_shown(
    stack: Stack, tmp_path: Path, load: str, fork_server: ForkServer
) -> None:
    picture = tmp_path / "bench.png"
    options = f"{load} --requests {NUM_REQUESTS} --output-tokens {NUM_TOKENS} --prompt-tokens 40-80 --warmup 0"
    bench = await start_bench(fork_server.quartet, stack, *options.format(picture=picture).split())
    report = await read_report(bench, 0)
    assert report["model"]["name"] == tiny.NAME
    [point] = report["points"]
    assert point["requests"] == {"sent": NUM_REQUESTS, "finished": NUM_REQUESTS, "failed": 0, "cut_off": 0}
    assert (point["output_tokens"], point["finish_reasons"]) == (NUM_REQUESTS * NUM_TOKENS, {"length": NUM_REQUESTS})
    assert point["ttft_ms"]["count"] == point["e2e_ms"]["count"] == NUM_REQUESTS
    assert 0 < point["ttft_ms"]["p50"] < point["e2e_ms"]["p50"]
    assert point["itl_ms"]["count"] <= NUM_REQUESTS * (NUM_TOKENS - 1)
    # Prefill is remote here: its hop, the transfer and decode all took some of the time.
    assert all(point["hops"][hop]["mean_ms"] > 0 for hop in ("prefill", "transfer", "decode"))
    assert sum(hop["share"] for hop in point["hops"].values()) == pytest.approx(1.0, abs=1e-4)  # each is rounded
    assert not picture.exists() or picture.stat().st_size > 0
    assert picture.exists() == ("--plot" in load)


async def test_ctrl_c_shows_what_was_measured_and_leaves_nothing_behind(stack: Stack, client: QuartetClient) -> None:
    # Those of an earlier test that came by no router count until the next report of load: bench would not run yet.
    await wait_for_requests(client, range(1))
    bench = await start_bench(QUARTET, stack, *"--concurrency 2 --output-tokens 2000 --duration 600 --warmup 0".split())
    try:
        await wait_for_requests(client, range(2, 5))
        bench.send_signal(signal.SIGINT)
        report = await read_report(bench, 130)
    finally:
        if bench.returncode is None:
            bench.kill()
    [point] = report["points"]
    assert report["is_interrupted"] and point["is_interrupted"]
    assert point["requests"] == {"sent": 2, "finished": 0, "failed": 0, "cut_off": 2}
    await asyncio.to_thread(stack.wait_blocks_returned, timeout_s=25)
