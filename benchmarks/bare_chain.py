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

It goes twice: with bytes that nobody reads, and with the contract's messages in full (``benchmarks.contract_chain``).
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc

from benchmarks import contract_chain
from benchmarks.bare_chain_parts import open_stream

_MODULE = "benchmarks.bare_chain_processes"
_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look at what a machine makes such processes pay, each after a pause. In milliseconds.

    Attributes:
        chain_ms: from the end of the prefill's step to the beginning of the decode's, both in their threads.
        contract_chain_ms: the same with the contract's messages.
        thread_change_ms: from an event loop to a thread that sleeps, and back.
        round_trip_ms: a message there and one back over an open stream.
    """

    chain_ms: float
    contract_chain_ms: float
    thread_change_ms: float
    round_trip_ms: float


class BareChain:
    """Three processes that are up, and their client; made by ``bare_chain``."""

    def __init__(self, router: Process, channel: grpc.aio.Channel) -> None:
        """Ask ``router`` for the bare chain, and through ``channel``, which leads there, for the contract's."""
        self._router = router
        self._channel = channel

    async def measure(self, token_ids: Sequence[int]) -> Sample:
        """Go the way once each, with the prompt ``token_ids`` in the contract's messages, and each part alone.

        Raises:
            RuntimeError: a process is gone.
        """
        assert self._router.stdin is not None, "made with a pipe"
        self._router.stdin.write(b"\n")
        bare: dict[str, float] = json.loads(await _line(self._router))
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                contract_chain_ms = await contract_chain.ask(open_stream(self._channel, "ContractGenerate"), token_ids)
        except (EOFError, grpc.aio.AioRpcError) as error:
            raise RuntimeError(f"a process of the contract's chain has ended: {error!r}") from error
        return Sample(**bare, contract_chain_ms=contract_chain_ms)


@asynccontextmanager
async def bare_chain() -> AsyncIterator[BareChain]:
    """Start the processes, and end them after the block. Raises ``RuntimeError``: one did not start."""
    async with AsyncExitStack() as exits:
        prefill = f"127.0.0.1:{int(await _line(await _start(exits, 'prefill')))}"
        decode = f"127.0.0.1:{int(await _line(await _start(exits, 'decode', prefill)))}"
        router = await _start(exits, "router", prefill, decode)
        address = f"127.0.0.1:{int(await _line(router))}"
        yield BareChain(router, await exits.enter_async_context(grpc.aio.insecure_channel(address)))


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
