"""``quartet up configs/global.yaml --tls``: targets move requests between pools, and a pool dies."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from quartet.client import Delta, QuartetClient, Sampling
from quartet.rpc.channels import TlsConfig
from tests import tiny
from tests.e2e.fork_server import ForkServer
from tests.e2e.up import CONFIGS, Up

pytestmark = pytest.mark.usefixtures("etcd_binary")

# Ten processes start, on a machine that may be busy.
TIMEOUT_S = 180.0
PROMPT = "Once upon a time there was a sea."
SAMPLING = Sampling(max_tokens=64, temperature=0.8, ignore_eos=True)
FAST, SLOW = {"ttft_target_s": 0.1, "itl_target_s": 0.01}, {"ttft_target_s": 0.9, "itl_target_s": 0.04}
OPTIONS = ("--tls", "--router-port", "0", "--set", f"model.path={tiny.CHECKPOINT}")


def identity(directory: Path, name: str) -> TlsConfig:
    """A certificate of the run."""
    [made] = (directory / ".run").glob("*/certificates/grpc")
    return TlsConfig(ca_file=made / "ca.pem", cert_file=made / f"{name}.pem", key_file=made / f"{name}.key")


def kill(up: Up, *names: str) -> None:
    """End these processes at once."""
    found = [pid for pid, command in up.processes().items() if any(f"/{name}.yaml" in command for name in names)]
    assert len(found) == len(names)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def placed(client: QuartetClient, targets: dict[str, float]) -> tuple[str, str, tuple[int, ...]]:
    """Where a request is prefilled and decoded, and its tokens; its blocks were moved."""
    whole = await client.complete(PROMPT, sampling=SAMPLING, seed=7, **targets)
    [placement], [choice] = whole.accepted.choices, whole.choices
    assert placement.prefill is not None and choice.finished.time.transfer_bytes > 0
    return placement.prefill.worker_id, placement.decode.worker_id, choice.token_ids


async def test_targets_choose_pools_and_an_answer_outlives_its_pool(tmp_path: Path, fork_server: ForkServer) -> None:
    started = Up(tmp_path, str(CONFIGS / "global.yaml"), *OPTIONS, python=fork_server.python)
    async with started as up, asyncio.timeout(TIMEOUT_S):
        await up.wait_ready()
        async with QuartetClient(up.router_address, tls=identity(tmp_path, "client")) as client:
            prefill, decode, tokens = await placed(client, FAST)
            assert (prefill, decode, len(tokens)) == ("prefill-fast", "decode-fast.decode-0", 64)
            assert await placed(client, SLOW) == ("prefill-slow", "decode-slow.decode-1", tokens)
            is_killed, disturbed = False, list[int]()
            async for part in client.generate(PROMPT, sampling=SAMPLING, seed=7, path="session", **SLOW):
                if isinstance(part, Delta):
                    disturbed += part.token_ids
                    if len(disturbed) > 4 and not is_killed:
                        is_killed = True
                        kill(up, "router-decode-slow", "decode-1")
            assert tuple(disturbed) == tokens
            # A pool that prefills may die, too.
            kill(up, "prefill-1", "router-prefill-slow")
            assert (await placed(client, SLOW))[2] == tokens
        await up.wait_logged("router-decode-slow serves again")
        await up.end(signal.SIGINT)
