"""What one router process is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from quartet.discovery.create import DiscoveryConfig
from quartet.errors import ConfigError
from quartet.rpc.seal import MAX_SEAL_TTL_S
from quartet.rpc.server import ServerConfig
from quartet.rpc.session import SessionLimits
from quartet.telemetry.logging import LogConfig
from router.admission import AdmissionConfig
from router.attempt_tools import AttemptConfig
from router.media.config import MediaConfig
from router.policy.create import PolicyConfig


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """One router process.

    Attributes:
        server: where gRPC listens; its ``tls`` is also what workers are dialled with.
        http_address: ``host:port`` of /metrics, /livez and /readyz, in the clear.
        policy: how places are chosen.
        media: what requests may name of media.
        max_request_timeout_s: caps every request's time.
        heartbeat_timeout_s: a worker silent for longer gets nothing new.
        stall_timeout_s: a client that takes nothing for so long loses its request, or its session.
        session: bounds of each session.
        seal_keys_file: keys that seal placements (see ``quartet.rpc.seal_keys``); ``None``: Place is not offered.
        seal_ttl_s: a placement must be taken up within it. Less where a hand-off's lease is shorter.
        events_key_file: the key that workers serve their events with (see ``quartet.events.curve``); ``None``: they are
            listened to in the clear.
        custom_chat_template: a Jinja file that lays out the chats of every model here, in place of the model's own.
            Read once; routers that clients may take for each other are given equal ones.
        trusted_gateways: names of client identities whose ``tenant`` is believed.
        drain_timeout_s: running requests get this long to end after SIGTERM.
    """

    server: ServerConfig = field(default_factory=lambda: ServerConfig(address="127.0.0.1:50050"))
    http_address: str = "127.0.0.1:0"
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    attempts: AttemptConfig = field(default_factory=AttemptConfig)
    max_request_timeout_s: float = 600.0
    heartbeat_timeout_s: float = 30.0
    stall_timeout_s: float = 30.0
    session: SessionLimits = field(default_factory=SessionLimits)
    seal_keys_file: Path | None = None
    seal_ttl_s: float = 20.0
    events_key_file: Path | None = None
    custom_chat_template: Path | None = None
    trusted_gateways: tuple[str, ...] = ()
    drain_timeout_s: float = 30.0
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name in ("max_request_timeout_s", "heartbeat_timeout_s", "stall_timeout_s", "drain_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0")
        if not 0 < self.seal_ttl_s < MAX_SEAL_TTL_S:
            raise ConfigError(f"seal_ttl_s: must be above 0 and below {MAX_SEAL_TTL_S:g}")
        self.server.check_beside(self.http_address, "http_address")
