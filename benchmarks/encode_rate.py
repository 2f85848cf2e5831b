"""How many images a second one Encode worker takes, asked directly: one after the other, and so that batches are full.

Both ways alternate. What the worker hands off is let go after each turn, off the clock.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

import grpc

from benchmarks.encode_images import noise_image
from benchmarks.encode_stack import ENCODE
from benchmarks.processes import CpuMeter
from benchmarks.scrape import Metrics
from benchmarks.stack import Stack
from quartet.discovery.host import host_identity
from quartet.media.items import MediaFile, MediaItem, MediaKind
from quartet.rpc.channels import create_channel
from quartet.streams.convert.inner import from_encoded_item, to_encode_start
from quartet.streams.messages import EncodedItem, EncodeStart, RequestContext
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.puller import TransferPuller
from quartet.v1 import encode_pb2, encode_pb2_grpc

_TIMEOUT_S = 60.0
_CLIENT = "client"


class Load(StrEnum):
    """How the worker is asked."""

    BATCH_1 = "batch_1"  # a stream with one image after the other
    BATCH_8 = "batch_8"  # several streams with eight images each


@dataclass(frozen=True)
class _Turn:
    """Streams of one turn.

    The tower takes what is decoded by the time that it is free: one stream after the other would not fill its batches.
    """

    num_streams: int
    num_images_each: int
    num_at_once: int

    @property
    def num_images(self) -> int:
        """Of all streams."""
        return self.num_streams * self.num_images_each


_TURNS = {Load.BATCH_1: _Turn(16, 1, 1), Load.BATCH_8: _Turn(12, 8, 3)}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One turn.

    Attributes:
        cpu_s: that the worker's process used.
        others_share: cores that everything but worker and client used meanwhile.
        items: what the worker told of each image.
        num_batches: that the tower took them in.
    """

    duration_s: float
    cpu_s: float
    others_share: float
    items: Sequence[EncodedItem]
    num_batches: int


@dataclass(frozen=True, kw_only=True)
class RateFigures:
    """Medians over all turns.

    Attributes:
        cpu_ms_per_image: of the worker's process, all threads.
        mean_batch_size: images in one run of the tower.
        before_tower_ms: from an image's arrival until the tower began with it: decoding and preprocessing, and where
            others come before it, their time in the tower.
        tower_ms: of one run of the tower.
        others_share: as of ``Sample``.
    """

    images_per_s: float
    cpu_ms_per_image: float
    mean_batch_size: float
    before_tower_ms: float
    tower_ms: float
    others_share: float


async def measure_rate(stack: Stack, num_rounds: int, on_round: Callable[[int], None]) -> Mapping[str, RateFigures]:
    """By ``Load``. ``on_round`` is told the number of each round; the first, 0, makes the worker warm.

    Raises:
        grpc.aio.AioRpcError: the worker refused an image.
        RuntimeError: it did not encode each image once.
    """
    samples: dict[Load, list[Sample]] = {load: [] for load in Load}
    rng = random.Random(0)
    async with _connected(stack) as client:
        for number in range(num_rounds + 1):
            on_round(number)
            for load in Load:
                sample = await client.take(_TURNS[load], rng)
                if number:
                    samples[load].append(sample)
    return {load: summarize(of_load) for load, of_load in samples.items()}


def summarize(samples: Sequence[Sample]) -> RateFigures:
    """Medians of ``samples``, at least one."""
    items = [item for sample in samples for item in sample.items]
    return RateFigures(
        images_per_s=statistics.median(len(sample.items) / sample.duration_s for sample in samples),
        cpu_ms_per_image=1e3 * statistics.median(sample.cpu_s / len(sample.items) for sample in samples),
        mean_batch_size=statistics.median(len(sample.items) / sample.num_batches for sample in samples),
        before_tower_ms=1e3 * statistics.median(item.queue_s for item in items),
        tower_ms=1e3 * statistics.median(item.compute_s for item in items),
        others_share=statistics.median(sample.others_share for sample in samples),
    )


class _Client:
    """Asks the Encode worker of ``stack``, and lets go of what it holds."""

    def __init__(self, stack: Stack, channel: grpc.aio.Channel, puller: TransferPuller) -> None:
        self._stack = stack
        self._stub = encode_pb2_grpc.EncodeServiceStub(channel)
        self._puller = puller

    async def take(self, turn: _Turn, rng: random.Random) -> Sample:
        """One turn with images that are made beforehand."""
        streams = [_make_start(turn.num_images_each, rng) for _ in range(turn.num_streams)]
        before = await self._metrics()
        meter = CpuMeter({ENCODE: self._stack.pids[ENCODE], _CLIENT: os.getpid()})
        items = await self._encode_all(streams, turn.num_at_once)
        use = meter.read()
        tower = (await self._metrics()).since(before)
        await asyncio.gather(*(self._puller.keep(item.hand_off).abort() for item in items))
        if not len(items) == turn.num_images == tower.total("quartet_encode_batched_items_total"):
            raise RuntimeError(f"{len(items)} of {turn.num_images} images came, or not each of them was encoded")
        return Sample(
            duration_s=use.duration_s,
            cpu_s=use.cpu_s[ENCODE],
            others_share=use.others_share,
            items=items,
            num_batches=round(tower.total("quartet_encode_batches_total")),
        )

    async def _encode_all(self, starts: Iterable[encode_pb2.EncodeStart], num_at_once: int) -> list[EncodedItem]:
        left, items = iter(starts), list[EncodedItem]()

        async def take_turns() -> None:
            for start in left:
                items.extend(await self._encode(start))

        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_once):
                group.create_task(take_turns())
        return items

    async def _encode(self, start: encode_pb2.EncodeStart) -> list[EncodedItem]:
        requests = iter([encode_pb2.EncodeRequest(start=start)])
        return [
            from_encoded_item(response.encoded)
            async for response in self._stub.Encode(requests, timeout=_TIMEOUT_S)
            if response.HasField("encoded")
        ]

    async def _metrics(self) -> Metrics:
        return (await self._stack.metrics())[ENCODE]


@asynccontextmanager
async def _connected(stack: Stack) -> AsyncIterator[_Client]:
    puller = TransferPuller(
        lambda address: create_channel(address, None), host=host_identity(), config=TransferConfig()
    )
    try:
        async with create_channel(stack.worker_addresses[ENCODE], None) as channel:
            yield _Client(stack, channel, puller)
    finally:
        await puller.close()


def _make_start(num_images: int, rng: random.Random) -> encode_pb2.EncodeStart:
    items = (MediaItem(b"", MediaFile(MediaKind.IMAGE, noise_image(rng))) for _ in range(num_images))
    return to_encode_start(EncodeStart(context=RequestContext(), items=tuple(items)))
