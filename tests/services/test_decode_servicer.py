"""Who may send Decode a start that no router signed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quartet.streams.server import StreamLimits
from quartet.telemetry.metrics import WorkerMetrics
from services.decode.servicer import DecodeServicer
from services.workers.dispatch import DecodeDispatcher
from tests.services.stream_workers import until
from tests.services.stub_engine import StubEngine
from tests.streams.test_server import WAIT_S, FakeContext, start_message


class Caller(FakeContext):
    """A caller in memory, with what its certificate says."""

    def __init__(self, auth_context: Mapping[str, Sequence[bytes]]) -> None:
        super().__init__()
        self._auth_context = auth_context

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return self._auth_context


def certificate(uri: str) -> Mapping[str, Sequence[bytes]]:
    return {"x509_pem_cert": [b"-----BEGIN"], "x509_subject_alternative_name": [uri.encode()]}


NOBODY: Mapping[str, Sequence[bytes]] = {}
ROUTER, WORKER, CLIENT, OPERATOR = (
    certificate(f"quartet://prod/{kind}/one") for kind in ("router", "worker", "client", "operator")
)


@pytest.mark.parametrize(
    ("auth_context", "has_tls", "is_taken"),
    [
        (ROUTER, True, True),
        (WORKER, True, True),
        (CLIENT, True, False),
        (OPERATOR, True, False),
        (NOBODY, True, False),  # TLS that asks clients for no certificate
        (NOBODY, False, True),
    ],
    ids=["router", "worker", "client", "operator", "anonymous", "no TLS"],
)
async def test_only_peers_send_unsigned_starts_to_a_worker_with_tls(
    auth_context: Mapping[str, Sequence[bytes]], has_tls: bool, is_taken: bool
) -> None:
    engine, caller = StubEngine(), Caller(auth_context)
    dispatcher = DecodeDispatcher(engine, WorkerMetrics(CollectorRegistry()))
    servicer = DecodeServicer(dispatcher, StreamLimits(), has_tls=has_tls)
    caller.send(start_message(3))
    caller.send(grpc.aio.EOF)
    call = asyncio.create_task(servicer.Decode(no_requests(), caller))  # type: ignore[arg-type]
    if is_taken:
        await until(lambda: len(engine.requests) == 1)
        assert not servicer.pace, "a peer's messages are free"
        call.cancel()
        await asyncio.wait([call])
        assert caller.terminals == {}
    else:
        await asyncio.wait_for(call, WAIT_S)
        assert caller.terminals == {3: ["PERMISSION_DENIED"]}
        assert len(servicer.pace) == 1
        assert engine.requests == {}


async def no_requests() -> AsyncIterator[object]:
    """Decode reads from its context."""
    return
    yield
