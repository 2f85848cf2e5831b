"""What one process finds out about GPUs for ``quartet doctor gpu``, which starts it: CUDA may hang it or end it.

    python -m cli.doctor.gpu_probe survey              # which GPUs there are, and which reach which
    python -m cli.doctor.gpu_probe host                # copies between the GPU and three kinds of the host's memory
    python -m cli.doctor.gpu_probe lend SEED           # lends memory with bytes of this seed, until it is killed
    python -m cli.doctor.gpu_probe open HANDLE SEED    # opens memory that was lent, and copies it

All but ``survey`` use the first GPU that the process sees. What they find out they print as lines of ``MARK`` and a
JSON object. One with ``error`` says that the driver refused something.
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

from quartet.transfer.base import PoolMemory
from quartet.transfer.cuda.driver import CudaError
from quartet.transfer.cuda.survey import SurveyDriver, cuda_survey_driver

#: What each line of a probe's findings begins with; libraries print lines of their own.
MARK = "QUARTET-GPU "

#: Kinds of the host's memory.
PINNED, WRITE_COMBINED, SHARED = "pinned", "write-combined", "memfd"

Finding: TypeAlias = dict[str, Any]
Report: TypeAlias = Callable[[Finding], None]


@dataclass(frozen=True)
class Amount:
    """How much is copied: ``size_bytes`` once, which is compared, then ``num_copies`` times, which is timed."""

    size_bytes: int = 64 << 20
    num_copies: int = 32


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


def open_lent(driver: SurveyDriver, handle: bytes, seed: int, amount: Amount) -> Finding:
    """Copy what another process lends: whether its bytes come, and GB/s."""
    driver.bind(0)
    with _device_memory(driver, amount.size_bytes) as target, _lane(driver) as lane:
        lane.write(target, bytes(amount.size_bytes))
        source = driver.open(handle)
        try:
            copy = lambda: driver.copy(target, source, amount.size_bytes, lane.stream)  # noqa: E731
            lane.run(copy)
            is_right = lane.read(target, amount.size_bytes) == _bytes_of(seed, amount)
            return {"is_right": is_right, "gb_s": lane.rate(copy, amount)}
        finally:
            driver.close(source)


def main(
    arguments: Sequence[str],
    get_driver: Callable[[], SurveyDriver] = cuda_survey_driver,
    *,
    report: Report | None = None,
    wait: Callable[[], object] = signal.pause,
    amount: Amount | None = None,
) -> None:
    """Run the probe that ``arguments`` name; ``wait`` returns when ``lend`` is to end."""
    report, amount = report or _print, amount or Amount()
    try:
        driver = get_driver()
        match arguments:
            case ["survey"]:
                report(survey(driver))
            case ["host"]:
                for finding in try_host(driver, amount):
                    report(finding)
            case ["lend", seed]:
                with lent(driver, int(seed), amount) as handle:
                    report({"handle": handle.hex()})
                    wait()
            case ["open", handle, seed]:
                report(open_lent(driver, bytes.fromhex(handle), int(seed), amount))
            case _:
                raise SystemExit(__doc__)
    except CudaError as error:
        report({"error": str(error), "name": error.name})


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

    def rate(self, copy: Callable[[], None], amount: Amount) -> float:
        """GB/s of ``copy``, many times."""
        self.run(copy)
        begin = time.perf_counter()
        self.run(copy, amount.num_copies)
        return amount.size_bytes * amount.num_copies / max(time.perf_counter() - begin, 1e-9) / 1e9

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
    return {"is_right": is_right, "to_host": lane.rate(to_host, amount), "from_host": lane.rate(from_host, amount)}


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
