"""What a consolidator's configuration takes and refuses, and what KVBM's variables mean for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quartet.config import build
from quartet.errors import ConfigError
from services.consolidator.__main__ import parse, read_settings
from services.consolidator.config import ENABLE, ENGINE_PORT, LEADER_PORT, ConsolidatorConfig, SourceKind

SOURCE = {"kind": "vllm", "endpoint": "tcp://127.0.0.1:5557"}


def configured(*arguments: str, **environment: str) -> ConsolidatorConfig:
    return build(ConsolidatorConfig, read_settings(parse(arguments), environment))


def test_without_anything_it_has_the_ports_of_kvbm() -> None:
    config = configured()
    [source] = config.sources
    assert (source.kind, source.endpoint) == (SourceKind.TRTLLM, "tcp://127.0.0.1:56001")
    assert config.output.address == "127.0.0.1:57001"
    assert config.is_enabled


def test_the_variables_of_kvbm_move_the_ports() -> None:
    config = configured(**{LEADER_PORT: "20000", ENGINE_PORT: "20081"})
    assert config.sources[0].endpoint == "tcp://127.0.0.1:20081"
    assert config.output.address == "127.0.0.1:21000"
    assert configured(**{LEADER_PORT: "20000"}).sources[0].endpoint == "tcp://127.0.0.1:20000"


@pytest.mark.parametrize(
    ("text", "is_enabled"), [("1", True), ("On", True), ("yes", True), ("0", False), ("no", False)]
)
def test_a_variable_switches_it_off(text: str, is_enabled: bool) -> None:
    assert configured(**{ENABLE: text}).is_enabled is is_enabled


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({LEADER_PORT: "65000"}, f"{LEADER_PORT}: 65000 \\+ 1000"),
        ({LEADER_PORT: "port"}, f"{LEADER_PORT}: must be a port"),
        ({ENGINE_PORT: "0"}, f"{ENGINE_PORT}: must be a port"),
    ],
)
def test_a_variable_that_is_no_port_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(**environment)


def test_a_file_goes_before_variables_and_flags_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "it.yaml"
    file.write_text("sources: [{kind: vllm, endpoint: 'tcp://h:1'}]\noutput: {topic: kv}\n")
    config = configured("--config", str(file))
    assert [source.endpoint for source in config.sources] == ["tcp://h:1"]
    assert (config.output.address, config.output.topic) == ("127.0.0.1:57001", "kv")
    arguments = ("--source", "vllm=tcp://h:2,tcp://h:3", "--source", "kvbm=tcp://h:4", "--address", "127.0.0.1:9")
    config = configured("--config", str(file), *arguments, "--replay-port", "8", "--set", "output.form=array")
    assert [(source.title, source.endpoint, source.replay_endpoint) for source in config.sources] == [
        ("vllm", "tcp://h:2", "tcp://h:3"),
        ("kvbm", "tcp://h:4", ""),
    ]
    assert (config.output.address, config.output.replay_port, config.output.form.value) == ("127.0.0.1:9", 8, "array")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": []}, "sources: must name at least one"),
        ({"sources": [SOURCE, SOURCE]}, "sources: two have one name"),
        ({"sources": [{**SOURCE, "endpoint": "h:1"}]}, r"sources\[0\].endpoint: must be tcp://host:port"),
        ({"sources": [{**SOURCE, "replay_endpoint": "tcp://*:1"}]}, r"sources\[0\].replay_endpoint: must be"),
        ({"sources": [{**SOURCE, "kind": "other"}]}, r"sources\[0\].kind: must be one of"),
        ({"sources": [SOURCE], "output": {"address": "0.0.0.0:57001"}}, r"output.address: .* is not loopback"),
        ({"sources": [SOURCE], "output": {"replay_port": 65536}}, r"output.replay_port: must be a port"),
        ({"sources": [SOURCE], "http_address": "0.0.0.0:1"}, "http_address: .* is not loopback"),
        ({"sources": [SOURCE], "replay_timeout_s": 0}, "replay_timeout_s: must be above 0"),
        ({"sources": [SOURCE], "max_source_blocks": 0}, "max_source_blocks: must be at least 1"),
        ({"sources": [SOURCE], "max_source_ranks": 0}, "max_source_ranks: must be at least 1"),
    ],
)
def test_what_is_refused_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(ConsolidatorConfig, settings)


def test_a_flag_of_another_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="--source: 'vllm' must have the form KIND=ENDPOINT"):
        configured("--source", "vllm")


def test_one_that_is_switched_off_says_so_and_ends_well() -> None:
    command = [sys.executable, "-m", "services.consolidator"]
    ended = subprocess.run(
        command, env={**os.environ, ENABLE: "false"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0
    assert "is not enabled" in ended.stdout + ended.stderr
