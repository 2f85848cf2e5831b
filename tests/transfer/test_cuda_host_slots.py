"""Slots of pinned memory below a pool on a GPU that is a fake: what is copied when, and what waits for what."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quartet.transfer.cuda.host_slots import PinnedHostBlocks
from quartet.transfer.cuda.memory import DeviceMemory
from tests.transfer.fake_cuda import FakeDriver, FakeHost

SIZE = 64


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    made = FakeDriver(FakeHost())
    yield made
    assert made.host.faults == []


@pytest.fixture
def memory(driver: FakeDriver) -> DeviceMemory:
    made = DeviceMemory(driver, 0, 4, SIZE)
    made.compute_stream = driver.create_stream()
    return made


def fill(driver: FakeDriver, memory: DeviceMemory, block_id: int, value: int) -> None:
    driver.write(memory.address + block_id * SIZE, bytes([value]) * SIZE)


def content(driver: FakeDriver, memory: DeviceMemory, block_id: int) -> bytes:
    return driver.read(memory.address + block_id * SIZE, SIZE)


def test_blocks_go_to_slots_and_come_back(driver: FakeDriver, memory: DeviceMemory) -> None:
    host = PinnedHostBlocks(memory, 3)
    for block_id in range(4):
        fill(driver, memory, block_id, block_id + 1)
    host.save([1, 3], [2, 0]).wait()
    assert [bytes(host.slot(slot)) for slot in (2, 0)] == [b"\2" * SIZE, b"\4" * SIZE]
    host.load([0, 2], [0, 2])
    assert [content(driver, memory, block_id) for block_id in (0, 2)] == [b"\4" * SIZE, b"\2" * SIZE]
    host.close()
    assert driver.num_events == 0
    assert driver.num_streams == 1


def test_a_step_that_is_launched_after_a_save_begins_once_it_is_done(driver: FakeDriver, memory: DeviceMemory) -> None:
    host = PinnedHostBlocks(memory, 3)
    fill(driver, memory, 1, 7)
    saving = host.save([1], [0])
    # What a step would do: overwrite the block, on the stream of computing.
    fill(driver, memory, 2, 9)
    driver.copy(memory.address + SIZE, memory.address + 2 * SIZE, SIZE, memory.compute_stream)
    driver.synchronize(memory.compute_stream)
    assert content(driver, memory, 1) == b"\11" * SIZE
    assert saving.is_done
    assert bytes(host.slot(0)) == b"\7" * SIZE
    host.close()


def test_a_save_returns_at_once_and_says_when_it_is_done(driver: FakeDriver, memory: DeviceMemory) -> None:
    host = PinnedHostBlocks(memory, 3)
    driver.host.pause()
    saving = host.save([1], [0])
    assert not saving.is_done
    driver.host.resume()
    saving.wait()
    assert saving.is_done
    host.close()


def test_events_are_used_again(driver: FakeDriver, memory: DeviceMemory) -> None:
    host = PinnedHostBlocks(memory, 3)
    savings = [host.save([1], [0]) for _ in range(10)]
    assert all(saving.is_done for saving in savings)
    assert driver.num_events == 1
    host.close()


def test_nothing_is_copied_by_no_call(
    driver: FakeDriver, memory: DeviceMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = PinnedHostBlocks(memory, 3)
    monkeypatch.setattr(driver, "copy_many", lambda _copies, _stream: pytest.fail("a batch of nothing is an error"))
    host.load([], [])
    host.close()
