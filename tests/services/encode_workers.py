"""Encode workers as the processes wire them, but on an encoder without a model: real streams, servers and transfers."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from prometheus_client import CollectorRegistry

from quartet.discovery.host import host_identity
from quartet.kvcache.embedding_pool import EmbeddingPool
from quartet.kvcache.hand_off import HandOffState
from quartet.kvcache.layout import HandOff
from quartet.media.items import MediaFile, MediaItem
from quartet.rpc.channels import MAX_STREAM_MESSAGE_BYTES, create_channel
from quartet.rpc.errors import from_rpc_error
from quartet.rpc.server import RpcServer, ServerConfig, Service
from quartet.streams.convert.media import from_media_size
from quartet.streams.convert.messages import from_encoded_item, to_encode_start
from quartet.streams.messages import EncodedItem, EncodeStart, RequestContext
from quartet.streams.server import StreamLimits
from quartet.telemetry.encode_metrics import EncodeMetrics
from quartet.telemetry.metrics import WorkerMetrics
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.servicer import TransferServicer, add_transfer_servicer
from quartet.transfer.shm import ShmServer
from quartet.transfer.source import TransferSource
from quartet.v1 import encode_pb2, encode_pb2_grpc
from services.encode.encode import EncodeDispatcher, PoolReports
from services.encode.servicer import encode_service
from services.workers.embedding_store import EmbeddingStore
from services.workers.files import FileEncoder
from services.workers.media import TowerQueue
from tests.services.fake_encoder import FakeEncoder
from tests.services.stream_workers import EPOCH

_request_ids = itertools.count(1)


@dataclass
class Encoded:
    """What one request brought."""

    sizes: list[encode_pb2.MediaSize] = field(default_factory=list)
    items: dict[int, EncodedItem] = field(default_factory=dict)

    @property
    def hand_offs(self) -> list[HandOff]:
        return [self.items[index].hand_off for index in sorted(self.items)]

    def take(self, message: encode_pb2.EncodeResponse) -> None:
        if message.HasField("sized"):
            assert not self.sizes, "sizes come once"
            assert not self.items, "sizes come first"
            for size in message.sized.items:
                from_media_size(size)
                self.sizes.append(size)
        else:
            assert self.sizes
            item = from_encoded_item(message.encoded)
            assert item.item not in self.items
            self.items[item.item] = item


@dataclass
class EncodeWorker:
    """One worker, serving."""

    encoder: FakeEncoder
    pool: EmbeddingPool
    dispatcher: EncodeDispatcher
    reports: PoolReports
    source: TransferSource
    server: RpcServer
    channel: grpc.aio.Channel
    registry: CollectorRegistry

    def stream(self) -> grpc.aio.StreamStreamCall[encode_pb2.EncodeRequest, encode_pb2.EncodeResponse]:
        """A new call of Encode."""
        return encode_pb2_grpc.EncodeServiceStub(self.channel).Encode()  # type: ignore[no-any-return]

    async def encode(self, start: EncodeStart) -> Encoded:
        """All that comes for ``start``; raises what the call fails with."""
        stream, encoded = self.stream(), Encoded()
        try:
            await stream.write(encode_pb2.EncodeRequest(start=to_encode_start(start)))
            await stream.done_writing()
            async for message in stream:
                encoded.take(message)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return encoded

    def is_clean(self) -> bool:
        counts = self.pool.counts
        return not (
            self.dispatcher.num_running or counts.held or counts.in_use or self.dispatcher.stats()[0].num_waiting
        )


def make_encode_start(files: Sequence[MediaFile], media_ids: Sequence[bytes] = (), **context: object) -> EncodeStart:
    """A start with a request id of its own, unless ``context`` has one."""
    named = {"request_id": f"{next(_request_ids):032x}", **context}
    items = [MediaItem(name, file) for name, file in itertools.zip_longest(media_ids, files, fillvalue=b"")]
    return EncodeStart(context=RequestContext(**named), items=tuple(items))  # type: ignore[arg-type]


@asynccontextmanager
async def encode_worker(
    encoder: FakeEncoder | None = None,
    *,
    limits: StreamLimits | None = None,
    hand_off_ttl_s: float = 10.0,
    max_waiting_items: int = 64,
    max_waiting_pixels: int = 10_000,
    max_size_bytes: int = 2_000_000,
    room_timeout_s: float = 10.0,
    max_running: int = 0,
) -> AsyncIterator[EncodeWorker]:
    """A worker on loopback; everything is taken down in the end."""
    encoder = encoder or FakeEncoder()
    memory, layout = encoder.embeddings.memory, encoder.embeddings.layout
    pool = EmbeddingPool(memory.num_blocks, layout.block_size, has_events=True)
    reports = PoolReports(encoder, pool)
    store = EmbeddingStore(pool, field="items", on_change=reports.changed, room_timeout_s=room_timeout_s)
    dispatchers: list[EncodeDispatcher] = []

    def ended(holder: int, state: HandOffState) -> None:
        dispatchers[0].release(holder, was_taken=state is HandOffState.TAKEN)

    transfer = TransferConfig(hand_off_ttl_s=hand_off_ttl_s)
    source = TransferSource(worker_id="encoder", epoch=EPOCH, config=transfer, on_end=ended, memory=memory)
    registry = CollectorRegistry()
    metrics = EncodeMetrics(registry)
    files = FileEncoder(encoder, store, metrics, max_size_bytes=max_size_bytes)
    tower_queue = TowerQueue(max_items=max_waiting_items, max_pixels=max_waiting_pixels)
    dispatcher = EncodeDispatcher(
        encoder,
        files,
        store,
        source,
        WorkerMetrics(registry),
        metrics,
        engine_name="fake",
        tower_queue=tower_queue,
        max_running=max_running,
        on_change=reports.changed,
    )
    dispatchers.append(dispatcher)
    shm = ShmServer(memory)
    await shm.start()
    pulls = TransferServicer(source, host=host_identity(), config=transfer, shm=shm)
    transfers = Service("quartet.v1.TransferService", lambda server: add_transfer_servicer(pulls, server))
    services = [encode_service(dispatcher, limits or StreamLimits()), transfers]
    server = RpcServer(ServerConfig(max_receive_message_bytes=MAX_STREAM_MESSAGE_BYTES), services)
    address = f"127.0.0.1:{await server.start()}"
    source.advertise(address)
    channel = create_channel(address, None)
    try:
        yield EncodeWorker(encoder, pool, dispatcher, reports, source, server, channel, registry)
    finally:
        await channel.close()
        await server.drain(0.0)
        source.close()
        reports.close()
        await shm.close()
        assert pool.counts.held == pool.counts.in_use == 0, "what nobody can want any more is held"
