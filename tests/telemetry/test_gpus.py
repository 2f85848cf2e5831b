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
        ("0, 1", None, ["0", "1"]),
        ("GPU-0a2c", 0, ["1"]),
        ("GPU-7,GPU-0a1", None, ["2", "0"]),  # CUDA takes as much of a UUID as tells it from others
        ("GPU-0a,1", None, []),  # two are called so
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


@pytest.mark.parametrize(
    ("visible", "number", "warning"),
    [
        ("GPU-0a,1", None, "GPU-0a and what follows it: several GPUs are called so"),
        ("0,GPU-9", None, "GPU-9 and what follows it: no GPU is called so"),
        ("0,7,1", None, "7 and what follows it: no GPU is called so"),
        ("MIG-ef", None, "MIG-ef and what follows it: no GPU is called so"),
        ("0", 1, "no figures of GPU 1: 1 are visible"),
        ("", None, ""),
        ("-1", None, ""),
        ("1", 0, ""),
    ],
)
def test_a_name_that_names_no_gpu_is_warned_of(
    visible: str, number: int | None, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    shown(FakeNvml(), visible, number)
    assert [record.getMessage() for record in caplog.records if warning not in record.getMessage()] == []
    assert len(caplog.records) == bool(warning)


def test_a_mig_device_tells_its_memory_under_the_number_of_its_gpu() -> None:
    registry = CollectorRegistry()
    watch_gpus(registry, "MIG-c", None, FakeNvml)
    labels = {"gpu": "2", "uuid": "MIG-cd"}
    assert registry.get_sample_value("quartet_worker_gpu_memory_total_bytes", labels) == 10 * GIB
    assert values(registry)["power_watts"] == {}


def test_uuids_may_be_bytes() -> None:
    registry = CollectorRegistry()
    watch_gpus(registry, "GPU-7", None, lambda: FakeNvml(has_bytes=True))
    labels = {"gpu": "2", "uuid": "GPU-7fff"}
    assert registry.get_sample_value("quartet_worker_gpu_temperature_celsius", labels) == 61


@pytest.mark.parametrize(
    ("visible", "number", "gpus", "warnings"),
    [
        ("0", None, ["0"], []),  # what is none of the worker's own is nothing to warn of
        (None, None, ["0", "1"], ["no figures of GPU 2: GPU is lost"]),
        ("2,1", None, ["1"], ["no figures of GPU 2: GPU is lost"]),
        ("2,1", 1, ["1"], []),  # it keeps its place among the visible ones
        ("GPU-7,GPU-0a2", None, ["1"], ["no figures of GPU GPU-7: GPU is lost"]),
        ("GPU-7,GPU-0a2", 1, ["1"], []),
        ("MIG-ab,GPU-0a2", None, ["1"], ["no figures of GPU MIG-ab: GPU is lost"]),
        ("2", None, [], ["no figures of GPUs until NVML answers: GPU is lost"]),
        ("2,1", 0, [], ["no figures of GPUs until NVML answers: GPU is lost"]),
    ],
)
def test_a_gpu_that_is_lost_hides_no_other(
    visible: str | None, number: int | None, gpus: list[str], warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert list(shown(FakeNvml(lost={2}), visible, number).get("power_watts", {})) == gpus
    assert [record.getMessage() for record in caplog.records] == warnings


def test_a_lost_gpu_that_is_the_only_one_of_its_worker_is_looked_for_anew() -> None:
    nvml, registry, now_s = FakeNvml(lost={2}), CollectorRegistry(), 1000.0
    watch_gpus(registry, "2", None, lambda: nvml, lambda: now_s)
    assert values(registry) == {}
    nvml.lost.clear()
    now_s += 5.0
    assert values(registry)["temperature_celsius"] == {"2": 61}


def test_without_the_package_there_are_no_gauges() -> None:
    registry, tries = CollectorRegistry(), list[int]()

    def missing() -> None:
        tries.append(1)
        raise ImportError("pynvml")

    watch_gpus(registry, None, None, missing)
    assert values(registry) == values(registry) == {}
    assert len(tries) == 1


def test_a_library_that_fails_is_tried_again_ever_more_seldom(caplog: pytest.LogCaptureFixture) -> None:
    nvml, registry, now_s = FakeNvml({"init"}), CollectorRegistry(), 1000.0
    watch_gpus(registry, None, None, lambda: nvml, lambda: now_s)
    tried_at = []
    while now_s < 3000.0:
        before = nvml.num_inits
        assert values(registry) == {}
        if nvml.num_inits > before:
            tried_at.append(now_s - 1000.0)
        now_s += 1.0
    assert tried_at[:5] == [0.0, 5.0, 15.0, 35.0, 75.0]
    assert tried_at[-1] - tried_at[-2] == 300.0
    assert caplog.text.count("no figures of GPUs until NVML answers: init") == 1, "said once"
    nvml.lacking.clear()
    now_s += 300.0
    assert values(registry)["temperature_celsius"] == {"0": 61, "1": 61, "2": 61}


def test_gpus_that_tell_nothing_any_more_are_looked_for_anew(caplog: pytest.LogCaptureFixture) -> None:
    nvml, registry, now_s = FakeNvml(), CollectorRegistry(), 1000.0
    watch_gpus(registry, "0", None, lambda: nvml, lambda: now_s)
    assert values(registry)["power_watts"] == {"0": pytest.approx(123.5)}
    nvml.lacking.add("all")
    assert values(registry)["power_watts"] == {}
    assert "the GPUs tell nothing any more" in caplog.text
    nvml.lacking.clear()
    assert values(registry) == {}, "not at once"
    now_s += 5.0
    assert values(registry)["power_watts"] == {"0": pytest.approx(123.5)}
    assert (nvml.num_inits, nvml.num_shutdowns) == (2, 1)


def test_it_is_opened_once_and_read_at_each_scrape() -> None:
    nvml, registry = FakeNvml(), CollectorRegistry()
    watch_gpus(registry, "0", None, lambda: nvml)
    assert nvml.num_inits == 0
    for utilization in (40, 90):
        nvml.utilization = utilization
        assert values(registry)["utilization_ratio"] == {"0": pytest.approx(utilization / 100)}
    assert nvml.num_inits == 1


@pytest.mark.parametrize(
    ("lacking", "told"),
    [
        ({"utilization", "memory", "power", "temperature"}, ["the GPUs tell nothing any more"]),
        ({"all"}, ["the GPUs tell nothing any more", "init"]),
    ],
)
def test_each_outage_is_told_once_and_waited_for_shortly_at_first(
    lacking: set[str], told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    nvml, registry, now_s = FakeNvml(), CollectorRegistry(), 1000.0
    watch_gpus(registry, "0", None, lambda: nvml, lambda: now_s)
    well = {"0": 61}
    assert values(registry)["temperature_celsius"] == well
    for _ in range(2):
        caplog.clear()
        nvml.lacking |= lacking
        for _ in range(5):
            values(registry)
            now_s += 300.0
        messages = [record.getMessage() for record in caplog.records]
        assert [text.removeprefix("no figures of GPUs until NVML answers: ") for text in messages] == told
        nvml.lacking.clear()
        assert values(registry)["temperature_celsius"] == well
    nvml.lacking |= lacking
    values(registry)
    nvml.lacking.clear()
    now_s += 5.0
    assert values(registry)["temperature_celsius"] == well, "the pause is the first one again"
