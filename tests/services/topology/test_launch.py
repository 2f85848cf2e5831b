"""What a launcher refuses before it starts anything, what it finds on the host, and what is left when it ends."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from quartet.discovery.base import Role
from quartet.discovery.create import DiscoveryConfig, DiscoveryKind, create_registry
from quartet.discovery.etcd_access import EtcdTls
from quartet.discovery.etcd_client import EtcdConfig
from quartet.discovery.file import FileConfig
from quartet.errors import ConfigError
from quartet.streams.signed_start import SigningKeys
from router.process import _LAST_WORDS_S
from router.usage_log import CLOSE_TIMEOUT_S
from services.topology import launch
from services.topology.certificates import CertificateFiles
from services.topology.launch import (
    SETTINGS_FILE,
    Environment,
    LaunchError,
    LocalTopology,
    draw_signing_key,
    etcd_answers,
    etcd_command,
    make_run_directory,
    own_etcd,
    wait_announced,
)
from services.topology.pacing import Time
from services.topology.topology import ProcessPlan, load_topology
from tests.certificates import CertificateAuthority
from tests.discovery.records import make_record
from tests.e2e.fork_server import ForkServer
from tests.etcd_server import EtcdServer

TIMEOUT_S = 90.0
AGG = Path(__file__).parents[3] / "configs" / "agg.yaml"


class Silent:
    """A ``LaunchObserver`` that shows nothing."""

    def log_line(self, process: str, line: str) -> None: ...

    def progress(self, message: str) -> None: ...


class Recorder(Silent):
    """Keeps what was reported."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def progress(self, message: str) -> None:
        self.lines.append(message)


async def start(directory: Path, endpoint: str, *assignments: str, model_file: str = "config.json") -> LocalTopology:
    """A launcher of a model that its worker would refuse, so that nothing it starts lives on."""
    (directory / model_file).write_text("{}")
    assignments = (f"model.path={directory}", "router.port=0", "discovery.etcd.request_timeout_s=0.5", *assignments)
    environment = Environment(variables={}, num_cores=1, run_dir=directory, etcd_endpoints=(endpoint,))
    local = LocalTopology(load_topology(AGG, assignments), environment, Silent())
    try:
        async with asyncio.timeout(90):
            await local.start()
    finally:
        await local.stop()
    return local


async def test_etcd_endpoints_that_do_not_answer_are_refused_in_bounded_time_and_not_replaced(tmp_path: Path) -> None:
    # A port that takes connections and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"ETCD_ENDPOINTS: no etcd answers at {endpoint}"):
            await start(tmp_path, endpoint)


async def test_etcd_endpoints_are_used_with_the_topologys_tls(tmp_path: Path, shared_etcd: EtcdServer) -> None:
    ca_file = CertificateAuthority(tmp_path / "ca").ca_file
    # It answers without TLS only.
    with pytest.raises(ConfigError, match="ETCD_ENDPOINTS"):
        await start(tmp_path, shared_etcd.endpoint, f"discovery.etcd.tls.ca_file={ca_file}")
    (tmp_path / "other").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^ETCD_ENDPOINTS: endpoints: https://.* takes the setting tls"):
        await start(tmp_path / "other", f"https://{shared_etcd.endpoint}")


async def test_etcd_endpoints_that_answer_are_used(tmp_path: Path, shared_etcd: EtcdServer) -> None:
    local = await start(tmp_path, shared_etcd.endpoint)
    assert [child.name for child in local.children] == ["decode-0", "router"]


async def test_the_engine_torch_without_pytorch_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("torch", "mock"):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=r"decode-0 needs PyTorch.*pip install 'quartet\[torch\]'.*--engine mock"):
        await start(tmp_path / "torch", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="ETCD_ENDPOINTS"):  # the next step
        await start(tmp_path / "mock", "127.0.0.1:1", "engine.kind=mock", model_file="tokenizer.json")


