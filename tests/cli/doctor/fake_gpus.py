"""Probes of ``quartet doctor gpu`` in threads of this process, each with the fake driver of a process of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cli.doctor.gpu_probe import MARK, Amount, Finding, main
from quartet.transfer.cuda.driver import CudaError
from quartet.transfer.cuda.kernel_copies import KernelImage
from tests.transfer.fake_cuda import NUM_THREADS, FakeDriver, FakeHost

AMOUNT = Amount(size_bytes=8192, num_copies=2, piece_sizes=(1024, 3072))
SIZE_BYTES = 140 << 30


class FakeSurveyDriver(FakeDriver):
    """A ``SurveyDriver``."""

    needs_pinned = False  # for what is no hand-off, and not timed
    runs_kernels = True

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


@dataclass
class Machine:
    """Starts probes as ``cli.doctor.finding.started`` does.

    Attributes:
        failing: the error that a call raises in the probe of this name, once a process.
        ends: exit codes of probes that end before they say a thing.
        hangs: probes that never say a thing.
        no_triton: the error that its import raises.
        probes: names of those that were started.
        steps: what each probe that was started said that it began to do, the latest one of each name.
        drivers: of all probes that ran.
    """

    host: FakeHost
    failing: dict[str, dict[str, str]] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    hangs: set[str] = field(default_factory=set)
    no_triton: Exception | None = None
    probes: list[str] = field(default_factory=list)
    steps: dict[str, list[str]] = field(default_factory=dict)
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
        self.probes.append(probe)
        steps = self.steps[probe] = list[str]()

        def get_driver() -> FakeSurveyDriver:
            if not driver.devices:
                raise CudaError("cuInit", "CUDA_ERROR_NO_DEVICE")
            return driver

        def compile(architecture: int) -> KernelImage:
            if self.no_triton is not None:
                raise self.no_triton
            return KernelImage("3.9.0", "pull", NUM_THREADS, b"code")

        def report(finding: Finding) -> None:
            steps.extend([finding["at"]] if "at" in finding else [])
            loop.call_soon_threadsafe(on_line, MARK + json.dumps(finding))

        def run() -> int:
            if probe in self.hangs:
                may_end.wait()
            elif probe not in self.ends:
                main(arguments, get_driver, report=report, wait=may_end.wait, amount=AMOUNT, compile=compile)
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
