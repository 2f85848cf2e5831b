"""Every report says what was run, of which code, where and when."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.report import Report
from quartet.telemetry.provenance import read_commit, read_machine, write_report


@dataclass(frozen=True, kw_only=True)
class Peak:
    concurrency: int
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Results:
    peak: Peak


RESULTS = Results(peak=Peak(concurrency=8, tokens_per_s=1234.56789))


def test_a_report_says_what_was_run_of_which_code_where_and_when() -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    report = Report("overload", arguments=["--json", "my file.json"], packages=("numpy",)).finish(RESULTS)
    assert report["benchmark"] == "overload"
    assert report["command"] == "python -m benchmarks.overload --json 'my file.json'"
    assert before <= datetime.fromisoformat(str(report["started_at"])) <= datetime.now(UTC)
    assert report["duration_s"] == pytest.approx(0, abs=5)
    assert set(report["versions"]) == {"python", "grpcio", "protobuf", "numpy"}  # type: ignore[call-overload]
    machine = {"cpu_model", "num_cores", "num_usable_cores", "memory_bytes", "system"}
    assert set(report["machine"]) == machine  # type: ignore[call-overload]
    assert set(report["load_average"]) == {"before", "after"}  # type: ignore[call-overload]


def test_results_stand_at_the_top_of_the_report() -> None:
    report = Report("overload", arguments=[]).finish(RESULTS)
    assert report["peak"] == {"concurrency": 8, "tokens_per_s": 1234.56789}


def test_results_cannot_hide_what_every_report_says() -> None:
    @dataclass(frozen=True)
    class Liar:
        commit: str

    with pytest.raises(ValueError, match="commit"):
        Report("overload", arguments=[]).finish(Liar("not measured"))


def test_a_copy_without_git_is_told_its_commit() -> None:
    report = Report("overload", arguments=[], revision="c0ffee").finish(RESULTS)
    assert report["commit"] == {"revision": "c0ffee", "is_dirty": False}


def test_the_commit_is_the_one_that_is_checked_out() -> None:
    commit = read_commit()
    assert (commit.revision is None and commit.is_dirty) or re.fullmatch(r"[0-9a-f]{40}", commit.revision or "")


def test_the_machine_is_described_without_its_name() -> None:
    machine = read_machine()
    assert machine.num_cores >= 1
    assert machine.memory_bytes > 2**28
    assert os.uname().nodename not in f"{machine.cpu_model} {machine.system}".split()


def test_a_report_is_written_to_a_file_whose_directory_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    write_report({"ratio": 0.123456789, "sweep": [{"rate": 1234.56789}]}, str(path))
    assert json.loads(path.read_text()) == {"ratio": 0.123457, "sweep": [{"rate": 1234.57}]}


def test_a_dash_means_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    write_report({"ratio": 1}, "-")
    assert json.loads(capsys.readouterr().out) == {"ratio": 1}
