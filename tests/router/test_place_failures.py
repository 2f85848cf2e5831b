"""Place when something breaks: it is placed elsewhere, or fails and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from quartet import errors
from quartet.api.placement import PlacedRequest
from quartet.api.request import Resume, TokenPrompt
from quartet.engine.sampling import Sampling
from quartet.streams.messages import SignedPlacement, WorkerStart
from quartet.v1 import decode_pb2
from router.config import AdmissionConfig, AttemptConfig
from router.fair_queue import FIXED_TOKENS
from tests.router.fakes import TIMEOUT_S, Fleet, Plan, expected_tokens
from tests.router.test_generate import make_start
from tests.router.test_request_log import said_in, value

GONE = errors.WorkerUnavailableError("gone")


async def place(fleet: Fleet, *, resume: Resume | None = None, **changes: Any) -> PlacedRequest:
    async with asyncio.timeout(TIMEOUT_S):
        return await fleet.pipeline.place(make_start(**changes), resume=resume)


def opened(signed: object) -> decode_pb2.SignedStart:
    assert isinstance(signed, SignedPlacement)
    return decode_pb2.SignedStart.FromString(signed.signed_start)


def num_booked(fleet: Fleet) -> int:
    return sum(status.num_requests for status in fleet.table.statuses(0.0))


async def test_a_failed_prefill_is_tried_elsewhere_and_leaves_nothing() -> None:
    fleet = Fleet("prefill-0", "prefill-1", "decode-0")
    fleet.hops.plan("prefill", Plan(error=GONE))
    placed = await place(fleet)
    [choice] = placed.choices
    assert (placed.attempt, choice.num_attempts) == (1, 2)
    assert choice.token_ids == tuple(expected_tokens(5, 0, 20, 1))
    assert {call.rank.worker_id for call in fleet.hops.calls} == {"prefill-0", "prefill-1"}
    start = opened(choice.next).start
    assert (start.context.attempt, start.context.request_id) == (1, placed.request_id)
    # What is left is the client's: its hand-off, and room at the decode rank.
    assert (fleet.hops.num_open, len(fleet.hops.held), num_booked(fleet)) == (0, 1, 1)


async def test_the_last_error_is_raised_and_nothing_is_left() -> None:
    fleet = Fleet("prefill-0", "decode-0", attempts=AttemptConfig(max_attempts=2))
    fleet.hops.plan("prefill", Plan(error=GONE), Plan(error=errors.EngineError("broke")))
    with pytest.raises(errors.EngineError):
        await place(fleet)
    fleet.assert_nothing_left()


async def test_a_decode_worker_lost_during_the_prefill_is_not_used_for_the_placement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet("prefill-0", "decode-0")
    prefill = fleet.hops.prefill

    def break_decode(rank: Any, start: WorkerStart) -> Any:
        if len(fleet.hops.calls) == 0:
            fleet.break_worker("decode-0")
            fleet.join("decode-1")
        return prefill(rank, start)

    monkeypatch.setattr(fleet.hops, "prefill", break_decode)
    placed = await place(fleet)
    [choice] = placed.choices
    assert choice.placement is not None
    assert choice.placement.decode.worker_id == "decode-1"
    # Each attempt sampled a token, and both belong to the answer.
    assert choice.token_ids == tuple(expected_tokens(5, 0, 20, 2))
    assert len(fleet.hops.held) == 1
    assert num_booked(fleet) == 1


async def test_a_failed_choice_drops_the_choices_that_were_already_placed() -> None:
    fleet = Fleet("prefill-0", "decode-0", attempts=AttemptConfig(max_attempts=1))
    fleet.hops.plan("prefill", Plan(), Plan(), Plan(error=GONE))
    with pytest.raises(errors.WorkerUnavailableError):
        await place(fleet, num_choices=3)
    fleet.assert_nothing_left()


@pytest.mark.parametrize("end", ["cancel", "abort", "timeout"])
async def test_a_place_call_that_ends_early_leaves_nothing(end: str) -> None:
    fleet = Fleet("prefill-0", "decode-0", max_timeout_s=0.05 if end == "timeout" else 60.0)
    fleet.hops.plan("prefill", Plan(), Plan(hang_after=0))
    placing = asyncio.create_task(place(fleet, num_choices=2))
    async with asyncio.timeout(TIMEOUT_S):
        await fleet.hops.hung.wait()
    if end == "cancel":
        placing.cancel()
    elif end == "abort":
        fleet.pipeline.abort_all(errors.DrainingError("leaving"))
    expected = {"cancel": asyncio.CancelledError, "abort": errors.DrainingError, "timeout": errors.RequestTimeoutError}
    with pytest.raises(expected[end]):
        await placing
    fleet.assert_nothing_left()


async def test_a_place_call_cancelled_at_any_turn_leaves_nothing() -> None:
    num_turns = 0
    while True:
        fleet = Fleet("prefill-0", "decode-0")
        placing = asyncio.create_task(place(fleet, num_choices=2))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        placing.cancel()
        await asyncio.wait([placing], timeout=TIMEOUT_S)
        if not placing.cancelled():
            break
        fleet.assert_nothing_left()
        num_turns += 1
    assert len(placing.result().choices) == 2
    assert len(fleet.hops.calls) == 2 < num_turns, "it was cancelled before and after its choices were prefilled"


async def test_what_a_client_continues_stays_charged_as_far_as_it_may_go() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    await place(fleet, tenant="a", sampling=Sampling(max_tokens=60))
    assert fleet.admission.share.start("a") == FIXED_TOKENS + 20 + 60


async def test_a_cancelled_place_call_leaves_the_queue() -> None:
    fleet = Fleet("prefill-0", "decode-0", num_blocks=10)
    await place(fleet, sampling=Sampling(max_tokens=60))
    placing = asyncio.create_task(place(fleet, sampling=Sampling(max_tokens=75)))
    async with asyncio.timeout(TIMEOUT_S):
        await fleet.policy.kept_waiting.wait()
    placing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await placing
    assert fleet.admission.length == 0
    assert num_booked(fleet) == 1


async def test_a_placement_reserves_its_first_blocks_until_it_lapses() -> None:
    # It comes free with time, not with a word from anybody.
    fleet = Fleet("prefill-0", "decode-0", num_blocks=10, admission=AdmissionConfig(queue_timeout_s=30))
    await place(fleet, sampling=Sampling(max_tokens=60))
    waiting = asyncio.create_task(place(fleet, sampling=Sampling(max_tokens=75)))
    async with asyncio.timeout(TIMEOUT_S):
        await fleet.policy.kept_waiting.wait()
    fleet.table.tick(24.9)
    await asyncio.sleep(0)
    assert not waiting.done()
    fleet.table.tick(25.0)
    await waiting


async def test_a_start_too_long_to_be_signed_is_refused_before_any_worker_is_called() -> None:
    fleet = Fleet("prefill-0", "decode-0", num_blocks=10**6, max_model_len=10**7)
    with pytest.raises(errors.MessageTooLargeError, match="Session"):
        await place(fleet, prompt=TokenPrompt([1] * (1 << 18)))
    assert fleet.hops.calls == []
    fleet.assert_nothing_left()


async def test_a_placement_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="router")
    fleet = Fleet("prefill-0", "decode-0")
    placed = await place(fleet, num_choices=2)
    said = said_in(caplog)
    assert (said["path"], said["outcome"], said["request_id"]) == ("place", "placed", placed.request_id)
    assert (said["num_choices"], said["num_output_tokens"], said["decode_worker"]) == (2, 2, "decode-0")
    assert value(fleet, "quartet_router_requests_total", outcome="placed") == 2
    assert value(fleet, "quartet_router_ttft_seconds_count") == 2
    # Its end is not seen here.
    assert not value(fleet, "quartet_router_request_duration_seconds_count")
    [choice, _] = placed.choices
    assert isinstance(choice.next, SignedPlacement)
    assert choice.next.mac.hex() not in caplog.text


async def test_a_placement_that_failed_is_counted_as_such(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="router")
    fleet = Fleet("prefill-0", "decode-0", attempts=AttemptConfig(max_attempts=1))
    fleet.hops.plan("prefill", Plan(), Plan(error=GONE))
    with pytest.raises(errors.WorkerUnavailableError):
        await place(fleet, num_choices=2)
    assert (said_in(caplog)["path"], said_in(caplog)["outcome"]) == ("place", "worker_unavailable")
    assert value(fleet, "quartet_router_requests_total", outcome="worker_unavailable") == 2


async def test_a_resumed_request_keeps_its_id_seed_and_tokens() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    given = expected_tokens(5, 1, 20, 4)
    resume = Resume(request_id="ab" * 16, attempt=3, seed=5, choice=1, generated_token_ids=given, num_text_bytes=9)
    placed = await place(fleet, resume=resume, num_choices=2)
    [choice] = placed.choices
    assert (placed.request_id, placed.attempt, placed.seed, choice.choice) == ("ab" * 16, 3, 5, 1)
    assert choice.token_ids == tuple(expected_tokens(5, 1, 20, 5)[4:])
    start = opened(choice.next).start
    assert (start.context.attempt, start.context.choice) == (3, 1)
    assert len(start.generation.generated_token_ids) == 4 * 5


async def test_a_resumed_request_avoids_the_worker_it_was_on_if_possible() -> None:
    fleet = Fleet("prefill-0", "decode-0", "decode-1", num_blocks=1000)
    for _ in range(6):
        first = await place(fleet)
        again = await place(fleet, resume=Resume(request_id=first.request_id, attempt=1, seed=first.seed))
        before, after = first.choices[0].placement, again.choices[0].placement
        assert before is not None
        assert after is not None
        assert before.decode != after.decode


async def test_a_resumed_request_returns_to_its_worker_if_there_is_no_other() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    first = await place(fleet)
    again = await place(fleet, resume=Resume(request_id=first.request_id, attempt=1, seed=first.seed))
    before, after = first.choices[0].placement, again.choices[0].placement
    assert before is not None
    assert after is not None
    assert (before.prefill, before.decode) == (after.prefill, after.decode)
