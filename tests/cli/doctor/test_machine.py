"""``quartet doctor`` on this machine, with a real etcd, a router, and programs that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cli.doctor import gpus, network
from cli.doctor.finding import Finding, Verdict, check_up, ok, run_program, worst
from cli.doctor.machine import check_shared_memory
from cli.doctor.network import EtcdCheck, PortsCheck, ask_facts, is_free
from quartet.discovery.etcd_client import EtcdConfig
from services.topology.launch import find_etcd
from tests.certificates import CertificateAuthority
from tests.cli.conftest import RunCli
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter, worker_status
from tests.etcd_server import EtcdServer
from tests.stopwatch import Stopwatch

_HANG = "#!/bin/sh\ntrap '' TERM\nexec sleep 600\n"


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port with a listener that never sends anything."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def _program(directory: Path, name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program of that name first on the PATH."""
    file = directory / name
    file.write_text(source)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


async def test_a_whole_report_names_everything_and_is_bounded(
    run_cli: RunCli, shared_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCD_ENDPOINTS", shared_etcd.endpoint)
    result = await run_cli("doctor", "--json")
    report = json.loads(result.stdout)
    checks = [finding["check"] for finding in report["findings"]]
    wanted = ["Python", "grpcio", "protobuf", "etcd", "port 50050", "CPUs", "open files", "memory", "/dev/shm"]
    assert [check for check in wanted if check not in checks] == []
    [etcd] = [finding for finding in report["findings"] if finding["check"] == "etcd"]
    assert etcd["message"].startswith(f"{shared_etcd.endpoint} answers; version 3.")
    assert result.exit_code == (1 if report["verdict"] == "wrong" else 0)


async def test_an_etcd_that_was_named_and_is_not_there_is_wrong(run_cli: RunCli, free_port: Callable[[], int]) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    result = await run_cli("doctor", "--etcd", endpoint)
    assert result.exit_code == 1
    line = next(line for line in result.stdout.splitlines() if line.startswith("wrong") and "etcd" in line)
    assert f"{endpoint} does not answer" in line


async def test_half_a_certificate_is_refused_by_the_option(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("")
    result = await run_cli("doctor", "--etcd-cert", str(tmp_path / "cert.pem"))
    assert result.exit_code == 1
    assert "--etcd-cert, --etcd-key" in result.stderr
    result = await run_cli("doctor", "--etcd-ca", str(tmp_path / "nothing.pem"))
    assert result.exit_code == 1
    assert "--etcd-ca: there is no file" in result.stderr


async def test_certificates_without_https_still_mean_tls(
    run_cli: RunCli, shared_etcd: EtcdServer, tmp_path: Path
) -> None:
    files = CertificateAuthority(tmp_path).issue("mine")
    options = ("--etcd-cert", str(files.cert_file), "--etcd-key", str(files.key_file))
    # It answers in the clear only.
    result = await run_cli("doctor", "--etcd", shared_etcd.endpoint, *options)
    assert f"{shared_etcd.endpoint} does not answer" in result.stdout
    result = await run_cli("doctor", "--etcd", f"http://{shared_etcd.endpoint}", *options)
    assert result.exit_code == 1
    assert "--etcd: endpoints: " in result.stderr


async def test_each_endpoint_is_asked_by_itself(shared_etcd: EtcdServer, free_port: Callable[[], int]) -> None:
    absent = f"127.0.0.1:{free_port()}"
    findings = await EtcdCheck(EtcdConfig(endpoints=(absent, f"http://{shared_etcd.endpoint}")), is_chosen=True)()
    assert [(finding.check, finding.verdict) for finding in findings] == [
        ("etcd", Verdict.WRONG), ("etcd", Verdict.OK), ("clock", Verdict.OK)
    ]  # fmt: skip


@pytest.mark.usefixtures("etcd_binary")
async def test_without_etcd_the_finding_names_the_one_that_would_be_started(free_port: Callable[[], int]) -> None:
    config = EtcdConfig(endpoints=(f"127.0.0.1:{free_port()}",))
    [finding] = await EtcdCheck(config, is_chosen=False)()
    assert finding.verdict is Verdict.OK
    assert f"{find_etcd()}" in finding.message


async def test_without_any_etcd_it_is_a_warning(free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "find_etcd", lambda: None)
    [finding] = await EtcdCheck(EtcdConfig(endpoints=(f"127.0.0.1:{free_port()}",)), is_chosen=False)()
    assert finding.verdict is Verdict.WARNING
    assert "make tools" in finding.advice


async def test_a_server_that_says_nothing_is_no_etcd_and_costs_bounded_time(silent_port: int) -> None:
    config = EtcdConfig(endpoints=(f"127.0.0.1:{silent_port}",), request_timeout_s=0.5)
    stopwatch = Stopwatch()
    [finding] = await EtcdCheck(config, is_chosen=True)()
    assert finding.verdict is Verdict.WRONG
    assert await ask_facts(replace(config, endpoints=(f"127.0.0.1:{silent_port}",))) == network.EtcdFacts()
    assert stopwatch.seconds < 10


async def test_free_ports_are_fine(free_port: Callable[[], int]) -> None:
    router, etcd = await PortsCheck(free_port(), free_port())()
    assert (router.verdict, router.message) == (Verdict.OK, "free, for the router")
    assert (etcd.verdict, etcd.message) == (Verdict.OK, "free, for etcd")


async def test_the_finding_names_the_workers_of_a_router_that_serves(
    start_router: StartRouter, shared_etcd: EtcdServer
) -> None:
    router = FakeRouter()
    router.workers = [worker_status("decode-0"), worker_status("decode-1")]
    port = int((await start_router(router)).split(":")[1])
    finding, etcd = await PortsCheck(port, int(shared_etcd.endpoint.split(":")[1]))()
    assert finding.verdict is Verdict.WARNING
    assert "a Quartet router serves there, with 2 workers" in finding.message
    assert "an etcd answers" in etcd.message


async def test_a_stranger_on_the_routers_port_is_a_warning(silent_port: int, free_port: Callable[[], int]) -> None:
    assert not is_free(silent_port)
    finding, _ = await PortsCheck(silent_port, free_port())()
    assert finding.verdict is Verdict.WARNING
    assert "no Quartet router answers" in finding.message
    assert "--router-port" in finding.advice


async def test_pools_pass_from_process_to_process_here() -> None:
    shm, pools = await check_shared_memory()
    assert shm.check == "/dev/shm"
    assert pools.verdict is Verdict.OK


async def test_a_kernel_without_sealed_memfd_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", refuse)
    _, pools = await check_shared_memory()
    assert pools.verdict is Verdict.WARNING
    assert "Operation not permitted" in pools.message


async def test_a_driver_that_hangs_is_wrong_and_delays_no_other_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _program(tmp_path, "nvidia-smi", _HANG, monkeypatch)
    monkeypatch.setattr(gpus, "_DRIVER_TIMEOUT_S", 0.3)
    stopwatch = Stopwatch()
    [finding] = await gpus.check_gpus()
    assert stopwatch.seconds < 10
    assert finding.verdict is Verdict.WRONG
    assert "nvidia-smi did not end in time" in finding.message


async def test_a_driver_that_fails_is_reported_in_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    _program(tmp_path, "nvidia-smi", f'#!/bin/sh\necho "{failure}"\nexit 9\n', monkeypatch)
    [finding] = await gpus.check_gpus()
    assert finding.verdict is Verdict.WRONG
    assert finding.message == f"nvidia-smi ended with exit code 9: {failure}"


async def test_a_program_is_ended_with_what_it_started(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    ended = asyncio.Event()
    try:
        script = f"exec 3>{fifo}; sleep 600 & echo begun; wait"
        run = await run_program(["/bin/sh", "-c", script], timeout_s=3)
        assert (run.exit_code, run.lines) == (None, ("begun",))
        # Readable without a byte: no process holds the other end any more.
        asyncio.get_running_loop().add_reader(reader, ended.set)
        async with asyncio.timeout(60):
            await ended.wait()
        assert os.read(reader, 1) == b""
    finally:
        asyncio.get_running_loop().remove_reader(reader)
        os.close(reader)


async def test_a_check_that_hangs_or_fails_is_a_finding_among_the_others() -> None:
    async def hang() -> Sequence[Finding]:
        await asyncio.Event().wait()
        return []

    async def fail() -> Sequence[Finding]:
        raise KeyError("surprise")

    async def pass_by() -> Sequence[Finding]:
        return [ok("fine", "it is")]

    findings = await check_up({"hang": hang, "fail": fail, "fine": pass_by}, timeout_s=0.2)
    assert [(finding.check, finding.verdict) for finding in findings] == [
        ("hang", Verdict.WRONG), ("fail", Verdict.WRONG), ("fine", Verdict.OK)
    ]  # fmt: skip
    assert worst(findings) is Verdict.WRONG
    assert worst([]) is Verdict.OK
