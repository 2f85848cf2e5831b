"""``quartet bench compare``: ratios by load, what it warns of and what not, and what it can't compare."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.bench.compare import differences, ratio_shown, read_results
from tests.cli.conftest import RunCli
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter, worker_status

PNG = b"\x89PNG"


@pytest.fixture
async def results(start_router: StartRouter, run_cli: RunCli, tmp_path: Path) -> Path:
    """A folder that ``quartet bench`` has written."""
    router = FakeRouter()
    router.workers = [worker_status("decode-0"), worker_status("decode-1")]
    short = ("--prompt-tokens", "4", "--output-tokens", "3", "--warmup", "0", "--rounds", "2", "--sweep", "1,2")
    kept = ("--out", str(tmp_path / "a"), "--label", "total_gpus=2")
    result = await run_cli("bench", "--router", await start_router(router), *short, *kept)
    assert result.exit_code == 0, result.output
    # What --log-dir adds.
    deployment = json.loads((tmp_path / "a/deployment.json").read_text())
    decode = {"engine": {"num_blocks": 7}, "server": {"address": "127.0.0.1:1"}}
    deployment["processes"] = {"decode-0": decode, "decode-1": {}}
    (tmp_path / "a/deployment.json").write_text(json.dumps(deployment))
    return tmp_path / "a"


def changed(results: Path, change: Callable[[Any, Any], None]) -> Path:
    """A copy of ``results`` whose report and deployment ``change`` has changed."""
    copy = results.with_name("b")
    shutil.copytree(results, copy)
    files = (copy / "bench.json", copy / "deployment.json")
    report, deployment = (json.loads(file.read_text()) for file in files)
    change(report, deployment)
    for file, value in zip(files, (report, deployment), strict=True):
        file.write_text(json.dumps(value))
    return copy


async def test_the_loads_of_both_are_shown_with_their_ratios(results: Path, run_cli: RunCli, tmp_path: Path) -> None:
    def slow_down(report: Any, deployment: Any) -> None:
        first, second = report["points"]
        first["ttft_ms"]["p90"] = 3 * first["ttft_ms"]["p90"]
        first["output_tokens_per_s"] /= 2
        first["itl_ms"]["p50"] = None
        second["load"]["value"] = 4.0
        deployment["labels"]["total_gpus"] = "4"

    picture = tmp_path / "new" / "c.png"
    result = await run_cli("bench", "compare", str(results), str(changed(results, slow_down)), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    ratios = {figure: ratio for _, figure, _, _, ratio in rows}
    assert {load for load, *_ in rows} == {"concurrency 1", ""}
    assert (ratios["TTFT p50 ms"], ratios["TTFT p90 ms"], ratios["ITL p50 ms"]) == ("1.00", "3.00", "-")
    assert (ratios["output tokens/s"], ratios["output tokens/s per GPU"]) == ("0.50", "0.25")
    assert "label total_gpus 2 → 4" in result.stdout
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("figure", "factor", "colour"),
    [
        ("requests/s", 2.0, "green"),
        ("requests/s", 0.5, "red"),
        ("output tokens/s per GPU", 1.06, "green"),
        ("output tokens/s per GPU", 0.94, "red"),
        ("TTFT p50 ms", 2.0, "red"),
        ("E2E p99 ms", 0.5, "green"),
        ("E2E p99 ms", 1.06, "red"),
        ("requests/s", 1.04, None),
        ("TTFT p50 ms", 0.96, None),
        ("TTFT p50 ms", 1.0, None),
    ],
)
def test_a_ratio_has_the_colour_of_what_is_better(
    results: Path, figure: str, factor: float, colour: str | None
) -> None:
    def scale(report: Any, _: Any) -> None:
        for point in report["points"]:
            for name in ("requests_per_s", "output_tokens_per_s"):
                point[name] *= factor
            for name in ("ttft_ms", "e2e_ms"):
                point[name] = {key: value and value * factor for key, value in point[name].items()}

    before, after = read_results(results), read_results(changed(results, scale))
    load = next(iter(before.points))
    shown = f"{factor:.2f}"
    assert ratio_shown(before.figures(load)[figure], after.figures(load)[figure]) == (
        f"[{colour}]{shown}[/]" if colour else shown
    )


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        (lambda report, _: report["model"].update(fingerprint="beef"), "model differs: fingerprint f00d → beef"),
        (lambda report, _: report["workload"].update(trace="x/t.jsonl"), "workload differs: trace - → t.jsonl"),
        (lambda report, _: report["machine"].update(num_cores=999), "machine differs: num_cores "),
        (lambda report, _: report["limits"].update(rounds=9), "limits differs: rounds 2 → 9"),
        (lambda report, _: report.update(path="session"), "path differs: path generate → session"),
        (lambda _, other: other["workers"].pop(), "deployment differs: decode-1 there → -"),
        (
            lambda _, other: other["workers"][0].update(block_size=64),
            "deployment differs: decode-0.block_size 32 → 64",
        ),
        (
            lambda _, other: other["processes"]["decode-0"]["engine"].update(num_blocks=8),
            "deployment differs: decode-0.engine.num_blocks 7 → 8",
        ),
    ],
)
def test_what_differs_beside_the_code_is_warned_of(
    results: Path, change: Callable[[Any, Any], None], warning: str
) -> None:
    [line] = differences(read_results(results), read_results(changed(results, change)))
    assert line.startswith(warning)


def test_what_each_run_has_of_its_own_is_no_difference(results: Path) -> None:
    def run_again(report: Any, deployment: Any) -> None:
        report["workload"]["seed"] += 1
        report["commit"]["revision"] = "cafe"
        deployment["workers"][0]["address"] = "127.0.0.1:2"
        deployment["processes"]["decode-0"]["server"]["address"] = "127.0.0.1:2"

    assert list(differences(read_results(results), read_results(changed(results, run_again)))) == []


async def test_reports_alone_are_compared_and_their_faults_are_said(results: Path, run_cli: RunCli) -> None:
    def fail(report: Any, _: Any) -> None:
        point = report["points"][1]
        point["requests"].update(failed=1, cut_off=2)
        point["client"]["is_near_limit"] = report["is_interrupted"] = True
        report["points"].append(point)

    reports = [str(folder / "bench.json") for folder in (results, changed(results, fail))]
    result = await run_cli("bench", "compare", *reports)
    assert result.exit_code == 0, result.output
    for remark in (
        "concurrency 2: 3 of 4 requests did not end well",
        "concurrency 2: the client was near its limit",
        "was interrupted",
        "concurrency 2 was run 2 times; the last is shown",
    ):
        assert f"{reports[1]}: {remark}" in result.stdout


async def test_percentiles_of_few_requests_are_warned_of(results: Path, run_cli: RunCli) -> None:
    def finish(report: Any, _: Any) -> None:
        for point, count in zip(report["points"], (19, 20), strict=True):
            point["requests"].update(sent=count, finished=count)

    both = [str(results), str(changed(results, finish))]
    result = await run_cli("bench", "compare", *both)
    assert [line for line in result.stdout.splitlines() if "percentiles are of" in line] == [
        f"{both[0]}: concurrency 1: percentiles are of 2 requests only",
        f"{both[0]}: concurrency 2: percentiles are of 4 requests only",
        f"{both[1]}: concurrency 1: percentiles are of 19 requests only",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "can't read {path}: No such file"),
        ("{", "{path} is no JSON"),
        ("[]", "{path}: not as quartet bench writes it (TypeError"),
        ('{"benchmark": "replay"}', "{path}: of replay, and not of quartet bench"),
        ('{"benchmark": "bench"}', "{path}: not as quartet bench writes it (KeyError: 'points')"),
    ],
)
async def test_what_is_no_result_is_refused(run_cli: RunCli, tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    result = await run_cli("bench", "compare", str(path), str(path))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"quartet: {message.format(path=path)}")


async def test_results_without_a_common_load_are_not_compared(results: Path, run_cli: RunCli) -> None:
    def move(report: Any, _: Any) -> None:
        report["points"] = report["points"][:1]
        report["points"][0]["load"]["kind"] = "rate"

    other = changed(results, move)
    result = await run_cli("bench", "compare", str(results), str(other))
    assert result.exit_code == 1
    assert f"no load in common: {results} has concurrency 1, concurrency 2, and {other} has rate 1/s" in result.stderr
