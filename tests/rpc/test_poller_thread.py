"""gRPC's poller yields; the threads of the program don't."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quartet.rpc.channels import yielding_poller

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


async def test_where_policies_may_not_be_changed_it_runs_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: int, _policy: int, _parameter: os.sched_param) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with yielding_poller():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


async def test_a_policy_that_somebody_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[int] = []
    monkeypatch.setattr(os, "sched_getscheduler", lambda _thread: os.SCHED_FIFO)
    monkeypatch.setattr(os, "sched_setscheduler", lambda _thread, policy, _parameter: changes.append(policy))
    with yielding_poller():
        assert changes == []
