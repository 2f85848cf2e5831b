"""A topology on several hosts: what runs where, and how processes there listen and are dialled."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cli.app import app
from quartet.config import build
from quartet.errors import ConfigError
from router.config import RouterConfig
from services.topology.hosts import SecretFiles
from services.topology.topology import Topology, load_topology, plan_routers, plan_workers
from services.workers.config import WorkerConfig

NOBODY = 65534
TEXT = """
namespace: spread
hosts:
  left: {address: 10.0.0.1, first_port: 50100}
  right: {address: right.example.com, bind: 0.0.0.0, metrics: true}
secrets: /secrets
discovery: {etcd: {endpoints: ["10.0.0.9:2379"], user: quartet}}
engine: {kind: mock}
router: {hosts: [left], http_port: 8000}
workers:
  - {role: prefill, host: left, gpus: [[0]]}
  - {role: decode, host: left, replicas: 2}
  - {role: decode, host: right, replicas: 2, gpus: [[0], [1]]}
"""

# What differs in settings that clash.
HOSTS: dict[str, Any] = yaml.safe_load(TEXT)["hosts"]
BOTH = {"hosts": ["left", "right"]}
OVER_ROUTER = {"address": "10.0.0.1", "first_port": 50045}
OVER_HTTP = {"address": "10.0.0.1", "first_port": 7999}


def load(tmp_path: Path, *assignments: str, text: str = TEXT) -> Topology:
    file = tmp_path / "topology.yaml"
    file.write_text(text, encoding="utf-8")
    return load_topology(file, assignments)


def workers_of(topology: Topology) -> dict[str, WorkerConfig]:
    return {plan.name: build(WorkerConfig, plan.settings) for plan in plan_workers(topology, num_cores=4)}


def test_each_host_runs_its_share_under_names_that_no_other_has(tmp_path: Path) -> None:
    names = {}
    for host in ("left", "right"):
        topology = load(tmp_path, f"host={host}")
        names[host] = [plan.name for plan in [*plan_workers(topology, num_cores=4), *plan_routers(topology)]]
    assert names == {"left": ["prefill-0", "decode-0", "decode-1", "router"], "right": ["decode-2", "decode-3"]}


def test_processes_listen_on_their_hosts_address_and_ports(tmp_path: Path) -> None:
    topology = load(tmp_path, "host=left")
    worker = workers_of(topology)["decode-1"]
    assert (worker.server.address, worker.advertise_host) == ("10.0.0.1:50109", "10.0.0.1")
    assert (worker.events_address, worker.http_address) == ("10.0.0.1:50110", "127.0.0.1:50111")
    [plan] = plan_routers(topology)
    router = build(RouterConfig, plan.settings)
    assert (router.server.address, router.advertise_host) == ("10.0.0.1:50050", "10.0.0.1")
    assert (router.events_address, router.http_address) == ("10.0.0.1:50101", "127.0.0.1:50102")
    assert (router.http.host, router.http.port) == ("10.0.0.1", 8000)
    assert router.router_id == "router-left"


def test_a_host_that_is_dialled_by_a_name_listens_on_what_it_binds(tmp_path: Path) -> None:
    topology = load(tmp_path, "host=right")
    worker = workers_of(topology)["decode-3"]
    assert worker.listening.advertise(grpc_port=1, events_port=2, http_port=3).events == "tcp://right.example.com:2"
    assert worker.server.address == worker.events_address == worker.http_address == "0.0.0.0:0"
    assert topology.router_addresses == ("10.0.0.1:50050",)
    assert not topology.has_router


def test_every_process_has_its_certificate_and_the_keys_that_all_share(tmp_path: Path) -> None:
    topology = load(tmp_path, "host=left")
    worker = workers_of(topology)["decode-0"]
    assert worker.server.tls is not None
    assert worker.server.tls.cert_file == Path("/secrets/decode-0.pem")
    assert worker.events_key_file == Path("/secrets/events_key")
    assert worker.signing_keys_file == Path("/secrets/signing_keys")
    etcd = worker.discovery.etcd
    assert etcd.tls is not None
    assert etcd.tls.ca_file == Path("/secrets/etcd/ca.pem")
    assert etcd.password_file == Path("/secrets/etcd/password")
    [plan] = plan_routers(topology)
    router = build(RouterConfig, plan.settings)
    assert router.http.keys_file == Path("/secrets/http_keys")
    assert router.signing_keys_file == worker.signing_keys_file


@pytest.mark.parametrize(("closed", "named"), [("secrets", "ca.pem"), ("secrets/router.key", "router.key")])
def test_secrets_of_another_user_are_an_error_that_names_the_file(
    closed: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Relative, for folders above it are closed to others.
    monkeypatch.chdir(tmp_path)
    folder = Path("secrets")
    folder.mkdir()
    for name in ("ca.pem", "router.pem", "router.key", "events_key", "signing_keys"):
        (folder / name).touch()
    tmp_path.chmod(0o755)
    with without_root():
        assert [*SecretFiles(folder).missing(["router"], has_http=False)] == []
    Path(closed).chmod(0)
    with without_root(), pytest.raises(ConfigError, match=rf"^secrets: cannot read secrets/{named}: Permission denied"):
        [*SecretFiles(folder).missing(["router"], has_http=False)]
    Path(closed).chmod(0o700)


@contextmanager
def without_root() -> Iterator[None]:
    """As a user for whom permissions count."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


