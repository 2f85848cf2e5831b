"""``quartet doctor gpu``: over fake GPUs, with probes that die and hang, and for real where there is a GPU."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.app import app
from cli.doctor import hand_offs
from cli.doctor.finding import Finding, Program, ProgramRun, Verdict, worst
from cli.doctor.gpu_probe import MARK, PINNED, SHARED, WRITE_COMBINED
from cli.doctor.hand_offs import (
    Answer,
    Probes,
    Survey,
    answer,
    check_hand_offs,
    judge_gpus,
    judge_host,
    judge_pieces,
    judge_triton,
)
from tests.cli.conftest import RunCli
from tests.cli.doctor import fake_gpus
from tests.cli.doctor.fake_gpus import FakeSurveyDriver, Machine
from tests.transfer.fake_cuda import FakeHost

RATES = {"to_host": 50.0, "from_host": 50.0}


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of what is installed."""
    installed = {"cuda-bindings": "13.5.0"}
    monkeypatch.setattr(hand_offs, "_installed", installed.get)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return installed


async def check(machine: Machine) -> list[Finding]:
    findings = await check_hand_offs(timeout_s=60.0, start=machine.start)
    assert machine.host.faults == []
    assert machine.host.used_bytes == 0
    assert sum(driver.num_pinned + driver.num_streams + driver.num_events for driver in machine.drivers) == 0
    return findings


def of(findings: list[Finding], check: str) -> list[Finding]:
    return [finding for finding in findings if finding.check == check]


async def test_gpus_that_reach_each_other_exchange_bytes_in_all_directions() -> None:
    findings = await check(Machine(FakeHost(2)))
    assert [finding.check for finding in findings] == [
        "cuda-bindings", "GPU 0", "GPU 1", "GPU peers",
        "hand-offs to 0", "pieces to 0", "hand-offs to 1", "pieces to 1", "host, GPU 0", "host, GPU 1", "Triton",
    ]  # fmt: skip
    assert worst(findings) is Verdict.OK
    [into_0], [into_1], [host] = (of(findings, name) for name in ("hand-offs to 0", "hand-offs to 1", "host, GPU 1"))
    assert "from itself" in into_0.message and "from 1 " in into_0.message
    assert "from 0 " in into_1.message and "from itself" in into_1.message
    assert [part.split()[0] for part in host.message.split("; ")] == ["pinned", "write-combined", "memfd"]


async def test_pieces_come_by_copies_and_by_the_kernel() -> None:
    machine = Machine(FakeHost(2))
    findings = await check(machine)
    [pieces] = of(findings, "pieces to 1")
    assert pieces.message.startswith("of 1 KiB and 3 KiB, GB/s: from 0 ")
    assert pieces.message.count("by the kernel") == 2
    assert {number for driver in machine.drivers for number in driver.launches} == {4, 32, 256}
    assert of(findings, "Triton")[0].message.startswith("3.9.0, compiles the kernel that pulls blocks, for sm_90 in ")


async def test_without_triton_the_copy_engine_is_measured_alone() -> None:
    machine = Machine(FakeHost(1), no_triton=ImportError("no libtriton here"))
    findings = await check(machine)
    [pieces], [triton] = of(findings, "pieces to 0"), of(findings, "Triton")
    assert pieces.verdict is Verdict.OK and "kernel" not in pieces.message
    assert triton.verdict is Verdict.WARNING and "ImportError: no libtriton here" in triton.message
    assert "pip install 'quartet[cuda]'" in triton.advice


async def test_a_kernel_that_does_not_run_is_no_reason_against_hand_offs() -> None:
    findings = await check(Machine(FakeHost(1), failing={"triton": {"launch": "CUDA_ERROR_LAUNCH_FAILED"}}))
    assert worst(findings) is Verdict.WARNING
    assert "but it does not run: launch: CUDA_ERROR_LAUNCH_FAILED" in of(findings, "Triton")[0].message
    findings = await check(Machine(FakeHost(1), failing={"open": {"load": "CUDA_ERROR_NO_BINARY_FOR_GPU"}}))
    assert worst(findings) is Verdict.WARNING
    assert of(findings, "hand-offs to 0")[0].verdict is Verdict.OK
    assert "NO_BINARY_FOR_GPU" in of(findings, "pieces to 0")[0].message


