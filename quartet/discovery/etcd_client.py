"""The few etcd calls that discovery needs, and where etcd is; with ``etcd_access`` all of discovery that knows gRPC.

Messages and stubs are those of ``aetcd``; its client has no TLS, one endpoint, and hides revisions.
Every failure is a ``DiscoveryError``; the next call then goes to the next endpoint.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from aetcd import rpc

from quartet.discovery.checks import check_name
from quartet.discovery.etcd_access import EtcdTls, EtcdTokens, Metadata
from quartet.errors import ConfigError, DiscoveryError
from quartet.rpc.channels import ListenAddress, open_channel

_CHANNEL_OPTIONS = {
    # etcd treats pings without a call as an attack, and closes the connection.
    "grpc.keepalive_permit_without_calls": 0,
    # A server that comes back is found within a second.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1_000,
}

# With it etcd ends the streams of a member that has lost its leader, instead of leaving them silent.
_REQUIRE_LEADER = (("hasleader", "true"),)


@dataclass(frozen=True, kw_only=True)
class EtcdConfig:
    """Where etcd is and how it is used.

    Attributes:
        endpoints: ``host:port``, tried in turn. ``http://`` or ``https://`` may stand before it and must agree with
            ``tls``.
        namespace: separates deployments that share an etcd.
        lease_ttl_s: seconds after which a killed worker's record goes; etcd allows no less than about 2.
        request_timeout_s: longest wait for one answer of one endpoint, in seconds.
        tls: certificates; ``None``: every endpoint is dialled in the clear.
        user: name of an etcd user, where etcd has authentication enabled; goes with ``password_file``.
        password_file: holds the password of ``user`` on one line; only its owner and group may open it.

    Raises:
        ConfigError, ValueError: the message begins with the field.
    """

    endpoints: tuple[str, ...] = ("127.0.0.1:2379",)
    namespace: str = "default"
    lease_ttl_s: int = 5
    request_timeout_s: float = 2.0
    tls: EtcdTls | None = None
    user: str = ""
    password_file: Path | None = None

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("endpoints must name at least one etcd server")
        if self.lease_ttl_s < 1 or self.request_timeout_s <= 0:
            raise ValueError("lease_ttl_s and request_timeout_s must be positive")
        check_name("namespace", self.namespace)
        for endpoint in self.endpoints:
            self._check_endpoint(endpoint)
        if bool(self.user) != (self.password_file is not None):
            missing = "password_file" if self.user else "user"
            raise ConfigError(f"{missing}: is missing; user and password_file go together")

    def _check_endpoint(self, endpoint: str) -> None:
        address = ListenAddress.parse(_address_of(endpoint), "endpoints")
        if self.tls is None and endpoint.startswith("https://"):
            raise ConfigError(
                f"endpoints: {endpoint} takes the setting tls (tls: {{}} trusts the public authorities alone)"
            )
        if self.tls is not None and endpoint.startswith("http://"):
            raise ConfigError(f"endpoints: {endpoint} is in the clear, and tls is set: write https:// or leave tls out")
        if self.user and self.tls is None:
            address.require_loopback("user", "tls: the password must not cross a network in the clear")


@dataclass(frozen=True)
class StoredValue:
    """One key's value, the lease that it goes with (0: none), and the store's revision of its last change."""

    key: str
    value: bytes
    lease_id: int
    revision: int


@dataclass(frozen=True)
class Listing:
    """All values under a prefix, as of one revision of the store."""

    revision: int
    values: tuple[StoredValue, ...]


@dataclass(frozen=True)
class KeyChange:
    """One key's new value; ``None`` when it was deleted."""

    key: str
    value: bytes | None