def test_what_the_settings_say_of_etcd_goes_before_the_folder_of_secrets(tmp_path: Path) -> None:
    own = ("discovery.etcd.tls={}", "discovery.etcd.password_file=/own")
    etcd = load(tmp_path, *own).discovery.etcd
    assert etcd.tls is not None
    assert etcd.tls.ca_file is None
    assert etcd.password_file == Path("/own")


def test_a_share_has_its_hosts_cores_for_itself(tmp_path: Path) -> None:
    torch = ("engine.kind=torch", "workers.2.gpus=[]", "workers.2.replicas=1")
    shares = [plan_workers(load(tmp_path, f"host={host}", *torch), num_cores=6) for host in ("left", "right")]
    assert [[plan.num_threads for plan in plans] for plans in shares] == [[2, 2, 2], [6]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host": "up"}, r"^host: no host is called up; known here: left, right"),
        ({"secrets": None, "discovery": {}}, r"^secrets: is missing; .*router\.overrides\.server\.insecure"),
        ({"tls": True}, r"^tls: makes certificates for one host"),
        ({"router": {"hosts": []}}, r"^router\.hosts: is missing"),
        ({"router": {"hosts": ["left", "left"]}}, r"^router\.hosts: names a host twice"),
        ({"router": {"hosts": ["west"]}}, r"^router\.hosts: no host is called west"),
        ({"router": {"hosts": ["left"], "port": 0}}, r"^router\.port: must not be 0"),
        ({"discovery": {"kind": "file", "file": {"directory": "d"}}}, r"^discovery\.kind: must be etcd"),
        ({"discovery": {}}, r"^discovery\.etcd\.endpoints: is missing"),
        (
            {"hosts": {**HOSTS, "right": HOSTS["left"]}},
            r"^hosts\.right: port 50103 of 10\.0\.0\.1 is that of hosts\.left, too",
        ),
        (
            {"hosts": {**HOSTS, "right": {"address": "10.0.0.1", "first_port": 50106}}},
            r"^hosts\.right: port 50109 of 10\.0\.0\.1 is that of hosts\.left, too",
        ),
        (
            {"hosts": {"left": {"address": "10.0.0.1"}, "right": {"address": "10.0.0.1"}}, "router": BOTH},
            r"^hosts\.right: port 50050 of 10\.0\.0\.1 is that of hosts\.left, too",
        ),
        ({"hosts": {**HOSTS, "left": OVER_ROUTER}}, r"^hosts\.left\.first_port: 50045 .* router\.port, 50050"),
        ({"hosts": {**HOSTS, "left": OVER_HTTP}}, r"^hosts\.left\.first_port: 7999 .* router\.http_port, 8000"),
        ({"router": {"hosts": ["left"], "port": 50101}}, r"^hosts\.left\.first_port: 50100 .* router\.port, 50101"),
        ({"router": {**BOTH, "http_port": 50050}}, r"^router\.http_port: 50050 is router\.port, too"),
        ({"workers": [{"role": "decode"}]}, r"^workers\[0\]\.host: is missing; it is one of left, right"),
        ({"workers": [{"role": "decode", "host": "left"}]}, r"^hosts\.right: nothing runs there"),
        ({"hosts": {"left": {"address": "0.0.0.0"}}}, r"^hosts\.left\.address: others can't dial 0\.0\.0\.0"),
        ({"hosts": {"left": {"address": "fd00::1"}}}, r"^hosts\.left\.address: .*IPv6 in brackets"),
        ({"hosts": {"left": {"address": "left.example.com"}}}, r"^hosts\.left\.bind: is missing"),
        ({"hosts": {"left": {"address": "10.0.0.1", "bind": "eth0"}}}, r"^hosts\.left\.bind: must be an IP address"),
        ({"hosts": {"left": {"address": "10.0.0.1", "first_port": 70000}}}, r"^hosts\.left\.first_port: must be in"),
        ({"hosts": {}}, r"no host is called left, as there are no hosts"),
        (
            {"hosts": {}, "router": {}, "workers": [{"role": "decode"}]},
            r"^secrets: are those of one of several hosts",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    settings = {**yaml.safe_load(TEXT), **changes}
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text=yaml.safe_dump(settings))


def test_ports_that_touch_are_no_clash(tmp_path: Path) -> None:
    """The router's first port is free, as ``router.port`` stands for it; hosts of one address share the numbers out."""
    hosts = {**HOSTS, "right": {"address": "10.0.0.1", "first_port": 50109}}
    settings = {**yaml.safe_load(TEXT), "hosts": hosts}
    load(tmp_path, "router.port=50100", text=yaml.safe_dump(settings))


def test_ports_that_run_out_are_an_error(tmp_path: Path) -> None:
    topology = load(tmp_path, "host=left", "hosts.left.first_port=65530")
    with pytest.raises(ConfigError, match="first_port: 65530 leaves too few ports"):
        plan_workers(topology, num_cores=1)


def test_a_gpu_counts_once_on_each_host(tmp_path: Path) -> None:
    load(tmp_path)
    with pytest.raises(ConfigError, match="several have GPU 0"):
        load(tmp_path, "workers.1.gpus=[[0],[1]]")


def test_in_the_clear_every_part_says_that_it_is_meant(tmp_path: Path) -> None:
    settings = {
        **yaml.safe_load(TEXT),
        "secrets": None,
        "host": "left",
        "discovery": {"etcd": {"endpoints": ["10.0.0.9:2379"]}},
    }
    settings["router"] = {"hosts": ["left"], "overrides": {"server": {"insecure": True}}}
    for group in settings["workers"]:
        group["overrides"] = {"server": {"insecure": True}}
    topology = load(tmp_path, text=yaml.safe_dump(settings))
    assert workers_of(topology)["decode-0"].server.tls is None
    assert topology.signing_keys is None


def test_a_file_with_hosts_asks_which_one_this_is(tmp_path: Path) -> None:
    load(tmp_path)
    result = CliRunner().invoke(app, ["up", str(tmp_path / "topology.yaml"), "--dry-run"])
    assert result.exit_code == 1
    assert re.search("--host: is missing; the file has the hosts left, right", result.output)
    result = CliRunner().invoke(app, ["up", str(tmp_path / "topology.yaml"), "--dry-run", "--host", "right"])
    assert result.exit_code == 0, result.output
    assert "decode-2" in result.output
    assert "decode-0" not in result.output
