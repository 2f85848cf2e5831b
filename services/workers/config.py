"""What one worker process is told: its model, engine, addresses and limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from quartet.discovery.create import DiscoveryConfig
from quartet.engine.mock import MockSettings
from quartet.engine.scheduler import SchedulerConfig
from quartet.errors import ConfigError
from quartet.rpc.address import ListenAddress
from quartet.rpc.inner_server import StreamLimits
from quartet.rpc.server import ServerConfig
from quartet.telemetry.logging import LogConfig
from quartet.transfer.config import TransferConfig
from services.workers.addresses import Listening


class EngineKind(StrEnum):
    """Which engine computes."""

    TORCH = "torch"
    MOCK = "mock"  # takes a model's time and computes nothing


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The engine and the pool it works in.

    Attributes:
        kind: which engine.
        dtype: of weights and KV cache, as PyTorch names it; ``auto``: the checkpoint's own. For ``torch`` only.
        device: ``cpu``, or ``cuda:N``. For ``torch`` only.
        num_blocks: KV blocks of each rank's pool.
        data_parallel_size: attention-data-parallel ranks, each a place to route to. The engine ``torch`` has one.
        block_size: tokens of a block.
        max_model_len: tokens of prompt and output together; ``None``: what the model was made for.
        num_threads: CPU threads of one operation; ``None``: the library's choice.
        num_embedding_blocks: blocks of the pool of media embeddings, of ``block_size`` tokens each, where the model
            takes media.
        encodes_media: a prefill or decode worker loads the model's vision tower too, and takes media files.
        mock: how fast the engine ``mock`` is.
    """

    kind: EngineKind = EngineKind.TORCH
    dtype: str = "auto"
    device: str = "cpu"
    num_blocks: int = 512
    data_parallel_size: int = 1
    block_size: int = 32
    max_model_len: int | None = None
    num_threads: int | None = None
    num_embedding_blocks: int = 512
    encodes_media: bool = False
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    mock: MockSettings = field(default_factory=MockSettings)

    def __post_init__(self) -> None:
        """Refuse ranks that an engine does not have, naming the field."""
        if self.data_parallel_size < 1:
            raise ConfigError(f"data_parallel_size: must be at least 1, not {self.data_parallel_size}")
        if self.kind is EngineKind.TORCH and self.data_parallel_size != 1:
            raise ConfigError(f"data_parallel_size: the engine torch has one rank, not {self.data_parallel_size}")
        if self.num_embedding_blocks < 1:
            raise ConfigError(f"num_embedding_blocks: must be at least 1, not {self.num_embedding_blocks}")
        if self.kind is EngineKind.MOCK and self.encodes_media:
            raise ConfigError("encodes_media: the engine mock takes text only")


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """The vision tower of an encode worker, or of another one that encodes media.

    Attributes:
        max_batch_size: items in one run of the tower.
        max_pixels: of one picture; 4096 x 4096 by default.
        max_waiting_items: items that may wait for the tower; those of further requests are refused.
        max_waiting_pixels: the same of pixels that are to be decoded.
    """

    max_batch_size: int = 8
    max_pixels: int = 16_777_216
    max_waiting_items: int = 256
    max_waiting_pixels: int = 268_435_456

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name in ("max_batch_size", "max_pixels", "max_waiting_items", "max_waiting_pixels"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """One worker process.

    Attributes:
        worker_id: its name in discovery; empty: role, host name and process id.
        model_name: what requests call the model by; empty: the name of the model's folder.
        model_path: folder with config.json, tokenizer and safetensors files; the engine ``mock`` needs no weights.
        encoder: the vision tower, where there is one.
        server: where gRPC listens.
        advertise_host: host that peers dial, for all ports that others than this host can reach; empty: the one that
            ``server`` listens on.
        http_address: ``host:port`` of /metrics, /livez and /readyz, in the clear.
        events_address: ``host:port`` that the ZMQ PUB socket binds.
        events_key_file: the key that events are served with (see ``quartet.events.curve``); ``None``: in the clear,
            which takes loopback, or ``server.insecure``.
        seal_keys_file: keys that verify sealed starts, for decode workers (see ``quartet.rpc.seal_keys``); ``None``:
            none is taken.
        drain_timeout_s: running requests get this long to end after SIGTERM.
        stall_timeout_s: work in flight and no step for so long is NOT_SERVING.
    """

    worker_id: str = ""
    model_name: str = ""
    model_path: str
    engine: EngineSettings = field(default_factory=EngineSettings)
    encoder: EncoderSettings = field(default_factory=EncoderSettings)
    server: ServerConfig = field(default_factory=ServerConfig)
    advertise_host: str = ""
    http_address: str = "127.0.0.1:0"
    events_address: str = "127.0.0.1:0"
    events_key_file: Path | None = None
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    streams: StreamLimits = field(default_factory=StreamLimits)
    log: LogConfig = field(default_factory=LogConfig)
    seal_keys_file: Path | None = None
    drain_timeout_s: float = 30.0
    stall_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if not self.model_path:
            raise ConfigError("model_path: must name the model's folder")
        for name in ("drain_timeout_s", "stall_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0")
        _ = self.listening

    @property
    def listening(self) -> Listening:
        """What it listens on, and what peers are told. Raises ``ConfigError`` for what is refused."""
        return Listening(
            grpc=ListenAddress.parse(self.server.address, "server.address"),
            events=self._events_listening(),
            http=self.server.check_beside(self.http_address, "http_address"),
            host=self.advertise_host,
        )

    def _events_listening(self) -> ListenAddress:
        address = ListenAddress.parse(self.events_address, "events_address")
        if self.events_key_file is None and not self.server.insecure:
            address.require_loopback("events_address", "events_key_file, or server.insecure: true")
        return address