async def test_a_kernel_that_brings_other_bytes_is_wrong() -> None:
    class Wrong(FakeSurveyDriver):
        def _pull(self, source: int, target: int, table: int, num_parts: int) -> None:
            super()._pull(source, target, table, num_parts)
            self.write(target + 17, b"other")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_gpus, "FakeSurveyDriver", Wrong)
        findings = await check(Machine(FakeHost(1)))
    [triton] = of(findings, "Triton")
    assert triton.verdict is Verdict.WRONG and "copies other bytes" in triton.message
    answer = Answer([{"is_right": True, "gb_s": 1.0}, {"piece": 1024, "copies": 1.0, "kernel": 1.0, "is_right": False}])
    assert [found.verdict for found in judge_pieces(0, {0: answer})] == [Verdict.OK, Verdict.WRONG]


async def test_a_host_with_one_gpu_needs_no_peers() -> None:
    findings = await check(Machine(FakeHost(1)))
    assert worst(findings) is Verdict.OK
    assert of(findings, "GPU peers")[0].message == "one GPU: Prefill and Decode share it"


async def test_between_gpus_that_are_no_peers_blocks_go_through_host_memory() -> None:
    findings = await check(Machine(FakeHost(3, peers=False)))
    assert worst(findings) is Verdict.WARNING
    [peers] = of(findings, "GPU peers")
    assert peers.message.endswith("0-1, 0-2, 1-2")
    within, *between = of(findings, "hand-offs to 1")
    assert within.verdict is Verdict.OK and "from itself" in within.message
    assert [finding.message.partition(":")[0] for finding in between] == ["from 0", "from 2"]
    assert all("PEER_ACCESS_UNSUPPORTED" in finding.message for finding in between)
    assert all("(staged), which takes longer" in finding.advice for finding in [peers, *between])


@pytest.mark.parametrize(
    ("probe", "call", "advice"),
    [("lend", "export", "IPC and PID namespaces"), ("open", "open", "namespaces"), ("open", "allocate", "free some")],
)
async def test_what_the_driver_refuses_within_a_gpu_is_wrong(probe: str, call: str, advice: str) -> None:
    name = "CUDA_ERROR_OUT_OF_MEMORY" if call == "allocate" else "CUDA_ERROR_NOT_SUPPORTED"
    findings = await check(Machine(FakeHost(1), failing={probe: {call: name}}))
    [pull] = of(findings, "hand-offs to 0")
    assert pull.verdict is Verdict.WRONG
    assert name in pull.message and advice in pull.advice
    assert of(findings, "host, GPU 0")[0].verdict is Verdict.OK


async def test_bytes_that_come_wrong_are_wrong() -> None:
    host = FakeHost(1)
    host.on_copy = lambda _number: host.allocations[0].memory.write(17, b"other")
    [pull] = of(await check(Machine(host)), "hand-offs to 0")
    assert pull.verdict is Verdict.WRONG
    assert "not those that were lent" in pull.message
    assert "leave cuda_ipc out" in pull.advice


def test_bytes_that_come_wrong_through_the_host_s_memory_are_wrong() -> None:
    findings = [
        {"kind": kind, "is_right": kind != WRITE_COMBINED, **RATES} for kind in (PINNED, WRITE_COMBINED, SHARED)
    ]
    found = judge_host(0, Answer(findings))
    assert found.verdict is Verdict.WRONG
    assert "write-combined: other bytes came" in found.message and "wrong blocks" in found.advice


@pytest.mark.parametrize(
    ("calls", "advice"),
    [
        (["allocate_host"], "none fail: copies to this GPU go through write-combined memory"),
        (["write_combined"], "none fail: copies to this GPU go through pinned memory"),
        (["pin"], "blocks leave this GPU by cuda_ipc only: "),
        (["allocate_host", "write_combined"], "cuda_ipc is the only way from and to this GPU: "),
        (["allocate_host", "write_combined", "pin"], "cuda_ipc is the only way from and to this GPU: "),
    ],
)
async def test_a_kind_of_the_host_s_memory_that_is_refused_hides_no_other_and_what_follows_is_said(
    calls: list[str], advice: str
) -> None:
    failing = {"host": dict.fromkeys(calls, "CUDA_ERROR_NOT_PERMITTED")}
    findings = await check(Machine(FakeHost(1), failing=failing))
    [host] = of(findings, "host, GPU 0")
    assert worst(findings) is host.verdict is Verdict.WARNING
    assert host.message.count("not possible") == len(calls) and host.message.count("GB/s") == 3 - len(calls)
    assert host.advice.startswith(advice)
    assert ("the router prefills where it decodes" in host.advice) == ("cuda_ipc" in advice)


