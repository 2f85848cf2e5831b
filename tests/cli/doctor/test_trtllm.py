"""``quartet doctor trtllm`` in the process that it is: with the stand-in, without a package, and with broken ones."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.app import app
from cli.doctor.finding import Verdict, worst
from cli.doctor.trtllm import judge_report
from quartet.engine.trtllm.doctor import Fact, Lack, OtherDefault, Report
from tests.cli.conftest import RunCli
from tests.e2e.fork_server import ForkServer
from tests.fakes.installation import DIRECTORY
from tests.stopwatch import Stopwatch


def _report(version: str = "1.2.1", *, lacks: tuple[Lack, ...] = (), facts: tuple[Fact, ...] = ()) -> Report:
    return Report(version, 100, lacks, (), facts)


def _install(directory: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``source`` the package ``tensorrt_llm`` of processes that are started."""
    package = directory / "tensorrt_llm"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(directory))


# The stand-in imports PyTorch and transformers, so its process is forked: tests/e2e/test_trtllm.py has one that is not.
async def test_a_package_as_described_is_fine(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(fork_server.python))
    monkeypatch.setenv("PYTHONPATH", str(DIRECTORY))
    monkeypatch.setenv("TENSORRT_LLM_STAND_IN", json.dumps({"check_health": True}))
    async with asyncio.timeout(190):
        result = await asyncio.to_thread(CliRunner().invoke, app, ["doctor", "trtllm", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["verdict"] == "warning"  # the stand-in lacks what its description says nothing of
    assert report["findings"][0] == {
        "check": "TensorRT-LLM",
        "verdict": "ok",
        "message": "1.2.1, of the line that Quartet is written for",
        "advice": "",
    }
    assert "yes: LLM has a health check (_check_health)" in [finding["message"] for finding in report["findings"]]
    # Progress is kept apart from the report.
    assert "importing tensorrt_llm" in result.stderr


async def test_no_package_is_one_line(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    result = await run_cli("doctor", "trtllm")
    assert result.exit_code == 1
    [line] = [line for line in result.stdout.splitlines() if line.startswith("wrong")]
    assert "no package tensorrt_llm in this Python" in line


async def test_an_empty_package_lacks_everything(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, "__version__ = '1.3.0rc7'", monkeypatch)
    result = await run_cli("doctor", "trtllm")
    assert result.exit_code == 1
    assert "warning  TensorRT-LLM     1.3.0rc7" in result.stdout
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[lines.index("wrong missing tensorrt_llm.LLM") + 1] == "-> does not work without it: everything"
    assert "can't be told: AutoDeploy" in result.stdout


async def test_an_import_that_raises_is_reported_with_its_last_words(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, "raise ImportError('libmpi.so.40: cannot open shared object file')", monkeypatch)
    result = await run_cli("doctor", "trtllm")
    assert result.exit_code == 1
    assert "its import ended with exit code 1" in result.stdout
    assert "libmpi.so.40: cannot open shared object file" in result.stdout


async def test_an_import_that_crashes_is_reported_with_its_signal(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, "import os\nprint('MPI_Init failed', flush=True)\nos.abort()", monkeypatch)
    result = await run_cli("doctor", "trtllm")
    assert result.exit_code == 1
    assert "was killed by SIGABRT; the last that it said: MPI_Init failed" in result.stdout


async def test_an_import_that_ends_the_process_well_is_no_success(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, "import os\nos._exit(0)", monkeypatch)
    result = await run_cli("doctor", "trtllm")
    assert result.exit_code == 1
    assert "its import ended with exit code 0" in result.stdout


async def test_an_import_that_hangs_is_ended(run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = "import signal, threading\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nthreading.Event().wait()"
    _install(tmp_path, hang, monkeypatch)
    stopwatch = Stopwatch()
    result = await run_cli("doctor", "trtllm", "--timeout", "1")
    assert stopwatch.seconds < 15
    assert result.exit_code == 1
    assert "did not end within 1 s" in result.stdout


@pytest.mark.parametrize(
    ("version", "verdict"), [("1.2.0", "ok"), ("1.2.1", "ok"), ("1.2", "ok"), ("1.3.0", "warning"), ("2.0", "warning")]
)
def test_other_lines_than_ours_are_a_warning(version: str, verdict: str) -> None:
    findings = judge_report(_report(version))
    assert findings[0].verdict == verdict
    assert version in findings[0].message


def test_a_missing_need_of_quartet_is_wrong_and_a_missing_option_is_a_warning() -> None:
    needed, optional = Lack("a.B", "everything", is_needed=True), Lack("a.C", "c in engine_args", is_needed=False)
    assert worst(judge_report(_report(lacks=(needed,)))) is Verdict.WRONG
    assert worst(judge_report(_report(lacks=(optional,)))) is Verdict.WARNING


def test_another_default_is_a_warning_that_names_both() -> None:
    report = Report("1.2.1", 100, (), (OtherDefault("a.B: field c", "32", "64", "everything"),), ())
    [finding] = [finding for finding in judge_report(report) if finding.verdict is Verdict.WARNING]
    assert "is 64 if left out; Quartet reckons with 32" in finding.message


def test_signs_of_a_later_release_are_a_warning() -> None:
    later = Fact("LLM takes model_kwargs", holds=True, is_later=True)
    assert worst(judge_report(_report(facts=(later,)))) is Verdict.WARNING
    assert worst(judge_report(_report(facts=(Fact(later.text, holds=False, is_later=True),)))) is Verdict.OK
    newer = judge_report(_report("1.4.0rc1", facts=(later,)))
    assert [finding.check for finding in newer if finding.verdict is Verdict.WARNING] == ["TensorRT-LLM"], "its version"
