"""Where a process publishes KV events in vLLM's form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quartet.errors import ConfigError
from quartet.events.vllm import EventForm
from quartet.rpc.channels import ListenAddress

_MAX_PORT = (1 << 16) - 1


@dataclass(frozen=True, kw_only=True)
class VllmFeedConfig:
    """A feed in vLLM's form. It says which tokens are in every block, so prompts can be read from it.

    Attributes:
        address: ``host:port`` that the PUB socket binds.
        replay_port: of the ROUTER on the same host that replays the last batches; 0 takes a free one, ``None``: there
            are no replays.
        topic: first frame of every message.
        form: ``map`` as vLLM writes events from 0.24 on, ``array`` as before.
    """

    address: str = "127.0.0.1:5557"
    replay_port: int | None = None
    topic: str = ""
    form: EventForm = EventForm.MAP

    def __post_init__(self) -> None:
        _ = self.listening
        if self.replay_port is not None and not 0 <= self.replay_port <= _MAX_PORT:
            raise ConfigError(f"replay_port: must be a port, not {self.replay_port}")

    @property
    def listening(self) -> ListenAddress:
        """The address of the PUB socket."""
        return ListenAddress.parse(self.address, "address")

    def check_reach(self, setting: str, key_file: Path | None, *, is_insecure: bool) -> None:
        """Refuse an address that other hosts can reach without a key, unless ``is_insecure``.

        Raises:
            ConfigError: naming ``setting``.
        """
        if key_file is None and not is_insecure:
            self.listening.require_loopback(f"{setting}.address", "events_key_file, or insecure: true")
