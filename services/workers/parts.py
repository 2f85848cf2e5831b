"""The parts of a role: what its worker's process gives them (``Surroundings``) and asks of them (``Parts``).

Factories make engines and encoders from a worker's configuration; tests pass others.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

from prometheus_client import CollectorRegistry

from quartet.discovery.base import Abilities, HostIdentity, Role
from quartet.engine import catalog
from quartet.engine.base import Engine, RequestKind
from quartet.engine.encoder import MediaEncoder, MediaSizer
from quartet.rpc.channels import Dialer
from quartet.rpc.server import Service
from quartet.streams.signed_start import SigningKeys
from quartet.telemetry.metrics import CertificateMetrics, CertificateUse, ReloadedFile, ReloadMetrics, WorkerMetrics
from quartet.telemetry.tracing import Tracer
from quartet.transfer.base import BlockMemory, EmbeddingMemory, FetchResult, Puller
from quartet.transfer.grpc.puller import TransferPuller
from quartet.transfer.source import TransferSource
from services.workers.config import WorkerConfig
from services.workers.kv_events import SnapshotSource
from services.workers.requests import Computing, RequestBook
from services.workers.worker import TransferTotals

#: Makes an engine, not started yet, that runs requests of one kind and pulls hand-offs by the puller.
EngineFactory: TypeAlias = Callable[[WorkerConfig, RequestKind, Puller], Engine]

#: Makes an encoder, not started yet, that writes to the given pool, or to one of its own.
EncoderFactory: TypeAlias = Callable[[WorkerConfig, EmbeddingMemory | None], MediaEncoder]

#: Makes the sizer of files that an engine reads by itself.
SizerFactory: TypeAlias = Callable[[WorkerConfig], MediaSizer]


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The worker around a role's parts."""

    config: WorkerConfig
    role: Role
    worker_id: str
    epoch: int
    host: HostIdentity
    registry: CollectorRegistry
    metrics: WorkerMetrics
    certificates: CertificateMetrics
    reloads: ReloadMetrics
    tracer: Tracer | None = None
    transfers: TransferTotals = field(default_factory=TransferTotals)

    def signing_keys(self) -> SigningKeys | None:
        """The keys of signed starts; ``None``: it has none. Raises ``ConfigError``: the file can't be used."""
        file = self.config.signing_keys_file
        return None if file is None else SigningKeys(file, count=self.reloads.counter(ReloadedFile.SIGNING_KEYS))

    def puller(self) -> TransferPuller:
        """A new puller, not attached to a pool yet. Raises ``ConfigError``: a file of ``server.tls`` can't be used."""
        dialer = Dialer(self.config.server.tls)
        self.certificates.watch(CertificateUse.DIAL, dialer.certificate_end)
        return TransferPuller(
            partial(dialer.open, is_bulk=True),
            host=self.host,
            config=self.config.transfer,
            on_fetch=self._fetched,
        )

    def _fetched(self, result: FetchResult) -> None:
        self.metrics.observe_transfer(result.way, result.size_bytes, result.duration_s)
        self.transfers.add(result)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A role's parts once they are wired.

    Attributes:
        computing: the engine; the worker ends when it dies.
        snapshots: gives all blocks that can be shared.
        requests: the role's dispatcher.
        service: the role's own RPC.
        watches: run as long as the worker; an exception of one of them ends the worker.
    """

    computing: Computing
    snapshots: SnapshotSource
    requests: RequestBook[Any]
    service: Service
    abilities: Abilities
    watches: Sequence[Callable[[], Coroutine[object, object, None]]] = ()


class Parts(Protocol):
    """Does a role's work."""

    async def start(self) -> None:
        """Load and warm up. Raises ``ConfigError`` or ``ServingError`` naming what is wrong; ``close`` even then."""
        ...

    @property
    def memory(self) -> BlockMemory | None:
        """The pool whose blocks it hands off; valid after ``start``."""
        ...

    def serve(self, source: TransferSource) -> Serving:
        """Wire all parts, once, after ``start``; hand-offs are offered in ``source``."""
        ...

    def hand_off_ended(self, holder: int, *, was_taken: bool) -> None:
        """The hand-off of ``holder`` has ended, pulled or not: free what it held."""
        ...

    async def close(self) -> None:
        """Free everything, in bounded time. May be called twice."""
        ...


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
    """The sizer of files for the engine that ``config`` names, if that engine reads media by itself.

    Raises:
        ConfigError, InvalidRequestError: sizes are unknown for this engine or model.
    """
    return catalog.create_media_sizer(config.engine_spec)
