"""Figures of the GPUs that a worker computes on, by NVIDIA's management library (NVML), where that is.

It comes with the driver, and its Python module ``pynvml`` with the package ``nvidia-ml-py`` (the extra ``cuda``).
Without one of them, or without a GPU, there are no such metrics. Nothing is read between scrapes. Where NVML fails, as
while a driver is loaded anew, later scrapes try again.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

#: The module ``pynvml``, or what stands for it.
Nvml: TypeAlias = Any

_TEMPERATURE_OF_THE_GPU = 0  # NVML_TEMPERATURE_GPU
# After a failure so long passes before the next try; each time twice as long, up to the second.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 5.0, 300.0
_WATTS, _SHARE = 1e-3, 1e-2  # of milliwatts and percents

_Read: TypeAlias = Callable[[Nvml, Any], float]
_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    (
        "quartet_worker_gpu_utilization_ratio",
        "Share of the last second or so in which a kernel ran.",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu * _SHARE,
    ),
    (
        "quartet_worker_gpu_memory_used_bytes",
        "Memory in use, of all processes.",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    ),
    (
        "quartet_worker_gpu_memory_total_bytes",
        "Memory that there is.",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    ),
    (
        "quartet_worker_gpu_power_watts",
        "Power drawn.",
        lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) * _WATTS,
    ),
    (
        "quartet_worker_gpu_temperature_celsius",
        "Temperature of the chip.",
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, _TEMPERATURE_OF_THE_GPU),
    ),
)


class Gpu(NamedTuple):
    """A GPU, or a MIG device: a part of one.

    Attributes:
        handle: NVML's.
        number: NVML's number of the GPU.
        uuid: ``GPU-...`` or ``MIG-...``.
        fault: why NVML gives no handle; it tells nothing then. Empty: it does.
    """

    handle: Any
    number: str
    uuid: str
    fault: str = ""


def watch_gpus(
    registry: CollectorRegistry,
    visible: str | None,
    number: int | None = None,
    load: Callable[[], Nvml] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Show at each scrape how the GPUs are; labels are the number that NVML gives a GPU and its UUID.

    Args:
        registry: where.
        visible: ``CUDA_VISIBLE_DEVICES``: numbers, or UUIDs of GPUs or MIG devices, which may be cut; ``None``: all
            GPUs of the host.
        number: which of the visible ones the worker uses; ``None``: all of them.
        load: imports the module; raises ``ImportError``.
        clock: gives seconds.
    """
    registry.register(_GpuCollector(visible, number, load or (lambda: importlib.import_module("pynvml")), clock))


