"""Requests that have ended are freed at once: the collector would stop all tokens for as long as it looks for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quartet.v1 import router_pb2 as pb
from quartet.v1 import types_pb2
from tests.garbage import garbage
from tests.router.http.face import open_face
from tests.router.system import TIMEOUT_S, Stub, running_system

NUM_REQUESTS = 5
#: Of the workers, which run in this process too, only what routers use as well.
OURS = ("router", "quartet.api", "quartet.streams")
PROMPT = list(range(3, 43))


async def generate(stub: Stub, *, leaves: bool) -> None:
    """Ask, and read all, or leave at the first token."""
    start = pb.GenerateStart(
        token_ids=pb.TokenIds(ids=PROMPT), sampling=types_pb2.Sampling(max_tokens=8, ignore_eos=True)
    )
    call = stub.Generate()
    await call.write(pb.GenerateRequest(start=start))
    await call.done_writing()
    async for part in call:
        if leaves and part.HasField("delta"):
            call.cancel()
            break


@pytest.mark.parametrize("leaves", [False, True])
async def test_requests_by_grpc_leave_nothing(leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("prefill-0", "decode-0")
    async with running_system(tmp_path, monkeypatch, *names) as (system, stub), asyncio.timeout(TIMEOUT_S):
        await generate(stub, leaves=leaves)
        await system.wait_idle()
        with garbage(*OURS) as left:
            for _ in range(NUM_REQUESTS):
                await generate(stub, leaves=leaves)
            await system.wait_idle()
        assert not left


@pytest.mark.parametrize("leaves", [False, True])
async def test_requests_by_http_leave_nothing(leaves: bool) -> None:
    async with open_face("prefill-0", "decode-0") as face:

        async def ask() -> None:
            body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "stream": True}
            async with face.session.post("/v1/completions", json=body) as response:
                await response.content.readline()
                if leaves:
                    response.close()
                else:
                    await response.read()
            await face.until_nothing_left()

        await ask()
        with garbage(*OURS) as left:
            for _ in range(NUM_REQUESTS):
                await ask()
        assert not left
