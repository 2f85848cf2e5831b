"""The kernel that pulls: its tables, its bytes in Triton's interpreter, its compilation, and when it is used."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import mmap
import random
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.errors import TransferError
from quartet.transfer.cuda import kernel_copies
from quartet.transfer.cuda.kernel_copies import (
    LAUNCH_SIZE_BYTES,
    NUM_TABLE_PARTS,
    PART_SIZE_BYTES,
    SMALL_RUN_SIZE_BYTES,
    KernelImage,
    NoKernelError,
    compile_kernel,
    cut,
    table_of,
)
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.cuda.reader import CudaReader
from quartet.transfer.life_line import PoolOwner
from quartet.transfer.runs import CopyRun, as_runs
from tests.transfer.cuda_workers import GpuSource, gpu_source
from tests.transfer.fake_cuda import NUM_THREADS, FakeDriver, FakeHost
from tests.transfer.workers import EPOCH, LAYOUT

OWNER = PoolOwner("source", EPOCH)
IMAGE = KernelImage("3.9.0", "pull", NUM_THREADS, b"code")
LARGE = SMALL_RUN_SIZE_BYTES
POOL_SIZE_BYTES = 4 * LAUNCH_SIZE_BYTES
POOL_BLOCKS = POOL_SIZE_BYTES // LAYOUT.piece_size_bytes


# The tables.


@st.composite
def copy_runs(draw: st.DrawFn) -> list[CopyRun]:
    sizes = draw(st.lists(st.integers(1, 3 * PART_SIZE_BYTES // 16), max_size=8))
    offsets = [draw(st.tuples(*2 * [st.integers(0, 1 << 38)])) for _ in sizes]
    return [CopyRun(16 * a, 16 * b, 16 * size) for (a, b), size in zip(offsets, sizes, strict=True)]


@given(copy_runs())
@settings(max_examples=50, deadline=None)
def test_the_parts_of_runs_are_these_runs(runs: list[CopyRun]) -> None:
    parts = [[int(number) * 16 for number in part] for part in table_of(as_runs(runs))]
    found: list[CopyRun] = []
    for begin, end, size in parts:
        assert 0 < size <= PART_SIZE_BYTES
        last = found[-1] if found else None
        # A part that is not a run's last one is whole: the next one continues it.
        if last is not None and last.size_bytes != runs[len(found) - 1].size_bytes:
            assert (begin, end) == (last.source_offset + last.size_bytes, last.destination_offset + last.size_bytes)
            found[-1] = CopyRun(last.source_offset, last.destination_offset, last.size_bytes + size)
        else:
            found.append(CopyRun(begin, end, size))
    assert found == runs


def test_long_runs_are_cut_into_what_a_launch_copies() -> None:
    size = LAUNCH_SIZE_BYTES
    whole = CopyRun(7, 9, 100)
    runs = cut(as_runs([whole, CopyRun(size, 0, size), CopyRun(0, 5 * size, 2 * size + 16)]))
    rest = [CopyRun(0, 5 * size, size), CopyRun(size, 6 * size, size), CopyRun(2 * size, 7 * size, 16)]
    assert runs.tolist() == as_runs([whole, CopyRun(size, 0, size), *rest]).tolist()
    assert [len(table_of(runs[number : number + 1])) for number in range(1, 5)] == [NUM_TABLE_PARTS] * 3 + [1]


# The kernel.


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    """``pull_kernel``, run by Triton's interpreter."""
    triton_version = _triton_version()
    pytest.importorskip("torch", reason="Triton's interpreter takes PyTorch's tensors")
    if triton_version < (3, 9) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of this Triton works with NumPy below 2.4 only")
    file = Path(kernel_copies.__file__).with_name("pull_kernel.py")
    spec = importlib.util.spec_from_file_location("interpreted_pull_kernel", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    return module


def _triton_version() -> tuple[int, int]:
    pytest.importorskip("triton", reason="Triton is not installed")
    major, minor = version("triton").split(".")[:2]
    return int(major), int(minor)


def pull(
    module: ModuleType, source: object, target: object, runs: Sequence[CopyRun], num_programs: int, chunk: int
) -> None:
    import torch

    lines = torch.from_numpy(table_of(as_runs(runs)))
    module.pull[(num_programs,)](source, target, lines, len(lines), CHUNK=chunk)


@pytest.mark.parametrize("num_programs", [1, 3, 64])
@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([CopyRun(0, 0, 16)], id="one word"),
        pytest.param([CopyRun(0, 2048, 256), CopyRun(256, 64, 256), CopyRun(512, 1024, 256)], id="neighbours there"),
        pytest.param([CopyRun(4000, 16, 48), CopyRun(16, 4000, 80), CopyRun(160, 1008, 1040)], id="scattered, odd"),
        pytest.param([CopyRun(64, 3072, 1024 + 16)], id="longer than a chunk"),
    ],
)
def test_runs_go_where_they_belong_and_nowhere_else(
    interpreted: ModuleType, runs: Sequence[CopyRun], num_programs: int
) -> None:
    import torch

    there = random.Random(7).randbytes(8192)
    source = torch.frombuffer(bytearray(there), dtype=torch.int64)
    target = torch.zeros(8192 // 8, dtype=torch.int64)
    pull(interpreted, source, target, runs, num_programs, chunk=128)
    expected = bytearray(8192)
    for run in runs:
        data = there[run.source_offset : run.source_offset + run.size_bytes]
        expected[run.destination_offset : run.destination_offset + run.size_bytes] = data
    assert target.numpy().tobytes() == bytes(expected)


def test_runs_lie_beyond_what_32_bits_reach(interpreted: ModuleType, tmp_path: Path) -> None:
    """In elements, words and bytes: in a file of 80 GiB, of which only what is touched takes room."""
    import torch

    size = 80 << 30
    far = [(1 << 31) - 64, (1 << 32) + 32, (1 << 35) + 48, size - 48]
    with (tmp_path / "sparse").open("w+b") as file:
        file.truncate(size)
        memory = mmap.mmap(file.fileno(), size)
    with memory:
        runs = []
        for number, offset in enumerate(far):
            memory[offset : offset + 48] = bytes([number + 1]) * 48
            runs.append(CopyRun(offset, far[(number + 1) % len(far)] - 4096, 48))
        # One word of it: the kernel computes addresses, and the interpreter copies what it is given.
        begin = torch.frombuffer(memory, dtype=torch.int64, count=2)
        pull(interpreted, begin, begin, runs, 2, chunk=128)
        for number, run in enumerate(runs):
            there = memory[run.destination_offset - 16 : run.destination_offset + 64]
            assert there == bytes(16) + bytes([number + 1]) * 48 + bytes(16)
        del begin


def test_it_compiles_for_a_hopper_without_one_and_moves_16_bytes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _triton_version()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from quartet.transfer.cuda.pull_kernel import compiled_pull

    ptx = compiled_pull(90).asm["ptx"]
    assert "ld.global.v2.b64" in ptx and "st.global.v2.b64" in ptx
    # Ours, and pointers to scratch memory: what a launch gives.
    assert ptx.partition(".entry")[2].partition(")")[0].count(".param .u64") in range(4, 4 + 4 + 1)


async def test_a_process_of_its_own_compiles_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _triton_version()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    image = await compile_kernel(90)
    assert (image.name, image.num_threads) == ("pull", 256)
    assert image.code.startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ImportError('no libtriton here')", "ended with 1: ImportError: no libtriton here"),
        ("import os; os.abort()", "ended with -6"),
        ("import time; time.sleep(600)", r"more than 0\.5 s"),
    ],
)
async def test_a_triton_that_does_not_work_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    (tmp_path / "triton.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if "sleep" in code:
        monkeypatch.setattr(kernel_copies, "_COMPILE_TIMEOUT_S", 0.5)
    with pytest.raises(NoKernelError, match=message):
        await compile_kernel(90)


# When it is used.


@dataclass
class Here:
    """A reader into a pool on a fake GPU, with a pool of another process opened."""

    source: GpuSource
    driver: FakeDriver
    memory: DeviceMemory
    reader: CudaReader
    is_busy: bool = False
    on_look: Callable[[], None] = lambda: None
    num_looks: int = field(default=0)

    def looks_busy(self) -> bool:
        self.num_looks += 1
        self.on_look()
        return self.is_busy

    def runs(self, num_runs: int, size_bytes: int, distance: int = 0) -> list[CopyRun]:
        """Runs that are no neighbours; the first and the last words of each are its own."""
        distance = distance or 2 * size_bytes
        found = [
            CopyRun(number * distance, (num_runs - 1 - number) * distance, size_bytes) for number in range(num_runs)
        ]
        for number, run in enumerate(found):
            base = self.source.memory.address + run.source_offset
            for at in (0, size_bytes - 8):
                self.source.driver.write(base + at, struct.pack("<q", 1 + number))
        return found

    async def copy(self, runs: Sequence[CopyRun]) -> None:
        await self.reader.copy(OWNER, as_runs(runs))

    def arrived(self, runs: Sequence[CopyRun]) -> bool:
        return all(
            struct.unpack("<q", self.driver.read(self.memory.address + run.destination_offset + at, 8)) == (1 + number,)
            for number, run in enumerate(runs)
            for at in (0, run.size_bytes - 8)
        )


async def compiled(architecture: int) -> KernelImage:
    assert architecture == 90
    return IMAGE


@asynccontextmanager
async def reading(
    host: FakeHost, *, device: int = 1, compile: kernel_copies.Compile = compiled, is_prepared: bool = True
) -> AsyncIterator[Here]:
    driver = FakeDriver(host, (device,))
    driver.runs_kernels = True
    memory = DeviceMemory(driver, 0, POOL_BLOCKS, LAYOUT.piece_size_bytes)
    async with gpu_source(host, num_blocks=POOL_BLOCKS) as source:
        reader = CudaReader(memory, lambda: here.looks_busy(), compile)
        here = Here(source, driver, memory, reader)
        try:
            await reader.open(OWNER, source.cuda.lent, timeout_s=10)
            preparation = reader._peers._kernel._preparation
            assert preparation is not None
            if is_prepared:
                await preparation
            yield here
        finally:
            host.resume()  # else nothing ends what a failed test leaves under way
            await reader.close()
            await reader.close()
    memory.close()
    assert (driver.num_kernels, driver.num_streams, driver.num_events, driver.num_pinned) == (0, 0, 0, 0)
    assert (host.used_bytes, host.faults) == (0, [])
    assert "MainThread" not in driver.threads_of("architecture", "load", "launch", "copy", "wait")


@pytest.mark.parametrize(
    ("size_bytes", "is_busy", "device", "launches"),
    [
        (4096, False, 1, [32]),
        (LARGE - 16, False, 1, [32]),
        (LARGE, False, 1, []),
        (LARGE, False, 0, [256]),  # on the GPU that the source's pool is on, too
        (4096, True, 1, [16]),
        (LARGE - 16, True, 1, [16]),
        (LARGE, True, 1, []),
        (4096 + 8, False, 1, []),  # no whole words
    ],
)
async def test_the_kernel_copies_within_a_gpu_while_the_engine_is_idle_and_small_runs_at_any_time(
    size_bytes: int, is_busy: bool, device: int, launches: list[int]
) -> None:
    async with reading(FakeHost(2), device=device) as here:
        here.is_busy = is_busy
        runs = here.runs(5, size_bytes, distance=2 * LARGE)
        await here.copy(runs)
        assert here.arrived(runs)
        assert here.driver.launches == launches
        assert here.driver.count("copy") == (0 if launches else 5)


async def test_the_choice_is_made_anew_while_a_copy_goes_on() -> None:
    async with reading(FakeHost(2), device=0) as here:
        num_a_launch = LAUNCH_SIZE_BYTES // LARGE
        runs = here.runs(2 * num_a_launch, LARGE, distance=LARGE + 16)

        def begin_to_step() -> None:
            here.is_busy = here.num_looks > 1

        here.on_look = begin_to_step
        await here.copy(runs)
        assert here.arrived(runs)
        assert len(here.driver.launches) == 1
        assert here.driver.count("copy") == num_a_launch


async def test_tables_are_not_overwritten_while_the_gpu_reads_them() -> None:
    host = FakeHost(2)
    async with reading(host) as here:
        runs = here.runs(3 * NUM_TABLE_PARTS + 5, 16)
        host.pause()
        copying = asyncio.create_task(here.copy(runs))
        await _until(lambda: here.driver.count("wait") == 1)  # for the first of two tables
        assert len(here.driver.launches) == 2
        host.resume()
        await copying
        assert here.arrived(runs)
        assert len(here.driver.launches) == 4


@pytest.mark.parametrize(("num_runs", "size_bytes"), [(6 * NUM_TABLE_PARTS, 16), (1, POOL_SIZE_BYTES)])
async def test_a_cancelled_copy_launches_no_more_and_ends_when_nothing_writes(num_runs: int, size_bytes: int) -> None:
    host = FakeHost(2)
    async with reading(host, device=0) as here:
        runs = here.runs(num_runs, size_bytes)
        host.pause()
        copying = asyncio.create_task(here.copy(runs))
        await _until(lambda: here.driver.count("wait") == 1)
        copying.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not copying.done()
        host.resume()
        with pytest.raises(asyncio.CancelledError):
            await copying
        # The one that waited for its table was begun before.
        num_launches = len(here.driver.launches)
        assert num_launches <= 3
        assert host.num_copies == num_launches * (1 + NUM_TABLE_PARTS)


async def test_until_the_kernel_is_compiled_the_copy_engine_pulls() -> None:
    may_compile = asyncio.Event()

    async def slowly(_architecture: int) -> KernelImage:
        await may_compile.wait()
        return IMAGE

    async with reading(FakeHost(2), compile=slowly, is_prepared=False) as here:
        runs = here.runs(3, 4096)
        await here.copy(runs)
        assert (here.driver.launches, here.driver.count("copy")) == ([], 3)
        may_compile.set()
        await here.reader._peers._kernel._preparation  # type: ignore[misc]
        await here.copy(runs)
        assert (here.driver.launches, here.driver.count("copy")) == ([32], 3)


async def test_a_reader_is_closed_while_the_kernel_is_compiled() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def never_ends(_architecture: int) -> KernelImage:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    async with reading(FakeHost(2), compile=never_ends, is_prepared=False) as here:
        await began.wait()
    assert ended.is_set()
    assert here.driver.count("load") == 0


@pytest.mark.parametrize("failing", ["compile", "architecture", "load"])
async def test_where_the_kernel_can_not_be_had_the_copy_engine_pulls_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    async def compile(architecture: int) -> KernelImage:
        if failing == "compile":
            raise NoKernelError("no Triton here")
        return await compiled(architecture)

    host = FakeHost(2)
    driver_init = FakeDriver.__init__

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, logger=kernel_copies.__name__):

        def init(self: FakeDriver, *arguments: object) -> None:
            driver_init(self, *arguments)  # type: ignore[arg-type]
            if failing != "compile":
                self.failing[failing] = "CUDA_ERROR_NOT_SUPPORTED"

        patch.setattr(FakeDriver, "__init__", init)
        async with reading(host, compile=compile) as here:
            for _ in range(3):
                runs = here.runs(5, 4096)
                await here.copy(runs)
                assert here.arrived(runs)
            assert here.driver.launches == []
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "the copy engine pulls blocks, no kernel does, which is faster for small ones"
    ]


