"""Figures of the GPUs that a worker computes on, by NVIDIA's management library (NVML), where that is.

It comes with the driver, and its Python module ``pynvml`` with the package ``nvidia-ml-py`` (the extra ``cuda``).
Without one of them, or without a GPU, there are no such metrics. Nothing is read between scrapes.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

#: The module ``pynvml``, or what stands for it.
Nvml: TypeAlias = Any

_TEMPERATURE_OF_THE_GPU = 0  # NVML_TEMPERATURE_GPU
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


def watch_gpus(
    registry: CollectorRegistry,
    visible: str | None,
    number: int | None = None,
    load: Callable[[], Nvml] | None = None,
) -> None:
    """Show at each scrape how the GPUs are; labels are the number that NVML gives a GPU and its UUID.

    Args:
        registry: where.
        visible: ``CUDA_VISIBLE_DEVICES``, numbers or UUIDs; ``None``: all GPUs of the host.
        number: which of the visible ones the worker uses; ``None``: all of them.
        load: imports the module; raises ``ImportError``.
    """
    registry.register(_GpuCollector(visible, number, load or (lambda: importlib.import_module("pynvml"))))


class _GpuCollector(Collector):
    """Opens NVML at the first scrape, on the scrape's thread: that takes some 50 ms, which a start should not wait."""

    def __init__(self, visible: str | None, number: int | None, load: Callable[[], Nvml]) -> None:
        self._visible = visible
        self._number = number
        self._load = load
        self._nvml: Nvml = None
        # Handle, number and UUID of each.
        self._gpus: Sequence[tuple[Any, str, str]] | None = None

    def collect(self) -> Iterator[Metric]:
        if self._gpus is None:
            self._gpus = self._open()
        if not self._gpus:
            return
        for name, text, read in _GAUGES:
            family = GaugeMetricFamily(name, text, labels=["gpu", "uuid"])
            for gpu, number, uuid in self._gpus:
                # Not every GPU tells everything, and one that fell off the bus tells nothing.
                if (value := _value(self._nvml, gpu, read)) is not None:
                    family.add_metric([number, uuid], value)
            yield family

    def _open(self) -> Sequence[tuple[Any, str, str]]:
        try:
            nvml = self._nvml = self._load()
        except ImportError:
            logger.info("no figures of GPUs: the package nvidia-ml-py is not installed")
            return ()
        try:
            nvml.nvmlInit()
            gpus = _visible_gpus(nvml, self._visible)
            if self._number is not None:
                gpus = gpus[self._number : self._number + 1]
            return [(gpu, str(nvml.nvmlDeviceGetIndex(gpu)), _text(nvml.nvmlDeviceGetUUID(gpu))) for gpu in gpus]
        except nvml.NVMLError as error:
            logger.warning("no figures of GPUs: %s", error)
            return ()


def _visible_gpus(nvml: Nvml, visible: str | None) -> list[Any]:
    """The handles, in CUDA's order; as CUDA has it, what follows an entry that names no GPU is not seen."""
    num_gpus = nvml.nvmlDeviceGetCount()
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(num_gpus)]
    gpus = []
    for entry in visible.split(","):
        name = entry.strip()
        if name.isdecimal() and int(name) < num_gpus:
            gpus.append(nvml.nvmlDeviceGetHandleByIndex(int(name)))
        elif name.startswith(("GPU-", "MIG-")):
            gpus.append(nvml.nvmlDeviceGetHandleByUUID(name))
        else:
            break
    return gpus


def _value(nvml: Nvml, gpu: Any, read: _Read) -> float | None:
    try:
        return float(read(nvml, gpu))
    except nvml.NVMLError:
        return None


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