@pytest.mark.parametrize("code", [-11, 3])
@pytest.mark.parametrize(
    ("probe", "check_name", "verdict"),
    [
        ("survey", "GPUs", Verdict.WRONG),
        ("triton", "Triton", Verdict.WARNING),
        ("lend", "hand-offs to 0", Verdict.WRONG),
        ("open", "hand-offs to 0", Verdict.WRONG),
        ("host", "host, GPU 0", Verdict.WARNING),
    ],
)
async def test_a_process_that_dies_is_a_finding(probe: str, check_name: str, verdict: Verdict, code: int) -> None:
    findings = await check(Machine(FakeHost(1), ends={probe: code}))
    [found] = of(findings, check_name)
    assert found.verdict is verdict
    assert ("was killed by SIGSEGV" if code < 0 else "ended with exit code 3") in found.message
    assert findings[-1].check == "Triton"


@pytest.mark.parametrize("probe", ["survey", "triton", "lend", "open", "host"])
async def test_a_process_that_hangs_is_a_finding(probe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_offs, "_PROBE_TIMEOUT_S", 0.2)
    findings = await check(Machine(FakeHost(1), hangs={probe}))
    assert any("did not end in time" in finding.message for finding in findings)
    assert findings[-1].check == "Triton"


async def test_probes_say_what_they_begin() -> None:
    machine = Machine(FakeHost(1))
    await check(machine)
    assert machine.steps["open"] == [
        "initialising the driver",
        "opening the memory that was lent",
        "copying it whole",
        "compiling and loading the kernel",
        "copying pieces of 1024 bytes by the copy engine",
        "copying pieces of 1024 bytes by the kernel",
        "copying pieces of 3072 bytes by the copy engine",
        "copying pieces of 3072 bytes by the kernel",
    ]
    assert machine.steps["triton"] == ["importing Triton and compiling the kernel", "running the kernel"]
    assert [len(machine.steps[probe]) for probe in ("survey", "lend", "host")] == [1, 1, 4]


@pytest.mark.parametrize(("code", "end"), [(None, "did not end in time"), (-11, "was killed by SIGSEGV")])
def test_what_a_process_was_at_when_it_was_late_or_died_is_said(code: int | None, end: str) -> None:
    steps = ['{"at": "copying it whole"}', '{"is_right": true, "gb_s": 7.0}', '{"at": "loading the kernel"}']
    lines = ("from Triton", *(MARK + step for step in steps))
    found = answer(ProgramRun(code, lines))
    assert found.findings == ({"is_right": True, "gb_s": 7.0},)
    assert found.failure == f"the process that tried it {end} while loading the kernel: from Triton"
    [pieces] = judge_pieces(0, {0: found})
    assert "while loading the kernel" in pieces.message


async def test_what_there_is_no_time_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(FakeHost(2))

    def start(*arguments: Any) -> AbstractAsyncContextManager[Program]:
        monkeypatch.setattr(hand_offs, "_PROBE_TIMEOUT_S", 0.0)  # the first one is begun, and the time is over
        return machine.start(*arguments)

    findings = await check_hand_offs(timeout_s=60.0, start=start)
    late = [finding for finding in findings if "not tried: the 60 s were over" in finding.message]
    assert {finding.advice for finding in late} == {"give it longer with --timeout"}
    checks = [finding.check for finding in late]
    assert checks == [
        "hand-offs to 0",
        "hand-offs to 0",
        "hand-offs to 1",
        "hand-offs to 1",
        "host, GPU 0",
        "host, GPU 1",
        "Triton",
    ]
    assert len(machine.drivers) == 1


async def test_without_the_bindings_only_triton_is_asked(packages: dict[str, str]) -> None:
    packages.clear()
    machine = Machine(FakeHost(0))
    bindings, triton = await check(machine)
    assert machine.probes == ["triton"]
    assert (bindings.verdict, bindings.advice) == (Verdict.WRONG, "pip install 'quartet[cuda]'")
    assert triton.verdict is Verdict.OK
    assert triton.message == ("3.9.0, compiles the kernel that pulls blocks, for sm_90; there is no GPU to run it on")


