"""Pictures are decoded beside the loop that reads all streams, and requests that wait for that can be ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from quartet.engine.base import EngineRequest, Failed, Finished, RequestKind
from quartet.engine.settings import Modality
from quartet.engine.trtllm import inputs
from quartet.errors import RequestCancelledError, UnsupportedFieldError, WorkerUnavailableError
from tests.engine.trtllm.engines import WAIT_S, Running, asked, greedily, running, stand_in
from tests.engine.trtllm.media import NUM_TOKENS, image_file, media_request
from tests.fakes.driving import LOOK, STORY, greedy, picture, token_ids_of


class Door:
    """Holds the decoding of pictures until a test opens it."""

    def __init__(self) -> None:
        self.reached, self.is_open = threading.Semaphore(0), threading.Event()
        self.threads: set[str] = set()

    def decode(self, *given: Any, **named: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        self.reached.release()
        assert self.is_open.wait(WAIT_S)
        return _decode(*given, **named)

    async def wait_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.acquire, timeout=WAIT_S)


_decode = vars(inputs)["decode"]


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    door = Door()
    monkeypatch.setattr(inputs, "decode", door.decode)
    with stand_in():
        yield door
        door.is_open.set()


def picture_request(id: int, **changes: Any) -> EngineRequest:
    made = media_request(
        token_ids_of(LOOK), [NUM_TOKENS], inputs=[image_file(picture())], sampling=greedily(6), **changes
    )
    return replace(made, id=id, kind=RequestKind.DECODE)


async def worker_at(door: Door, decode: Running) -> EngineRequest:
    request = picture_request(1_000_001)
    decode.engine.submit(request)
    await door.wait_reached()
    return request


async def test_other_streams_go_on_while_a_picture_is_decoded(door: Door) -> None:
    async with running(modality=Modality.MULTIMODAL) as decode:
        request = await worker_at(door, decode)
        assert isinstance(await decode.end_of(asked(STORY, 3)), Finished)
        assert request.id not in decode.consumer.terminal
        door.is_open.set()
        assert isinstance(await decode.consumer.wait_terminal(request), Finished)
        assert decode.tokens_of(request) == greedy(LOOK, 6, picture())


async def test_a_request_that_waits_for_its_picture_is_cancelled_at_once(door: Door) -> None:
    async with running(modality=Modality.MULTIMODAL) as decode:
        request = await worker_at(door, decode)
        num_calls = len(decode.control.calls)
        decode.engine.cancel(request.id)
        decode.engine.cancel(request.id)
        end = await decode.consumer.wait_terminal(request)
        assert isinstance(end, Failed)
        assert isinstance(end.error, RequestCancelledError)
        [stats] = decode.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        door.is_open.set()
        assert isinstance(await decode.end_of(asked(STORY, 2)), Finished)
        assert len(decode.control.calls) == num_calls + 1, "it was never given to the engine"


async def test_many_pictures_wait_for_few_threads(door: Door) -> None:
    async with running(modality=Modality.MULTIMODAL) as decode:
        requests = [picture_request(1_000_001 + number) for number in range(12)]
        for request in requests:
            decode.engine.submit(request)
        await door.wait_reached()
        door.is_open.set()
        for request in requests:
            assert isinstance(await decode.consumer.wait_terminal(request), Finished)
        assert len(door.threads) <= 4


async def test_the_picture_of_a_refused_request_is_not_decoded(door: Door) -> None:
    async with running(modality=Modality.MULTIMODAL) as decode:
        end = await decode.end_of(picture_request(1_000_001, adapter="none"))
        assert isinstance(end, Failed)
        assert isinstance(end.error, UnsupportedFieldError)
        assert not door.threads


async def test_closing_ends_those_that_wait(door: Door) -> None:
    async with running(modality=Modality.MULTIMODAL) as decode:
        request = await worker_at(door, decode)
        closing = asyncio.create_task(decode.engine.close())
        end = await decode.consumer.wait_terminal(request)
        assert isinstance(end, Failed)
        assert isinstance(end.error, WorkerUnavailableError)
        door.is_open.set()
        await closing
