"""PrefillService: one worker stream for each caller, with any number of prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from quartet.rpc.server import Service
from quartet.streams.server import StreamLimits, WorkerStream
from quartet.v1 import prefill_pb2 as pb
from quartet.v1 import prefill_pb2_grpc
from services.workers.dispatch import PrefillDispatcher

_Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"


@dataclass(frozen=True, eq=False)
class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Serves Prefill from one dispatcher; ``limits`` bound each stream."""

    dispatcher: PrefillDispatcher
    limits: StreamLimits

    async def Prefill(  # type: ignore[override]  # stubs only know generators
        self, request_iterator: AsyncIterator[pb.PrefillRequest], context: _Context
    ) -> None:
        """As prefill.proto says."""
        await WorkerStream(self.dispatcher, self.dispatcher.new_outbox(), self.limits).serve(context)


def prefill_service(dispatcher: PrefillDispatcher, limits: StreamLimits) -> Service:
    """PrefillService, for a server."""
    servicer = PrefillServicer(dispatcher, limits)
    add = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
    return Service("quartet.v1.PrefillService", lambda server: add(servicer, server))
