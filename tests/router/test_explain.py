"""Explain: where a request would go, without running it."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import pytest

from quartet import errors
from quartet.api.fleet import Explanation, RankOption
from quartet.api.request import GenerateStart, TextPrompt, TokenPrompt
from quartet.discovery.base import Rank, Role
from quartet.engine.sampling import Sampling
from quartet.events.load import StepTime
from router.policy.kv_aware import KvAwarePolicy
from tests.router.fakes import TIMEOUT_S, Fleet, Plan, collect
from tests.router.records import make_load, make_record
from tests.router.test_generate import make_start


async def explain(fleet: Fleet, start: GenerateStart) -> Explanation:
    async with asyncio.timeout(TIMEOUT_S):
        return await fleet.pipeline.explain(start)


def by_name(explanation: Explanation) -> dict[str, RankOption]:
    return {option.rank.worker_id: option for option in explanation.options}


async def test_explain_lists_the_ranks_for_a_request_with_the_chosen_ones_first() -> None:
    fleet = Fleet("prefill-0", "decode-0", "decode-1")
    explanation = await explain(fleet, make_start())
    assert explanation.policy == "least_loaded"
    assert (explanation.num_prompt_tokens, explanation.num_waiting) == (20, 0)
    assert [option.is_chosen for option in explanation.options] == [True, True, False]
    assert {option.role for option in explanation.options[:2]} == {Role.PREFILL, Role.DECODE}
    assert not any(option.obstacle for option in explanation.options)
    [pool] = fleet.table.pools(0.0)
    assert (explanation.model, explanation.model_fingerprint) == (pool.key.model_name, pool.key.fingerprint)


async def test_explain_runs_books_and_uses_up_nothing() -> None:
    asked, unasked = (Fleet("prefill-0", "prefill-1", "decode-0", "decode-1") for _ in range(2))
    for _ in range(10):
        explanation = await explain(asked, make_start())
        asked.assert_nothing_left()
        routes = []
        for fleet in (asked, unasked):
            answer = await collect(fleet.generate(make_start()))
            assert answer.accepted is not None
            [placement] = answer.accepted.choices
            routes.append((placement.prefill, placement.decode))
        assert routes[0] == routes[1]
        # The request goes where explain said.
        assert {option.rank for option in explanation.options if option.is_chosen} == set(routes[0])
    assert [call.kind for call in asked.hops.calls] == [call.kind for call in unasked.hops.calls]


async def test_explain_and_accepted_report_the_same_matched_tokens_and_cost() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    await collect(fleet.generate(make_start()))
    explanation = await explain(fleet, make_start())
    answer = await collect(fleet.generate(make_start()))
    assert answer.accepted is not None
    [placement] = answer.accepted.choices
    option = by_name(explanation)["prefill-0"]
    assert option.num_matched_tokens == placement.num_matched_tokens > 0
    assert option.cost == placement.cost == 0
    assert option.cost_unit == "tokens"


async def test_the_obstacle_of_a_rank_without_free_blocks_names_what_it_lacks() -> None:
    fleet = Fleet("prefill-0", "decode-0", num_blocks=10)
    fleet.hops.plan("decode", Plan(hang_after=1))
    running = fleet.generate(make_start(sampling=Sampling(max_tokens=60)))
    async with asyncio.timeout(TIMEOUT_S):
        await fleet.hops.hung.wait()
    waiting = fleet.generate(make_start(sampling=Sampling(max_tokens=60)))
    async with asyncio.timeout(TIMEOUT_S):
        await fleet.policy.kept_waiting.wait()
    explanation = await explain(fleet, make_start(sampling=Sampling(max_tokens=60)))
    assert explanation.num_waiting == 1
    option = by_name(explanation)["decode-0"]
    assert option.obstacle.startswith("no room: ")
    assert (option.cost, option.is_chosen) == (None, False)
    assert not by_name(explanation)["prefill-0"].is_chosen
    for request in (running, waiting):
        request.cancel()
        await collect(request)
    fleet.assert_nothing_left()


async def test_explain_also_lists_workers_that_take_no_requests() -> None:
    fleet = Fleet("prefill-0", "decode-0", "decode-1")
    fleet.break_worker("decode-1")
    explanation = await explain(fleet, make_start())
    assert [option.rank.worker_id for option in explanation.options][-1] == "decode-1"
    assert explanation.options[-1].obstacle == "not ready: suspect"
    assert by_name(explanation)["decode-0"].is_chosen


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"prompt": TextPrompt("")}, errors.InvalidRequestError, "text"),
        ({"prompt": TokenPrompt((2**31,))}, errors.InvalidRequestError, "token_ids.ids"),
        ({"model": "none"}, errors.ModelNotFoundError, "model"),
        ({"adapter": "lora"}, errors.InvalidRequestError, "adapter"),
        ({"num_choices": 65}, errors.InvalidRequestError, "num_choices"),
    ],
)
async def test_explain_is_refused_as_the_request_would_be(
    changes: dict[str, object], error: type[errors.ServingError], field: str
) -> None:
    fleet = Fleet("decode-0")
    with pytest.raises(error) as caught:
        await explain(fleet, make_start(**changes))
    assert caught.value.field == field


async def test_explain_lists_each_data_parallel_rank_separately() -> None:
    fleet = Fleet("decode-0", data_parallel_size=2)
    explanation = await explain(fleet, make_start())
    assert {option.rank for option in explanation.options} == {Rank("decode-0", 0), Rank("decode-0", 1)}
    assert sum(option.is_chosen for option in explanation.options) == 1


async def test_a_busy_rank_is_chosen_with_the_time_until_it_is_free() -> None:
    fleet = Fleet("decode-0", policy=KvAwarePolicy(random.Random(0)))
    load = make_load(make_record("decode-0"))
    busy = replace(load, ranks=(replace(load.ranks[0], step_ends_in_s=100.0, num_running=1, step_time=StepTime()),))
    fleet.table.report(busy, time.monotonic())
    explanation = await explain(fleet, make_start())
    assert [option.is_chosen for option in explanation.options] == [True]
    assert explanation.wait_s == pytest.approx(100.0, abs=5.0)
    fleet.table.report(load, time.monotonic())
    assert (await explain(fleet, make_start())).wait_s is None
