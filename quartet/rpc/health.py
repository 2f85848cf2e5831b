"""gRPC's health service, in which no caller keeps the others waiting, and watches cost next to nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2

from quartet.errors import InvalidRequestError
from quartet.rpc.open_calls import OpenCalls

_Context: TypeAlias = "grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]"
_Status: TypeAlias = "health_pb2.HealthCheckResponse.ServingStatus"
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

# The longest of our own has 28.
_MAX_NAME_LENGTH = 256

# A channel that checks health has one watch a connection. Each takes some 20 kB, like any call.
_MAX_WATCHES, _MAX_WATCHES_OF_CONNECTION = 4096, 64


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]  # the library has no types
    """The library's servicer with a ``Watch`` of its own.

    The library's holds a lock while it writes: a watcher that takes no messages, such as one with an HTTP/2 window of
    0, stops every later ``set`` of that service and every other watcher of it. And it keeps an entry for each name that
    a client makes up. Here all watchers wait for one event, whatever service they ask for. As the protocol says, a
    watch of an unknown service stays open.
    """

    def __init__(self) -> None:
        """All is SERVING until ``set``."""
        super().__init__()
        self._changed = asyncio.Event()
        self._watches = OpenCalls(
            "health watches", max_calls=_MAX_WATCHES, max_of_connection=_MAX_WATCHES_OF_CONNECTION
        )

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> health_pb2.HealthCheckResponse:
        """As the protocol says."""
        _check_name(request.service)
        response: health_pb2.HealthCheckResponse = await super().Check(request, context)
        return response

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now, and whenever it has changed."""
        _check_name(request.service)
        service, last_status = request.service, None
        self._watches.enter(context)
        while True:
            changed = self._changed
            status = self._server_status.get(service, _UNKNOWN)
            if status != last_status:
                last_status = status
                yield health_pb2.HealthCheckResponse(status=status)
            else:
                await changed.wait()

    async def set(self, service: str, status: _Status) -> None:
        """Set the status of ``service``; after ``enter_graceful_shutdown`` it changes nothing."""
        await super().set(service, status)
        self._notify()

    async def enter_graceful_shutdown(self) -> None:
        """Set all services to NOT_SERVING for good."""
        await super().enter_graceful_shutdown()
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _check_name(service: str) -> None:
    if len(service) > _MAX_NAME_LENGTH:
        raise InvalidRequestError(f"a service's name has at most {_MAX_NAME_LENGTH} characters", field="service")
