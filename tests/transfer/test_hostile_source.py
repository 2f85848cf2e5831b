"""The puller against sources that lie, stall or die: a generated servicer plays them from a script."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import grpc
import pytest

from quartet.errors import (
    HandOffNotFoundError,
    LayoutMismatchError,
    TransferError,
    TransferTimeoutError,
    WorkerUnavailableError,
)
from quartet.kvcache.hand_off import HandOffState
from quartet.kvcache.layout import BlocksPayload, HandOff
from quartet.rpc.errors import from_pull_error
from quartet.transfer.base import PieceCopy
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.servicer import TransferServicer
from quartet.v1 import transfer_pb2 as pb
from quartet.v1.transfer_pb2_grpc import TransferServiceServicer, add_TransferServiceServicer_to_server
from tests.transfer.cuda_workers import gpu_puller
from tests.transfer.fake_cuda import FakeHost
from tests.transfer.workers import CONFIG, LAYOUT, Ended, puller_worker, source_worker

SIZE = LAYOUT.piece_size_bytes
GRANTED = pb.PullResponse(granted=pb.PullGranted(way=pb.TRANSFER_WAY_GRPC, piece_size_bytes=SIZE))
#: In a script: wait for the puller's next message.
RECEIVE = pb.PullResponse()
FINISHED = pb.PullResponse(finished=pb.PullFinished())
COPIES = (PieceCopy(0, 2), PieceCopy(1, 5))


def piece(index: int, data: bytes = b"\7" * SIZE, offset: int = 0) -> pb.PullResponse:
    return pb.PullResponse(piece=pb.Piece(index=index, offset_bytes=offset, data=data))


def granted(**fields: object) -> pb.PullResponse:
    return pb.PullResponse(granted=pb.PullGranted(**{"way": 1, "piece_size_bytes": SIZE, **fields}))


class ScriptedSource(TransferServiceServicer):
    """Sends its script whatever the puller sends, then waits for the puller to leave."""

    def __init__(self, *script: pb.PullResponse) -> None:
        self.script = script
        self.has_said_all = asyncio.Event()
        self.was_left = asyncio.Event()

    async def Pull(self, request_iterator, context) -> AsyncIterator[pb.PullResponse]:  # type: ignore[override]
        try:
            for response in self.script:
                if response is RECEIVE:
                    await anext(request_iterator)
                else:
                    yield response
            self.has_said_all.set()
            async for _request in request_iterator:
                pass
        finally:
            self.was_left.set()


@asynccontextmanager
async def scripted(*script: pb.PullResponse) -> AsyncIterator[tuple[ScriptedSource, HandOff]]:
    server = grpc.aio.server()
    source = ScriptedSource(*script)
    add_TransferServiceServicer_to_server(source, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield (
            source,
            HandOff(
                hand_off_id=bytes(16),
                secret=bytes(16),
                worker_id="liar",
                epoch=1,
                address=f"127.0.0.1:{port}",
                time_to_live=timedelta(seconds=10),
                payload=BlocksPayload(LAYOUT, 2 * LAYOUT.block_size),
            ),
        )
    finally:
        await server.stop(None)


async def test_an_ordinary_generated_server_is_pulled_from() -> None:
    halves = [piece(1, b"\1" * (SIZE // 2)), piece(1, b"\2" * (SIZE // 2), SIZE // 2)]
    async with (
        scripted(GRANTED, halves[0], piece(0), halves[1], RECEIVE, RECEIVE, FINISHED) as (_source, hand_off),
        puller_worker() as here,
    ):
        result = await here.puller.claim(hand_off).fetch(COPIES)
        assert result.size_bytes == 2 * SIZE
        assert here.memory.piece(2) == b"\7" * SIZE
        assert here.memory.piece(5) == b"\1" * (SIZE // 2) + b"\2" * (SIZE // 2)


LIES: dict[str, tuple[pb.PullResponse, ...]] = {
    "no grant": (FINISHED,),
    "a renewal that nobody asked for": (pb.PullResponse(renewed=pb.PullRenewed()),),
    "a piece before the grant": (piece(0),),
    "a way that was not offered": (granted(way=pb.TRANSFER_WAY_NIXL),),
    "a way that nobody knows": (granted(way=99),),
    "no way": (granted(way=0),),
    "a piece that was not asked for": (GRANTED, piece(7)),
    "a piece twice": (GRANTED, piece(0), piece(0)),
    "a piece that is too long": (GRANTED, piece(0, b"\7" * (SIZE + 1))),
    "parts with a hole": (GRANTED, piece(0, b"\7", 1)),
    "an offset of 64 bits": (GRANTED, piece(0, b"\7", 2**64 - 1)),
    "an empty part": (GRANTED, piece(0, b"")),
    "finished before all has come": (GRANTED, piece(0), FINISHED),
    "something else than finished": (GRANTED, piece(0), piece(1), GRANTED),
    "shm without places": (granted(way=pb.TRANSFER_WAY_SHM),),
    "shm at a socket that nobody serves": (
        granted(way=2, shm=pb.ShmDescriptor(socket_path="@nothing", token=b"t", pool_size_bytes=9, offsets=[0, 1])),
    ),
    "shm at a path that no socket can have": (
        granted(way=2, shm=pb.ShmDescriptor(socket_path="@" + "x" * 500, pool_size_bytes=9, offsets=[0, 1])),
    ),
    "grpc with places": (granted(shm=pb.ShmDescriptor(offsets=[0, 1])), piece(7)),
    "staged without pieces": (granted(way=pb.TRANSFER_WAY_STAGED), FINISHED),
    "a staged piece that is too long": (granted(way=pb.TRANSFER_WAY_STAGED), piece(0, b"\7" * (SIZE + 1))),
    "staged at no place": (granted(way=pb.TRANSFER_WAY_STAGED, shm=pb.ShmDescriptor(socket_path="@nothing")),),
    "staged at a socket that nobody serves": (
        granted(way=pb.TRANSFER_WAY_STAGED, shm=pb.ShmDescriptor(socket_path="@nothing", offsets=[0, 1])),
    ),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("memory", ["cpu", "gpu"])
async def test_lies_are_transfer_errors_and_the_source_is_left(lie: str, memory: str) -> None:
    pullers = gpu_puller(FakeHost()) if memory == "gpu" else puller_worker()
    async with scripted(RECEIVE, *LIES[lie]) as (source, hand_off), pullers as here:
        with pytest.raises(TransferError) as caught:
            await here.puller.claim(hand_off).fetch(COPIES)
        assert not isinstance(caught.value, TransferTimeoutError), "the lie was believed, and more was waited for"
        async with asyncio.timeout(30):
            await source.was_left.wait()


async def test_shared_memory_with_places_for_fewer_pieces_than_asked_for_is_a_transfer_error() -> None:
    async with source_worker() as owner, puller_worker() as here:
        shm = pb.ShmDescriptor(
            socket_path=owner.shm.socket_path,
            token=owner.shm.token,
            pool_size_bytes=owner.memory.size_bytes,
            offsets=[0],
        )
        async with scripted(RECEIVE, granted(way=pb.TRANSFER_WAY_SHM, shm=shm)) as (_source, hand_off):
            with pytest.raises(TransferError):
                await here.puller.claim(hand_off).fetch(COPIES)


async def test_staged_memory_that_is_left_is_not_read() -> None:
    async with source_worker() as owner, gpu_puller(FakeHost()) as here:
        shm = pb.ShmDescriptor(
            socket_path=owner.shm.socket_path,
            token=owner.shm.token,
            pool_size_bytes=owner.memory.size_bytes,
            offsets=[0, owner.memory.size_bytes - SIZE + 1],
        )
        async with scripted(RECEIVE, granted(way=pb.TRANSFER_WAY_STAGED, shm=shm)) as (_source, hand_off):
            with pytest.raises(TransferError, match="offsets are wrong"):
                await here.puller.claim(hand_off).fetch(COPIES)
        assert here.driver.count("copy_to_device") == 0


async def test_pieces_of_another_size_are_a_layout_mismatch() -> None:
    async with scripted(granted(piece_size_bytes=SIZE + 1)) as (_source, hand_off), puller_worker() as here:
        with pytest.raises(LayoutMismatchError):
            await here.puller.claim(hand_off).fetch(COPIES)


@pytest.mark.parametrize("script", [(), (GRANTED,), (GRANTED, piece(0)), (GRANTED, piece(0), piece(1))])
async def test_a_source_that_falls_silent_is_given_up(script: tuple[pb.PullResponse, ...]) -> None:
    config = dataclasses.replace(CONFIG, stall_timeout_s=0.2)
    async with scripted(*script) as (source, hand_off), puller_worker(config=config) as here:
        with pytest.raises(TransferTimeoutError):
            await here.puller.claim(hand_off).fetch(COPIES)
        async with asyncio.timeout(30):
            await source.was_left.wait()


async def test_a_pull_is_bounded_in_all_however_lively_the_source_is() -> None:
    config = TransferConfig(max_pull_s=0.3, stall_timeout_s=10)
    async with scripted(GRANTED, piece(0)) as (_source, hand_off), puller_worker(config=config) as here:
        with pytest.raises(TransferTimeoutError):
            await here.puller.claim(hand_off).fetch(COPIES)


async def test_a_cancelled_fetch_leaves_the_source_and_stays_cancelled() -> None:
    async with scripted(GRANTED, piece(0)) as (source, hand_off), puller_worker() as here:
        fetch = asyncio.create_task(here.puller.claim(hand_off).fetch(COPIES))
        await source.has_said_all.wait()
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        async with asyncio.timeout(30):
            await source.was_left.wait()


async def test_closing_the_puller_ends_a_fetch_with_an_error_not_with_a_cancellation() -> None:
    async with scripted(GRANTED, piece(0)) as (source, hand_off), puller_worker() as here:
        claimed, waiting = here.puller.claim(hand_off), here.puller.claim(hand_off)
        fetch = asyncio.create_task(claimed.fetch(COPIES))
        await source.has_said_all.wait()
        await here.puller.close()
        with pytest.raises(TransferError):
            await fetch
        with pytest.raises(TransferError):
            await waiting.fetch(COPIES)
        await waiting.release()
        with pytest.raises(TransferError):
            here.puller.claim(hand_off)


async def test_a_renewal_that_is_left_unanswered_does_not_lose_the_hand_off(monkeypatch: pytest.MonkeyPatch) -> None:
    was_swallowed = asyncio.Event()
    pull = TransferServicer.Pull

    async def pull_but_the_first(self: TransferServicer, requests, context) -> None:
        if not was_swallowed.is_set():
            was_swallowed.set()
            await asyncio.Event().wait()
        await pull(self, requests, context)

    monkeypatch.setattr(TransferServicer, "Pull", pull_but_the_first)
    async with source_worker(config=TransferConfig(hand_off_ttl_s=1.8)) as source, puller_worker() as here:
        claim = here.puller.claim(source.offer(1, (3, 4)))
        source.offer(2, ())  # not renewed: it expires when the other would have
        assert await source.end() == Ended(2, HandOffState.EXPIRED)
        assert was_swallowed.is_set()
        await claim.fetch([PieceCopy(0, 0)])


async def test_a_renewal_that_fails_is_tried_again_and_abort_is_bounded() -> None:
    async with scripted() as (source, hand_off), puller_worker() as here:
        claim = here.puller.claim(dataclasses.replace(hand_off, time_to_live=timedelta(seconds=0.3)))
        for _ in range(2):  # each renewal is left unanswered
            async with asyncio.timeout(30):
                await source.was_left.wait()
            source.was_left.clear()
        async with asyncio.timeout(60):
            await claim.release()


async def test_a_renewal_that_was_refused_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    num_asked, was_renewed = 0, asyncio.Event()

    async def ask(*_: object) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked < 3:
            raise WorkerUnavailableError("busy")
        was_renewed.set()

    async with scripted() as (_source, hand_off), puller_worker() as here:
        monkeypatch.setattr(here.puller, "ask", ask)
        claim = here.puller.claim(dataclasses.replace(hand_off, time_to_live=timedelta(seconds=0.1)))
        async with asyncio.timeout(30):
            await was_renewed.wait()
        claim.stop()


async def test_a_renewal_that_failed_is_repeated_after_a_third_of_the_usual_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    answers = iter([WorkerUnavailableError("busy"), TransferError("lost"), None, HandOffNotFoundError("ended")])

    async def ask(*_: object) -> None:
        if (error := next(answers)) is not None:
            raise error

    async def sleep(delay_s: float) -> None:
        pauses.append(delay_s)

    async with scripted() as (_source, hand_off), puller_worker() as here:
        monkeypatch.setattr(here.puller, "ask", ask)
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "sleep", sleep)
            claim = here.puller.claim(dataclasses.replace(hand_off, time_to_live=timedelta(seconds=9)))
            await asyncio.wait([claim.renewal])
    assert pauses == [3.0, 1.0, 1.0, 3.0]


def test_an_unknown_status_is_a_transfer_error() -> None:
    error = grpc.aio.AioRpcError(grpc.StatusCode.PERMISSION_DENIED, grpc.aio.Metadata(), grpc.aio.Metadata(), "no")
    assert type(from_pull_error(error)) is TransferError
    garbled = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), garbled, "no")
    assert type(from_pull_error(error)) is TransferError
