"""Way staged against fake GPUs: blocks go between GPUs and host memory, and nothing is left whatever happens."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from quartet.discovery.base import HostIdentity
from quartet.errors import HandOffNotFoundError, NoHandOffError, TransferError, TransferTimeoutError
from quartet.transfer.base import PieceCopy, TransferWay
from quartet.transfer.config import TransferConfig
from quartet.transfer.cuda import staged, staging
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.cuda.pinned import PinnedKind, pinned_kind
from quartet.transfer.grpc import puller
from tests.transfer.cuda_workers import GpuPuller, GpuSource, gpu_puller, gpu_source
from tests.transfer.fake_cuda import FakeDriver, FakeHost
from tests.transfer.workers import (
    CONFIG,
    LAYOUT,
    NUM_BLOCKS,
    PullerWorker,
    SourceWorker,
    puller_worker,
    source_worker,
)

COPIES = (PieceCopy(0, 5), PieceCopy(1, 2), PieceCopy(2, 9))
BLOCKS = (3, 7, 11)
PIECE = LAYOUT.piece_size_bytes
#: GPUs that take no cuda_ipc: by shared memory, and by the stream.
SHM = replace(CONFIG, ways=(TransferWay.SHM, TransferWay.GRPC))
GRPC = replace(CONFIG, ways=(TransferWay.GRPC,))
CARRIERS = {"shm": SHM, "grpc": GRPC}
ANOTHER_HOST = HostIdentity(boot_id="another", ipc_namespace="another")

Source = GpuSource | SourceWorker
Puller = GpuPuller | PullerWorker


@pytest.fixture
async def host() -> AsyncIterator[FakeHost]:
    """Two GPUs; in the end all memory was given back, and nothing is left running."""
    found = FakeHost(num_devices=2)
    yield found
    assert found.used_bytes == 0
    assert found.faults == []


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece takes several windows at the puller, and a window of the source's holds two pieces."""
    monkeypatch.setattr(staged, "_WINDOW_SIZE_BYTES", 600)
    monkeypatch.setattr(staging, "_WINDOW_SIZE_BYTES", 2 * PIECE)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  # threads change it
            await asyncio.sleep(0.001)


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def fill(source: Source, seed: int = 0) -> list[bytes]:
    if isinstance(source, GpuSource):
        return [source.fill(block_id, seed=seed + block_id) for block_id in BLOCKS]
    return [bytes(source.memory.piece(block_id)) for block_id in BLOCKS]


def blocks(here: Puller) -> list[bytes]:
    if isinstance(here, GpuPuller):
        return [here.block(copy.block_id) for copy in COPIES]
    return [bytes(here.memory.piece(copy.block_id)) for copy in COPIES]


async def open_source(stack: AsyncExitStack, host: FakeHost, kind: str, config: TransferConfig) -> Source:
    if kind == "gpu":
        return await stack.enter_async_context(gpu_source(host, config=config))
    return await stack.enter_async_context(source_worker(config=config))


async def open_puller(stack: AsyncExitStack, host: FakeHost, kind: str, config: TransferConfig) -> Puller:
    if kind == "gpu":
        return await stack.enter_async_context(gpu_puller(host, device=1, config=config))
    return await stack.enter_async_context(puller_worker(config=config))


pairs = pytest.mark.parametrize(("there", "here"), [("gpu", "cpu"), ("cpu", "gpu"), ("gpu", "gpu")])
carriers = pytest.mark.parametrize("carrier", CARRIERS)


@pairs
@carriers
async def test_blocks_arrive_again_and_again(host: FakeHost, there: str, here: str, carrier: str) -> None:
    async with AsyncExitStack() as stack:
        source = await open_source(stack, host, there, CARRIERS[carrier])
        taker = await open_puller(stack, host, here, CARRIERS[carrier])
        for holder in range(3):  # the second and third find the memory open
            expected = fill(source, seed=100 * holder)
            result = await taker.puller.claim(source.offer(holder, BLOCKS)).fetch(COPIES)
            assert (result.way, result.size_bytes) == (TransferWay.STAGED, 3 * PIECE)
            assert blocks(taker) == expected
        for worker in (source, taker):
            if isinstance(worker, GpuSource | GpuPuller):
                calls = ("copy_to_host", "copy_to_device", "record", "wait", "pin", "create_stream")
                # The event loop's thread is MainThread.
                assert not {"MainThread"} & worker.driver.threads_of(*calls)
                assert worker.driver.num_opened == 0
        if isinstance(source, GpuSource):
            await until(lambda: source.staging.num_free_slots == source.staging.num_slots)


