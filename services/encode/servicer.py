"""EncodeService: one stream a request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc

from quartet.rpc.server import Service
from quartet.streams.encode_server import EncodeStream
from quartet.streams.server import StreamLimits
from quartet.v1 import encode_pb2 as pb
from quartet.v1 import encode_pb2_grpc
from services.encode.encode import EncodeDispatcher

_Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"


class EncodeServicer(encode_pb2_grpc.EncodeServiceServicer):
    """Serves Encode from one desk."""

    def __init__(self, dispatcher: EncodeDispatcher, limits: StreamLimits) -> None:
        """``limits`` bound each stream."""
        self._dispatcher = dispatcher
        self._limits = limits

    async def Encode(  # type: ignore[override]  # the stubs know only generators, and this one reads and writes
        self, request_iterator: AsyncIterator[pb.EncodeRequest], context: _Context
    ) -> None:
        """As encode.proto says."""
        await EncodeStream(self._dispatcher, self._limits).serve(context)


def encode_service(dispatcher: EncodeDispatcher, limits: StreamLimits) -> Service:
    """EncodeService, for a server."""
    servicer = EncodeServicer(dispatcher, limits)
    add = encode_pb2_grpc.add_EncodeServiceServicer_to_server
    return Service("quartet.v1.EncodeService", lambda server: add(servicer, server))
