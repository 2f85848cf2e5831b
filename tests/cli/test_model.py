"""``quartet model``: a Hub's repository is fetched, resumed, mended, then found without it; folders are copied."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.app import app
from tests import tiny
from tests.fakes.hub import COMMIT, REPOSITORY, Hub, serve_hub

WEIGHTS = "model.safetensors"
# The Hub's library writes so much at a time.
HALF = 12_000_000
QUARTET = [sys.executable, "-c", "from cli.app import main; main()", "model"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A Hub with the tiny model."""
    with serve_hub(tiny.CHECKPOINT) as hub:
        yield hub


def run(hub: Hub, home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **hub.variables(home), **variables}
    command = [*QUARTET, *arguments]
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=120)


def test_a_fetch_that_was_killed_goes_on_and_what_comes_damaged_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    hub.hang_after = {WEIGHTS: HALF}
    killed = subprocess.Popen([*QUARTET, "fetch", REPOSITORY], env={**os.environ, **hub.variables(tmp_path)})
    try:
        assert hub.has_hung.wait(120)
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait(60)
    first = {name for name, _ in hub.ranges}

    said = run(hub, tmp_path, "list", "--json", "--cache", str(tmp_path / "none"))
    listed = json.loads(said.stdout)
    assert [(one["name"], one["origin"]) for one in listed] in ([], [(REPOSITORY, "hub")])
    assert bool(listed) != ("quartet: left out of the list: " in said.stderr)
    assert all("*.safetensors is missing" in " ".join(one["faults"]) for one in listed)

    hub.ranges.clear()
    hub.break_after, hub.damaged = {WEIGHTS: HALF}, {"chat_template.jinja"} - first
    done = run(hub, tmp_path, "fetch", REPOSITORY)
    folder = Path(done.stdout.strip())
    assert folder == tmp_path / "hub" / f"models--{REPOSITORY.replace('/', '--')}" / "snapshots" / COMMIT, done.stderr
    asked = [how for name, how in hub.ranges if name == WEIGHTS]
    assert len(asked) == 2 and asked[1] is not None, "a connection that broke is gone on with"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == hub.files
    assert not list(folder.parent.parent.glob("blobs/*.incomplete")), "what the killed one left is gone"

    path = (folder / WEIGHTS).resolve()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    checked = run(hub, tmp_path, "check", REPOSITORY, "--json", HF_HUB_OFFLINE="1")
    bad = [file["name"] for file in json.loads(checked.stdout)["files"] if file["verdict"] != "whole"]
    assert (checked.returncode, bad) == (1, [WEIGHTS])

    hub.ranges.clear()
    mended = run(hub, tmp_path, "fetch", REPOSITORY)
    assert f"{WEIGHTS}: damaged, fetched again" in mended.stderr
    assert [name for name, _ in hub.ranges] == [WEIGHTS]
    assert (folder / WEIGHTS).read_bytes() == content
    offline = run(hub, tmp_path, "fetch", REPOSITORY, HF_HUB_OFFLINE="1")
    assert offline.stdout == mended.stdout


def test_a_folder_is_copied_listed_and_checked_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "quartet" / "models" / "mine"
    fetched = CliRunner().invoke(app, ["model", "fetch", str(tiny.CHECKPOINT), "--name", "mine"])
    assert fetched.stdout == f"{folder}\n"
    listed = CliRunner().invoke(app, ["model", "list", "--json"])
    [mine] = [one for one in json.loads(listed.stdout) if one["origin"] == "copy"]
    assert (mine["name"], mine["folder"], mine["faults"]) == ("mine", str(folder), [])
    assert mine["size_bytes"] == sum(path.stat().st_size for path in tiny.CHECKPOINT.iterdir())
    assert "complete" in CliRunner().invoke(app, ["model", "list"]).stdout
    assert CliRunner().invoke(app, ["model", "check", "mine"]).exit_code == 0

    (folder / "tokenizer.json").write_text("{}")
    checked = CliRunner().invoke(app, ["model", "check", "mine"])
    assert checked.exit_code == 1
    assert "damaged" in checked.stdout

    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    written_at = (tiny.CHECKPOINT / "model.safetensors").stat().st_mtime_ns
    os.utime(folder / "model.safetensors", ns=(written_at, written_at))
    content = bytearray((folder / "config.json").read_bytes())
    content[-1] ^= 1
    (folder / "config.json").write_bytes(content)
    written_at = (tiny.CHECKPOINT / "config.json").stat().st_mtime_ns
    os.utime(folder / "config.json", ns=(written_at, written_at))
    mended = CliRunner().invoke(app, ["model", "fetch", str(tiny.CHECKPOINT), "--name", "mine"])
    assert "quartet: config.json: damaged, copied again" in mended.stderr
    assert mended.exit_code == 0
    assert CliRunner().invoke(app, ["model", "check", "mine"]).exit_code == 0


def test_a_copy_comes_before_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    fetched = CliRunner().invoke(app, ["model", "fetch", str(tiny.CHECKPOINT), "--name", "mine", "--cache", "models"])
    assert fetched.exit_code == 0
    for name, folder in (("mine", "models/mine"), ("./mine", "mine"), (".", ".")):
        checked = CliRunner().invoke(app, ["model", "check", name, "--cache", "models", "--json"])
        assert json.loads(checked.stdout)["folder"] == folder


def test_what_can_be_no_copy_is_refused_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = Path(shutil.copytree(tiny.CHECKPOINT, tmp_path / "m1"))
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.rglob("*"))
    for arguments, said in (
        (["m1", "--cache", "models", "--name", ".."], "name: '..' is not a name of one folder in models"),
        (["m1", "--cache", "models", "--name", "../x"], "name: '../x' is not a name of one folder in models"),
        (["m1", "--cache", "m1"], "cache: m1/m1 is in m1, which is to be copied"),
        (["loop"], "model: loop can't be read: Too many levels of symbolic links"),
        ([REPOSITORY, "--cache", "models"], "cache: only for copies of folders"),
        ([REPOSITORY, "--name", "x"], "name: only for copies of folders"),
    ):
        result = CliRunner().invoke(app, ["model", "fetch", *arguments])
        assert (result.exit_code, said in result.stderr) == (1, True), (arguments, result.stderr, result.exception)
    result = CliRunner().invoke(app, ["model", "check", REPOSITORY, "--cache", "models"])
    assert (result.exit_code, "cache: only for copies of folders" in result.stderr) == (1, True)
    assert sorted(tmp_path.rglob("*")) == before

    (source / "loop.json").symlink_to("loop.json")
    checked = CliRunner().invoke(app, ["model", "check", "./m1"])
    assert (checked.exit_code, "loop.json" in checked.stdout) == (1, True), checked.exception


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fetch", "gone"], "model: gone can't be read"),
        (["check", "gone"], "model: gone is no folder, no copy in"),
    ],
)
def test_what_is_nowhere_is_named(arguments: list[str], said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["model", *arguments, "--cache", str(tmp_path)])
    assert result.exit_code == 1
    assert said in result.stderr
