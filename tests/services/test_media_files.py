"""Prefill and Decode starts with media files, at workers that have a vision tower of their own, and at others."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from quartet.engine.base import RequestKind
from quartet.engine.settings import EncoderSettings
from quartet.engine.torch.config import TorchEncoderConfig
from quartet.errors import ConfigError, InvalidRequestError, QueueFullError, UnsupportedFieldError
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.layout import HandOff, OpaquePayload
from quartet.media.items import MediaFile, MediaKind
from quartet.media.media_id import in_trust_domain, media_id
from quartet.streams.convert.messages import from_prefill_result, from_slot_started
from quartet.streams.messages import WorkerStart
from quartet.v1 import decode_pb2, prefill_pb2
from router.media.config import MediaConfig
from tests.services.fake_encoder import FINGERPRINT, PIXELS_PER_TOKEN, FakeEncoder, name_of, picture, read, written
from tests.services.media_workers import PLACEHOLDER_ID, media_worker, start_with_files
from tests.services.stream_workers import until

CAT, DOG = picture("cat", 5), picture("dog", 3)
PROMPT = [1, PLACEHOLDER_ID, 2, PLACEHOLDER_ID, 3]
EXPANDED = [1, *[PLACEHOLDER_ID] * 5, 2, *[PLACEHOLDER_ID] * 3, 3]
SPANS = (MediaSpan(name_of(CAT), 1, 5), MediaSpan(name_of(DOG), 7, 3))
KINDS = [RequestKind.PREFILL, RequestKind.DECODE]


@pytest.mark.parametrize("kind", KINDS)
async def test_files_are_encoded_and_the_engine_gets_the_prompt_with_their_tokens(kind: RequestKind) -> None:
    async with media_worker(kind, encoder=FakeEncoder()) as worker:
        id = worker.submit(start_with_files([CAT, DOG], PROMPT))
        await worker.submitted(id)
        request, embeddings = worker.engine.requests[id], worker.engine.embeddings
        assert list(request.generation.prompt_token_ids) == EXPANDED
        assert request.generation.media == SPANS
        assert embeddings is not None
        for file, block_ids in zip((CAT, DOG), request.media_blocks, strict=True):
            assert read(embeddings, block_ids) == [written(file, index) for index in range(len(block_ids))]
        worker.finish(id)


async def test_a_prefill_reports_the_prompt_with_the_tokens_of_its_media() -> None:
    async with media_worker(encoder=FakeEncoder()) as worker:
        id = worker.submit(start_with_files([CAT, DOG], PROMPT))
        await worker.submitted(id)
        worker.finish(id)
        message = worker.outbox.take()
        assert isinstance(message, prefill_pb2.PrefillResponse)
        outcome = from_prefill_result(message.outputs[0].result)
        assert (list(outcome.prompt_token_ids), outcome.media) == (EXPANDED, SPANS)
        assert outcome.queue_s > 0.0, "the wait for media counts"


async def test_a_decode_reports_the_length_of_the_prompt_with_its_media() -> None:
    async with media_worker(RequestKind.DECODE, encoder=FakeEncoder()) as worker:
        id = worker.submit(start_with_files([CAT, DOG], PROMPT))
        await worker.submitted(id)
        worker.finish(id)
        message = worker.outbox.take()
        assert isinstance(message, decode_pb2.DecodeResponse)
        assert from_slot_started(message.started[0]).num_prompt_tokens == len(EXPANDED)


async def test_a_repeated_picture_is_encoded_once() -> None:
    encoder = FakeEncoder()
    async with media_worker(encoder=encoder) as worker:
        for slot in range(2):
            id = worker.submit(start_with_files([CAT, CAT], PROMPT), slot)
            await worker.submitted(id)
            first, second = worker.engine.requests[id].media_blocks
            assert first == second
            worker.finish(id)
        assert encoder.encoded == [CAT]


async def test_a_picture_of_another_trust_domain_is_another_picture() -> None:
    encoder = FakeEncoder()
    async with media_worker(encoder=encoder) as worker:
        spans = []
        for slot, domain in enumerate(("acme", "rival", "acme")):
            name = media_id(CAT, in_trust_domain(FINGERPRINT, domain))
            start = start_with_files([CAT], [PLACEHOLDER_ID, 1], trust_domain=domain)
            id = worker.submit(replace(start, media=(replace(start.media[0], media_id=name),)), slot)
            await worker.submitted(id)
            spans += worker.engine.requests[id].generation.media
            assert spans[-1].media_id == name
            worker.finish(id)
        assert spans[0] == spans[2] != spans[1]
        assert encoder.encoded == [CAT, CAT]
        worker.submit(start_with_files([CAT], [PLACEHOLDER_ID, 1], trust_domain="acme"), slot=9)
        assert await worker.outcome(9) == "INVALID_FIELD media[0].media_id"


def with_hand_off(start: WorkerStart) -> WorkerStart:
    payload = OpaquePayload("other", b"")
    hand_off = HandOff(
        hand_off_id=bytes(16),
        secret=bytes(16),
        worker_id="w",
        epoch=1,
        address="a:1",
        time_to_live=timedelta(1),
        payload=payload,
    )
    return replace(start, hand_off=hand_off)


def with_other_name(start: WorkerStart) -> WorkerStart:
    first, second = start.media
    return replace(start, media=(first, replace(second, media_id=first.media_id)))


@pytest.mark.parametrize(
    ("start", "outcome"),
    [
        (start_with_files([CAT, picture("broken")], PROMPT), "MEDIA_INVALID media[1].file"),
        (start_with_files([CAT, MediaFile(MediaKind.IMAGE, b"none")], PROMPT), "MEDIA_INVALID media[1].file"),
        (start_with_files([MediaFile(MediaKind.EMBEDDINGS, b"5 x")], PROMPT), "UNSUPPORTED_FIELD media[0].file.kind"),
        (with_other_name(start_with_files([CAT, DOG], PROMPT)), "INVALID_FIELD media[1].media_id"),
        (start_with_files([CAT], PROMPT), "INVALID_FIELD media"),
        (start_with_files([picture("huge", 33)], [PLACEHOLDER_ID]), "MEDIA_TOO_LARGE media"),
        (start_with_files([picture("endless", 300_000)], [PLACEHOLDER_ID]), "PROMPT_TOO_LONG media"),
    ],
)
async def test_a_bad_file_is_named_and_its_request_leaves_nothing_behind(start: WorkerStart, outcome: str) -> None:
    async with media_worker(encoder=FakeEncoder()) as worker:
        worker.submit(start)
        assert await worker.outcome() == outcome
        assert worker.dispatcher.num_running == 0
        assert worker.stage is not None
        assert worker.stage.tower_queue.num_items == 0


async def test_files_are_refused_where_there_is_no_tower() -> None:
    async with media_worker() as worker:
        with pytest.raises(UnsupportedFieldError) as caught:
            worker.submit(start_with_files([CAT], [PLACEHOLDER_ID]))
        assert caught.value.field == "media"


async def test_files_make_no_sense_beside_the_kv_of_their_prompt() -> None:
    async with media_worker(RequestKind.DECODE, encoder=FakeEncoder()) as worker:
        with pytest.raises(InvalidRequestError) as caught:
            worker.submit(with_hand_off(start_with_files([CAT], [PLACEHOLDER_ID])))
        assert caught.value.field == "media"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancel_ends_what_the_tower_does_for_it(kind: RequestKind) -> None:
    encoder = FakeEncoder(is_held=True)
    async with media_worker(kind, encoder=encoder) as worker:
        id = worker.submit(start_with_files([CAT, DOG], PROMPT))
        await until(lambda: encoder.num_waiting == 2)
        [load] = worker.dispatcher.stats()
        assert (load.num_waiting, load.num_queued_prefill_tokens) == (1, len(EXPANDED))
        worker.dispatcher.cancel(id)
        assert await worker.outcome() == "CANCELLED"
        assert sorted(file.data for file in encoder.cancelled) == sorted(file.data for file in (CAT, DOG))


async def test_batches_of_the_tower_count_as_progress() -> None:
    async with media_worker(encoder=FakeEncoder()) as worker:
        before = worker.dispatcher.progress
        id = worker.submit(start_with_files([CAT], [PLACEHOLDER_ID]))
        await worker.submitted(id)
        after = worker.dispatcher.progress
        assert (before.num_in_flight, after.num_in_flight) == (0, 1)
        assert after.num_steps > before.num_steps
        worker.finish(id)


async def test_more_files_than_may_wait_are_refused() -> None:
    encoder = FakeEncoder(is_held=True)
    async with media_worker(encoder=encoder, max_waiting_items=2) as worker:
        id = worker.submit(start_with_files([CAT, DOG], PROMPT))
        await until(lambda: encoder.num_waiting == 2)
        with pytest.raises(QueueFullError):
            worker.submit(start_with_files([CAT], [PLACEHOLDER_ID]), 1)
        encoder.may_encode.set()
        await worker.submitted(id)
        worker.finish(id)


def test_the_default_pixel_limits_of_router_and_workers_agree() -> None:
    settings, encoder = EncoderSettings(), TorchEncoderConfig(model_path="model")
    assert MediaConfig().max_pixels == settings.max_pixels == encoder.max_pixels < 5700 * 5800
    assert settings.max_waiting_pixels == 16 * settings.max_pixels
    with pytest.raises(ConfigError, match="max_waiting_pixels: must be at least 1"):
        EncoderSettings(max_waiting_pixels=0)


async def test_more_pixels_than_may_wait_are_refused_until_fewer_do() -> None:
    encoder = FakeEncoder(is_held=True)
    async with media_worker(encoder=encoder, max_waiting_pixels=7 * PIXELS_PER_TOKEN) as worker:
        id = worker.submit(start_with_files([CAT], [PLACEHOLDER_ID]))
        await until(lambda: encoder.num_waiting == 1)
        worker.submit(start_with_files([DOG], [PLACEHOLDER_ID]), 1)
        assert await worker.outcome(1) == "QUEUE_FULL"
        encoder.may_encode.set()
        await worker.submitted(id)
        assert worker.stage is not None
        assert worker.stage.tower_queue.num_items == worker.stage.tower_queue.num_pixels == 0
        other = worker.submit(start_with_files([DOG], [PLACEHOLDER_ID]), 2)
        await worker.submitted(other)
        worker.finish(id)
        worker.finish(other)


async def test_a_dead_tower_fails_the_request() -> None:
    encoder = FakeEncoder(is_held=True)
    async with media_worker(encoder=encoder) as worker:
        worker.submit(start_with_files([CAT], [PLACEHOLDER_ID]))
        encoder.is_alive = False
        encoder.may_encode.set()
        assert await worker.outcome() == "ENGINE_FAILED"
