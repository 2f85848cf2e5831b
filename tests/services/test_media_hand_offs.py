"""Prefill and Decode starts whose media an encode worker holds: pulled once, kept while needed, given up in time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from quartet.engine.base import RequestKind
from quartet.errors import (
    DrainingError,
    DuplicateRequestError,
    InvalidRequestError,
    LayoutMismatchError,
    UnsupportedFieldError,
)
from quartet.kvcache.layout import HandOff, OpaquePayload
from quartet.streams.messages import MediaInput, WorkerStart
from tests.services.encode_workers import EncodeWorker, encode_worker, make_encode_start
from tests.services.fake_encoder import name_of, picture, read, written
from tests.services.media_workers import MediaWorker, media_worker, start_with_hand_offs
from tests.services.stream_workers import WAIT_S, until

CAT, DOG = picture("cat", 5), picture("dog", 9)
KINDS = [RequestKind.PREFILL, RequestKind.DECODE]


async def hand_off(source: EncodeWorker, *files: object) -> list[HandOff]:
    encoded = await source.encode(make_encode_start(files))  # type: ignore[arg-type]
    return encoded.hand_offs


def check_content(worker: MediaWorker, id: int, *files: object) -> None:
    """What the engine was given of each file is what its encoder wrote."""
    embeddings, request = worker.engine.embeddings, worker.engine.requests[id]
    assert embeddings is not None
    assert len(request.media_blocks) == len(files)
    for file, block_ids in zip(files, request.media_blocks, strict=True):
        blocks = read(embeddings, block_ids)
        assert blocks == [written(file, index) for index in range(len(block_ids))]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
async def test_embeddings_encoded_elsewhere_are_pulled_before_the_engine_gets_the_request(kind: RequestKind) -> None:
    async with encode_worker() as source, media_worker(kind) as worker:
        start = start_with_hand_offs([CAT, DOG], await hand_off(source, CAT, DOG))
        id = worker.submit(start)
        assert worker.dispatcher.num_running == 1
        await worker.submitted(id)
        check_content(worker, id, CAT, DOG)
        assert worker.engine.requests[id].generation == start.generation
        await until(lambda: source.source.counts.taken == 2)
        await until(source.is_clean)
        assert worker.pool.counts.held == 5
        worker.finish(id)
        assert worker.pool.counts.cached == 5


async def test_a_repeated_picture_moves_nothing() -> None:
    async with encode_worker() as source, media_worker() as worker:
        for _ in range(2):
            id = worker.submit(start_with_hand_offs([CAT], await hand_off(source, CAT)))
            await worker.submitted(id)
            check_content(worker, id, CAT)
            worker.finish(id)
            await until(source.is_clean)
            while worker.outbox.take() is not None:
                pass
        assert (source.source.counts.taken, source.source.counts.cancelled) == (1, 1)
        assert worker.stage is not None
        assert worker.stage.num_pulls == 1


async def test_a_picture_named_twice_in_a_request_is_pulled_once() -> None:
    async with encode_worker() as source, media_worker() as worker:
        id = worker.submit(start_with_hand_offs([CAT, CAT], await hand_off(source, CAT, CAT)))
        await worker.submitted(id)
        check_content(worker, id, CAT, CAT)
        worker.finish(id)
        await until(source.is_clean)
        assert (source.source.counts.taken, source.source.counts.cancelled) == (1, 1)


async def test_two_requests_for_one_picture_at_the_same_time_pull_it_once() -> None:
    async with encode_worker() as source, media_worker() as worker:
        hand_offs = [(await hand_off(source, CAT))[0] for _ in range(2)]
        ids = [worker.submit(start_with_hand_offs([CAT], [one]), slot) for slot, one in enumerate(hand_offs)]
        for id in ids:
            await worker.submitted(id)
            check_content(worker, id, CAT)
        worker.finish(ids[0])
        assert worker.pool.counts.held == 2
        worker.finish(ids[1])
        await until(source.is_clean)
        assert (source.source.counts.taken, source.source.counts.cancelled) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_missing_hand_off_fails_the_request_and_releases_its_other_hand_offs(kind: RequestKind) -> None:
    async with encode_worker() as source, media_worker(kind) as worker:
        cat, dog = await hand_off(source, CAT, DOG)
        lost = replace(cat, secret=bytes(16))
        worker.submit(start_with_hand_offs([CAT, DOG], [lost, dog]))
        assert await worker.outcome() == "HAND_OFF_NOT_FOUND"
        await until(lambda: source.source.counts.held == 1)  # the cat's: no request has its right secret
        assert not worker.engine.requests


async def test_a_hand_off_of_another_epoch_fails_with_stale_epoch() -> None:
    async with encode_worker() as source, media_worker() as worker:
        [cat] = await hand_off(source, CAT)
        worker.submit(start_with_hand_offs([CAT], [replace(cat, epoch=cat.epoch + 1)]))
        assert await worker.outcome() == "STALE_EPOCH"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["cancel", "timeout", "drain"])
async def test_a_request_that_ends_before_its_media_are_here_has_one_end_and_gives_them_up(
    kind: RequestKind, way: str
) -> None:
    async with encode_worker() as source, media_worker(kind) as worker:
        # Room is what it waits for.
        held = worker.pool.allocate(b"x" * 32, 8 * 4)
        assert len(held) == 8
        timeout_s = 0.05 if way == "timeout" else None
        id = worker.submit(start_with_hand_offs([CAT], await hand_off(source, CAT), timeout_s=timeout_s))
        [load] = worker.dispatcher.stats()
        assert (load.num_waiting, load.num_queued_prefill_tokens, load.num_unbegun_prefill_tokens) == (1, 6, 6)
        if way == "cancel":
            worker.dispatcher.cancel(id)
            worker.dispatcher.cancel(id)
        elif way == "drain":
            worker.dispatcher.drain()
            assert not await worker.dispatcher.wait_idle(0.01)
            assert worker.dispatcher.end_all(DrainingError("leaving")) == 1
        expected = {"timeout": "TIMEOUT", "drain": "DRAINING", "cancel": "CANCELLED"}
        assert await worker.outcome() == expected[way]
        assert await worker.dispatcher.wait_idle(WAIT_S)
        await until(lambda: source.source.counts.cancelled == 1)
        assert (worker.engine.requests, worker.engine.cancelled) == ({}, [])
        assert worker.dispatcher.stats() == worker.engine.stats()
        worker.pool.discard(b"x" * 32)


async def test_a_stream_that_goes_takes_its_requests_media_along() -> None:
    async with encode_worker() as source, media_worker() as worker:
        waiting = worker.submit(start_with_hand_offs([CAT], await hand_off(source, CAT)), 0)
        worker.dispatcher.abandon([waiting])
        await until(lambda: source.source.counts.cancelled == 1)
        submitted = worker.submit(start_with_hand_offs([DOG], await hand_off(source, DOG)), 1)
        await worker.submitted(submitted)
        worker.dispatcher.abandon([submitted])
        assert worker.engine.cancelled == [submitted]
        assert worker.pool.counts.held == 3, "the engine may still be reading them"
        worker.cancelled(submitted)
        assert worker.outbox.take() is None


async def test_a_cancel_that_comes_as_the_media_do_still_gives_one_end() -> None:
    async with encode_worker() as source, media_worker() as worker:
        first = worker.submit(start_with_hand_offs([CAT], await hand_off(source, CAT)))
        await worker.submitted(first)
        worker.finish(first)
        assert worker.outbox.take() is not None
        for num_turns in range(4):
            # They are here already: with the second turn of the loop the request is the engine's.
            id = worker.submit(start_with_hand_offs([CAT], await hand_off(source, CAT)))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            worker.dispatcher.cancel(id)
            if id in worker.engine.requests:
                assert (num_turns > 1, worker.engine.cancelled[-1:]) == (True, [id])
                worker.cancelled(id)
            assert await worker.outcome() == "CANCELLED"
            assert (id in worker.engine.requests) == (num_turns > 1)
            await worker.dispatcher.wait_idle(WAIT_S)
        await until(source.is_clean)


async def test_a_request_that_waits_for_its_media_is_a_request_like_any_other() -> None:
    async with encode_worker() as source, media_worker() as worker:
        hand_offs = await hand_off(source, CAT, CAT)
        start = start_with_hand_offs([CAT], hand_offs[:1], router_id="r", router_request_number=3)
        id = worker.submit(start)
        assert worker.dispatcher.starts.watermarks() == worker.dispatcher.starts.arrivals() == {"r": 3}
        with pytest.raises(DuplicateRequestError):
            worker.submit(replace(start, media=start_with_hand_offs([CAT], hand_offs[1:]).media), 1)
        worker.dispatcher.drain()
        with pytest.raises(DrainingError):
            worker.submit(start_with_hand_offs([CAT], hand_offs[1:]), 1)
        await worker.submitted(id)
        worker.finish(id)
        assert worker.dispatcher.num_running == 0


async def test_a_decode_is_counted_in_once_it_runs() -> None:
    async with encode_worker() as source, media_worker(RequestKind.DECODE) as worker:
        start = start_with_hand_offs([CAT], await hand_off(source, CAT), router_id="r", router_request_number=1)
        id = worker.submit(start)
        await worker.submitted(id)
        assert worker.dispatcher.starts.watermarks() == {"r": 0}
        worker.finish(id)
        assert worker.dispatcher.starts.watermarks() == {"r": 1}


async def test_an_engine_that_dies_meanwhile_fails_the_request() -> None:
    async with encode_worker() as source, media_worker() as worker:
        worker.submit(start_with_hand_offs([CAT], await hand_off(source, CAT)))
        worker.engine.is_closed = True
        assert await worker.outcome() == "ENGINE_FAILED"
        assert worker.pool.counts.cached == 2


async def test_media_that_contradict_the_prompt_are_refused_by_name() -> None:
    async with encode_worker() as source, media_worker() as worker:
        hand_offs = await hand_off(source, CAT, DOG)
        good = start_with_hand_offs([CAT, DOG], hand_offs)
        first, second = good.media
        opaque = replace(hand_offs[1], payload=OpaquePayload("other", b""))
        spans = (good.generation.media[0], replace(good.generation.media[1], num_tokens=8))
        bad: list[tuple[WorkerStart, str]] = [
            (replace(good, media=(first, replace(second, media_id=name_of(CAT)))), "media[1].media_id"),
            (replace(good, media=(first, MediaInput(name_of(DOG), opaque))), "media[1].hand_off"),
            (replace(good, generation=replace(good.generation, media=spans)), "media[1].hand_off"),
        ]
        for start, field in bad:
            with pytest.raises((InvalidRequestError, LayoutMismatchError)) as caught:
                worker.submit(start)
            assert caught.value.field == field
        assert source.source.counts.held == 2, "nothing of a refused start was touched"


async def test_embeddings_of_another_model_are_refused_and_nothing_is_claimed() -> None:
    async with encode_worker() as source, media_worker(model_fingerprint="another") as worker:
        with pytest.raises(LayoutMismatchError, match="model_fingerprint"):
            worker.submit(start_with_hand_offs([CAT], await hand_off(source, CAT)))


async def test_a_worker_of_text_refuses_media_by_name() -> None:
    async with encode_worker() as source, media_worker(has_media=False) as worker:
        with pytest.raises(UnsupportedFieldError) as caught:
            worker.submit(start_with_hand_offs([CAT], await hand_off(source, CAT)))
        assert caught.value.field == "media"
