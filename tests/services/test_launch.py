"""What a launcher refuses before it starts anything."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from quartet.errors import ConfigError
from services.launch import Environment, LocalTopology
from services.topology import load_topology
from tests.certificates import CertificateAuthority
from tests.etcd_server import EtcdServer

AGG = Path(__file__).parents[2] / "configs" / "agg.yaml"


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
        async with asyncio.timeout(10):
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
