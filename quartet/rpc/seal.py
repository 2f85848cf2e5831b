"""Sealed starts: what a router lets a client start at one worker, once, for a short time."""

from __future__ import annotations

import heapq
import hmac
import time
from collections.abc import Callable
from typing import Protocol

from google.protobuf.message import DecodeError

from quartet.errors import (
    MessageTooLargeError,
    NoSealKeyError,
    ProtocolError,
    QueueFullError,
    SealError,
    SealExpiredError,
    SealForeignError,
    SealKeyUnknownError,
    SealUsedError,
    ServingError,
)
from quartet.rpc.convert.starts import put_decode_start
from quartet.rpc.inner import MAX_INNER_MESSAGE_BYTES, InnerStart
from quartet.rpc.placement import SealedPlacement
from quartet.rpc.seal_keys import MAC_SIZE_BYTES, SealKey
from quartet.v1 import decode_pb2

#: A seal that is good for longer than this was made by a clock that is wrong.
MAX_SEAL_TTL_S = 300.0

#: Bytes of a sealed start at most; the rest of an inner message is for the frame, the key's name and the MAC.
MAX_SEALED_START_BYTES = MAX_INNER_MESSAGE_BYTES - 512

# Some 32 MB. At 20 s a seal it stands for 6500 placements a second at one worker.
_MAX_REMEMBERED = 1 << 17


class Keys(Protocol):
    """Where keys are looked up (``quartet.rpc.seal_keys.SealKeys``)."""

    @property
    def sealing_key(self) -> SealKey:
        """The key that seals."""
        ...

    def find(self, key_id: str) -> SealKey | None:
        """The key of that name, if it verifies."""
        ...


def seal(
    start: InnerStart, key: SealKey, *, address: str, worker_id: str, epoch: int, expires_at_unix_s: float
) -> SealedPlacement:
    """Let whoever holds the result run ``start`` at that life of the worker at ``address``, once, until it expires.

    Raises:
        MessageTooLargeError: a decode worker would not take so long a message, and no chunks are sealed.
    """
    message = decode_pb2.SealedStart(worker_id=worker_id, epoch=epoch, expires_at_unix_ms=int(expires_at_unix_s * 1000))
    put_decode_start(message.start, 0, start)
    sealed = message.SerializeToString()
    check_sealed_size(len(sealed))
    return SealedPlacement(address=address, sealed_start=sealed, key_id=key.key_id, mac=key.mac(sealed))


def check_sealed_size(size_bytes: int) -> None:
    """Refuse a sealed start of so many bytes if no worker would take it. Raises ``MessageTooLargeError``."""
    if size_bytes > MAX_SEALED_START_BYTES:
        message = f"a sealed start has {MAX_SEALED_START_BYTES} bytes at most: use Generate or Session"
        raise MessageTooLargeError(message)


class SealOpener:
    """Opens sealed starts at one life of one worker.

    The MAC comes first: of bytes that no router sealed, nothing is read. MACs of what was opened are remembered until
    they expire, and then the clock refuses them.
    """

    def __init__(
        self,
        keys: Keys | None,
        *,
        worker_id: str,
        epoch: int,
        on_outcome: Callable[[str], None] = lambda _outcome: None,
        clock: Callable[[], float] = time.time,
        max_remembered: int = _MAX_REMEMBERED,
    ) -> None:
        """Verify with ``keys``; ``None`` refuses all.

        ``on_outcome`` hears of each one ``opened``, or the reason in lower case; ``clock`` gives Unix seconds.
        """
        self._keys = keys
        self._worker_id = worker_id
        self._epoch = epoch
        self._on_outcome = on_outcome
        self._clock = clock
        self._max_remembered = max_remembered
        self._now_ms = 0
        self._used: set[bytes] = set()
        self._expiries: list[tuple[int, bytes]] = []  # a heap

    @property
    def num_remembered(self) -> int:
        """MACs remembered as used."""
        return len(self._used)

    def open(self, message: decode_pb2.SealedDecodeStart) -> decode_pb2.DecodeStart:
        """The start inside, in the slot that the caller chose; from now on it is used up.

        Raises:
            NoSealKeyError, SealKeyUnknownError: there is nothing to verify it with.
            SealError: it was altered, or made up.
            SealForeignError, SealExpiredError, SealUsedError: not here, not now, not again.
            QueueFullError: too many are remembered.
            ProtocolError: it was sealed by a router that knows another contract.
        """
        try:
            start = self._open(message)
        except ServingError as error:
            self._on_outcome(error.reason.lower())
            raise
        self._on_outcome("opened")
        return start

    def _open(self, message: decode_pb2.SealedDecodeStart) -> decode_pb2.DecodeStart:
        self._verify(message)
        sealed = _parse(message.sealed_start)
        if sealed.worker_id != self._worker_id or sealed.epoch != self._epoch:
            raise SealForeignError("this start was sealed for another worker, or for another life of this one")
        self._use(message.mac, sealed.expires_at_unix_ms)
        start = sealed.start
        start.slot = message.slot
        return start

    def _verify(self, message: decode_pb2.SealedDecodeStart) -> None:
        if self._keys is None:
            raise NoSealKeyError("this worker has no key for sealed starts")
        key = self._keys.find(message.key_id)
        if key is None:
            raise SealKeyUnknownError("this worker has no such key", field="sealed_start.key_id")
        if len(message.mac) != MAC_SIZE_BYTES or not hmac.compare_digest(key.mac(message.sealed_start), message.mac):
            raise SealError("these bytes were not sealed with this key", field="sealed_start.mac")

    def _use(self, mac: bytes, expires_at_unix_ms: int) -> None:
        # A clock that was set back must not bring back what has expired, and is forgotten.
        now_ms = self._now_ms = max(self._now_ms, int(self._clock() * 1000))
        if now_ms > expires_at_unix_ms:
            raise SealExpiredError("this start has expired: ask the router for another placement")
        if expires_at_unix_ms - now_ms > MAX_SEAL_TTL_S * 1000:
            raise SealExpiredError("this start expires too late: the clocks of router and worker disagree")
        self._forget_expired(now_ms)
        if mac in self._used:
            raise SealUsedError("this start was used before: ask the router for another placement")
        if len(self._used) >= self._max_remembered:
            # What can't be remembered could come again.
            raise QueueFullError("too many sealed starts came at once", retry_delay_s=1.0)
        self._used.add(mac)
        heapq.heappush(self._expiries, (expires_at_unix_ms, mac))

    def _forget_expired(self, now_ms: int) -> None:
        while self._expiries and self._expiries[0][0] < now_ms:
            self._used.discard(heapq.heappop(self._expiries)[1])


def _parse(sealed_start: bytes) -> decode_pb2.SealedStart:
    try:
        sealed = decode_pb2.SealedStart.FromString(sealed_start)
    except DecodeError as error:
        raise ProtocolError("the sealed bytes are no start", field="sealed_start.sealed_start") from error
    if sealed.start.chunked:
        raise ProtocolError("a sealed start is whole", field="sealed_start.sealed_start")
    return sealed
