"""The check of TensorRT-LLM: is the installed version one that Quartet's adapter works with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from cli.doctor.finding import Finding, ProgramRun, ok, run_program, warning, wrong
from quartet.engine.trtllm.doctor import (
    ABSENT,
    NEEDS_A_MODEL,
    OTHER_VERSIONS,
    PROGRESS,
    VERSION,
    Fact,
    Lack,
    OtherDefault,
    Report,
)
from quartet.engine.trtllm.package import line_of
from quartet.engine.trtllm.schema import LATER_LINE

_NAME = "TensorRT-LLM"
_INSPECTION = "quartet.engine.trtllm.doctor"
# How many of the last lines that the package printed are shown.
_NUM_LAST_LINES = 3


async def check_trtllm(*, timeout_s: float, on_progress: Callable[[str], None]) -> list[Finding]:
    """Inspect the package in a process of its own, for at most ``timeout_s`` seconds."""

    def on_line(line: str) -> None:
        if line.startswith(PROGRESS):
            on_progress(line.removeprefix(PROGRESS))

    with TemporaryDirectory(prefix="quartet-doctor-") as directory:
        file = Path(directory, "report.json")
        command = [sys.executable, "-m", _INSPECTION, str(file)]
        run = await run_program(command, timeout_s=timeout_s, on_line=on_line)
        report = _read(file) if run.exit_code == 0 else None
    return [_judge_failure(run, timeout_s)] if report is None else judge_report(report)


def judge_report(report: Report) -> list[Finding]:
    """What ``report`` means for Quartet."""
    return [
        _version(report.version),
        ok("relied on", f"{report.num_found} symbols, parameters and fields are there"),
        *map(_lack, report.lacks),
        *map(_default, report.other_defaults),
        *(_fact(fact, is_later_line=line_of(report.version) >= LATER_LINE) for fact in report.facts),
        ok("uncertain", f"shows only with a model: {'; '.join(NEEDS_A_MODEL)}"),
    ]


def _read(file: Path) -> Report | None:
    """The report; ``None``: the package ended the process before there was one."""
    return Report.from_json(file.read_text(encoding="utf-8")) if file.is_file() else None


def _version(version: str) -> Finding:
    line = ".".join(version.split(".")[:2])
    if line == VERSION:
        return ok(_NAME, f"{version}, of the line that Quartet is written for")
    known = OTHER_VERSIONS.get(line, "nothing is known of it")
    return warning(
        _NAME, f"{version}: {known}", f"Quartet is written for {VERSION}; try what you need before you rely on it"
    )


def _lack(lack: Lack) -> Finding:
    why = f" ({lack.reason})" if lack.reason else ""
    if lack.is_needed:
        return wrong("missing", f"{lack.path}{why}", f"does not work without it: {lack.loses}")
    return warning("missing", f"{lack.path}{why}", f"all that is lost: {lack.loses}")


def _default(other: OtherDefault) -> Finding:
    advice = f"set it in engine_args if this matters to you: {other.loses}"
    return warning(
        "default", f"{other.path} is {other.found} if left out; Quartet reckons with {other.expected}", advice
    )


def _fact(fact: Fact, *, is_later_line: bool) -> Finding:
    if fact.holds is None:
        return ok("uncertain", f"can't be told: {fact.text}")
    if fact.is_later and fact.holds and not is_later_line:
        return warning(
            "of 1.3", fact.text, "the package is newer than its version says, or changed; see what is missing"
        )
    return ok("of 1.3" if fact.is_later else "uncertain", f"{'yes' if fact.holds else 'no'}: {fact.text}")


def _judge_failure(run: ProgramRun, timeout_s: float) -> Finding:
    if run.exit_code == ABSENT:
        return wrong(
            _NAME,
            "no package tensorrt_llm in this Python",
            f"use NVIDIA's container, or its index: pip install 'tensorrt-llm=={VERSION}.*'; Quartet goes beside it",
        )
    said = _last_words(run.lines)
    if run.exit_code is None:
        advice = "MPI may wait for its launcher or the network; give it longer with --timeout, or import it by hand"
        return wrong(_NAME, f"its inspection did not end within {timeout_s:g} s{said}", advice)
    advice = "import it by hand: python -c 'import tensorrt_llm'; mpi4py, CUDA's libraries or its torch may not fit it"
    return wrong(_NAME, f"its import {run.end}{said}", advice)


def _last_words(lines: Sequence[str]) -> str:
    words = [line for line in lines if line.strip() and not line.startswith(PROGRESS)][-_NUM_LAST_LINES:]
    return f"; the last that it said: {' | '.join(words)}" if words else ""
