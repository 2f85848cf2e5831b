"""GPUs of one host without a GPU: a ``Driver`` with real bytes, for several processes at once.

As on a GPU, a copy happens when its stream runs, not when it is issued; an event is not ready before; memory that a
process opened stays until it closes it, whatever became of its owner; and a thread has to be bound. What a real driver
would crash on is collected in ``FakeHost.faults``.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quartet.transfer.cuda.driver import Copies, CudaError

ARCHITECTURE = 90
NUM_THREADS = 256

_PAGE = 4096
_ZEROS = bytes(_PAGE)


class FakeMemory:
    """Bytes of one allocation, of any size: only pages that were written exist."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._pages: dict[int, bytearray] = {}

    def read(self, offset: int, size_bytes: int) -> bytes:
        out = bytearray()
        while len(out) < size_bytes:
            page, start = divmod(offset + len(out), _PAGE)
            length = min(_PAGE - start, size_bytes - len(out))
            out += self._pages.get(page, _ZEROS)[start : start + length]
        return bytes(out)

    def write(self, offset: int, data: bytes) -> None:
        done = 0
        while done < len(data):
            page, start = divmod(offset + done, _PAGE)
            length = min(_PAGE - start, len(data) - done)
            part = data[done : done + length]
            done += length
            if page not in self._pages:
                if part == _ZEROS[:length]:
                    continue
                self._pages[page] = bytearray(_PAGE)
            self._pages[page][start : start + length] = part


@dataclass(eq=False)
class Allocation:
    """One ``allocate``; it lives until its owner freed it and every other process closed it."""

    device: int  # of the host
    memory: FakeMemory
    is_owned: bool = True
    num_opened: int = 0


class FakeHost:
    """The GPUs, and what processes did with them. ``pause`` keeps streams from running."""

    def __init__(self, num_devices: int = 1, *, peers: bool = True) -> None:
        self.uuids = [os.urandom(16) for _ in range(num_devices)]
        self.peers = peers
        self.faults: list[str] = []
        self.allocations: list[Allocation] = []
        self.handles: dict[bytes, Allocation] = {}
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.is_paused = False
        self.num_copies = 0
        self.on_copy: Callable[[int], None] = lambda _number: None

    @property
    def used_bytes(self) -> int:
        return sum(allocation.memory.size_bytes for allocation in self.allocations)

    def pause(self) -> None:
        with self.lock:
            self.is_paused = True

    def resume(self) -> None:
        with self.changed:
            self.is_paused = False
            self.changed.notify_all()

    def release(self, allocation: Allocation) -> None:
        if not allocation.is_owned and not allocation.num_opened:
            self.allocations.remove(allocation)


@dataclass(eq=False)
class _Stream:
    todo: deque[Callable[[], None]] = field(default_factory=deque)


@dataclass(eq=False)
class _Event:
    is_ready: bool = True
    stream: _Stream | None = None


