"""Fixtures for all tests: real etcd, and skips that say why."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from services.topology import launch
from services.topology.launch import find_etcd, find_grpcurl
from tests import etcd_server

# A shared machine stalls now and then; how long one example takes is not what these tests are about.
hypothesis.settings.register_profile("quartet", deadline=None)
hypothesis.settings.load_profile("quartet")


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A function that returns a free TCP port of 127.0.0.1, a new one at each call."""
    return launch.free_port


@pytest.fixture
def etcd(etcd_binary: Path, tmp_path: Path) -> Iterator[etcd_server.EtcdServer]:
    """A running etcd of this test's own, which it may kill, wipe or compact."""
    yield from _serve_etcd(etcd_binary, tmp_path / "etcd")


@pytest.fixture(scope="session")
def shared_etcd(etcd_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[etcd_server.EtcdServer]:
    """One running etcd for the whole run: leave it alive, and keep to a namespace of your own."""
    yield from _serve_etcd(etcd_binary, tmp_path_factory.mktemp("etcd"))


@pytest.fixture(scope="session")
def etcd_binary() -> Path:
    """The etcd binary, for those who start it themselves."""
    return _require("etcd", find_etcd())


@pytest.fixture(scope="session")
def grpcurl() -> Path:
    """The grpcurl binary."""
    return _require("grpcurl", find_grpcurl())


@pytest.fixture(scope="session")
def grpcurl_if_any() -> Path | None:
    """The grpcurl binary or ``None``, for tests that show most of what they are about without it."""
    return _demand("grpcurl", find_grpcurl())


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _has_cuda():
        pytest.skip("no CUDA device")
    if item.get_closest_marker("grpcurl"):
        _require("grpcurl", find_grpcurl())


def _serve_etcd(binary: Path, directory: Path) -> Iterator[etcd_server.EtcdServer]:
    server = etcd_server.EtcdServer(binary, directory)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def _require(name: str, binary: Path | None) -> Path:
    """Return ``binary``, or skip; where the environment demands it (``QUARTET_REQUIRE_<NAME>=1``), fail instead."""
    return _demand(name, binary) or pytest.skip(_reason(name))


def _demand(name: str, binary: Path | None) -> Path | None:
    """Return ``binary``; fail where there is none and the environment demands it."""
    if binary is None and os.environ.get(f"QUARTET_REQUIRE_{name.upper()}") == "1":
        pytest.fail(_reason(name), pytrace=False)
    return binary


def _reason(name: str) -> str:
    return f"no {name} binary in .tools/bin or on the PATH: `make tools` gets it"


def _has_cuda() -> bool:
    import torch  # here, so that a run without GPU tests stays free of it

    return torch.cuda.is_available()
