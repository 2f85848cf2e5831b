"""What stands for ``pynvml``: three GPUs, the last of which has two MIG devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 2**30


@dataclass
class FakeNvml:
    """Three GPUs; what is in ``lacking`` they don't tell. A handle is the number of a GPU, or a MIG device's UUID.

    Attributes:
        lost: numbers of GPUs that fell off the bus.
        has_bytes: UUIDs are bytes, as older versions of the module have them.
    """

    lacking: set[str] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    has_bytes: bool = False
    num_inits: int = 0
    num_shutdowns: int = 0
    utilization: int = 40

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:
        self.num_inits += 1
        self._check("init")

    def nvmlShutdown(self) -> None:
        self.num_shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        if number in self.lost:
            raise self.NVMLError("GPU is lost")
        return number

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: int) -> int:
        assert gpu in range(3)
        if gpu != 2:
            raise self.NVMLError("not supported")
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, _gpu: int, place: int) -> str:
        if place not in (0, 2):
            raise self.NVMLError("not found")
        return "MIG-ab" if place == 0 else "MIG-cd"

    def nvmlDeviceGetUUID(self, gpu: int | str) -> str | bytes:
        uuid = gpu if isinstance(gpu, str) else ("GPU-0a1b", "GPU-0a2c", "GPU-7fff")[gpu]
        return uuid.encode() if self.has_bytes else uuid

    def nvmlDeviceGetUtilizationRates(self, gpu: int | str) -> Any:
        self._check("utilization", gpu)
        return SimpleNamespace(gpu=self.utilization, memory=7)

    def nvmlDeviceGetMemoryInfo(self, gpu: int | str) -> Any:
        self._check("memory")
        if isinstance(gpu, str):
            return SimpleNamespace(total=10 * GIB, used=GIB, free=0)
        return SimpleNamespace(total=80 * GIB, used=(gpu + 1) * GIB, free=0)

    def nvmlDeviceGetPowerUsage(self, gpu: int | str) -> int:
        self._check("power", gpu)
        return 123_500

    def nvmlDeviceGetTemperature(self, gpu: int | str, _sensor: int) -> int:
        self._check("temperature", gpu)
        return 61

    def _check(self, what: str, gpu: int | str = 0) -> None:
        if {what, "all"} & self.lacking or isinstance(gpu, str):
            raise self.NVMLError(what)