async def test_without_an_etcd_to_start_processes_find_each_other_by_files(
    tmp_path: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "find_etcd", lambda: None)
    (tmp_path / "config.json").write_text("{}")
    assignments = [f"model.path={tmp_path}", "router.port=0", f"discovery.etcd.endpoints=[127.0.0.1:{free_port()}]"]
    environment = Environment(variables={}, num_cores=1, run_dir=tmp_path / "run")
    environment.run_dir.mkdir()
    shown = Recorder()
    local = LocalTopology(load_topology(AGG, assignments), environment, shown)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await local.start()
            settings = [yaml.safe_load(file.read_text()) for file in environment.run_dir.glob("*.yaml")]
    finally:
        await local.stop()
    directory = str(environment.run_dir / "discovery")
    assert [each["discovery"]["kind"] for each in settings] == ["file", "file"]
    assert {(each["discovery"]["file"]["directory"], each["discovery"]["file"]["namespace"]) for each in settings} == {
        (directory, "agg")
    }
    assert any("no etcd to start" in line and directory in line for line in shown.lines)


async def test_a_mock_engine_needs_a_tokenizer_and_no_more(tmp_path: Path, shared_etcd: EtcdServer) -> None:
    for name in ("bare", "whole"):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=r"model.path: .* holds no tokenizer\.json"):
        await start(tmp_path / "bare", shared_etcd.endpoint, "engine.kind=mock")
    endpoint = shared_etcd.endpoint
    local = await start(tmp_path / "whole", endpoint, "engine.kind=mock", model_file="tokenizer.json")
    assert [child.name for child in local.children] == ["decode-0", "router"]


@pytest.mark.parametrize(
    ("path", "message"),
    [("/no/such/model", "there is no folder /no/such/model"), ("models/tinny", "there is no folder models/tinny")],
)
async def test_a_missing_model_is_reported_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=message):
        await start(tmp_path / "run", "127.0.0.1:1", f"model.path={path}")


async def test_the_name_of_a_repository_is_left_to_its_worker_to_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    # It reaches the step that asks for etcd.
    with pytest.raises(ConfigError, match="ETCD_ENDPOINTS"):
        await start(tmp_path / "run", "127.0.0.1:1", "model.path=some/repository")


