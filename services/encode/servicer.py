"""EncodeService: one stream for each request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc

from quartet.rpc.server import Service
from quartet.streams.encode_server import EncodeStream, EncodeWork
from quartet.streams.server import StreamLimits
from quartet.v1 import encode_pb2 as pb
from quartet.v1 import encode_pb2_grpc

_Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"


class EncodeServicer(encode_pb2_grpc.EncodeServiceServicer):
    """Serves Encode: each stream's request runs in one ``EncodeWork``."""

    def __init__(self, work: EncodeWork, limits: StreamLimits) -> None:
        """``limits`` bound each stream."""
        self._work = work
        self._limits = limits

    async def Encode(  # type: ignore[override]  # stubs only know generators
        self, request_iterator: AsyncIterator[pb.EncodeRequest], context: _Context
    ) -> None:
        """As encode.proto says."""
        await EncodeStream(self._work, self._limits).serve(context)


def encode_service(work: EncodeWork, limits: StreamLimits) -> Service:
    """EncodeService, for a server."""
    servicer = EncodeServicer(work, limits)
    add = encode_pb2_grpc.add_EncodeServiceServicer_to_server
    return Service("quartet.v1.EncodeService", lambda server: add(servicer, server))
