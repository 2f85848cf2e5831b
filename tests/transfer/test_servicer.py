"""The Pull method as any client sees it: a generated stub, in every order of messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from quartet.discovery.host import host_identity
from quartet.kvcache.hand_off import HandOffState
from quartet.kvcache.layout import HandOff
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.messages import host_to_pb, ticket_to_pb
from quartet.v1 import transfer_pb2 as pb
from quartet.v1.transfer_pb2_grpc import TransferServiceStub
from tests.transfer.workers import LARGE_LAYOUT, Ended, SourceWorker, open_channel, source_worker

BLOCKS = (3, 4, 9, 0)
FINISH = pb.PullRequest(finish=pb.PullFinish())
HERE = host_to_pb(host_identity())


def begin(hand_off: HandOff, *pieces: int, **fields: object) -> pb.PullRequest:
    return pb.PullRequest(begin=pb.PullBegin(ticket=ticket_to_pb(hand_off), pieces=pieces, **fields))


def renew(hand_off: HandOff | None = None) -> pb.PullRequest:
    return pb.PullRequest(renew=pb.PullRenew(ticket=ticket_to_pb(hand_off) if hand_off else None))


def abort(hand_off: HandOff | None = None) -> pb.PullRequest:
    return pb.PullRequest(abort=pb.PullAbort(ticket=ticket_to_pb(hand_off) if hand_off else None))


@asynccontextmanager
async def pull(source: SourceWorker) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    async with open_channel(source.address) as channel, asyncio.timeout(30):
        yield TransferServiceStub(channel).Pull()


async def say(source: SourceWorker, *requests: pb.PullRequest) -> list[pb.PullResponse]:
    """Send all and half-close, as grpcurl does; the answers."""
    async with open_channel(source.address) as channel:
        return [response async for response in TransferServiceStub(channel).Pull(iter(requests), timeout=30)]


async def refusal(source: SourceWorker, *requests: pb.PullRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await say(source, *requests)
    return caught.value.code(), reason_of(caught.value)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    info = error_details_pb2.ErrorInfo()
    details = dict(error.trailing_metadata())["grpc-status-details-bin"]
    status_pb2.Status.FromString(details).details[0].Unpack(info)
    return info.reason


async def test_a_generated_client_gets_granted_pieces_finished() -> None:
    async with source_worker(layout=LARGE_LAYOUT) as source:
        granted, *parts, finished = await say(source, begin(source.offer(1, BLOCKS), 1, 2), FINISH)
        assert granted.granted == pb.PullGranted(
            way=pb.TRANSFER_WAY_GRPC, piece_size_bytes=LARGE_LAYOUT.piece_size_bytes
        )
        for piece in (1, 2):
            data = b"".join(part.piece.data for part in parts if part.piece.index == piece)
            assert data == source.memory.piece(BLOCKS[piece])
        assert max(part.ByteSize() for part in parts) <= 1 << 20
        assert finished.HasField("finished")
        assert await source.end() == Ended(1, HandOffState.TAKEN)


async def test_shm_sends_the_positions_of_the_pieces_and_no_bytes() -> None:
    async with source_worker() as source:
        ways = [99, pb.TRANSFER_WAY_CUDA_IPC, pb.TRANSFER_WAY_SHM, pb.TRANSFER_WAY_GRPC]
        granted, finished = await say(source, begin(source.offer(1, BLOCKS), 1, 2, ways=ways, host=HERE), FINISH)
        assert granted.granted.way == pb.TRANSFER_WAY_SHM
        assert list(granted.granted.shm.offsets) == [4 * 1024, 9 * 1024]
        assert finished.HasField("finished")


@pytest.mark.parametrize("host", [None, pb.HostIdentity(boot_id=HERE.boot_id, ipc_namespace="ipc:[1]")])
async def test_the_first_way_that_can_be_served_is_taken(host: pb.HostIdentity | None) -> None:
    async with source_worker() as source:
        ways = [pb.TRANSFER_WAY_SHM, pb.TRANSFER_WAY_GRPC]
        granted, *_ = await say(source, begin(source.offer(1, BLOCKS), ways=ways, host=host), FINISH)
        assert granted.granted.way == pb.TRANSFER_WAY_GRPC


async def test_a_stream_that_breaks_after_begin_cancels_and_one_before_does_nothing() -> None:
    async with source_worker() as source:
        hand_off = source.offer(1, BLOCKS)
        async with pull(source) as call:
            await call.write(renew(hand_off))
            assert (await call.read()).HasField("renewed")
            call.cancel()
        async with pull(source) as call:
            await call.write(begin(hand_off, 0))
            assert (await call.read()).HasField("granted")
            assert source.source.counts.pulling == 1
            call.cancel()
        assert await source.end() == Ended(1, HandOffState.CANCELLED)
        assert await refusal(source, begin(hand_off)) == (grpc.StatusCode.NOT_FOUND, "HAND_OFF_NOT_FOUND")


async def test_a_stream_lost_in_the_middle_of_its_pieces_cancels() -> None:
    async with source_worker(layout=LARGE_LAYOUT) as source:
        async with pull(source) as call:
            await call.write(begin(source.offer(1, BLOCKS), 0, 1, 2, 3))
            assert (await call.read()).HasField("granted")
            assert (await call.read()).HasField("piece")
            call.cancel()
        assert await source.end() == Ended(1, HandOffState.CANCELLED)


async def test_closing_the_sending_side_without_finish_cancels() -> None:
    async with source_worker() as source:
        responses = await say(source, begin(source.offer(1, BLOCKS)))
        assert [response.WhichOneof("message") for response in responses] == ["granted"]
        assert await source.end() == Ended(1, HandOffState.CANCELLED)


async def test_abort_ends_a_hand_off_held_or_pulled() -> None:
    async with source_worker() as source:
        assert (await say(source, abort(source.offer(1, BLOCKS))))[-1].HasField("aborted")
        assert await source.end() == Ended(1, HandOffState.CANCELLED)
        assert (await say(source, begin(source.offer(2, BLOCKS)), abort()))[-1].HasField("aborted")
        assert await source.end() == Ended(2, HandOffState.CANCELLED)


async def test_blocks_of_a_hand_off_that_another_caller_aborted_are_sent_no_further() -> None:
    async with source_worker(layout=LARGE_LAYOUT) as source:
        hand_off = source.offer(1, tuple(range(12)))
        async with pull(source) as call:
            await call.write(begin(hand_off, *range(12)))
            assert (await call.read()).HasField("granted")
            await say(source, abort(hand_off))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while True:
                    assert not (await call.read()).HasField("finished")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert await source.end() == Ended(1, HandOffState.CANCELLED)
        assert source.ends.empty()


async def test_renewals_say_the_time_to_live_before_and_after_begin() -> None:
    async with source_worker(config=TransferConfig(hand_off_ttl_s=2.5)) as source:
        hand_off = source.offer(1, BLOCKS)
        responses = await say(source, renew(hand_off), begin(hand_off), renew(), renew(hand_off), FINISH)
        renewed = [r.renewed.time_to_live.ToMilliseconds() for r in responses if r.HasField("renewed")]
        assert renewed == [2500, 2500, 2500]
        assert responses[-1].HasField("finished")


async def test_a_second_begin_elsewhere_is_a_failed_precondition_and_leaves_the_first_pull_intact() -> None:
    async with source_worker() as source:
        hand_off = source.offer(1, BLOCKS)
        async with pull(source) as call:
            await call.write(begin(hand_off))
            await call.read()
            assert await refusal(source, begin(hand_off)) == (grpc.StatusCode.FAILED_PRECONDITION, "HAND_OFF_STATE")
            await call.write(FINISH)
            assert (await call.read()).HasField("finished")


async def test_another_epoch_is_a_failed_precondition_with_its_own_reason() -> None:
    async with source_worker() as source:
        request = begin(source.offer(1, BLOCKS))
        request.begin.ticket.worker_epoch += 1
        assert await refusal(source, request) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")


HOSTILE: dict[str, Callable[[HandOff], list[pb.PullRequest]]] = {
    "nothing said": lambda _: [pb.PullRequest()],
    "finish first": lambda _: [FINISH],
    "renew without a ticket": lambda _: [renew()],
    "abort without a ticket": lambda _: [abort()],
    "two begins": lambda hand_off: [begin(hand_off), begin(hand_off)],
    "a piece too far": lambda hand_off: [begin(hand_off, 4)],
    "the same piece twice": lambda hand_off: [begin(hand_off, 1, 1)],
    "a piece of 32 bits": lambda hand_off: [begin(hand_off, 2**32 - 1)],
    "ways that nobody speaks": lambda hand_off: [begin(hand_off, ways=[77])],
    "more ways than there are": lambda hand_off: [begin(hand_off, ways=[77] * 16 + [pb.TRANSFER_WAY_GRPC])],
    "shm from elsewhere only": lambda hand_off: [begin(hand_off, ways=[pb.TRANSFER_WAY_SHM])],
}


@pytest.mark.parametrize("opening", HOSTILE)
async def test_hostile_openings_are_invalid_and_the_server_serves_on(opening: str) -> None:
    async with source_worker() as source:
        code, _reason = await refusal(source, *HOSTILE[opening](source.offer(1, BLOCKS)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert (await say(source, begin(source.offer(2, BLOCKS), 0), FINISH))[-1].HasField("finished")


async def test_a_puller_that_never_finishes_is_ended_in_bounded_time() -> None:
    async with source_worker(config=TransferConfig(max_pull_s=0.2)) as source, pull(source) as call:
        await call.write(begin(source.offer(1, BLOCKS)))
        assert (await call.read()).HasField("granted")
        assert (await source.end()).holder == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert reason_of(caught.value) == "TRANSFER_TIMEOUT"


async def test_renewals_do_not_move_the_end_of_a_pull_that_has_begun() -> None:
    config = TransferConfig(hand_off_ttl_s=300.0, max_pull_s=0.2)
    async with source_worker(config=config) as source, pull(source) as call:
        await call.write(begin(source.offer(1, BLOCKS)))
        await call.write(renew())
        assert (await source.end()).holder == 1
        with pytest.raises(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass


async def test_a_puller_that_reads_nothing_is_ended_in_bounded_time() -> None:
    config = TransferConfig(max_pull_s=0.5)
    async with source_worker(layout=LARGE_LAYOUT, config=config) as source, pull(source) as call:
        await call.write(begin(source.offer(1, tuple(range(12))), *range(12)))  # 30 MiB: more than is buffered
        assert (await source.end()).holder == 1
        assert source.source.counts.pulling == 0
        with pytest.raises(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass


async def test_a_stream_that_is_silent_for_a_time_to_live_is_ended() -> None:
    async with source_worker(config=TransferConfig(hand_off_ttl_s=0.2)) as source, pull(source) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert reason_of(caught.value) == "TRANSFER_TIMEOUT"
