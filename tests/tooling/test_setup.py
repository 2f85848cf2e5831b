"""``tools/setup.sh`` makes the environment, repairs it, and leaves it alone when it is good."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tooling.machine import Machine

PLENTY = "echo header; echo 'disk 99999999 0 99999999 0% /'"
# Makes what `is_usable` checks.
PYTHON = """
if [[ $2 == venv ]]; then
    venv=${@: -1}
    rm -rf "$venv"
    mkdir -p "$venv/bin"
    printf '%s\\n' "#!$BASH" 'echo "$@" >>"$(dirname "$0")/../calls"' >"$venv/bin/python"
    chmod +x "$venv/bin/python"
    echo "#!$PWD/$venv/bin/python" >"$venv/bin/pip"
    [[ " $* " == *" --system-site-packages "* ]] && has_system=true || has_system=false
    echo "include-system-site-packages = $has_system" >"$venv/pyvenv.cfg"
fi
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One with Python and enough disk."""
    machine = Machine(tmp_path)
    machine.install("python3", PYTHON)
    machine.install("df", PLENTY)
    return machine


def installs(machine: Machine) -> list[str]:
    calls = machine.root / ".venv" / "calls"
    return [call for call in calls.read_text().splitlines() if call.startswith("-m pip install")]


def test_a_new_environment_is_made_once(machine: Machine) -> None:
    first = machine.run("tools/setup.sh", "dev")
    assert first.returncode == 0, first.stderr
    assert "setup: done" in first.stdout
    again = machine.run("tools/setup.sh", "dev")
    assert (again.returncode, again.stdout, len(installs(machine))) == (0, "", 1)
    assert machine.run("tools/setup.sh", "torch,dev").returncode == 0
    assert [call.rpartition(" ")[2] for call in installs(machine)] == [".[dev]", ".[torch,dev]"]


def test_a_container_s_packages_stay_as_they_are(machine: Machine) -> None:
    machine.run("tools/setup.sh", "dev")
    ran = machine.run("tools/setup.sh", "", SITE_PACKAGES="1")
    assert ran.returncode == 0, ran.stderr
    assert machine.calls("python3")[-1] == "-m venv --clear --system-site-packages .venv"
    [install] = installs(machine)
    assert "constraints.txt" not in install
    assert install.endswith(" -e .")
    assert machine.run("tools/setup.sh", "", SITE_PACKAGES="1").stdout == ""


def test_a_broken_environment_is_made_anew(machine: Machine) -> None:
    machine.run("tools/setup.sh", "dev")
    python = machine.root / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nonexistent/python3")
    ran = machine.run("tools/setup.sh", "dev")
    assert ran.returncode == 0, ran.stderr
    assert ".venv is broken" in ran.stdout
    assert "--clear .venv" in machine.calls("python3")[-1]
    assert machine.run("tools/setup.sh", "dev").stdout == ""


@pytest.mark.parametrize(("extras", "need_mib"), [("dev", 600), ("torch,dev", 7000)])
def test_too_small_a_disk_is_reported_before_anything_is_made(machine: Machine, extras: str, need_mib: int) -> None:
    machine.install("df", f"echo header; echo 'disk 99999999 0 {(need_mib - 1) * 1024} 0% /'")
    ran = machine.run("tools/setup.sh", extras)
    assert ran.returncode == 1
    assert f"about {need_mib} MiB are needed in {machine.root}, {need_mib - 1} MiB are free" in ran.stderr
    assert not (machine.root / ".venv").exists()


def test_too_old_a_python_is_reported(machine: Machine) -> None:
    machine.install("python3", "exit 1")
    ran = machine.run("tools/setup.sh", "dev")
    assert ran.returncode == 1
    assert "Python 3.11 or newer is needed" in ran.stderr
