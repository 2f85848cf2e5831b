"""Block pools of workers on one host: pass ours to peers, map theirs for reading, copy between the two.

A source's Unix socket passes its pool's memfd (SCM_RIGHTS) to a peer that sends the token of ``granted``.
The peer maps it and reads without asking again. It can then read the *whole* pool, not only the pieces that it asked
for: on one host the workers of a deployment trust each other. Three things limit that trust. The memfd is sealed, so
the peer cannot write; the peer must run as the same user; the token needs a hand-off's secret first.

The socket's name is abstract: it needs no directory that both sides see (containers of one pod share network and IPC
but no files), and a killed worker leaves nothing behind. Across network namespaces it is out of reach, and pullers go
over gRPC. The connection stays open for as long as the peer maps the pool: when it ends, the peer knows that the worker
is dead and unmaps its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hmac
import logging
import mmap
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from quartet.errors import TransferError
from quartet.limited_log import LimitedLog
from quartet.supervision import report_failure
from quartet.transfer.base import PoolMemory

logger = logging.getLogger(__name__)

TOKEN_SIZE_BYTES = 16

_TOKEN_TIMEOUT_S = 5.0

_ACCEPT_RETRY_S = 0.1

#: Refusals remembered; one that is forgotten costs its worker one failed fetch more.
_MAX_REFUSED = 64

#: Up to this a copy takes less than the event loop may stand still for (1 ms, at 5 GB/s); a thread costs half of that.
_INLINE_SIZE_BYTES = 4 << 20

#: How much a thread copies before it checks again whether to stop: some milliseconds.
_SLICE_SIZE_BYTES = 16 << 20


class ShmServer:
    """Passes one pool's memfd to peers with the token, from ``start`` until ``close``."""

    def __init__(self, memory: PoolMemory) -> None:
        """Draw a name and a token for this epoch of the worker; nothing listens yet."""
        self.memory = memory
        self.socket_path = f"@quartet-shm-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(TOKEN_SIZE_BYTES)
        # Any process in this network namespace can connect, and do so thousands of times a second.
        self._refusals, self._accept_errors = LimitedLog(logger), LimitedLog(logger)
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises ``OSError`` where Unix sockets are not to be had."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(abstract_address(self.socket_path))
            listener.listen()
        except OSError:
            listener.close()
            raise
        self._accepting = asyncio.create_task(self._accept(listener), name="shm-accept")
        self._accepting.add_done_callback(report_failure)  # the listener is closed then: peers go over gRPC

    async def close(self) -> None:
        """Stop listening and hang up on every peer, which then unmaps the pool. May be called twice."""
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
                except OSError as error:  # out of file descriptors: peers go over gRPC meanwhile
                    self._accept_errors.warning("cannot accept a peer that wants the block pool: %s", error)
                    await asyncio.sleep(_ACCEPT_RETRY_S)
                    continue
                task = asyncio.create_task(self._serve(connection), name="shm-serve")
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
            socket.send_fds(connection, [b"\0"], [self.memory.fd])  # one small message: it never blocks
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


@dataclass(frozen=True)
class SharedPool:
    """Where a pool on this host can be had."""

    socket_path: str
    token: bytes = field(repr=False)
    size_bytes: int


class ShmPools:
    """Maps each peer's pool once, and for as long as its worker lives.

    It keeps the connection over which a pool came. When the worker ends, so does the connection, and the mapping goes
    with it: it alone would keep a dead worker's pages in memory. So there are never more mappings than living workers
    on this host.
    """

    def __init__(self) -> None:
        self._pools: dict[PoolOwner, _MappedPool] = {}
        self._refused: dict[PoolOwner, None] = {}  # oldest first
        self._loop = asyncio.get_running_loop()

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
        """Unmap every pool."""
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
        if not _is_same_user(connection):
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
    """A mapping, which ends with the last reference to its view, and the connection whose end is its worker's."""

    connection: socket.socket
    view: memoryview


@dataclass(frozen=True)
class CopyRun:
    """Copy ``size_bytes`` bytes from one offset to another."""

    source_offset: int
    destination_offset: int
    size_bytes: int


def merge_runs(source_offsets: Sequence[int], destination_offsets: Sequence[int], size_bytes: int) -> list[CopyRun]:
    """One run per stretch of pieces, each of ``size_bytes``, that are neighbours on both sides."""
    runs: list[CopyRun] = []
    for source, destination in zip(source_offsets, destination_offsets, strict=True):
        last = runs[-1] if runs else CopyRun(0, 0, 0)
        ends = (last.source_offset + last.size_bytes, last.destination_offset + last.size_bytes)
        if runs and ends == (source, destination):
            runs[-1] = CopyRun(last.source_offset, last.destination_offset, last.size_bytes + size_bytes)
        else:
            runs.append(CopyRun(source, destination, size_bytes))
    return runs


async def copy_runs(source: memoryview, destination: memoryview, runs: Sequence[CopyRun], executor: Executor) -> None:
    """Copy ``runs``; large ones in ``executor``.

    When this returns, raises or is cancelled, nothing writes to ``destination`` any more.

    Raises:
        ValueError: a run leaves one of the two.
    """
    for run in runs:
        _check(run, len(source), len(destination))
    stop = threading.Event()
    if sum(run.size_bytes for run in runs) <= _INLINE_SIZE_BYTES:
        _copy(source, destination, runs, stop)
        return
    copying = asyncio.get_running_loop().run_in_executor(executor, _copy, source, destination, runs, stop)
    try:
        await asyncio.shield(copying)
    finally:
        stop.set()
        # Cancelled: the thread sees `stop` at its next slice. A second cancellation must not cut this short either.
        while not copying.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([copying])


def abstract_address(socket_path: str) -> str:
    """The kernel's form of ``socket_path``: a leading ``@`` is how people write an abstract name's zero byte."""
    return "\0" + socket_path[1:] if socket_path.startswith("@") else socket_path


def _is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket runs as this process's effective user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, user_id, _group_id = struct.unpack("3i", credentials)
    return bool(user_id == os.geteuid())


def _map_read_only(fd: int, size_bytes: int) -> memoryview:
    """Map the memfd and close it."""
    try:
        # Without its seal a peer that shrinks its pool would kill us (SIGBUS) in the middle of a copy.
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != size_bytes:
            raise TransferError("the peer's pool is not sealed, or not of the size that was granted")
        if not size_bytes:
            raise TransferError("the peer's pool is empty")
        return memoryview(mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
    finally:
        os.close(fd)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _check(run: CopyRun, source_size: int, destination_size: int) -> None:
    in_source = 0 <= run.source_offset <= source_size - run.size_bytes
    in_destination = 0 <= run.destination_offset <= destination_size - run.size_bytes
    if not (in_source and in_destination):
        raise ValueError("a piece lies outside its pool")


def _copy(source: memoryview, destination: memoryview, runs: Sequence[CopyRun], stop: threading.Event) -> None:
    """Copy until done or ``stop``. NumPy lets go of the GIL; a memoryview's slice assignment keeps it."""
    from_bytes = np.frombuffer(source, dtype=np.uint8)
    to_bytes = np.frombuffer(destination, dtype=np.uint8)
    for run in runs:
        for done in range(0, run.size_bytes, _SLICE_SIZE_BYTES):
            if stop.is_set():
                return
            size = min(_SLICE_SIZE_BYTES, run.size_bytes - done)
            start, target = run.source_offset + done, run.destination_offset + done
            np.copyto(to_bytes[target : target + size], from_bytes[start : start + size])
