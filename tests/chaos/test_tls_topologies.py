"""Topologies for text with ``--tls``: printed lines can be pasted. tests/e2e/test_up_tls.py has one with pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.fork_server import ForkServer
from tests.e2e.test_topologies import FREE_PORT, WORKER_IDS, config
from tests.e2e.up import CONFIGS, Up

#: The others are of the same parts: fewer workers, another model.
WITH_TLS = ("agg_router", "disagg", "mock_fleet")


@pytest.mark.usefixtures("etcd_binary")
@pytest.mark.parametrize("name", WITH_TLS)
async def test_a_topology_serves_with_tls_everywhere(name: str, tmp_path: Path, fork_server: ForkServer) -> None:
    (tmp_path / "models").symlink_to(CONFIGS.parent / "models", target_is_directory=True)
    async with Up(tmp_path, config(name), *FREE_PORT, "--tls", python=fork_server.python) as up:
        await up.wait_ready()
        generated = await up.paste("quartet generate ")
        assert generated.code == 0, generated.err
        assert generated.out.strip()
        workers = await up.paste("quartet workers")
        rows = {line.split("│")[1].strip(): line for line in workers.out.splitlines() if line.startswith("│")}
        assert rows.keys() == WORKER_IDS[name]
        assert all(" ready " in row for row in rows.values())
        assert not [line for line in up.lines if "http://" in line], "a port in the clear"
