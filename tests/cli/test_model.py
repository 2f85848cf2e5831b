"""``quartet model``: a Hub's repository is fetched, resumed, mended, then found without it; folders are copied."""

from __future__ import annotations

import json
import os
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

    listed = json.loads(run(hub, tmp_path, "list", "--json", "--cache", str(tmp_path / "none")).stdout)
    assert [(one["name"], one["origin"]) for one in listed] in ([], [(REPOSITORY, "hub")])
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