@pytest.mark.parametrize("failing", [{"num_devices": "CUDA_ERROR_NO_DEVICE"}, {}])
async def test_a_host_without_gpus_says_so(failing: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    [gpus] = of(await check(Machine(FakeHost(0), failing={"survey": failing})), "GPUs")
    assert gpus.verdict is Verdict.WRONG
    assert gpus.message.startswith("none: ") and "CUDA_VISIBLE_DEVICES is '-1'" in gpus.message


def test_a_gpu_s_line_has_its_memory_and_the_driver(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12"
    )
    survey = Survey("13.0", ["NVIDIA H200"], [150 << 30], [[True]])
    [line] = judge_gpus(survey, hand_offs._driver_version(file))
    assert line.message == "NVIDIA H200, 150.0 GiB, driver 580.159.04, CUDA up to 13.0"
    [line] = judge_gpus(survey, hand_offs._driver_version(tmp_path / "none"))
    assert line.message == "NVIDIA H200, 150.0 GiB, CUDA up to 13.0"


async def test_triton_is_imported_whatever_its_package_says_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('libstdc++ is too old')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken = judge_triton(await Probes(60.0).ask("triton"))
    assert (broken.verdict, broken.message) == (
        Verdict.WARNING,
        "no kernel pulls blocks: ImportError: libstdc++ is too old",
    )
    (tmp_path / "triton.py").write_text("import os; os.abort()")
    crashed = judge_triton(await Probes(60.0).ask("triton"))
    assert crashed.verdict is Verdict.WARNING and "SIGABRT" in crashed.message


def test_a_line_that_was_cut_off_is_none() -> None:
    found = answer(ProgramRun(-9, (MARK + '{"kind": "pinned", "is_right": true}', MARK + '{"kind": "wri')))
    assert [finding["kind"] for finding in found.findings] == ["pinned"]
    assert "was killed by SIGKILL" in found.failure


@pytest.mark.parametrize(
    ("seen", "only"), [(None, ["0", "1"]), ("2, 5", ["2", "5"]), ("GPU-1a,MIG-2b", ["GPU-1a", "MIG-2b"])]
)
def test_a_probe_sees_one_of_the_gpus_that_we_see(
    seen: str | None, only: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert [hand_offs._only(gpu)["CUDA_VISIBLE_DEVICES"] for gpu in (0, 1)] == only


async def test_real_processes_are_ended_and_how_they_ended_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_offs, "_PROBE", (sys.executable, "-c", "import os; print('oh', flush=True); os.abort()"))
    probes = Probes(60.0)
    assert (await probes.ask("survey")).failure == "the process that tried it was killed by SIGABRT: oh"
    async with probes.lending(0, 7) as lent:
        assert lent.failure == "the process that tried it was killed by SIGABRT: oh"
    lends = f"import time; print('{MARK}' + '{{\"handle\": \"00\"}}', flush=True); time.sleep(600)"
    monkeypatch.setattr(hand_offs, "_PROBE", (sys.executable, "-c", lends))
    async with probes.lending(0, 7) as lent:
        assert lent.findings == ({"handle": "00"},)


async def test_the_command_without_a_gpu_has_a_clear_line_and_exit_code_1(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = await run_cli("doctor", "gpu", "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["verdict"]) == (1, "wrong")
    [gpus] = [finding for finding in report["findings"] if finding["check"] == "GPUs"]
    assert gpus["message"].startswith("none: cuInit: ")


@pytest.mark.gpu
async def test_the_command_on_a_real_gpu() -> None:
    async with asyncio.timeout(170):
        result = await asyncio.to_thread(CliRunner().invoke, app, ["doctor", "gpu", "--json"])
    print(result.stdout)
    findings = [
        Finding(**{**found, "verdict": Verdict(found["verdict"])}) for found in json.loads(result.stdout)["findings"]
    ]
    assert result.exit_code == 0, result.stdout
    [pulls] = of(findings, "hand-offs to 0")[:1]
    assert pulls.verdict is Verdict.OK and "from itself" in pulls.message
    [host] = of(findings, "host, GPU 0")
    assert host.message.startswith("pinned ")
    [pieces], [triton] = of(findings, "pieces to 0"), of(findings, "Triton")
    assert pieces.message.startswith("of 64 KiB and 2.25 MiB, GB/s: from itself ")
    assert triton.message.endswith("; it copies right") and "by the kernel" in pieces.message
