"""What a worker listens on, and what it advertises for others to dial."""

from __future__ import annotations

import pytest

from quartet.config import build
from quartet.errors import ConfigError
from quartet.events.publisher import EventPublisher
from quartet.rpc.server import ServerConfig
from router.config import RouterConfig
from services.workers.config import Advertised, WorkerConfig

TLS = {"ca_file": "ca.pem", "cert_file": "cert.pem", "key_file": "key.pem"}


def make_config(
    grpc: str, *, events: str = "127.0.0.1:0", http: str = "127.0.0.1:0", advertise_host: str = "", open_: bool = True
) -> WorkerConfig:
    return WorkerConfig(
        model_path="model",
        server=ServerConfig(address=grpc, insecure=open_),
        events_address=events,
        http_address=http,
        advertise_host=advertise_host,
    )


def test_a_worker_on_loopback_advertises_the_addresses_it_listens_on() -> None:
    advertised = make_config("127.0.0.1:0", http="[::1]:0", open_=False).listening.advertise(
        grpc_port=1, events_port=2, http_port=3
    )
    assert advertised == Advertised(grpc="127.0.0.1:1", events="tcp://127.0.0.1:2", http="[::1]:3")


def test_wildcard_addresses_are_advertised_under_the_advertised_host() -> None:
    config = make_config("0.0.0.0:0", events="0.0.0.0:0", http="[::]:0", advertise_host="worker-1.pool")
    expected = Advertised(grpc="worker-1.pool:1", events="tcp://worker-1.pool:2", http="worker-1.pool:3")
    assert config.listening.advertise(grpc_port=1, events_port=2, http_port=3) == expected


def test_without_an_advertised_host_wildcards_are_advertised_under_the_grpc_host() -> None:
    config = make_config("192.0.2.7:0", events="*:0", http="0.0.0.0:0")
    expected = Advertised(grpc="192.0.2.7:1", events="tcp://192.0.2.7:2", http="192.0.2.7:3")
    assert config.listening.advertise(grpc_port=1, events_port=2, http_port=3) == expected


def test_a_loopback_address_is_not_advertised_under_the_advertised_host() -> None:
    config = make_config("0.0.0.0:0", events="192.0.2.7:0", advertise_host="worker-1.pool")
    expected = Advertised(grpc="worker-1.pool:1", events="tcp://worker-1.pool:2", http="127.0.0.1:3")
    assert config.listening.advertise(grpc_port=1, events_port=2, http_port=3) == expected


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:50051"])
def test_a_wildcard_without_an_advertised_host_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^advertise_host: .*server.address"):
        make_config(address)


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"grpc": "0.0.0.0:0", "advertise_host": "::1"}, "advertise_host"),
        ({"grpc": "0.0.0.0:0", "advertise_host": "two words"}, "advertise_host"),
        ({"grpc": "::1:50051"}, "server.address"),
        ({"grpc": "127.0.0.1:0", "events": "a/b:0"}, "events_address"),
        ({"grpc": "127.0.0.1:0", "http": "::1:0"}, "http_address"),
    ],
)
def test_an_address_that_peers_could_not_dial_is_refused_before_anything_starts(
    settings: dict[str, str], setting: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{setting}: peers can't dial"):
        make_config(**settings)


BEYOND_LOOPBACK = ["0.0.0.0:0", "[::]:0", "*:0", "192.0.2.1:5555", "worker-1:5555"]


@pytest.mark.parametrize("address", BEYOND_LOOPBACK)
def test_probes_stay_on_loopback_like_grpc_unless_it_may_be_open(address: str) -> None:
    settings = {"model_path": "model", "http_address": address}
    with pytest.raises(ConfigError, match=r"^http_address: .*server.tls.*server.insecure"):
        build(WorkerConfig, settings)
    for opening in ({"insecure": True}, {"tls": TLS}):
        build(WorkerConfig, {**settings, "server": opening, "events_key_file": "key"})


@pytest.mark.parametrize("address", BEYOND_LOOPBACK)
def test_events_stay_on_loopback_unless_they_are_encrypted_or_need_not_be(address: str) -> None:
    settings = {"model_path": "model", "events_address": address}
    with pytest.raises(ConfigError, match=r"^events_address: .*events_key_file.*server.insecure"):
        build(WorkerConfig, settings)
    for opening in ({"server": {"insecure": True}}, {"events_key_file": "key"}):
        build(WorkerConfig, {**settings, **opening})


@pytest.mark.parametrize("address", ["127.0.0.1:0", "0.0.0.0:0"])
@pytest.mark.parametrize("insecure", [False, True])
def test_with_tls_no_process_starts_whose_events_are_in_the_clear(address: str, insecure: bool) -> None:
    server = {"tls": TLS, "insecure": insecure}
    settings = {"model_path": "model", "events_address": address, "server": server}
    for config, wanted in ((WorkerConfig, settings), (RouterConfig, {"server": server})):
        with pytest.raises(ConfigError, match=r"^events_key_file: is missing; with server.tls"):
            build(config, wanted)
        build(config, {**wanted, "events_key_file": "key"})


@pytest.mark.parametrize("field", ["events_address", "http_address"])
def test_a_malformed_address_is_refused_by_its_name(field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: must be host:port"):
        build(WorkerConfig, {"model_path": "model", field: "5555"})


def test_events_on_a_wildcard_have_a_port_to_advertise() -> None:
    publisher = EventPublisher("0.0.0.0", worker_id="decode-0", epoch=1)
    try:
        assert publisher.port > 0
    finally:
        publisher.close()
