"""Configuration is strict, and says where it is wrong."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest

from quartet.config import (
    PathText,
    build,
    escape_path,
    expand_path,
    load_yaml,
    override,
    write_secret_file,
    write_whole_file,
)
from quartet.errors import ConfigError


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Inner:
    timeout_s: float = 1.0
    colour: Colour = Colour.RED

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ConfigError("timeout_s: must be above 0")
        if self.timeout_s > 100:
            raise ValueError("that is too long")


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    count: int = 3
    is_fast: bool = False
    limit: int | None = 5
    file: Path | None = None
    inner: Inner = field(default_factory=Inner)
    optional: Inner | None = None
    several: tuple[Inner, ...] = ()
    ways: tuple[str, ...] = ("grpc",)
    by_name: Mapping[str, float] = field(default_factory=dict)


def test_an_absent_value_has_its_default() -> None:
    assert build(Outer, {"name": "a"}) == Outer(name="a")


def test_every_kind_of_field_is_built() -> None:
    mapping = {
        "name": "a",
        "count": 7,
        "is_fast": True,
        "limit": None,
        "file": "/tmp/x",
        "inner": {"timeout_s": 2, "colour": "blue"},
        "optional": {"timeout_s": 0.5},
        "several": [{}, {"colour": "blue"}],
        "ways": ["shm", "grpc"],
        "by_name": {"a": 1},
    }
    assert build(Outer, mapping) == Outer(
        name="a",
        count=7,
        is_fast=True,
        limit=None,
        file=Path("/tmp/x"),
        inner=Inner(timeout_s=2.0, colour=Colour.BLUE),
        optional=Inner(timeout_s=0.5),
        several=(Inner(), Inner(colour=Colour.BLUE)),
        ways=("shm", "grpc"),
        by_name={"a": 1.0},
    )


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "top.name: is missing"),
        ({"name": 5}, "top.name: must be text"),
        ({"name": "a", "count": "7"}, "top.count: must be a whole number, not '7'"),
        ({"name": "a", "count": True}, "top.count: must be a whole number"),
        ({"name": "a", "count": 1.5}, "top.count: must be a whole number"),
        ({"name": "a", "count": None}, "top.count: must be a whole number"),
        ({"name": "a", "is_fast": 1}, "top.is_fast: must be true or false"),
        ({"name": "a", "file": 3}, "top.file: must be a path"),
        ({"name": "a", "inner": 3}, "top.inner: must be a mapping"),
        ({"name": "a", "inner": {"timeout_s": "1s"}}, "top.inner.timeout_s: must be a number"),
        ({"name": "a", "inner": {"timeout_s": float("nan")}}, "top.inner.timeout_s: must be a number"),
        ({"name": "a", "inner": {"colour": "green"}}, "top.inner.colour: must be one of red, blue, not 'green'"),
        ({"name": "a", "inner": {"timeout_s": 0}}, "top.inner.timeout_s: must be above 0"),
        ({"name": "a", "inner": {"timeout_s": 101}}, "top.inner: that is too long"),
        ({"name": "a", "several": {}}, "top.several: must be a list"),
        ({"name": "a", "several": [{}, {"colour": 1}]}, r"top.several\[1\].colour: must be one of"),
        ({"name": "a", "by_name": {"x": "y"}}, "top.by_name.x: must be a number"),
        ({"name": "a", "ways": "grpc"}, "top.ways: must be a list"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused_by_its_path(mapping: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        build(Outer, mapping, "top")


def test_an_unknown_key_is_refused_with_names_like_it() -> None:
    with pytest.raises(ConfigError, match=r"^inner\.timeout: unknown; did you mean timeout_s\?"):
        build(Outer, {"name": "a", "inner": {"timeout": 1}})
    with pytest.raises(ConfigError, match=r"^zzz: unknown; known here: name, count"):
        build(Outer, {"name": "a", "zzz": 1})


def test_a_field_type_that_is_not_supported_is_our_own_bug() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Odd:
        value: complex = 0

    with pytest.raises(TypeError, match="not supported"):
        build(Odd, {"value": 1})


def test_yaml_is_read_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: a\ninner:\n  timeout_s: 2\n")
    assert load_yaml(path) == {"name": "a", "inner": {"timeout_s": 2}}
    path.write_text("# nothing\n")
    assert load_yaml(path) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "must hold a mapping"),
        ("1: a\n", "must hold a mapping"),
        ("a: [\n", "not YAML"),
        ("a: 2026-99-99\n", "not YAML"),
        ("a: !!int x\n", "not YAML"),
        ("{{a: b}: c}\n", "not YAML"),
        ("[" * 5000, "nested too deeply"),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "'c' stands twice"),
        ("a: !!python/object/apply:os.getcwd []\n", "not YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_yaml(path)
    assert "c.yaml" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_yaml(tmp_path / "none.yaml")


def test_an_override_sets_one_value_and_changes_nothing_given() -> None:
    mapping: dict[str, object] = {"name": "a", "inner": {"timeout_s": 2, "colour": "red"}}
    assert override(mapping, "inner.timeout_s=3.5") == {"name": "a", "inner": {"timeout_s": 3.5, "colour": "red"}}
    assert mapping == {"name": "a", "inner": {"timeout_s": 2, "colour": "red"}}


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("a.b.c=1", {"a": {"b": {"c": 1}}}),
        ("address=127.0.0.1:0", {"address": "127.0.0.1:0"}),
        ("ways=[shm, grpc]", {"ways": ["shm", "grpc"]}),
        ("limit=null", {"limit": None}),
        ("text='5'", {"text": "5"}),
        ("expression=a=b", {"expression": "a=b"}),
    ],
)
def test_an_override_is_read_as_yaml(assignment: str, expected: dict[str, object]) -> None:
    assert override({}, assignment) == expected


@pytest.mark.parametrize("assignment", ["a", "=1", "a..b=1", "a=[", "name.x=1"])
def test_an_override_that_makes_no_sense_is_refused(assignment: str) -> None:
    with pytest.raises(ConfigError):
        override({"name": "text"}, assignment)


def test_a_mapping_that_another_component_checks_is_kept_unchanged() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Section:
        settings: Mapping[str, object]

    settings = {"depth": {"x": [1, "two", None]}}
    assert build(Section, {"settings": settings}).settings == settings
    with pytest.raises(ConfigError, match="settings: must be a mapping"):
        build(Section, {"settings": 3})


def test_values_of_a_file_name_variables_and_get_their_types_afterwards(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text(
        """
        port: ${PORT:-8000}
        quoted: "${PORT:-8000}"
        none: ${UNSET:-}
        list: [a, "${NAME}-${NAME}", '${UNSET:-x y}']
        nested: {shared: &shared "${NAME}", alias: *shared}
        escaped: $${NAME} and $NAME, $1 and $$
        "${NAME}": a key stays
        empty: ${EMPTY:-as unset}
        """
    )
    variables = {"NAME": "n: {b}", "PORT": "80", "EMPTY": ""}
    assert load_yaml(file, variables) == {
        "port": 80,
        "quoted": "80",
        "none": None,
        "list": ["a", "n: {b}-n: {b}", "x y"],
        "nested": {"shared": "n: {b}", "alias": "n: {b}"},
        "escaped": "${NAME} and $NAME, $1 and $$",
        "${NAME}": "a key stays",
        "empty": "as unset",
    }
    assert load_yaml(file)["port"] == "${PORT:-8000}", "where no variables are given, none are looked for"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {b: [x, '${MISSING}']}", r"a\.b\[1\]: the variable MISSING is not set, and \$\{MISSING\} has no default"),
        ("a: ${}", r"a: a variable is \$\{NAME\} or \$\{NAME:-default\}"),
        ("a: ${1}", "a: a variable is"),
        ("a: ${A", "a: a variable is"),
        ("a: ${A:=x}", "a: a variable is"),
        ("a: ${A:-${B}}", "a: a variable is"),
    ],
)
def test_a_variable_that_is_none_is_named_with_its_field(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "some.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"^{message}"):
        load_yaml(file, {"A": "a", "B": "b"})


@dataclass(frozen=True, kw_only=True)
class Paths:
    file: Path | None = None
    several: tuple[Path, ...] = ()
    model: PathText = ""
    text: str = ""


def test_home_and_variables_are_replaced_in_paths_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/$me")
    monkeypatch.setenv("BASE", "/srv/$x")
    given = {"file": "~/a$$b", "several": ["$BASE/c", "d~/${BASE}"], "model": "~/m", "text": "~/$BASE"}
    paths = build(Paths, given)
    assert paths == Paths(
        file=Path("/home/$me/a$b"),
        several=(Path("/srv/$x/c"), Path("d~//srv/$x")),
        model="/home/$me/m",
        text="~/$BASE",
    )
    assert build(Paths, {"model": "org/name@v1.0"}).model == "org/name@v1.0"


@pytest.mark.parametrize("path", ["/a/$b/${c}/$$", "~/x", "~", "plain", "a~$"])
def test_an_escaped_path_is_read_as_it_is(path: str) -> None:
    assert Path(expand_path(escape_path(path))) == Path(path)


def test_a_path_with_an_unset_variable_is_refused_by_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNSET", raising=False)
    with pytest.raises(
        ConfigError, match=r"^top\.several\[0\]: the variable UNSET, which '/a/\$UNSET' names, is not set"
    ):
        build(Paths, {"several": ["/a/$UNSET"]}, "top")
    with pytest.raises(ConfigError, match=r"^model: ~no_such_user_here, which .* is nobody's home"):
        build(Paths, {"model": "~no_such_user_here/x"})


def test_a_secret_is_replaced_as_a_whole_and_only_its_owner_can_open_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"old")
    with pytest.raises(FileExistsError, match="key"):
        write_secret_file(file, b"new")
    assert write_whole_file(file, b"new") == file
    assert file.read_bytes() == b"new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole_file(file, b"newer")
    with pytest.raises(OSError, match="No space left"):
        write_secret_file(tmp_path / "another", b"newer")
    assert [(path, path.read_bytes()) for path in tmp_path.iterdir()] == [(file, b"new")]
