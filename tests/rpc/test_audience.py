"""Who may call what."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest
from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import quartet.v1
from quartet.errors import PermissionDeniedError, UnauthenticatedError
from quartet.rpc.audience import (
    AUDIENCES,
    Audience,
    Gate,
    Identity,
    IdentityKind,
    audiences_of,
    caller_identity,
    is_peer,
    parse_identity,
)

# Whatever contract is added is found here, and has to be in the table.
OURS = [
    importlib.import_module(f"quartet.v1.{module.name}")
    for module in pkgutil.iter_modules(quartet.v1.__path__)
    if module.name.endswith("_pb2")
]
FILES = [*OURS, health_pb2, reflection_pb2, channelz_pb2]
DECODE = "/quartet.v1.DecodeService/Decode"
PREFILL = "/quartet.v1.PrefillService/Prefill"
GENERATE = "/quartet.v1.RouterService/Generate"


def methods() -> list[str]:
    return [
        f"/{service.full_name}/{method.name}"
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


def auth(*uris: str) -> dict[str, list[bytes]]:
    return {
        "x509_pem_cert": [b"-----BEGIN"],
        "x509_subject_alternative_name": [b"localhost", *(uri.encode() for uri in uris)],
    }


EVERYBODY = {"client", "peer", "operator"}
#: The whole table once more, so that nobody opens a method without meaning it. docs/security.md shows it too.
TABLE = {
    "/quartet.v1.RouterService/Generate": {"client", "operator"},
    "/quartet.v1.RouterService/Place": {"client", "operator"},
    "/quartet.v1.RouterService/Session": {"client", "operator"},
    "/quartet.v1.RouterService/Explain": {"client", "operator"},
    "/quartet.v1.RouterService/GetModel": {"client", "operator"},
    "/quartet.v1.RouterService/ListWorkers": {"operator"},
    "/quartet.v1.RouterService/WatchWorkers": {"operator"},
    "/quartet.v1.RouterService/PrefillFor": {"peer"},
    "/quartet.v1.EncodeService/Encode": {"peer"},
    "/quartet.v1.PrefillService/Prefill": {"peer"},
    "/quartet.v1.DecodeService/Decode": EVERYBODY,
    "/quartet.v1.TransferService/Pull": {"peer"},
    "/quartet.v1.WorkerService/GetInfo": {"peer", "operator"},
    "/quartet.v1.WorkerService/GetModelFiles": EVERYBODY,
    "/quartet.v1.WorkerService/StreamKvSnapshot": {"peer"},
    "/quartet.v1.WorkerService/Drain": {"operator"},
    "/grpc.health.v1.Health/*": EVERYBODY,
    "/grpc.reflection.v1alpha.ServerReflection/*": EVERYBODY,
    "/grpc.channelz.v1.Channelz/*": {"operator"},
}


def test_the_table_is_this_one() -> None:
    assert {method: set(map(str, audiences)) for method, audiences in AUDIENCES.items()} == TABLE


@pytest.mark.parametrize("kind", IdentityKind)
@pytest.mark.parametrize("method", methods())
def test_a_gate_lets_in_whom_the_table_lists_and_nobody_else(method: str, kind: IdentityKind) -> None:
    listed = TABLE.get(method) or TABLE[method.rpartition("/")[0] + "/*"]
    audience = {"router": "peer", "worker": "peer"}.get(kind, str(kind))
    is_refused = False
    try:
        Gate(namespace="prod", allow_anonymous=False).check(method, auth(f"quartet://prod/{kind}/x"))
    except PermissionDeniedError:
        is_refused = True
    assert is_refused is (audience not in listed)


def test_the_documentation_shows_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    for method, audiences in TABLE.items():
        service, _, name = method[1:].rpartition("/")
        shown = service.rpartition(".")[2] + ("" if name == "*" else f".{name}")
        marks = " | ".join("yes" if audience in audiences else "-" for audience in ("client", "operator", "peer"))
        assert f"| `{shown}` | {marks} |" in page


@pytest.mark.parametrize("method", methods())
def test_every_method_has_an_audience(method: str) -> None:
    assert audiences_of(method)


def test_the_table_lists_no_method_that_does_not_exist() -> None:
    assert {method for method in AUDIENCES if not method.endswith("/*")} <= set(methods())


def test_a_method_without_an_audience_is_refused_to_every_caller() -> None:
    assert audiences_of("/quartet.v1.DecodeService/Shutdown") == frozenset()


@pytest.mark.parametrize("kind", IdentityKind)
def test_an_identity_is_read_from_its_uri(kind: IdentityKind) -> None:
    assert parse_identity(f"quartet://prod/{kind}/a-1") == Identity("prod", kind, "a-1")


@pytest.mark.parametrize(
    "uri",
    ["quartet://prod/admin/a", "quartet://prod/router", "quartet://prod/router/a/b", "https://prod/router/a", ""],
)
def test_other_uris_are_no_identity(uri: str) -> None:
    assert parse_identity(uri) is None


def test_two_identities_in_one_certificate_are_refused() -> None:
    with pytest.raises(UnauthenticatedError):
        caller_identity(auth("quartet://prod/router/a", "quartet://prod/operator/a"))


@pytest.mark.parametrize(
    ("uri", "method"),
    [
        ("quartet://prod/router/r", PREFILL),
        ("quartet://prod/client/c", DECODE),
        ("quartet://prod/worker/w", "/quartet.v1.TransferService/Pull"),
        ("quartet://prod/client/c", GENERATE),
        ("quartet://prod/operator/o", "/quartet.v1.WorkerService/Drain"),
        ("quartet://prod/client/c", "/grpc.health.v1.Health/Check"),
    ],
)
def test_the_audience_of_a_method_gets_in(uri: str, method: str) -> None:
    Gate(namespace="prod", allow_anonymous=False).check(method, auth(uri))


@pytest.mark.parametrize(
    ("uri", "method"),
    [
        ("quartet://prod/client/c", PREFILL),
        ("quartet://prod/client/c", "/quartet.v1.TransferService/Pull"),
        ("quartet://prod/worker/w", "/quartet.v1.WorkerService/Drain"),
        ("quartet://test/router/r", DECODE),
        ("quartet://prod/operator/o", "/quartet.v1.DecodeService/Unknown"),
    ],
)
def test_callers_outside_the_audience_are_refused(uri: str, method: str) -> None:
    with pytest.raises(PermissionDeniedError):
        Gate(namespace="prod", allow_anonymous=False).check(method, auth(uri))


def test_a_caller_without_a_certificate_is_a_client_if_that_is_allowed() -> None:
    open_gate = Gate(namespace="prod", allow_anonymous=True)
    open_gate.check(GENERATE, {})
    open_gate.check(DECODE, {})
    with pytest.raises(UnauthenticatedError):
        open_gate.check(PREFILL, {})
    with pytest.raises(UnauthenticatedError):
        Gate(namespace="prod", allow_anonymous=False).check(GENERATE, {})


def test_a_certificate_without_an_identity_of_ours_is_not_anonymous() -> None:
    with pytest.raises(UnauthenticatedError):
        Gate(namespace="prod", allow_anonymous=True).check(GENERATE, auth())


@pytest.mark.parametrize(
    ("uris", "expected"),
    [
        (["quartet://prod/router/r"], True),
        (["quartet://prod/worker/w"], True),
        (["quartet://prod/client/c"], False),
        (["quartet://prod/operator/o"], False),
        ([], False),
    ],
)
def test_routers_and_workers_are_peers(uris: list[str], expected: bool) -> None:
    assert is_peer(auth(*uris)) is expected


def test_each_kind_counts_as_one_audience() -> None:
    assert {Identity("n", kind, "x").audience for kind in IdentityKind} == set(Audience)


#: What holders of a trusted namespace may call; docs/security.md shows it too.
OF_NEIGHBOURS = {
    **{
        f"/quartet.v1.RouterService/{name}": {"router"}
        for name in ("Generate", "Place", "Session", "Explain", "GetModel", "ListWorkers", "WatchWorkers", "PrefillFor")
    },
    "/quartet.v1.TransferService/Pull": {"router", "worker"},
    "/quartet.v1.DecodeService/Decode": {"client", "operator"},
    "/quartet.v1.WorkerService/GetModelFiles": {"router", "client", "operator"},
    "/grpc.health.v1.Health/*": {"router", "worker", "client", "operator"},
}


@pytest.mark.parametrize("kind", IdentityKind)
@pytest.mark.parametrize("method", methods())
def test_of_a_trusted_namespace_routers_and_workers_get_only_what_pools_need(method: str, kind: IdentityKind) -> None:
    listed = OF_NEIGHBOURS.get(method) or OF_NEIGHBOURS.get(method.rpartition("/")[0] + "/*", set())
    caller = auth(f"quartet://other/{kind}/x")
    gate = Gate(namespace="prod", allow_anonymous=False, trusted_namespaces=frozenset({"other"}))
    if str(kind) in listed:
        gate.check(method, caller)
    else:
        with pytest.raises(PermissionDeniedError, match="may not call"):
            gate.check(method, caller)
    with pytest.raises(PermissionDeniedError, match="belongs to another namespace"):
        Gate(namespace="prod", allow_anonymous=False).check(method, caller)
