"""DecodeService: one worker stream for each caller, with any number of requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from quartet.rpc.audience import is_peer
from quartet.rpc.server import Service
from quartet.streams.read_pace import ReadPace
from quartet.streams.server import StartVerifier, StreamLimits, WorkerStream
from quartet.v1 import decode_pb2 as pb
from quartet.v1 import decode_pb2_grpc
from services.workers.dispatch import DecodeDispatcher

_Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"


@dataclass(frozen=True, eq=False)
class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Serves Decode from one dispatcher.

    Attributes:
        limits: of each stream.
        verifier: opens signed starts.
        has_tls: only peers may send other starts.
        pace: of the messages of each connection that is no peer's.
    """

    dispatcher: DecodeDispatcher
    limits: StreamLimits
    verifier: StartVerifier | None = None
    has_tls: bool = False
    pace: ReadPace = field(default_factory=ReadPace)

    async def Decode(  # type: ignore[override]  # stubs only know generators
        self, request_iterator: AsyncIterator[pb.DecodeRequest], context: _Context
    ) -> None:
        """As decode.proto says."""
        takes_unsigned = not self.has_tls or is_peer(context.auth_context())
        # A router's stream carries the requests of all tenants, which it has made wait by their shares.
        with nullcontext() if takes_unsigned else self.pace.account(context.peer()) as account:
            stream = WorkerStream(
                self.dispatcher,
                self.dispatcher.new_outbox(),
                self.limits,
                account=account,
                verifier=self.verifier,
                takes_unsigned=takes_unsigned,
            )
            await stream.serve(context)


def decode_service(
    dispatcher: DecodeDispatcher, limits: StreamLimits, verifier: StartVerifier | None = None, *, has_tls: bool = False
) -> Service:
    """DecodeService, for a server; see ``DecodeServicer``."""
    servicer = DecodeServicer(dispatcher, limits, verifier, has_tls=has_tls)
    add = decode_pb2_grpc.add_DecodeServiceServicer_to_server
    return Service("quartet.v1.DecodeService", lambda server: add(servicer, server))