class LeaseStream:
    """One keepalive stream; ``EtcdClient.keep_alive`` opens it and turns its errors into ``DiscoveryError``."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Any, Any], timeout_s: float) -> None:
        self._call = call
        self._timeout_s = timeout_s

    async def renew(self, lease_id: int) -> int:
        """Renew the lease and return the seconds that it now has; 0 when it no longer exists."""
        async with asyncio.timeout(self._timeout_s):
            await self._call.write(rpc.LeaseKeepAliveRequest(ID=lease_id))
            seconds: int = _message(await self._call.read()).TTL
        return seconds


class EtcdClient:
    """Calls the endpoints in turn until one answers; each has one channel, kept until ``close``.

    A channel stays open while calls may use it: closing it would cancel them, and with them their tasks.

    Attributes:
        config: where etcd is.
    """

    def __init__(self, config: EtcdConfig) -> None:
        """Nothing is dialled yet. Raises ``ConfigError`` if a file that ``config`` names can't be used."""
        self.config = config
        self._tokens = None if config.password_file is None else EtcdTokens(config.user, config.password_file)
        if config.tls is not None:
            config.tls.credentials()
        self._endpoints: dict[int, _Endpoint] = {}
        self._current = 0

    async def list(self, prefix: str) -> Listing:
        """Every key that begins with ``prefix``, linearizable: no member's old view."""
        request = rpc.RangeRequest(key=prefix.encode(), range_end=_end_of(prefix))
        response = await self._call("Range", request)
        return Listing(response.header.revision, tuple(_stored(kv) for kv in response.kvs))

    async def get(self, key: str) -> StoredValue | None:
        """One key's value, linearizable; ``None`` when there is no such key."""
        response = await self._call("Range", rpc.RangeRequest(key=key.encode()))
        return _stored(response.kvs[0]) if response.kvs else None

    async def put(self, key: str, value: bytes, lease_id: int) -> None:
        """Store ``value`` until the lease ends, replacing what was there."""
        await self._call("Put", rpc.PutRequest(key=key.encode(), value=value, lease=lease_id))

    async def put_if(self, key: str, value: bytes, lease_id: int, *, revision: int, absent: Iterable[str] = ()) -> bool:
        """``put`` in one transaction, on condition that ``key`` was last changed in ``revision`` (0: there is none).

        ``absent`` names keys that must not exist either.

        Returns:
            Whether all held. If not, nothing was changed.
        """
        put = rpc.PutRequest(key=key.encode(), value=value, lease=lease_id)
        compare = [_unchanged(key, revision), *(_unchanged(other, 0) for other in absent)]
        response = await self._call("Txn", rpc.TxnRequest(compare=compare, success=[rpc.RequestOp(request_put=put)]))
        return bool(response.succeeded)

    async def grant(self, lease_id: int) -> None:
        """Begin a lease of the configured time under an id that the caller drew with ``new_lease_id``."""
        await self._call("LeaseGrant", rpc.LeaseGrantRequest(ID=lease_id, TTL=self.config.lease_ttl_s))

    async def revoke(self, lease_id: int) -> None:
        """End the lease, and with it every key that is still attached to it."""
        await self._call("LeaseRevoke", rpc.LeaseRevokeRequest(ID=lease_id))

    @asynccontextmanager
    async def keep_alive(self) -> AsyncIterator[LeaseStream]:
        """Open a stream that renews leases."""
        with self._reporting_errors() as endpoint:
            call = endpoint.lease.LeaseKeepAlive(metadata=_REQUIRE_LEADER + await self._metadata(endpoint))
            try:
                # An answer later than a third of the lease leaves too little of it for another endpoint.
                yield LeaseStream(call, min(self.config.request_timeout_s, self.config.lease_ttl_s / 3))
            finally:
                call.cancel()

    async def follow(
        self, prefix: str, revision: int, on_open: Callable[[], None], on_change: Callable[[KeyChange], None]
    ) -> None:
        """Call ``on_open`` once the watch stands, then ``on_change`` for every change since a list's ``revision``.

        The last change that the list holds comes once more. Ends only by a ``DiscoveryError``: the stream broke or
        fell silent, the history since ``revision`` was compacted, or the store is younger than the list. The answer
        to each is to list again.
        """
        with self._reporting_errors() as endpoint:
            call = endpoint.watch.Watch(metadata=_REQUIRE_LEADER + await self._metadata(endpoint))
            writer = asyncio.create_task(_ask(call, _watch_from(prefix, revision), self.config.request_timeout_s))
            try:
                while True:
                    # Twice: the time between two progress requests, and the time that an answer may take.
                    async with asyncio.timeout(2 * self.config.request_timeout_s):
                        response = _message(await call.read())
                    _check_history(response, revision)
                    if response.created:
                        on_open()
                    for event in response.events:
                        on_change(_change(event))
            finally:
                writer.cancel()
                call.cancel()

    def certificate_end(self) -> float | None:
        """Unix time at which the first certificate of its channels ends; ``None``: none has one. Any thread may ask."""
        ends = [endpoint.certificate_end for endpoint in tuple(self._endpoints.values())]
        return min((end for end in ends if end is not None), default=None)

    async def close(self) -> None:
        """Close the channels; every call and stream must have ended."""
        for endpoint in self._endpoints.values():
            await endpoint.channel.close()
        self._endpoints.clear()

    async def _call(self, method: str, request: Any) -> Any:
        for _ in self.config.endpoints[1:]:
            with suppress(DiscoveryError):
                return await self._call_once(method, request)
        return await self._call_once(method, request)

    async def _call_once(self, method: str, request: Any) -> Any:
        with self._reporting_errors() as endpoint:
            try:
                return await self._send(endpoint, method, request)
            except grpc.aio.AioRpcError as error:
                if self._tokens is None or not self._tokens.forget_if_refused(str(error.details())):
                    raise
            return await self._send(endpoint, method, request)

    async def _send(self, endpoint: _Endpoint, method: str, request: Any) -> Any:
        metadata = await self._metadata(endpoint)
        return await endpoint.unary[method](request, timeout=self.config.request_timeout_s, metadata=metadata)

    async def _metadata(self, endpoint: _Endpoint) -> Metadata:
        if self._tokens is None:
            return ()
        return await self._tokens.metadata(endpoint.auth.Authenticate, self.config.request_timeout_s)

    @contextmanager
    def _reporting_errors(self) -> Iterator[_Endpoint]:
        number = self._current
        try:
            if number not in self._endpoints:
                self._endpoints[number] = _Endpoint(*_open_channel(self.config, self.config.endpoints[number]))
            yield self._endpoints[number]
        except _FAILURES as error:
            raise self._failure(number, error) from error

    def _failure(self, number: int, error: BaseException) -> DiscoveryError:
        # Another call may have moved to the next endpoint already: stay there.
        if self._current == number:
            self._current = (number + 1) % len(self.config.endpoints)
        reason = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
        if self._tokens is not None:
            self._tokens.forget_if_refused(reason)
        return DiscoveryError(f"etcd at {self.config.endpoints[number]}: {reason or repr(error)}")