@pytest.mark.parametrize("ways", [CONFIG, SHM])
async def test_a_worker_on_another_host_is_sent_what_one_on_this_host_maps(
    host: FakeHost, ways: TransferConfig
) -> None:
    async with gpu_source(host, config=ways) as source, gpu_puller(host, identity=ANOTHER_HOST) as here:
        expected = fill(source)
        result = await here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES)
        assert (result.way, blocks(here)) == (TransferWay.STAGED, expected)
        assert here.driver.count("copy") == 0


async def test_the_best_way_of_both_is_taken(host: FakeHost) -> None:
    async with gpu_source(host) as source, gpu_puller(host) as direct, gpu_puller(host, config=SHM) as by_host:
        fill(source)
        ways = []
        for holder, here in enumerate((direct, by_host, direct)):
            ways.append((await here.puller.claim(source.offer(holder, BLOCKS)).fetch(COPIES)).way)
        assert ways == [TransferWay.CUDA_IPC, TransferWay.STAGED, TransferWay.CUDA_IPC]
        assert blocks(direct) == blocks(by_host)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
async def test_pullers_that_know_no_staging_get_their_blocks(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def ways(fetch: puller._Fetch) -> tuple[TransferWay, ...]:
        own = (TransferWay.SHM, TransferWay.GRPC) if kind == "cpu" else (TransferWay.CUDA_IPC,)
        return own if len(fetch._pieces) else (TransferWay.GRPC,)

    monkeypatch.setattr(puller._Fetch, "_ways", ways)
    async with AsyncExitStack() as stack:
        source = await open_source(stack, host, "gpu", CONFIG)
        here = await open_puller(stack, host, kind, CONFIG)
        for holder in range(3):
            expected = fill(source, seed=100 * holder)
            result = await here.puller.claim(source.offer(holder, BLOCKS)).fetch(COPIES)
            assert result.way is (TransferWay.GRPC if kind == "cpu" else TransferWay.CUDA_IPC)
            assert blocks(here) == expected


async def test_what_is_staged_is_not_read_ahead_of_the_grant(host: FakeHost) -> None:
    async with gpu_source(host, config=SHM) as source, puller_worker() as here:
        first = [source.fill(block_id, seed=block_id) for block_id in range(3)]
        # Staged in slots 0 to 2: where the hand-off says that the blocks are in the pool.
        await here.puller.claim(source.offer(1, (0, 1, 2))).fetch(COPIES)
        assert blocks(here) == first
        await until(lambda: source.staging.num_free_slots == source.staging.num_slots)
        second = [source.fill(block_id, seed=50 + block_id) for block_id in range(3)]
        await here.puller.claim(source.offer(2, (0, 1, 2))).fetch(COPIES)
        assert blocks(here) == second


async def test_two_readers_of_one_source(host: FakeHost) -> None:
    async with gpu_source(host, config=SHM) as source, gpu_puller(host) as one, puller_worker() as other:
        expected = fill(source)
        offers = [source.offer(holder, BLOCKS) for holder in range(6)]
        takers: list[Puller] = [one, other] * 3
        fetches = (here.puller.claim(offer).fetch(COPIES) for here, offer in zip(takers, offers, strict=True))
        await asyncio.gather(*fetches)
        assert blocks(one) == blocks(other) == expected
        assert source.driver.count("pin") == 1


@pairs
async def test_hand_offs_between_any_two_are_without_a_piece_too(host: FakeHost, there: str, here: str) -> None:
    async with AsyncExitStack() as stack:
        source = await open_source(stack, host, there, CONFIG)
        taker = await open_puller(stack, host, here, CONFIG)
        assert (await taker.puller.claim(source.offer(1, BLOCKS)).fetch([])).way is TransferWay.GRPC
        assert (host.num_copies, host.faults) == (0, [])


# A full staging area.


async def test_a_pull_of_more_than_there_is_room_for_is_sent(host: FakeHost) -> None:
    config = replace(SHM, staging_size_bytes=2 * PIECE)
    async with gpu_source(host, config=config) as source, puller_worker() as here:
        copies = [PieceCopy(piece, piece) for piece in range(NUM_BLOCKS)]
        expected = [source.fill(block_id, seed=block_id) for block_id in range(NUM_BLOCKS)]
        result = await here.puller.claim(source.offer(1, range(NUM_BLOCKS))).fetch(copies)
        assert result.way is TransferWay.STAGED
        assert [bytes(here.memory.piece(copy.block_id)) for copy in copies] == expected
        assert source.staging.num_slots == 2


@carriers
async def test_pulls_wait_in_order_for_room(host: FakeHost, carrier: str) -> None:
    config = replace(CARRIERS[carrier], staging_size_bytes=4 * PIECE)
    async with gpu_source(host, config=config) as source, puller_worker(config=config) as here:
        expected = fill(source)
        async with source.staging.staged(BLOCKS):
            claims = [here.puller.claim(source.offer(holder, BLOCKS)) for holder in range(3)]
            fetches = [asyncio.create_task(claim.fetch(COPIES)) for claim in claims]
            await until(lambda: len(source.staging._slots._waiting) == 3)
            fetches[1].cancel()
            await until(lambda: len(source.staging._slots._waiting) == 2)
            assert source.staging.num_free_slots == 1
        await fetches[0]
        await fetches[2]
        assert blocks(here) == expected
        await until(lambda: source.staging.num_free_slots == 4)


async def test_a_pull_waits_for_room_no_longer_than_a_pull_may_take(host: FakeHost) -> None:
    config = replace(SHM, staging_size_bytes=3 * PIECE, max_pull_s=0.2)
    async with gpu_source(host, config=config) as source, puller_worker(config=SHM) as here:
        fill(source)
        async with source.staging.staged(BLOCKS):
            with pytest.raises(TransferTimeoutError):
                await here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES)
            assert not source.staging._slots._waiting
        assert source.staging.num_free_slots == 3


