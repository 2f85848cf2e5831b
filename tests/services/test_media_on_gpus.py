"""Pools of embeddings on fake GPUs: pictures go from an encode worker's process to who reads them by all ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from quartet.discovery.base import Role
from quartet.transfer.base import EmbeddingMemory, TransferWay
from tests.services.fake_encoder import (
    FakeEncoder,
    driver_of,
    embedding_memory,
    embeddings_on_gpu,
    picture,
    read,
    written,
)
from tests.services.media_workers import MediaWorker, media_worker, start_with_hand_offs
from tests.services.stream_workers import until
from tests.services.test_encode_process import encode
from tests.services.worker_processes import RunningWorker, worker_process
from tests.transfer.fake_cuda import FakeHost

CAT, DOG = picture("cat", 5), picture("dog", 9)
IPC, STAGED = TransferWay.CUDA_IPC, TransferWay.STAGED
#: As they are called in ``transfer.ways``.
HOST_WAYS = ["shm", "grpc"]


@pytest.fixture
def host() -> Iterator[FakeHost]:
    """Two GPUs that reach each other; afterwards no driver would have crashed, and all memory is free."""
    host = FakeHost(2)
    yield host
    assert host.faults == []
    assert host.used_bytes == 0


def pool(host: FakeHost, place: str) -> EmbeddingMemory:
    return embedding_memory() if place == "cpu" else embeddings_on_gpu(host, int(place.removeprefix("gpu")))


@asynccontextmanager
async def encoding(directory: Path, embeddings: EmbeddingMemory, **settings: object) -> AsyncIterator[RunningWorker]:
    """The process of an encode worker with this pool."""
    encoder = FakeEncoder(embeddings)
    async with worker_process(
        directory,
        Role.ENCODE,
        encoder_factory=lambda _config, _pool: encoder,
        **settings,  # type: ignore[arg-type]
    ) as worker:
        yield worker


@asynccontextmanager
async def reading(embeddings: EmbeddingMemory) -> AsyncIterator[MediaWorker]:
    """A prefill worker with this pool."""
    try:
        async with media_worker(embeddings=embeddings) as worker:
            yield worker
    finally:
        embeddings.memory.close()


async def check_pictures(source: RunningWorker, worker: MediaWorker, *files: object) -> None:
    """That the engine is given what the encoder wrote of each file."""
    encoded = await encode(source, *files)
    id = worker.submit(start_with_hand_offs(files, encoded.hand_offs))  # type: ignore[arg-type]
    await worker.submitted(id)
    embeddings, request = worker.engine.embeddings, worker.engine.requests[id]
    assert embeddings is not None
    for file, block_ids in zip(files, request.media_blocks, strict=True):
        assert read(embeddings, block_ids) == [written(file, index) for index in range(len(block_ids))]  # type: ignore[arg-type]
    worker.finish(id)


@pytest.mark.parametrize(
    ("there", "here", "ways", "taken"),
    [
        ("gpu0", "gpu0", None, IPC),
        ("gpu0", "gpu1", None, IPC),
        ("gpu0", "cpu", None, STAGED),
        ("cpu", "gpu0", None, STAGED),
        ("gpu0", "gpu1", HOST_WAYS, STAGED),
        ("gpu0", "gpu1", ["grpc"], STAGED),
    ],
)
async def test_a_picture_goes_from_encode_to_who_reads_it(
    tmp_path: Path, host: FakeHost, there: str, here: str, ways: list[str] | None, taken: TransferWay
) -> None:
    settings = {} if ways is None else {"transfer": {"ways": ways}}
    async with encoding(tmp_path, pool(host, there), **settings) as source, reading(pool(host, here)) as worker:
        announced = (TransferWay.SHM, TransferWay.GRPC) if there == "cpu" else (STAGED,) if ways else (IPC, STAGED)
        assert source.record.transfer_ways == announced
        await check_pictures(source, worker, CAT, DOG)
        assert [result.way for result in worker.fetched] == [taken, taken]
        await check_pictures(source, worker, CAT)
        assert len(worker.fetched) == 2, "it is here already"


async def test_between_gpus_that_cannot_peer_one_picture_fails_and_the_next_ones_are_staged(
    tmp_path: Path, host: FakeHost
) -> None:
    host.peers = False
    async with encoding(tmp_path, pool(host, "gpu0")) as source, reading(pool(host, "gpu1")) as worker:
        worker.submit(start_with_hand_offs([CAT], (await encode(source, CAT)).hand_offs))
        assert await worker.outcome() == "TRANSFER_FAILED"
        await check_pictures(source, worker, CAT, DOG)
        assert [result.way for result in worker.fetched] == [STAGED, STAGED]


async def test_a_picture_that_the_encode_worker_can_not_stage_is_a_failed_transfer(
    tmp_path: Path, host: FakeHost
) -> None:
    there = pool(host, "gpu0")
    async with encoding(tmp_path, there) as source, reading(pool(host, "cpu")) as worker:
        driver_of(there).failing["pin"] = "CUDA_ERROR_OUT_OF_MEMORY"
        worker.submit(start_with_hand_offs([CAT], (await encode(source, CAT)).hand_offs))
        assert await worker.outcome() == "TRANSFER_FAILED"
        await check_pictures(source, worker, CAT)


async def test_room_for_a_picture_is_not_given_away_while_the_gpu_copies_to_it(tmp_path: Path, host: FakeHost) -> None:
    here = pool(host, "gpu1")
    async with encoding(tmp_path, pool(host, "gpu0")) as source, reading(here) as worker:
        host.pause()
        id = worker.submit(start_with_hand_offs([CAT], (await encode(source, CAT)).hand_offs))
        await until(lambda: driver_of(here).count("wait") > 0)
        worker.dispatcher.cancel(id)
        for _ in range(10):
            await asyncio.sleep(0)
        assert worker.pool.counts.in_use == 2
        assert worker.dispatcher.num_running == 1
        host.resume()
        assert await worker.outcome() == "CANCELLED"
        assert worker.pool.counts.in_use == 0
        assert "MainThread" not in driver_of(here).threads_of("open", "close", "copy", "record", "wait")
