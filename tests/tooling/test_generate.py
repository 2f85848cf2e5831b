"""Generation is repeatable, and says which stubs differ from the contracts, and which it could not look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen import python
from codegen.generate import differing_files, run
from codegen.language import PACKAGE, Language, ToolMissingError


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def without_tools(_: Path) -> None:
    raise ToolMissingError("no compiler")


def test_the_same_contracts_give_the_same_stubs(tmp_path: Path) -> None:
    for name in ("first", "again"):
        python.generate(tmp_path / name)
    first, again = (tmp_path / name / PACKAGE for name in ("first", "again"))
    assert (first / "types_pb2.pyi").exists()
    assert differing_files(first, again) == []


def test_a_file_edited_missing_or_left_over_is_named(tmp_path: Path) -> None:
    expected, actual = tmp_path / "expected", tmp_path / "actual"
    for directory, files in {expected: ["same.py", "edited.py", "missing.py"], actual: ["same.py", "left.pyi"]}.items():
        directory.mkdir()
        for name in files:
            (directory / name).write_text("")
    (actual / "edited.py").write_text("# by hand\n")
    assert differing_files(expected, actual) == ["edited.py", "left.pyi", "missing.py"]


def test_writing_replaces_what_differs_and_deletes_what_is_left_over(tmp_path: Path) -> None:
    language = Language(name="X", root=tmp_path, generate=lambda out: write(out / PACKAGE / "new.x", "made"))
    write(tmp_path / PACKAGE / "old.x", "left over")
    assert run(language, is_check=False)
    assert [(path.name, path.read_text()) for path in (tmp_path / PACKAGE).iterdir()] == [("new.x", "made")]


@pytest.mark.parametrize(("is_required", "is_good"), [(False, True), (True, False)])
def test_a_language_without_its_tools_is_named_and_fails_where_it_is_required(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_required: bool,
    is_good: bool,
) -> None:
    monkeypatch.setenv("QUARTET_REQUIRE_X", "1" if is_required else "")
    language = Language(name="X", root=tmp_path, generate=without_tools, required_by="QUARTET_REQUIRE_X")
    assert run(language, is_check=True) is is_good
    assert capsys.readouterr().err == "X: stubs not checked: no compiler\n"


def test_contracts_without_a_service_have_no_grpc_stub(tmp_path: Path) -> None:
    python.generate(tmp_path)
    stubs = {path.name for path in (tmp_path / PACKAGE).glob("*_pb2_grpc.py")}
    assert "decode_pb2_grpc.py" in stubs
    assert "types_pb2_grpc.py" not in stubs
