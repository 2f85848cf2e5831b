"""Signed starts: what a router lets a client start at one worker, once, for a short time; and the keys that sign them.

The keys are in a file that every router and decode worker has; it is read again when it changes.
"""

from __future__ import annotations

import heapq
import hmac
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from google.protobuf.message import DecodeError

from quartet.errors import (
    ConfigError,
    MessageTooLargeError,
    NoSigningKeyError,
    ProtocolError,
    QueueFullError,
    ServingError,
    SignedStartError,
    SignedStartExpiredError,
    SignedStartForeignError,
    SignedStartUsedError,
    SigningKeyUnknownError,
)
from quartet.rpc.channels import MAX_STREAM_MESSAGE_BYTES
from quartet.rpc.secret_file import SecretFile
from quartet.streams.convert.messages import put_start
from quartet.streams.messages import SignedPlacement, WorkerStart
from quartet.v1 import decode_pb2

#: Seconds that a signed start may be valid at most: a longer time means that a clock is wrong.
MAX_SIGNED_START_TTL_S = 300.0

#: Bytes of a signed start at most; the rest of a message is for the frame, the key's name and the MAC.
MAX_SIGNED_START_BYTES = MAX_STREAM_MESSAGE_BYTES - 512

#: Bytes of a MAC.
MAC_SIZE_BYTES = 32

# Some 32 MB. At 20 s a signature it stands for 6500 placements a second at one worker.
_MAX_REMEMBERED = 1 << 17
_SETTING = "signing_keys_file"
_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

# As long as the MAC: a shorter secret would be the weakest part of it.
_MIN_SECRET_BYTES = 32
_MAX_FILE_BYTES = 1 << 16


def sign(
    start: WorkerStart, key: SigningKey, *, address: str, worker_id: str, epoch: int, expires_at_unix_s: float
) -> SignedPlacement:
    """Let the holder of the result run ``start`` at that start of the worker at ``address``, once, until it expires.

    Raises:
        MessageTooLargeError: a decode worker would not take so long a message, and no chunks are signed.
    """
    message = decode_pb2.SignedStart(worker_id=worker_id, epoch=epoch, expires_at_unix_ms=int(expires_at_unix_s * 1000))
    put_start(message.start, 0, start)
    signed = message.SerializeToString()
    check_signed_size(len(signed))
    return SignedPlacement(address=address, signed_start=signed, key_id=key.key_id, mac=key.mac(signed))


def check_signed_size(size_bytes: int) -> None:
    """Refuse a signed start of so many bytes if no worker would take it. Raises ``MessageTooLargeError``."""
    if size_bytes > MAX_SIGNED_START_BYTES:
        message = f"a signed start has {MAX_SIGNED_START_BYTES} bytes at most: use Generate or Session"
        raise MessageTooLargeError(message)


