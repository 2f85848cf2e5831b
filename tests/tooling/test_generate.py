"""Generation is repeatable, and says which stubs differ from the contracts."""

from __future__ import annotations

from pathlib import Path

from codegen.generate import differing_files, generate


def test_the_same_contracts_give_the_same_stubs(tmp_path: Path) -> None:
    for name in ("first", "again"):
        generate(tmp_path / name)
    first, again = (tmp_path / name / "quartet" / "v1" for name in ("first", "again"))
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


def test_contracts_without_a_service_have_no_grpc_stub(tmp_path: Path) -> None:
    generate(tmp_path)
    stubs = {path.name for path in (tmp_path / "quartet" / "v1").glob("*_pb2_grpc.py")}
    assert "decode_pb2_grpc.py" in stubs
    assert "types_pb2_grpc.py" not in stubs
