"""Services made of single handlers."""

from __future__ import annotations

from typing import Any

import grpc

from quartet.rpc.server import Service


def generic_service(name: str, handlers: dict[str, grpc.RpcMethodHandler[Any, Any]]) -> Service:
    """A service from handlers by method name; without (de)serializers they work on raw bytes."""
    generic = grpc.method_handlers_generic_handler(name, handlers)
    return Service(name, lambda server: server.add_generic_rpc_handlers((generic,)))
