"""What one process finds out about GPUs for ``quartet doctor gpu``, which starts it: CUDA may hang it or end it.

    python -m cli.doctor.gpu_probe survey     # which GPUs there are, and which reach which
    python -m cli.doctor.gpu_probe triton     # compiles the kernel that pulls blocks, and runs it
    python -m cli.doctor.gpu_probe host       # copies between the GPU and three kinds of the host's memory
    python -m cli.doctor.gpu_probe lend SEED  # lends memory with bytes of this seed, until it is killed
    python -m cli.doctor.gpu_probe open HANDLE SEED NUM_PROGRAMS
                                              # opens memory that was lent, and copies it: whole, in pieces, and by so
                                              # many programs of the kernel (0: not)

All but ``survey`` use the first GPU that the process sees. What they find out they print as lines of ``MARK`` and a
JSON object. One with ``error`` says that the driver or Triton refused something, and one with ``at`` what the process
begins to do, which is told if the process is late or dies.
"""

from __future__ import annotations

import ctypes
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from quartet.transfer.base import PoolMemory
from quartet.transfer.cuda.driver import CudaError
from quartet.transfer.cuda.kernel_copies import KernelImage, table_of
from quartet.transfer.cuda.survey import SurveyDriver, cuda_survey_driver
from quartet.transfer.cuda.threads import COPIES_A_CALL
from quartet.transfer.runs import CopyRun, as_runs

#: What each line of a probe's findings begins with; libraries print lines of their own.
MARK = "QUARTET-GPU "

#: Kinds of the host's memory.
PINNED, WRITE_COMBINED, SHARED = "pinned", "write-combined", "memfd"

Finding: TypeAlias = dict[str, Any]
Report: TypeAlias = Callable[[Finding], None]
CompileHere: TypeAlias = Callable[[int], KernelImage]
WantedKernel: TypeAlias = Callable[[SurveyDriver], "AbstractContextManager[_Kernel | None]"]

_ANY_ARCHITECTURE = 90
_FEW_BYTES = 1 << 20


@dataclass(frozen=True)
class Amount:
    """How much is copied: ``size_bytes`` once, which is compared, then ``num_copies`` times, which is timed.

    Attributes:
        piece_sizes: of pieces, in bytes: a small model's blocks and those of one of 8 billion weights.
    """

    size_bytes: int = 64 << 20
    num_copies: int = 32
    piece_sizes: tuple[int, ...] = (64 << 10, 2304 << 10)


def survey(driver: SurveyDriver) -> Finding:
    """All GPUs that this process sees. ``peers[a][b]``: ``a`` reaches the memory of ``b``."""
    numbers = range(driver.num_devices())
    return {
        "cuda": ".".join(map(str, driver.cuda_version())),
        "names": [driver.name(number) for number in numbers],
        "size_bytes": [driver.total_size_bytes(number) for number in numbers],
        "peers": [[a == b or driver.can_reach(a, b) for b in numbers] for a in numbers],
    }


def try_host(driver: SurveyDriver, amount: Amount) -> Iterator[Finding]:
    """Copy to and from each kind of the host's memory: GB/s each way, or the error."""
    driver.bind(0)
    with _device_memory(driver, amount.size_bytes) as device, _lane(driver) as lane:
        for kind, reserve in _HOST_MEMORY.items():
            yield _at(f"copying between the GPU and {kind} memory")
            try:
                with reserve(driver, amount.size_bytes) as host:
                    yield {"kind": kind, **_try_copies(lane, device, host, amount)}
            except (CudaError, OSError) as error:
                yield {"kind": kind, "error": str(error)}


@contextmanager
def lent(driver: SurveyDriver, seed: int, amount: Amount) -> Iterator[bytes]:
    """The handle of memory that holds the bytes of ``seed``."""
    driver.bind(0)
    with _device_memory(driver, amount.size_bytes) as address:
        with _lane(driver) as lane:
            lane.write(address, _bytes_of(seed, amount))
        yield driver.export(address)


def open_lent(
    driver: SurveyDriver, handle: bytes, seed: int, wanted_kernel: WantedKernel, amount: Amount
) -> Iterator[Finding]:
    """Copy what another process lends: whether its bytes come, and GB/s; whole, then in pieces of each size."""
    yield _at("opening the memory that was lent")
    driver.bind(0)
    there = _bytes_of(seed, amount)
    with _device_memory(driver, amount.size_bytes) as target, _lane(driver) as lane:
        lane.write(target, bytes(amount.size_bytes))
        source = driver.open(handle)
        try:
            yield _at("copying it whole")
            copy = lambda: driver.copy(target, source, amount.size_bytes, lane.stream)  # noqa: E731
            lane.run(copy)
            is_right = lane.read(target, amount.size_bytes) == there
            yield {"is_right": is_right, "gb_s": lane.rate(copy, amount.size_bytes, amount.num_copies)}
            yield _at("compiling and loading the kernel")
            with wanted_kernel(driver) as kernel:
                for size_bytes in amount.piece_sizes:
                    yield from _try_pieces(lane, _Piecewise(source, target, size_bytes, there), kernel, amount)
        finally:
            driver.close(source)


