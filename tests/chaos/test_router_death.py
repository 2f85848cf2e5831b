"""The short form of ``benchmarks.router_death``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.command import run_benchmark
from tests.e2e.fork_server import ForkServer


@pytest.mark.usefixtures("etcd_binary")
def test_no_answer_of_64_fails_when_their_router_is_killed(tmp_path: Path, fork_server: ForkServer) -> None:
    found = run_benchmark("router_death", "--kills", "1", report=tmp_path / "report.json", fork_server=fork_server)

    assert (found["errors"], found["blocks_left"]) == ([], 0)
    for path in ("generate", "session"):
        counts = {name: found[path][name] for name in ("answers", "resumed", "failed", "wrong")}
        assert counts == {"answers": 32, "resumed": 32, "failed": 0, "wrong": 0}, path
