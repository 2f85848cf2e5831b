"""What ``quartet up`` shows: log lines behind names, and lines that can be pasted."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from cli.launch_display import LaunchDisplay, paste_lines
from services.tools import find_grpcurl

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