async def test_workers_of_one_gpu_start_one_after_the_other_and_each_sees_its_gpus(
    tmp_path: Path, shared_etcd: EtcdServer, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker's model is refused, so the second worker is never started."""
    monkeypatch.setattr(sys, "executable", str(fork_server.python))
    (tmp_path / "config.json").write_text("{}")
    text = f"""
        namespace: shared-gpu
        model: {{path: {tmp_path}}}
        engine: {{kind: torch}}
        router: {{port: 0}}
        share_gpus: true
        workers: [{{role: encode, gpus: [[3]]}}, {{role: decode, gpus: [[2, 3]]}}]
    """
    file = tmp_path / "topology.yaml"
    file.write_text(text)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    environment = Environment(variables={}, num_cores=1, run_dir=run_dir, etcd_endpoints=(shared_etcd.endpoint,))
    local = LocalTopology(load_topology(file), environment, Silent())
    try:
        async with asyncio.timeout(60):
            with pytest.raises(LaunchError, match="encode-0 ended with exit code 1"):
                await local.start()
        assert [child.name for child in local.children] == ["encode-0"]
    finally:
        await local.stop()


class Shown(Silent):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def progress(self, message: str) -> None:
        self.shown.append(message)


class FakeTime:
    """Stands still but for sleeps, which are over at once."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    async def sleep(self, delay_s: float) -> None:
        self.slept.append(delay_s)
        self.now_s += delay_s


async def start_short(
    directory: Path, text: str, cpus: tuple[int, ...] = (), log_dir: Path | None = None
) -> tuple[LocalTopology, FakeTime, Shown]:
    """A launcher whose workers print on which CPUs they run, and end."""
    (directory / "config.json").write_text("{}")
    file = directory / "topology.yaml"
    discovery = f"discovery: {{kind: file, file: {{directory: {directory / 'discovery'}}}}}"
    file.write_text(f"namespace: short\nmodel: {{path: {directory}}}\n{discovery}\n{dedent(text)}")
    run_dir, clock, observer = directory / "run", FakeTime(), Shown()
    run_dir.mkdir()
    environment = Environment(variables={}, num_cores=1, run_dir=run_dir, cpus=cpus, log_dir=log_dir)
    local = LocalTopology(
        load_topology(file, ["router.port=0"]),
        environment,
        observer,
        adapt=lambda plan: replace(plan, module="tests.services.topology.short_worker"),
        clock=Time(now_s=lambda: clock.now_s, sleep=clock.sleep),
    )
    try:
        await local.start()
    except ConfigError:
        await local.stop()
        raise
    return local, clock, observer


async def test_workers_of_tensorrt_llm_start_apart_and_so_they_do_again(tmp_path: Path) -> None:
    text = """
        trtllm_start_interval_s: 3
        workers:
          - {role: decode, replicas: 2, overrides: {engine: {kind: trtllm}}}
          - {role: prefill}
          - {role: prefill, overrides: {engine: {kind: trtllm}}}
    """
    local, clock, observer = await start_short(tmp_path, text)
    try:
        assert clock.slept == [3.0, 3.0]
        waited = [message.partition(" starts in ")[0] for message in observer.shown if "starts in 3 s" in message]
        assert waited == ["decode-1", "prefill-1"]
        clock.now_s += 1.0
        names = ("decode-0", "prefill-0", "decode-1")
        await asyncio.gather(*(child.wait() for child in local.children if child.name in names))
        # Several at once, as after a fault of the host.
        await asyncio.gather(*map(local.restart, names))
        assert clock.slept == [3.0, 3.0, 2.0, 3.0]
    finally:
        await local.stop()


async def test_other_workers_and_those_without_an_interval_start_at_once(tmp_path: Path) -> None:
    text = "trtllm_start_interval_s: 0\nworkers: [{role: decode, replicas: 2, overrides: {engine: {kind: trtllm}}}]"
    local, clock, _ = await start_short(tmp_path, text)
    await local.stop()
    assert clock.slept == []


async def test_workers_get_cpus_of_their_own_in_turn_and_none_gets_more_than_there_are(tmp_path: Path) -> None:
    text = "workers: [{role: decode, replicas: 2, limits: {cpus: 1}}, {role: prefill}]"
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    local, _, _ = await start_short(tmp_path, text, cpus)
    try:
        workers = [child for child in local.children if child.name != "router"]
        await asyncio.gather(*(child.wait() for child in workers))
        seen = {child.name: "\n".join(child.last_lines) for child in workers}
        assert seen == {
            "decode-0": f"[{cpus[0]}]",
            "decode-1": f"[{cpus[1 % len(cpus)]}]",
            "prefill-0": str(list(cpus)),
        }
    finally:
        await local.stop()
    (tmp_path / "second").mkdir()
    with pytest.raises(ConfigError, match=r"^limits\.cpus: decode-0 is to have 9, and this host has 2 to give"):
        await start_short(tmp_path / "second", "workers: [{role: decode, limits: {cpus: 9}}]", (0, 1))


async def test_output_and_settings_are_kept_where_the_user_says(tmp_path: Path) -> None:
    kept = tmp_path / "new" / "logs"
    kept.mkdir(parents=True)
    (kept / "decode-0.log").write_text("earlier\n")
    local, _, _ = await start_short(tmp_path, "workers: [{role: decode, overrides: {drain_timeout_s: 7}}]", (), kept)
    try:
        [worker] = [child for child in local.children if child.name == "decode-0"]
        await worker.wait()
        await (await local.restart("decode-0")).wait()
    finally:
        await local.stop()
    settings = yaml.safe_load((kept / SETTINGS_FILE).read_text())
    assert set(settings) == {"decode-0", "router"}
    assert settings["decode-0"]["drain_timeout_s"] == 7
    line = f"{sorted(os.sched_getaffinity(0))}\n"
    # An earlier run's stays, and the second start appends.
    assert (kept / "decode-0.log").read_text() == f"earlier\n{line}{line}"


async def test_logs_that_cannot_be_kept_are_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError, match=r"^--log-dir: cannot write .*taken/settings\.yaml"):
        await start_short(tmp_path, "workers: [{role: decode}]", (), tmp_path / "taken")


async def test_a_log_that_cannot_be_written_is_reported_once_and_ends_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "logs"
    (kept / "decode-0.log").mkdir(parents=True)
    local, _, observer = await start_short(tmp_path, "workers: [{role: decode}]", (), kept)
    try:
        await local.children[0].wait()
        await (await local.restart("decode-0")).wait()
    finally:
        await local.stop()
    assert len([message for message in observer.shown if "no more lines are kept" in message]) == 1
    assert list(local.children[0].last_lines)


class FirstLine(Silent):
    """Keeps what the worker says first."""

    def __init__(self) -> None:
        self.line: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def log_line(self, process: str, line: str) -> None:
        if process == "decode-0" and not self.line.done():
            self.line.set_result(line)


async def test_processes_started_by_a_killed_worker_end_with_it(tmp_path: Path, shared_etcd: EtcdServer) -> None:
    (tmp_path / "config.json").write_text("{}")
    observer = FirstLine()
    topology = load_topology(AGG, (f"model.path={tmp_path}", "router.port=0", "drain_timeout_s=0.1"))
    environment = Environment(variables={}, num_cores=1, run_dir=tmp_path, etcd_endpoints=(shared_etcd.endpoint,))
    local = LocalTopology(
        topology,
        environment,
        observer,
        adapt=lambda plan: replace(plan, module="tests.services.topology.stubborn_worker"),
    )
    try:
        async with asyncio.timeout(90):
            await local.start()
            line = await observer.line
        assert line.startswith("started "), line
        descriptor = os.pidfd_open(int(line.removeprefix("started ")))
    finally:
        await local.stop()
    poll = select.poll()  # select.select takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    try:
        assert poll.poll(10_000), "it still runs"
    finally:
        os.close(descriptor)


async def test_a_router_that_still_writes_usage_records_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tmp_path / "records"
    settings = {
        "usage_log": str(records),
        "late_s": 0.1 + launch._EXIT_TIMEOUT_S + 0.5,
    }  # longer than other processes get
    late = ProcessPlan(
        name="router", role=Role.ROUTER, module="tests.services.topology.late_router", settings=settings, environment={}
    )
    monkeypatch.setattr(launch, "plan_routers", lambda _topology: [late])
    local, _, _ = await start_short(tmp_path, "drain_timeout_s: 0.1\nworkers: [{role: decode}]")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            [router] = [child for child in local.children if child.name == "router"]
            while not router.last_lines:  # noqa: ASYNC110 - of a process
                await asyncio.sleep(0.01)
    finally:
        await local.stop()
    assert records.read_text() == "written"


def test_a_router_gets_more_time_for_its_records_than_it_takes() -> None:
    # The second beyond: it drains for half a second longer than it says, closes the rest and exits.
    assert launch._EXIT_TIMEOUT_S + launch._RECORDS_TIMEOUT_S >= _LAST_WORDS_S + CLOSE_TIMEOUT_S + 1.0


async def test_routers_get_the_tenants_of_a_changed_topology_and_nothing_else_of_it(tmp_path: Path) -> None:
    local, _, _ = await start_short(tmp_path, "workers: [{role: decode}]")
    try:
        path = tmp_path / "run" / "router.yaml"
        before = yaml.safe_load(path.read_text())
        for tenants in ({"acme": {"requests_per_minute": 1}}, {"*": {"weight": 2}}):
            changed = load_topology(tmp_path / "topology.yaml", ["drain_timeout_s=9"])
            overrides = {"tenants": tenants, "trusted_gateways": ["g"], "max_request_timeout_s": 1}
            local.use_tenants(replace(changed, router=replace(changed.router, overrides=overrides)))
            assert yaml.safe_load(path.read_text()) == {**before, "tenants": tenants, "trusted_gateways": ["g"]}
        local.use_tenants(load_topology(tmp_path / "topology.yaml"))
        assert yaml.safe_load(path.read_text()) == before
        inode = path.stat().st_ino
        local.use_tenants(load_topology(tmp_path / "topology.yaml"))
        assert path.stat().st_ino == inode, "a file that would be the same is left alone"
    finally:
        await local.stop()


async def test_it_waits_for_the_last_of_them(tmp_path: Path) -> None:
    discovery = DiscoveryConfig(kind=DiscoveryKind.FILE, file=FileConfig(directory=tmp_path))
    registry = create_registry(discovery)
    await registry.register(make_record("encode-0"))
    waiting = asyncio.create_task(wait_announced(discovery, ["encode-0", "decode-0"]))
    async with asyncio.timeout(TIMEOUT_S):
        await wait_announced(discovery, ["encode-0"])
    assert not waiting.done()
    await registry.register(make_record("decode-0"))
    async with asyncio.timeout(TIMEOUT_S):
        await waiting
    await registry.close()


async def test_a_registry_that_is_not_there_yet_is_waited_for(etcd: EtcdServer) -> None:
    discovery = DiscoveryConfig(etcd=EtcdConfig(endpoints=(etcd.endpoint,), request_timeout_s=0.5))
    registry = create_registry(discovery)
    etcd.kill()
    waiting = asyncio.create_task(wait_announced(discovery, ["decode-0"]))
    await asyncio.wait([waiting], timeout=1.0)
    assert not waiting.done()
    etcd.start()
    await registry.register(make_record("decode-0"))
    async with asyncio.timeout(TIMEOUT_S):
        await waiting
    await registry.close()


async def test_an_etcd_that_serves_answers(shared_etcd: EtcdServer, free_port: Callable[[], int]) -> None:
    silent = f"127.0.0.1:{free_port()}"
    assert await etcd_answers(EtcdConfig(endpoints=(shared_etcd.endpoint,)))
    assert await etcd_answers(EtcdConfig(endpoints=(silent, shared_etcd.endpoint)))
    assert not await etcd_answers(EtcdConfig(endpoints=(silent,)))


def test_an_own_etcd_is_on_loopback_and_without_tls() -> None:
    tls = EtcdTls(ca_file=Path("ca.pem"))
    config = own_etcd(EtcdConfig(endpoints=("https://elsewhere:2379",), tls=tls, namespace="ns"))
    [endpoint] = config.endpoints
    assert endpoint.startswith("127.0.0.1:")
    assert (config.tls, config.namespace) == (None, "ns")
    command = etcd_command(Path("/bin/etcd"), config, Path("/data"))
    assert command[0] == "/bin/etcd"
    assert f"--listen-client-urls=http://{endpoint}" in command
    assert all("0.0.0.0" not in argument for argument in command)


def test_an_own_etcd_with_certificates_asks_its_clients_and_peers_for_one() -> None:
    certificates = CertificateFiles(ca_file=Path("ca"), cert_file=Path("etcd.pem"), key_file=Path("etcd.key"))
    config = own_etcd(EtcdConfig(), EtcdTls())
    options = dict(part[2:].split("=", 1) for part in etcd_command(Path("etcd"), config, Path("d"), certificates)[1:])
    urls = [url for name, url in options.items() if name.endswith("urls")]
    assert len(urls) == 4 and all(url.startswith("https://127.0.0.1:") for url in urls)
    assert options["client-cert-auth"] == options["peer-client-cert-auth"] == "true"
    assert options["trusted-ca-file"] == options["peer-trusted-ca-file"] == "ca"
    assert options["peer-cert-allowed-cn"] == "etcd"


async def test_with_tls_an_etcd_in_the_clear_is_not_used(tmp_path: Path, shared_etcd: EtcdServer) -> None:
    with pytest.raises(ConfigError, match=r"^ETCD_ENDPOINTS: .*discovery\.etcd\.tls"):
        await start(tmp_path, shared_etcd.endpoint, "tls=true")


async def test_certificates_without_their_package_are_a_configuration_error(
    tmp_path: Path, shared_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "services.topology.certificates", raising=False)
    with pytest.raises(ConfigError, match=r"tls: .*cryptography.*pip install 'quartet\[tls\]'"):
        await start(tmp_path, shared_etcd.endpoint, "tls=true")


def test_a_port_that_one_process_has_is_given_to_no_other(free_port: Callable[[], int]) -> None:
    port = free_port()
    few = f"it._PORTS, it._NUM_PORTS_TRIED = [{port}], 1"
    code = f"from services.topology import launch as it; {few}; print(it.free_port())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert other.returncode != 0
    assert "no free port in 1 tries" in other.stderr


def test_only_what_dead_topologies_left_is_removed(tmp_path: Path) -> None:
    made_by_dead = [
        sys.executable,
        "-c",
        f"from services.topology.launch import make_run_directory as make\n"
        f"from pathlib import Path\nprint(make(Path({str(tmp_path)!r}), 'old'))",
    ]
    root = Path(__file__).parents[3]
    dead = Path(subprocess.run(made_by_dead, cwd=root, check=True, capture_output=True, text=True).stdout.strip())
    assert dead.is_dir()
    stranger = tmp_path / "model-99999999"
    stranger.mkdir()

    mine = make_run_directory(tmp_path, "some-name")
    assert mine == tmp_path / f"some-name-{os.getpid()}"
    assert not dead.exists()
    assert stranger.is_dir()


def test_the_run_directory_of_an_earlier_process_of_the_same_id_is_cleared(tmp_path: Path) -> None:
    (make_run_directory(tmp_path, "some") / "router.yaml").touch()
    assert not (make_run_directory(tmp_path, "some") / "router.yaml").exists()


def test_a_directory_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot make a directory in .*file"):
        make_run_directory(tmp_path / "file", "some")


def test_only_its_owner_can_read_a_drawn_key_and_it_signs_starts(tmp_path: Path) -> None:
    path = draw_signing_key(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = SigningKeys(path).signing_key
    assert len(key.secret) == 32
    assert key.secret.hex() not in repr(key)


def test_no_key_is_drawn_over_another(tmp_path: Path) -> None:
    content = draw_signing_key(tmp_path).read_text()
    with pytest.raises(FileExistsError):
        draw_signing_key(tmp_path)
    assert (tmp_path / "signing_keys").read_text() == content


def make_program(directory: Path, *, mode: int = 0o755) -> Path:
    directory.mkdir(parents=True)
    program = directory / "etcd"
    program.write_text("#!/bin/sh\n")
    program.chmod(mode)
    return program


def test_the_own_binary_is_preferred_to_the_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = make_program(tmp_path / "own")
    on_path = make_program(tmp_path / "path")
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setattr(launch, "TOOLS_DIR", own.parent)
    assert launch.find_etcd() == own


def test_the_path_serves_where_the_own_file_cannot_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = make_program(tmp_path / "own", mode=0o644)
    on_path = make_program(tmp_path / "path")
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setattr(launch, "TOOLS_DIR", own.parent)
    assert launch.find_etcd() == on_path


def test_a_machine_without_a_program_gives_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(launch, "TOOLS_DIR", tmp_path)
    assert launch.find_grpcurl() is None