# Ends at any moment.


@pairs
@carriers
@pytest.mark.parametrize("num_turns", range(0, 60, 6))
async def test_a_fetch_cancelled_at_any_turn_leaves_nothing(
    host: FakeHost, there: str, here: str, carrier: str, num_turns: int
) -> None:
    async with AsyncExitStack() as stack:
        source = await open_source(stack, host, there, CARRIERS[carrier])
        taker = await open_puller(stack, host, here, CARRIERS[carrier])
        if num_turns % 12:
            await taker.puller.claim(source.offer(0, BLOCKS)).fetch(COPIES)
        fetching = asyncio.create_task(taker.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES))
        await turns(num_turns)
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        if isinstance(taker, GpuPuller):  # nothing writes any more
            written = blocks(taker)
            await turns(20)
            assert blocks(taker) == written
        if isinstance(source, GpuSource):
            await until(lambda: source.staging.num_free_slots == source.staging.num_slots)
        expected = fill(source, seed=500)
        await taker.puller.claim(source.offer(2, BLOCKS)).fetch(COPIES)
        assert blocks(taker) == expected


@carriers
async def test_a_cancelled_fetch_waits_for_the_writes_that_began(host: FakeHost, carrier: str) -> None:
    async with source_worker(config=CARRIERS[carrier]) as source, gpu_puller(host) as here:
        host.pause()
        fetching = asyncio.create_task(here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES))
        await until(lambda: here.driver.count("wait") == 1)
        assert (host.num_copies, here.driver.count("copy_to_device") > 0) == (0, True)
        for _ in range(3):
            fetching.cancel()
            await turns(10)
        assert not fetching.done()
        host.resume()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert host.num_copies == here.driver.count("copy_to_device")


@carriers
async def test_slots_stay_taken_while_the_gpu_writes_there(host: FakeHost, carrier: str) -> None:
    config = CARRIERS[carrier]
    async with gpu_source(host, config=config) as source, puller_worker(config=config) as here:
        fill(source)
        host.pause()
        fetching = asyncio.create_task(here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES))
        await until(lambda: source.driver.count("wait") == 1)
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        await turns(50)
        assert source.staging.num_free_slots == source.staging.num_slots - 3
        host.resume()
        await until(lambda: source.staging.num_free_slots == source.staging.num_slots)


