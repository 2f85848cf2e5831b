"""Copies out of a peer's pool by a kernel (``pull_kernel``) in place of the GPU's copy engine.

Between two H100s the copy engine moves runs of 2.25 MiB at 374 GB/s and those of 64 KiB at 50 to 70, since each takes a
microsecond to begin; the kernel moves both at 345, copies thousands in one launch, and slows steps that run beside it.
Within one GPU the kernel moves both at 1,200 GB/s, the copy engine 490 and 16. So the kernel copies small runs at any
time, and within a GPU all runs while the engine has nothing to do (``prefers_kernel``).

A process of its own compiles the kernel once the first pool is opened; until it is loaded, and where it can't be, the
copy engine does all. A launch copies at most 256 MiB, and two are under way at a time, so that a copy that is cancelled
ends soon and the choice is made anew while a long one goes on.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quartet.errors import TransferError
from quartet.supervision import report_failure
from quartet.transfer.cuda.driver import CudaError, Driver
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.cuda.pinned import HostWindow
from quartet.transfer.cuda.threads import CLOSE_TIMEOUT_S, CopyThreads, Lane
from quartet.transfer.runs import Runs

logger = logging.getLogger(__name__)

#: As in ``pull_kernel``, which this process does not import.
_MARK = b"QUARTET-KERNEL "
_PROGRAM = Path(__file__).with_name("pull_kernel.py")
_COMPILE_TIMEOUT_S = 120.0

#: What the kernel moves at a time; offsets and sizes are multiples of it.
WORD_SIZE_BYTES = 16

#: A run is cut into parts of this size, which the programs of a launch share.
PART_SIZE_BYTES = 64 << 10

#: Parts of one launch, at most: 256 MiB take 0.7 ms between two H200s.
NUM_TABLE_PARTS = 4096
LAUNCH_SIZE_BYTES = NUM_TABLE_PARTS * PART_SIZE_BYTES

#: NVLink moves 370 KB while the copy engine begins a copy: it waits for smaller runs.
SMALL_RUN_SIZE_BYTES = 512 << 10

#: Measured on H200s: 32 programs fill NVLink; 16 slow a step that runs beside them least for each byte that they move.
_NUM_PROGRAMS_BETWEEN_GPUS = 32
_NUM_PROGRAMS_WITHIN_A_GPU = 256
_NUM_PROGRAMS_BESIDE_STEPS = 16

_TABLE_SIZE_BYTES = NUM_TABLE_PARTS * 3 * 8


class NoKernelError(Exception):
    """The kernel can't be had here; the message says why."""


@dataclass(frozen=True)
class KernelImage:
    """A compiled kernel.

    Attributes:
        version: of Triton.
        name: of the function.
        num_threads: of each program.
        code: for the GPU that it was compiled for.
    """

    version: str
    name: str
    num_threads: int
    code: bytes = field(repr=False)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> KernelImage:
        """What ``pull_kernel.compile_pull`` returned."""
        return cls(found["version"], found["name"], found["num_threads"], base64.b64decode(found["code"]))


#: As ``compile_kernel``.
Compile: TypeAlias = Callable[[int], Awaitable[KernelImage]]


def prefers_kernel(mean_size_bytes: float, *, is_same_gpu: bool, is_busy: bool) -> bool:
    """Whether the kernel is better than the copy engine for runs of this size, while the engine steps or not."""
    return mean_size_bytes < SMALL_RUN_SIZE_BYTES or (is_same_gpu and not is_busy)


def num_programs(*, is_same_gpu: bool, is_busy: bool) -> int:
    """How many programs of the kernel copy out of a pool on the same GPU or another one."""
    if is_busy:
        return _NUM_PROGRAMS_BESIDE_STEPS
    return _NUM_PROGRAMS_WITHIN_A_GPU if is_same_gpu else _NUM_PROGRAMS_BETWEEN_GPUS


