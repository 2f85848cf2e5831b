"""What a deployment may set about hand-offs and transfers."""

from __future__ import annotations

from dataclasses import dataclass

from quartet.errors import ConfigError
from quartet.transfer.base import BlockMemory, TransferWay
from quartet.transfer.cuda.memory import DeviceMemory

#: The ways that exist here.
_SPOKEN = frozenset({TransferWay.CUDA_IPC, TransferWay.SHM, TransferWay.GRPC})


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Settings of both sides of a transfer.

    Attributes:
        hand_off_ttl_s: how long a hand-off lives without a renewal; pullers renew every third of it.
        max_pull_s: longest that one pull may take, from ``begin`` to ``finish``; both sides hold it. Less than what
            health takes for a standstill.
        stall_timeout_s: longest that a puller waits for the source's next message.
        ways: the ways that this worker speaks, best first; ``grpc`` is always among them. Blocks on a GPU go by ``shm``
            and ``grpc`` through pinned host memory, which is called ``staged``.
        staging_size_bytes: host memory that a worker pins for blocks on a GPU that others pull that way, reserved when
            the first one does. A pull of more is sent on its stream, piece by piece.

    Raises:
        ConfigError: naming the field.
    """

    hand_off_ttl_s: float = 30.0
    max_pull_s: float = 20.0
    stall_timeout_s: float = 10.0
    ways: tuple[TransferWay, ...] = (TransferWay.CUDA_IPC, TransferWay.SHM, TransferWay.GRPC)
    staging_size_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        for name in ("hand_off_ttl_s", "max_pull_s", "stall_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: must be above 0")
        if self.staging_size_bytes < 1:
            raise ConfigError("staging_size_bytes: must be at least 1")
        if not _SPOKEN.issuperset(self.ways):
            raise ConfigError(f"ways: must be among {sorted(_SPOKEN)}")
        if TransferWay.GRPC not in self.ways or len(set(self.ways)) < len(self.ways):
            raise ConfigError("ways: must name grpc, which always works, and each way once")

    def ways_of(self, memory: BlockMemory | None) -> tuple[TransferWay, ...]:
        """The ways by which blocks in ``memory`` can be pulled here, best first; ``None``: no transfer reaches them."""
        return () if memory is None else tuple(way for way in self.ways if way in memory.ways)

    def announced_ways(self, memory: BlockMemory | None) -> tuple[TransferWay, ...]:
        """``ways_of(memory)`` as people see them."""
        return tuple(dict.fromkeys(seen_way(way, memory) for way in self.ways_of(memory)))


def seen_way(way: TransferWay, memory: BlockMemory | None) -> TransferWay:
    """What people call it when blocks go to or from ``memory`` by ``way``."""
    is_staged = isinstance(memory, DeviceMemory) and way is not TransferWay.CUDA_IPC
    return TransferWay.STAGED if is_staged else way
