"""Every method that streams answers has somebody who notices a client that takes nothing."""

from __future__ import annotations

import inspect

import pytest
from google.protobuf.descriptor import FileDescriptor

from quartet.rpc.health import HealthServicer
from quartet.transfer.grpc.servicer import TransferServicer
from quartet.v1 import decode_pb2, encode_pb2, prefill_pb2, router_pb2, transfer_pb2, worker_pb2
from router.servicer import RouterServicer
from services.decode.servicer import DecodeServicer
from services.encode.servicer import EncodeServicer
from services.prefill.servicer import PrefillServicer
from services.workers.servicer import WorkerServicer

SERVICERS: list[tuple[FileDescriptor, type]] = [
    (router_pb2.DESCRIPTOR, RouterServicer),
    (worker_pb2.DESCRIPTOR, WorkerServicer),
    (decode_pb2.DESCRIPTOR, DecodeServicer),
    (encode_pb2.DESCRIPTOR, EncodeServicer),
    (prefill_pb2.DESCRIPTOR, PrefillServicer),
    (transfer_pb2.DESCRIPTOR, TransferServicer),
]

#: These write by themselves: through ``StalledCalls`` (``WatchedCall.write``); for Pull, within ``max_pull_s``.
WRITE_BY_THEMSELVES = {"Generate", "Session", "Decode", "Prefill", "Encode", "Pull"}

METHODS = [
    (servicer, method.name)
    for file, servicer in SERVICERS
    for service in file.services_by_name.values()
    for method in service.methods
    if method.server_streaming
]


@pytest.mark.parametrize(("servicer", "name"), [*METHODS, (HealthServicer, "Watch")])
def test_a_method_that_streams_yields_or_is_known_to_watch_its_client(servicer: type, name: str) -> None:
    # What a method yields the server writes, and watches whether the client takes it.
    assert inspect.isasyncgenfunction(getattr(servicer, name)) is (name not in WRITE_BY_THEMSELVES)


def test_all_that_are_known_to_watch_their_client_exist() -> None:
    assert {name for _, name in METHODS} > WRITE_BY_THEMSELVES
