"""``quartet bench``: what it sends, what it prints and writes, how it refuses and ends."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.bench.display import BenchDisplay
from cli.bench.load import Load, LoadKind, Window
from cli.bench.measure import Recorder
from cli.bench.options import make_limits, make_loads
from cli.bench.run import BenchPlan, Limits, Point, RunObserver, SenderConfig, run_plan
from cli.bench.workload import IntRange, WorkloadConfig
from cli.traces.format import TraceRequest
from quartet.client import QuartetClient, RequestPath
from quartet.errors import QueueFullError
from tests.cli.conftest import RunCli
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter
from tests.stopwatch import Stopwatch

# The fake router's model takes 64 tokens.
SHORT = ("--prompt-tokens", "4-8", "--output-tokens", "3", "--warmup", "0")
PNG = b"\x89PNG"
# Goes on after a short warm-up.
TRACE = [TraceRequest(arrival_s=number / 1000, num_input_tokens=4, num_output_tokens=4) for number in range(300)]


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


async def test_as_many_requests_as_wanted_are_sent_as_they_were_ordered(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli
) -> None:
    address = await start_router(router)
    options = (*SHORT, "--requests", "20", "--concurrency", "3", "--temperature", "0", "--timeout", "9")
    result = await run_cli("bench", "--router", address, *options)
    assert result.exit_code == 0, result.output
    assert len(router.starts) == 20
    for start in router.starts:
        assert 4 <= len(start.token_ids.ids) <= 8
        assert all(100 <= token_id <= 600 for token_id in start.token_ids.ids)
        assert (start.sampling.max_tokens, start.sampling.ignore_eos, start.sampling.temperature) == (3, True, 0.0)
        assert start.timeout.seconds == 9
    for shown in (
        "20 finished, 0 failed, 0 cut off",
        "TTFT",
        "ITL",
        "E2E",
        "transfer by shm 2 GB/s",
        "own CPU",
        "decode",
    ):
        assert shown in result.stdout


@pytest.mark.parametrize("path", list(RequestPath))
async def test_each_path_is_measured_alike(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli, path: RequestPath
) -> None:
    options = (*SHORT, "--requests", "6", "--concurrency", "2", "--path", path.value, "--json", "-")
    result = await run_cli("bench", "--router", await start_router(router), *options)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    [point] = report["points"]
    assert (report["path"], point["requests"]["finished"]) == (path.value, 6)
    assert (point["ttft_ms"]["count"], point["itl_ms"]["count"]) == (6, 12)
    assert len(router.starts) == 6


async def test_text_is_sent_as_text(router: FakeRouter, start_router: StartRouter, run_cli: RunCli) -> None:
    await run_cli("bench", "--router", await start_router(router), *SHORT, "--requests", "2", "--text")
    assert [4 <= len(start.text.split()) <= 8 for start in router.starts] == [True, True]


async def test_json_on_standard_output_is_all_that_is_there(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli
) -> None:
    address = await start_router(router)
    result = await run_cli("bench", "--router", address, *SHORT, "--requests", "5", "--seed", "7", "--json", "-")
    report = json.loads(result.stdout)
    assert (report["benchmark"], report["path"], report["model"]["name"]) == ("bench", "generate", "tiny")
    assert {"command", "commit", "versions", "machine", "started_at", "duration_s", "limits"} <= report.keys()
    assert report["workload"] | {"prompt_tokens": "4-8", "output_tokens": "3", "seed": 7} == report["workload"]
    [point] = report["points"]
    assert point["load"] == {"kind": "concurrency", "value": 1}
    assert point["requests"] == {"sent": 5, "finished": 5, "failed": 0, "cut_off": 0}
    assert (point["ttft_ms"]["count"], point["itl_ms"]["count"], point["e2e_ms"]["count"]) == (5, 10, 5)
    # The fake router says that a request took it half a second, a quarter of that for moving blocks.
    assert point["hops"]["decode"]["mean_ms"] == pytest.approx(375)
    assert point["hops"]["transfer"]["mean_ms"] == pytest.approx(125)
    assert point["transfers"] == {"shm": {"num_requests": 5, "size_bytes": 1_250_000_000, "gb_per_s": 2.0}}
    assert "5 finished" in result.stderr


async def test_a_sweep_runs_each_load_with_prompts_of_its_own(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli, tmp_path: Path
) -> None:
    files = ("--json", str(tmp_path / "sweep.json"), "--plot", str(tmp_path / "new" / "sweep.png"))
    address = await start_router(router)
    result = await run_cli("bench", "--router", address, *SHORT, "--requests", "4", "--sweep", "1,2,3", *files)
    assert result.exit_code == 0, result.output
    points = json.loads((tmp_path / "sweep.json").read_text())["points"]
    assert [point["load"]["value"] for point in points] == [1, 2, 3]
    assert len({tuple(start.token_ids.ids) for start in router.starts}) == 12
    assert (tmp_path / "new" / "sweep.png").read_bytes().startswith(PNG)


async def test_one_run_is_drawn_too(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli, tmp_path: Path
) -> None:
    picture = tmp_path / "run.png"
    options = (*SHORT, "--requests", "3", "--plot", str(picture))
    await run_cli("bench", "--router", await start_router(router), *options)
    assert picture.read_bytes().startswith(PNG)


async def test_a_rate_is_an_open_loop(router: FakeRouter, start_router: StartRouter, run_cli: RunCli) -> None:
    address = await start_router(router)
    result = await run_cli("bench", "--router", address, *SHORT, "--rate", "500", "--requests", "30", "--json", "-")
    [point] = json.loads(result.stdout)["points"]
    assert point["load"] == {"kind": "rate", "value": 500}
    assert point["requests"]["finished"] == len(router.starts) == 30


async def test_a_trace_is_sent_once_and_may_be_replayed(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli, tmp_path: Path
) -> None:
    rows = [
        {"timestamp": 100 * number, "input_length": 520 + number, "output_length": number + 1, "hash_ids": [7, number]}
        for number in range(4)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    address = await start_router(router)
    options = ("--trace", str(trace), "--replay", "10", "--warmup", "0")
    result = await run_cli("bench", "--router", address, *options)
    assert result.exit_code == 0, result.output
    assert [len(start.token_ids.ids) for start in router.starts] == [520, 521, 522, 523]
    assert [start.sampling.max_tokens for start in router.starts] == [1, 2, 3, 4]
    assert len({tuple(start.token_ids.ids[:512]) for start in router.starts}) == 1


async def test_every_request_of_a_trace_counts_unless_a_warm_up_is_asked_for(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli, tmp_path: Path
) -> None:
    row = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}
    trace = tmp_path / "trace.jsonl"
    trace.write_text(4 * (json.dumps(row) + "\n"))
    address = await start_router(router)
    result = await run_cli("bench", "--router", address, "--trace", str(trace), "--json", "-")
    report = json.loads(result.stdout)
    assert (report["limits"]["warmup_s"], report["points"][0]["requests"]["sent"]) == (0, 4)


def test_without_a_trace_there_is_a_warm_up() -> None:
    loads = [Load(LoadKind.CONCURRENCY, 1)]
    assert make_limits(None, None, None, loads=loads, has_trace=False).warmup_s == 2
    assert make_limits(0.0, None, None, loads=loads, has_trace=False).warmup_s == 0
    assert make_limits(1.0, None, None, loads=loads, has_trace=True).warmup_s == 1


async def test_a_file_that_cannot_be_written_is_reported_and_hides_neither_table_nor_the_other_file(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli, tmp_path: Path
) -> None:
    picture = tmp_path / "run.png"
    options = (*SHORT, "--requests", "2", "--json", "/dev/full", "--plot", str(picture))
    result = await run_cli("bench", "--router", await start_router(router), *options)
    assert (result.exit_code, result.exception.__class__) == (1, SystemExit)
    assert "quartet: can't write /dev/full: No space left on device\n" in result.stderr
    assert "2 finished" in result.stdout
    assert picture.read_bytes().startswith(PNG)


async def test_refusals_are_counted_by_status_and_reason(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli
) -> None:
    router.error = QueueFullError("the queue is full", retry_delay_s=0.01)
    address = await start_router(router)
    result = await run_cli("bench", "--router", address, *SHORT, "--requests", "4", "--json", "-")
    assert result.exit_code == 1
    [point] = json.loads(result.stdout)["points"]
    assert point["errors"] == [
        {"status": "RESOURCE_EXHAUSTED", "reason": "QUEUE_FULL", "count": 4, "example": "the queue is full"}
    ]
    assert (point["requests"]["failed"], point["e2e_ms"]["p50"]) == (4, None)
    assert "4 failed with RESOURCE_EXHAUSTED QUEUE_FULL, such as: the queue is full" in result.stderr


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--concurrency", "0"], ["--concurrency", "1"]),
        (["--concurrency", "2", "--rate", "3"], ["--concurrency and --rate", "give one"]),
        (["--rate", "-1"], ["--rate", "-1 is not above 0"]),
        (["--rate", "nan"], ["--rate", "nan is not above 0"]),
        (["--replay", "1"], ["--replay", "give --trace too"]),
        (["--sweep", "1,x"], ["--sweep", "'1,x' is neither"]),
        (["--sweep", "1.5"], ["--sweep", "'1.5' is neither"]),
        (["--sweep", "replay=1"], ["--sweep", "is neither"]),
        (["--duration", "0"], ["--duration", "0 is not above 0"]),
        (["--prompt-tokens", "12k"], ["--prompt-tokens", "'12k' is neither a number"]),
        (["--output-tokens", "9-3"], ["--output-tokens", "'9-3'"]),
        (["--prompt-tokens", "40", "--output-tokens", "25"], ["--prompt-tokens and --output-tokens", "65", "64"]),
        (["--trace", "no-such-file"], ["--trace", "no-such-file"]),
        (["--plot", "x.gif"], ["--plot", "x.gif must end in one of .png"]),
        (["--json", "/"], ["--json", "/ is a directory"]),
        (["--path", "pigeon"], ["--path", "pigeon"]),
        (["--rounds", "2", "--requests", "2"], ["--requests and --rounds", "give one"]),
        (["--rounds", "2", "--rate", "2"], ["--rounds", "only --concurrency and --sweep"]),
        (["--label", "kind=agg"], ["--label", "needs --out"]),
        (["--log-dir", "/"], ["--log-dir", "needs --out"]),
        (["--label", "agg", "--out", "x"], ["--label", "'agg' is not like kind=disagg"]),
        (["--out", "/dev/null/x"], ["--out", "can't make /dev/null/x"]),
    ],
)
async def test_an_impossible_value_is_reported_by_the_options_name(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli, options: list[str], shown: list[str]
) -> None:
    result = await run_cli("bench", "--router", await start_router(router), *options)
    assert result.exit_code == 2
    # Out of the frame that it is printed in.
    message = " ".join(result.stderr.replace("│", " ").split())
    assert all(part in message for part in shown), message
    assert router.starts == []


async def test_drawing_without_matplotlib_says_what_to_install(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = await run_cli("bench", "--plot", "x.png")
    assert result.exit_code == 2
    message = " ".join(result.stderr.replace("│", " ").split())
    assert "pip install 'quartet[plot]'" in message and "--plot" in message


async def test_a_missing_router_is_reported_before_any_load(run_cli: RunCli, free_port: Callable[[], int]) -> None:
    stopwatch = Stopwatch()
    result = await run_cli("bench", "--router", f"127.0.0.1:{free_port()}")
    assert stopwatch.seconds < 5
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("quartet: UNAVAILABLE ROUTER_UNAVAILABLE: no router answers")


def test_sweeps_are_of_clients_or_of_rates() -> None:
    assert make_loads(None, None, None, "1,2", has_trace=False) == (
        Load(LoadKind.CONCURRENCY, 1),
        Load(LoadKind.CONCURRENCY, 2),
    )
    assert make_loads(None, None, None, "rate=0.5,2", has_trace=False) == (
        Load(LoadKind.RATE, 0.5),
        Load(LoadKind.RATE, 2),
    )


class Observer(RunObserver):
    """Ends the task once the router holds as many requests as run."""

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []

    def began(self, load: Load, number: int, recorder: Recorder, window: Window) -> None:
        self.recorders.append(recorder)

    def ended(self, point: Point) -> None:
        pass


def plan(
    *loads: Load, trace: Sequence[TraceRequest] | None = None, timeout_s: float | None = None, **limits: Any
) -> BenchPlan:
    length = IntRange(4, 4)
    return BenchPlan(
        loads=loads,
        limits=Limits(**{"warmup_s": 0.0, "duration_s": None, "max_requests": None} | limits),
        workload=WorkloadConfig(prompt_tokens=length, output_tokens=length, ids=IntRange(1, 9), trace=trace),
        sender=SenderConfig(timeout_s=timeout_s),
        seed=1,
    )


async def test_an_interrupted_run_cancels_what_runs_and_keeps_what_it_measured(
    router: FakeRouter, start_router: StartRouter
) -> None:
    router.hold_after = 2
    observer = Observer()
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(60):
        loads = (Load(LoadKind.CONCURRENCY, 1), Load(LoadKind.CONCURRENCY, 2))
        running = asyncio.create_task(run_plan(client, plan(*loads), observer))
        await router.holding.wait()
        # The second token is on its way.
        while not observer.recorders[0].measured.itl.count:  # noqa: ASYNC110 - a count rings no bell
            await asyncio.sleep(0)
        running.cancel()
        [point] = await running
        await router.dropped.wait()
    assert point.result.is_interrupted
    assert (point.result.requests.sent, point.result.requests.cut_off) == (1, 1)
    assert (point.result.ttft_ms.count, point.result.itl_ms.count) == (1, 1)


async def test_requests_of_the_warm_up_are_load_but_not_in_the_figures(
    router: FakeRouter, start_router: StartRouter
) -> None:
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(60):
        limits: dict[str, Any] = {"warmup_s": 0.05, "max_requests": 3}
        [point] = await run_plan(client, plan(Load(LoadKind.CONCURRENCY, 1), **limits), Observer())
    assert point.result.requests.sent == 3
    assert len(router.starts) > 3


@pytest.mark.parametrize(
    ("load", "limits"),
    [
        (Load(LoadKind.CONCURRENCY, 8), {"rounds": 1}),
        (Load(LoadKind.CONCURRENCY, 8), {"rounds": 1, "duration_s": 60.0}),
        (Load(LoadKind.CONCURRENCY, 8), {"max_requests": 3, "duration_s": 60.0}),
        (Load(LoadKind.RATE, 1000.0), {"max_requests": 3}),
        (Load(LoadKind.CONCURRENCY, 8), {"trace": TRACE}),
        (Load(LoadKind.CONCURRENCY, 8), {"trace": TRACE, "duration_s": 60.0}),
        (Load(LoadKind.REPLAY, 1.0), {"trace": TRACE, "duration_s": 60.0}),
    ],
)
async def test_rates_of_a_number_of_requests_are_of_no_others(
    router: FakeRouter, start_router: StartRouter, load: Load, limits: dict[str, Any]
) -> None:
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(60):
        [point] = await run_plan(client, plan(load, warmup_s=0.05, **limits), Observer())
    figures = point.result
    assert 0 < figures.requests.sent < len(router.starts)
    assert figures.requests_per_s * figures.window_s == pytest.approx(figures.requests.finished)
    assert figures.prompt_tokens_per_s * figures.window_s == pytest.approx(figures.prompt_tokens)
    assert figures.output_tokens_per_s * figures.window_s == pytest.approx(figures.output_tokens)


async def test_a_warm_up_whose_requests_do_not_end_settles_for_so_long_only(
    router: FakeRouter, start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.hold_after = 2
    monkeypatch.setattr("cli.bench.run._DRAIN_TIMEOUT_S", 0.1)
    wanted = plan(Load(LoadKind.CONCURRENCY, 1), warmup_s=0.01, duration_s=0.01, max_requests=1)
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(60):
        [point] = await run_plan(client, wanted, Observer())
    assert (point.result.requests.sent, point.measured.cut_off) == (0, 0)
    # The timeout above would end it as Ctrl-C does.
    assert not point.result.is_interrupted


@pytest.mark.parametrize("limits", [{"duration_s": 0.01}, {"warmup_s": 0.01, "max_requests": 1, "duration_s": 0.01}])
async def test_what_does_not_end_is_waited_for_as_long_as_a_request_may_take(
    router: FakeRouter, start_router: StartRouter, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any]
) -> None:
    router.hold_after = 2
    # The client would end the request itself, as failed.
    monkeypatch.setattr("quartet.client.generate.DEADLINE_GRACE_S", 30.0)
    wanted = plan(Load(LoadKind.CONCURRENCY, 1), timeout_s=0.1, **limits)
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(60):
        [point] = await run_plan(client, wanted, observer := Observer())
    totals = observer.recorders[0].totals()
    assert (totals.failed, totals.finished, observer.recorders[0].num_running) == (0, 0, 0)
    assert not point.result.is_interrupted


async def test_a_bug_in_the_warm_up_is_raised_at_once() -> None:
    class Broken:
        def generate(self, *_: object, **__: object) -> None:
            raise RuntimeError("a bug")

    wanted = plan(Load(LoadKind.CONCURRENCY, 1), warmup_s=60.0, max_requests=1)
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="a bug")):
        async with asyncio.timeout(60) as bound:
            await run_plan(Broken(), wanted, Observer())  # type: ignore[arg-type]
    assert not bound.expired()


async def test_the_display_is_plain_lines_in_a_pipe_and_live_on_a_terminal() -> None:
    for is_terminal in (False, True):
        out = io.StringIO()
        console = Console(file=out, force_terminal=is_terminal, width=200)
        window = Window(None)
        recorder = Recorder(window)
        with BenchDisplay(2, console) as display:
            display.began(Load(LoadKind.CONCURRENCY, 4), 0, recorder, window)
            recorder.begin(time.perf_counter()).tokens(3)
            display.show()
        for shown in ("1 of 2: concurrency 4, warm-up", "running 1", "TTFT", "own CPU"):
            assert shown in out.getvalue()
        assert ("\x1b" in out.getvalue()) is is_terminal
