"""Probes of ``quartet doctor gpu`` in threads of this process, each with the fake driver of a process of its own."""

from __future__ import annotations

import asyncio
import ctypes
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cli.doctor.gpu_probe import MARK, Amount, Finding, main
from tests.transfer.fake_cuda import FakeDriver, FakeHost

AMOUNT = Amount(size_bytes=8192, num_copies=2)
SIZE_BYTES = 140 << 30


class FakeSurveyDriver(FakeDriver):
    """A ``SurveyDriver`` whose memory of the host is real.

    Attributes:
        num_pinned: places of the host's memory that were reserved or registered, and not given back yet.
    """

    def __init__(self, host: FakeHost, devices: tuple[int, ...] = (0,)) -> None:
        super().__init__(host, devices)
        self._pinned: dict[int, object] = {}

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def cuda_version(self) -> tuple[int, int]:
        return 13, 0

    def num_devices(self) -> int:
        return len(self.devices)

    def name(self, device: int) -> str:
        return f"Fake {self.devices[device]}"

    def total_size_bytes(self, device: int) -> int:
        return SIZE_BYTES + self.devices[device]

    def can_reach(self, device: int, peer: int) -> bool:
        return self.host.peers

    def allocate_host(self, size_bytes: int, *, write_combined: bool) -> int:
        with self._called("allocate_write_combined" if write_combined else "allocate_pinned"):
            buffer = ctypes.create_string_buffer(size_bytes)
            self._pinned[ctypes.addressof(buffer)] = buffer
            return ctypes.addressof(buffer)

    def free_host(self, address: int) -> None:
        with self._called("free_host"):
            del self._pinned[address]

    def register_host(self, address: int, size_bytes: int) -> None:
        with self._called("register_host"):
            self._pinned[address] = size_bytes

    def unregister_host(self, address: int) -> None:
        with self._called("unregister_host"):
            del self._pinned[address]

    def copy_to_host(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        with self._called("copy_to_host"):
            self._streams[stream].todo.append(
                lambda: _ignore(ctypes.memmove(target, self.read(source, size_bytes), size_bytes))
            )

    def copy_from_host(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        with self._called("copy_from_host"):
            self._streams[stream].todo.append(lambda: self.write(target, ctypes.string_at(source, size_bytes)))


def _ignore(_value: object) -> None:
    pass


@dataclass
class Machine:
    """Starts probes as ``cli.doctor.finding.started`` does.

    Attributes:
        failing: the error that a call raises in the probe of this name, once a process.
        ends: exit codes of probes that end before they say a thing.
        hangs: probes that never say a thing.
        drivers: of all probes that ran.
    """

    host: FakeHost
    failing: dict[str, dict[str, str]] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    hangs: set[str] = field(default_factory=set)
    drivers: list[FakeSurveyDriver] = field(default_factory=list)

    @asynccontextmanager
    async def start(
        self, command: Sequence[str], variables: Mapping[str, str], on_line: Callable[[str], None]
    ) -> AsyncIterator[_Running]:
        arguments = list(command[3:])
        probe, may_end = arguments[0], threading.Event()
        loop = asyncio.get_running_loop()
        visible = variables.get("CUDA_VISIBLE_DEVICES")
        driver = FakeSurveyDriver(self.host, tuple(range(len(self.host.uuids))) if visible is None else (int(visible),))
        driver.failing |= self.failing.get(probe, {})
        self.drivers.append(driver)

        def report(finding: Finding) -> None:
            loop.call_soon_threadsafe(on_line, MARK + json.dumps(finding))

        def run() -> int:
            if probe in self.hangs:
                may_end.wait()
            elif probe not in self.ends:
                main(arguments, lambda: driver, report=report, wait=may_end.wait, amount=AMOUNT)
            return self.ends.get(probe, 0)

        task = asyncio.create_task(asyncio.to_thread(run))
        try:
            yield _Running(task)
        finally:
            may_end.set()
            await task
            driver.kill()


@dataclass
class _Running:
    task: asyncio.Task[int]

    async def wait(self) -> int:
        return await asyncio.shield(self.task)
