"""``.ci/run`` gets what a fresh machine lacks, and ends at once where it can't."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tooling.machine import Machine
from tests.tooling.test_binaries import NEW_GO


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A fresh one: neither Go, nor etcd, nor grpcurl; what is installed does nothing."""
    machine = Machine(tmp_path)
    for name in ("python3", "make", "apt-get"):
        machine.install(name, "")
    return machine


@pytest.fixture
def equipped(machine: Machine) -> Machine:
    """One that lacks nothing."""
    for name in ("etcd", "grpcurl", "go", "node", "npm", "chromium", "chromedriver", "systemd-analyze"):
        machine.install(name, "")
    return machine


def test_a_machine_without_go_gets_it(machine: Machine) -> None:
    for name in ("etcd", "grpcurl"):
        machine.install(name, "")
    machine.run(".ci/run")
    assert machine.calls("apt-get")[0] == "update -q"
    assert "golang-go ca-certificates" in machine.calls("apt-get")[1]


def test_a_machine_without_npm_gets_it_with_node(machine: Machine) -> None:
    for name in ("etcd", "grpcurl", "go", "node", "chromium", "chromedriver", "systemd-analyze"):
        machine.install(name, "")
    machine.run(".ci/run")
    assert machine.calls("apt-get")[1].endswith("--no-install-recommends nodejs npm")


def test_a_machine_without_a_browser_gets_chromium(machine: Machine) -> None:
    for name in ("etcd", "grpcurl", "go", "node", "npm", "chromium", "systemd-analyze"):
        machine.install(name, "")
    machine.run(".ci/run")
    assert machine.calls("apt-get")[1].endswith("--no-install-recommends chromium chromium-driver")


def test_a_machine_without_systemd_gets_it_for_the_units(machine: Machine) -> None:
    for name in ("etcd", "grpcurl", "go", "node", "npm", "chromium", "chromedriver"):
        machine.install(name, "")
    machine.run(".ci/run")
    assert machine.calls("apt-get")[1].endswith("--no-install-recommends systemd")


def test_a_machine_that_has_all_gets_nothing(equipped: Machine) -> None:
    assert equipped.run(".ci/run").returncode == 0
    assert equipped.calls("apt-get") == []
    first, last = ["setup", "-j2 --output-sync -k lint-rest", "tools"], ["test-long"]
    called = equipped.calls("make")
    assert called[:3] == first and called[5:] == last
    assert sorted(called[3:5]) == ["lint-types", "test"]


def test_a_wrong_type_fails_the_gate_once_the_tests_are_done(equipped: Machine) -> None:
    equipped.install("make", 'if [ "$1" = lint-types ]; then echo "error: a wrong type"; exit 2; fi')
    ran = equipped.run(".ci/run")
    assert ran.returncode != 0
    assert ran.stdout.splitlines()[-1] == "error: a wrong type"
    assert "test" in equipped.calls("make") and "test-long" not in equipped.calls("make")


def test_what_mypy_says_is_shown_where_tests_fail(equipped: Machine) -> None:
    equipped.install(
        "make", 'case "$1" in lint-types) echo "no wrong type";; test) echo "a test failed"; exit 2;; esac'
    )
    ran = equipped.run(".ci/run")
    assert ran.returncode != 0
    assert {"a test failed", "no wrong type"} <= set(ran.stdout.splitlines())
    assert "test-long" not in equipped.calls("make")


def test_a_gate_without_grpcurl_says_so_and_runs_no_test(machine: Machine) -> None:
    machine.install("etcd", "")
    machine.install("go", "exit 1")
    ran = machine.run(".ci/run")
    assert ran.returncode == 1
    wanted = ".ci/run: the gate needs grpcurl, and 'make tools' (above) could neither find nor build it"
    assert ran.stderr.splitlines()[-1] == wanted
    assert machine.calls("make") == ["setup", "-j2 --output-sync -k lint-rest", "tools"]


def test_go_builds_beside_set_up_and_lint(machine: Machine) -> None:
    # The fake `make` builds nothing.
    machine.install("go", NEW_GO)
    assert machine.run(".ci/run").returncode == 0
    assert (machine.root / ".tools" / "bin" / "grpcurl").exists()
    assert machine.calls("make")[-1] == "test-long"
