"""The three processes of ``benchmarks.bare_chain``: gRPC, an event loop, a thread, and nothing of Quartet.

    python -m benchmarks.bare_chain_processes prefill | decode PREFILL | router PREFILL DECODE

Each prints the port that it listens on. ``router`` measures once for each line that it reads, and prints that as JSON;
``benchmarks.contract_chain`` is asked over gRPC. All end when their input does; addresses are ``host:port``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import grpc
import uvloop

from benchmarks.bare_chain_parts import (
    PAUSE_S,
    Call,
    Context,
    StepThread,
    between_ms,
    open_stream,
    read_bytes,
    serve,
    stamp,
    start_server,
    step,
)
from benchmarks.contract_chain import ContractDecode, ContractPrefill, ContractRouter

# About as long as the messages of a request with a prompt of 128 tokens.
_START, _ANSWER_PADDING = bytes(1000), bytes(400)
_BEGIN, _GRANTED, _FINISH, _FINISHED = bytes(100), bytes(120), bytes(2), bytes(3)


async def _run_prefill() -> None:
    thread = StepThread()
    contract = ContractPrefill(thread)

    async def prefill(_requests: object, context: Context) -> None:
        while await context.read() is not grpc.aio.EOF:
            ended = await thread.run(step)
            await context.write(ended + _ANSWER_PADDING)

    async def pull(_requests: object, context: Context) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(_GRANTED if message == _BEGIN else _FINISHED)

    await serve(
        {
            "Prefill": prefill,
            "Pull": pull,
            "Echo": _echo,
            "ContractPrefill": contract.prefill,
            "ContractPull": contract.pull,
        }
    )


async def _run_decode(prefill_address: str) -> None:
    thread = StepThread()
    async with grpc.aio.insecure_channel(prefill_address) as channel:
        pull = open_stream(channel, "Pull")
        contract = ContractDecode(thread, open_stream(channel, "ContractPull"))

        async def decode(_requests: object, context: Context) -> None:
            while await context.read() is not grpc.aio.EOF:
                await thread.run(_nothing)
                answers = asyncio.ensure_future(_read_two(pull))
                await pull.write(_BEGIN)
                await pull.write(_FINISH)
                await answers
                await context.write(await thread.run(stamp))

        await serve({"Decode": decode, "ContractDecode": contract.decode})


async def _run_router(prefill_address: str, decode_address: str) -> None:
    thread = StepThread()
    async with AsyncExitStack() as exits:
        to_prefill = await exits.enter_async_context(grpc.aio.insecure_channel(prefill_address))
        to_decode = await exits.enter_async_context(grpc.aio.insecure_channel(decode_address))
        prefill, decode = open_stream(to_prefill, "Prefill"), open_stream(to_decode, "Decode")
        echo = open_stream(to_prefill, "Echo")
        contract = ContractRouter(open_stream(to_prefill, "ContractPrefill"), open_stream(to_decode, "ContractDecode"))
        server = await start_server({"ContractGenerate": contract.generate})
        exits.push_async_callback(server.stop, None)
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while await lines.readline():
            measured = {
                "chain_ms": await _chain_ms(prefill, decode),
                "thread_change_ms": await _thread_change_ms(thread),
                "round_trip_ms": await _round_trip_ms(echo),
            }
            print(json.dumps(measured), flush=True)


async def _chain_ms(prefill: Call, decode: Call) -> float:
    await prefill.write(_START)
    answer = await read_bytes(prefill)
    await decode.write(_START)
    return between_ms(answer, await read_bytes(decode))


async def _thread_change_ms(thread: StepThread) -> float:
    await asyncio.sleep(PAUSE_S)
    began = time.perf_counter()
    await thread.run(_nothing)
    return 1e3 * (time.perf_counter() - began)


async def _round_trip_ms(echo: Call) -> float:
    await asyncio.sleep(PAUSE_S)
    began = time.perf_counter()
    await echo.write(_ANSWER_PADDING)
    await echo.read()
    return 1e3 * (time.perf_counter() - began)


async def _read_two(call: Call) -> None:
    await call.read()
    await call.read()


async def _echo(_requests: object, context: Context) -> None:
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(message)


def _nothing() -> None:
    """Only the changes of thread."""


if __name__ == "__main__":
    _RUNS: Mapping[str, Callable[..., Any]] = {"prefill": _run_prefill, "decode": _run_decode, "router": _run_router}
    uvloop.run(_RUNS[sys.argv[1]](*sys.argv[2:]))
