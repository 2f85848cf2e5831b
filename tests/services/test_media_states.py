"""Media that an encoder keeps itself, and that an engine of its kind reads: opaque hand-offs from end to end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from quartet.engine.base import FinishReason, Prefilled, RequestKind, Started, StepOutput
from quartet.engine.encoder import ItemSize
from quartet.errors import (
    EngineError,
    InvalidMediaError,
    LayoutMismatchError,
    MessageTooLargeError,
    RequestCancelledError,
    RequestTimeoutError,
    UnsupportedFieldError,
)
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.layout import EmbeddingsPayload, OpaquePayload
from quartet.media.items import MediaFile, MediaKind
from quartet.streams.convert.messages import from_prefill_result, to_encode_start
from quartet.v1 import decode_pb2, encode_pb2, prefill_pb2, types_pb2
from tests.services.encode_workers import EncodeWorker, encode_worker, make_encode_start
from tests.services.fake_encoder import FakeEncoder, name_of, picture, read, written
from tests.services.fake_states import FakeStates, state_of
from tests.services.media_workers import media_worker, start_with_files, start_with_hand_offs
from tests.services.stream_workers import until
from tests.services.test_encode_service import failure_of, ticket

CAT, DOG = picture("cat", 5), picture("dog", 9)
#: Of the other kind, which lies in the pool.
ROWS = MediaFile(MediaKind.EMBEDDINGS, b"3 rows")
KINDS = [RequestKind.PREFILL, RequestKind.DECODE]
PROMPT = (1, 99, 2)


def keeper(*, is_held: bool = False) -> tuple[FakeEncoder, FakeStates]:
    """An encoder that keeps pictures itself, and takes embeddings besides."""
    encoder, states = FakeEncoder(), FakeStates()
    encoder.states, encoder.kinds = states, frozenset(MediaKind)
    if not is_held:
        states.may_encode.set()
    return encoder, states


async def opaque(source: EncodeWorker, *files: MediaFile) -> list:  # type: ignore[type-arg]
    return (await source.encode(make_encode_start(files))).hand_offs


async def test_a_kept_item_is_handed_off_with_its_state_and_takes_no_room_in_the_pool() -> None:
    encoder, states = keeper()
    async with encode_worker(encoder) as worker:
        encoded = await worker.encode(make_encode_start([CAT, ROWS, DOG]))
        assert [(size.media_id, size.num_tokens) for size in encoded.sizes] == [
            (name_of(CAT), 5),
            (name_of(ROWS), 3),
            (name_of(DOG), 9),
        ]
        cat, rows, dog = encoded.hand_offs
        assert cat.payload == OpaquePayload("fake", state_of(CAT))
        assert dog.payload == OpaquePayload("fake", state_of(DOG))
        assert isinstance(rows.payload, EmbeddingsPayload)
        assert read(encoder.embeddings, rows.payload.block_ids) == [written(ROWS, 0)]
        assert all(item.queue_s > 0.25 and item.compute_s == 0.125 for item in encoded.items.values())
        assert sorted(file.data for file in states.held.values()) == sorted([CAT.data, DOG.data])
        assert worker.pool.counts.held == 1
        for hand_off in encoded.hand_offs:
            worker.source.abort(ticket(hand_off))
        assert worker.is_clean()
        assert (states.held, len(states.dropped), states.taken) == ({}, 2, [])


async def test_a_kept_item_is_no_block_that_other_requests_could_find() -> None:
    encoder, states = keeper()
    async with encode_worker(encoder) as worker:
        for _ in range(2):
            encoded = await worker.encode(make_encode_start([CAT]))
            assert not encoded.sizes[0].is_cached
        assert len(states.held) == 2, "each is for one taker"
        assert not worker.pool.stored_items()


async def test_nothing_of_a_request_that_fails_is_kept() -> None:
    encoder, states = keeper()
    # A hand-off sent before the other item failed is the caller's, which does not release it here: it expires.
    async with encode_worker(encoder, hand_off_ttl_s=0.2) as worker:
        for name, error in (("broken", InvalidMediaError), ("other", EngineError)):
            with pytest.raises(error) as caught:
                await worker.encode(make_encode_start([CAT, picture(name), ROWS]))
            assert caught.value.field == ("items[1].file" if error is InvalidMediaError else None)
            await until(lambda: not states.held and worker.is_clean())


async def test_a_cancel_or_a_timeout_leaves_nothing_behind() -> None:
    encoder, states = keeper(is_held=True)
    async with encode_worker(encoder) as worker:
        stream = worker.stream()
        await stream.write(encode_pb2.EncodeRequest(start=to_encode_start(make_encode_start([CAT, DOG]))))
        await until(lambda: states.num_waiting == 2)
        assert worker.dispatcher.stats()[0].num_waiting == 2
        await stream.write(encode_pb2.EncodeRequest(cancel=types_pb2.Cancel()))
        assert isinstance(await failure_of(stream), RequestCancelledError)
        await until(lambda: states.num_waiting == 0 and worker.is_clean())
        with pytest.raises(RequestTimeoutError):
            await worker.encode(make_encode_start([CAT], timeout_s=0.05))
        await until(lambda: states.num_waiting == 0 and worker.is_clean())
        assert states.held == {}


async def test_a_state_that_is_not_taken_expires() -> None:
    encoder, states = keeper()
    async with encode_worker(encoder, hand_off_ttl_s=0.2) as worker:
        await worker.encode(make_encode_start([CAT]))
        await until(lambda: not states.held)
        assert worker.source.counts.expired == 1
        assert len(states.dropped) == 1


async def test_a_state_that_would_not_fit_into_a_start_is_released() -> None:
    encoder, states = keeper()
    states.num_extra_bytes = 4096
    async with encode_worker(encoder) as worker:
        with pytest.raises(MessageTooLargeError):
            await worker.encode(make_encode_start([CAT]))
        assert states.held == {}


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_reads_states_is_given_them_and_they_are_taken_when_it_ends_well(
    kind: RequestKind,
) -> None:
    encoder, states = keeper()
    async with encode_worker(encoder) as source, media_worker(kind, read_states="fake") as worker:
        files = [CAT, ROWS, DOG]
        start = start_with_hand_offs(files, await opaque(source, *files))
        id = worker.submit(start)
        await worker.submitted(id)
        request = worker.engine.requests[id]
        assert request.media_inputs == (state_of(CAT), None, state_of(DOG))
        assert [len(blocks) for blocks in request.media_blocks] == [0, 1, 0]
        assert request.generation == start.generation
        await until(lambda: source.source.counts.taken == 1)  # what was pulled
        assert len(states.held) == 2, "the engine may still have to take them"
        worker.finish(id)
        await until(lambda: not states.held)
        assert (len(states.taken), states.dropped) == (2, [])


@pytest.mark.parametrize("kind", KINDS)
async def test_states_of_a_request_that_ends_badly_are_released(kind: RequestKind) -> None:
    encoder, states = keeper()
    async with encode_worker(encoder) as source, media_worker(kind, read_states="fake") as worker:
        id = worker.submit(start_with_hand_offs([CAT, DOG], await opaque(source, CAT, DOG)))
        await worker.submitted(id)
        worker.dispatcher.cancel(id)
        assert worker.engine.cancelled == [id]
        assert len(states.held) == 2, "the engine may be reading them"
        worker.cancelled(id)
        assert await worker.outcome() == "CANCELLED"
        await until(lambda: not states.held)
        assert (states.taken, len(states.dropped)) == ([], 2)


async def test_states_of_a_request_that_never_gets_to_the_engine_are_released() -> None:
    encoder, states = keeper()
    async with encode_worker(encoder) as source, media_worker(read_states="fake") as worker:
        held = worker.pool.allocate(b"x" * 32, 8 * 4)
        id = worker.submit(start_with_hand_offs([CAT, ROWS], await opaque(source, CAT, ROWS)))
        await asyncio.sleep(0)
        worker.dispatcher.cancel(id)
        assert await worker.outcome() == "CANCELLED"
        await until(lambda: not states.held and source.is_clean())
        assert (worker.engine.requests, len(states.dropped)) == ({}, 1)
        worker.pool.discard(b"x" * 32)
        assert held


async def test_a_hand_off_is_renewed_as_long_as_the_engine_needs_the_state() -> None:
    encoder, states = keeper()
    async with encode_worker(encoder, hand_off_ttl_s=1.5) as source, media_worker(read_states="fake") as worker:
        [cat] = await opaque(source, CAT)
        id = worker.submit(start_with_hand_offs([CAT], [cat]))
        [other] = await opaque(source, DOG)  # that no request names
        await until(lambda: source.source.counts.expired == 1)
        assert [file.data for file in states.held.values()] == [CAT.data], other
        worker.finish(id)
        await until(lambda: not states.held)
        assert len(states.taken) == 1


@pytest.mark.parametrize("engine", [None, "another"])
async def test_states_of_another_engine_are_refused_and_nothing_is_claimed(engine: str | None) -> None:
    encoder, states = keeper()
    async with encode_worker(encoder) as source, media_worker(read_states=engine) as worker:
        rows, cat = await opaque(source, ROWS, CAT)
        with pytest.raises(LayoutMismatchError, match="'fake'") as caught:
            worker.submit(start_with_hand_offs([ROWS, CAT], [rows, cat]))
        assert caught.value.field == "media[1].hand_off"
        assert (source.source.counts.held, len(states.held)) == (2, 1)


async def test_files_that_the_engine_reads_are_sized_and_passed_on() -> None:
    async with media_worker(sizer=FakeEncoder()) as worker:
        id = worker.submit(start_with_files([CAT], PROMPT))
        await worker.submitted(id)
        request = worker.engine.requests[id]
        assert request.media_inputs == (CAT,)
        assert request.media_blocks == ()
        assert list(request.generation.prompt_token_ids) == [1, *[99] * 5, 2]
        [span] = request.generation.media
        assert (span.media_id, span.first_position, span.num_tokens) == (name_of(CAT), 1, 5)
        assert worker.pool.counts.cached == 0
        worker.finish(id)


async def test_a_file_that_cannot_be_sized_is_named() -> None:
    async with media_worker(sizer=FakeEncoder()) as worker:
        worker.submit(start_with_files([CAT, MediaFile(MediaKind.IMAGE, b"what")], (1, 99, 99)))
        assert await worker.outcome() == "MEDIA_INVALID media[1].file"
        worker.submit(start_with_files([ROWS], PROMPT), 1)
        assert (await worker.outcome(1)).endswith("media[0].file.kind")
    async with media_worker() as worker:
        with pytest.raises(UnsupportedFieldError, match="no vision tower"):
            worker.submit(start_with_files([CAT], PROMPT))


class UnsizedEncoder(FakeEncoder):
    """Reads files without knowing how many tokens they fill."""

    async def size(self, file: MediaFile) -> ItemSize:
        return replace(await super().size(file), num_tokens=0, grid=None)


async def test_files_of_unknown_sizes_are_passed_on_and_the_engine_reports_the_final_prompt() -> None:
    async with media_worker(sizer=UnsizedEncoder()) as worker:
        start = start_with_files([CAT, DOG], (1, 99, 2, 99))
        id = worker.submit(start)
        await worker.submitted(id)
        request = worker.engine.requests[id]
        assert request.media_inputs == (CAT, DOG)
        assert request.generation == start.generation
        unnamed = MediaSpan(bytes(32), 1, 3), MediaSpan(bytes(32), 5, 2)
        laid_out = replace(start.generation, prompt_token_ids=(1, 99, 7, 99, 2, 99, 99), media=unnamed)
        prefilled = Prefilled(id, 7, 0, 0.0, 0.0, finished=FinishReason.LENGTH, laid_out=laid_out)
        worker.dispatcher.route(StepOutput(prefilled=[prefilled]))
        message = worker.outbox.take()
        assert isinstance(message, prefill_pb2.PrefillResponse)
        outcome = from_prefill_result(message.outputs[0].result)
        assert list(outcome.prompt_token_ids) == [1, 99, 7, 99, 2, 99, 99]
        assert outcome.media == (MediaSpan(name_of(CAT), 1, 3), MediaSpan(name_of(DOG), 5, 2))


async def test_a_decode_reports_the_prompt_length_that_the_engine_made() -> None:
    async with media_worker(RequestKind.DECODE, sizer=UnsizedEncoder()) as worker:
        id = worker.submit(start_with_files([CAT], PROMPT))
        await worker.submitted(id)
        worker.dispatcher.route(StepOutput(started=[Started(id, 0, 0.0, num_prompt_tokens=33)]))
        message = worker.outbox.take()
        assert isinstance(message, decode_pb2.DecodeResponse)
        assert [started.num_prompt_tokens for started in message.started] == [33]
        worker.finish(id)


async def test_as_many_files_as_placeholders_are_to_come_whatever_they_fill() -> None:
    async with media_worker(sizer=UnsizedEncoder()) as worker:
        worker.submit(start_with_files([CAT, DOG], PROMPT))
        assert await worker.outcome() == "INVALID_FIELD media"
