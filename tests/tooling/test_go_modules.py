"""The Go client and the tools are built with the same versions of what both need, so that builds share Go's caches."""

from __future__ import annotations

import re
from pathlib import Path

from tests.tooling.machine import Machine

_ROOT = Path(__file__).resolve().parents[2]


def requirements(path: Path) -> dict[str, str]:
    """Versions by module, as a go.mod has them; that of Go by ``go``."""
    text = path.read_text()
    return dict(re.findall(r"^\t(\S+) (v\S+)", text, re.MULTILINE)) | dict(
        re.findall(r"^(go) (\S+)$", text, re.MULTILINE)
    )


def test_versions_are_those_of_the_tools() -> None:
    client, tools = requirements(_ROOT / "go.mod"), requirements(_ROOT / "tools/go.mod")
    assert {"go", "google.golang.org/grpc", "google.golang.org/protobuf"} <= client.keys()
    assert client == {module: tools.get(module) for module in client}


def test_a_machine_without_go_checks_no_go_and_says_so_unless_it_must(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    ran = machine.run("tools/lint_go.sh")
    assert (ran.returncode, ran.stderr) == (0, "lint-go: not checked: there is no Go that takes tools/go.mod\n")
    assert machine.run("tools/lint_go.sh", QUARTET_REQUIRE_GO="1").returncode == 1


def test_code_that_gofmt_would_change_is_named(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.install("go", f"[[ $2 == GOVERSION ]] && echo go1.26.8 || echo {tmp_path}")
    machine.write_program(tmp_path / "bin" / "gofmt", "echo clients/go/bad.go")
    ran = machine.run("tools/lint_go.sh")
    assert (ran.returncode, ran.stderr) == (1, "lint-go: run gofmt -w on clients/go/bad.go\n")
    machine.write_program(tmp_path / "bin" / "gofmt", "")
    assert machine.run("tools/lint_go.sh").returncode == 0
    assert machine.calls("go")[-1] == "vet ./clients/go/... ./benchmarks/..."
