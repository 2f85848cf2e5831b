"""A message there and one back over an open stream, with nothing but gRPC: what a machine makes two processes pay.

Each pair follows a pause, as the messages of a single request do: waking processes is most of what it takes.

    python -m benchmarks.round_trip      (an echo server, which prints its port; ``round_trip_ms`` starts it)
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import PIPE
from statistics import median
from typing import Any, TypeAlias

import grpc
import uvloop

from quartet.rpc.channels import create_channel
from quartet.rpc.server import RpcServer, ServerConfig, Service

_SERVICE = "quartet.round_trip.Echo"
_MESSAGE = bytes(200)
_NUM_WARM_UP, _NUM_MEASURED = 20, 100
_PAUSE_S = 0.01
_TIMEOUT_S = 60.0

_Call: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


async def round_trip_ms() -> float:
    """The median, in milliseconds. Raises ``RuntimeError`` where the echo server did not start."""
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.round_trip", stdin=PIPE, stdout=PIPE
    )
    assert server.stdout is not None, "made with a pipe"
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            port = await server.stdout.readline()
            if not port:
                raise RuntimeError("the echo server did not start")
            return await _measure(f"127.0.0.1:{int(port)}")
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()


async def _measure(address: str) -> float:
    found = []
    async with create_channel(address, None) as channel:
        call: _Call = channel.stream_stream(f"/{_SERVICE}/Stream")(wait_for_ready=True)
        for _ in range(_NUM_WARM_UP + _NUM_MEASURED):
            await asyncio.sleep(_PAUSE_S)
            began = time.perf_counter()
            await call.write(_MESSAGE)
            await call.read()
            found.append(1e3 * (time.perf_counter() - began))
    return median(found[_NUM_WARM_UP:])


async def _echo(_requests: object, context: _Context) -> None:
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(message)


async def _serve() -> None:
    handler = grpc.method_handlers_generic_handler(_SERVICE, {"Stream": grpc.stream_stream_rpc_method_handler(_echo)})
    service = Service(_SERVICE, lambda server: server.add_generic_rpc_handlers((handler,)))
    server = RpcServer(ServerConfig(address="127.0.0.1:0"), [service])
    print(await server.start(), flush=True)
    # It ends with whoever started it.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.drain(0)


if __name__ == "__main__":
    uvloop.run(_serve())
