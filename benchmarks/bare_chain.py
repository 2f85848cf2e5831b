"""What two processes and a router between them pay for a hand-off with nothing but gRPC and threads.

The way of a disaggregated request from the last step of its prefill to the first of its decode, in processes of their
own (``benchmarks.bare_chain_processes``) that compute nothing, move nothing and have no code of Quartet's. Each ``->``
is a message over a stream that is open already, each ``~>`` a change between a thread and an event loop:

    prefill's thread, asleep for 10 ms   ~> its loop      the step's output (``EngineThread._tell``)
    prefill's loop    -> router's loop                    prefill's answer, with the hand-off
    router's loop     -> decode's loop                    decode's start
    decode's loop     ~> decode's thread ~> its loop      the request goes in, its ``Pull`` comes out
    decode's loop     -> prefill's loop                   ``begin``; the copy would be here; ``finish`` right behind it
    prefill's loop    -> decode's loop                    ``granted``, ``finished``
    decode's loop     ~> decode's thread                  ``Fetched``: the next step has the request in it

``begin`` and ``granted`` take no time of their own: ``finish`` does not wait for them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from benchmarks.bare_chain_processes import Sample

__all__ = ["BareChain", "Sample", "bare_chain"]

_MODULE = "benchmarks.bare_chain_processes"
_TIMEOUT_S = 60.0


class BareChain:
    """Three processes that are up; made by ``bare_chain``."""

    def __init__(self, router: Process) -> None:
        self._router = router

    async def measure(self) -> Sample:
        """Go the way once, and each part alone. Raises ``RuntimeError``: a process is gone."""
        assert self._router.stdin is not None, "made with a pipe"
        self._router.stdin.write(b"\n")
        return Sample(**json.loads(await _line(self._router)))


@asynccontextmanager
async def bare_chain() -> AsyncIterator[BareChain]:
    """Start the processes, and end them after the block. Raises ``RuntimeError``: one did not start."""
    async with AsyncExitStack() as exits:
        prefill = f"127.0.0.1:{int(await _line(await _start(exits, 'prefill')))}"
        decode = f"127.0.0.1:{int(await _line(await _start(exits, 'decode', prefill)))}"
        yield BareChain(await _start(exits, "router", prefill, decode))


async def _start(exits: AsyncExitStack, *arguments: str) -> Process:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", _MODULE, *arguments, stdin=PIPE, stdout=PIPE)
    exits.push_async_callback(_end, process)
    return process


async def _line(process: Process) -> bytes:
    assert process.stdout is not None, "made with a pipe"
    async with asyncio.timeout(_TIMEOUT_S):
        line = await process.stdout.readline()
    if not line:
        raise RuntimeError("a process of the bare chain has ended")
    return line


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
