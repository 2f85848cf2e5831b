"""An encode worker's process on an encoder without a model: what it says of itself, and how it ends."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from quartet.discovery.base import Role
from quartet.errors import ConfigError, EngineError
from quartet.events.kv import KvBatch
from quartet.events.load import NumberedLoad
from quartet.events.subscriber import EventSubscriber
from quartet.media.media_id import media_hash
from quartet.streams.convert.messages import to_encode_start
from quartet.streams.worker_client import WorkerClient
from quartet.v1 import encode_pb2, encode_pb2_grpc
from tests.kvcache.replica import Replica
from tests.services.encode_workers import Encoded, make_encode_start
from tests.services.fake_encoder import BLOCK_SIZE, FakeEncoder, embedding_memory, name_of, picture
from tests.services.stream_workers import until
from tests.services.worker_processes import WAIT_S, RunningWorker, worker_process

CAT, DOG = picture("cat", 5), picture("dog", 9)


async def encode(worker: RunningWorker, *files: Any) -> Encoded:
    stream = encode_pb2_grpc.EncodeServiceStub(worker.channel).Encode()
    await stream.write(encode_pb2.EncodeRequest(start=to_encode_start(make_encode_start(files))))
    await stream.done_writing()
    encoded = Encoded()
    async for message in stream:
        encoded.take(message)
    return encoded


async def test_the_record_names_the_media_it_takes_and_the_blocks_it_holds(tmp_path: Path) -> None:
    encoder = FakeEncoder()
    async with worker_process(tmp_path, Role.ENCODE, encoder_factory=lambda _config, _pool: encoder) as worker:
        record = worker.record
        assert (record.role, record.media, record.max_media_tokens) == (Role.ENCODE, ("image",), 16)
        assert (record.num_blocks, record.block_size, record.model_fingerprint) == (8, BLOCK_SIZE, "fake")
        info = await WorkerClient(worker.channel).info(WAIT_S)
        assert info.record == record
        assert info.load.ranks[0].num_total_blocks == 8
        worker.stop.set()
        await asyncio.wait([worker.running])
    assert encoder.is_closed


async def test_its_cache_and_load_are_reported_like_any_workers(tmp_path: Path) -> None:
    encoder = FakeEncoder(embedding_memory(5))
    async with worker_process(tmp_path, Role.ENCODE, encoder_factory=lambda _config, _pool: encoder) as worker:
        loads: list[NumberedLoad] = []
        replica = Replica()

        def take(batch: KvBatch) -> None:
            replica.apply(batch.events)

        subscriber = EventSubscriber(loads.append, lambda: None, take)
        subscriber.connect(worker.record.events_address)
        await until(lambda: bool(loads))
        await encode(worker, CAT)
        await until(lambda: replica.parents == {media_hash(name_of(CAT)): None})
        await until(lambda: loads[-1].load.ranks[0].num_held_blocks == 2)
        snapshot = Replica()
        async for part in WorkerClient(worker.channel).kv_snapshot(WAIT_S):
            snapshot.apply(part.stored)
            assert part.number == 1
        assert snapshot.parents == replica.parents
        encoder.may_encode.clear()
        waiting = asyncio.create_task(encode(worker, DOG))
        await until(lambda: loads[-1].load.ranks[0].num_waiting == 1)
        encoder.may_encode.set()
        await waiting
        await until(lambda: len(replica.parents) == 2 and loads[-1].load.ranks[0].num_steps == 2)
        subscriber.close()
        body = await asyncio.to_thread(lambda: urlopen(f"http://{worker.record.http_address}/metrics").read().decode())
        assert 'quartet_encode_items_total{outcome="encoded"} 2.0' in body
        assert "quartet_encode_batches_total 2.0" in body
        assert "\nquartet_worker_model_load_seconds 0.0\n" not in body


async def test_a_tower_that_stands_still_shows_in_its_health(tmp_path: Path) -> None:
    encoder = FakeEncoder(is_held=True)
    async with worker_process(
        tmp_path, Role.ENCODE, encoder_factory=lambda _config, _pool: encoder, stall_timeout_s=0.2
    ) as worker:
        health = health_pb2_grpc.HealthStub(worker.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == HealthCheckResponse.SERVING
        waiting = asyncio.create_task(encode(worker, CAT))
        assert (await health.read()).status == HealthCheckResponse.NOT_SERVING
        encoder.may_encode.set()
        await waiting
        assert (await health.read()).status == HealthCheckResponse.SERVING
        health.cancel()


async def test_a_dead_tower_ends_the_process(tmp_path: Path) -> None:
    encoder = FakeEncoder()
    with pytest.raises(EngineError, match="vision tower"):
        async with worker_process(tmp_path, Role.ENCODE, encoder_factory=lambda _config, _pool: encoder) as worker:
            encoder.is_alive = False
            async with asyncio.timeout(WAIT_S):
                await asyncio.wait([worker.running])
            with pytest.raises(grpc.aio.AioRpcError):
                await encode(worker, CAT)


async def test_a_drain_waits_until_running_requests_are_encoded_and_pulled(tmp_path: Path) -> None:
    encoder = FakeEncoder(is_held=True)
    async with worker_process(
        tmp_path,
        Role.ENCODE,
        encoder_factory=lambda _config, _pool: encoder,
        transfer={"hand_off_ttl_s": 0.5},
        drain_timeout_s=WAIT_S,
    ) as worker:
        waiting = asyncio.create_task(encode(worker, CAT))
        await until(lambda: encoder.num_waiting == 1)
        worker.stop.set()
        await until_draining(worker)
        encoder.may_encode.set()
        assert len((await waiting).hand_offs) == 1
        # No worker comes for it: its expiry ends the wait.
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait([worker.running])


async def until_draining(worker: RunningWorker) -> None:
    async with asyncio.timeout(WAIT_S):
        while not (await WorkerClient(worker.channel).info(WAIT_S)).load.is_draining:
            pass


async def test_the_mock_engine_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.kind: the engine mock encodes no media"):
        async with worker_process(tmp_path, Role.ENCODE, engine={"kind": "mock"}):
            raise AssertionError("it serves")


@pytest.mark.grpcurl
async def test_grpcurl_encodes_a_file_that_is_in_the_start(tmp_path: Path, grpcurl: Path) -> None:
    encoder = FakeEncoder()
    async with worker_process(tmp_path, Role.ENCODE, encoder_factory=lambda _config, _pool: encoder) as worker:
        data = base64.b64encode(CAT.data).decode()
        start = {"start": {"items": [{"file": {"kind": "MEDIA_KIND_IMAGE", "data": data}}]}}
        arguments = ["-plaintext", "-d", json.dumps(start), worker.record.grpc_address]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            str(grpcurl), *arguments, "quartet.v1.EncodeService/Encode", stdout=pipe, stderr=pipe
        )
        async with asyncio.timeout(WAIT_S):
            out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        decoder, text, messages = json.JSONDecoder(), out.decode().strip(), []
        while text:
            message, end = decoder.raw_decode(text)
            messages.append(message)
            text = text[end:].strip()
        sized, encoded = messages
        assert sized["sized"]["items"][0]["num_tokens"] == 5
        assert encoded["encoded"]["hand_off"]["embeddings"]["num_tokens"] == 5
