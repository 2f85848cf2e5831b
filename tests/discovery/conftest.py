"""Fixtures of the discovery tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.discovery.backends import Backend, EtcdBackend, FileBackend, MemoryBackend
from tests.etcd_server import EtcdServer


@pytest.fixture(params=["memory", "file", "etcd"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    """Each registry in turn, on a store of its own."""
    backend = _open(request, tmp_path)
    yield backend
    await backend.close()


def _open(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "memory":
        return MemoryBackend()
    if request.param == "file":
        return FileBackend(tmp_path / "registry")
    server: EtcdServer = request.getfixturevalue("shared_etcd")
    return EtcdBackend(server.endpoint)
