"""``quartet init``: what it writes can be started, and it replaces nothing."""

from __future__ import annotations

import errno
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from cli.app import app
from cli.init import PAGE, TOPOLOGY
from services.topology.topology import Choices, choose, load_topology, plan_workers, read_settings
from tests import tiny


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def quartet(*arguments: str) -> Result:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result


def test_the_topology_can_be_started_and_the_page_says_how(folder: Path) -> None:
    printed = quartet("init", "my models", "--model", str(tiny.CHECKPOINT), "--prefill", "2").stdout
    assert "quartet up 'my models/topology.yaml'" in printed
    plan = quartet("up", f"my models/{TOPOLOGY}", "--dry-run").stdout
    assert "my-models: nothing was started" in plan
    assert all(name in plan for name in ("prefill-0", "prefill-1", "decode-0", "router", "model_name: tiny"))
    page = (folder / "my models" / PAGE).read_text()
    assert f"quartet up {TOPOLOGY}" in page and '"model": "tiny"' in page
    assert "| `prefill` | 2 |" in page and "encode" not in page


def test_each_worker_on_gpus_has_its_own(folder: Path) -> None:
    counts = ("--encode", "1", "--prefill", "2", "--decode", "2")
    quartet("init", "mine", "--model", "Qwen/Qwen3-0.6B", "--served-model-name", "q", "--device", "cuda", *counts)
    plans = plan_workers(load_topology(folder / "mine" / TOPOLOGY), num_cores=1)
    assert {plan.name: plan.gpus for plan in plans} == {
        "encode-0": (0,), "prefill-0": (1,), "prefill-1": (2,), "decode-0": (3,), "decode-1": (4,)
    }  # fmt: skip
    assert {(plan.settings["model_path"], plan.settings["model_name"]) for plan in plans} == {("Qwen/Qwen3-0.6B", "q")}


def test_without_prefill_decode_workers_compute_the_prompts(folder: Path) -> None:
    quartet("init", "mine", "--prefill", "0")
    assert [plan.name for plan in plan_workers(load_topology(folder / "mine" / TOPOLOGY), num_cores=1)] == ["decode-0"]
    # Of the model that ships the name is written, not where this installation has it.
    settings = yaml.safe_load((folder / "mine" / TOPOLOGY).read_text())
    assert settings["model"] == {"path": "models/tiny/checkpoint", "name": "tiny"}


@pytest.mark.parametrize("name", ["$HOME", "${HOME}", "$${HOME}", "a: b # c", "日本語"])
def test_a_model_of_any_name_is_found_again(folder: Path, name: str) -> None:
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text("{}")
    escaped = name.replace("$", "$$")
    quartet("init", "mine", "--model", f"./{escaped}")
    topology = load_topology(folder / "mine" / TOPOLOGY)
    assert (topology.model.path, topology.model.name) == (model, name)


@pytest.mark.parametrize("name", [TOPOLOGY, PAGE])
def test_no_file_is_replaced(folder: Path, name: str) -> None:
    (folder / name).write_text("own")
    result = CliRunner().invoke(app, ["init", "."])
    assert result.exit_code == 1
    assert "exists; nothing was written" in result.output
    assert [(file.name, file.read_text()) for file in folder.iterdir()] == [(name, "own")]


@pytest.mark.parametrize("step", ["write_text", "rename"])
def test_where_the_second_file_cannot_be_written_the_first_is_not_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    real = getattr(Path, step)

    def fail_on_page(path: Path, *arguments: Any, **options: Any) -> object:
        if path.name == PAGE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, step, fail_on_page)
    result = CliRunner().invoke(app, ["init", "mine"])
    assert result.exit_code == 1
    assert "cannot write to mine: No space left" in result.output
    assert [*(folder / "mine").iterdir()] == []


def test_the_page_says_what_a_host_with_one_gpu_does(folder: Path) -> None:
    options = ("--model", "Qwen/Qwen3-0.6B", "--device", "cuda")
    quartet("init", "mine", *options, "--decode", "2")
    page = (folder / "mine" / PAGE).read_text()
    [sharing] = re.findall(r"`quartet up (topology.yaml --gpus .*)`", page)
    file, *gpus = sharing.split()
    quartet("up", f"mine/{file}", "--dry-run", *gpus)
    choices = Choices(gpus=[value for option, value in pairwise(gpus) if option == "--gpus"])
    assignments = [value for option, value in pairwise(gpus) if option == "--set"]
    chosen = choose(read_settings(folder / "mine" / file, assignments, None, choices), choices)
    plans = plan_workers(chosen.topology, num_cores=1)
    assert {plan.name: plan.gpus for plan in plans} == {"prefill-0": (0,), "decode-0": (0,), "decode-1": (0,)}
    assert plans[-1].after == ("prefill-0", "decode-0"), "each takes its share of what those before it left"
    quartet("init", "alone", *options, "--prefill", "0")
    assert "With one GPU" not in (folder / "alone" / PAGE).read_text()


def test_a_link_to_nowhere_is_not_followed(folder: Path) -> None:
    (folder / PAGE).symlink_to(folder / "elsewhere")
    result = CliRunner().invoke(app, ["init", "."])
    assert (result.exit_code, "exists; nothing was written" in result.output) == (1, True)
    assert [file.name for file in folder.iterdir()] == [PAGE]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/no/such/model"], "there is no folder /no/such/model"),
        (["--model", ""], "is no checkpoint: it has no config.json"),
        (["--model", "."], "is no checkpoint: it has no config.json"),
        (["--model", "Qwen3-0.6B"], "there is no folder Qwen3-0.6B"),
        (["--served-model-name", "a\nb"], "--served-model-name must be at most"),
        (["--served-model-name", "x" * 5000], "--served-model-name must be at most"),
    ],
)
def test_a_model_that_could_not_be_served_is_refused_and_nothing_written(
    folder: Path, options: list[str], message: str
) -> None:
    result = CliRunner().invoke(app, ["init", "mine", *options])
    assert result.exit_code == 1
    assert message in result.output.replace("\n", "")
    assert list(folder.iterdir()) == []
