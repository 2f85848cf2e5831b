"""``tools/prometheus.sh`` unpacks Debian's package, or says why there is none; a failure where it is required."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tooling.machine import Machine

# `dpkg-deb -x PACKAGE FOLDER`
UNPACK = 'mkdir -p "$3/usr/bin"; printf "%s" unpacked >"$3/usr/bin/prometheus"; chmod +x "$3/usr/bin/prometheus"'


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One with a folder for temporary files."""
    machine = Machine(tmp_path)
    machine.install("mktemp", f'mkdir -p "{tmp_path}/scratch"; echo "{tmp_path}/scratch"')
    return machine


def test_debians_package_is_unpacked_once(machine: Machine) -> None:
    machine.install("apt-get", ": >prometheus_2.deb")
    machine.install("dpkg-deb", UNPACK)
    for _ in range(2):
        ran = machine.run("tools/prometheus.sh", QUARTET_REQUIRE_PROMETHEUS="1")
        assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")
    assert (machine.root / ".tools/prometheus/usr/bin/prometheus").read_text() == "unpacked"
    assert len(machine.calls("apt-get")) == 1


@pytest.mark.parametrize(("is_required", "status"), [("", 0), ("1", 1)])
@pytest.mark.parametrize(
    ("programs", "reason"),
    [
        ({}, "no prometheus, and no apt-get that would fetch it"),
        (
            {"apt-get": "exit 1", "dpkg-deb": ""},
            "Debian's package prometheus could not be fetched (apt-get update?)",
        ),
    ],
)
def test_what_is_missing_is_named_and_fails_where_it_is_required(
    machine: Machine, programs: dict[str, str], reason: str, is_required: str, status: int
) -> None:
    for name, script in programs.items():
        machine.install(name, script)
    ran = machine.run("tools/prometheus.sh", QUARTET_REQUIRE_PROMETHEUS=is_required)
    assert (ran.returncode, ran.stderr) == (status, f"tools: {reason}: its tests are skipped\n")
