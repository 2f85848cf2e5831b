"""One tenant's flood of large pictures before a real encode worker: another tenant's picture comes in its turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from quartet.api.request import GenerateStart, TokenPrompt
from quartet.discovery.base import Rank
from quartet.events.load import WorkerLoad
from quartet.kvcache.layout import HandOff
from quartet.media.items import MediaFile
from quartet.streams.convert.workers import rank_load
from quartet.streams.encode_client import EncodeCall, EncodeClient
from quartet.streams.messages import EncodeStart
from quartet.text.model_text import MediaText
from tests.router.fakes import MODEL_TEXT, FakeHops, Fleet, collect
from tests.router.media_fakes import PLACEHOLDER
from tests.router.test_generate import make_start
from tests.services.encode_workers import EncodeWorker, encode_worker
from tests.services.fake_encoder import FINGERPRINT, PIXELS_PER_TOKEN, FakeEncoder, embedding_memory, picture
from tests.services.stream_workers import until

MAX_RUNNING, LARGE = 4, 16
SMALL = picture("small", 1)
OUTPUT = 12


class OneByOne(FakeEncoder):
    """Encodes the pictures in the order in which they came, one for each permit."""

    def __init__(self) -> None:
        super().__init__(embedding_memory(1024))
        self.permits = asyncio.Semaphore(0)
        self.may_encode = self

    async def wait(self) -> None:
        await self.permits.acquire()


@dataclass
class EncodeHops(FakeHops):
    """Encodes at a real worker; the other hops are fakes. Each hand-off that was pulled is as good as dropped."""

    client: EncodeClient = field(init=False)

    def encode(self, rank: Rank, start: EncodeStart, on_encoded: Callable[[HandOff], None]) -> EncodeCall:
        def came(hand_off: HandOff) -> None:
            self.held.add(hand_off.hand_off_id)
            on_encoded(hand_off)

        self._note("encode", rank, start)
        return self.client.start(start, came)


async def report(fleet: Fleet, worker: EncodeWorker, loads: list[int]) -> None:
    """Tell the router of the worker's load whenever it has changed."""
    async for _ in worker.reports.outputs():
        stats, starts = worker.dispatcher.stats(), worker.dispatcher.starts
        loads.append(stats[0].num_running + stats[0].num_waiting)
        fleet.table.report(
            WorkerLoad(
                worker_id="encode-0",
                epoch=1,
                ranks=tuple(rank_load(one, time.monotonic()) for one in stats),
                router_progress=starts.watermarks(),
                router_arrivals=starts.arrivals(),
            ),
            0.0,
        )


@asynccontextmanager
async def flooded(*, max_waiting_pixels: int) -> AsyncIterator[tuple[Fleet, OneByOne, list[int]]]:
    """A fleet with one encode worker, its encoder, and the items that the worker had at each report."""
    encoder, loads, fleet = OneByOne(), [0], Fleet(hops=EncodeHops())
    fleet.texts.text = replace(MODEL_TEXT, media=MediaText(PLACEHOLDER, FINGERPRINT))
    fleet.media.fingerprint = FINGERPRINT
    async with encode_worker(encoder, max_running=MAX_RUNNING, max_waiting_pixels=max_waiting_pixels) as worker:
        fleet.hops.client = EncodeClient("encode-0", worker.channel, fleet.hops.drop)
        reporting = asyncio.create_task(report(fleet, worker, loads))
        fleet.join("encode-0", media=("image",), max_media_tokens=LARGE, block_size=4, num_blocks=1024)
        fleet.join("prefill-0", media=("hand_off",), num_blocks=10_000)
        fleet.join("decode-0", num_blocks=10_000)
        worker.reports.changed()
        await until(lambda: len(loads) > 1)
        try:
            yield fleet, encoder, loads
        finally:
            await fleet.hops.client.close()
            reporting.cancel()


def about(file: MediaFile, tenant: str) -> GenerateStart:
    return make_start(prompt=TokenPrompt((10, PLACEHOLDER, 11)), media=(file,), tenant=tenant)


async def test_a_flood_of_large_pictures_keeps_another_tenants_picture_waiting_only_for_those_that_run() -> None:
    async with flooded(max_waiting_pixels=MAX_RUNNING * LARGE * PIXELS_PER_TOKEN) as (fleet, encoder, loads):
        files = [picture(f"large {number}", LARGE) for number in range(20)]
        flood = [asyncio.create_task(collect(fleet.generate(about(file, "flood")))) for file in files]
        await until(lambda: fleet.encode_queue.length == 20 - MAX_RUNNING and encoder.num_waiting == MAX_RUNNING)
        small = asyncio.create_task(collect(fleet.generate(about(SMALL, "few"))))
        await until(lambda: fleet.encode_queue.length == 21 - MAX_RUNNING)
        for number in range(21):
            encoder.permits.release()
            await until(lambda number=number: len(encoder.encoded) == number + 1)
            await until(lambda number=number: encoder.num_waiting == min(MAX_RUNNING, 20 - number))
        assert encoder.encoded.index(SMALL) == MAX_RUNNING
        for answer in await asyncio.gather(small, *flood):
            assert len(answer.token_ids[0]) == OUTPUT
        assert max(loads) == MAX_RUNNING
        assert len(fleet.hops.calls) == 3 * 21, "nothing was refused, and nothing was tried twice"
        fleet.assert_nothing_left()


async def test_pictures_that_the_worker_refuses_after_all_wait_and_fail_no_request() -> None:
    """It takes fewer pixels than its load report promises."""
    async with flooded(max_waiting_pixels=LARGE * PIXELS_PER_TOKEN) as (fleet, encoder, _loads):
        files = [picture(f"large {number}", LARGE) for number in range(8)]
        flood = [asyncio.create_task(collect(fleet.generate(about(file, "flood")))) for file in files]
        await until(lambda: len(fleet.pauses) > 20)
        for _ in files:
            encoder.permits.release()
        for answer in await asyncio.gather(*flood):
            assert len(answer.token_ids[0]) == OUTPUT
        assert len(encoder.encoded) == 8
        fleet.assert_nothing_left()


async def test_a_picture_that_the_worker_has_is_paid_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with flooded(max_waiting_pixels=LARGE * PIXELS_PER_TOKEN) as (fleet, encoder, _loads):
        corrections: list[tuple[str, int]] = []
        monkeypatch.setattr(fleet.encode_queue, "charge", lambda *charged: corrections.append(charged))
        encoder.permits.release()
        for tenant in ("first", "second"):
            await collect(fleet.generate(about(SMALL, tenant)))
        # The first was charged for the largest item, the second for the known size.
        assert corrections == [("first", 1 - LARGE), ("second", -1)]