def try_triton(get_driver: Callable[[], SurveyDriver], compile: CompileHere) -> Iterator[Finding]:
    """Compile the kernel, for the GPU here or else for sm_90, and copy some words with it if there is a GPU."""
    yield _at("importing Triton and compiling the kernel")
    try:
        driver = get_driver()
        driver.bind(0)
        architecture = driver.architecture(0)
    except CudaError as error:
        yield {"version": compile(_ANY_ARCHITECTURE).version, "architecture": _ANY_ARCHITECTURE, "no_gpu": str(error)}
        return
    begin = time.perf_counter()
    image = compile(architecture)
    yield {"version": image.version, "architecture": architecture, "compile_s": time.perf_counter() - begin}
    yield _at("running the kernel")
    amount = Amount(_FEW_BYTES, 1, (_FEW_BYTES // 8,))
    there = random.randbytes(amount.size_bytes)
    with _device_memory(driver, 2 * amount.size_bytes) as source, _lane(driver) as lane:
        lane.write(source, there)
        with _kernel(driver, image, num_programs=4) as kernel:
            pieces = _Piecewise(source, source + amount.size_bytes, amount.piece_sizes[0], there)
            *_, found = _try_pieces(lane, pieces, kernel, amount)
            yield {"is_right": found["is_right"]}


def main(
    arguments: Sequence[str],
    get_driver: Callable[[], SurveyDriver] = cuda_survey_driver,
    *,
    report: Report | None = None,
    wait: Callable[[], object] = signal.pause,
    amount: Amount | None = None,
    compile: CompileHere | None = None,
) -> None:
    """Run the probe that ``arguments`` name; ``wait`` returns when ``lend`` is to end."""
    report = report or _print
    try:
        for finding in _findings(arguments, get_driver, wait, amount or Amount(), compile or _compile):
            report(finding)
    except CudaError as error:
        report({"error": str(error), "name": error.name})
    except Exception as error:  # noqa: BLE001 - Triton raises any; the process ends here
        report({"error": f"{type(error).__name__}: {error}", "name": ""})


def _findings(
    arguments: Sequence[str],
    get_driver: Callable[[], SurveyDriver],
    wait: Callable[[], object],
    amount: Amount,
    compile: CompileHere,
) -> Iterator[Finding]:
    if arguments[:1] != ["triton"]:
        yield _at("initialising the driver")
    match arguments:
        case ["survey"]:
            yield survey(get_driver())
        case ["triton"]:
            yield from try_triton(get_driver, compile)
        case ["host"]:
            yield from try_host(get_driver(), amount)
        case ["lend", seed]:
            with lent(get_driver(), int(seed), amount) as handle:
                yield {"handle": handle.hex()}
                wait()
        case ["open", handle, seed, num_programs]:
            wanted = partial(_wanted_kernel, num_programs=int(num_programs), compile=compile)
            yield from open_lent(get_driver(), bytes.fromhex(handle), int(seed), wanted, amount)
        case _:
            raise SystemExit(__doc__)


def _at(step: str) -> Finding:
    return {"at": step}


def _print(finding: Finding) -> None:
    print(MARK + json.dumps(finding), flush=True)


def _bytes_of(seed: int, amount: Amount) -> bytes:
    return random.Random(seed).randbytes(amount.size_bytes)


@dataclass(frozen=True)
class _Lane:
    """A stream with its event."""

    driver: SurveyDriver
    stream: int
    event: int

    def run(self, copy: Callable[[], None], num_times: int = 1) -> None:
        """Have the stream copy, and wait until it has."""
        for _ in range(num_times):
            copy()
        self.driver.record(self.event, self.stream)
        self.driver.wait(self.event)

    def rate(self, copy: Callable[[], None], size_bytes: int, num_copies: int) -> float:
        """GB/s of ``copy``, which copies so many bytes, many times."""
        self.run(copy)
        begin = time.perf_counter()
        self.run(copy, num_copies)
        return size_bytes * num_copies / max(time.perf_counter() - begin, 1e-9) / 1e9

    def write(self, address: int, data: bytes) -> None:
        """Put ``data`` into the GPU's memory."""
        host = ctypes.create_string_buffer(data, len(data))
        self.run(lambda: self.driver.copy_to_device(address, ctypes.addressof(host), len(data), self.stream))

    def read(self, address: int, size_bytes: int) -> bytes:
        """What is in the GPU's memory."""
        host = ctypes.create_string_buffer(size_bytes)
        self.run(lambda: self.driver.copy_to_host(ctypes.addressof(host), address, size_bytes, self.stream))
        return host.raw


def _try_copies(lane: _Lane, device: int, host: int, amount: Amount) -> Finding:
    driver, size = lane.driver, amount.size_bytes
    from_host = lambda: driver.copy_to_device(device, host, size, lane.stream)  # noqa: E731
    to_host = lambda: driver.copy_to_host(host, device, size, lane.stream)  # noqa: E731
    written = random.randbytes(size)
    ctypes.memmove(host, written, size)
    lane.run(from_host)
    ctypes.memset(host, 0, size)
    lane.run(to_host)
    is_right = ctypes.string_at(host, size) == written
    rates = [lane.rate(copy, size, amount.num_copies) for copy in (to_host, from_host)]
    return {"is_right": is_right, "to_host": rates[0], "from_host": rates[1]}


@dataclass(frozen=True)
class _Kernel:
    """The kernel that pulls, loaded, and how many programs of it copy."""

    handle: int
    num_threads: int
    num_programs: int


@dataclass(frozen=True)
class _Piecewise:
    """A copy of memory at ``source``, which holds ``data``, piece by piece; the last one goes first."""

    source: int
    target: int
    piece_size_bytes: int
    data: bytes

    @property
    def runs(self) -> list[CopyRun]:
        size = self.piece_size_bytes
        num_pieces = len(self.data) // size
        return [CopyRun(number * size, (num_pieces - 1 - number) * size, size) for number in range(num_pieces)]

    @property
    def expected(self) -> bytes:
        """What is at ``target`` then."""
        data = memoryview(self.data)  # whose slices copy nothing
        return b"".join(data[run.source_offset : run.source_offset + run.size_bytes] for run in reversed(self.runs))


def _try_pieces(lane: _Lane, pieces: _Piecewise, kernel: _Kernel | None, amount: Amount) -> Iterator[Finding]:
    """Steps, and last GB/s by the copy engine, a copy for each piece, and by the kernel, whose bytes are compared."""
    driver, runs, size_bytes = lane.driver, as_runs(pieces.runs), len(pieces.expected)
    copies = np.add(runs, (pieces.source, pieces.target, 0))

    def by_copies() -> None:
        for first in range(0, len(copies), COPIES_A_CALL):
            driver.copy_many(copies[first : first + COPIES_A_CALL], lane.stream)

    yield _at(f"copying pieces of {pieces.piece_size_bytes} bytes by the copy engine")
    found: Finding = {"piece": pieces.piece_size_bytes, "copies": lane.rate(by_copies, size_bytes, amount.num_copies)}
    if kernel is None:
        yield found
        return
    yield _at(f"copying pieces of {pieces.piece_size_bytes} bytes by the kernel")
    table = table_of(runs)
    with _device_memory(driver, table.nbytes) as address:
        lane.write(address, table.tobytes())
        arguments = (pieces.source, pieces.target, address, len(table))
        shape = (kernel.handle, kernel.num_programs, kernel.num_threads)
        by_kernel = lambda: driver.launch(*shape, arguments, lane.stream)  # noqa: E731
        lane.write(pieces.target, bytes(size_bytes))
        lane.run(by_kernel)
        is_right = lane.read(pieces.target, size_bytes) == pieces.expected
        yield {**found, "is_right": is_right, "kernel": lane.rate(by_kernel, size_bytes, amount.num_copies)}


def _compile(architecture: int) -> KernelImage:
    from quartet.transfer.cuda.pull_kernel import compile_pull  # imports Triton

    return KernelImage.of(compile_pull(architecture))


@contextmanager
def _kernel(driver: SurveyDriver, image: KernelImage, num_programs: int) -> Iterator[_Kernel]:
    handle = driver.load(image.code, image.name)
    try:
        yield _Kernel(handle, image.num_threads, num_programs)
    finally:
        driver.unload(handle)


@contextmanager
def _wanted_kernel(driver: SurveyDriver, num_programs: int, compile: CompileHere) -> Iterator[_Kernel | None]:
    if not num_programs:
        yield None
        return
    driver.bind(0)
    with _kernel(driver, compile(driver.architecture(0)), num_programs) as kernel:
        yield kernel


@contextmanager
def _lane(driver: SurveyDriver) -> Iterator[_Lane]:
    lane = _Lane(driver, driver.create_stream(), driver.create_event())
    try:
        yield lane
    finally:
        driver.destroy_event(lane.event)
        driver.destroy_stream(lane.stream)


@contextmanager
def _device_memory(driver: SurveyDriver, size_bytes: int) -> Iterator[int]:
    address = driver.allocate(size_bytes)
    try:
        yield address
    finally:
        driver.free(address)


@contextmanager
def _allocated(driver: SurveyDriver, size_bytes: int, *, is_write_combined: bool) -> Iterator[int]:
    address = driver.allocate_host(size_bytes, is_write_combined=is_write_combined)
    try:
        yield address
    finally:
        driver.free_host(address)


@contextmanager
def _registered(driver: SurveyDriver, size_bytes: int) -> Iterator[int]:
    """What a worker on a GPU stages blocks in, which others map."""
    pool = PoolMemory(1, size_bytes)
    try:
        address = ctypes.addressof(ctypes.c_char.from_buffer(pool.view))
        driver.pin(address, size_bytes)
        try:
            yield address
        finally:
            driver.unpin(address)
    finally:
        pool.close()


_HOST_MEMORY: dict[str, Callable[[SurveyDriver, int], AbstractContextManager[int]]] = {
    PINNED: partial(_allocated, is_write_combined=False),
    WRITE_COMBINED: partial(_allocated, is_write_combined=True),
    SHARED: _registered,
}


if __name__ == "__main__":
    main(sys.argv[1:])
