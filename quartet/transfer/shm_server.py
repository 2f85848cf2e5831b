"""Hands this worker's block pool to peers on the same host, who then read it with nobody in the path.

A Unix socket passes the pool's memfd (SCM_RIGHTS) to whoever sends a token that only ``granted`` tells. Who has it
can read the *whole* pool, not only the pieces asked for: on one host the workers of a deployment trust each other.
What limits that trust: the memfd is sealed, so nobody can write; the peer must run as the same user; the token needs a
hand-off's secret first.

The socket's name is abstract: it needs no directory that both sides see (containers of one pod share network and IPC
but no files), and a killed worker leaves nothing behind. Where the network namespaces differ it is out of reach, and
pullers go over gRPC. The connection stays open for as long as the peer maps the pool, so that its end tells the peer to
let go of a dead worker's memory.
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

from quartet.transfer.base import PoolMemory

TOKEN_SIZE_BYTES = 16
_TOKEN_TIMEOUT_S = 5.0
_ACCEPT_RETRY_S = 0.1

_log = logging.getLogger(__name__)


class ShmServer:
    """Passes one pool's memfd to peers with the token, from ``start`` until ``close``."""

    def __init__(self, memory: PoolMemory) -> None:
        """Draw a name and a token for this life of the worker; nothing listens yet."""
        self.memory = memory
        self.socket_path = f"@quartet-shm-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(TOKEN_SIZE_BYTES)
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
                    _log.warning("cannot accept a peer that wants the block pool: %s", error)
                    await asyncio.sleep(_ACCEPT_RETRY_S)
                    continue
                task = asyncio.create_task(self._serve(connection), name="shm-serve")
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """Pass the pool to one peer, then keep the connection until the peer ends it. Peers may do anything here."""
        loop = asyncio.get_running_loop()
        with connection, contextlib.suppress(OSError, TimeoutError):
            connection.setblocking(False)
            if not is_same_user(connection) or not await self._receive_token(connection):
                _log.warning("refused the block pool to a process of another user or without the token")
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


def abstract_address(socket_path: str) -> str:
    """The kernel's form of ``socket_path``: a leading ``@`` is how people write an abstract name's zero byte."""
    return "\0" + socket_path[1:] if socket_path.startswith("@") else socket_path


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket runs as this process's effective user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, user_id, _group_id = struct.unpack("3i", credentials)
    return bool(user_id == os.geteuid())
