"""Passing a pool to another process: to which one, for how long, and never to write."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import mmap
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from quartet.errors import TransferError
from quartet.transfer.base import PoolMemory
from quartet.transfer.life_line import PoolOwner, abstract_address
from quartet.transfer.shm import SharedPool, ShmPools, ShmServer

OWNER = PoolOwner("source", 7)


@pytest.fixture
def memory() -> Iterator[PoolMemory]:
    pool = PoolMemory(4, 4096)
    pool.piece(2)[:] = b"\7" * 4096
    yield pool
    pool.close()


@asynccontextmanager
async def serving(memory: PoolMemory) -> AsyncIterator[ShmServer]:
    server = ShmServer(memory)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


def shared(server: ShmServer, **changes: object) -> SharedPool:
    return SharedPool(**{"socket_path": server.socket_path, "token": server.token, "size_bytes": 4 * 4096, **changes})


async def test_a_mapped_pool_shows_what_its_worker_writes_and_cannot_be_written(memory: PoolMemory) -> None:
    pools = ShmPools()
    async with serving(memory) as server:
        view = await pools.open(OWNER, shared(server), timeout_s=5)
        assert view == memory.view
        memory.piece(0)[:5] = b"later"
        assert view[:5] == b"later"
        assert view.readonly
        assert await pools.open(OWNER, shared(server), timeout_s=5) is view
        pools.close()


def test_the_descriptor_cannot_be_written_through(memory: PoolMemory) -> None:
    reopened = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDWR)
    for fd in (memory.fd, reopened):
        with pytest.raises(PermissionError):
            mmap.mmap(fd, memory.size_bytes)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    os.close(reopened)


async def test_the_mapping_goes_when_the_worker_does(memory: PoolMemory) -> None:
    pools = ShmPools()
    async with serving(memory) as server:
        view = await pools.open(OWNER, shared(server), timeout_s=5)
        assert pools.opened(OWNER) is not None
    for _ in range(3):
        await asyncio.sleep(0)  # a hang-up is in the kernel at once; the event loop has to look
    assert pools.opened(OWNER) is None
    assert view[2 * 4096] == 7, "a copy under way still has its pages"


async def test_two_that_map_a_pool_at_once_leave_nothing_behind_when_the_worker_goes(memory: PoolMemory) -> None:
    pools, num_open = ShmPools(), _num_open_files()
    async with serving(memory) as server:
        views = await asyncio.gather(*(pools.open(OWNER, shared(server), timeout_s=30) for _ in range(2)))
        assert views == [memory.view] * 2
    for _ in range(3):
        await asyncio.sleep(0)
    assert pools.opened(OWNER) is None
    del views
    # A connection that stayed would have the event loop look at its end again and again.
    assert _num_open_files() <= num_open


def _num_open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "change", [{"token": bytes(16)}, {"token": b""}, {"size_bytes": 4096}, {"socket_path": "@nobody-listens"}]
)
async def test_a_pool_that_differs_from_its_grant_is_not_mapped_and_not_requested_again(
    memory: PoolMemory, change
) -> None:
    pools = ShmPools()
    async with serving(memory) as server:
        assert pools.may_open(OWNER)
        with pytest.raises(TransferError):
            await pools.open(OWNER, shared(server, **change), timeout_s=0.2)
        assert not pools.may_open(OWNER)
        assert pools.opened(OWNER) is None


async def test_refusals_of_workers_long_gone_are_forgotten() -> None:
    pools = ShmPools()
    nowhere = SharedPool("@nobody-listens", b"t", 4096)
    owners = [PoolOwner("source", epoch) for epoch in range(100)]
    for owner in owners:
        with pytest.raises(TransferError):
            await pools.open(owner, nowhere, timeout_s=1)
    assert [owner for owner in owners if not pools.may_open(owner)] == owners[-64:]


async def test_an_unsealed_pool_is_refused() -> None:
    fd = os.memfd_create("shrinks", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4 * 4096)
    pretender = PoolMemory(4, 4096)
    pretender.close()
    pretender.fd = fd
    pools = ShmPools()
    async with serving(pretender) as server:
        with pytest.raises(TransferError, match="sealed"):
            await pools.open(OWNER, shared(server), timeout_s=5)
    pretender.close()


async def test_an_empty_pool_is_refused() -> None:
    pretender = PoolMemory(4, 4096)
    pretender.close()
    pretender.fd = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(pretender.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    async with serving(pretender) as server:
        with pytest.raises(TransferError, match="empty"):
            await ShmPools().open(OWNER, shared(server, size_bytes=0), timeout_s=5)
    pretender.close()


async def test_hostile_peers_get_nothing_and_the_server_serves_on(memory: PoolMemory) -> None:
    loop = asyncio.get_running_loop()
    pools = ShmPools()
    async with serving(memory) as server, asyncio.timeout(30):
        address = abstract_address(server.socket_path)
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        await loop.sock_connect(silent, address)
        for said in (b"", server.token[:15], bytes(16), bytes(1 << 16)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as peer:
                await loop.sock_connect(peer, address)
                await loop.sock_sendall(peer, said)
                peer.shutdown(socket.SHUT_WR)
                with suppress(ConnectionResetError):
                    assert await loop.sock_recv(peer, 1) == b""
        assert await pools.open(OWNER, shared(server), timeout_s=5) == memory.view
        silent.close()
        pools.close()


async def test_peers_without_the_token_are_logged_once_a_minute(
    memory: PoolMemory, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    async with serving(memory) as server, asyncio.timeout(30):
        for _ in range(100):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as peer:
                await loop.sock_connect(peer, abstract_address(server.socket_path))
                peer.shutdown(socket.SHUT_WR)
                assert await loop.sock_recv(peer, 1) == b""
    assert len(caplog.messages) == 1
    assert "without the token" in caplog.messages[0]


async def test_a_peer_of_another_user_gets_no_pool_even_with_the_token(
    memory: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    async with serving(memory) as server, asyncio.timeout(30):
        for user_id, answer in ((os.geteuid(), b"\0"), (os.geteuid() + 1, b"")):
            monkeypatch.setattr(os, "geteuid", lambda user_id=user_id: user_id)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as peer:
                await loop.sock_connect(peer, abstract_address(server.socket_path))
                await loop.sock_sendall(peer, server.token)
                try:
                    assert await loop.sock_recv(peer, 1) == answer
                except ConnectionResetError:  # it hung up before it had read the token
                    assert not answer


async def test_a_process_of_another_user_is_refused(memory: PoolMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = ShmPools()
    async with serving(memory) as server:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(TransferError, match="another user"):
            await pools.open(OWNER, shared(server), timeout_s=5)
