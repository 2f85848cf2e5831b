"""``quartet doctor trtllm --live``: with the stand-in, and what is made of answers that differ."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.app import app
from cli.doctor.finding import Verdict
from cli.doctor.live import (
    AGGREGATED,
    DISAGGREGATED,
    WITH_ENCODE,
    WITH_PICTURES,
    Answers,
    LivePlan,
    check_live,
    judge_answers,
)
from quartet.engine.settings import EngineKind
from tests import tiny
from tests.cli.conftest import RunCli
from tests.e2e.fork_server import ForkServer
from tests.fakes.installation import DIRECTORY

ANSWERS = Answers(
    ready_s=1.0,
    token_ids=[(1, 2, 3), (4, 5, 6), (7, 8, 9)],
    look=(1, 1),
    takes_embeddings=True,
    num_handed_off=0,
    first_token_s=0.1,
)


@pytest.mark.e2e
@pytest.mark.parametrize("version", ["1.2.1", pytest.param("1.4.0rc1", marks=pytest.mark.trtllm)])
async def test_a_model_is_served_in_each_way_with_the_same_answers(
    version: str, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(fork_server.python))
    monkeypatch.setenv("PYTHONPATH", str(DIRECTORY))
    monkeypatch.setenv("TENSORRT_LLM_STAND_IN", json.dumps({"version": version, "check_health": True}))
    command = ["doctor", "trtllm", "--live", "--model", str(tiny.CHECKPOINT), "--gpus", "", "--json"]
    async with asyncio.timeout(300):
        result = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert result.exit_code == 0, result.output
    findings = json.loads(result.stdout)["findings"]
    said = {finding["check"]: finding["message"] for finding in findings}
    assert findings[0]["check"] == "Quartet"
    assert version in said["TensorRT-LLM"]
    assert "3 answers" in said["aggregated"]
    assert "3 prompts handed off" in said["disaggregated"]
    assert "4 answers" in said["with pictures"]
    assert "4 prompts handed off" in said["with Encode"]
    equal, look = "all 3 answers are those of aggregated serving", "the answer about a picture, too"
    assert [finding["message"] for finding in findings if finding["check"].startswith("tokens")] == [*[equal] * 3, look]
    assert "with Encode: asking" in result.stderr


@pytest.mark.e2e
async def test_a_way_that_does_not_start_is_named_with_its_last_words(
    fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(fork_server.python))
    shutil.copytree(tiny.CHECKPOINT, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text("broken")
    plan = LivePlan(model=tmp_path, gpus=(), start_timeout_s=120, kind=EngineKind.TORCH)
    findings = await check_live(plan, lambda _message: None)
    assert [(finding.check, finding.verdict) for finding in findings] == [
        ("aggregated", Verdict.WRONG),
        ("disaggregated", Verdict.WRONG),
    ]
    assert all("tokenizer" in finding.message for finding in findings), findings


def test_answers_that_differ_are_wrong_and_pictures_a_warning() -> None:
    other = replace(ANSWERS, token_ids=[(1, 2, 3), (4, 0, 6), (7, 8, 9)])
    blind = replace(ANSWERS, look=None)
    served = {AGGREGATED: blind, DISAGGREGATED: replace(other, look=None), WITH_PICTURES: ANSWERS}
    tokens = judge_answers(served)[0]
    assert tokens.verdict is Verdict.WRONG
    assert tokens.message == "1 of 3 answers differ; answer 1 from token 1 on: (0, 6), and aggregated (5, 6)"
    *_, tokens, look = judge_answers(served | {WITH_ENCODE: replace(ANSWERS, look=(1, 2))})
    assert tokens.verdict is Verdict.OK
    assert (look.verdict, look.message) == (Verdict.WARNING, "the answer about a picture differs from token 1 on")
    assert judge_answers({DISAGGREGATED: ANSWERS}) == [], "nothing to compare with"


async def test_wrong_gpus_are_refused_before_anything_starts(run_cli: RunCli) -> None:
    result = await run_cli("doctor", "trtllm", "--live", "--gpus", "0,a")
    assert result.exit_code == 1
    assert "--gpus: must be numbers of GPUs" in result.stderr