class SignedStartVerifier:
    """Opens signed starts at one start of one worker.

    The MAC is checked first: bytes that no router signed are not parsed. MACs of opened starts are remembered until
    they expire; from then on the clock refuses them.
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

        ``on_outcome`` gets ``opened``, or the error's reason in lower case, for each; ``clock`` gives Unix seconds.
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

    def open(self, message: decode_pb2.SignedDecodeStart) -> decode_pb2.DecodeStart:
        """The start inside, in the slot that the caller chose; from now on it is used up.

        Raises:
            NoSigningKeyError, SigningKeyUnknownError: there is no key to verify it with.
            SignedStartError: it was altered, or made up.
            SignedStartForeignError, SignedStartExpiredError, SignedStartUsedError: not here, not now, not again.
            QueueFullError: too many are remembered.
            ProtocolError: it was signed by a router that knows another contract.
        """
        try:
            start = self._open(message)
        except ServingError as error:
            self._on_outcome(error.reason.lower())
            raise
        self._on_outcome("opened")
        return start

    def _open(self, message: decode_pb2.SignedDecodeStart) -> decode_pb2.DecodeStart:
        self._verify(message)
        signed = _parse(message.signed_start)
        if signed.worker_id != self._worker_id or signed.epoch != self._epoch:
            raise SignedStartForeignError("this start was signed for another worker, or for another epoch of this one")
        self._use(message.mac, signed.expires_at_unix_ms)
        start = signed.start
        start.slot = message.slot
        return start

    def _verify(self, message: decode_pb2.SignedDecodeStart) -> None:
        if self._keys is None:
            raise NoSigningKeyError("this worker has no key for signed starts")
        key = self._keys.find(message.key_id)
        if key is None:
            raise SigningKeyUnknownError("this worker has no such key", field="signed_start.key_id")
        if len(message.mac) != MAC_SIZE_BYTES or not hmac.compare_digest(key.mac(message.signed_start), message.mac):
            raise SignedStartError("these bytes were not signed with this key", field="signed_start.mac")

    def _use(self, mac: bytes, expires_at_unix_ms: int) -> None:
        # A clock that is set back must not make a start valid again that has expired and been forgotten.
        now_ms = self._now_ms = max(self._now_ms, int(self._clock() * 1000))
        if now_ms > expires_at_unix_ms:
            raise SignedStartExpiredError("this start has expired: ask the router for another placement")
        if expires_at_unix_ms - now_ms > MAX_SIGNED_START_TTL_S * 1000:
            raise SignedStartExpiredError("this start expires too late: the clocks of router and worker disagree")
        self._forget_expired(now_ms)
        if mac in self._used:
            raise SignedStartUsedError("this start was used before: ask the router for another placement")
        if len(self._used) >= self._max_remembered:
            # A start that is not remembered could be used twice.
            raise QueueFullError("too many signed starts came at once", retry_delay_s=1.0)
        self._used.add(mac)
        heapq.heappush(self._expiries, (expires_at_unix_ms, mac))

    def _forget_expired(self, now_ms: int) -> None:
        while self._expiries and self._expiries[0][0] < now_ms:
            self._used.discard(heapq.heappop(self._expiries)[1])


class Keys(Protocol):
    """Where keys are found; ``SigningKeys`` is one."""

    @property
    def signing_key(self) -> SigningKey:
        """The key that signs."""
        ...

    def find(self, key_id: str) -> SigningKey | None:
        """The key of that name, if it verifies."""
        ...


@dataclass(frozen=True, kw_only=True)
class SigningKey:
    """One secret, by its public name."""

    key_id: str
    secret: bytes = field(repr=False)

    def mac(self, signed: bytes) -> bytes:
        """HMAC-SHA256 over exactly these bytes."""
        return hmac.digest(self.secret, signed, "sha256")


class SigningKeys:
    """The keys of one file, which is read again when it has changed.

    One key a line: ``key_id hex-secret``, the secret of 32 bytes or more; empty lines and lines that begin with ``#``
    are left out. The first key signs, all verify. So a new key is given to every process below the old one, then put
    first, and the old one taken out once nothing is under way that it signed: no start is ever refused.

    A changed file that can't be used is logged and changes nothing else. No message or log ever holds a secret.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        count: Callable[[bool], None] = lambda is_used: None,
    ) -> None:
        """Read ``path``; check it for changes once a second of ``clock``, for an unknown name at most 20 times.

        ``count`` is that of ``SecretFile``.

        Raises:
            ConfigError: the file can't be used; the message names the setting and the line, never a secret.
        """
        self._file = SecretFile(
            path, partial(_parse_keys, path), setting=_SETTING, max_bytes=_MAX_FILE_BYTES, clock=clock, count=count
        )

    @property
    def signing_key(self) -> SigningKey:
        """The key that signs."""
        return next(iter(self._file.current().values()))

    def find(self, key_id: str) -> SigningKey | None:
        """The key of that name, if it verifies; an unknown name checks the file sooner."""
        return self._file.current().get(key_id) or self._file.current(is_unknown=True).get(key_id)


def _parse(signed_start: bytes) -> decode_pb2.SignedStart:
    try:
        signed = decode_pb2.SignedStart.FromString(signed_start)
    except DecodeError as error:
        raise ProtocolError("the signed bytes are no start", field="signed_start.signed_start") from error
    if signed.start.chunked:
        raise ProtocolError("a signed start is whole", field="signed_start.signed_start")
    return signed


def _parse_keys(path: Path, lines: Iterator[tuple[str, str]]) -> dict[str, SigningKey]:
    keys: dict[str, SigningKey] = {}
    for where, line in lines:
        try:
            key = _parse_line(line)
        except ValueError as error:
            # `from None`: what lies beneath may quote the secret.
            raise ConfigError(f"{where}: {error}") from None
        if key.key_id in keys:
            raise ConfigError(f"{where}: {key.key_id} stands twice")
        keys[key.key_id] = key
    if not keys:
        raise ConfigError(f"{_SETTING}: {path} holds no key")
    return keys


def _parse_line(line: str) -> SigningKey:
    key_id, _, digits = line.strip().partition(" ")
    if not _KEY_ID.fullmatch(key_id):
        raise ValueError("a key's name has 1 to 64 letters, digits, dots, dashes or underscores")
    try:
        secret = bytes.fromhex(digits)
    except ValueError:
        raise ValueError("a key's secret must be hexadecimal") from None
    if len(secret) < _MIN_SECRET_BYTES:
        raise ValueError(f"a key's secret must have {_MIN_SECRET_BYTES} bytes or more")
    return SigningKey(key_id=key_id, secret=secret)
