"""Gauges of GPUs, with a module that stands for NVIDIA's."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from quartet.telemetry.gpus import watch_gpus

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


def shown(nvml: FakeNvml, visible: str | None = None, number: int | None = None) -> dict[str, dict[str, float]]:
    """Values by name without its beginning, and by GPU."""
    registry = CollectorRegistry()
    watch_gpus(registry, visible, number, lambda: nvml)
    return values(registry)


def values(registry: CollectorRegistry) -> dict[str, dict[str, float]]:
    return {
        metric.name.removeprefix("quartet_worker_gpu_"): {
            sample.labels["gpu"]: sample.value for sample in metric.samples
        }
        for metric in registry.collect()
    }


def test_each_gpu_has_its_gauges_in_base_units() -> None:
    assert shown(FakeNvml(), "1") == {
        "utilization_ratio": {"1": pytest.approx(0.4)},
        "memory_used_bytes": {"1": 2 * GIB},
        "memory_total_bytes": {"1": 80 * GIB},
        "power_watts": {"1": pytest.approx(123.5)},
        "temperature_celsius": {"1": 61},
    }


@pytest.mark.parametrize(
    ("visible", "number", "gpus"),
    [
        (None, None, ["0", "1", "2"]),
        (None, 1, ["1"]),
        ("2,0", None, ["2", "0"]),
        ("2,0", 1, ["0"]),
        ("GPU-1", 0, ["1"]),
        ("0,7,1", None, ["0"]),  # CUDA sees nothing from the first that is not there
        ("", None, []),
        ("-1", None, []),
        ("0", 1, []),
    ],
)
def test_only_the_gpus_of_the_worker_are_shown(visible: str | None, number: int | None, gpus: list[str]) -> None:
    assert list(shown(FakeNvml(), visible, number).get("power_watts", {})) == gpus


def test_what_a_gpu_does_not_tell_is_left_out() -> None:
    found = shown(FakeNvml({"utilization", "power"}), "0")
    assert found["utilization_ratio"] == found["power_watts"] == {}
    assert found["temperature_celsius"] == {"0": 61}


def test_without_the_library_or_the_package_there_are_no_gauges(caplog: pytest.LogCaptureFixture) -> None:
    assert shown(FakeNvml({"init"})) == {}
    assert "no figures of GPUs: init" in caplog.text
    registry = CollectorRegistry()

    def missing() -> None:
        raise ImportError("pynvml")

    watch_gpus(registry, None, None, missing)
    assert values(registry) == {}


def test_it_is_opened_once_and_read_at_each_scrape() -> None:
    nvml, registry = FakeNvml(), CollectorRegistry()
    watch_gpus(registry, "0", None, lambda: nvml)
    assert nvml.num_inits == 0
    for utilization in (40, 90):
        nvml.utilization = utilization
        assert values(registry)["utilization_ratio"] == {"0": pytest.approx(utilization / 100)}
    assert nvml.num_inits == 1