@carriers
async def test_a_hand_off_withdrawn_while_it_is_staged_is_not_read(host: FakeHost, carrier: str) -> None:
    config = CARRIERS[carrier]
    async with gpu_source(host, config=config) as source, puller_worker(config=config) as here:
        fill(source)
        before = blocks(here)
        host.pause()
        fetching = asyncio.create_task(here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES))
        await until(lambda: source.driver.count("wait") == 1)
        source.source.withdraw(1)
        fill(source, seed=900)  # the blocks are another request's by now
        host.resume()
        with pytest.raises((TransferError, HandOffNotFoundError)):
            await fetching
        assert blocks(here) == before
        await until(lambda: source.staging.num_free_slots == source.staging.num_slots)


@carriers
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
async def test_a_source_that_ends_in_the_middle_is_a_failed_transfer(host: FakeHost, carrier: str, kind: str) -> None:
    async with AsyncExitStack() as stack:
        taker = await open_puller(stack, host, kind, CARRIERS[carrier])
        async with gpu_source(host, config=CARRIERS[carrier]) as source:
            fill(source)
            host.pause()
            fetching = asyncio.create_task(taker.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES))
            await until(lambda: source.driver.count("wait") == 1)
            draining = asyncio.create_task(source.server.drain(0.0))
            with pytest.raises(TransferError):
                await fetching
            host.resume()
            await draining


async def test_a_shutdown_of_the_source_waits_for_its_copies(host: FakeHost) -> None:
    async with gpu_source(host, config=SHM) as source, puller_worker() as here:
        fill(source)
        host.pause()
        fetching = asyncio.create_task(here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES))
        await until(lambda: source.driver.count("wait") == 1)
        closing = asyncio.create_task(source.staging.close())
        await turns(20)
        assert (closing.done(), source.driver.num_pinned) == (False, 1)
        host.resume()
        await closing
        assert source.driver.num_pinned == 0
        await asyncio.gather(fetching, return_exceptions=True)
        with pytest.raises(TransferError):
            await here.puller.claim(source.offer(2, BLOCKS)).fetch(COPIES)


async def test_a_shutdown_of_the_puller_waits_for_its_copies(host: FakeHost) -> None:
    async with source_worker() as source, gpu_puller(host) as here:
        host.pause()
        fetching = asyncio.create_task(here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES))
        await until(lambda: here.driver.count("wait") == 1)
        closing = asyncio.create_task(here.puller.close())
        await turns(20)
        assert not closing.done()
        host.resume()
        await closing
        with pytest.raises(TransferError):
            await fetching


# What drivers refuse.


@carriers
@pytest.mark.parametrize("call", ["create_stream", "copy_to_host", "record", "wait"])
async def test_a_failing_call_of_the_source_is_a_failed_transfer(host: FakeHost, carrier: str, call: str) -> None:
    config = CARRIERS[carrier]
    async with gpu_source(host, config=config) as source, puller_worker(config=config) as here:
        expected = fill(source)
        source.driver.failing[call] = "CUDA_ERROR_UNKNOWN"
        with pytest.raises(TransferError):
            await here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES)
        await until(lambda: source.staging.num_free_slots == source.staging.num_slots)
        await here.puller.claim(source.offer(2, BLOCKS)).fetch(COPIES)
        assert blocks(here) == expected


@carriers
async def test_where_no_host_memory_is_to_be_had_the_router_prefills_elsewhere(host: FakeHost, carrier: str) -> None:
    config = CARRIERS[carrier]
    async with gpu_source(host, config=config) as source, puller_worker(config=config) as here:
        expected = fill(source)
        source.driver.failing["pin"] = "CUDA_ERROR_OUT_OF_MEMORY"
        with pytest.raises(NoHandOffError, match="no host memory"):
            await here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES)
        assert (source.source.counts.pulling, source.source.counts.cancelled) == (0, 1), "its blocks are free"
        await until(lambda: source.staging.num_free_slots == source.staging.num_slots)
        await here.puller.claim(source.offer(2, BLOCKS)).fetch(COPIES)
        assert blocks(here) == expected