class _GpuCollector(Collector):
    """Opens NVML at the first scrape, on the scrape's thread: that takes some 50 ms, which a start should not wait."""

    def __init__(
        self, visible: str | None, number: int | None, load: Callable[[], Nvml], clock: Callable[[], float]
    ) -> None:
        self._visible = visible
        self._number = number
        self._load = load
        self._clock = clock
        self._nvml: Nvml = None
        self._gpus: Sequence[Gpu] | None = None
        self._again_at = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._last_message = ""

    def collect(self) -> Iterator[Metric]:
        if self._gpus is None and self._clock() >= self._again_at:
            self._gpus = self._open()
        gpus, num_values = self._gpus, 0
        if not gpus:
            return
        for name, text, read in _GAUGES:
            family = GaugeMetricFamily(name, text, labels=["gpu", "uuid"])
            for gpu in gpus:
                # Not every GPU tells everything, and one that fell off the bus tells nothing.
                if (value := _value(self._nvml, gpu.handle, read)) is not None:
                    family.add_metric([gpu.number, gpu.uuid], value)
                    num_values += 1
            yield family
        if num_values:
            self._pause_s, self._last_message = _FIRST_PAUSE_S, ""
        else:  # a driver that was loaded anew knows no old handles
            self._gpus = None
            self._give_up("the GPUs tell nothing any more")

    def _open(self) -> Sequence[Gpu] | None:
        """The GPUs to show; ``None``: to be tried again."""
        try:
            nvml = self._nvml = self._load()
        except ImportError:
            logger.info("no figures of GPUs: the package nvidia-ml-py is not installed")
            return ()
        try:
            nvml.nvmlInit()
            gpus = self._chosen(_visible_gpus(nvml, self._visible))
        except nvml.NVMLError as error:
            self._give_up(str(error))
            return None
        faulty = [gpu for gpu in gpus if gpu.fault]
        if gpus and len(faulty) == len(gpus):
            self._give_up(faulty[0].fault)
            return None
        for gpu in faulty:
            logger.warning("no figures of GPU %s: %s", gpu.number, gpu.fault)
        return [gpu for gpu in gpus if not gpu.fault]

    def _chosen(self, gpus: Sequence[Gpu]) -> Sequence[Gpu]:
        """Those of the visible ones that the worker uses."""
        if self._number is None:
            return gpus
        if self._number >= len(gpus):
            logger.warning("no figures of GPU %d: %d are visible", self._number, len(gpus))
        return gpus[self._number : self._number + 1]

    def _give_up(self, message: str) -> None:
        """Try again later. What is the same as last time is not logged again."""
        if message != self._last_message:
            self._last_message = message
            logger.warning("no figures of GPUs until NVML answers: %s", message)
        self._again_at = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        with suppress(self._nvml.NVMLError):  # each initialisation has its end
            self._nvml.nvmlShutdown()


def _visible_gpus(nvml: Nvml, visible: str | None) -> Sequence[Gpu]:
    """Those of CUDA, in its order; as CUDA has it, what follows an entry that names none, or several, is not seen."""
    gpus = [_describe(nvml, number) for number in range(nvml.nvmlDeviceGetCount())]
    if visible is None:
        return gpus
    parts = [part for gpu in gpus for part in _mig_devices(nvml, gpu)] if "MIG-" in visible else []
    found: list[Gpu] = []
    for entry in visible.split(","):
        name = entry.strip()
        named = _named(name, gpus, parts)
        if len(named) != 1:
            if name not in ("", "-1"):  # which is how one says "none"
                what = "several GPUs are called so" if named else "no GPU is called so"
                logger.warning("CUDA_VISIBLE_DEVICES: no figures of %s and what follows it: %s", name, what)
            break
        found += named
    return found


def _named(name: str, gpus: Sequence[Gpu], parts: Sequence[Gpu]) -> Sequence[Gpu]:
    """The GPUs, or their parts, that an entry may mean: a number, or the beginning of a UUID.

    A UUID that no GPU has is taken for that of one with a fault, whose UUID is not known.
    """
    if name.isdecimal():
        return gpus[int(name) : int(name) + 1]
    if not name.startswith(("GPU-", "MIG-")):
        return ()
    found = [gpu for gpu in (*gpus, *parts) if gpu.uuid.startswith(name)]
    return found or [gpu._replace(number=name) for gpu in gpus if gpu.fault][:1]


def _mig_devices(nvml: Nvml, gpu: Gpu) -> Iterator[Gpu]:
    """The parts of a GPU, none where it has none. They tell their memory, but not what the whole GPU does."""
    if gpu.fault:
        return
    with suppress(nvml.NVMLError):
        for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu.handle)):
            with suppress(nvml.NVMLError):  # places may be empty
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, place)
                yield Gpu(part, gpu.number, _text(nvml.nvmlDeviceGetUUID(part)))


def _describe(nvml: Nvml, number: int) -> Gpu:
    """The GPU of NVML's ``number``; one that is broken must not hide the others."""
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(number)
        return Gpu(gpu, str(number), _text(nvml.nvmlDeviceGetUUID(gpu)))
    except nvml.NVMLError as error:
        return Gpu(None, str(number), "", str(error))


def _value(nvml: Nvml, gpu: Any, read: _Read) -> float | None:
    try:
        return float(read(nvml, gpu))
    except nvml.NVMLError:
        return None


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
