"""When hops break: the client sees the undisturbed tokens, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet import errors
from quartet.api.request import ChoiceFinished, Delta, TextOptions
from quartet.discovery.base import Rank
from quartet.engine.base import FinishReason
from quartet.engine.sampling import OutputOptions, PromptLogprobs, Sampling, TokenLogprobs
from quartet.errors import ServingError
from quartet.streams.client import DecodeCall, DecodeSink
from quartet.streams.messages import DecodeStarted, WorkerStart
from router.config import AttemptConfig
from router.policy.create import PolicyConfig, PolicyName, create_policy
from tests.router.fakes import Collected, Fleet, Plan, collect, expected_tokens, text_of
from tests.router.test_generate import make_start

TRANSFER_ERRORS = [
    errors.TransferError("broke"),
    errors.TransferTimeoutError("slow"),
    errors.HandOffNotFoundError("expired"),
    errors.HandOffStateError("taken"),
    errors.StaleEpochError("restarted"),
]
PASSING_ERRORS = [
    *TRANSFER_ERRORS,
    errors.WorkerUnavailableError("gone"),
    errors.DrainingError("leaving"),
    errors.EngineError("broke"),
    errors.OutOfBlocksError("full"),
    errors.StalledStreamError("stalled"),
    errors.RequestCancelledError("restarted"),
    errors.DuplicateRequestError("twice"),
    errors.LayoutMismatchError("other"),
    ServingError("internal error"),
]
NO_HAND_OFF_ERRORS = [
    errors.NoHandOffError("not in host memory"),
    errors.UnsupportedFieldError("an older worker takes no hand-offs", field="hand_off"),
    errors.InvalidRequestError("of other tokens", field="hand_off.blocks"),
]
by_reason = {"ids": lambda error: error.reason if isinstance(error, ServingError) else str(error)}


def workers_of(fleet: Fleet, kind: str) -> list[str]:
    return [call.rank.worker_id for call in fleet.hops.calls if call.kind == kind]


@pytest.mark.parametrize("error", PASSING_ERRORS, **by_reason)
async def test_a_failed_prefill_is_tried_elsewhere(error: ServingError) -> None:
    fleet = Fleet("prefill-0", "prefill-1", "decode-0")
    fleet.hops.plan("prefill", Plan(error=error))
    answer = await collect(fleet.generate(make_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)
    assert sorted(workers_of(fleet, "prefill")) == ["prefill-0", "prefill-1"]
    assert answer.finished[0].usage.num_attempts == 2
    fleet.assert_nothing_left()


@pytest.mark.parametrize("error", TRANSFER_ERRORS, **by_reason)
async def test_after_a_failed_transfer_the_same_worker_prefills_again_then_another(error: ServingError) -> None:
    fleet = Fleet("prefill-0", "prefill-1", "decode-0")
    fleet.hops.plan("decode", Plan(error=error), Plan(error=error))
    answer = await collect(fleet.generate(make_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)
    first, second, third = workers_of(fleet, "prefill")
    assert first == second != third
    assert [len(call.start.generation.generated_token_ids) for call in fleet.hops.calls] == [0, 1, 1, 2, 2, 3]
    fleet.assert_nothing_left()


@pytest.mark.parametrize("hop", ["prefill", "decode"])
@pytest.mark.parametrize(
    "settings_",
    [
        *({"name": name} for name in PolicyName),
        {"prefill_name": PolicyName.ROUND_ROBIN},
        {"session_affinity": True},
    ],
    ids=str,
)
async def test_if_workers_cannot_hand_off_the_decode_worker_prefills(hop: str, settings_: dict[str, Any]) -> None:
    policy = create_policy(PolicyConfig(local_prefill_max_tokens=4, **settings_), random.Random(0))
    fleet = Fleet("prefill-0", "prefill-1", "decode-0", policy=policy)
    fleet.hops.plan(hop, Plan(error=errors.NoHandOffError("not in host memory")))
    answer = await collect(fleet.generate(make_start(session_key="one")))
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)
    apart = ["prefill", "decode"] if hop == "decode" else ["prefill"]
    assert [call.kind for call in fleet.hops.calls] == [*apart, "decode"]
    assert fleet.hops.calls[-1].start.hand_off is None
    fleet.assert_nothing_left()


@pytest.mark.parametrize("error", [*NO_HAND_OFF_ERRORS, errors.LayoutMismatchError("other blocks")], **by_reason)
async def test_a_refused_hand_off_is_no_fault_of_the_client(error: ServingError) -> None:
    fleet = Fleet("prefill-0", "decode-0")
    fleet.hops.plan("decode", Plan(error=error))
    answer = await collect(fleet.generate(make_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)
    assert [call.kind for call in fleet.hops.calls] == ["prefill", "decode", "decode"]
    fleet.assert_nothing_left()


@pytest.mark.parametrize("fail_after", [0, 1, 5])
async def test_a_decode_worker_that_dies_is_replaced_and_the_answer_goes_on(fail_after: int) -> None:
    fleet = Fleet("prefill-0", "decode-0", "decode-1")
    fleet.hops.plan("decode", Plan(error=errors.WorkerUnavailableError("gone"), fail_after=fail_after))
    answer = await collect(fleet.generate(make_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)
    assert answer.texts[0] == text_of(answer.token_ids[0])
    assert len(set(workers_of(fleet, "decode"))) == 2
    starts = [call.start for call in fleet.hops.calls if call.kind == "decode"]
    assert {start.generation.seed for start in starts} == {5}
    assert [start.context.attempt for start in starts] == [0, 1]
    assert answer.finished[0].usage.num_cached_tokens == 2
    fleet.assert_nothing_left()


async def test_tokens_sent_twice_are_shown_once() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    fleet.hops.plan("decode", Plan(overlap=3))
    answer = await collect(fleet.generate(make_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)


async def test_tokens_sent_twice_after_a_migration_are_shown_once_with_their_logprobs() -> None:
    fleet = Fleet("prefill-0", "decode-0", "decode-1")
    fleet.hops.plan(
        "decode", Plan(error=errors.WorkerUnavailableError("gone"), fail_after=5), Plan(overlap=3), Plan(overlap=3)
    )
    answer = await collect(fleet.generate(make_start(output=OutputOptions(logprobs=0))))
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)
    assert [entry.token_id for entry in answer.logprobs[0]] == answer.token_ids[0]
    assert answer.finished[0].usage.num_attempts == 2
    fleet.assert_nothing_left()


@pytest.mark.parametrize("prefill", [("prefill-0",), ()], ids=["disaggregated", "aggregated"])
async def test_log_probabilities_of_the_prompt_come_once_before_the_first_token(prefill: tuple[str, ...]) -> None:
    fleet = Fleet(*prefill, "decode-0", "decode-1")
    # The first attempt's are of another prompt, the second one has given tokens when it breaks.
    fleet.hops.plan("prefill" if prefill else "decode", Plan(num_unreported=1))
    fleet.hops.plan("decode", Plan(error=errors.WorkerUnavailableError("gone"), fail_after=5))
    start = make_start(num_choices=1, output=OutputOptions(num_prompt_logprobs=1))
    parts = [part async for part in fleet.generate(start).parts()]
    [report] = [part for part in parts if isinstance(part, PromptLogprobs)]
    deltas = [part for part in parts if isinstance(part, Delta) and part.choice == 0]
    assert parts.index(report) < parts.index(deltas[0])
    first, *entries = report.tokens()
    prompt = fleet.hops.calls[0].start.generation.prompt_token_ids
    assert first is None
    assert entries == [
        TokenLogprobs(token_id, -1.0 - i, (token_id,), (-0.5 - 0.5 * i,)) for i, token_id in enumerate(prompt[1:])
    ]
    assert sum(finished.usage.num_attempts for finished in parts if isinstance(finished, ChoiceFinished)) == 3
    asked = [call.start.generation.output.num_prompt_logprobs for call in fleet.hops.calls]
    assert asked == [1, 1, *[None] * (len(asked) - 2)]
    fleet.assert_nothing_left()


async def test_only_one_choice_brings_log_probabilities_of_the_prompt() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    start = make_start(num_choices=3, output=OutputOptions(num_prompt_logprobs=0))
    parts = [part async for part in fleet.generate(start).parts()]
    assert len([part for part in parts if isinstance(part, PromptLogprobs)]) == 1
    asked = [call.start.generation.output.num_prompt_logprobs for call in fleet.hops.calls]
    assert asked.count(0) == 1 and set(asked) == {0, None}
    fleet.assert_nothing_left()


async def test_the_first_attempts_cached_tokens_are_reported_if_a_later_one_finds_more() -> None:
    fleet = Fleet("decode-0", "decode-1")
    fleet.hops.plan("decode", Plan(num_cached_tokens=7, error=errors.EngineError("broke"), fail_after=4))
    fleet.hops.plan("decode", Plan(num_cached_tokens=11))
    answer = await collect(fleet.generate(make_start()))
    assert answer.finished[0].usage.num_attempts == 2
    assert answer.finished[0].usage.num_cached_tokens == 7
    fleet.assert_nothing_left()


async def test_a_hole_in_the_tokens_is_a_broken_attempt() -> None:
    fleet = Fleet("prefill-0", "decode-0", "decode-1")
    fleet.hops.tokens_per_step = 3
    fleet.hops.plan("decode", Plan(has_hole=True))
    answer = await collect(fleet.generate(make_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)
    assert answer.finished[0].usage.num_attempts == 2
    fleet.assert_nothing_left()


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_an_end_that_counts_more_tokens_than_came_is_a_broken_attempt(num_choices: int) -> None:
    fleet = Fleet("prefill-0", "decode-0", "decode-1")
    fleet.hops.tokens_per_step = 3
    fleet.hops.plan("decode", Plan(num_lost=2))
    answer = await collect(fleet.generate(make_start(num_choices=num_choices)))
    assert answer.token_ids == {choice: expected_tokens(5, choice, 20, 12) for choice in range(num_choices)}
    assert sorted(end.usage.num_attempts for end in answer.finished.values()) == [1, 2][-num_choices:]
    fleet.assert_nothing_left()


async def test_an_answer_whose_end_never_counts_right_fails() -> None:
    fleet = Fleet("decode-0", attempts=AttemptConfig(max_attempts=2))
    fleet.hops.eos_at = 4
    fleet.hops.plan("decode", Plan(num_lost=1), Plan(num_lost=1))
    with pytest.raises(errors.WorkerUnavailableError, match="4 of 5 output tokens came"):
        await collect(fleet.generate(make_start()))
    fleet.assert_nothing_left()


async def test_a_count_below_what_came_ends_nothing_before_its_time() -> None:
    fleet = Fleet("decode-0", "decode-1")
    fleet.hops.plan("decode", Plan(error=errors.WorkerUnavailableError("gone"), fail_after=4), Plan(num_extra=-4))
    answer = await collect(fleet.generate(make_start()))
    # All tokens are here, so no third attempt is needed; the second one counted without those of the first.
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)
    assert answer.finished[0].usage.num_attempts == 2
    fleet.assert_nothing_left()


async def test_a_worker_lost_after_its_last_token_is_not_asked_for_more() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    fleet.hops.plan("prefill", Plan())
    fleet.hops.plan("decode", Plan(error=errors.WorkerUnavailableError("gone"), fail_after=11))
    start = make_start(sampling=Sampling(max_tokens=12))
    fleet.hops.finish_reason = lambda _start, _tokens: None  # its last word never comes
    answer = await collect(fleet.generate(start))
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)
    assert answer.finished[0].reason is FinishReason.LENGTH
    assert len(workers_of(fleet, "decode")) == 1


async def test_a_worker_lost_after_an_end_of_sequence_is_not_asked_for_more() -> None:
    fleet = Fleet("decode-0")
    fleet.hops.eos_at = 4
    fleet.hops.plan("decode", Plan(error=errors.WorkerUnavailableError("gone"), fail_after=5))
    fleet.hops.finish_reason = lambda _start, _tokens: None
    answer = await collect(fleet.generate(make_start()))
    assert (answer.finished[0].reason, len(answer.token_ids[0])) == (FinishReason.STOP_ID, 5)


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequestError("bad", field="sampling.top_p"),
        errors.UnsupportedFieldError("no", field="adapter"),
        errors.RequestTimeoutError("late"),
    ],
    **by_reason,
)
async def test_an_error_that_every_worker_would_give_fails_at_once(error: ServingError) -> None:
    fleet = Fleet("prefill-0", "prefill-1", "decode-0")
    fleet.hops.plan("prefill", Plan(error=error))
    with pytest.raises(type(error)) as caught:
        await collect(fleet.generate(make_start()))
    assert caught.value.field == error.field
    assert len(fleet.hops.calls) == 1
    fleet.assert_nothing_left()


async def test_a_worker_too_small_for_it_is_avoided() -> None:
    fleet = Fleet("prefill-0", "decode-0", "decode-1")
    fleet.hops.plan("decode", Plan(error=errors.PromptTooLongError("long", field="prompt")))
    answer = await collect(fleet.generate(make_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)
    assert sorted(workers_of(fleet, "decode")) == ["decode-0", "decode-1"]
    fleet.assert_nothing_left()


async def test_too_long_for_every_worker_is_too_long() -> None:
    fleet = Fleet("prefill-0", "decode-0", "decode-1")
    too_long = errors.PromptTooLongError("long", field="prompt")
    fleet.hops.plan("decode", *(Plan(error=too_long) for _ in range(5)))
    with pytest.raises(errors.PromptTooLongError):
        await collect(fleet.generate(make_start()))
    assert len(workers_of(fleet, "decode")) == 3
    fleet.assert_nothing_left()


async def test_a_request_that_fits_only_the_largest_worker_goes_there() -> None:
    fleet = Fleet(attempts=AttemptConfig(reserve_tokens=5))
    fleet.join("decode-0", num_blocks=3)
    fleet.join("decode-1", num_blocks=20)
    start = make_start(sampling=Sampling(max_tokens=30))
    for _ in range(5):
        await collect(fleet.generate(start))
    assert set(workers_of(fleet, "decode")) == {"decode-1"}
    short = Fleet()
    short.join("decode-0", num_blocks=3)
    # The last token needs no room: 20 + 11 - 1 tokens are just those of 3 blocks.
    assert (await collect(short.generate(make_start(sampling=Sampling(max_tokens=11))))).finished


async def test_attempts_are_bounded_and_the_last_error_is_raised() -> None:
    fleet = Fleet("prefill-0", "decode-0", attempts=AttemptConfig(max_attempts=3))
    failures = [errors.EngineError("one"), errors.WorkerUnavailableError("two"), errors.OutOfBlocksError("three")]
    fleet.hops.plan("decode", *(Plan(error=error) for error in failures))
    with pytest.raises(errors.OutOfBlocksError, match="three"):
        await collect(fleet.generate(make_start()))
    assert len(workers_of(fleet, "decode")) == 3
    fleet.assert_nothing_left()


async def test_an_answer_may_leave_any_number_of_draining_workers_and_come_back_to_them() -> None:
    fleet = Fleet("decode-0", "decode-1", attempts=AttemptConfig(max_attempts=2))
    left = [Plan(error=errors.DrainingError("leaving"), fail_after=1) for _ in range(6)]
    fleet.hops.plan("decode", *left, Plan(error=errors.EngineError("broke"), fail_after=1))
    answer = await collect(fleet.generate(make_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)
    workers = workers_of(fleet, "decode")
    # Each goes to the worker that did not just leave; the eighth to the one that did not break.
    assert workers == [workers[number % 2] for number in range(8)] and workers[0] != workers[1]
    assert set(fleet.pauses) <= {0.0}
    fleet.assert_nothing_left()


async def test_a_prefill_that_a_draining_worker_ends_goes_on_elsewhere_at_once() -> None:
    fleet = Fleet("prefill-0", "prefill-1", "decode-0", attempts=AttemptConfig(max_attempts=1))
    fleet.hops.plan("prefill", Plan(error=errors.DrainingError("leaving")))
    answer = await collect(fleet.generate(make_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)
    assert sorted(workers_of(fleet, "prefill")) == ["prefill-0", "prefill-1"]
    fleet.assert_nothing_left()


async def test_a_draining_worker_that_still_looks_ready_is_not_asked_in_a_hurry() -> None:
    fleet = Fleet("decode-0")
    fleet.hops.plan("decode", *(Plan(error=errors.DrainingError("leaving")) for _ in range(3)))
    answer = await collect(fleet.generate(make_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)
    first, *others = fleet.pauses
    assert first == 0.0 and min(others) > 0.0


async def test_tokens_that_came_are_shown_before_the_failure() -> None:
    fleet = Fleet("decode-0", attempts=AttemptConfig(max_attempts=1))
    fleet.hops.plan("decode", Plan(error=errors.EngineError("broke"), fail_after=4))
    shown = Collected()
    with pytest.raises(errors.EngineError):
        await collect(fleet.generate(make_start()), shown)
    assert shown.token_ids[0] == expected_tokens(5, 0, 20, 4)


async def test_a_choice_that_fails_for_good_ends_all_choices() -> None:
    fleet = Fleet("decode-0", attempts=AttemptConfig(max_attempts=1))
    fleet.hops.plan("decode", Plan(), Plan(error=errors.EngineError("broke"), fail_after=3), Plan(hang_after=1))
    with pytest.raises(errors.EngineError):
        await collect(fleet.generate(make_start(num_choices=3)))
    fleet.assert_nothing_left()


async def test_if_all_workers_are_out_of_blocks_each_pause_is_longer() -> None:
    fleet = Fleet("decode-0")
    fleet.hops.plan("decode", *(Plan(error=errors.OutOfBlocksError("full")) for _ in range(4)))
    answer = await collect(fleet.generate(make_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)
    assert fleet.pauses == sorted(fleet.pauses) and 0 < fleet.pauses[0] < fleet.pauses[-1] <= 1


async def test_a_silent_prefill_worker_is_given_up() -> None:
    fleet = Fleet("prefill-0", "prefill-1", "decode-0", attempts=AttemptConfig(prefill_timeout_s=0.05))
    fleet.hops.plan("prefill", Plan(hang_after=0))
    answer = await collect(fleet.generate(make_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)
    assert len(set(workers_of(fleet, "prefill"))) == 2
    fleet.assert_nothing_left()


@pytest.mark.parametrize("hang_after", [0, 4])
async def test_a_silent_decode_worker_is_given_up(hang_after: int) -> None:
    config = AttemptConfig(decode_start_timeout_s=0.05, decode_stall_timeout_s=0.05)
    fleet = Fleet("prefill-0", "decode-0", "decode-1", attempts=config)
    fleet.hops.plan("decode", Plan(hang_after=hang_after))
    answer = await collect(fleet.generate(make_start()))
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)
    fleet.assert_nothing_left()


async def test_tokens_of_an_attempt_that_was_given_up_do_not_count_for_the_next() -> None:
    """As after a router was frozen: it takes the worker to be silent, and then finds what the worker sent meanwhile."""
    config = AttemptConfig(decode_start_timeout_s=0.05, decode_stall_timeout_s=0.05)
    fleet = Fleet("prefill-0", "decode-0", "decode-1", attempts=config)
    tokens = expected_tokens(5, 0, 20, 12)
    second_prefill = asyncio.Event()
    fleet.hops.plan("prefill", Plan(), Plan(gate=second_prefill))
    begin_decode = fleet.hops.decode
    frozen: list[DecodeCall] = []

    def decode(rank: Rank, start: WorkerStart, sink: DecodeSink) -> Any:
        if frozen:
            return begin_decode(rank, start, sink)
        fleet.hops.pull(start)
        call = DecodeCall(lambda _call: None, sink)
        call.start(DecodeStarted(num_cached_tokens=0, queue_s=0.0, transfer_s=0.0, transfer_bytes=0), time.monotonic())
        call.take(1, tokens[1:4], (), time.monotonic())
        frozen.append(call)
        return call

    fleet.hops.decode = decode  # type: ignore[method-assign]
    answering = asyncio.create_task(collect(fleet.generate(make_start())))
    await fleet.hops.hung.wait()
    frozen[0].take(4, tokens[4:], (), time.monotonic())
    second_prefill.set()
    answer = await answering
    assert answer.token_ids[0] == tokens
    assert answer.finished[0].usage.num_attempts == 2
    fleet.assert_nothing_left()


async def test_attempts_are_counted_by_cause() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    fleet.hops.plan("decode", Plan(error=errors.TransferError("broke")))
    await collect(fleet.generate(make_start()))
    for cause in ("first", "transfer_failed"):
        assert fleet.registry.get_sample_value("quartet_router_attempts_total", {"cause": cause}) == 1


_plans = st.builds(
    Plan,
    error=st.sampled_from([None, *PASSING_ERRORS, NO_HAND_OFF_ERRORS[0]]),
    fail_after=st.integers(0, 13),
    overlap=st.integers(0, 3),
    has_hole=st.booleans(),
)


@given(
    prefill_plans=st.lists(_plans, max_size=4),
    decode_plans=st.lists(_plans, max_size=6),
    num_prefill=st.integers(0, 2),
    num_decode=st.integers(1, 3),
    num_choices=st.integers(1, 3),
    tokens_per_step=st.integers(1, 4),
    has_stop=st.booleans(),
)
async def test_after_any_failures_the_client_gets_the_undisturbed_answer(
    prefill_plans: list[Plan],
    decode_plans: list[Plan],
    num_prefill: int,
    num_decode: int,
    num_choices: int,
    tokens_per_step: int,
    has_stop: bool,
) -> None:
    workers = [f"prefill-{i}" for i in range(num_prefill)] + [f"decode-{i}" for i in range(num_decode)]
    fleet = Fleet(*workers, attempts=AttemptConfig(max_attempts=20))
    fleet.hops.tokens_per_step = tokens_per_step
    fleet.hops.plan("prefill", *prefill_plans)
    fleet.hops.plan("decode", *decode_plans)
    whole = {choice: expected_tokens(5, choice, 20, 12) for choice in range(num_choices)}
    options = TextOptions(stop_strings=(text_of(whole[0])[4:6],) if has_stop else ())
    answer = await collect(fleet.generate(make_start(num_choices=num_choices, text_options=options)))
    assert answer.finished.keys() == whole.keys()
    for choice, tokens in whole.items():
        text = text_of(tokens)
        num_shown = text.find(options.stop_strings[0]) if has_stop else -1
        expected = tokens if num_shown < 0 else tokens[:num_shown]
        assert answer.token_ids.get(choice, []) == expected
        assert answer.texts.get(choice, "") == text_of(expected)
        assert answer.finished[choice].usage.num_output_tokens == len(expected)
    fleet.assert_nothing_left()