@carriers
@pytest.mark.parametrize("call", ["allocate_host", "create_event", "create_stream", "copy_to_device", "record", "wait"])
async def test_a_failing_call_of_the_puller_is_a_failed_transfer(host: FakeHost, carrier: str, call: str) -> None:
    config = CARRIERS[carrier]
    async with source_worker(config=config) as source, gpu_puller(host, config=config) as here:
        here.driver.failing[call] = "CUDA_ERROR_UNKNOWN"
        with pytest.raises(TransferError):
            await here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES)
        await here.puller.claim(source.offer(2, BLOCKS)).fetch(COPIES)
        assert blocks(here) == fill(source)


async def test_gpus_that_cannot_peer_are_staged_once_that_has_shown() -> None:
    host = FakeHost(num_devices=2, peers=False)
    async with gpu_source(host) as source, gpu_puller(host, device=1) as here:
        expected = fill(source)
        with pytest.raises(TransferError):
            await here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES)
        for holder in (2, 3):
            result = await here.puller.claim(source.offer(holder, BLOCKS)).fetch(COPIES)
            assert (result.way, blocks(here)) == (TransferWay.STAGED, expected)
        assert here.driver.count("open") == 1
    assert host.faults == []


async def test_staged_memory_that_cannot_be_mapped_is_sent_from_then_on(host: FakeHost) -> None:
    async with gpu_source(host, config=SHM) as source, puller_worker() as here:
        expected = fill(source)
        await source.staging_server.close()
        with pytest.raises(TransferError):
            await here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES)
        assert (await here.puller.claim(source.offer(2, BLOCKS)).fetch(COPIES)).way is TransferWay.STAGED
        assert blocks(here) == expected


async def test_a_puller_cannot_write_what_is_staged(host: FakeHost) -> None:
    async with gpu_source(host, config=SHM) as source, puller_worker() as here:
        fill(source)
        await here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES)
        assert source.staging.fd is not None
        seals = fcntl.fcntl(source.staging.fd, fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_SHRINK
        assert seals & 0x10  # F_SEAL_FUTURE_WRITE


@pytest.mark.parametrize("is_refused", [False, True])
async def test_pinned_memory_is_write_combined_where_it_can_be(
    host: FakeHost, is_refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeDriver(host, (1,))
    if is_refused:
        driver.failing["write_combined"] = "CUDA_ERROR_NOT_SUPPORTED"
    with caplog.at_level("INFO", logger="quartet.transfer.cuda.pinned"):
        async with source_worker() as source, gpu_puller(host, driver=driver) as here:
            assert pinned_kind(driver) is (PinnedKind.PLAIN if is_refused else PinnedKind.WRITE_COMBINED)
            await here.puller.claim(source.offer(1, BLOCKS)).fetch(COPIES)
            assert set(driver.write_combined) == {not is_refused}
            assert blocks(here) == fill(source)
    assert sum("go through" in record.message for record in caplog.records) == 1


async def test_a_driver_that_pins_nothing_leaves_the_direct_way_alone(host: FakeHost) -> None:
    driver = FakeDriver(host)
    driver.failing |= {"write_combined": "CUDA_ERROR_NOT_SUPPORTED", "allocate_host": "CUDA_ERROR_OUT_OF_MEMORY"}
    memory = DeviceMemory(driver, 0, 4, 1024)
    assert CONFIG.ways_of(memory) == CONFIG.announced_ways(memory) == (TransferWay.CUDA_IPC,)
    memory.close()


def test_people_see_what_goes_through_host_memory_as_staged() -> None:
    memory = DeviceMemory(FakeDriver(FakeHost()), 0, 4, 1024)
    assert CONFIG.ways_of(memory) == (TransferWay.CUDA_IPC, TransferWay.SHM, TransferWay.GRPC)
    assert CONFIG.announced_ways(memory) == (TransferWay.CUDA_IPC, TransferWay.STAGED)
    assert GRPC.announced_ways(memory) == (TransferWay.STAGED,)
    memory.close()
