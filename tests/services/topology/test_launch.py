"""What a launcher refuses before it starts anything, and what is left when it has stopped."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from quartet.errors import ConfigError
from services.topology.launch import Environment, LaunchError, LocalTopology
from services.topology.topology import load_topology
from tests.certificates import CertificateAuthority
from tests.etcd_server import EtcdServer

AGG = Path(__file__).parents[3] / "configs" / "agg.yaml"


class Silent:
    """A ``LaunchObserver`` that shows nothing."""

    def log_line(self, process: str, line: str) -> None: ...

    def progress(self, message: str) -> None: ...


async def start(directory: Path, endpoint: str, *assignments: str, model_file: str = "config.json") -> LocalTopology:
    """A launcher of a model that its worker would refuse, so that nothing it starts lives on."""
    (directory / model_file).write_text("{}")
    assignments = (f"model.path={directory}", "router.port=0", "discovery.etcd.request_timeout_s=0.5", *assignments)
    environment = Environment(variables={}, num_cores=1, run_dir=directory, etcd_endpoints=(endpoint,))
    local = LocalTopology(load_topology(AGG, assignments), environment, Silent())
    try:
        async with asyncio.timeout(30):
            await local.start()
    finally:
        await local.stop()
    return local


async def test_etcd_endpoints_that_nobody_answers_are_refused_in_bounded_time_and_not_replaced(tmp_path: Path) -> None:
    # A port that takes connections and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"ETCD_ENDPOINTS: no etcd answers at {endpoint}"):
            await start(tmp_path, endpoint)


async def test_etcd_endpoints_are_used_with_the_topologys_tls(tmp_path: Path, shared_etcd: EtcdServer) -> None:
    ca_file = CertificateAuthority(tmp_path / "ca").ca_file
    # It answers without TLS only.
    with pytest.raises(ConfigError, match="ETCD_ENDPOINTS"):
        await start(tmp_path, shared_etcd.endpoint, f"discovery.etcd.ca_file={ca_file}")


async def test_etcd_endpoints_that_answer_are_used(tmp_path: Path, shared_etcd: EtcdServer) -> None:
    local = await start(tmp_path, shared_etcd.endpoint)
    assert [child.name for child in local.children] == ["decode-0", "router"]


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
async def test_a_model_that_is_not_here_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=message):
        await start(tmp_path / "run", "127.0.0.1:1", f"model.path={path}")


async def test_the_name_of_a_repository_is_for_its_worker_to_look_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    # It gets as far as to ask for etcd.
    with pytest.raises(ConfigError, match="ETCD_ENDPOINTS"):
        await start(tmp_path / "run", "127.0.0.1:1", "model.path=some/repository")


async def test_workers_of_one_gpu_start_one_after_the_other_and_each_sees_its_gpus(
    tmp_path: Path, shared_etcd: EtcdServer
) -> None:
    """The first one's model is refused: the second one is never started beside what does not run."""
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


class FirstLine(Silent):
    """Hears what the worker says first."""

    def __init__(self) -> None:
        self.line: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def log_line(self, process: str, line: str) -> None:
        if process == "decode-0" and not self.line.done():
            self.line.set_result(line)


async def test_what_a_worker_that_had_to_be_killed_started_ends_with_it(
    tmp_path: Path, shared_etcd: EtcdServer
) -> None:
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
        async with asyncio.timeout(30):
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
