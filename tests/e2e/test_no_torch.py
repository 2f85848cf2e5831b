"""A router, a client and the command line need neither torch nor transformers; a worker's engine alone does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.stack import Stack

_HEAVY = ("torch", "transformers", "safetensors")


@pytest.mark.parametrize(
    "module", ["router.__main__", "quartet.client", "quartet.client.sync", "quartet.client.direct", "cli.app"]
)
def test_importing_it_imports_no_torch(module: str) -> None:
    assert _heavy_after(f"import {module}") == []


def test_no_command_imports_torch() -> None:
    # A subcommand is imported when it is called.
    load_all = "for command in typer.main.get_command(cli.app.app).commands.values(): command.load()"
    assert _heavy_after(f"import typer.main, cli.app\n{load_all}") == []


def test_a_router_at_work_has_no_torch_in_its_memory(stack: Stack) -> None:
    maps = {name: _mapped_files(stack.processes[name].pid) for name in ("router", "decode-0")}
    assert any("libtorch" in path for path in maps["decode-0"]), "the look itself is wrong"
    for name in ("libtorch", "/torch/", "/transformers/", "/safetensors/"):
        assert not [path for path in maps["router"] if name in path]


def _heavy_after(program: str) -> list[str]:
    program = f"{program}\nimport sys\nprint(*sorted(set({_HEAVY}) & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    return ended.stdout.split()


def _mapped_files(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