@pytest.mark.parametrize("call", ["launch", "write_combined", "allocate", "copy_to_device"])
async def test_a_launch_that_fails_leaves_the_rest_to_the_copy_engine(
    caplog: pytest.LogCaptureFixture, call: str
) -> None:
    with caplog.at_level(logging.WARNING, logger=kernel_copies.__name__):
        async with reading(FakeHost(2)) as here:
            here.driver.failing[call] = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
            if call == "write_combined":  # the best kind of pinned memory, which this driver had a moment ago
                here.driver.failing["allocate_host"] = "CUDA_ERROR_OUT_OF_MEMORY"
            runs = here.runs(3, 4096)
            for _ in range(2):
                await here.copy(runs)
            assert here.arrived(runs)
            assert (here.driver.launches, here.driver.count("copy")) == ([], 6)
    assert len(caplog.records) == 1


async def test_a_run_outside_of_the_pools_is_refused_before_it_is_launched() -> None:
    async with reading(FakeHost(2)) as here:
        for run in (CopyRun(-16, 0, 16), CopyRun(0, here.memory.size_bytes, 16), CopyRun(1 << 62, 0, 16)):
            with pytest.raises(TransferError, match="outside"):
                await here.copy([run])
        assert here.driver.launches == []


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  # threads change it
            await asyncio.sleep(0.001)