def new_lease_id() -> int:
    """A random lease id; drawn here, it is known even when the answer to ``grant`` is lost."""
    return secrets.randbelow(2**63 - 1) + 1


class _BrokenStreamError(Exception):
    """The server ended a stream, or its answers are unusable."""


# What may go wrong at one endpoint; `ConfigError`: a file with which it is dialled has gone.
_FAILURES = (grpc.aio.AioRpcError, asyncio.InvalidStateError, OSError, _BrokenStreamError, ConfigError)


class _Endpoint:
    """One etcd server: the channel to it, and stubs on that."""

    def __init__(self, channel: grpc.aio.Channel, certificate_end: float | None) -> None:
        self.channel = channel
        self.certificate_end = certificate_end
        self.lease = rpc.LeaseStub(channel)
        self.watch = rpc.WatchStub(channel)
        self.auth = rpc.AuthStub(channel)
        kv = rpc.KVStub(channel)
        self.unary = {
            "Range": kv.Range,
            "Put": kv.Put,
            "Txn": kv.Txn,
            "LeaseGrant": self.lease.LeaseGrant,
            "LeaseRevoke": self.lease.LeaseRevoke,
        }


def _open_channel(config: EtcdConfig, endpoint: str) -> tuple[grpc.aio.Channel, float | None]:
    """The channel, and when the certificate ends that it shows."""
    # The files are read again for each endpoint: they may have been renewed since the start.
    credentials, end = (None, None) if config.tls is None else config.tls.credentials()
    options: dict[str, int | str] = dict(_CHANNEL_OPTIONS)
    if config.tls is not None and config.tls.server_name is not None:
        options["grpc.ssl_target_name_override"] = config.tls.server_name
    return open_channel(_address_of(endpoint), credentials, options), end


def _address_of(endpoint: str) -> str:
    return endpoint.removeprefix("https://").removeprefix("http://")


async def _ask(call: Any, watch: Any, interval_s: float) -> None:
    # A quiet watch and a dead connection look alike, so ask for progress: a living server answers. The stream has this
    # one writer; a write fails only when the whole stream does, and the reader sees that too.
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(watch)
        while True:
            await asyncio.sleep(interval_s)
            await call.write(rpc.WatchRequest(progress_request=rpc.WatchProgressRequest()))


def _message(message: Any) -> Any:
    if message is grpc.aio.EOF:
        raise _BrokenStreamError("the server ended the stream")
    return message


def _watch_from(prefix: str, revision: int) -> Any:
    # Not from revision + 1: etcd answers no progress request of a watch that begins in the store's future
    # (mvcc/watchable_store.go, progressIfSync), so in a quiet store every watch would look dead.
    create = rpc.WatchCreateRequest(key=prefix.encode(), range_end=_end_of(prefix), start_revision=revision)
    return rpc.WatchRequest(create_request=create)


def _check_history(response: Any, revision: int) -> None:
    if response.compact_revision:
        raise _BrokenStreamError(f"the history since revision {revision} was compacted")
    if response.canceled:
        raise _BrokenStreamError(f"the server ended the watch: {response.cancel_reason}")
    # A store that was wiped takes a watch from a revision far ahead of it, and then stays silent.
    if response.created and response.header.revision < revision:
        raise _BrokenStreamError(f"the store is at revision {response.header.revision}, the list at {revision}")


def _change(event: Any) -> KeyChange:
    is_put = event.type == event.PUT
    return KeyChange(_text(event.kv.key), event.kv.value if is_put else None)


def _stored(kv: Any) -> StoredValue:
    return StoredValue(_text(kv.key), kv.value, kv.lease, kv.mod_revision)


def _unchanged(key: str, revision: int) -> Any:
    # A key that is not there has 0 for its revision.
    return rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.MOD, key=key.encode(), mod_revision=revision)


def _text(key: bytes) -> str:
    # etcd's keys are any bytes, and others may put one under our prefix. No key of ours has a replacement character.
    return key.decode(errors="replace")


def _end_of(prefix: str) -> bytes:
    """The first key after all that begin with ``prefix``."""
    return prefix[:-1].encode() + bytes([prefix.encode()[-1] + 1])
