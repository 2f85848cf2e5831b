"""``tools/node.sh`` gets the TypeScript client's packages once, runs their programs, and says what a machine lacks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.tooling.machine import TYPESCRIPT, Machine

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One with Node; its npm makes a compiler that says where it was started."""
    machine = Machine(tmp_path)
    machine.install("node", "")
    machine.install("npm", "mkdir -p node_modules/.bin")
    machine.write_program(machine.root / TYPESCRIPT / "node_modules/.bin/tsc", 'echo "$PWD $@"')
    return machine


def test_packages_are_installed_again_only_when_the_lock_file_changes(machine: Machine) -> None:
    for _ in range(2):
        assert machine.run("tools/node.sh").returncode == 0
    assert machine.calls("npm") == ["ci --quiet"]
    (machine.root / TYPESCRIPT / "package-lock.json").write_text("{}")
    assert machine.run("tools/node.sh").returncode == 0
    assert machine.calls("npm") == ["ci --quiet"] * 2


def test_a_program_of_theirs_runs_in_the_clients_folder(machine: Machine) -> None:
    ran = machine.run("tools/node.sh", "tsc", "--noEmit")
    assert ran.stdout == f"{machine.root / TYPESCRIPT} --noEmit\n"


@pytest.mark.parametrize(("is_required", "status"), [("", 0), ("1", 1)])
@pytest.mark.parametrize(
    ("programs", "reason"),
    [
        ({}, "there is no Node (on Debian: apt-get install nodejs npm)"),
        ({"node": ""}, "there is no npm (on Debian: apt-get install npm)"),
        ({"node": "", "npm": "exit 1"}, "npm ci failed"),
    ],
)
def test_what_is_missing_is_named_and_fails_where_it_is_required(
    tmp_path: Path, programs: dict[str, str], reason: str, is_required: str, status: int
) -> None:
    machine = Machine(tmp_path)
    for name, script in programs.items():
        machine.install(name, script)
    ran = machine.run("tools/node.sh", "tsc", QUARTET_REQUIRE_NODE=is_required)
    assert (ran.returncode, ran.stdout) == (status, "")
    assert ran.stderr == f"node: {reason}; the TypeScript client is neither checked nor tested\n"
    # It is not taken for done.
    assert not (machine.root / TYPESCRIPT / "node_modules/.made-from").exists()


def test_every_version_is_pinned_and_the_lock_file_names_no_registry() -> None:
    package = json.loads((_ROOT / TYPESCRIPT / "package.json").read_text())
    pins = package["dependencies"] | package["devDependencies"]
    lock = (_ROOT / TYPESCRIPT / "package-lock.json").read_text()
    locked = json.loads(lock)["packages"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in pins} == pins
    assert all(entry["integrity"].startswith("sha512-") for path, entry in locked.items() if path)
    assert not re.search("https?:", lock)
