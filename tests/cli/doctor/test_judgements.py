"""What facts about a machine mean."""

from __future__ import annotations

import resource
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cli.doctor.command import show
from cli.doctor.finding import Verdict, ok, warning, wrong
from cli.doctor.gpus import (
    Gpu,
    TorchView,
    judge_absence,
    judge_links,
    judge_torch,
    parse_gpus,
    parse_links,
)
from cli.doctor.machine import (
    GIB,
    MIB,
    judge_cpus,
    judge_locked,
    judge_memory,
    judge_monotonic,
    judge_ntp,
    judge_open_files,
    judge_shm,
    read_cpu_quota,
    read_memory,
)
from cli.doctor.network import judge_skew
from cli.doctor.packages import check_packages, is_optional, judge_package

# As a host with two H200s prints it, escapes included.
_TWO_H200 = """0, NVIDIA H200, 143771, 0, 580.159.04, 9.0
1, NVIDIA H200, 143771, 512, 580.159.04, 9.0"""
_TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\t0-31\t0\t\tN/A
GPU1\tNV18\t X \t0-31\t0\t\tN/A

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)"""


def test_a_docker_containers_shared_memory_is_a_warning_with_the_way_out() -> None:
    finding = judge_shm(64 * MIB, 64 * MIB)
    assert finding.verdict is Verdict.WARNING
    assert "64.0 MiB" in finding.message
    assert "--shm-size" in finding.advice and "--ipc=host" in finding.advice


def test_shared_memory_that_is_full_is_a_warning_too() -> None:
    assert judge_shm(16 * GIB, 100 * MIB).verdict is Verdict.WARNING
    assert judge_shm(16 * GIB, 16 * GIB).verdict is Verdict.OK


def test_locked_memory_matters_for_rdma_only() -> None:
    assert judge_locked(8 * MIB, has_rdma=False).verdict is Verdict.OK
    assert judge_locked(8 * MIB, has_rdma=True).verdict is Verdict.WARNING
    assert judge_locked(resource.RLIM_INFINITY, has_rdma=True).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("available", "limit", "verdict"),
    [(8 * GIB, None, "ok"), (GIB, None, "warning"), (8 * GIB, GIB, "warning"), (8 * GIB, 4 * GIB, "ok")],
)
def test_memory_is_what_host_and_control_group_leave(available: int, limit: int | None, verdict: str) -> None:
    assert judge_memory(16 * GIB, available, limit).verdict == verdict


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "max\n", None),
        ("memory.max", f"{2 * GIB}\n", 2 * GIB),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),  # version 1 has no word for it
        ("memory/memory.limit_in_bytes", f"{GIB}\n", GIB),
    ],
)
def test_both_kinds_of_control_group_are_read(tmp_path: Path, name: str, text: str, limit: int | None) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {8 * GIB // 1024} kB\nMemAvailable: {4 * GIB // 1024} kB\nHugePages_Total: 0\n")
    assert read_memory(meminfo, tmp_path / "none") == (8 * GIB, 4 * GIB, None)
    file = tmp_path / "cgroup" / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert read_memory(meminfo, tmp_path / "cgroup") == (8 * GIB, 4 * GIB, limit)


@pytest.mark.parametrize(("text", "quota"), [("max 100000\n", None), ("250000 100000\n", 2.5)])
def test_a_quota_of_cpus_is_read(tmp_path: Path, text: str, quota: float | None) -> None:
    assert read_cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text(text)
    assert read_cpu_quota(tmp_path) == quota


def test_a_quota_of_cpus_of_version_1_is_read(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert read_cpu_quota(tmp_path) is None
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    assert read_cpu_quota(tmp_path) == 0.5


def test_few_cpus_and_a_quota_far_below_those_seen_are_warnings() -> None:
    assert judge_cpus(8, 8, None).verdict is Verdict.OK
    assert judge_cpus(1, 8, None).verdict is Verdict.WARNING
    assert judge_cpus(64, 64, 1.5).verdict is Verdict.WARNING
    assert "engine.num_threads" in judge_cpus(64, 64, 4).advice
    assert judge_cpus(4, 64, 4).verdict is Verdict.OK


def test_limits_and_clocks() -> None:
    assert judge_open_files(1024, 524_288).verdict is Verdict.WARNING
    assert "allowed here: 524288" in judge_open_files(1024, 524_288).advice
    assert judge_open_files(65_536, 65_536).verdict is Verdict.OK
    assert judge_open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY).verdict is Verdict.OK
    assert judge_monotonic(1e-9).verdict is Verdict.OK
    assert judge_monotonic(0.016).verdict is Verdict.WARNING
    assert judge_ntp(None) == []
    assert [finding.verdict for finding in [*judge_ntp(0), *judge_ntp(5)]] == [Verdict.OK, Verdict.WARNING]


def test_clocks_apart_are_a_warning_that_says_which_way() -> None:
    assert judge_skew("etcd:2379", None) == []
    [near], [ahead], [behind] = (judge_skew("etcd:2379", skew_s) for skew_s in (1.5, 30.0, -30.0))
    assert near.verdict is Verdict.OK
    assert (ahead.verdict, ahead.message) == (Verdict.WARNING, "30 s ahead of the etcd at etcd:2379")
    assert behind.message == "30 s behind the etcd at etcd:2379"


def test_a_drivers_table_is_read_and_its_noise_is_not() -> None:
    lines = ["Warning: infoROM is corrupted at gpu 0000:00:04.0", *_TWO_H200.splitlines(), "2, X, [N/A], [N/A], 1, 9.0"]
    assert parse_gpus(lines) == [
        Gpu(0, "NVIDIA H200", 143_771, 0, "580.159.04", "9.0"),
        Gpu(1, "NVIDIA H200", 143_771, 512, "580.159.04", "9.0"),
        Gpu(2, "X", 0, 0, "1", "9.0"),
    ]


def test_links_between_gpus() -> None:
    links = parse_links(_TOPOLOGY.splitlines(), 2)
    assert links == {(0, 1): "NV18"}
    assert [finding.verdict for finding in judge_links(links)] == [Verdict.OK]
    [slow] = judge_links({(0, 1): "NV18", (0, 2): "SYS", (1, 2): "SYS"})
    assert slow.verdict is Verdict.WARNING
    assert "0-2, 1-2" in slow.advice
    assert judge_links({}) == []


def test_pytorchs_view_of_gpus() -> None:
    both = ((True, True), (True, True))
    assert [f.verdict for f in judge_torch(TorchView("2.9.1", "12.8", both), 2)] == [Verdict.OK, Verdict.OK]
    [_, apart] = judge_torch(TorchView("2.9.1", "12.8", ((True, False), (True, True))), 2)
    assert (apart.verdict, apart.message) == (Verdict.WARNING, "no access to each other's memory: 0-1")
    [without] = judge_torch(TorchView("2.9.1+cpu", None, ()), 2)
    assert without.verdict is Verdict.WARNING
    [unseen] = judge_torch(TorchView("2.9.1", "13.0", ()), 2)
    assert unseen.verdict is Verdict.WRONG


def test_no_gpu_is_fine_and_a_device_without_its_tools_is_not() -> None:
    assert judge_absence([]).verdict is Verdict.OK
    assert judge_absence(["/dev/nvidia0"]).verdict is Verdict.WARNING


@pytest.mark.parametrize(
    ("line", "found", "verdict"),
    [
        ("grpcio<2,>=1.85.1", "1.85.1", "ok"),
        ("grpcio<2,>=1.85.1", "1.85.0", "wrong"),
        ("grpcio<2,>=1.85.1", "2.0", "wrong"),
        ("grpcio<2,>=1.85.1", None, "wrong"),
        ('torch<3,>=2.9; extra == "torch"', "2.9.1+cu128", "ok"),
        ('torch<3,>=2.9; extra == "torch"', "2.9.0a0+50eac811a6.nv25.09", "ok"),
        ('torch<3,>=2.9; extra == "torch"', "2.8.0", "warning"),
        ('torch<3,>=2.9; extra == "torch"', None, "ok"),
        ("rich>=13.9", "13.10", "ok"),
        ("pyyaml<7,>=6", "6.0.0", "ok"),
    ],
)
def test_packages_are_held_against_their_ranges(line: str, found: str | None, verdict: str) -> None:
    requirement = Requirement(line)
    finding = judge_package(requirement, found)
    assert finding.verdict == verdict
    if verdict != "ok":
        assert str(requirement.specifier) in finding.advice


async def test_our_own_requirements_are_all_of_the_form_that_is_read() -> None:
    named = {requirement.name: requirement for requirement in map(Requirement, requires("quartet") or [])}
    assert len(named["grpcio"].specifier) == 2
    assert is_optional(named["torch"])
    assert "transformers" in [finding.check for finding in await check_packages()]


def test_a_report_is_whole_lines_without_colour_for_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    show(
        [ok("one", "fine"), warning("two", "so so " * 60, "do this"), wrong("three", "[bad]", "do that")], as_json=False
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["ok", "one"], ["warning", "two"], ["->", "do"], ["wrong", "three"], ["->", "do"], ["1", "wrong,"]
    ]  # fmt: skip
    assert lines[3].endswith(" [bad]")
    assert "\x1b" not in "".join(lines)
