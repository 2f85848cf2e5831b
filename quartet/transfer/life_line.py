"""Life lines: the connections by which a worker lends its pool to peers on this host, and by which they notice its end.

A source's Unix socket answers a peer that sends the token of ``granted``, and keeps the connection. The peer opens the
pool and reads without asking again. When the connection ends, the peer knows that the worker is dead and closes its
pool: an open one alone would keep a dead worker's memory.

The socket's name is abstract: it needs no directory that both sides see (containers of one pod share network and IPC
but no files), and a killed worker leaves nothing behind. Across network namespaces it is out of reach, and pullers take
another way. The peer must run as the same user, and the token needs a hand-off's secret first.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from quartet.errors import TransferError
from quartet.limited_log import LimitedLog
from quartet.supervision import report_failure

logger = logging.getLogger(__name__)

TOKEN_SIZE_BYTES = 16

_TOKEN_TIMEOUT_S = 5.0

_ACCEPT_RETRY_S = 0.1

#: Refusals remembered; one that is forgotten costs its worker one failed fetch more.
_MAX_REFUSED = 64


class LifeLineServer:
    """Answers peers that have the token, from ``start`` until ``close``."""

    def __init__(self, name: str) -> None:
        """Draw a socket name, with ``name`` in it, and a token for this epoch of the worker; nothing listens yet."""
        self.socket_path = f"@quartet-{name}-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(TOKEN_SIZE_BYTES)
        # Any process in this network namespace can connect, and do so thousands of times a second.
        self._refusals, self._accept_errors = LimitedLog(logger), LimitedLog(logger)
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def descriptors(self) -> Sequence[int]:
        """The file descriptors that a peer gets."""
        return ()

    async def start(self) -> None:
        """Listen. Raises ``OSError`` where Unix sockets are not to be had."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(abstract_address(self.socket_path))
            listener.listen()
        except OSError:
            listener.close()
            raise
        self._accepting = asyncio.create_task(self._accept(listener), name="pool-accept")
        self._accepting.add_done_callback(report_failure)  # the listener is closed then: peers take another way

    async def close(self) -> None:
        """Stop listening and hang up on every peer, which then closes the pool. May be called twice."""
        tasks = [*self._serving, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._accepting = None

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:  # out of file descriptors: peers take another way meanwhile
                    self._accept_errors.warning("cannot accept a peer that wants the block pool: %s", error)
                    await asyncio.sleep(_ACCEPT_RETRY_S)
                    continue
                task = asyncio.create_task(self._serve(connection), name="pool-serve")
                self._serving.add(task)
                task.add_done_callback(report_failure)
                task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """Pass the pool to one peer, then keep the connection until the peer ends it. Peers may do anything here."""
        loop = asyncio.get_running_loop()
        with connection, contextlib.suppress(OSError, TimeoutError):
            connection.setblocking(False)
            if not _is_same_user(connection) or not await self._receive_token(connection):
                self._refusals.warning("refused the block pool to a process of another user or without the token")
                return
            _answer(connection, self.descriptors)
            while await loop.sock_recv(connection, 64):
                pass

    async def _receive_token(self, connection: socket.socket) -> bool:
        loop = asyncio.get_running_loop()
        token = b""
        async with asyncio.timeout(_TOKEN_TIMEOUT_S):
            while len(token) < TOKEN_SIZE_BYTES:
                received = await loop.sock_recv(connection, TOKEN_SIZE_BYTES - len(token))
                if not received:
                    return False
                token += received
        return hmac.compare_digest(token, self.token)


@dataclass(frozen=True)
class PoolOwner:
    """One epoch of one worker."""

    worker_id: str
    epoch: int


class LentPool(Protocol):
    """Where a pool on this host can be had."""

    @property
    def socket_path(self) -> str:
        """The life line's socket."""
        ...

    @property
    def token(self) -> bytes:
        """What the socket requires."""
        ...


LentT = TypeVar("LentT", bound=LentPool)
OpenT = TypeVar("OpenT")


class LivePools(Generic[LentT, OpenT]):
    """Opens each peer's pool once, and closes it when its worker ends.

    It keeps the connection over which a pool came. When the worker ends, so does the connection, and the pool is closed
    with it. So there are never more open pools than living workers on this host.
    """

    def __init__(self) -> None:
        self._pools: dict[PoolOwner, _LivePool[OpenT]] = {}
        self._refused: dict[PoolOwner, None] = {}  # oldest first
        self._opening: WeakValueDictionary[PoolOwner, asyncio.Lock] = WeakValueDictionary()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False

    def may_open(self, owner: PoolOwner) -> bool:
        """False once ``owner``'s pool could not be had, as across network namespaces: offer another way then."""
        return owner not in self._refused

    def opened(self, owner: PoolOwner) -> OpenT | None:
        """The pool of ``owner`` as ``open`` gives it, where it is open already."""
        live = self._pools.get(owner)
        return None if live is None else live.pool

    async def open(self, owner: PoolOwner, lent: LentT, *, timeout_s: float) -> OpenT:
        """The pool of ``owner``, opened at the first call.

        Raises:
            TransferError: the pool cannot be had, or is not what was said; ``may_open`` is false from then on.
        """
        pool = self.opened(owner)
        if pool is None:
            lock = self._opening.setdefault(owner, asyncio.Lock())
            try:
                async with asyncio.timeout(timeout_s), lock:
                    pool = self.opened(owner) or await self._connect(owner, lent)
            except (TransferError, OSError) as error:  # a timeout is an OSError too
                self._refuse(owner)
                raise TransferError(f"the peer's pool cannot be mapped: {error!r}") from error
        self._check(pool, lent)
        return pool

    def close(self) -> None:
        """Close every pool, and those that are being opened once they are open."""
        self._is_closed = True
        for owner in list(self._pools):
            self._drop(owner)

    async def _open(self, lent: LentT, descriptors: Sequence[int]) -> OpenT:
        """Open a pool whose life line answered with ``descriptors``, which are the callee's now.

        Raises:
            TransferError, OSError: it is not what was said.
        """
        raise NotImplementedError

    def _check(self, pool: OpenT, lent: LentT) -> None:
        """Raise ``TransferError`` if ``pool`` is not as ``lent`` says."""
        raise NotImplementedError

    def _close(self, pool: OpenT) -> None:
        """The worker of ``pool`` has ended, or the pool is wanted no more."""
        raise NotImplementedError

    async def _connect(self, owner: PoolOwner, lent: LentT) -> OpenT:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            pool = await self._open(lent, await self._receive(connection, lent))
        except BaseException:
            connection.close()
            raise
        if self._is_closed:
            connection.close()
            self._close(pool)
            raise TransferError("the puller is closed")
        self._pools[owner] = _LivePool(connection, pool)
        self._loop.add_reader(connection, self._drop, owner)
        return pool

    async def _receive(self, connection: socket.socket, lent: LentT) -> Sequence[int]:
        """Ask for the pool and return the descriptors that come. The caller bounds the time."""
        await self._loop.sock_connect(connection, abstract_address(lent.socket_path))
        if not _is_same_user(connection):
            raise TransferError("the peer's pool is offered by another user")
        await self._loop.sock_sendall(connection, lent.token)
        readable = self._loop.create_future()
        self._loop.add_reader(connection, _set_done, readable)
        try:
            await readable
        finally:
            self._loop.remove_reader(connection)
        said, descriptors, _flags, _address = socket.recv_fds(connection, 1, 1)
        if not said:
            raise TransferError("the peer refused its pool")
        return descriptors

    def _refuse(self, owner: PoolOwner) -> None:
        self._refused[owner] = None
        if len(self._refused) > _MAX_REFUSED:
            self._refused.pop(next(iter(self._refused)))

    def _drop(self, owner: PoolOwner) -> None:
        live = self._pools.pop(owner, None)
        if live is not None:
            self._loop.remove_reader(live.connection)
            live.connection.close()
            self._close(live.pool)


@dataclass(frozen=True)
class _LivePool(Generic[OpenT]):
    """A pool, and the connection whose end is its worker's."""

    connection: socket.socket
    pool: OpenT


def abstract_address(socket_path: str) -> str:
    """The kernel's form of ``socket_path``: a leading ``@`` is how people write an abstract name's zero byte."""
    return "\0" + socket_path[1:] if socket_path.startswith("@") else socket_path


def _answer(connection: socket.socket, descriptors: Sequence[int]) -> None:
    """Send one small message: it never blocks."""
    if descriptors:
        socket.send_fds(connection, [b"\0"], list(descriptors))
    else:
        connection.send(b"\0")


def _is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket runs as this process's effective user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, user_id, _group_id = struct.unpack("3i", credentials)
    return bool(user_id == os.geteuid())


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
