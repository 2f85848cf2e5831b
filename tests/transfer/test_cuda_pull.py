"""Way cuda_ipc against fake GPUs: right bytes, one opening a life of the source, and nothing left whatever happens."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from quartet.errors import NoHandOffError, TransferError
from quartet.kvcache.layout import KvLayout
from quartet.transfer.base import PieceCopy, PieceRun, TransferWay
from quartet.transfer.cuda import threads
from quartet.transfer.cuda.driver import Copies
from quartet.transfer.cuda.memory import DeviceMemory
from tests.transfer.cuda_workers import GpuPuller, GpuSource, gpu_puller, gpu_source
from tests.transfer.fake_cuda import FakeDriver, FakeHost
from tests.transfer.workers import CONFIG, EPOCH, LAYOUT, NUM_BLOCKS, puller_worker

COPIES = (PieceCopy(0, 5), PieceCopy(1, 2), PieceCopy(2, 9))
BLOCKS = (3, 7, 11)


@pytest.fixture
async def host() -> AsyncIterator[FakeHost]:
    """Two GPUs; in the end all memory was given back, and nothing is left running."""
    found = FakeHost(num_devices=2)
    yield found
    assert found.used_bytes == 0
    assert found.faults == []


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  # threads change it
            await asyncio.sleep(0.001)


def fill(source: GpuSource) -> list[bytes]:
    return [source.fill(block_id, seed=block_id) for block_id in BLOCKS]


def blocks(here: GpuPuller) -> list[bytes]:
    return [here.block(copy.block_id) for copy in COPIES]


@pytest.mark.parametrize("device", [0, 1])
async def test_blocks_arrive_and_the_pool_is_opened_once_and_closed_when_its_worker_ends(
    host: FakeHost, device: int
) -> None:
    async with gpu_puller(host, device=device) as here:
        async with gpu_source(host) as source:
            expected = fill(source)
            for holder in range(3):  # the second and third read ahead of the grant
                result = await here.puller.claim(source.offer(holder, BLOCKS)).fetch(COPIES)
                assert (result.way, result.size_bytes) == (TransferWay.CUDA_IPC, 3 * LAYOUT.piece_size_bytes)
                assert blocks(here) == expected
                for copy in COPIES:
                    here.driver.write(here.memory.address + copy.block_id * LAYOUT.piece_size_bytes, b"\0" * 64)
            assert (here.driver.count("open"), here.driver.num_opened) == (1, 1)
        await until(lambda: here.driver.num_opened == 0)
        assert host.used_bytes == here.memory.reserved_size_bytes
        # The event loop's thread is MainThread.
        assert "MainThread" not in here.driver.threads_of("open", "close", "copy", "record", "wait")


async def test_neighbours_on_both_sides_are_one_copy(host: FakeHost) -> None:
    async with gpu_puller(host) as here, gpu_source(host) as source:
        source.fill(4, 1), source.fill(5, 2)
        copies = [PieceCopy(0, 7), PieceCopy(1, 8), PieceCopy(2, 1)]
        await here.puller.claim(source.offer(1, (4, 5, 6))).fetch(copies)
        assert here.driver.count("copy") == 2


async def test_few_copies_are_started_first_so_that_the_gpu_begins(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    copy_many = FakeDriver.copy_many

    def noted(driver: FakeDriver, copies: Copies, stream: int) -> None:
        sizes.append(len(copies))
        copy_many(driver, copies, stream)

    num_blocks = 1000
    async with (
        gpu_puller(host, num_blocks=2 * num_blocks) as here,
        gpu_source(host, num_blocks=num_blocks, device=1) as source,
    ):
        expected = source.fill(num_blocks - 1, seed=1)
        monkeypatch.setattr(FakeDriver, "copy_many", noted)
        # No two are neighbours.
        copies = PieceRun(0, range(0, 2 * num_blocks, 2))
        await here.puller.claim(source.offer(1, tuple(range(num_blocks)))).fetch(copies)
        assert sizes == [64, 256, 512, 168]
        assert here.block(2 * num_blocks - 2) == expected


async def test_pieces_lie_beyond_what_32_bits_and_64_gib_reach(host: FakeHost) -> None:
    num_blocks = (1 << 37) // LAYOUT.piece_size_bytes
    far = (1 << 36) // LAYOUT.piece_size_bytes + 5
    block_ids = ((1 << 31) // LAYOUT.piece_size_bytes + 3, far, num_blocks - 1)
    async with (
        gpu_puller(host, num_blocks=num_blocks) as here,
        gpu_source(host, num_blocks=num_blocks, device=1) as source,
    ):
        expected = [source.fill(block_id, seed=block_id) for block_id in block_ids]
        copies = [PieceCopy(0, num_blocks - 2), PieceCopy(1, 4), PieceCopy(2, far)]
        await here.puller.claim(source.offer(1, block_ids)).fetch(copies)
        assert [here.block(copy.block_id) for copy in copies] == expected


async def test_two_readers_of_one_source(host: FakeHost) -> None:
    async with gpu_source(host) as source, gpu_puller(host) as one, gpu_puller(host, device=1) as other:
        expected = fill(source)
        offers = [source.offer(holder, BLOCKS) for holder in range(2)]
        await asyncio.gather(*(here.puller.claim(offers[i]).fetch(COPIES) for i, here in enumerate((one, other))))
        assert blocks(one) == blocks(other) == expected


async def test_several_fetches_at_once_open_the_pool_once(host: FakeHost) -> None:
    async with gpu_source(host) as source, gpu_puller(host) as here:
        expected = fill(source)
        claims = [here.puller.claim(source.offer(holder, BLOCKS)) for holder in range(5)]
        await asyncio.gather(*(claim.fetch(COPIES) for claim in claims))
        assert blocks(here) == expected
        assert here.driver.count("open") == 1


async def test_two_fetches_are_under_way_at_once_on_streams_of_their_own(host: FakeHost) -> None:
    async with gpu_source(host) as source, gpu_puller(host) as here:
        expected = fill(source)
        await here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES)
        host.pause()
        claims = [here.puller.claim(source.offer(holder, BLOCKS)) for holder in (2, 3)]
        fetching = asyncio.gather(*(claim.fetch(COPIES) for claim in claims))
        await until(lambda: here.driver.count("wait") == 3)
        assert here.driver.num_streams == 2
        host.resume()
        await fetching
        assert blocks(here) == expected


@pytest.mark.parametrize("is_open", [False, True], ids=["granted", "ahead of the grant"])
async def test_a_cancelled_fetch_waits_for_the_copies_that_began(host: FakeHost, is_open: bool) -> None:
    async with gpu_source(host) as source, gpu_puller(host) as here:
        if is_open:
            await here.puller.claim(source.offer(0, BLOCKS)).fetch(COPIES)
        expected = fill(source)
        num_copies, num_waits = host.num_copies, here.driver.count("wait")
        host.pause()
        fetching = asyncio.create_task(here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES))
        await until(lambda: here.driver.count("wait") == num_waits + 1)
        assert host.num_copies == num_copies  # they are issued and have not happened
        for _ in range(3):
            fetching.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
        assert not fetching.done()
        host.resume()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert (host.num_copies, blocks(here)) == (num_copies + 3, expected)


async def test_a_fetch_cancelled_before_its_copies_begin_issues_no_more(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_NUM_THREADS", 1)
    async with gpu_source(host) as source, gpu_puller(host) as here:
        fill(source)
        host.pause()
        claims = [here.puller.claim(source.offer(holder, BLOCKS)) for holder in range(2)]
        first = asyncio.create_task(claims[0].fetch(COPIES))
        await until(lambda: here.driver.count("wait") == 1)
        second = asyncio.create_task(claims[1].fetch(COPIES))  # its copies wait for the one thread
        for _ in range(20):
            await asyncio.sleep(0)
        second.cancel()
        for _ in range(20):
            await asyncio.sleep(0)  # it learns of that
        host.resume()
        await first
        with pytest.raises(asyncio.CancelledError):
            await second
        assert here.driver.count("copy") == 3


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("num_turns", range(0, 40, 3))
async def test_a_fetch_cancelled_at_any_turn_leaves_nothing(host: FakeHost, num_turns: int, is_open: bool) -> None:
    async with gpu_source(host) as source, gpu_puller(host) as here:
        fill(source)
        if is_open:
            await here.puller.claim(source.offer(0, BLOCKS)).fetch(COPIES)
        fetching = asyncio.create_task(here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        num_copies, num_issued = host.num_copies, here.driver.count("copy")
        assert num_copies == num_issued


@pytest.mark.parametrize("ends_by", ["cancel", "close"])
async def test_a_pool_that_is_being_opened_when_nobody_wants_it_any_more_is_closed(
    host: FakeHost, ends_by: str
) -> None:
    async with gpu_source(host) as source, gpu_puller(host) as here:
        fill(source)
        here.driver.may_open.clear()
        fetching = asyncio.create_task(here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES))
        await until(lambda: here.driver.count("open") == 1)
        ending = asyncio.create_task(here.puller.close()) if ends_by == "close" else fetching
        if ends_by == "cancel":
            fetching.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not fetching.done()
        assert not ending.done()
        here.driver.may_open.set()
        await asyncio.gather(fetching, ending, return_exceptions=True)
        await until(lambda: here.driver.num_opened == 0)
        assert here.driver.count("close") == 1
        assert host.num_copies == 0


async def test_a_source_that_dies_in_the_middle_is_closed_only_after_the_copies(host: FakeHost) -> None:
    async with gpu_puller(host) as here:
        async with gpu_source(host) as source:
            fill(source)
            await here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES)
            host.pause()
            fetching = asyncio.create_task(here.puller.claim(source.offer(2, BLOCKS)).fetch(COPIES))
            await until(lambda: here.driver.count("wait") == 2)
        # Killed: its connections are gone, and the pool that copies read is still open.
        for _ in range(10):
            await asyncio.sleep(0)
        assert here.driver.num_opened == 1
        assert not fetching.done()
        host.resume()
        with pytest.raises(TransferError):
            await fetching
        await until(lambda: here.driver.num_opened == 0)
        assert host.used_bytes == here.memory.reserved_size_bytes


async def is_unreachable(here: GpuPuller, source: GpuSource, holder: int) -> bool:
    try:
        await here.puller.claim(source.offer(holder, BLOCKS)).fetch(COPIES)
    except TransferError:
        return True
    return False


async def test_a_worker_that_comes_back_at_its_address_is_opened_anew(
    host: FakeHost, free_port: Callable[[], int]
) -> None:
    address, holders = f"127.0.0.1:{free_port()}", itertools.count(1)
    async with gpu_puller(host) as here:
        for epoch in range(1, 7):
            async with gpu_source(host, epoch=epoch, address=address) as source, asyncio.timeout(30):
                expected = [source.fill(block_id, seed=100 * epoch + block_id) for block_id in BLOCKS]
                # Pulls fail at once until gRPC tries to connect again, which has no event.
                while await is_unreachable(here, source, next(holders)):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                assert blocks(here) == expected
        await until(lambda: here.driver.num_opened == 0)
        assert here.driver.count("open") == 6


async def test_a_shutdown_waits_for_copies(host: FakeHost) -> None:
    async with gpu_source(host) as source, gpu_puller(host) as here:
        fill(source)
        host.pause()
        fetching = asyncio.create_task(here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES))
        await until(lambda: here.driver.count("wait") == 1)
        closing = asyncio.create_task(here.puller.close())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        assert here.driver.num_opened == 1
        host.resume()
        await closing
        assert here.driver.num_opened == 0
        with pytest.raises(TransferError):
            await fetching


@pytest.mark.parametrize("call", ["open", "create_stream", "copy", "record", "wait"])
async def test_a_failing_call_is_a_failed_transfer(host: FakeHost, call: str) -> None:
    async with gpu_source(host) as source, gpu_puller(host) as here:
        fill(source)
        here.driver.failing[call] = "CUDA_ERROR_UNKNOWN"
        with pytest.raises((TransferError, NoHandOffError)):
            await here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES)
        assert host.num_copies == here.driver.count("copy") - (call == "copy")


async def test_gpus_that_cannot_peer_are_not_tried_again() -> None:
    host = FakeHost(num_devices=2, peers=False)
    async with gpu_source(host) as source, gpu_puller(host, device=1) as here:
        with pytest.raises(TransferError, match="PEER_ACCESS_UNSUPPORTED"):
            await here.puller.claim(source.offer(0, BLOCKS)).fetch(COPIES)
        assert (await here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES)).way is TransferWay.STAGED
        assert here.driver.count("open") == 1
        # Nothing to move needs no way.
        assert (await here.puller.claim(source.offer(3, BLOCKS)).fetch([])).way is TransferWay.GRPC


async def test_pools_that_no_host_memory_is_pinned_for_have_no_way_but_the_direct_one() -> None:
    host = FakeHost(num_devices=2, peers=False)
    drivers = [FakeDriver(host, (device,)) for device in (0, 1)]
    for driver in drivers:
        driver.failing |= {"write_combined": "CUDA_ERROR_NOT_SUPPORTED", "allocate_host": "CUDA_ERROR_OUT_OF_MEMORY"}
    memory = DeviceMemory(drivers[0], 0, NUM_BLOCKS, LAYOUT.piece_size_bytes)
    async with gpu_source(host, memory=memory) as source, gpu_puller(host, driver=drivers[1]) as here:
        source.servicer.staging = None  # as a worker does with such a pool
        for holder in range(2):
            with pytest.raises(NoHandOffError, match="no way"):
                await here.puller.claim(source.offer(holder, BLOCKS)).fetch(COPIES)
        assert here.driver.count("open") == 1
    async with gpu_source(host) as source, puller_worker() as on_cpu:
        source.servicer.staging = None
        with pytest.raises(NoHandOffError):
            await on_cpu.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES)


@pytest.mark.parametrize("change", ["handle", "epoch", "size_bytes", "token", "socket_path", "size_too_large"])
async def test_a_pool_that_is_not_what_was_granted_is_not_read(host: FakeHost, change: str) -> None:
    changed = {
        "handle": {"handle": bytes(64)},
        "epoch": {"epoch": EPOCH + 1},
        "size_bytes": {"size_bytes": LAYOUT.piece_size_bytes},
        "size_too_large": {"size_bytes": (2 << 20) + 1},  # its memory is one page
        "token": {"token": bytes(16)},
        "socket_path": {"socket_path": "@nobody-listens"},
    }[change]
    async with gpu_source(host) as source, gpu_puller(host) as here:
        source.cuda.lent = replace(source.cuda.lent, **changed)  # type: ignore[arg-type]
        with pytest.raises((TransferError, NoHandOffError)):
            await here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES)
        assert host.num_copies == 0


@pytest.mark.parametrize(("num_blocks", "num_pages"), [(1, 1), (2048, 1), (2049, 2)])
def test_what_a_handle_opens_is_the_pool_s_alone(host: FakeHost, num_blocks: int, num_pages: int) -> None:
    memory = DeviceMemory(FakeDriver(host), 0, num_blocks, 1024)
    assert host.used_bytes == memory.reserved_size_bytes == num_pages << 21
    assert memory.size_bytes == num_blocks * 1024
    memory.close()


async def test_a_driver_that_exports_no_memory_leaves_what_is_staged(host: FakeHost) -> None:
    driver = FakeDriver(host)
    driver.failing["export"] = "CUDA_ERROR_NOT_SUPPORTED"
    memory = DeviceMemory(driver, 0, 4, 1024)
    assert CONFIG.announced_ways(memory) == (TransferWay.STAGED,)
    memory.close()
    memory.close()


def test_a_layout_of_many_elements_needs_64_bits() -> None:
    layout = KvLayout(
        model_fingerprint="f" * 64, dtype="bfloat16", num_layers=36, num_kv_heads=8, head_dim=128, block_size=16
    )
    driver = FakeDriver(FakeHost())
    num_blocks = 40_000
    memory = DeviceMemory(driver, 0, num_blocks, layout.piece_size_bytes)
    assert memory.size_bytes == num_blocks * layout.piece_size_bytes > 1 << 36
    assert memory.__cuda_array_interface__["shape"] == (memory.size_bytes,)
    memory.close()
