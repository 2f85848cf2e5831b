"""What ``quartet doctor gpu`` asks of the CUDA driver beyond what transfers need: names, sizes, peers."""

from __future__ import annotations

from functools import cache
from typing import Protocol

from quartet.transfer.cuda.driver import CudaDriver, Driver

_MAX_NAME_BYTES = 256


class SurveyDriver(Driver, Protocol):
    """A ``Driver`` that also says what GPUs there are, which needs no bound context."""

    def cuda_version(self) -> tuple[int, int]:
        """The newest CUDA that the driver speaks."""
        ...

    def num_devices(self) -> int:
        """How many GPUs this process sees."""
        ...

    def name(self, device: int) -> str:
        """The GPU's model."""
        ...

    def total_size_bytes(self, device: int) -> int:
        """All memory of the GPU."""
        ...

    def can_reach(self, device: int, peer: int) -> bool:
        """Whether ``device`` can read and write the memory of ``peer``, another GPU."""
        ...


class CudaSurveyDriver(CudaDriver):
    """The ``SurveyDriver`` of this machine."""

    def cuda_version(self) -> tuple[int, int]:
        """As ``SurveyDriver``."""
        major, rest = divmod(int(self._call("cuDriverGetVersion")), 1000)
        return major, rest // 10

    def num_devices(self) -> int:
        """As ``SurveyDriver``."""
        return int(self._call("cuDeviceGetCount"))

    def name(self, device: int) -> str:
        """As ``SurveyDriver``."""
        found: bytes = self._call("cuDeviceGetName", _MAX_NAME_BYTES, self._call("cuDeviceGet", device))
        return found.partition(b"\0")[0].decode("utf-8", "replace").strip()

    def total_size_bytes(self, device: int) -> int:
        """As ``SurveyDriver``."""
        return int(self._call("cuDeviceTotalMem", self._call("cuDeviceGet", device)))

    def can_reach(self, device: int, peer: int) -> bool:
        """As ``SurveyDriver``."""
        here, there = (self._call("cuDeviceGet", number) for number in (device, peer))
        return bool(self._call("cuDeviceCanAccessPeer", here, there))


@cache
def cuda_survey_driver() -> CudaSurveyDriver:
    """The driver, initialised at the first call that succeeds. Raises ``CudaError`` as ``CudaDriver`` does."""
    return CudaSurveyDriver()
