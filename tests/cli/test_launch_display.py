"""What ``quartet up`` shows: log lines behind names, and lines that can be pasted."""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cli.launch_display import LaunchDisplay, paste_lines
from services.topology.launch import find_grpcurl

BIN = Path(sys.executable).parent


def test_log_lines_stand_whole_behind_the_name_of_their_process(capsys: pytest.CaptureFixture[str]) -> None:
    display = LaunchDisplay()
    display.log_line("router", "a [bold]line[/bold] of " + "x" * 300)
    display.log_line("prefill-10", "another")
    display.progress("starting")
    assert capsys.readouterr().err.splitlines() == [
        "router    | a [bold]line[/bold] of " + "x" * 300,
        "prefill-10 | another",
        "up        | starting",
    ]
    assert display.last_progress == "starting"


def test_ready_and_what_to_paste_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    LaunchDisplay().ready("127.0.0.1:50050")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["", "ready"]
    assert lines[-2:] == ["quartet generate 'Once upon a time' --max-tokens 32", "quartet workers"]


def test_another_port_is_part_of_every_line() -> None:
    *_, generate, workers = paste_lines("127.0.0.1:6001", "/usr/bin")
    assert generate.endswith("--router 127.0.0.1:6001")
    assert workers == "quartet workers --router 127.0.0.1:6001"


def test_the_path_is_exported_only_where_programs_are_not_on_it() -> None:
    grpcurl = find_grpcurl()
    on_path = ":".join(map(str, [BIN, *([grpcurl.parent] if grpcurl else [])]))
    assert not any(line.startswith("export") for line in paste_lines("127.0.0.1:50050", on_path))
    [export] = [line for line in paste_lines("127.0.0.1:50050", "/nowhere") if line.startswith("export ")]
    assert export.startswith(f"export PATH={BIN}")
    assert export.endswith(":$PATH")


@pytest.mark.grpcurl
def test_the_grpcurl_line_asks_the_router_for_tokens() -> None:
    [line] = [line for line in paste_lines("127.0.0.1:6001", "/nowhere") if line.startswith("grpcurl ")]
    _, _, _, request, address, method = shlex.split(line)
    assert request == '{"start":{"text":"Once upon a time","sampling":{"max_tokens":32}}}'
    assert (address, method) == ("127.0.0.1:6001", "quartet.v1.RouterService/Generate")


def test_where_pictures_are_taken_there_are_lines_that_send_one() -> None:
    lines = paste_lines("127.0.0.1:6001", "/usr/bin", takes_images=True)
    [generate] = [shlex.split(line) for line in lines if "--image" in line]
    assert Path(generate[generate.index("--image") + 1]).read_bytes().startswith(b"\xff\xd8")
    assert generate[:3] == ["quartet", "generate", "--chat"]
    assert not any("--image" in line for line in paste_lines("127.0.0.1:6001", "/usr/bin"))


@pytest.mark.grpcurl
def test_the_grpcurl_line_with_a_picture_is_json_with_its_bytes() -> None:
    lines = paste_lines("127.0.0.1:6001", "/nowhere", takes_images=True)
    [line] = [line for line in lines if line.startswith("grpcurl ") and "base64" in line]
    command = line.replace("grpcurl ", "printf '%s\\n' ", 1)
    words = subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True).stdout.splitlines()
    [message] = json.loads(words[2])["start"]["chat"]["messages"]
    assert base64.b64decode(message["parts"][0]["media"]["data"]).startswith(b"\xff\xd8")
    assert message["parts"][1] == {"text": "Describe the picture."}
