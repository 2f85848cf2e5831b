"""EncodeService over real streams: sizes first, a hand-off an item, and every way in which a request ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import grpc
import pytest

from quartet.engine.base import Turn
from quartet.engine.encoder import EncoderStats
from quartet.engine.settings import EncoderSettings
from quartet.errors import (
    DrainingError,
    EngineError,
    HandOffNotFoundError,
    InvalidMediaError,
    InvalidRequestError,
    MediaTooLargeError,
    OutOfBlocksError,
    ProtocolError,
    QueueFullError,
    RequestCancelledError,
    RequestTimeoutError,
    UnsupportedFieldError,
)
from quartet.kvcache.embedding_pool import EmbeddingPool
from quartet.kvcache.layout import EmbeddingsPayload, HandOff
from quartet.media.items import MediaFile, MediaKind
from quartet.media.media_id import in_trust_domain, media_id
from quartet.rpc.errors import from_rpc_error
from quartet.streams.chunks import take_chunks
from quartet.streams.convert.messages import to_encode_start
from quartet.streams.server import StreamLimits
from quartet.transfer.source import HandOffTicket
from quartet.v1 import encode_pb2, types_pb2
from services.encode.encode import MAX_ITEMS, PoolReports, max_running
from tests.services.encode_workers import encode_worker, make_encode_start
from tests.services.fake_encoder import (
    FINGERPRINT,
    PIXELS_PER_TOKEN,
    FakeEncoder,
    embedding_memory,
    name_of,
    picture,
    read,
    written,
)
from tests.services.fake_states import FakeStates
from tests.services.stream_workers import WAIT_S, until

CAT, DOG = picture("cat", 5), picture("dog", 9)


def ticket(hand_off: HandOff) -> HandOffTicket:
    return HandOffTicket(hand_off.hand_off_id, hand_off.secret, hand_off.epoch)


async def failure_of(stream: grpc.aio.StreamStreamCall[object, object]) -> Exception:
    """What a call ends with."""
    async with asyncio.timeout(WAIT_S):
        try:
            while await stream.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
    raise AssertionError("the call went well")


async def test_items_of_another_trust_domain_are_neither_known_nor_taken_for_equal() -> None:
    encoder = FakeEncoder()
    async with encode_worker(encoder) as worker:
        for domain, is_cached in (("acme", False), ("rival", False), ("", False), ("acme", True)):
            encoded = await worker.encode(make_encode_start([CAT], trust_domain=domain))
            [size], [hand_off] = encoded.sizes, encoded.hand_offs
            assert size.media_id == media_id(CAT, in_trust_domain(FINGERPRINT, domain))
            assert size.is_cached is is_cached
            worker.source.abort(ticket(hand_off))
        assert encoder.encoded == [CAT] * 3
        with pytest.raises(InvalidRequestError) as caught:
            await worker.encode(make_encode_start([CAT], [name_of(CAT)], trust_domain="acme"))
        assert caught.value.field == "items[0].media_id"


async def test_each_item_is_sized_encoded_and_held_for_its_puller() -> None:
    async with encode_worker() as worker:
        encoded = await worker.encode(make_encode_start([CAT, DOG]))
        assert [(size.media_id, size.num_tokens, size.is_cached) for size in encoded.sizes] == [
            (name_of(CAT), 5, False),
            (name_of(DOG), 9, False),
        ]
        assert [(size.grid.num_rows, size.grid.num_columns) for size in encoded.sizes] == [(1, 5), (1, 9)]
        for file, hand_off, num_tokens in zip((CAT, DOG), encoded.hand_offs, (5, 9), strict=True):
            assert isinstance(hand_off.payload, EmbeddingsPayload)
            assert hand_off.payload.num_tokens == num_tokens
            blocks = read(worker.encoder.embeddings, hand_off.payload.block_ids)
            assert blocks == [written(file, index) for index in range(hand_off.payload.num_pieces)]
        assert all(item.queue_s > 0.25 and item.compute_s == 0.125 for item in encoded.items.values())
        assert worker.pool.counts.held == 5
        for hand_off in encoded.hand_offs:
            worker.source.abort(ticket(hand_off))
        assert worker.is_clean()
        assert worker.registry.get_sample_value("quartet_encode_items_total", {"outcome": "encoded"}) == 2


async def test_a_stored_item_is_not_encoded_again() -> None:
    async with encode_worker() as worker:
        await worker.encode(make_encode_start([CAT]))
        again = await worker.encode(make_encode_start([DOG, CAT]))
        assert [size.is_cached for size in again.sizes] == [False, True]
        assert worker.encoder.encoded == [CAT, DOG]
        assert (again.items[1].queue_s, again.items[1].compute_s) == (0.0, 0.0)
        assert worker.registry.get_sample_value("quartet_encode_items_total", {"outcome": "cached"}) == 1


async def test_an_item_that_a_request_names_twice_is_handed_off_twice() -> None:
    async with encode_worker() as worker:
        first, second = (await worker.encode(make_encode_start([CAT, CAT]))).hand_offs
        assert worker.encoder.encoded == [CAT]
        worker.source.abort(ticket(first))
        assert worker.pool.counts.held == 2
        worker.source.abort(ticket(second))
        assert worker.is_clean()


async def test_two_requests_for_one_item_at_the_same_time_encode_it_once() -> None:
    async with encode_worker(FakeEncoder(is_held=True)) as worker:
        both = [asyncio.create_task(worker.encode(make_encode_start([CAT]))) for _ in range(2)]
        await until(lambda: worker.dispatcher.num_running == 2 and worker.encoder.num_waiting == 1)
        worker.encoder.may_encode.set()
        for encoded in await asyncio.gather(*both):
            assert len(encoded.hand_offs) == 1
        assert worker.encoder.encoded == [CAT]


async def test_the_sizes_do_not_wait_for_the_tower() -> None:
    async with encode_worker(FakeEncoder(is_held=True)) as worker:
        stream = worker.stream()
        await stream.write(encode_pb2.EncodeRequest(start=to_encode_start(make_encode_start([CAT, DOG]))))
        sized = await stream.read()
        assert isinstance(sized, encode_pb2.EncodeResponse)
        assert len(sized.sized.items) == 2
        await until(lambda: worker.encoder.num_waiting == 2)
        [load] = worker.dispatcher.stats()
        assert (load.num_waiting, load.num_in_use_blocks, load.num_total_blocks) == (2, 5, 8)
        stream.cancel()
        await until(worker.is_clean)


async def test_a_media_id_is_checked_where_it_is_given() -> None:
    async with encode_worker() as worker:
        good = await worker.encode(make_encode_start([CAT], [name_of(CAT)]))
        assert len(good.hand_offs) == 1
        with pytest.raises(InvalidRequestError) as caught:
            await worker.encode(make_encode_start([CAT, DOG], [name_of(CAT), name_of(CAT)]))
        assert caught.value.field == "items[1].media_id"


@pytest.mark.parametrize(
    ("file", "error", "field"),
    [
        (MediaFile(MediaKind.IMAGE, b"no picture"), InvalidMediaError, "items[1].file"),
        (picture("broken"), InvalidMediaError, "items[1].file"),
        (MediaFile(MediaKind.EMBEDDINGS, b"5 rows"), UnsupportedFieldError, "items[1].file.kind"),
    ],
)
async def test_a_bad_item_is_named_and_its_request_leaves_nothing(
    file: MediaFile, error: type[Exception], field: str
) -> None:
    async with encode_worker() as worker:
        with pytest.raises(error) as caught:
            await worker.encode(make_encode_start([CAT, file]))
        assert getattr(caught.value, "field", None) == field
        await until(lambda: not worker.dispatcher.num_running and not worker.pool.counts.in_use)
        assert worker.pool.counts.held in (0, 2)  # that of the cat, if it was sent before


async def test_too_many_items_are_refused() -> None:
    async with encode_worker() as worker:
        with pytest.raises(InvalidRequestError) as caught:
            await worker.encode(make_encode_start([CAT] * (MAX_ITEMS + 1)))
        assert caught.value.field == "items"
        with pytest.raises(InvalidRequestError) as caught:
            await worker.encode(make_encode_start([]))
        assert caught.value.field == "items"


async def test_files_travel_in_chunks_up_to_a_bound() -> None:
    async with encode_worker(limits=StreamLimits(max_media_bytes=2 << 20)) as worker:
        large = MediaFile(MediaKind.IMAGE, b"5 large" + bytes(1_500_000))
        stream, message = worker.stream(), to_encode_start(make_encode_start([CAT, large]))
        chunks = take_chunks(message)
        assert chunks
        await stream.write(encode_pb2.EncodeRequest(start=message))
        for chunk in chunks:
            is_chunk = isinstance(chunk, types_pb2.StartChunk)
            await stream.write(
                encode_pb2.EncodeRequest(chunk=chunk) if is_chunk else encode_pb2.EncodeRequest(start_done=chunk)  # type: ignore[arg-type]
            )
        sized = await stream.read()
        assert isinstance(sized, encode_pb2.EncodeResponse)
        assert [size.media_id for size in sized.sized.items] == [name_of(CAT), name_of(large)]
        stream.cancel()
        stream, message = worker.stream(), encode_pb2.EncodeStart(chunked=True)
        message.items.add().file.kind = types_pb2.MEDIA_KIND_IMAGE
        await stream.write(encode_pb2.EncodeRequest(start=message))
        part = types_pb2.StartChunk(target=types_pb2.CHUNK_TARGET_MEDIA, data=bytes(1_000_000))
        for _ in range(3):
            await stream.write(encode_pb2.EncodeRequest(chunk=part))
        error = await failure_of(stream)
        assert isinstance(error, MediaTooLargeError)
        assert error.field == "items[0].file.data"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [encode_pb2.EncodeRequest()],
        [encode_pb2.EncodeRequest(start_done=types_pb2.StartDone())],
        [encode_pb2.EncodeRequest(chunk=types_pb2.StartChunk())],
        [encode_pb2.EncodeRequest(start=to_encode_start(make_encode_start([CAT])))] * 2,
        [encode_pb2.EncodeRequest(start=encode_pb2.EncodeStart(chunked=True))] * 2,
        [encode_pb2.EncodeRequest(start=encode_pb2.EncodeStart(chunked=True))],
    ],
)
async def test_messages_in_a_wrong_order_end_the_stream(messages: list[encode_pb2.EncodeRequest]) -> None:
    async with encode_worker(FakeEncoder(is_held=True)) as worker:
        stream = worker.stream()
        for message in messages:
            await stream.write(message)
        await stream.done_writing()
        assert isinstance(await failure_of(stream), ProtocolError)
        await until(worker.is_clean)


async def test_a_start_that_never_gets_complete_is_not_waited_for() -> None:
    async with encode_worker(limits=StreamLimits(chunks_timeout_s=0.05)) as worker:
        silent, incomplete = worker.stream(), worker.stream()
        await incomplete.write(encode_pb2.EncodeRequest(start=encode_pb2.EncodeStart(chunked=True)))
        assert isinstance(await failure_of(silent), RequestTimeoutError)
        assert isinstance(await failure_of(incomplete), RequestTimeoutError)


async def test_a_cancel_ends_it_and_frees_everything() -> None:
    async with encode_worker(FakeEncoder(is_held=True)) as worker:
        stream = worker.stream()
        await stream.write(encode_pb2.EncodeRequest(start=to_encode_start(make_encode_start([CAT]))))
        await until(lambda: worker.encoder.num_waiting == 1)
        await stream.write(encode_pb2.EncodeRequest(cancel=types_pb2.Cancel()))
        assert isinstance(await failure_of(stream), RequestCancelledError)
        assert worker.encoder.cancelled == [CAT]
        await until(worker.is_clean)


async def test_a_hand_off_that_was_sent_outlives_its_stream_and_then_expires() -> None:
    async with encode_worker(hand_off_ttl_s=0.3) as worker:
        worker.encoder.may_encode.clear()
        stream = worker.stream()
        await stream.write(encode_pb2.EncodeRequest(start=to_encode_start(make_encode_start([CAT, DOG]))))
        await stream.read()
        await until(lambda: worker.encoder.num_waiting == 2)
        worker.encoder.may_encode.set()
        encoded = await stream.read()
        assert isinstance(encoded, encode_pb2.EncodeResponse)
        assert encoded.HasField("encoded")
        stream.cancel()
        await until(lambda: not worker.dispatcher.num_running)
        await until(worker.is_clean)
        assert worker.source.counts.expired >= 1, "the end of its stream ended it"
        sent = encoded.encoded.hand_off
        with pytest.raises(HandOffNotFoundError):
            worker.source.renew(HandOffTicket(sent.hand_off_id, sent.secret, sent.epoch))


async def test_the_timeout_of_a_request_ends_it() -> None:
    async with encode_worker(FakeEncoder(is_held=True)) as worker:
        with pytest.raises(RequestTimeoutError):
            await worker.encode(make_encode_start([CAT], timeout_s=0.05))
        await until(worker.is_clean)


async def test_more_items_than_may_wait_are_refused_and_one_request_never_is_for_itself() -> None:
    async with encode_worker(FakeEncoder(is_held=True), max_waiting_items=2) as worker:
        first = asyncio.create_task(worker.encode(make_encode_start([CAT, CAT, CAT])))
        await until(lambda: worker.dispatcher.stats()[0].num_waiting == 3)
        with pytest.raises(QueueFullError, match="the worker that encodes media has too many items waiting") as caught:
            await worker.encode(make_encode_start([DOG]))
        assert caught.value.retry_delay_s == 1.0
        worker.encoder.may_encode.set()
        assert len((await first).hand_offs) == 3
        assert len((await worker.encode(make_encode_start([DOG]))).hand_offs) == 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (EncoderSettings(), 16),
        (EncoderSettings(max_batch_size=3), 6),
        (EncoderSettings(max_batch_size=64), 16),
        (EncoderSettings(max_waiting_items=5), 5),
        (EncoderSettings(max_waiting_pixels=1), 1),
    ],
)
def test_routers_are_told_how_many_items_a_worker_surely_takes(settings: EncoderSettings, expected: int) -> None:
    assert max_running(settings) == expected


async def test_the_load_reports_how_many_items_may_come_and_each_start_and_end_is_news() -> None:
    encoder = FakeEncoder()
    states = encoder.states = FakeStates()  # the pool, whose changes are news too, is not used
    async with encode_worker(encoder, max_running=3) as worker, asyncio.timeout(WAIT_S):
        outputs = worker.reports.outputs()
        running = asyncio.create_task(worker.encode(make_encode_start([CAT, DOG])))
        await anext(outputs)
        [load] = worker.dispatcher.stats()
        assert (load.max_running, load.num_running + load.num_waiting) == (3, 2)
        states.may_encode.set()
        await anext(outputs)
        assert worker.dispatcher.stats()[0].num_waiting == 0
        await running


async def test_more_pixels_than_may_wait_are_refused_unless_they_are_here_or_nothing_waits() -> None:
    async with encode_worker(max_waiting_pixels=7 * PIXELS_PER_TOKEN) as worker:
        await worker.encode(make_encode_start([CAT]))
        worker.encoder.may_encode.clear()
        small, large = picture("small", 3), picture("large", 8)
        first = asyncio.create_task(worker.encode(make_encode_start([large])))  # nothing else waits
        await until(lambda: worker.encoder.num_waiting == 1)
        with pytest.raises(QueueFullError, match="too many pixels waiting"):
            await worker.encode(make_encode_start([small]))
        assert len((await worker.encode(make_encode_start([CAT]))).hand_offs) == 1
        first.cancel()
        await asyncio.wait([first])
        await until(lambda: worker.dispatcher.stats()[0].num_waiting == 0)
        first = asyncio.create_task(worker.encode(make_encode_start([small])))
        await until(lambda: worker.encoder.num_waiting == 1)
        worker.encoder.may_encode.set()
        assert len((await worker.encode(make_encode_start([picture("other", 4)]))).hand_offs) == 1
        assert len((await first).hand_offs) == 1


async def test_a_request_without_room_fails_after_the_timeout_and_one_that_never_fits_fails_at_once() -> None:
    async with encode_worker(FakeEncoder(embedding_memory(3)), room_timeout_s=0.05) as worker:
        await worker.encode(make_encode_start([CAT]))
        with pytest.raises(OutOfBlocksError):
            await worker.encode(make_encode_start([DOG]))
        with pytest.raises(MediaTooLargeError) as caught:
            await worker.encode(make_encode_start([CAT, DOG]))
        assert caught.value.field == "items"


async def test_a_draining_worker_refuses_new_requests_and_ends_running_ones() -> None:
    async with encode_worker(FakeEncoder(is_held=True)) as worker:
        running = asyncio.create_task(worker.encode(make_encode_start([CAT])))
        await until(lambda: worker.encoder.num_waiting == 1)
        worker.dispatcher.drain()
        with pytest.raises(DrainingError):
            await worker.encode(make_encode_start([DOG]))
        assert not await worker.dispatcher.wait_idle(0.01)
        assert worker.dispatcher.end_all(DrainingError("leaving")) == 1
        with pytest.raises(DrainingError, match="leaving"):
            await running
        assert await worker.dispatcher.wait_idle(WAIT_S)


async def test_a_dead_tower_fails_running_and_new_requests() -> None:
    async with encode_worker(FakeEncoder(is_held=True)) as worker:
        running = asyncio.create_task(worker.encode(make_encode_start([CAT])))
        await until(lambda: worker.encoder.num_waiting == 1)
        worker.encoder.is_alive = False
        worker.encoder.may_encode.set()
        with pytest.raises(EngineError):
            await running
        with pytest.raises(EngineError):
            await worker.encode(make_encode_start([DOG]))


async def test_routers_numbers_are_counted_in_at_once() -> None:
    async with encode_worker() as worker:
        await worker.encode(make_encode_start([CAT], router_id="r", router_request_number=1))
        with pytest.raises(InvalidRequestError):
            bad = make_encode_start([CAT], [name_of(DOG)], router_id="r", router_request_number=2)
            await worker.encode(bad)
        assert worker.dispatcher.starts.watermarks() == worker.dispatcher.starts.arrivals() == {"r": 2}


def test_a_batch_in_the_vision_tower_is_a_turn_as_long_as_the_slowest_items_were() -> None:
    encoder = StatsOnly(EncoderStats(num_waiting=2, num_steps=7, slowest_item_s=0.5))
    reports = PoolReports(encoder, EmbeddingPool(4, 4, has_events=True))  # type: ignore[arg-type]
    assert reports.turns() == []
    encoder.now = replace(encoder.now, num_running=3)
    assert reports.turns() == [Turn(0, 7, 1.5)]
    encoder.now = replace(encoder.now, slowest_item_s=0.0)
    assert reports.turns() == [Turn(0, 7, None)]


@dataclass
class StatsOnly:
    """An encoder that only says what it does."""

    now: EncoderStats

    def stats(self) -> EncoderStats:
        return self.now
