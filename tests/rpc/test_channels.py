"""What a channel reports, how much it lets come unread, and that gRPC's poller yields while the program does not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from quartet.rpc.channels import create_channel, watch_connection, yielding_poller

WAIT_S = 30.0


async def serve(port: int = 0) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server()
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, bound


class SeenChannel:
    """A channel that sets an event when its watcher has seen it connected."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self.wait_for_state_change = channel.wait_for_state_change
        self.seen_ready = asyncio.Event()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        state = self._channel.get_state(try_to_connect)
        if state is grpc.ChannelConnectivity.READY:
            self.seen_ready.set()
        return state


async def test_each_lost_connection_is_reported_also_without_calls() -> None:
    server, port = await serve()
    lost: asyncio.Queue[None] = asyncio.Queue()
    async with asyncio.timeout(WAIT_S), create_channel(f"127.0.0.1:{port}", None) as channel:
        seen = SeenChannel(channel)
        watch = watch_connection(seen, lambda: lost.put_nowait(None))  # type: ignore[arg-type]
        watching = asyncio.create_task(watch)
        await channel.channel_ready()  # as the first call does
        for _ in range(3):
            await seen.seen_ready.wait()
            await server.stop(None)
            await lost.get()
            seen.seen_ready.clear()
            server, _ = await serve(port)
        assert lost.empty()
        watching.cancel()
        await server.stop(None)


async def test_what_a_reader_has_not_asked_for_waits_at_the_sender() -> None:
    num_written, message = 0, bytes(500)

    async def write(_request: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        nonlocal num_written
        while True:
            await context.write(message)
            num_written += 1

    async def count(_request: bytes, _context: object) -> bytes:
        return str(num_written).encode()

    methods = {
        "Write": grpc.unary_stream_rpc_method_handler(write),
        "Count": grpc.unary_unary_rpc_method_handler(count),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(WAIT_S), create_channel(f"127.0.0.1:{port}", None) as channel:
        call = channel.unary_stream("/test.Test/Write")(b"")
        await call.read()
        counts = [b""]
        while len(set(counts)) > 1 or len(counts) < 50:  # each asks once more, over the same connection
            counts = [*counts[-49:], await channel.unary_unary("/test.Test/Count")(b"")]
        call.cancel()
    await server.stop(None)
    assert 1 <= int(counts[0]) <= 16, "4 KiB, what was read, and what gRPC holds of its own"


# In a process of its own: gRPC starts its poller once.
_PROGRAM = """
import asyncio, os, grpc
from quartet.rpc.channels import yielding_poller

def policies():
    return [os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")]

async def main():
    assert policies() == [os.SCHED_OTHER]
    with yielding_poller():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
        print(policies().count(os.SCHED_BATCH))
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                await channel.unary_unary("/none/None")(b"", timeout=30)
            except grpc.aio.AioRpcError as error:
                print(error.code().name)
        await server.stop(None)

asyncio.run(main())
"""


def test_only_grpcs_own_threads_yield_and_calls_go_on() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[2],
        text=True,
        timeout=60,
    )
    num_yielding, status = ended.stdout.split()
    assert int(num_yielding) >= 1
    assert status == "UNIMPLEMENTED"


async def test_if_the_scheduling_policy_may_not_be_changed_the_poller_runs_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_thread: int, _policy: int, _parameter: os.sched_param) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with yielding_poller():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


async def test_a_scheduling_policy_that_was_already_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[int] = []
    monkeypatch.setattr(os, "sched_getscheduler", lambda _thread: os.SCHED_FIFO)
    monkeypatch.setattr(os, "sched_setscheduler", lambda _thread, policy, _parameter: changes.append(policy))
    with yielding_poller():
        assert changes == []
