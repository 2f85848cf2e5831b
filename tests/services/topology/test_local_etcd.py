"""Which etcd a topology uses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from quartet.discovery.etcd_client import EtcdConfig
from services.topology.launch import etcd_answers, etcd_command, own_etcd
from tests.etcd_server import EtcdServer


async def test_an_etcd_that_serves_answers(shared_etcd: EtcdServer, free_port: Callable[[], int]) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    assert await etcd_answers(EtcdConfig(endpoints=(shared_etcd.endpoint,)))
    assert await etcd_answers(EtcdConfig(endpoints=(nobody, shared_etcd.endpoint)))
    assert not await etcd_answers(EtcdConfig(endpoints=(nobody,)))


def test_an_own_etcd_is_on_loopback_and_without_tls() -> None:
    config = own_etcd(EtcdConfig(endpoints=("https://elsewhere:2379",), ca_file=Path("ca.pem"), namespace="ns"))
    [endpoint] = config.endpoints
    assert endpoint.startswith("127.0.0.1:")
    assert (config.ca_file, config.namespace) == (None, "ns")
    command = etcd_command(Path("/bin/etcd"), config, Path("/data"))
    assert command[0] == "/bin/etcd"
    assert f"--listen-client-urls=http://{endpoint}" in command
    assert all("0.0.0.0" not in argument for argument in command)


def test_a_port_that_one_process_has_is_given_to_no_other(free_port: Callable[[], int]) -> None:
    port = free_port()
    few = f"it._PORTS, it._NUM_PORTS_TRIED = [{port}], 1"
    code = f"from services.topology import launch as it; {few}; print(it.free_port())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert other.returncode != 0
    assert "no free port in 1 tries" in other.stderr
