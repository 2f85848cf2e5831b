"""What ``quartet doctor gpu`` asks of the CUDA driver beyond what transfers need: names, peers, memory of the host."""

from __future__ import annotations

from functools import cache
from typing import Protocol

from quartet.transfer.cuda.driver import CudaDriver, Driver

_MAX_NAME_BYTES = 256


class SurveyDriver(Driver, Protocol):
    """A ``Driver`` that also says what GPUs there are, and copies to and from memory of the host.

    The four calls on the host's memory and the copies need a bound context; the others do not.
    """

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

    def allocate_host(self, size_bytes: int, *, write_combined: bool) -> int:
        """Reserve pinned memory of the host; the CPU reads it slowly if it is write-combined."""
        ...

    def free_host(self, address: int) -> None:
        """Give ``allocate_host``'s memory back."""
        ...

    def register_host(self, address: int, size_bytes: int) -> None:
        """Pin memory that the process has already."""
        ...

    def unregister_host(self, address: int) -> None:
        """Undo ``register_host``."""
        ...

    def copy_to_host(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Have ``stream`` copy from the GPU's memory to the host's."""
        ...

    def copy_from_host(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Have ``stream`` copy from the host's memory to the GPU's."""
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

    def allocate_host(self, size_bytes: int, *, write_combined: bool) -> int:
        """As ``SurveyDriver``."""
        flags = self._cuda.CU_MEMHOSTALLOC_WRITECOMBINED if write_combined else 0
        return int(self._call("cuMemHostAlloc", size_bytes, flags))

    def free_host(self, address: int) -> None:
        """As ``SurveyDriver``."""
        self._call("cuMemFreeHost", address)

    def register_host(self, address: int, size_bytes: int) -> None:
        """As ``SurveyDriver``."""
        self._call("cuMemHostRegister", address, size_bytes, 0)

    def unregister_host(self, address: int) -> None:
        """As ``SurveyDriver``."""
        self._call("cuMemHostUnregister", address)

    def copy_to_host(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """As ``SurveyDriver``."""
        self._call("cuMemcpyDtoHAsync", target, source, size_bytes, stream)

    def copy_from_host(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """As ``SurveyDriver``."""
        self._call("cuMemcpyHtoDAsync", target, source, size_bytes, stream)


@cache
def cuda_survey_driver() -> CudaSurveyDriver:
    """The driver, initialised at the first call that succeeds. Raises ``CudaError`` as ``CudaDriver`` does."""
    return CudaSurveyDriver()
