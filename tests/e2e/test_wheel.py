"""An installed wheel needs nothing of the checkout: topologies by name, their models and engine files come with it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.up import Up
from tests.e2e.wheel import ROOT, build, install, run

# Where things are, and whether the rest of the checkout, or torch, could be imported.
_LOOK = """
import importlib.util, quartet.shipped
print(quartet.shipped.ROOT)
print([name for name in ("torch", "transformers", "tests", "models", "benchmarks") if importlib.util.find_spec(name)])
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with the wheel and without the extra ``torch``."""
    directory = tmp_path_factory.mktemp("wheel")
    return install(build("wheel", directory), directory / "environment")


async def test_a_mock_fleet_starts_by_its_name_in_an_empty_folder(python: Path, tmp_path: Path) -> None:
    root, others = run([str(python), "-c", _LOOK], tmp_path).splitlines()
    assert python.parents[1] in Path(root).parents
    assert others == "[]"
    options = ("--router-port", "0", "--replicas", "prefill=1", "--replicas", "decode=1")
    async with Up(tmp_path, "mock_fleet", *options, quartet=python.with_name("quartet")) as up:
        await up.wait_ready()
        assert (await up.paste("quartet generate")).out.strip()
        assert str(ROOT) not in "".join(up.processes().values())
        await up.end(signal.SIGINT)


def test_it_ships_all_that_its_topologies_name(python: Path, tmp_path: Path) -> None:
    shipped = Path(run([str(python), "-c", _LOOK], tmp_path).splitlines()[0])
    for folder in ("configs", "models/tiny/checkpoint", "models/tiny/pictures"):
        files = {file.relative_to(ROOT): file for file in (ROOT / folder).rglob("*") if file.is_file()}
        assert files
        for name, file in files.items():
            assert (shipped / name).read_bytes() == file.read_bytes()
    planned = run([str(python.with_name("quartet")), "up", "trtllm/disagg", "--dry-run"], tmp_path)
    assert "trtllm-disagg: nothing was started" in planned
