"""``quartet secrets``: who gets which file, what stays the same when it is run again, and what is renewed."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from typer.testing import CliRunner

from cli.app import app
from quartet.config import build
from quartet.errors import ConfigError
from router.config import RouterConfig
from router.http.keys import ApiKeys
from services.topology.host_secrets import SecretsFolder, provide_secrets
from services.topology.hosts import Host
from services.topology.topology import Topology, build_topology, plan_routers

YEAR = timedelta(days=365)
SETTINGS = {
    "namespace": "spread",
    "hosts": {"left": {"address": "10.0.0.1"}, "right": {"address": "[fd00::2]"}},
    "secrets": "unread",
    "discovery": {"etcd": {"endpoints": ["https://etcd.example.com:2379"], "user": "quartet"}},
    "engine": {"kind": "mock"},
    "router": {"hosts": ["left"], "http_port": 8000},
    "workers": [{"role": "prefill", "host": "left"}, {"role": "decode", "host": "right"}],
}


@pytest.fixture
def topology() -> Topology:
    return build_topology(SETTINGS)


def provide(topology: Topology, path: Path, valid: timedelta = YEAR) -> Sequence[str]:
    return provide_secrets(topology, SecretsFolder(path), valid=valid)


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def names_of(cert_file: Path) -> set[str]:
    certificate = x509.load_pem_x509_certificate(cert_file.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def test_a_host_gets_the_keys_of_its_own_processes_and_those_that_all_share(topology: Topology, tmp_path: Path) -> None:
    provide(topology, tmp_path)
    files = {
        name: {str(path.relative_to(tmp_path / "hosts" / name)) for path in (tmp_path / "hosts" / name).rglob("*.key")}
        for name in ("left", "right")
    }
    assert files == {
        "left": {"prefill-0.key", "router.key", "etcd/client.key"},
        "right": {"decode-0.key", "etcd/client.key"},
    }
    for key in ("events_key", "signing_keys", "etcd/password"):
        assert len({(tmp_path / "hosts" / name / key).read_bytes() for name in ("left", "right")}) == 1
    assert (tmp_path / "hosts/left/http_keys").is_file()
    assert not (tmp_path / "hosts/right/http_keys").exists()


def test_who_operates_and_who_asks_get_an_api_key_each(topology: Topology, tmp_path: Path) -> None:
    provide(topology, tmp_path)
    keys = dict(line.split() for line in (tmp_path / "hosts/left/http_keys").read_text().splitlines())
    assert keys.keys() == {"operator", "client"} and len(set(keys.values())) == 2
    assert {kind: (tmp_path / kind / "http_key").read_text() for kind in keys} == {
        kind: f"{key}\n" for kind, key in keys.items()
    }
    [plan] = plan_routers(replace(topology, host="left", secrets=tmp_path / "hosts/left"))
    http = build(RouterConfig, plan.settings).http
    assert http.keys_file is not None and http.operators == ("operator",)
    of = {kind: ApiKeys(http.keys_file).find(f"Bearer {key}").tenant for kind, key in keys.items()}
    assert of == {"operator": "operator", "client": "client"}


def test_a_key_that_was_changed_by_hand_is_given_out_and_one_that_is_not_there_in_the_clear_is_not(
    topology: Topology, tmp_path: Path
) -> None:
    provide(topology, tmp_path)
    key, digest = "changed-0123456789", "sha256:" + "0" * 64
    lines = [
        "# by hand",
        "",
        f"operator {digest}",
        f"acme {'a' * 16}",
        f"client {digest} id=old",
        f"client {key} id=new",
    ]
    (tmp_path / "authority/http_keys").write_text("\n".join(lines))
    assert provide(topology, tmp_path) == ["client/http_key", "hosts/left/http_keys"]
    assert (tmp_path / "client/http_key").read_text() == f"{key}\n"
    assert not (tmp_path / "operator/http_key").exists()


def test_without_http_nobody_gets_an_api_key(tmp_path: Path) -> None:
    provide(build_topology({**SETTINGS, "router": {"hosts": ["left"]}}), tmp_path)
    assert {path.parent.name for path in tmp_path.rglob("http_key*")} == {"authority"}


def test_who_looks_for_routers_gets_a_certificate_and_a_password_that_no_host_has(
    topology: Topology, tmp_path: Path
) -> None:
    provide(topology, tmp_path)
    password = (tmp_path / "authority/etcd/reader_password").read_bytes()
    for kind in ("operator", "client"):
        of_etcd = tmp_path / kind / "etcd"
        assert {path.name for path in of_etcd.iterdir()} == {"ca.pem", "client.pem", "client.key", "password"}
        assert (of_etcd / "ca.pem").read_bytes() == (tmp_path / "etcd/ca.pem").read_bytes()
        assert (of_etcd / "password").read_bytes() == password
        assert stat.S_IMODE((of_etcd / "password").stat().st_mode) == 0o600
    assert [path for path in (tmp_path / "hosts").rglob("*") if path.is_file() and path.read_bytes() == password] == []
    (tmp_path / "authority/etcd/reader_password").unlink()
    assert provide(topology, tmp_path) == [
        "authority/etcd/reader_password",
        "operator/etcd/password",
        "client/etcd/password",
    ]
    assert (tmp_path / "client/etcd/password").read_bytes() != password


def test_where_etcd_has_no_users_who_looks_for_routers_gets_nothing_to_write_with(tmp_path: Path) -> None:
    provide(build_topology({**SETTINGS, "discovery": {"etcd": {"endpoints": ["127.0.0.1:2379"]}}}), tmp_path)
    assert not (tmp_path / "operator/etcd").exists() and not (tmp_path / "client/etcd").exists()


def test_nothing_is_missing_of_what_a_share_asks_for(topology: Topology, tmp_path: Path) -> None:
    provide(topology, tmp_path)
    left = SecretsFolder(tmp_path).host("left")
    assert [*left.missing(["prefill-0", "router"], has_http=True)] == []
    assert [*left.missing(["decode-0"], has_http=False)] == [left.folder / "decode-0.pem", left.folder / "decode-0.key"]


def test_certificates_are_made_out_to_the_host_that_is_dialled(topology: Topology, tmp_path: Path) -> None:
    provide(topology, tmp_path)
    loopback = {"127.0.0.1", "::1", "localhost"}
    uri = "quartet://spread/worker/decode-0"
    assert names_of(tmp_path / "hosts/right/decode-0.pem") == {uri, "fd00::2", *loopback}
    assert names_of(tmp_path / "etcd/etcd.pem") == {"etcd.example.com", *loopback}
    assert names_of(tmp_path / "operator/operator.pem") == {"quartet://spread/operator/operator"}


def test_only_the_owner_can_open_what_is_secret(topology: Topology, tmp_path: Path) -> None:
    provide(topology, tmp_path / "secrets")
    files = [path for path in (tmp_path / "secrets").rglob("*") if path.is_file() and path.suffix != ".pem"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700


def test_run_again_it_changes_nothing(topology: Topology, tmp_path: Path) -> None:
    assert provide(topology, tmp_path)
    before = contents(tmp_path)
    assert before.keys() > {"hosts/left/ca.pem", "etcd/ca.pem", "authority/grpc/ca.pem", "operator/operator.pem"}
    assert provide(topology, tmp_path) == []
    assert contents(tmp_path) == before


def assert_fits(directory: Path, name: str) -> None:
    """The certificate is that of the key and of an authority in ``ca.pem``."""
    certificate = x509.load_pem_x509_certificate((directory / f"{name}.pem").read_bytes())
    key = serialization.load_pem_private_key((directory / f"{name}.key").read_bytes(), None)
    assert key.public_key() == certificate.public_key()
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes()))


@pytest.mark.parametrize("num_bytes", [0, 40])
@pytest.mark.parametrize("file", ["router.pem", "router.key", "ca.pem"])
def test_what_was_written_in_part_is_written_anew(
    file: str, num_bytes: int, topology: Topology, tmp_path: Path
) -> None:
    provide(topology, tmp_path)
    left = tmp_path / "hosts/left"
    (left / file).write_bytes((left / file).read_bytes()[:num_bytes])
    assert provide(topology, tmp_path) == ["hosts/left/ca.pem" if file == "ca.pem" else "hosts/left/router.pem"]
    assert_fits(left, "router")
    assert_fits(left, "prefill-0")


def test_a_key_that_is_not_its_certificates_is_replaced_with_it(topology: Topology, tmp_path: Path) -> None:
    provide(topology, tmp_path)
    left = tmp_path / "hosts/left"
    shutil.copy(left / "prefill-0.key", left / "router.key")
    assert provide(topology, tmp_path) == ["hosts/left/router.pem"]
    assert_fits(left, "router")


@pytest.mark.parametrize("name", ["events_key", "signing_keys", "http_keys", "etcd/password"])
def test_an_empty_key_is_drawn_again(name: str, topology: Topology, tmp_path: Path) -> None:
    provide(topology, tmp_path)
    (tmp_path / "authority" / name).write_bytes(b"")
    assert set(provide(topology, tmp_path)) >= {f"authority/{name}", f"hosts/left/{name}"}
    assert (tmp_path / "authority" / name).read_bytes() == (tmp_path / "hosts/left" / name).read_bytes() != b""


@pytest.mark.parametrize("name", ["events_key", "signing_keys"])
def test_half_a_key_is_an_error_that_names_the_file(name: str, topology: Topology, tmp_path: Path) -> None:
    provide(topology, tmp_path)
    file = tmp_path / "authority" / name
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ConfigError, match=rf"authority/{name}"):
        provide(topology, tmp_path)


def test_an_authority_without_a_whole_key_is_an_error_that_names_the_file(topology: Topology, tmp_path: Path) -> None:
    provide(topology, tmp_path)
    before = contents(tmp_path)
    (tmp_path / "authority/grpc/ca.key").write_bytes(b"")
    with pytest.raises(ValueError, match=r"authority/grpc/ca\.key holds no key"):
        provide(topology, tmp_path)
    assert contents(tmp_path) == {**before, "authority/grpc/ca.key": b""}


def test_a_second_authority_stays_where_it_was_added_and_goes_with_the_file(topology: Topology, tmp_path: Path) -> None:
    provide(topology, tmp_path / "old")
    provide(topology, tmp_path / "new")
    old, new = ((tmp_path / name / "authority/grpc/ca.pem").read_bytes() for name in ("old", "new"))
    files = [tmp_path / "old" / name / "ca.pem" for name in ("authority/grpc", "hosts/left", "operator")]
    for file in files:
        file.write_bytes(new + old)
    assert provide(topology, tmp_path / "old") == ["hosts/right/ca.pem", "client/ca.pem"], "they lacked it"
    assert all(file.read_bytes() == new + old for file in files)
    # The next step of a rotation: certificates of the new authority, trusted beside the old one.
    shutil.copy(tmp_path / "new/authority/grpc/ca.key", tmp_path / "old/authority/grpc")
    assert "hosts/left/router.pem" in provide(topology, tmp_path / "old")
    assert all(file.read_bytes() == new + old for file in files)
    assert_fits(tmp_path / "old/hosts/left", "router")
    # The last one.
    files[0].write_bytes(new)
    files[1].unlink()
    assert provide(topology, tmp_path / "old") == ["hosts/left/ca.pem"]
    assert files[1].read_bytes() == new


def test_a_further_host_gets_certificates_of_the_same_authority(topology: Topology, tmp_path: Path) -> None:
    provide(topology, tmp_path)
    further = {**SETTINGS["hosts"], "third": {"address": "10.0.0.3"}}  # type: ignore[dict-item]
    workers = [*SETTINGS["workers"], {"role": "decode", "host": "third"}]  # type: ignore[misc]
    new = provide(build_topology({**SETTINGS, "hosts": further, "workers": workers}), tmp_path)
    assert new
    assert all(path.startswith("hosts/third/") for path in new)
    authority = x509.load_pem_x509_certificate((tmp_path / "hosts/left/ca.pem").read_bytes())
    added = x509.load_pem_x509_certificate((tmp_path / "hosts/third/decode-1.pem").read_bytes())
    added.verify_directly_issued_by(authority)


def test_a_host_that_has_moved_gets_certificates_for_its_new_address(topology: Topology, tmp_path: Path) -> None:
    provide(topology, tmp_path)
    moved = replace(topology, hosts={**topology.hosts, "right": Host(address="10.0.0.7")})
    assert provide(moved, tmp_path) == ["hosts/right/decode-0.pem"]
    assert "10.0.0.7" in names_of(tmp_path / "hosts/right/decode-0.pem")


def test_certificates_that_end_within_a_month_are_renewed(topology: Topology, tmp_path: Path) -> None:
    provide(topology, tmp_path, valid=timedelta(days=29))
    renewed = provide(topology, tmp_path)
    assert "hosts/left/router.pem" in renewed
    assert "hosts/left/etcd/client.pem" in renewed
    certificate = x509.load_pem_x509_certificate((tmp_path / "hosts/left/router.pem").read_bytes())
    assert certificate.not_valid_after_utc - datetime.now(UTC) > timedelta(days=360)


def test_a_key_that_was_replaced_goes_to_all_hosts(topology: Topology, tmp_path: Path) -> None:
    provide(topology, tmp_path)
    (tmp_path / "authority/events_key").unlink()
    changed = provide(topology, tmp_path)
    assert set(changed) == {"authority/events_key", "hosts/left/events_key", "hosts/right/events_key"}


def test_what_the_docs_remove_to_lock_out_a_host_leaves_the_others_nothing_that_it_had(tmp_path: Path) -> None:
    hosts = {**SETTINGS["hosts"], "third": {"address": "10.0.0.3"}}  # type: ignore[dict-item]
    workers = [*SETTINGS["workers"], {"role": "decode", "host": "third"}]  # type: ignore[misc]
    provide(build_topology({**SETTINGS, "hosts": hosts, "workers": workers}), tmp_path)
    (tmp_path / "authority/etcd/root_password").write_bytes(b"of root\n")
    before = contents(tmp_path)
    for name in ("hosts/third", "authority/grpc"):
        shutil.rmtree(tmp_path / name)
    for name in ("events_key", "signing_keys", "http_keys", "etcd/ca.key", "etcd/password"):
        (tmp_path / "authority" / name).unlink()
    provide(build_topology(SETTINGS), tmp_path)
    after = contents(tmp_path)
    assert after.keys() == {name for name in before if not name.startswith("hosts/third/")}
    of_readers = {"authority/etcd/reader_password", "operator/etcd/password", "client/etcd/password"}
    same = {name for name, content in after.items() if content == before[name]}
    assert same == {"authority/etcd/root_password", *of_readers}, "no host had these"


def test_certificates_of_an_authority_that_was_lost_are_made_anew(topology: Topology, tmp_path: Path) -> None:
    provide(topology, tmp_path)
    shutil.rmtree(tmp_path / "authority/grpc")
    assert {"hosts/left/router.pem", "client/client.pem"} <= set(provide(topology, tmp_path))


def test_a_topology_of_one_host_is_refused(tmp_path: Path) -> None:
    decode = replace(build_topology(SETTINGS).workers[1], host="")
    with pytest.raises(ConfigError, match="hosts: there are none"):
        provide(Topology(workers=(decode,)), tmp_path)


def test_the_command_says_what_it_wrote_and_where_it_belongs(tmp_path: Path) -> None:
    file = Path(__file__).parents[3] / "deploy/two_hosts.yaml"
    arguments = ["secrets", str(file), str(tmp_path / "secrets")]
    first, second = (CliRunner().invoke(app, arguments) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert str(tmp_path / "secrets/hosts/right/decode-1.pem") in first.output.replace("\n", "")
    assert "all are there already" in second.output
    assert all(
        f"# to {name}: " in second.output for name in ("left", "right", "etcd", "who operates", "who asks for answers")
    )
