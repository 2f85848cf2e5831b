"""Dispatchers of requests with media, on an engine that computes nothing but with real pulls into a real pool."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from quartet.discovery.host import host_identity
from quartet.engine.base import Failed, Finished, FinishReason, Generation, Prefilled, RequestKind, Started, StepOutput
from quartet.errors import RequestCancelledError
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.embedding_pool import EmbeddingPool
from quartet.kvcache.layout import EmbeddingsPayload, HandOff
from quartet.media.items import MediaFile
from quartet.rpc.channels import create_channel
from quartet.streams.messages import MediaInput, RequestContext, WorkerStart
from quartet.streams.outbox import DecodeOutbox, PrefillOutbox
from quartet.telemetry.encode_metrics import EncodeMetrics
from quartet.telemetry.metrics import WorkerMetrics
from quartet.telemetry.tracing import Tracer
from quartet.transfer.base import EmbeddingMemory, FetchResult
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.puller import TransferPuller
from quartet.v1 import decode_pb2
from services.workers.dispatch import DecodeDispatcher, PrefillDispatcher
from services.workers.embedding_store import EmbeddingStore
from services.workers.files import FileEncoder, FileSizer
from services.workers.media import MediaStage, TowerQueue
from tests.services.fake_encoder import FakeEncoder, embedding_memory, name_of
from tests.services.stream_workers import until
from tests.services.stub_engine import StubEngine

PLACEHOLDER_ID = 99

_request_ids = itertools.count(1)


class NoHolds:
    """Nothing is handed off: every prefill is finished by its token."""

    def offer(self, *_: object) -> HandOff:
        raise AssertionError("nothing is to be handed off")

    def withdraw(self, _holder: int) -> None:
        return


@dataclass
class MediaWorker:
    """One dispatcher with one stream.

    Attributes:
        fetched: what came from other workers.
    """

    engine: StubEngine
    dispatcher: DecodeDispatcher | PrefillDispatcher
    stage: MediaStage | None
    pool: EmbeddingPool
    outbox: DecodeOutbox | PrefillOutbox
    fetched: list[FetchResult] = field(default_factory=list)

    def submit(self, start: WorkerStart, slot: int = 0) -> int:
        """Run ``start``; the id to cancel it by."""
        return self.dispatcher.submit(start, self.outbox, slot, lambda: None)  # type: ignore[arg-type]

    async def submitted(self, id: int) -> None:
        """Until the engine has it."""
        await until(lambda: id in self.engine.requests)

    def finish(self, id: int) -> None:
        """Have the engine bring a request to its good end."""
        if isinstance(self.dispatcher, PrefillDispatcher):
            prefilled = Prefilled(id, 7, 0, queue_s=0.0, compute_s=0.0, finished=FinishReason.LENGTH)
            self.dispatcher.route(StepOutput(prefilled=[prefilled]))
        else:
            self.dispatcher.route(StepOutput(started=[Started(id, 0, 0.0)]))
            self.dispatcher.route(StepOutput(finished=[Finished(id, FinishReason.LENGTH, 1)]))

    def cancelled(self, id: int) -> None:
        """Have the engine bring a request to the end that ``cancel`` gives it."""
        self.dispatcher.route(StepOutput(failed=[Failed(id, RequestCancelledError("cancelled"))]))

    async def outcome(self, slot: int = 0) -> str:
        """The reason of the one failure of a slot."""
        await until(lambda: self.outbox.owes(slot))
        message = self.outbox.take()
        assert message is not None
        ends = message.failures if isinstance(message, decode_pb2.DecodeResponse) else message.outputs
        [failure] = [end.failure for end in ends if end.slot == slot]
        assert self.outbox.take() is None
        return f"{failure.reason} {failure.field}".strip()

    def is_clean(self) -> bool:
        counts = self.pool.counts
        return not (self.dispatcher.num_running or counts.held or counts.in_use)


@asynccontextmanager
async def media_worker(
    kind: RequestKind = RequestKind.PREFILL,
    *,
    encoder: FakeEncoder | None = None,
    sizer: FakeEncoder | None = None,
    read_states: str | None = None,
    has_media: bool = True,
    model_fingerprint: str = "fake",
    max_waiting_items: int = 64,
    max_waiting_pixels: int = 10_000,
    max_size_bytes: int = 1_000,
    embeddings: EmbeddingMemory | None = None,
    tracer: Tracer | None = None,
) -> AsyncIterator[MediaWorker]:
    """One with a pool of embeddings, or of text alone; everything is taken down in the end.

    ``sizer`` is of files that the engine reads by itself, ``read_states`` of which engine's hand-offs it does.
    ``embeddings``: the pool, where it is not the encoder's or a new one.
    """
    registry, config = CollectorRegistry(), TransferConfig(hand_off_ttl_s=10.0)
    if embeddings is None:
        new = embedding_memory(model_fingerprint=model_fingerprint)
        embeddings = encoder.embeddings if encoder is not None else new
    engine = StubEngine(embeddings=embeddings)
    fetched: list[FetchResult] = []
    puller = TransferPuller(
        lambda address: create_channel(address, None), host=host_identity(), config=config, on_fetch=fetched.append
    )
    puller.attach(embeddings.memory, embeddings.layout)
    pool = EmbeddingPool(embeddings.memory.num_blocks, embeddings.layout.block_size)
    store, metrics = EmbeddingStore(pool, field="media"), EncodeMetrics(registry)
    stage = None
    if has_media:
        stage = MediaStage(
            store,
            puller,
            metrics,
            files=None if encoder is None else FileEncoder(encoder, store, metrics, max_size_bytes=max_size_bytes),
            read_files=None if sizer is None else FileSizer(sizer, metrics, max_size_bytes=max_size_bytes),
            read_states=read_states,
            placeholder_id=PLACEHOLDER_ID,
            tower_queue=TowerQueue(max_items=max_waiting_items, max_pixels=max_waiting_pixels),
        )
    dispatcher: DecodeDispatcher | PrefillDispatcher
    if kind is RequestKind.PREFILL:
        dispatcher = PrefillDispatcher(engine, NoHolds(), "stub", WorkerMetrics(registry), stage, tracer)
    else:
        dispatcher = DecodeDispatcher(engine, WorkerMetrics(registry), stage, tracer)
    worker = MediaWorker(engine, dispatcher, stage, pool, dispatcher.new_outbox(), fetched)
    try:
        yield worker
        await until(worker.is_clean)
    finally:
        if stage is not None:
            await stage.close()
        await puller.close()


def start_with_files(files: Sequence[MediaFile], prompt: Sequence[int], **context: object) -> WorkerStart:
    """A prompt with a placeholder for each file."""
    return _start(
        Generation(prompt_token_ids=tuple(prompt)), [MediaInput(name_of(file), file) for file in files], context
    )


def start_with_hand_offs(files: Sequence[MediaFile], hand_offs: Sequence[HandOff], **context: object) -> WorkerStart:
    """A prompt of nothing but the files' tokens, which their fakes begin with, and one more."""
    spans: list[MediaSpan] = []
    position = 0
    for file, hand_off in zip(files, hand_offs, strict=True):
        is_counted = isinstance(hand_off.payload, EmbeddingsPayload)
        num_tokens = hand_off.payload.num_tokens if is_counted else int(file.data.split()[0])  # type: ignore[union-attr]
        spans.append(MediaSpan(name_of(file), position, num_tokens))
        position += num_tokens
    generation = Generation(prompt_token_ids=(PLACEHOLDER_ID,) * position + (1,), media=tuple(spans))
    media = [MediaInput(name_of(file), hand_off) for file, hand_off in zip(files, hand_offs, strict=True)]
    return _start(generation, media, context)


def _start(generation: Generation, media: Sequence[MediaInput], context: dict[str, object]) -> WorkerStart:
    named = {"request_id": f"{next(_request_ids):032x}", **context}
    return WorkerStart(context=RequestContext(**named), generation=generation, media=tuple(media))  # type: ignore[arg-type]
