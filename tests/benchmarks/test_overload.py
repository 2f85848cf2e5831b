"""How the overload benchmark finds the peak, and its short form end to end: that it measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import overload
from benchmarks.overload import ClosedLoop, Plan, Workload, next_level
from quartet.errors import QueueFullError, WorkerUnavailableError
from quartet.rpc.server import RpcServer, ServerConfig
from tests.client.fake_router import FakeRouter
from tests.e2e.fork_server import ForkServer

REPOSITORY = Path(__file__).resolve().parents[2]


WORKLOAD = Workload(min_prompt_tokens=5, max_prompt_tokens=9, num_output_tokens=3, first_token_id=16, end_token_id=64)


# Of each prompt, by the usage that FakeRouter reports.
PROMPT_TOKENS_REPORTED = 4


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
async def address(router: FakeRouter) -> AsyncIterator[str]:
    server = RpcServer(ServerConfig(), [router.service()])
    port = await server.start()
    yield f"127.0.0.1:{port}"
    await server.drain(0.2)


async def test_every_request_is_counted_and_all_have_ended(router: FakeRouter, address: str) -> None:
    loop = ClosedLoop(address, WORKLOAD)
    figures = await loop.run(4, ramp_s=0.05, duration_s=0.3)
    assert figures.concurrency == 4
    assert figures.requests_finished == len(router.starts) > 4
    assert figures.prompt_tokens_sent == figures.requests_finished * PROMPT_TOKENS_REPORTED
    assert (figures.requests_failed, figures.requests_refused, figures.errors) == (0, 0, {})
    assert "  0 in flight  errors: none" in loop.describe(0.4, 0.4)
    assert figures.tokens_per_s == pytest.approx(3 * figures.requests_per_s)
    assert 0 < figures.ttft_ms_p50 <= figures.duration_ms_p50 <= figures.duration_ms_p99


async def test_prompts_share_no_prefix_and_keep_to_their_bounds(router: FakeRouter, address: str) -> None:
    await ClosedLoop(address, WORKLOAD).run(2, ramp_s=0.0, duration_s=0.2)
    prompts = [tuple(start.token_ids.ids) for start in router.starts]
    assert len(set(prompts)) == len(prompts)
    assert {len(prompt) for prompt in prompts} <= set(range(5, 10))
    assert all(16 <= token < 64 for prompt in prompts for token in prompt)
    assert all(start.sampling.max_tokens == 3 and start.sampling.ignore_eos for start in router.starts)


async def test_another_seed_gives_other_prompts(router: FakeRouter, address: str) -> None:
    for seed in (1, 2):
        await ClosedLoop(address, replace(WORKLOAD, seed=seed)).run(1, ramp_s=0.0, duration_s=0.1)
    prompts = [tuple(start.token_ids.ids) for start in router.starts]
    assert len(set(prompts)) == len(prompts)


async def test_refused_and_failed_requests_are_counted_separately_and_never_hidden(
    router: FakeRouter, address: str
) -> None:
    router.error = QueueFullError("full")
    refused = await ClosedLoop(address, WORKLOAD).run(3, ramp_s=0.0, duration_s=0.1)
    assert (refused.requests_refused, refused.requests_failed, refused.requests_finished) == (3, 0, 0)
    assert refused.errors == {"RESOURCE_EXHAUSTED": 3}
    router.error = WorkerUnavailableError("gone")
    failed = await ClosedLoop(address, WORKLOAD).run(3, ramp_s=0.0, duration_s=0.1)
    assert (failed.requests_refused, failed.requests_failed, failed.errors) == (0, 3, {"UNAVAILABLE": 3})


async def test_an_answer_that_is_cut_short_is_a_failure(router: FakeRouter, address: str) -> None:
    router.words = router.words[:2]
    with pytest.raises(RuntimeError, match="cut short"):
        await ClosedLoop(address, WORKLOAD).run(1, ramp_s=0.0, duration_s=0.1)


async def test_a_request_that_never_ends_is_a_failure(
    router: FakeRouter, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overload, "_REQUEST_TIMEOUT_S", 0.2)
    router.hold_after = 1
    figures = await ClosedLoop(address, WORKLOAD).run(2, ramp_s=0.0, duration_s=0.1)
    assert (figures.requests_finished, figures.requests_failed, figures.errors) == (0, 2, {"NOT_ENDED": 2})


@pytest.mark.parametrize(
    ("sweep", "level"),
    [
        ({}, 1),
        ({1: 100.0}, 2),
        ({1: 100.0, 2: 190.0, 4: 191.0}, 8),
        ({1: 100.0, 2: 190.0, 4: 191.0, 8: 189.0}, None),
        ({1: 100.0, 2: 190.0, 4: 191.0, 8: 250.0}, 16),
    ],
)
def test_the_sweep_doubles_until_two_levels_bring_no_gain(sweep: dict[int, float], level: int | None) -> None:
    assert next_level(Plan(), sweep) == level


def test_the_sweep_ends_at_its_bound() -> None:
    assert next_level(Plan(max_concurrency=4), {1: 1.0, 2: 2.0, 4: 4.0}) is None


#: The short form of the command, made even shorter, with services that are forked.
COMMAND = """
import sys
from benchmarks import overload
sys.executable = sys.argv.pop(1)
overload._SHORT = overload.Plan(ramp_s=0.5, sweep_s=1.0, peak_s=1.5, overload_s=2.5, max_concurrency=2)
overload.main()
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("overload")
    options = ["--short", "--json", str(directory / "overload.json"), "--plot", str(directory / "overload.png")]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(fork_server.python), *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (directory / "overload.png").read_bytes().startswith(b"\x89PNG")
    written: dict[str, Any] = json.loads((directory / "overload.json").read_text())
    return written


@pytest.mark.bench
@pytest.mark.e2e
def test_the_report_sets_twice_the_load_of_the_peak_against_the_peak(report: dict[str, Any]) -> None:
    peak, over = report["peak"], report["overload"]
    assert peak["tokens_per_s"] > 0
    assert over["concurrency"] == 2 * peak["concurrency"]
    assert over["ratio"] == pytest.approx(over["tokens_per_s"] / peak["tokens_per_s"], rel=1e-4)
    assert [phase["load"]["concurrency"] for phase in report["sweep"]][:2] == [1, 2]
    assert over["phase"]["cpu"]["share"].keys() >= {"client", "router", "prefill-0", "decode-0"}
    assert report["versions"].keys() >= {"torch", "transformers"}


@pytest.mark.bench
@pytest.mark.e2e
def test_under_overload_no_work_is_done_twice(report: dict[str, Any]) -> None:
    over = report["overload"]
    evidence = over["phase"]["evidence"]
    assert over["requests_finished"] > 0
    assert (over["requests_failed"], over["requests_refused"]) == (0, 0)
    assert (over["hand_offs_expired"], over["preemptions"], over["prompts_prefilled_twice"]) == (0, 0, 0)
    assert evidence["tokens_computed_again"] == 0
    # All went over the whole path: prefilled remotely, taken over by decode.
    assert evidence["prompts_prefilled"] == over["requests_finished"] == evidence["hand_offs"]["taken"]
