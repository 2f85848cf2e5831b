"""A missing program is a skip with its reason, or a failure where the environment says that it must be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MARKED = """
import pytest

@pytest.mark.grpcurl
def test_marked() -> None: ...
"""
WITH_PROMETHEUS = "def test_needs_it(prometheus) -> None: ..."
WITH_NETWORK = """
from tests.e2e.network import require_network

def test_needs_it() -> None:
    require_network()
"""
WITH_SYSTEMD = "def test_needs_it(systemd_analyze) -> None: ..."
HIDE = """
import pathlib, services.topology.launch, tests.e2e.prometheus
services.topology.launch.TOOLS_DIR = tests.e2e.prometheus.UNPACKED = pathlib.Path("/nonexistent")
"""


def run_pytest(directory: Path, program: str = MARKED, **env: str) -> str:
    """Run the tests of ``program`` under this suite's conftest on a machine without grpcurl and Prometheus."""
    test = directory / "test_marked.py"
    test.write_text(program)
    root = Path(__file__).resolve().parents[2]
    run = f"{HIDE}import pytest; raise SystemExit(pytest.main(['-q', '-p', 'tests.conftest', '-rs', {str(test)!r}]))"
    command = [sys.executable, "-c", run]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("QUARTET_")}
    environment = {**clean, "PATH": "/nonexistent", **env}
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=50, check=False
    ).stdout


def test_a_test_that_needs_grpcurl_is_skipped_with_the_reason(tmp_path: Path) -> None:
    output = run_pytest(tmp_path)
    assert "1 skipped" in output
    assert "`make tools` gets it" in output


def test_it_fails_where_grpcurl_is_required(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, QUARTET_REQUIRE_GRPCURL="1")
    assert "1 error" in output


def test_a_test_that_needs_prometheus_is_skipped_with_the_reason(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, WITH_PROMETHEUS)
    assert "1 skipped" in output
    assert "`tools/prometheus.sh` gets it" in output


def test_it_fails_where_prometheus_is_required(tmp_path: Path) -> None:
    assert "1 error" in run_pytest(tmp_path, WITH_PROMETHEUS, QUARTET_REQUIRE_PROMETHEUS="1")


def test_a_test_on_two_hosts_is_skipped_where_there_can_be_no_network_of_them(tmp_path: Path) -> None:
    assert "1 skipped" in run_pytest(tmp_path, WITH_NETWORK)


def test_it_fails_where_the_network_is_required(tmp_path: Path) -> None:
    assert "1 failed" in run_pytest(tmp_path, WITH_NETWORK, QUARTET_REQUIRE_NETNS="1")


def test_a_test_that_needs_systemd_is_skipped_unless_it_is_required(tmp_path: Path) -> None:
    assert "1 skipped" in run_pytest(tmp_path, WITH_SYSTEMD)
    assert "1 error" in run_pytest(tmp_path, WITH_SYSTEMD, QUARTET_REQUIRE_SYSTEMD="1")
