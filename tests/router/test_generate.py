"""One request, from start to finish, over hops that go well."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from quartet.api.request import Delta, GenerateStart, TextOptions, TextPrompt, TokenPrompt
from quartet.discovery.base import Rank
from quartet.engine.base import FinishReason
from quartet.engine.sampling import OutputOptions, Sampling
from router.tenants import TenantConfig
from tests.router.fakes import EOS_ID, TIMEOUT_S, Collected, Fleet, Plan, collect, expected_tokens, text_of
from tests.router.records import make_load

PROMPT = TokenPrompt(tuple(range(10, 30)))  # long enough for a remote prefill


def make_start(**changes: object) -> GenerateStart:
    fields = {"prompt": PROMPT, "sampling": Sampling(max_tokens=12), "seed": 5, **changes}
    return GenerateStart(**fields)


async def test_a_long_prompt_is_prefilled_and_decoded_at_two_workers() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    answer = await collect(fleet.generate(make_start()))
    [placement] = answer.accepted.choices
    assert (placement.prefill, placement.decode) == (Rank("prefill-0"), Rank("decode-0"))
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)
    assert answer.texts[0] == text_of(answer.token_ids[0])
    assert [call.kind for call in fleet.hops.calls] == ["prefill", "decode"]
    prefill, decode = (call.start for call in fleet.hops.calls)
    assert decode.hand_off is not None and decode.generation.generated_token_ids == (answer.token_ids[0][0],)
    assert prefill.context.request_id == decode.context.request_id == answer.accepted.request_id
    fleet.assert_nothing_left()


async def test_a_short_prompt_is_prefilled_where_it_is_decoded() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    answer = await collect(fleet.generate(make_start(prompt=TokenPrompt((1, 2, 3)))))
    assert answer.token_ids[0] == expected_tokens(5, 0, 3, 12)
    assert [call.kind for call in fleet.hops.calls] == ["decode"]
    assert answer.finished[0].usage.num_cached_tokens == 3
    fleet.assert_nothing_left()


async def test_without_prefill_workers_it_is_aggregated() -> None:
    fleet = Fleet("decode-0")
    answer = await collect(fleet.generate(make_start()))
    assert answer.accepted.choices[0].prefill is None
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)


async def test_the_first_token_waits_for_no_decode_worker() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    fleet.hops.plan("decode", Plan(hang_after=0))
    parts = fleet.generate(make_start()).parts()
    async with asyncio.timeout(30):
        await anext(parts)
        assert (await anext(parts)).token_ids == tuple(expected_tokens(5, 0, 20, 1))
    await parts.aclose()
    fleet.assert_nothing_left()


async def test_a_first_token_that_ends_it_needs_no_decode_worker() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    answer = await collect(fleet.generate(make_start(sampling=Sampling(max_tokens=1))))
    assert answer.finished[0].reason is FinishReason.LENGTH
    assert [call.kind for call in fleet.hops.calls] == ["prefill"]
    fleet.assert_nothing_left()


async def test_an_end_of_sequence_ends_it() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    fleet.hops.eos_at = 3
    answer = await collect(fleet.generate(make_start()))
    assert answer.token_ids[0] == [*expected_tokens(5, 0, 20, 3), EOS_ID]
    assert answer.texts[0] == text_of(expected_tokens(5, 0, 20, 3))
    assert (answer.finished[0].reason, answer.finished[0].usage.num_output_tokens) == (FinishReason.STOP_ID, 4)


async def test_choices_are_answers_of_their_own() -> None:
    fleet = Fleet("prefill-0", "decode-0", "decode-1", num_blocks=1000)
    answer = await collect(fleet.generate(make_start(num_choices=5)))
    assert answer.token_ids == {choice: expected_tokens(5, choice, 20, 12) for choice in range(5)}
    assert answer.finished.keys() == set(range(5))
    assert [placement.choice for placement in answer.accepted.choices] == list(range(5))
    fleet.assert_nothing_left()


async def test_choices_that_do_not_fit_at_once_run_one_after_the_other() -> None:
    # Each takes 4 blocks of 7: prompt of 20 tokens and 12 more, 10 a block.
    fleet = Fleet("prefill-0", "decode-0", num_blocks=7)
    answer = await collect(fleet.generate(make_start(num_choices=4)))
    assert answer.token_ids == {choice: expected_tokens(5, choice, 20, 12) for choice in range(4)}
    assert [placement.choice for placement in answer.accepted.choices] == [0]
    assert answer.placements.keys() == set(range(4))
    fleet.assert_nothing_left()


async def test_the_first_choice_is_streamed_while_others_wait_for_blocks() -> None:
    fleet = Fleet("decode-0", num_blocks=7)
    fleet.hops.plan("decode", Plan(hang_after=2))
    run = fleet.generate(make_start(num_choices=3))
    answer = Collected()
    async with asyncio.timeout(TIMEOUT_S), aclosing(run.parts()) as parts:
        async for part in parts:
            answer.add(part)
            if isinstance(part, Delta):
                break
        assert answer.token_ids[0][0] == expected_tokens(5, 0, 20, 1)[0]
        assert fleet.admission.length == 2
        assert answer.placements.keys() == {0}
        assert fleet.registry.get_sample_value("quartet_router_ttft_seconds_count", {"model": "tiny"}) == 1
    fleet.assert_nothing_left()


async def test_text_that_is_held_back_is_no_first_token_until_it_leaves() -> None:
    fleet = Fleet("decode-0")
    text = text_of(expected_tokens(5, 0, 20, 12))
    fleet.hops.plan("decode", Plan(hang_after=2))
    options = TextOptions(stop_strings=(text[:3] + "#",))
    reading = asyncio.create_task(collect(fleet.generate(make_start(text_options=options))))
    async with asyncio.timeout(TIMEOUT_S):
        await fleet.hops.hung.wait()
    assert fleet.registry.get_sample_value("quartet_router_ttft_seconds_count", {"model": "tiny"}) == 0
    reading.cancel()
    await asyncio.wait([reading])


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("tokens_per_step", [1, 3, 50])
async def test_a_stop_string_ends_it_and_what_follows_is_neither_shown_nor_counted(
    include_stop: bool, tokens_per_step: int
) -> None:
    fleet = Fleet("prefill-0", "decode-0")
    fleet.hops.tokens_per_step = tokens_per_step
    tokens = expected_tokens(5, 0, 20, 12)
    text = text_of(tokens)
    stop = text[5:7]
    assert text.index(stop) == 5
    options = TextOptions(stop_strings=(stop, "never"), include_stop_string=include_stop)
    answer = await collect(fleet.generate(make_start(text_options=options)))
    num_shown = 7 if include_stop else 5
    assert answer.texts[0] == text[:num_shown]
    assert answer.token_ids[0] == tokens[:num_shown]
    finished = answer.finished[0]
    assert (finished.reason, finished.stop_string) == (FinishReason.STOP_STRING, stop)
    assert finished.usage.num_output_tokens == num_shown
    fleet.assert_nothing_left()


async def test_a_stop_string_in_the_first_token_drops_the_hand_off() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    options = TextOptions(stop_strings=(text_of(expected_tokens(5, 0, 20, 1)),))
    answer = await collect(fleet.generate(make_start(text_options=options)))
    assert answer.finished[0].reason is FinishReason.STOP_STRING
    assert answer.token_ids.get(0, []) == []
    assert [call.kind for call in fleet.hops.calls] == ["prefill"]
    fleet.assert_nothing_left()


async def test_parts_that_a_client_does_not_want_are_left_out() -> None:
    fleet = Fleet("decode-0")
    no_text = await collect(fleet.generate(make_start(text_options=TextOptions(omit_text=True))))
    assert (no_text.texts[0], len(no_text.token_ids[0])) == ("", 12)
    deltas = []
    async for part in fleet.generate(make_start(text_options=TextOptions(omit_token_ids=True))).parts():
        deltas.append(part)
    assert "".join(getattr(part, "text", "") for part in deltas) == text_of(expected_tokens(5, 0, 20, 12))
    assert not any(getattr(part, "token_ids", ()) for part in deltas)
    assert deltas[-1].usage.num_output_tokens == 12


async def test_log_probabilities_come_one_a_token_also_when_text_is_held_back() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    options = TextOptions(stop_strings=(text_of(expected_tokens(5, 0, 20, 12))[3:6] + "#",))
    answer = await collect(fleet.generate(make_start(output=OutputOptions(logprobs=0), text_options=options)))
    assert [entry.token_id for entry in answer.logprobs[0]] == answer.token_ids[0] == expected_tokens(5, 0, 20, 12)


async def test_usage_and_times_are_measured() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    answer = await collect(fleet.generate(make_start()))
    usage, time = answer.finished[0].usage, answer.finished[0].time
    assert (usage.num_prompt_tokens, usage.num_cached_tokens) == (20, 2)
    assert (usage.num_output_tokens, usage.num_attempts) == (12, 1)
    assert (time.prefill_queue_s, time.decode_queue_s, time.transfer_s) == (0.01, 0.03, 0.004)
    assert 0 < time.first_token_s <= time.total_s
    assert time.tokenize_s is not None and time.router_queue_s is not None and time.prefill_s > 0


async def test_without_max_tokens_an_answer_may_fill_the_model() -> None:
    fleet = Fleet("decode-0", max_model_len=60)
    answer = await collect(fleet.generate(make_start(sampling=Sampling())))
    assert len(answer.token_ids[0]) == 40
    assert fleet.hops.calls[0].start.generation.sampling.max_tokens == 40


async def test_without_a_seed_the_router_draws_one_and_returns_it() -> None:
    fleet = Fleet("decode-0")
    first = await collect(fleet.generate(make_start(seed=None)))
    second = await collect(fleet.generate(make_start(seed=None)))
    assert first.accepted.seed != second.accepted.seed
    assert first.token_ids[0] == expected_tokens(first.accepted.seed, 0, 20, 12)


async def test_text_is_tokenized_short_or_long() -> None:
    fleet = Fleet("decode-0", max_model_len=10**6, num_blocks=10**6)
    for text in ("The quick brown fox", "The quick brown fox " * 500):
        answer = await collect(fleet.generate(make_start(prompt=TextPrompt(text))))
        prompt = fleet.hops.calls[-1].start.generation.prompt_token_ids
        assert answer.accepted.num_prompt_tokens == len(prompt)
        assert text_of(list(prompt)) == text


async def test_every_worker_gets_the_tenant_the_trace_and_the_time_left() -> None:
    fleet = Fleet("prefill-0", "decode-0", tenants={"acme": TenantConfig(max_priority=3)})
    start = make_start(tenant="acme", priority=3, session_key="chat-1", timeout_s=30.0)
    await collect(fleet.generate(start, traceparent="00-ab-cd-01"))
    for call in fleet.hops.calls:
        context = call.start.context
        assert (context.tenant, context.priority, context.session_key) == ("acme", 3, "chat-1")
        numbered = (context.traceparent, context.router_id, context.router_request_number)
        assert numbered == ("00-ab-cd-01", "router-a.1", 1)
        assert 0 < context.timeout_s <= 30


async def test_a_prompt_waits_for_a_place_at_the_prefill_worker_and_no_longer() -> None:
    fleet, gate = Fleet("prefill-0", "decode-0"), asyncio.Event()
    prefill = next(status.record for status in fleet.table.statuses(0.0) if status.record.worker_id == "prefill-0")
    fleet.table.report(make_load(prefill, max_running=1), 0.0)
    fleet.hops.plan("prefill", Plan(gate=gate))
    fleet.hops.plan("decode", Plan(hang_after=1))
    first = asyncio.create_task(collect(fleet.generate(make_start())))
    async with asyncio.timeout(TIMEOUT_S):
        await fleet.hops.hung.wait()
    second = asyncio.create_task(collect(fleet.generate(make_start())))
    async with asyncio.timeout(TIMEOUT_S):
        await fleet.policy.kept_waiting.wait()
    assert [call.kind for call in fleet.hops.calls] == ["prefill"]
    gate.set()
    # The first one is decoding still, and no worker has reported anything.
    assert (await second).token_ids[0] == expected_tokens(5, 0, 20, 12)
    assert not first.done()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    fleet.assert_nothing_left()
