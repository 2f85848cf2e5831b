"""The configuration of a consolidator, and what the variables of Dynamo's mean for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from quartet.config import Value
from quartet.errors import ConfigError
from quartet.events.vllm_config import VllmFeedConfig
from quartet.events.vllm_listener import REPLAY_TIMEOUT_S
from quartet.kvcache.consolidate import MAX_BLOCKS, MAX_RANKS
from quartet.rpc.channels import ListenAddress
from quartet.telemetry.logging import LogConfig

#: KVBM's names: whether there is a consolidator, the leader's port, and the one where TensorRT-LLM's events are.
ENABLE, LEADER_PORT, ENGINE_PORT = (
    "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR",
    "DYN_KVBM_LEADER_ZMQ_PUB_PORT",
    "DYN_KVBM_TRTLLM_ZMQ_PORT",
)

_TRUE = frozenset({"1", "true", "on", "yes"})
_DEFAULT_LEADER_PORT = 56001
# The feed that comes out is at the leader's port and this.
_OUTPUT_OFFSET = 1000
_MAX_PORT = (1 << 16) - 1
_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\[\]:/*\s]+):[1-9]\d{0,4}", re.ASCII)


class SourceKind(StrEnum):
    """Who publishes. All speak vLLM's form."""

    QUARTET = "quartet"  # a worker's ``vllm_events``
    VLLM = "vllm"
    TRTLLM = "trtllm"  # as Dynamo's worker publishes what TensorRT-LLM announces
    KVBM = "kvbm"  # blocks beyond the GPU


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source.

    Attributes:
        endpoint: ``tcp://host:port`` of its PUB socket.
        replay_endpoint: of the ROUTER that replays what was lost; empty: it has none, and a gap costs all it had.
        topic: messages whose first frame begins so are read; empty: all.
        name: in metrics and the log; empty: the kind.
        events_key_file: the key that the source serves with; ``None``: in the clear.
    """

    kind: SourceKind
    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""
    name: str = ""
    events_key_file: Path | None = None

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            text = getattr(self, name)
            if (text or name == "endpoint") and not _ENDPOINT.fullmatch(text):
                raise ConfigError(f"{name}: must be tcp://host:port, not {text!r}")

    @property
    def title(self) -> str:
        """What it is called."""
        return self.name or self.kind.value


@dataclass(frozen=True, kw_only=True)
class ConsolidatorConfig:
    """One consolidator.

    Attributes:
        is_enabled: false: the process says so, and ends.
        sources: at least one; their names differ.
        output: where the one feed is published.
        http_address: ``host:port`` of /metrics, /livez and /readyz, in the clear.
        events_key_file: the key that encrypts the output; ``None``: not encrypted, which needs loopback or
            ``insecure``.
        insecure: allows addresses other than loopback without a key.
        replay_timeout_s: a replay of which nothing came for so long is over.
        max_source_blocks: hashes that each source may have for its blocks, on all its ranks together; further ones are
            left out and counted.
        max_source_ranks: ranks on which each source may have blocks; those of further ones are left out and counted.
    """

    is_enabled: bool = True
    sources: tuple[SourceConfig, ...]
    output: VllmFeedConfig = field(default_factory=VllmFeedConfig)
    http_address: str = "127.0.0.1:0"
    events_key_file: Path | None = None
    insecure: bool = False
    replay_timeout_s: float = REPLAY_TIMEOUT_S
    max_source_blocks: int = MAX_BLOCKS
    max_source_ranks: int = MAX_RANKS
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("sources: must name at least one")
        names = [source.title for source in self.sources]
        if len(set(names)) < len(names):
            raise ConfigError("sources: two have one name; give each a name of its own")
        self.output.check_reach("output", self.events_key_file, is_insecure=self.insecure)
        if not self.insecure:
            ListenAddress.parse(self.http_address, "http_address").require_loopback("http_address", "insecure: true")
        if self.replay_timeout_s <= 0:
            raise ConfigError("replay_timeout_s: must be above 0")
        for name in ("max_source_blocks", "max_source_ranks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1")


def settings_of_environment(environment: Mapping[str, str]) -> dict[str, Value]:
    """The settings that KVBM's variables, or its defaults, stand for: TensorRT-LLM's port in, the leader's + 1000 out.

    Raises:
        ConfigError: a variable is no port, or the one that follows from it is none.
    """
    leader = _port(environment, LEADER_PORT, _DEFAULT_LEADER_PORT)
    if leader + _OUTPUT_OFFSET > _MAX_PORT:
        raise ConfigError(f"{LEADER_PORT}: {leader} + {_OUTPUT_OFFSET}, where the feed comes out, is no port")
    engine = _port(environment, ENGINE_PORT, leader)
    return {
        "is_enabled": environment.get(ENABLE, "true").lower() in _TRUE,
        "sources": [{"kind": SourceKind.TRTLLM.value, "endpoint": f"tcp://127.0.0.1:{engine}"}],
        "output": {"address": f"127.0.0.1:{leader + _OUTPUT_OFFSET}"},
    }


def _port(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal() or not 0 < int(text) <= _MAX_PORT:
        raise ConfigError(f"{name}: must be a port, not {text!r}")
    return int(text)
