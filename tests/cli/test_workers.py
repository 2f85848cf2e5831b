"""``quartet workers``: one row a worker, whole also where the output is no terminal."""

from __future__ import annotations

from quartet.v1 import kv_events_pb2, router_pb2, transfer_pb2, worker_pb2
from tests.cli.conftest import RunCli
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter, worker_status


def rows(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if "│" in line]


async def test_every_worker_has_a_row(start_router: StartRouter, run_cli: RunCli) -> None:
    router = FakeRouter()
    long_id = "decode-" + "x" * 60
    joining = worker_status("prefill-0", worker_pb2.WORKER_ROLE_PREFILL, router_pb2.WORKER_STATE_JOINING)
    joining.ClearField("load")
    loaded = worker_status(
        long_id,
        num_running=3,
        max_running=64,
        num_waiting=1,
        max_step_tokens=2048,
        num_in_use_blocks=10,
        num_held_blocks=4,
        num_cached_blocks=20,
        num_free_blocks=30,
    )
    loaded.load.transfers.extend(
        [
            kv_events_pb2.TransferTotal(way=transfer_pb2.TRANSFER_WAY_GRPC, size_bytes=10**9, duration_s=2.0),
            kv_events_pb2.TransferTotal(way=transfer_pb2.TRANSFER_WAY_SHM, size_bytes=10**10, duration_s=3.0),
        ]
    )
    loaded.record.transfer_ways.extend([transfer_pb2.TRANSFER_WAY_SHM, transfer_pb2.TRANSFER_WAY_GRPC])
    router.workers = [loaded, joining]
    result = await run_cli("workers", "--router", await start_router(router))
    assert result.exit_code == 0
    decode, prefill = rows(result.stdout)
    assert decode == [
        long_id, "decode", "tiny", "127.0.0.1:6001", "shm, grpc", "shm 3.33 GB/s, grpc 0.5 GB/s", "ready",
        "3 of 64", "1", "2048", "10", "4", "20", "30", "0.4 s ago"
    ]  # fmt: skip
    assert prefill == ["prefill-0", "prefill", "tiny", "127.0.0.1:6001", "-", "-", "joining", *["-"] * 8]


async def test_a_worker_that_the_router_does_not_speak_to_shows_its_version(
    start_router: StartRouter, run_cli: RunCli
) -> None:
    router = FakeRouter()
    newer = worker_status("decode-1", state=router_pb2.WORKER_STATE_INCOMPATIBLE)
    newer.record.contract_version, newer.record.model_name = "quartet.v2", "[/]"
    newer.ClearField("load")
    router.workers = [newer]
    result = await run_cli("workers", "--router", await start_router(router))
    assert rows(result.stdout) == [
        ["decode-1", "decode", "[/]", "127.0.0.1:6001", "-", "-", "incompatible (quartet.v2)", *["-"] * 8]
    ]


async def test_a_watch_shows_the_last_state_until_the_router_goes(start_router: StartRouter, run_cli: RunCli) -> None:
    router = FakeRouter()
    router.workers = [worker_status("decode-0"), worker_status("decode-1")]
    router.watch_is_bounded = True
    router.changes.put_nowait(router_pb2.WatchWorkersResponse(removed_worker_ids=["decode-0"]))
    result = await run_cli("workers", "--watch", "--router", await start_router(router))
    assert result.exit_code == 0
    assert [row[0] for row in rows(result.stdout)][-1] == "decode-1"
