"""What stands for ``pynvml``: three GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 2**30


@dataclass
class FakeNvml:
    """Three GPUs; what is in ``lacking`` they don't tell."""

    lacking: set[str] = field(default_factory=set)
    num_inits: int = 0
    utilization: int = 40

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:
        self.num_inits += 1
        self._check("init")

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        self._check(uuid)
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetIndex(self, gpu: int) -> int:
        return gpu

    def nvmlDeviceGetUUID(self, gpu: int) -> str:
        return f"GPU-{gpu}"

    def nvmlDeviceGetUtilizationRates(self, _gpu: int) -> Any:
        self._check("utilization")
        return SimpleNamespace(gpu=self.utilization, memory=7)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return SimpleNamespace(total=80 * GIB, used=(gpu + 1) * GIB, free=0)

    def nvmlDeviceGetPowerUsage(self, _gpu: int) -> int:
        self._check("power")
        return 123_500

    def nvmlDeviceGetTemperature(self, _gpu: int, _sensor: int) -> int:
        return 61

    def _check(self, what: str) -> None:
        if what in self.lacking:
            raise self.NVMLError(what)
