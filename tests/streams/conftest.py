"""The fixtures that start servers."""

from __future__ import annotations

from tests.rpc.conftest import start_server

__all__ = ["start_server"]
