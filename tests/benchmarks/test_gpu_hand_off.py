"""The benchmark of hand-offs on GPUs: what it makes of its measurements, and all its rows on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.disagg_client import Answered
from benchmarks.gpu_hand_off import PLANS, Row, main
from benchmarks.gpu_mixed import Curve, MixedSide, Seen, Waits, compare
from benchmarks.gpu_pull import IdleRow, Pulls, compare_steps
from benchmarks.gpu_rows import Measured, Measurements
from benchmarks.gpu_serving import FirstStepPlan, read_request, summarize_first_steps
from benchmarks.random_model import QWEN3_8B
from benchmarks.report import Report
from benchmarks.table import gpu_hand_off_tables
from benchmarks.traced_worker import Traced
from cli.bench.load import Window
from cli.bench.workload import BenchRequest
from quartet.client import QuartetClient
from quartet.errors import WorkerUnavailableError
from quartet.rpc.server import RpcServer, ServerConfig
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.cuda.survey import cuda_survey_driver
from tests.client.fake_router import FakeRouter
from tests.transfer.fake_cuda import FakeDriver, FakeHost

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_block_of_the_large_shape_is_as_large_as_the_bars_say() -> None:
    assert QWEN3_8B.block_size_bytes(16) == 2304 << 10
    assert [pool.piece_size_bytes >> 10 for pool in PLANS["qwen3-8b"].pulls.idle] == [2304, 2304, 64, 2304]
    assert [pool.size_bytes >> 20 for pool in PLANS["qwen3-8b"].pulls.idle] == [4095, 1125, 1024, 16382]


def test_a_step_is_compared_with_those_in_the_windows_before_and_after() -> None:
    # The machine gets slower by the minute; pulls cost a tenth.
    steps = compare_steps([0.010, 0.020, 0.030], [0.0165, 0.0275])
    assert steps.slower_percent == pytest.approx(10)
    assert (steps.quiet_ms, steps.busy_ms) == (pytest.approx(20), pytest.approx(22))


def traced(worker: str, what: str, began_at: float, ended_at: float = 0.0, count: int = 0, key: str = "5") -> Traced:
    return Traced(
        worker=worker, what=what, began_at=began_at, ended_at=ended_at or began_at, num_tokens={key: count, "6": 1}
    )


HANDED_OFF = (
    traced("prefill-2", "submit", 3.0),
    traced("prefill-2", "step", 4.0, 5.0, 60),
    traced("prefill-2", "step", 5.0, 6.0, 40),
    traced("decode-3", "submit", 6.25),
    traced("decode-3", "step", 6.5, 7.0, 1),
    traced("decode-3", "step", 9.0, 10.0, 1),
    traced("decode-3", "step", 1.0, 2.0, 1, key="7"),
)
ANSWERED = Answered(
    ttft_ms=1,
    second_token_ms=2,
    first_token_ms=1,
    total_ms=2,
    prefill_ms=1,
    decode_queue_ms=1,
    transfer_ms=4.0,
)


def test_the_wait_is_from_the_prefills_last_step_to_the_first_decode_step() -> None:
    request = read_request(HANDED_OFF, "5")
    later = replace(request, step_began_at=8.0)
    plan = FirstStepPlan(num_prompt_tokens=1000, num_requests=2, num_warm_up=0)
    row = summarize_first_steps(plan, [request, later], [ANSWERED] * 2, "cuda_ipc", bytes_per_token=4e6)
    assert row.wait_ms == [500, 2000]
    assert (row.wait_ms_p50, row.wait_ms_p99) == (1250, pytest.approx(1985))
    assert (row.until_submit_ms, row.prefill_ms) == (250, 2000)
    assert row.transfer_gb_per_s == pytest.approx(1000)


@pytest.mark.parametrize("missing", ["prefill-2", "decode-3"])
def test_a_prompt_that_was_not_handed_off_is_no_measurement(missing: str) -> None:
    with pytest.raises(RuntimeError, match="request 5"):
        read_request([traced for traced in HANDED_OFF if traced.worker != missing], "5")


def test_a_prompt_that_was_prefilled_again_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="request 5"):
        read_request([*HANDED_OFF[:4], traced("decode-3", "step", 6.5, 7.0, 100)], "5")


def side(name: str, p99: float, tokens_per_s: float) -> MixedSide:
    waits = Waits(count=9, p50=1, p99=p99, max=p99)
    return MixedSide(
        name=name,
        tokens_per_s=tokens_per_s,
        finished_per_s=tokens_per_s - 10,
        itl=waits,
        stream_itl=waits,
        curve=Curve(ms=(1, p99), longer=(0.01, 0)),
        prompt_ttft=waits,
        num_prompts=3,
        num_waiting=0,
        failed={"WorkerUnavailableError": 2},
        transfer_bytes={"cuda_ipc": 2.5e9},
    )


SETTING: Mapping[str, Any] = {
    "num_streams": 64,
    "num_prompt_tokens": 4000,
    "prefill_tokens_per_s": 32000.0,
    "prompts_per_s": 6.4,
}


def test_the_aggregated_pair_with_the_shortest_waits_counts() -> None:
    sides = [side("disagg", 20, 970), side("agg_512", 100, 800), side("agg_1024", 80, 1000), side("agg_2048", 90, 999)]
    row = compare(sides, **SETTING)
    assert (row.best, row.itl_ratio, row.tokens_ratio) == ("agg_1024", 0.25, 0.97)


def measured(row: Row, figures: Any, num_gpus: int, number: int) -> Mapping[str, Any]:
    report = Report("gpu_hand_off", arguments=[f"--number={number}"], revision=f"{number:040}")
    return report.finish(
        Measured(row=row, shape="qwen3-8b", num_gpus=num_gpus, gpus=("NVIDIA H200",) * num_gpus, figures=figures)
    )


def pulled(gb_per_s: float) -> IdleRow:
    pulls = Pulls(
        piece_size_bytes=1,
        num_pieces=1,
        way="cuda_ipc",
        num_pulls=1,
        gb_per_s=gb_per_s,
        copy_gb_per_s=gb_per_s + 1,
        plain_gb_per_s=gb_per_s + 2,
    )
    return IdleRow(pools=[pulls] * 3)


def test_the_file_keeps_the_last_two_measurements_of_each_row_and_the_table_shows_them(tmp_path: Path) -> None:
    path = tmp_path / "gpu_hand_off.json"
    for number in range(3):
        Measurements(path).write(measured(Row.PULL, pulled(100 * number), 2, number))
    measurements = Measurements(path)
    # A side at a time: the later report of one command takes the place of the earlier.
    measurements.write(measured(Row.MIXED, compare([side("disagg", 20, 970)], **SETTING), 1, 7))
    measurements.write(
        measured(Row.MIXED, compare([side("disagg", 20, 970), side("agg_512", 80, 900)], **SETTING), 1, 7)
    )
    report = json.loads(path.read_text())
    assert [(row["row"], row["command"][-1]) for row in report["rows"]] == [
        ("pull", "1"),
        ("pull", "2"),
        ("mixed", "7"),
    ]
    assert report["command"].endswith("--number=7")
    table = gpu_hand_off_tables(report)
    assert "| pull of 4 GiB in blocks of 2.25 MiB, GB/s | 100 (H200); 200 (H200) | not run | >= 365 | NVLink" in table
    assert "| p99 between tokens, disaggregated over aggregated | not run | 0.250 (H200) | <= 0.333 |  |\n" in table
    assert "| reader's step: longer by, % | not run | not run | <= 6 |  |\n" in table
    waits = "1.0, 80.0, 80 | 80.0 | 1, 80"
    assert f"| **aggregated, steps of 512 tokens** | 900 | 890 | {waits} | 3 | 0 | 2 | cuda_ipc 2.5 |\n" in table
    assert "- pull, two GPUs (NVIDIA H200): `python -m benchmarks.gpu_hand_off --number=2` on 20" in table


def test_a_mixed_load_that_was_cut_before_its_other_side_has_no_ratio() -> None:
    row = measured(Row.MIXED, compare([side("disagg", 20, 970)], **SETTING), 2, 1)
    table = gpu_hand_off_tables({"rows": [json.loads(json.dumps(row))]})
    assert "| p99 between tokens, disaggregated over aggregated | not run | not run | <= 0.333 |  |\n" in table
    assert "| disaggregated | 970 |" in table


def test_a_picture_of_two_gpus_is_drawn_where_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plot = tmp_path / "gpu_hand_off.json", tmp_path / "mixed.png"
    Measurements(path).write(measured(Row.MIXED, compare([side("disagg", 20, 970)], **SETTING), 2, 1))
    before = path.read_bytes()
    monkeypatch.setenv("PATH", str(tmp_path))  # where no nvidia-smi is
    command = ["gpu_hand_off", "--json", str(path), "--gpus", "2", "--only", "--plot", str(plot)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, path.read_bytes()) == (0, before)
    assert plot.read_bytes().startswith(b"\x89PNG")


async def test_only_what_comes_within_the_window_counts() -> None:
    router, window = FakeRouter(), Window(None)
    server = RpcServer(ServerConfig(), [router.service()])
    address = f"127.0.0.1:{await server.start()}"
    seen, request = Seen(window), BenchRequest(token_ids=[20, 21], num_output_tokens=len(router.words))
    async with QuartetClient(address) as client:

        async def send(is_stream: bool) -> float:
            return await seen.send(client, is_stream, request, time.perf_counter())

        await send(True)
        assert (seen.num_tokens, seen.gaps.count) == (0, 0)
        window.open()
        await send(True)
        await send(False)
        counts = (seen.num_tokens, seen.num_finished_tokens, seen.num_prompts, seen.num_waiting)
        router.error = WorkerUnavailableError("gone")
        assert await send(False) > 0
    await server.drain(0.2)
    num_words = len(router.words)
    assert counts == (2 * num_words, 2 * num_words, 1, 0)
    assert (seen.gaps.count, seen.stream_gaps.count, seen.prompt_ttft.count) == (2 * num_words - 2, num_words - 1, 1)
    assert (seen.failed, seen.num_waiting) == ({"WorkerUnavailableError": 1}, 0)


def test_the_plain_copy_is_of_the_whole_pool_and_leaves_nothing_open() -> None:
    from benchmarks.gpu_pull_side import copy_on_gpu  # it imports torch

    host = FakeHost(num_devices=2)
    owner, reader = (DeviceMemory(FakeDriver(host, (device,)), 0, 4, 1 << 12) for device in (0, 1))
    assert isinstance(owner.driver, FakeDriver) and isinstance(reader.driver, FakeDriver)
    data = bytes(range(256)) * 64
    owner.driver.write(owner.address, data)
    assert len(copy_on_gpu(reader, owner.handle, 3)) == 3
    assert reader.driver.read(reader.address, len(data)) == data
    assert (reader.driver.num_opened, reader.driver.num_streams, reader.driver.num_events) == (0, 0, 0)
    assert host.faults == []


#: The command, with services that are forked.
COMMAND = """
import sys
from benchmarks import gpu_hand_off
sys.executable = sys.argv.pop(1)
gpu_hand_off.main()
"""


@pytest.mark.bench
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("device", "gpus", "way"),
    [
        ("cpu", 1, "shm"),
        pytest.param("cuda", 1, "cuda_ipc", marks=pytest.mark.gpu),
        pytest.param("cuda", 2, "cuda_ipc", marks=pytest.mark.gpu),
    ],
)
def test_all_rows_are_measured(
    tmp_path: Path, request: pytest.FixtureRequest, device: str, gpus: int, way: str
) -> None:
    if device == "cuda" and cuda_survey_driver().num_devices() < gpus:
        pytest.skip("needs two GPUs")
    path, plot = tmp_path / "gpu_hand_off.json", tmp_path / "mixed.png"
    options = ["--shape", "tiny", "--device", device, "--gpus", str(gpus), "--json", str(path), "--plot", str(plot)]
    # What is forked may not have touched a GPU before.
    python = request.getfixturevalue("fork_server").python if device == "cpu" else sys.executable
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(python), *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    figures = {row["row"]: row["figures"] for row in report["rows"]}
    assert list(figures) == list(Row)
    assert [pool["way"] for pool in figures["pull"]["pools"]] == [way] * 4
    assert all(pool["reader"]["quiet_ms"] > 0 for pool in figures["busy"]["pools"])
    assert all(wait > 0 for wait in figures["first_step"]["wait_ms"])
    assert figures["first_step"]["way"] == way
    sides = figures["mixed"]["sides"]
    assert [side["name"] for side in sides] == ["disagg", "agg_64"]
    assert [list(side["transfer_bytes"]) for side in sides] == [[way], []]
    assert all(side["tokens_per_s"] > 0 and side["itl"]["count"] and not side["failed"] for side in sides)
    assert plot.read_bytes().startswith(b"\x89PNG")
    # As if it had been measured on a GPU: the table finds all that it shows.
    rows = [row | {"shape": "qwen3-8b", "num_gpus": 1, "gpus": ["GPU"]} for row in report["rows"]]
    assert gpu_hand_off_tables(report | {"rows": rows}).count("not run") == 25
