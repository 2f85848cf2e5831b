"""gRPC's health service, in which no caller keeps the others waiting."""

from __future__ import annotations

from typing import TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2

_Context: TypeAlias = "grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]"
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]  # the library has no types
    """The library's servicer, but its ``Watch`` holds no lock while it writes.

    The library's own does. There a watcher that takes no messages, such as one with an HTTP/2 window of 0, stops every
    later ``set`` of that service and every other watcher of it.
    """

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        """Write the status now, and whenever it has changed."""
        service, last_status = request.service, None
        changed = self._server_watchers[service]
        self._watcher_count_by_service[service] += 1
        try:
            while True:
                async with changed:
                    while (status := self._server_status.get(service, _UNKNOWN)) == last_status:
                        await changed.wait()
                last_status = status
                await context.write(health_pb2.HealthCheckResponse(status=status))
        finally:
            self._watcher_count_by_service[service] -= 1
            if not self._watcher_count_by_service[service]:
                del self._server_watchers[service], self._watcher_count_by_service[service]
