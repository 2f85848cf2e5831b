"""What is logged and counted of requests, however they end."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

import pytest

from quartet.api.request import ChoiceFinished, Delta, Resume, TokenPrompt
from quartet.errors import DrainingError, InvalidRequestError, QueueFullError, WorkerUnavailableError
from router.config import AdmissionConfig, AttemptConfig
from tests.router.fakes import TIMEOUT_S, Collected, Fleet, Plan, collect, expected_tokens
from tests.router.records import make_load
from tests.router.test_generate import make_start


def said_in(caplog: pytest.LogCaptureFixture) -> dict[str, object]:
    """The fields of the one line that was logged."""
    [record] = [record for record in caplog.records if record.name == "router.request_log"]
    return record.quartet_fields


def value(fleet: Fleet, name: str, **labels: str) -> float | None:
    return fleet.registry.get_sample_value(name, labels or {"model": "tiny"})


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="router")


async def test_one_line_is_logged_for_a_request(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet("prefill-0", "decode-0")
    answer = await collect(fleet.generate(make_start(client_request_id="mine", num_choices=2)))
    said = said_in(caplog)
    assert said["request_id"] == answer.accepted.request_id
    assert (said["client_request_id"], said["outcome"], said["num_output_tokens"]) == ("mine", "length", 24)
    assert (said["prefill_worker"], said["decode_worker"]) == ("prefill-0", "decode-0")


@pytest.mark.parametrize("name", ["tenant", "client_request_id"])
async def test_a_name_that_is_refused_for_its_length_is_not_logged_in_full(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    fleet = Fleet("prefill-0", "decode-0")
    with pytest.raises(InvalidRequestError, match="longer than"):
        await collect(fleet.generate(make_start(**{name: "\x01" * 2**20})))
    shown = said_in(caplog)[name]
    assert isinstance(shown, str) and len(shown) < 300


async def test_metrics_count_tokens_and_outcomes() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    await collect(fleet.generate(make_start()))
    assert value(fleet, "quartet_router_output_tokens_total") == 12
    assert value(fleet, "quartet_router_ttft_seconds_count") == 1
    assert value(fleet, "quartet_router_itl_seconds_count") == 11
    assert value(fleet, "quartet_router_requests_total", outcome="length") == 1
    assert fleet.pipeline.context.metrics.requests.by_model() == {("tiny", "length"): 1}
    assert value(fleet, "quartet_router_attempts_total", cause="first") == 1
    assert fleet.registry.get_sample_value("quartet_router_running_requests") == 0


async def test_a_failed_requests_log_line_has_its_times_and_output_tokens(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet("prefill-0", "decode-0", attempts=AttemptConfig(max_attempts=1))
    fleet.hops.plan("decode", Plan(error=WorkerUnavailableError("gone"), fail_after=4))
    with pytest.raises(WorkerUnavailableError):
        await collect(fleet.generate(make_start()))
    said = said_in(caplog)
    assert (said["outcome"], said["num_output_tokens"], said["num_attempts"]) == ("worker_unavailable", 5, 1)
    assert (said["prefill_queue_s"], said["decode_queue_s"], said["transfer_s"]) == (0.01, 0.03, 0.004)
    assert {"router_queue_s", "prefill_s", "first_token_s", "total_s", "num_cached_tokens"} <= said.keys()
    assert value(fleet, "quartet_router_requests_total", outcome="worker_unavailable") == 1
    assert value(fleet, "quartet_router_output_tokens_total") == 5
    assert value(fleet, "quartet_router_prompt_tokens_total") == 20
    assert value(fleet, "quartet_router_request_duration_seconds_count") == 1


async def test_choices_that_end_differently_are_all_counted(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet("decode-0")
    fleet.hops.plan("decode", Plan(), Plan(hang_after=3), Plan())
    run = fleet.generate(make_start(num_choices=3))
    answer = Collected()
    with pytest.raises(DrainingError):
        async with asyncio.timeout(TIMEOUT_S), aclosing(run.parts()) as parts:
            async for part in parts:
                answer.add(part)
                if len(answer.finished) == 2:
                    run.abort(DrainingError("the router is going away"))
    said = said_in(caplog)
    assert (said["outcome"], said["num_output_tokens"], said["num_choices"]) == ("draining", 27, 3)
    assert value(fleet, "quartet_router_requests_total", outcome="length") == 2
    assert value(fleet, "quartet_router_requests_total", outcome="draining") == 1
    assert value(fleet, "quartet_router_output_tokens_total") == 27
    assert value(fleet, "quartet_router_request_duration_seconds_count") == 3


def lengths(fleet: Fleet) -> tuple[int, float, float]:
    """Whole answers: how many, and the tokens of their prompts and their own."""
    whole = fleet.pipeline.context.metrics.for_model("tiny").whole
    return sum(whole.prompt_length.counts), whole.prompt_length.sum, whole.output_length.sum


async def test_the_phases_of_a_whole_answer_lie_within_its_time() -> None:
    fleet = Fleet("prefill-0", "decode-0", num_blocks=1000)
    answer = await collect(fleet.generate(make_start(num_choices=2)))
    assert lengths(fleet) == (2, 40, 24)
    whole = fleet.pipeline.context.metrics.for_model("tiny").whole
    times = [finished.time for finished in answer.finished.values()]
    decode_s = [(time.total_s or 0.0) - (time.first_token_s or 0.0) for time in times]
    assert whole.decode_time.sum == pytest.approx(sum(decode_s))
    assert whole.token_time.sum == pytest.approx(sum(decode_s) / 11)
    waited_s = [(time.tokenize_s or 0.0) + (time.router_queue_s or 0.0) + 0.01 for time in times]  # Prefill's queue
    inference_s = [max((time.total_s or 0.0) - waited, 0.0) for time, waited in zip(times, waited_s, strict=True)]
    assert whole.inference_time.sum == pytest.approx(sum(map(max, inference_s, decode_s)))


async def test_an_answer_counts_as_whole_from_its_first_token_on() -> None:
    fleet = Fleet("decode-0", attempts=AttemptConfig(max_attempts=1))
    gone = WorkerUnavailableError("gone")
    fleet.hops.plan("decode", Plan(error=gone), Plan(error=gone, fail_after=4))
    for num_whole in (0, 1):
        with pytest.raises(WorkerUnavailableError):
            await collect(fleet.generate(make_start()))
        assert lengths(fleet) == (num_whole, 20 * num_whole, 4 * num_whole)


async def test_an_adapter_is_one_that_runs_while_a_choice_with_it_has_a_place() -> None:
    fleet = Fleet("decode-0", adapters=("mine",))
    fleet.hops.plan("decode", Plan(hang_after=3))
    run, metrics = fleet.generate(make_start(adapter="mine")), fleet.pipeline.context.metrics
    async with asyncio.timeout(TIMEOUT_S), aclosing(run.parts()) as parts:
        async for part in parts:
            if isinstance(part, Delta):
                break
        assert metrics.running_adapters() == ("mine",)
    assert metrics.running_adapters() == ()


async def test_a_prompt_counts_once_however_many_its_choices() -> None:
    fleet = Fleet("prefill-0", "decode-0", num_blocks=1000)
    await collect(fleet.generate(make_start(num_choices=3)))
    assert value(fleet, "quartet_router_prompt_tokens_total") == 20
    assert value(fleet, "quartet_router_cached_tokens_total") == 2
    assert value(fleet, "quartet_router_output_tokens_total") == 36


async def test_the_log_line_of_a_request_refused_from_the_queue_has_its_waiting_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet("decode-0", admission=AdmissionConfig(queue_timeout_s=0.05))
    for status in fleet.table.statuses(0.0):
        fleet.table.report(make_load(status.record, num_in_use_blocks=status.record.num_blocks), 0.0)
    with pytest.raises(QueueFullError):
        await collect(fleet.generate(make_start()))
    said = said_in(caplog)
    assert said["router_queue_s"] >= 0.05
    assert (said["num_attempts"], said["num_output_tokens"]) == (0, 0)
    # It was never placed: no worker computed its prompt.
    assert value(fleet, "quartet_router_prompt_tokens_total") == 0


async def test_a_request_refused_at_once_counts_once_whatever_it_claims(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet("decode-0")
    with pytest.raises(InvalidRequestError):
        await collect(fleet.generate(make_start(prompt=TokenPrompt(()), num_choices=9)))
    assert said_in(caplog)["outcome"] == "invalid_field"
    assert value(fleet, "quartet_router_requests_total", outcome="invalid_field") == 1


async def test_tokens_that_a_client_brings_are_not_counted_as_shown() -> None:
    fleet = Fleet("decode-0")
    resume = Resume(request_id="ab" * 16, attempt=1, seed=5, generated_token_ids=expected_tokens(5, 0, 20, 9))
    async with asyncio.timeout(TIMEOUT_S):
        *_, finished = [part async for part in fleet.generate(make_start(), resume=resume).parts()]
    assert isinstance(finished, ChoiceFinished) and finished.usage.num_output_tokens == 12
    assert value(fleet, "quartet_router_output_tokens_total") == 3


async def test_a_resume_that_fails_shows_no_tokens() -> None:
    fleet = Fleet("decode-0", attempts=AttemptConfig(max_attempts=1))
    fleet.hops.plan("decode", Plan(error=WorkerUnavailableError("gone")))
    resume = Resume(request_id="ab" * 16, attempt=1, seed=5, generated_token_ids=expected_tokens(5, 0, 20, 9))
    with pytest.raises(WorkerUnavailableError):
        async with asyncio.timeout(TIMEOUT_S):
            _ = [part async for part in fleet.generate(make_start(), resume=resume).parts()]
    assert value(fleet, "quartet_router_output_tokens_total") == 0


async def test_a_resume_that_fails_counts_once_however_many_choices_its_request_has() -> None:
    fleet = Fleet("decode-0", attempts=AttemptConfig(max_attempts=1))
    fleet.hops.plan("decode", Plan(error=WorkerUnavailableError("gone")))
    resume = Resume(request_id="ab" * 16, attempt=1, seed=5, choice=2)
    with pytest.raises(WorkerUnavailableError):
        await collect(fleet.generate(make_start(num_choices=5), resume=resume))
    assert value(fleet, "quartet_router_requests_total", outcome="worker_unavailable") == 1
