"""The configuration of one worker process: model, engine, addresses and limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from quartet.config import PathText
from quartet.discovery.checks import is_address
from quartet.discovery.create import DiscoveryConfig
from quartet.engine.settings import EncoderSettings, EngineSettings, EngineSpec
from quartet.errors import ConfigError
from quartet.events.vllm_config import VllmFeedConfig
from quartet.media import file_size
from quartet.rpc.channels import ListenAddress
from quartet.rpc.server import ServerConfig
from quartet.streams.server import StreamLimits
from quartet.telemetry.logging import LogConfig
from quartet.telemetry.tracing import DEFAULT_ENDPOINT, TracingConfig
from quartet.text.parse import NO_PARSER, choose_parsers
from quartet.transfer.config import TransferConfig

#: Exit code of a worker whose id another process has taken; starting it again would take the id back from that one.
EXIT_REPLACED = 3


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """One worker process.

    Attributes:
        worker_id: its name in discovery; empty: role, host name and process id.
        model_name: the model's name in requests; empty: the name of its folder or repository.
        model_path: folder with config.json, tokenizer and safetensors files (the engine ``mock`` needs no weights), or
            a repository of the Hugging Face Hub, ``org/name`` or ``org/name@revision``, which is fetched.
        encoder: the vision tower, if there is one.
        server: where gRPC listens.
        advertise_host: host that peers dial, for all ports that other hosts can reach; empty: the host that ``server``
            listens on.
        http_address: ``host:port`` of /metrics, /livez and /readyz, in the clear.
        events_address: ``host:port`` that the ZMQ PUB socket binds.
        vllm_events: where KV events are published in vLLM's form, too, for other indexers; ``None``: nowhere.
        custom_jinja_template: a Jinja file that lays out chats in place of the model's own template. It belongs to the
            model's identity: all workers of a pool have the same.
        reasoning_parser, tool_call_parser: how routers find reasoning and tool calls in answers to chats, by
            name (``quartet.text.parse``); ``none``: not at all; empty: as the chat template says.
        allowed_local_media_path: refused. Routers fetch media; it is their setting ``media.allowed_local_paths``.
        max_file_size_mb: largest media file, in MB of 10**6 bytes. Routers have a setting of the same name and default.
        events_key_file: the key that encrypts events (see ``quartet.events.curve``); ``None``: not encrypted, which
            needs loopback or ``server.insecure``, and is refused with ``server.tls``.
        signing_keys_file: keys that verify signed starts, for decode workers (``quartet.streams.signed_start``);
            ``None``: signed starts are refused.
        drain_timeout_s: running requests get this long to end after SIGTERM; two seconds at most where another worker
            of the same role and model can go on with them.
        stall_timeout_s: after so long without a step while work is in flight, health is NOT_SERVING. A step that lasts
            for much longer than its forecast makes it so after 6 s already.
    """

    worker_id: str = ""
    model_name: str = ""
    model_path: PathText
    engine: EngineSettings = field(default_factory=EngineSettings)
    encoder: EncoderSettings = field(default_factory=EncoderSettings)
    server: ServerConfig = field(default_factory=ServerConfig)
    advertise_host: str = ""
    http_address: str = "127.0.0.1:0"
    events_address: str = "127.0.0.1:0"
    events_key_file: Path | None = None
    vllm_events: VllmFeedConfig | None = None
    custom_jinja_template: Path | None = None
    reasoning_parser: str = ""
    tool_call_parser: str = ""
    allowed_local_media_path: Path | None = None
    max_file_size_mb: float = file_size.DEFAULT_MAX_FILE_SIZE_MB
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    streams: StreamLimits = field(default_factory=StreamLimits)
    log: LogConfig = field(default_factory=LogConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    signing_keys_file: Path | None = None
    drain_timeout_s: float = 30.0
    stall_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if not self.model_path:
            raise ConfigError("model_path: must name the model's folder or repository")
        if self.allowed_local_media_path is not None:
            raise ConfigError(
                "allowed_local_media_path: workers follow no paths, they are given files; it belongs to the router "
                "(media.allowed_local_paths)"
            )
        for name in ("drain_timeout_s", "stall_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0")
        file_size.check_setting(self.max_file_size_mb)
        self.server.check_events_key(self.events_key_file)
        check_parsers(self.reasoning_parser, self.tool_call_parser)
        self._check_vllm_events()
        _ = self.listening

    @property
    def engine_spec(self) -> EngineSpec:
        """The specification of its engine and encoder."""
        return EngineSpec(
            model_path=self.model_path,
            engine=self.engine,
            encoder=self.encoder,
            tells_contents=self.vllm_events is not None,
            otlp_endpoint=(self.tracing.endpoint or DEFAULT_ENDPOINT) if self.tracing.enabled else "",
        )

    @property
    def max_file_size_bytes(self) -> int:
        """Largest media file, in bytes."""
        return file_size.in_bytes(self.max_file_size_mb)

    @property
    def listening(self) -> Listening:
        """The addresses that it listens on and advertises. Raises ``ConfigError`` for addresses that are refused."""
        return Listening(
            grpc=ListenAddress.parse(self.server.address, "server.address"),
            events=self._events_listening(),
            http=self.server.check_beside(self.http_address, "http_address"),
            host=self.advertise_host,
        )

    def _check_vllm_events(self) -> None:
        if self.vllm_events is None:
            return
        if not self.engine.kind.tells_contents:
            raise ConfigError(
                f"vllm_events: they need the tokens of blocks, and {self.engine.kind} gives on only names"
            )
        is_insecure = self.server.insecure
        self.vllm_events.check_reach("vllm_events", self.events_key_file, is_insecure=is_insecure)

    def _events_listening(self) -> ListenAddress:
        address = ListenAddress.parse(self.events_address, "events_address")
        if self.events_key_file is None and not self.server.insecure:
            address.require_loopback("events_address", "events_key_file, or server.insecure: true")
        return address


def check_parsers(reasoning_parser: str, tool_call_parser: str) -> None:
    """Refuse names that are unknown, or don't go together. Raises ``ConfigError`` naming the field."""
    reasoning, calls = ("" if name == NO_PARSER else name for name in (reasoning_parser, tool_call_parser))
    for field_name, names in (("reasoning_parser", (reasoning, "")), ("tool_call_parser", (reasoning, calls))):
        try:
            choose_parsers(*names)
        except ConfigError as error:
            raise ConfigError(f"{field_name}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Listening:
    """The configured addresses of a worker, and the host that peers dial.

    Attributes:
        host: that peers dial; empty: the host of ``grpc``.
    """

    grpc: ListenAddress
    events: ListenAddress
    http: ListenAddress
    host: str = ""

    def __post_init__(self) -> None:
        """Raises ``ConfigError`` if peers could not know what to dial."""
        if not self.host and self.grpc.is_wildcard:
            message = f"peers can't dial {self.grpc.host}, which server.address has: name the host that they can"
            raise ConfigError(f"advertise_host: {message}")
        advertised = self.advertise(grpc_port=1, events_port=1, http_port=1)
        for setting, address in (
            ("advertise_host" if self.host else "server.address", advertised.grpc),
            ("events_address", advertised.events.removeprefix("tcp://")),
            ("http_address", advertised.http),
        ):
            if not is_address(address):
                host = address.rpartition(":")[0]
                raise ConfigError(f"{setting}: peers can't dial {host!r}; IPv6 goes in brackets")

    def advertise(self, *, grpc_port: int, events_port: int, http_port: int) -> Advertised:
        """The addresses to announce, with the ports that were opened."""
        return Advertised(
            grpc=f"{self.host or self.grpc.host}:{grpc_port}",
            events=f"tcp://{self._host_of(self.events)}:{events_port}",
            http=f"{self._host_of(self.http)}:{http_port}",
        )

    def _host_of(self, address: ListenAddress) -> str:
        # A loopback address stays as it is: other hosts can't reach it under any name.
        if address.is_loopback:
            return address.host
        if self.host:
            return self.host
        return self.grpc.host if address.is_wildcard else address.host


@dataclass(frozen=True, kw_only=True)
class Advertised:
    """The addresses of a worker's record.

    Attributes:
        grpc: ``host:port``.
        events: ``tcp://host:port``.
        http: ``host:port``.
    """

    grpc: str
    events: str
    http: str
