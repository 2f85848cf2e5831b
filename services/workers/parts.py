"""What a role brings into its worker's process, and what it finds there."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from prometheus_client import CollectorRegistry

from quartet.discovery.base import HostIdentity, Role
from quartet.engine import catalog
from quartet.engine.base import Engine, RequestKind
from quartet.engine.encoder import MediaEncoder, MediaSizer
from quartet.rpc.channels import create_channel
from quartet.rpc.server import Service
from quartet.telemetry.metrics import WorkerMetrics
from quartet.transfer.base import EmbeddingMemory, PoolMemory, Puller
from quartet.transfer.grpc.puller import TransferPuller
from quartet.transfer.source import TransferSource
from services.workers.config import WorkerConfig
from services.workers.kv_events import SnapshotSource
from services.workers.requests import Computing, Requests


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The worker that parts are made for."""

    config: WorkerConfig
    role: Role
    worker_id: str
    epoch: int
    host: HostIdentity
    registry: CollectorRegistry
    metrics: WorkerMetrics

    def puller(self) -> TransferPuller:
        """A new one, of no pool yet."""
        tls = self.config.server.tls
        return TransferPuller(
            lambda address: create_channel(address, tls, is_bulk=True),
            host=self.host,
            config=self.config.transfer,
            on_fetch=lambda result: self.metrics.observe_transfer(result.way, result.size_bytes, result.duration_s),
        )


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What a worker's record says of its model and pool, as ``WorkerRecord`` has it."""

    model_fingerprint: str
    num_blocks: int
    block_size: int
    data_parallel_size: int = 1
    max_model_len: int = 0
    sampling_fields: tuple[str, ...] = ()
    media: tuple[str, ...] = ()
    max_media_tokens: int = 0
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A role's parts once they are wired.

    Attributes:
        computing: the worker lives as long as it.
        snapshots: all that it could share.
        service: the role's own RPC.
        watches: run as long as the worker does; what one of them raises ends it.
    """

    computing: Computing
    snapshots: SnapshotSource
    requests: Requests
    service: Service
    abilities: Abilities
    watches: Sequence[Callable[[], Coroutine[object, object, None]]] = ()


class Parts(Protocol):
    """What does a role's work."""

    async def start(self) -> None:
        """Load and warm up. Raises ``ConfigError`` or ``ServingError`` naming what is wrong; ``close`` even then."""
        ...

    @property
    def memory(self) -> PoolMemory | None:
        """The pool whose blocks it hands off; valid after ``start``."""
        ...

    def serve(self, source: TransferSource) -> Serving:
        """Wire everything, once, after ``start``; what is handed off is held in ``source``."""
        ...

    def hand_off_ended(self, holder: int, *, was_taken: bool) -> None:
        """What ``holder`` held in the source may go, pulled or not."""
        ...

    async def close(self) -> None:
        """Free everything, in bounded time. May be called twice."""
        ...


# What a worker's configuration says of its engine and encoder, and how tests put others in their rank.

#: Makes an engine, not started yet, that runs requests of one kind and pulls hand-offs by the puller.
EngineFactory: TypeAlias = Callable[[WorkerConfig, RequestKind, Puller], Engine]

#: Makes an encoder, not started yet, that writes to the given pool, or to one of its own.
EncoderFactory: TypeAlias = Callable[[WorkerConfig, EmbeddingMemory | None], MediaEncoder]

#: Makes what sizes the files that an engine reads by itself.
SizerFactory: TypeAlias = Callable[[WorkerConfig], MediaSizer]


def create_engine(config: WorkerConfig, kind: RequestKind, puller: Puller) -> Engine:
    """The engine that ``config`` names, not started yet. Raises ``ConfigError``: a setting out of range."""
    return catalog.create_engine(config.engine_spec, kind, puller)


def create_media_encoder(config: WorkerConfig, embeddings: EmbeddingMemory | None) -> MediaEncoder:
    """The encoder that ``config`` names, not started yet; it writes to ``embeddings``, or to a pool of its own.

    Raises:
        ConfigError: a setting out of range, or an engine without one.
    """
    return catalog.create_media_encoder(config.engine_spec, embeddings)


def create_media_sizer(config: WorkerConfig) -> MediaSizer:
    """What sizes files for the engine that ``config`` names, where that reads media by itself.

    Raises:
        ConfigError, InvalidRequestError: the engine, or the model, is none of which that can be told.
    """
    return catalog.create_media_sizer(config.engine_spec)
