"""Gauges of GPUs, with a module that stands for NVIDIA's."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from quartet.telemetry.gpus import watch_gpus
from tests.fakes.nvml import GIB, FakeNvml


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
