"""Embeddings as tensors: what is written comes back, wherever the pool, an item's blocks in it and a read begin."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch

from quartet.engine.media.embeddings import EmbeddingPoolView, Slots
from quartet.engine.torch import pool
from quartet.engine.torch.pool import reserve_embeddings
from quartet.errors import InvalidRequestError
from quartet.kvcache.layout import EmbeddingLayout
from quartet.transfer.base import EmbeddingMemory, PoolMemory, TransferWay
from quartet.transfer.cuda.driver import Driver
from quartet.transfer.cuda.memory import DeviceMemory
from tests.transfer.fake_cuda import FakeDriver, FakeHost

HIDDEN_SIZE = 3
BLOCK_SIZE = 4
GPU = torch.device("cuda:0")

MakeMemory = Callable[..., EmbeddingMemory]


def layout(dtype: str = "float32", hidden_size: int = HIDDEN_SIZE) -> EmbeddingLayout:
    return EmbeddingLayout(model_fingerprint="m", dtype=dtype, hidden_size=hidden_size, block_size=BLOCK_SIZE)


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def make_memory(request: pytest.FixtureRequest) -> Iterator[MakeMemory]:
    """Makes pools on one device, closed in the end."""
    made: list[EmbeddingMemory] = []

    def make(dtype: str = "float32", num_blocks: int = 6) -> EmbeddingMemory:
        made.append(reserve_embeddings(layout(dtype), num_blocks, torch.device(request.param)))
        assert isinstance(made[-1].memory, PoolMemory if request.param == "cpu" else DeviceMemory)
        return made[-1]

    yield make
    for memory in made:
        memory.memory.close()


def make_rows(num_tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, 1 + num_tokens * HIDDEN_SIZE).view(num_tokens, HIDDEN_SIZE).to(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("first", "num_tokens"), [(0, 10), (0, 4), (3, 2), (5, 5), (9, 1), (2, 0)])
def test_any_part_of_an_item_is_read_as_it_was_written(
    make_memory: MakeMemory, dtype: str, first: int, num_tokens: int
) -> None:
    view, rows = EmbeddingPoolView(make_memory(dtype)), make_rows(10, getattr(torch, dtype))
    view.write((5, 0, 3), rows)
    assert torch.equal(view.read((5, 0, 3), first, num_tokens).cpu(), rows[first : first + num_tokens])


def test_parts_of_several_items_are_taken_at_once(make_memory: MakeMemory) -> None:
    view = EmbeddingPoolView(make_memory())
    view.write((5, 0), make_rows(8))
    view.write((2,), -make_rows(4))
    slots = [*view.slots((2,), 1, 2), *view.slots((5, 0), 3, 3)]
    assert torch.equal(view.take(torch.tensor(slots).numpy()).cpu(), torch.cat([-make_rows(4)[1:3], make_rows(8)[3:6]]))


def test_items_lie_in_the_pools_bytes_where_transfers_read_them() -> None:
    memory = reserve_embeddings(layout(), 6, torch.device("cpu"))
    assert isinstance(memory.memory, PoolMemory)
    rows = make_rows(6)
    EmbeddingPoolView(memory).write((4, 1), rows)
    assert torch.equal(torch.frombuffer(memory.memory.piece(4), dtype=torch.float32).view(-1, HIDDEN_SIZE), rows[:4])
    last = torch.frombuffer(memory.memory.piece(1), dtype=torch.float32).view(-1, HIDDEN_SIZE)
    assert torch.equal(last[:2], rows[4:])
    assert not last[2:].any()
    assert torch.equal(EmbeddingPoolView(memory).read((4, 1), 0, 6), rows)
    memory.memory.close()


def test_rows_of_another_dtype_are_converted(make_memory: MakeMemory) -> None:
    view = EmbeddingPoolView(make_memory("bfloat16"))
    view.write((2,), make_rows(4, torch.float64) / 7)
    assert torch.equal(view.read((2,), 0, 4).cpu(), (make_rows(4, torch.float64) / 7).bfloat16())


def test_read_rows_are_a_copy(make_memory: MakeMemory) -> None:
    view = EmbeddingPoolView(make_memory())
    view.write((2,), make_rows(4))
    read = view.read((2,), 0, 4)
    view.write((2,), torch.zeros(4, HIDDEN_SIZE))
    assert torch.equal(read.cpu(), make_rows(4))


def test_more_tokens_than_the_blocks_hold_are_refused(make_memory: MakeMemory) -> None:
    view = EmbeddingPoolView(make_memory())
    with pytest.raises(IndexError):
        view.write((2,), make_rows(5))
    assert not view.read((2,), 0, 4).any()
    with pytest.raises(IndexError):
        view.read((2, 3), 6, 3)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Of the GPU that the engine finds."""
    driver = FakeDriver(FakeHost())
    monkeypatch.setattr(pool, "cuda_driver", lambda: driver)
    return driver


def test_where_the_gpus_driver_pins_no_memory_embeddings_are_where_every_worker_gets_them(driver: FakeDriver) -> None:
    driver.failing |= {"write_combined": "CUDA_ERROR_NOT_SUPPORTED", "allocate_host": "CUDA_ERROR_OUT_OF_MEMORY"}
    memory = reserve_embeddings(layout(), 6, GPU)
    assert memory.memory.ways == (TransferWay.SHM, TransferWay.GRPC)
    assert driver.host.used_bytes == 0
    EmbeddingPoolView(memory).write((1,), make_rows(4))
    assert torch.equal(EmbeddingPoolView(memory).read((1,), 0, 4), make_rows(4))
    memory.memory.close()


def test_a_gpu_without_room_for_embeddings_is_named(driver: FakeDriver) -> None:
    driver.failing["allocate"] = "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(
        InvalidRequestError, match=r"num_embedding_blocks\) on cuda:0, 1 MiB: .*OUT_OF_MEMORY"
    ) as caught:
        reserve_embeddings(layout(), (1 << 20) // layout().piece_size_bytes + 1, GPU)
    assert caught.value.field == "device"


@pytest.mark.gpu
def test_what_is_written_is_there_for_streams_that_do_not_wait_for_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = layout(hidden_size=4096)
    memory = reserve_embeddings(shape, 8, GPU)
    assert isinstance(memory.memory, DeviceMemory)
    view, driver = EmbeddingPoolView(memory), memory.memory.driver
    rows = torch.randn(32, 4096, device=GPU)
    expected = rows.cpu().numpy().tobytes()
    index = view._index

    def index_late(slots: Slots) -> torch.Tensor:
        made = index(slots)  # it waits for the device
        torch.cuda._sleep(500_000_000)  # cycles; what is issued now comes after them
        return made

    monkeypatch.setattr(view, "_index", index_late)
    view.write(range(8), rows)
    assert _copied_beside(driver, memory.memory) == expected
    memory.memory.close()


def _copied_beside(driver: Driver, memory: DeviceMemory) -> bytes:
    """The pool's bytes, as transfers copy them."""
    driver.bind(memory.device)
    stream = driver.create_stream()
    address = driver.allocate_host(memory.size_bytes, is_write_combined=False)
    driver.copy_to_host(address, memory.address, memory.size_bytes, stream)
    driver.synchronize(stream)
    copied = ctypes.string_at(address, memory.size_bytes)
    driver.free_host(address)
    driver.destroy_stream(stream)
    return copied
