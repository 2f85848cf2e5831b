"""Configuration of one router process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quartet.api.request import SessionLimits
from quartet.discovery.base import Role
from quartet.discovery.checks import check_address, check_name
from quartet.discovery.create import DiscoveryConfig
from quartet.errors import ConfigError
from quartet.rpc.channels import ListenAddress
from quartet.rpc.server import ServerConfig
from quartet.streams.signed_start import MAX_SIGNED_START_TTL_S
from quartet.telemetry.logging import LogConfig
from quartet.telemetry.tracing import TracingConfig
from router.http.config import HttpConfig
from router.media.config import MediaConfig
from router.policy.create import PolicyConfig
from router.tenants import TenantConfig, check_identity_tenants, has_domains


@dataclass(frozen=True, kw_only=True)
class AttemptConfig:
    """Limits of one choice's attempts.

    Attributes:
        max_attempts: after so many failed attempts the choice fails with the last one's error. One that ended because
            its worker was drained, or had a full queue, does not count.
        max_lost_workers: once so many workers' processes have ended while they had the choice, it fails, because it may
            be the cause. One that went away in order, or is back in the same life, does not count. So with encodes.
        reserve_tokens: a decode worker must have room for the prompt, the generated tokens, and this many tokens
            more (or the remaining tokens, if fewer).
        encode_timeout_s: longest encode of a request's media at one worker, the worker's queue included.
        prefill_timeout_s: longest prefill hop, the worker's queue included.
        decode_start_timeout_s: longest wait for a decode worker's first message, its queue and the transfer included.
        decode_stall_timeout_s: longest silence of a decode worker after that.
    """

    max_attempts: int = 5
    max_lost_workers: int = 3
    reserve_tokens: int = 512
    encode_timeout_s: float = 60.0
    prefill_timeout_s: float = 120.0
    decode_start_timeout_s: float = 120.0
    decode_stall_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name in ("max_attempts", "max_lost_workers", "reserve_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1")
        for name in ("encode_timeout_s", "prefill_timeout_s", "decode_start_timeout_s", "decode_stall_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0")


# Limits of the router's queues.


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig:
    """Limits of tokenizing. Short texts are tokenized at once; the rest of them wait for a thread.

    Attributes:
        num_threads: threads that tokenize; one tenant's texts use all but one of them. Each slows the event loop:
            templates are laid out in Python, and one lock lets one thread at a time run Python.
        max_queued_characters: of all texts that wait for a thread, each counting as 16,384 at least. Of more, the last
            text of the tenant that has most of it is refused.
        retry_delay_s: the delay that refused clients are asked to wait.
    """

    num_threads: int = 2
    max_queued_characters: int = 64 << 20
    retry_delay_s: float = 1.0

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name in ("num_threads", "max_queued_characters"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1")
        if self.retry_delay_s <= 0:
            raise ConfigError("retry_delay_s: must be above 0")


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """Limits of the queue.

    Attributes:
        max_queue_length: most choices that may wait; more are refused at once. Retries are always queued.
        max_queued_prompt_bytes: memory of all prompts whose requests have arrived and are not placed yet: 8 bytes a
            token, the text that it came as, and 16 KiB a request. Of more, the last request of the tenant that has most
            is refused. One that waits alone is taken.
        queue_timeout_s: longest wait for room.
        unavailable_timeout_s: longest wait while no decode worker is ready at all.
        retry_delay_s: the delay that refused clients are asked to wait.
        untaken_share: of a pool, what one tenant's placements may hold before their clients take them up; those of all
            tenants that one caller names may hold that and half of the rest.
        prediction_life_s: how long a prompt's blocks count as cached where it was sent, without word from KV events.
    """

    max_queue_length: int = 4096
    max_queued_prompt_bytes: int = 512 << 20
    queue_timeout_s: float = 60.0
    unavailable_timeout_s: float = 10.0
    retry_delay_s: float = 1.0
    untaken_share: float = 0.5
    prediction_life_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name in ("max_queue_length", "max_queued_prompt_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1")
        for name in ("queue_timeout_s", "unavailable_timeout_s", "retry_delay_s", "prediction_life_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0")
        if not 0 < self.untaken_share <= 1:
            raise ConfigError("untaken_share: must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """How many calls may be open, of those that may stay open without costing their tenant anything.

    Of one connection, of one identity over all its connections (where clients show certificates), and in all. More are
    refused with RESOURCE_EXHAUSTED, but of sessions in all an idle one ends (SESSION_IDLE) for each that is opened.

    Attributes:
        max_sessions: sessions in all; each takes 40 KB of the router's memory.
        max_generates: calls of Generate in all; each takes 40 KB of the router's memory. gRPC gives one connection
            10,000 calls of all kinds, whatever stands here.
    """

    max_sessions: int = 4096
    max_sessions_of_identity: int = 1024
    max_sessions_of_connection: int = 256
    max_generates: int = 40_000
    max_generates_of_identity: int = 20_000
    max_generates_of_connection: int = 10_000

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """One router process.

    Attributes:
        router_id: its name in discovery; empty: one drawn at each start.
        advertise_host: host that clients and other routers dial, for all ports that other hosts can reach; empty: the
            host that ``server`` listens on.
        server: where gRPC listens; the router also dials workers with its ``tls``.
        events_address: ``host:port`` that the ZMQ PUB socket binds which tells other routers what this one sends.
        http_address: ``host:port`` of /metrics, /livez and /readyz, without TLS.
        http: OpenAI's API over HTTP.
        policy: how requests are placed.
        tenants: what each tenant may do, by its name or a pattern of names (``team-*``; ``*``: all others). An exact
            name goes first, then the first pattern that fits.
        tokenizing: how texts are tokenized.
        media: media that requests may name.
        prefill_pools: by namespace, ``host:port`` of routers that prefill for this one (docs/global.md); without any
            they are found in ``discovery``.
        max_request_timeout_s: upper limit of every request's time.
        required_roles: each of these needs a ready worker before the router says that it is ready (gRPC health and
            /readyz): encode, prefill, decode. Requests that need another role wait for it.
        heartbeat_timeout_s: a worker that is silent for longer gets no new requests, and those that it has continue on
            others. After half of that the router asks it; an answer is as good as a heartbeat.
        stall_timeout_s: a client that reads nothing for this long, or opens a stream and sends nothing, loses it.
        session: limits of each session.
        calls: how many sessions and calls of Generate may be open.
        signing_keys_file: keys that sign placements (``quartet.streams.signed_start``); ``None``: Place is not offered.
        signed_start_ttl_s: a client must bring a placement to its worker within this time; less if a hand-off expires
            sooner.
        events_key_file: the key with which workers and routers serve their events (see ``quartet.events.curve``);
            ``None``: without encryption, which is refused with ``server.tls``.
        custom_chat_template: a Jinja file that lays out the chats of every model here, instead of the model's own.
            Read once; routers that share clients need the same one.
        usage_log: a file that gets a JSON line for each request (``router.usage_log``); ``None``: there is none.
        trusted_gateways: names of client identities that may use every tenant.
        identity_tenants: by name of a client identity, the tenants that it may use, as names or patterns (``acme-*``);
            a request of it that names none is its first tenant's. An identity that is in neither setting is its own
            tenant.
        drain_timeout_s: running requests get this long to end after SIGTERM.
    """

    router_id: str = ""
    advertise_host: str = ""
    server: ServerConfig = field(default_factory=lambda: ServerConfig(address="127.0.0.1:50050"))
    events_address: str = "127.0.0.1:0"
    http_address: str = "127.0.0.1:0"
    http: HttpConfig = field(default_factory=HttpConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    tokenizing: TokenizeConfig = field(default_factory=TokenizeConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    prefill_pools: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attempts: AttemptConfig = field(default_factory=AttemptConfig)
    max_request_timeout_s: float = 600.0
    required_roles: tuple[Role, ...] = (Role.DECODE,)
    heartbeat_timeout_s: float = 8.0
    stall_timeout_s: float = 30.0
    session: SessionLimits = field(default_factory=SessionLimits)
    calls: CallLimits = field(default_factory=CallLimits)
    signing_keys_file: Path | None = None
    signed_start_ttl_s: float = 20.0
    events_key_file: Path | None = None
    custom_chat_template: Path | None = None
    usage_log: Path | None = None
    trusted_gateways: tuple[str, ...] = ()
    identity_tenants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    drain_timeout_s: float = 30.0
    log: LogConfig = field(default_factory=LogConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name in ("max_request_timeout_s", "heartbeat_timeout_s", "stall_timeout_s", "drain_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0")
        if Role.ROUTER in self.required_roles:
            raise ConfigError("required_roles: must be of encode, prefill and decode")
        if not 0 < self.signed_start_ttl_s < MAX_SIGNED_START_TTL_S:
            raise ConfigError(f"signed_start_ttl_s: must be above 0 and below {MAX_SIGNED_START_TTL_S:g}")
        self.server.check_beside(self.http_address, "http_address")
        self.server.check_events_key(self.events_key_file)
        self._check_names()
        self._check_prefill_pools()
        self._check_http()
        check_identity_tenants(self.identity_tenants, self.trusted_gateways)
        if self.identity_tenants and not self.knows_callers:
            raise ConfigError("identity_tenants: takes server.tls with require_client_cert, which shows who calls")
        if has_domains(self.tenants) and not self.knows_callers and not self.server.is_loopback:
            raise ConfigError(
                "tenants: beyond loopback, trust domains take server.tls with require_client_cert: without it all"
                " clients are one tenant"
            )

    def _check_names(self) -> None:
        try:
            if self.router_id:
                check_name("router_id", self.router_id)
            if self.advertise_host:
                check_address("advertise_host", f"{self.advertise_host}:1")
        except ValueError as error:
            raise ConfigError(str(error)) from error
        address = ListenAddress.parse(self.events_address, "events_address")
        if self.events_key_file is None and not self.server.insecure:
            address.require_loopback("events_address", "events_key_file, or server.insecure: true")

    def _check_prefill_pools(self) -> None:
        for namespace, addresses in self.prefill_pools.items():
            try:
                check_name(f"prefill_pools.{namespace}", namespace)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            for index, address in enumerate(addresses):
                ListenAddress.parse(address, f"prefill_pools.{namespace}[{index}]")

    def host_of(self, address: str) -> str:
        """The host that others dial for what listens on ``address``; empty: they can't know."""
        listening = ListenAddress.parse(address, "address")
        if listening.is_loopback:
            return listening.host  # as it is: other hosts can't reach it under any name
        return self.advertise_host or ("" if listening.is_wildcard else listening.host)

    def _check_http(self) -> None:
        """HTTP is as open as gRPC, and no more."""
        if not self.http.port:
            return
        if self.http.tls is None:
            self.server.check_beside(f"{self.http.host}:{self.http.port}", "http.host")
        if self.knows_callers and self.http.keys_file is None:
            raise ConfigError("http.keys_file: is missing; server.tls lets in no caller without a name, nor may HTTP")

    @property
    def knows_callers(self) -> bool:
        """Whether callers show certificates, which name them."""
        return self.server.tls is not None and self.server.tls.require_client_cert