async def compile_kernel(architecture: int) -> KernelImage:
    """Compile in a process of its own, for GPUs of this architecture, such as 90 for sm_90.

    Raises:
        NoKernelError: Triton is not installed, or does not work here.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", str(_PROGRAM), str(architecture)),  # -P: files beside it are no modules of their own
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_COMPILE_TIMEOUT_S):
            output, errors = await process.communicate()
    except TimeoutError:
        raise NoKernelError(f"its compilation takes more than {_COMPILE_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return _image(process.returncode, output, errors)


def cut(runs: Runs, max_size_bytes: int = LAUNCH_SIZE_BYTES) -> Runs:
    """``runs``, those that are longer, by default than one launch copies, in parts of that size and the rest."""
    if runs[:, 2].max(initial=0) <= max_size_bytes:
        return runs  # as blocks of KV mostly are
    num_parts = -(-runs[:, 2] // max_size_bytes)
    parts = np.repeat(runs, num_parts, axis=0)
    # How many bytes of its run lie before each part.
    before = (np.arange(len(parts)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)) * max_size_bytes
    parts[:, :2] += before[:, np.newaxis]
    parts[:, 2] = np.minimum(parts[:, 2] - before, max_size_bytes)
    return parts


def table_of(runs: Runs) -> npt.NDArray[np.int64]:
    """``runs`` as what the kernel reads: lines of where a part begins there and here, and its size, in words.

    Returns:
        ``[num_parts, 3]``.
    """
    return cut(runs, PART_SIZE_BYTES) // WORD_SIZE_BYTES


class PullKernel:
    """The kernel on the GPU of one pool. Lives on one event loop; ``begin`` is called on copy threads."""

    def __init__(self, memory: DeviceMemory, threads: CopyThreads, compile: Compile = compile_kernel) -> None:
        """Compile nothing yet; ``threads`` stay the caller's."""
        self._memory = memory
        self._threads = threads
        self._compile = compile
        self._preparation: asyncio.Task[None] | None = None
        self._loaded: _LoadedKernel | None = None
        self._is_given_up = False

    def prepare(self) -> None:
        """Have it compiled and loaded, some time; the first call does."""
        if self._preparation is None:
            self._preparation = asyncio.create_task(self._prepare(), name="prepare-pull-kernel")
            self._preparation.add_done_callback(report_failure)

    def begin(self, lane: Lane, source: int, runs: Runs, *, is_same_gpu: bool) -> KernelPull:
        """Copies of one fetch on ``lane``, from the pool at ``source``, into the local one; ``runs`` were ``cut``."""
        loaded = None if self._is_given_up else self._loaded
        return KernelPull(loaded, self._give_up, lane, (source, self._memory.address), runs, is_same_gpu)

    async def end_preparation(self) -> None:
        """Compile and load no more, before the threads are closed; a GPU that hangs keeps this for some seconds."""
        if self._preparation is not None:
            self._preparation.cancel()
            await asyncio.wait({self._preparation}, timeout=CLOSE_TIMEOUT_S)

    def unload(self) -> None:
        """Give it back; nothing is copied any more, and the GPU's context is bound."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.driver.unload(loaded.handle)

    async def _prepare(self) -> None:
        driver, found = self._memory.driver, list[int]()
        try:
            await self._threads.call(lambda: found.append(driver.architecture(self._memory.device)))
            image = await self._compile(found[0])
            await self._threads.call(partial(self._load, image))
        except (NoKernelError, CudaError, TransferError, OSError) as error:
            logger.warning("the copy engine pulls blocks, no kernel does, which is faster for small ones: %s", error)
        else:
            logger.info("a kernel pulls small blocks, and on one GPU all while the engine has no steps to take")

    def _load(self, image: KernelImage) -> None:
        driver = self._memory.driver
        self._loaded = _LoadedKernel(driver, driver.load(image.code, image.name), image.num_threads)

    def _give_up(self, error: CudaError) -> None:
        if not self._is_given_up:
            self._is_given_up = True
            logger.warning("the copy engine pulls blocks from now on, no kernel does: %s", error)


@dataclass(frozen=True)
class _LoadedKernel:
    driver: Driver
    handle: int
    num_threads: int


class KernelPull:
    """Copies of one fetch by the kernel, on one lane. Used on the lane's thread."""

    def __init__(
        self,
        kernel: _LoadedKernel | None,
        give_up: Callable[[CudaError], None],
        lane: Lane,
        addresses: tuple[int, int],
        runs: Runs,
        is_same_gpu: bool,
    ) -> None:
        """Made by ``PullKernel``. ``addresses``: of the pools, there and here; ``runs``: as ``cut`` leaves them."""
        self._kernel: _LoadedKernel | None = None
        self._give_up = give_up
        self._lane = lane
        self._addresses = addresses
        self._runs = runs
        self._is_same_gpu = is_same_gpu
        self._mean_size_bytes = int(runs[:, 2].sum()) / max(len(runs), 1)
        self._num_launches = 0
        may_be_better = prefers_kernel(self._mean_size_bytes, is_same_gpu=is_same_gpu, is_busy=False)
        if kernel is None or not may_be_better or not _are_in_words(runs):
            return
        self._kernel = kernel
        # How many parts the runs up to each one have, itself included.
        self._num_parts = np.cumsum(-(-runs[:, 2] // PART_SIZE_BYTES))

    def is_better(self, *, is_busy: bool) -> bool:
        """Whether the kernel, not the copy engine, should copy the next runs."""
        return self._kernel is not None and prefers_kernel(
            self._mean_size_bytes, is_same_gpu=self._is_same_gpu, is_busy=is_busy
        )

    def issue(self, first: int, *, is_busy: bool) -> int:
        """Have the lane's stream copy what one launch copies, from run ``first`` on; waits while two are under way.

        Returns:
            How many runs it copies; 0: it can't, and will not again.
        """
        assert self._kernel is not None, "it is better"
        num_runs = self._num_launch_runs(first)
        table = table_of(self._runs[first : first + num_runs])
        try:
            self._launch(self._kernel, table, num_programs(is_same_gpu=self._is_same_gpu, is_busy=is_busy))
        except CudaError as error:
            self._kernel = None
            self._give_up(error)
            return 0
        return num_runs

    def _num_launch_runs(self, first: int) -> int:
        """How many runs from ``first`` on fit into a table."""
        num_before = int(self._num_parts[first - 1]) if first else 0
        return int(np.searchsorted(self._num_parts, num_before + NUM_TABLE_PARTS, side="right")) - first

    def _launch(self, kernel: _LoadedKernel, table: npt.NDArray[np.int64], num_programs: int) -> None:
        driver, stream, window = kernel.driver, self._lane.stream, self._window(kernel.driver)
        window.data.view(np.int64)[: table.size] = table.reshape(-1)
        on_gpu = self._table(driver)
        driver.copy_to_device(on_gpu, window.address, table.nbytes, stream)  # after the launch before has read it
        arguments = (*self._addresses, on_gpu, len(table))
        driver.launch(kernel.handle, num_programs, kernel.num_threads, arguments, stream)
        driver.record(window.event, stream)
        self._num_launches += 1

    def _window(self, driver: Driver) -> HostWindow:
        windows, number = self._lane.windows, self._num_launches % 2
        if len(windows) <= number:
            windows.append(HostWindow.allocate(driver, _TABLE_SIZE_BYTES))
        elif self._num_launches >= 2:
            driver.wait(windows[number].event)  # of the launch before the last one
        return windows[number]

    def _table(self, driver: Driver) -> int:
        tables = self._lane.tables
        if not tables:
            tables.append(driver.allocate(_TABLE_SIZE_BYTES))
        return tables[0]


def _are_in_words(runs: Runs) -> bool:
    return int(np.bitwise_or.reduce(runs, axis=None)) % WORD_SIZE_BYTES == 0


def _image(exit_code: int | None, output: bytes, errors: bytes) -> KernelImage:
    for line in output.splitlines():
        if exit_code == 0 and line.startswith(_MARK):
            return KernelImage.of(json.loads(line.removeprefix(_MARK)))
    last = errors.strip().rpartition(b"\n")[2].decode("utf-8", "replace")
    raise NoKernelError(f"the process that compiles it ended with {exit_code}: {last}")
