"""What a source distribution and pip make of an empty environment (``make test-deploy``): with torch it serves."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.up import Up
from tests.e2e.wheel import ROOT, build, run

pytestmark = pytest.mark.deploy

# Some GB come with PyTorch.
INSTALL_TIMEOUT_S = 1200.0


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Path]:
    """Of Python, with nothing in it."""
    directory = tmp_path / "environment"
    run([sys.executable, "-m", "venv", str(directory)], tmp_path)
    yield directory
    shutil.rmtree(directory)  # pytest would keep its 7 GB


@pytest.mark.timeout(INSTALL_TIMEOUT_S + 300)
async def test_pip_makes_an_empty_environment_one_that_serves(environment: Path, tmp_path: Path) -> None:
    distribution = build("sdist", tmp_path / "distribution")
    empty = tmp_path / "empty"
    empty.mkdir()
    pip = [str(environment / "bin" / "pip"), "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    quartet = environment / "bin" / "quartet"
    run([*pip, str(distribution)], empty, INSTALL_TIMEOUT_S)
    assert "disagg" in run([str(quartet), "up"], empty)
    async with Up(empty, "disagg", quartet=quartet) as up:
        assert await up.exit_code() == 1
        assert "pip install 'quartet[torch]'" in up.log
    run([*pip, f"{distribution}[torch]"], empty, INSTALL_TIMEOUT_S)
    async with Up(empty, "disagg", "--router-port", "0", quartet=quartet) as up:
        await up.wait_ready()
        assert (await up.paste("quartet generate")).out.strip()
        assert all(command.startswith(str(environment)) for command in up.processes().values() if "-m" in command)
        await up.end(signal.SIGINT)
