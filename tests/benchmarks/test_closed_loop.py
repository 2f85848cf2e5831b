"""The closed loop against a router that says what it is told to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from benchmarks import closed_loop
from benchmarks.closed_loop import ClosedLoop, Workload
from quartet.errors import QueueFullError, WorkerUnavailableError
from quartet.rpc.server import RpcServer, ServerConfig
from tests.client.fake_router import FakeRouter

WORKLOAD = Workload(min_prompt_tokens=5, max_prompt_tokens=9, num_output_tokens=3, first_token_id=16, end_token_id=64)


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
    assert figures.requests_finished == figures.attempts == len(router.starts) > 4
    assert figures.prompt_tokens_sent == sum(len(start.token_ids.ids) for start in router.starts)
    assert (figures.requests_failed, figures.requests_refused, figures.errors) == (0, 0, {})
    assert loop.num_in_flight == 0
    assert figures.tokens_per_s == pytest.approx(3 * figures.requests_per_s)
    assert 0 < figures.ttft_ms_p50 <= figures.duration_ms_p50 <= figures.duration_ms_p99


async def test_prompts_share_nothing_and_keep_to_their_bounds(router: FakeRouter, address: str) -> None:
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


async def test_refused_and_failed_requests_are_told_apart_and_never_hidden(router: FakeRouter, address: str) -> None:
    router.error = QueueFullError("full")
    refused = await ClosedLoop(address, WORKLOAD).run(3, ramp_s=0.0, duration_s=0.1)
    assert (refused.requests_refused, refused.requests_failed, refused.requests_finished) == (3, 0, 0)
    assert refused.errors == {"RESOURCE_EXHAUSTED": 3}
    router.error = WorkerUnavailableError("gone")
    failed = await ClosedLoop(address, WORKLOAD).run(3, ramp_s=0.0, duration_s=0.1)
    assert (failed.requests_refused, failed.requests_failed, failed.errors) == (0, 3, {"UNAVAILABLE": 3})


async def test_an_answer_that_is_cut_short_is_a_failure(router: FakeRouter, address: str) -> None:
    router.words = router.words[:2]
    figures = await ClosedLoop(address, WORKLOAD).run(1, ramp_s=0.0, duration_s=0.1)
    assert (figures.requests_finished, figures.errors) == (0, {"INCOMPLETE": 1})


async def test_a_request_that_never_ends_is_a_failure(
    router: FakeRouter, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed_loop, "_DRAIN_TIMEOUT_S", 0.2)
    router.hold_after = 1
    figures = await ClosedLoop(address, WORKLOAD).run(2, ramp_s=0.0, duration_s=0.1)
    assert (figures.requests_finished, figures.errors) == (0, {"NOT_ENDED": 2})
