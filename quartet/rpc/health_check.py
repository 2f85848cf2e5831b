"""Asks a server whether it serves, as probes and load balancers do (``grpc.health.v1``)."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.rpc.channels import create_channel
from quartet.rpc.tls import TlsConfig


async def is_serving(address: str, tls: TlsConfig | None = None, *, service: str = "", timeout_s: float = 1.0) -> bool:
    """Whether ``service`` (empty: all of the server) at ``address`` says SERVING within ``timeout_s`` seconds.

    Raises:
        ConfigError: a file of ``tls`` can't be used.
    """
    channel = create_channel(address, tls)
    try:
        request = health_pb2.HealthCheckRequest(service=service)
        response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
    except grpc.aio.AioRpcError:
        return False
    finally:
        await channel.close()
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
