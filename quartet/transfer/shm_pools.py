"""Other workers' block pools, mapped into this process for reading."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
from dataclasses import dataclass, field

from quartet.errors import TransferError
from quartet.transfer.shm_server import abstract_address, is_same_user

#: Refusals remembered; one that is forgotten costs its worker one failed fetch more.
_MAX_REFUSED = 64


@dataclass(frozen=True)
class PoolOwner:
    """One life of one worker."""

    worker_id: str
    epoch: int


@dataclass(frozen=True)
class SharedPool:
    """Where a pool on this host can be had."""

    socket_path: str
    token: bytes = field(repr=False)
    size_bytes: int


class ShmPools:
    """Maps each pool once, and for as long as its worker lives.

    The connection over which the pool came is kept: its end is the worker's end, and the mapping, which alone keeps a
    dead worker's pages in memory, goes. So there are never more mappings than living workers on this host.
    """

    def __init__(self) -> None:
        self._pools: dict[PoolOwner, _MappedPool] = {}
        self._refused: dict[PoolOwner, None] = {}  # oldest first
        self._loop = asyncio.get_running_loop()

    @property
    def owners(self) -> frozenset[PoolOwner]:
        """Whose pools are mapped now."""
        return frozenset(self._pools)

    def may_open(self, owner: PoolOwner) -> bool:
        """False once ``owner``'s pool could not be had, as across network namespaces: offer another way then."""
        return owner not in self._refused

    def mapped(self, owner: PoolOwner) -> memoryview | None:
        """The bytes of ``owner``'s pool as ``open`` gives them, where it is mapped already."""
        mapped = self._pools.get(owner)
        return None if mapped is None else mapped.view

    async def open(self, owner: PoolOwner, pool: SharedPool, *, timeout_s: float) -> memoryview:
        """The bytes of ``owner``'s pool, read-only, valid for as long as the view is referenced.

        Raises:
            TransferError: the pool cannot be had, or is not what was said; ``may_open`` is false from then on.
        """
        mapped = self._pools.get(owner)
        if mapped is None:
            try:
                async with asyncio.timeout(timeout_s):
                    mapped = await self._map(owner, pool)
            except (TransferError, OSError) as error:  # a timeout is an OSError too
                self._refuse(owner)
                raise TransferError(f"the peer's pool cannot be mapped: {error!r}") from error
        if len(mapped.view) != pool.size_bytes:
            raise TransferError("the peer's pool does not have the size that was granted")
        return mapped.view

    def close(self) -> None:
        """Let go of every pool."""
        for owner in list(self._pools):
            self._drop(owner)

    async def _map(self, owner: PoolOwner, pool: SharedPool) -> _MappedPool:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            view = _map_read_only(await self._receive(connection, pool), pool.size_bytes)
        except BaseException:
            connection.close()
            raise
        self._drop(owner)  # two fetches may have come here at once; either mapping serves
        mapped = self._pools[owner] = _MappedPool(connection, view)
        self._loop.add_reader(connection, self._drop, owner)
        return mapped

    async def _receive(self, connection: socket.socket, pool: SharedPool) -> int:
        """Ask for the memfd and return it. The caller bounds the time."""
        await self._loop.sock_connect(connection, abstract_address(pool.socket_path))
        if not is_same_user(connection):
            raise TransferError("the peer's pool is offered by another user")
        await self._loop.sock_sendall(connection, pool.token)
        readable = self._loop.create_future()
        self._loop.add_reader(connection, _set_done, readable)
        try:
            await readable
        finally:
            self._loop.remove_reader(connection)
        _byte, descriptors, _flags, _address = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            raise TransferError("the peer refused its pool")
        return descriptors[0]

    def _refuse(self, owner: PoolOwner) -> None:
        self._refused[owner] = None
        if len(self._refused) > _MAX_REFUSED:
            self._refused.pop(next(iter(self._refused)))

    def _drop(self, owner: PoolOwner) -> None:
        mapped = self._pools.pop(owner, None)
        if mapped is not None:
            self._loop.remove_reader(mapped.connection)
            mapped.connection.close()


@dataclass(frozen=True)
class _MappedPool:
    """A mapping, which ends with the last reference to its view, and the connection that tells of its worker's end."""

    connection: socket.socket
    view: memoryview


def _map_read_only(fd: int, size_bytes: int) -> memoryview:
    """Map the memfd and close it."""
    try:
        # Without these a peer that shrinks its pool would kill us (SIGBUS) in the middle of a copy.
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != size_bytes:
            raise TransferError("the peer's pool is not sealed, or not of the size that was granted")
        return memoryview(mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
    finally:
        os.close(fd)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