class FakeDriver:
    """A ``Driver`` of one process; ``devices`` are those that it sees, by their number on the host.

    Attributes:
        calls: names of the calls so far, by the name of the thread.
        failing: the error that the call of this name raises next, once.
        may_open: cleared, ``open`` takes until it is set.
        num_opened: how often ``open`` was called, and ``close`` not yet.
        needs_pinned: copies to and from other memory of the host are faults; a driver only takes longer for them.
        runs_kernels: that one which pulls, whatever its code is.
        launches: how many programs each launch had.
    """

    needs_pinned = True
    runs_kernels = False

    def __init__(self, host: FakeHost, devices: tuple[int, ...] = (0,)) -> None:
        self.host = host
        self.devices = devices
        self.calls: list[tuple[str, str]] = []
        self.failing: dict[str, str] = {}
        self.may_open = threading.Event()
        self.may_open.set()
        self.num_streams = self.num_events = 0
        self.launches: list[int] = []
        self._kernels: dict[int, bytes] = {}
        self._bound = threading.local()
        self._addresses = itertools.count(0x7F00_0000_0000, 1 << 40)
        self._numbers = itertools.count(1)
        self._own: dict[int, Allocation] = {}
        self._opened: dict[int, Allocation] = {}
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, _Event] = {}
        self._is_killed = False
        self._pinned: dict[int, int] = {}  # bytes, by the first one's address
        self._host_buffers: dict[int, tuple[object, bool]] = {}  # and whether it is write-combined

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    @property
    def write_combined(self) -> list[bool]:
        """Of each piece of pinned memory that is allocated."""
        return [is_write_combined for _, is_write_combined in self._host_buffers.values()]

    @property
    def num_opened(self) -> int:
        return len(self._opened)

    @property
    def num_kernels(self) -> int:
        return len(self._kernels)

    def threads_of(self, *names: str) -> set[str]:
        return {thread for name, thread in self.calls if name in names}

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)

    # What a test does with the memory.

    def write(self, address: int, data: bytes) -> None:
        allocation, offset = self._find(address)
        allocation.memory.write(offset, data)

    def read(self, address: int, size_bytes: int) -> bytes:
        allocation, offset = self._find(address)
        return allocation.memory.read(offset, size_bytes)

    def kill(self) -> None:
        """The process is gone: what it had, it has no more."""
        with self.host.lock:
            for allocation in self._own.values():
                allocation.is_owned = False
                self.host.release(allocation)
            for allocation in self._opened.values():
                allocation.num_opened -= 1
                self.host.release(allocation)
            self._own.clear()
            self._opened.clear()
            self._is_killed = True

    # The driver.

    def bind(self, device: int) -> None:
        self._called("bind", needs_context=False)
        if not 0 <= device < len(self.devices):
            raise CudaError("bind", "CUDA_ERROR_INVALID_DEVICE")
        self._bound.device = self.devices[device]

    def uuid(self, device: int) -> bytes:
        return self.host.uuids[self.devices[device]]

    def architecture(self, device: int) -> int:
        self._called("architecture", needs_context=False)
        if not self.runs_kernels:
            raise CudaError("architecture", "CUDA_ERROR_NOT_SUPPORTED")
        return ARCHITECTURE

    def allocate(self, size_bytes: int) -> int:
        with self._called("allocate"):
            allocation = Allocation(self._bound.device, FakeMemory(size_bytes))
            self.host.allocations.append(allocation)
            address = next(self._addresses)
            self._own[address] = allocation
            return address

    def free(self, address: int) -> None:
        with self._called("free"):
            allocation = self._own.pop(address, None)
            if allocation is None:
                self.host.faults.append(f"freed {address:#x}, which is not allocated")
                raise CudaError("free", "CUDA_ERROR_INVALID_VALUE")
            allocation.is_owned = False
            self.host.release(allocation)

    def export(self, address: int) -> bytes:
        with self._called("export"):
            handle = os.urandom(64)
            self.host.handles[handle] = self._own[address]
            return handle

    def open(self, handle: bytes) -> int:
        lock = self._called("open")
        self.may_open.wait()
        with lock:
            allocation = self.host.handles.get(handle)
            if allocation is None or not allocation.is_owned or allocation in self._own.values():
                raise CudaError("open", "CUDA_ERROR_INVALID_VALUE")
            if allocation.device != self._bound.device and not self.host.peers:
                raise CudaError("open", "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
            if allocation in self._opened.values():
                self.host.faults.append("opened twice")
            allocation.num_opened += 1
            address = next(self._addresses)
            self._opened[address] = allocation
            return address

    def size_of(self, address: int) -> int | None:
        return self._find(address)[0].memory.size_bytes

    def close(self, address: int) -> None:
        with self._called("close"):
            allocation = self._opened.pop(address, None)
            if allocation is None:
                self.host.faults.append(f"closed {address:#x}, which is not open")
                raise CudaError("close", "CUDA_ERROR_INVALID_VALUE")
            allocation.num_opened -= 1
            self.host.release(allocation)

    def pin(self, address: int, size_bytes: int) -> None:
        with self._called("pin"):
            self._pinned[address] = size_bytes

    def unpin(self, address: int) -> None:
        with self._called("unpin"):
            if self._pinned.pop(address, None) is None:
                self.host.faults.append("unpinned what is not pinned")

    def allocate_host(self, size_bytes: int, *, is_write_combined: bool) -> int:
        if is_write_combined and "write_combined" in self.failing:
            raise CudaError("allocate_host", self.failing["write_combined"])
        with self._called("allocate_host"):
            buffer = ctypes.create_string_buffer(size_bytes)
            address = ctypes.addressof(buffer)
            self._host_buffers[address] = (buffer, is_write_combined)
            self._pinned[address] = size_bytes
            return address

    def free_host(self, address: int) -> None:
        with self._called("free_host"):
            del self._host_buffers[address], self._pinned[address]

    def create_stream(self) -> int:
        with self._called("create_stream"):
            number = next(self._numbers)
            self._streams[number] = _Stream()
            self.num_streams += 1
            return number

    def destroy_stream(self, stream: int) -> None:
        with self._called("destroy_stream"):
            if self._streams.pop(stream).todo:
                self.host.faults.append("destroyed a stream that has work")
            self.num_streams -= 1

    def synchronize(self, stream: int) -> None:
        self._called("synchronize")
        with self.host.changed:
            while self._streams[stream].todo:
                while self.host.is_paused:
                    self.host.changed.wait()
                self._streams[stream].todo.popleft()()

    def create_event(self) -> int:
        with self._called("create_event"):
            number = next(self._numbers)
            self._events[number] = _Event()
            self.num_events += 1
            return number

    def destroy_event(self, event: int) -> None:
        with self._called("destroy_event"):
            del self._events[event]
            self.num_events -= 1

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        with self._called("copy"):
            for address in (target, source):
                self._find(address, size_bytes)
            self._streams[stream].todo.append(lambda: self._copy_now(target, source, size_bytes))

    def copy_many(self, copies: Copies, stream: int) -> None:
        for source, target, size_bytes in copies.tolist():
            if self._is_pinned(target):
                self.copy_to_host(target, source, size_bytes, stream)
            elif self._is_pinned(source):
                self.copy_to_device(target, source, size_bytes, stream)
            else:
                self.copy(target, source, size_bytes, stream)

    def _is_pinned(self, address: int) -> bool:
        return any(start <= address < start + size for start, size in self._pinned.items())

    def copy_to_host(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self._issue("copy_to_host", source, target, size_bytes, stream)

    def copy_to_device(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self._issue("copy_to_device", target, source, size_bytes, stream)

    def _issue(self, name: str, on_device: int, on_host: int, size_bytes: int, stream: int) -> None:
        with self._called(name):
            self._find(on_device, size_bytes)
            self._streams[stream].todo.append(lambda: self._move(name, on_device, on_host, size_bytes))

    def _move(self, name: str, on_device: int, on_host: int, size_bytes: int) -> None:
        self.host.num_copies += 1
        self.host.on_copy(self.host.num_copies)
        is_pinned = not self.needs_pinned or any(
            start <= on_host <= start + size - size_bytes for start, size in self._pinned.items()
        )
        try:
            allocation, offset = self._find(on_device, size_bytes)
        except CudaError as error:
            is_pinned = self._is_killed  # its copies are gone with it
            allocation = None
            if not self._is_killed:
                self.host.faults.append(f"{name}: no such memory any more: {error}")
        if not is_pinned:
            self.host.faults.append(f"{name}: host memory that is not pinned")
        elif allocation is not None and name == "copy_to_host":
            ctypes.memmove(on_host, allocation.memory.read(offset, size_bytes), size_bytes)
        elif allocation is not None:
            allocation.memory.write(offset, ctypes.string_at(on_host, size_bytes))

    def load(self, code: bytes, name: str) -> int:
        with self._called("load"):
            number = next(self._numbers)
            self._kernels[number] = code
            return number

    def unload(self, kernel: int) -> None:
        with self._called("unload"):
            del self._kernels[kernel]

    def launch(self, kernel: int, num_programs: int, num_threads: int, arguments: Sequence[int], stream: int) -> None:
        with self._called("launch"):
            assert kernel in self._kernels and num_threads == NUM_THREADS
            source, target, table, num_parts = arguments
            self.launches.append(num_programs)
            self._streams[stream].todo.append(lambda: self._pull(source, target, table, num_parts))

    def _pull(self, source: int, target: int, table: int, num_parts: int) -> None:
        """What the kernel does when the stream comes to it."""
        for begin, end, size in struct.iter_unpack("3q", self.read(table, 24 * num_parts)):
            self._copy_now(target + 16 * end, source + 16 * begin, 16 * size)

    def record(self, event: int, stream: int) -> None:
        with self._called("record"):
            marked = self._events[event]
            marked.is_ready, marked.stream = False, self._streams[stream]

            def mark() -> None:
                marked.is_ready = True

            self._streams[stream].todo.append(mark)

    def wait(self, event: int) -> None:
        """Runs the stream, as a GPU would by itself, unless the host is paused."""
        self._called("wait")
        waited = self._events[event]
        assert waited.stream is not None
        while True:
            with self.host.changed:
                while self.host.is_paused:
                    self.host.changed.wait()
                if waited.is_ready:
                    return
                waited.stream.todo.popleft()()

    def is_ready(self, event: int) -> bool:
        """Runs the stream as far as ``wait`` would, without waiting."""
        with self._called("is_ready"):
            waited = self._events[event]
            if not self.host.is_paused and waited.stream is not None:
                self._run_to(waited)
            return waited.is_ready

    def order(self, stream: int, event: int) -> None:
        with self._called("order"):
            awaited = self._events[event]
            self._streams[stream].todo.append(lambda: self._run_to(awaited))

    def _run_to(self, event: _Event) -> None:
        while not event.is_ready:
            assert event.stream is not None
            event.stream.todo.popleft()()

    def _copy_now(self, target: int, source: int, size_bytes: int) -> None:
        self.host.num_copies += 1
        self.host.on_copy(self.host.num_copies)
        try:
            into, at = self._find(target, size_bytes)
            out_of, begin = self._find(source, size_bytes)
        except CudaError as error:
            self.host.faults.append(f"copied by an address that is not mapped any more: {error}")
            return
        into.memory.write(at, out_of.memory.read(begin, size_bytes))

    def _find(self, address: int, size_bytes: int = 0) -> tuple[Allocation, int]:
        for base, allocation in (*self._own.items(), *self._opened.items()):
            if base <= address <= base + allocation.memory.size_bytes - size_bytes:
                return allocation, address - base
        raise CudaError("copy", "CUDA_ERROR_INVALID_VALUE", f"{address:#x}")

    def _called(self, name: str, *, needs_context: bool = True) -> threading.RLock:
        self.calls.append((name, threading.current_thread().name))
        if needs_context and not hasattr(self._bound, "device"):
            self.host.faults.append(f"{name} on a thread without a context")
            raise CudaError(name, "CUDA_ERROR_INVALID_CONTEXT")
        if name in self.failing:
            raise CudaError(name, self.failing.pop(name))
        return self.host.lock  # type: ignore[return-value]
