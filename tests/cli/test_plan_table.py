"""What ``quartet up --dry-run`` shows: everything that would be started, and nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.app import app

CONFIGS = Path(__file__).parents[2] / "configs"
TEXT = """
namespace: shown
model: {path: /no/such/model, name: big}
engine: {kind: trtllm}
discovery: {etcd: {endpoints: ["127.0.0.1:1"]}}
environment: {TLLM_LOG_LEVEL: "a b", HF_TOKEN: private, aws_secret_access_key: private}
router: {port: 0, overrides: {policy: {name: round_robin}}}
workers:
  - role: prefill
    gpus: [[0, 1]]
    overrides: {engine: {extra_engine_args: no/such/file.yaml, tensor_parallel_size: 2}}
  - {role: decode, name: writer, replicas: 2, gpus: [[2], [3]]}
"""


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What it runs in."""
    directory = tmp_path / "empty"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def shown(file: Path, *options: str) -> str:
    result = CliRunner(env={"ETCD_ENDPOINTS": "127.0.0.1:1"}).invoke(app, ["up", str(file), "--dry-run", *options])
    assert list(Path.cwd().iterdir()) == []
    assert result.exit_code == 0, result.output
    return result.output


def rows_of(text: str) -> dict[str, list[str]]:
    """The last cell's lines by process, with the other cells first."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("│"):
            cells = [cell.strip() for cell in line.strip("│").split("│")]
            if cells[0]:
                name, found[cells[0]] = cells[0], cells[1:5]
            found[name].append(cells[5])
    return found


def test_every_process_has_a_row_with_what_differs(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(TEXT)
    text = shown(tmp_path / "t.yaml")
    rows = rows_of(text)
    assert list(rows) == ["etcd", "prefill-0", "writer-0", "writer-1", "router"]
    assert rows["prefill-0"][:4] == ["prefill", "trtllm", "0 1", "free"]
    assert rows["writer-1"][:4] == ["decode", "trtllm", "3", "free"]
    assert rows["router"][:4] == ["router", "-", "-", "free"]
    assert {
        "model_name: big",
        "model_path: /no/such/model",
        "engine.tensor_parallel_size: 2",
        "engine.extra_engine_args: no/such/file.yaml",
        "CUDA_VISIBLE_DEVICES=0,1",
        "TLLM_LOG_LEVEL='a b'",
        "HF_TOKEN=***",
        "aws_secret_access_key=***",
    } <= set(rows["prefill-0"])
    assert "private" not in text
    assert "policy.name: round_robin" in rows["router"]
    assert not any("block_size" in line for lines in rows.values() for line in lines), "that is a default"
    assert "127.0.0.1:1" in rows["etcd"][4]
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("file", sorted(CONFIGS.rglob("trtllm/*.yaml")), ids=lambda file: file.stem)
def test_every_topology_for_gpus_can_be_shown_at_a_hundred_columns(file: Path) -> None:
    text = shown(file)
    assert max(map(len, text.splitlines())) <= 100
    assert "CUDA_VISIBLE_DEVICES=0" in text


def test_options_are_shown_as_they_would_act() -> None:
    options = ("--engine", "torch", "--model", "/some/model", "--served-model-name", "m", "--router-port", "7")
    text = shown(CONFIGS / "trtllm/disagg.yaml", *options, "--allowed-local-media-path", "/srv", "--fail-fast")
    rows = rows_of(text)
    assert rows["prefill-0"][:3] == ["prefill", "torch", "-"]
    assert {"model_path: /some/model", "model_name: m", "engine.dtype: float32"} <= set(rows["decode-0"])
    assert rows["router"][3] == "7"
    assert "media.allowed_local_paths: ['/srv']" in rows["router"]
    assert "workers[0].gpus: left out, as the engine torch runs on none here" in text


def test_what_is_wrong_is_told_as_without_it() -> None:
    result = CliRunner().invoke(
        app, ["up", str(CONFIGS / "agg.yaml"), "--dry-run", "--set", "router.overrides.polizy=x"]
    )
    assert result.exit_code == 1
    assert "polizy: unknown; did you mean policy" in result.output
