"""A media file above a worker's own bound is refused by name, wherever it comes."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from quartet.discovery.base import Role
from quartet.engine.base import RequestKind
from quartet.errors import MediaTooLargeError
from quartet.streams.client import PrefillClient
from quartet.streams.convert.messages import to_encode_start
from quartet.v1 import encode_pb2, encode_pb2_grpc
from services.workers.config import WorkerConfig
from tests.services.encode_workers import encode_worker, make_encode_start
from tests.services.fake_encoder import FakeEncoder, picture
from tests.services.media_workers import PLACEHOLDER_ID, media_worker, start_with_files
from tests.services.stream_workers import until
from tests.services.worker_processes import worker_process

SMALL, LARGE = picture("cat"), picture("c" * 40)


@pytest.mark.parametrize("kind", list(RequestKind))
async def test_a_start_with_a_larger_file_is_refused_naming_it(kind: RequestKind) -> None:
    encoder = FakeEncoder()
    async with media_worker(kind, encoder=encoder, max_size_bytes=len(SMALL.data)) as worker:
        worker.submit(start_with_files([SMALL, LARGE], [1, PLACEHOLDER_ID, PLACEHOLDER_ID, 2]))
        assert await worker.outcome() == "MEDIA_TOO_LARGE media[1].file"
        id = worker.submit(start_with_files([SMALL], [1, PLACEHOLDER_ID, 2]), 1)
        await worker.submitted(id)
        worker.finish(id)
    assert encoder.encoded == [SMALL]


async def test_an_encode_start_with_a_larger_file_is_refused_naming_it() -> None:
    async with encode_worker(max_size_bytes=len(SMALL.data)) as worker:
        with pytest.raises(
            MediaTooLargeError, match="has 42 bytes, more than the 5 that max_file_size_mb allows"
        ) as caught:
            await worker.encode(make_encode_start([SMALL, LARGE]))
        assert caught.value.field == "items[1].file"
        assert len((await worker.encode(make_encode_start([SMALL]))).hand_offs) == 1
        assert worker.encoder.encoded == [SMALL]
        worker.source.close()
        await until(worker.is_clean)


async def test_an_encode_worker_keeps_to_its_configured_file_size(tmp_path: Path) -> None:
    async with worker_process(
        tmp_path, Role.ENCODE, encoder_factory=lambda _config, _pool: FakeEncoder(), max_file_size_mb=0.00001
    ) as worker:
        stream = encode_pb2_grpc.EncodeServiceStub(worker.channel).Encode()
        await stream.write(encode_pb2.EncodeRequest(start=to_encode_start(make_encode_start([LARGE]))))
        await stream.done_writing()
        with pytest.raises(grpc.aio.AioRpcError, match="more than the 10 that max_file_size_mb allows"):
            async for _ in stream:
                raise AssertionError("it is taken")


async def test_a_prefill_worker_with_a_tower_keeps_to_its_configured_file_size(tmp_path: Path) -> None:
    engine = {"dtype": "float32", "num_blocks": 8, "num_threads": 1, "modality": "multimodal"}
    async with worker_process(
        tmp_path,
        Role.PREFILL,
        engine=engine,
        encoder_factory=lambda _config, pool: FakeEncoder(pool),
        max_file_size_mb=0.00001,
    ) as worker:
        prefills = PrefillClient("prefill", worker.channel, lambda _: None, lambda _: None)
        with pytest.raises(MediaTooLargeError, match="more than the 10 that max_file_size_mb allows") as caught:
            await prefills.start(start_with_files([LARGE], [1, PLACEHOLDER_ID, 2])).outcome()
        assert caught.value.field == "media[0].file"


def test_a_megabyte_is_a_million_bytes() -> None:
    assert WorkerConfig(model_path="m", max_file_size_mb=0.5).max_file_size_bytes == 500_000
