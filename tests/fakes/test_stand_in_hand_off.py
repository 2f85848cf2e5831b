"""Prefill and decode apart: what goes between them, how often, and what goes wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from typing import Any

import pytest

from tests.fakes.driving import (
    LOOK,
    MODEL,
    SPELL,
    STORY,
    decode_engine,
    encoder,
    ended,
    engine,
    for_decode,
    greedy,
    params,
    picture,
    prefill_engine,
    prefilled,
    steps_of,
)
from tests.fakes.installation import installed

with installed():
    from tensorrt_llm._stand_in.control import control
    from tensorrt_llm.executor.utils import RequestError
    from tensorrt_llm.llmapi import DisaggregatedParams


def decoding(llm: Any, result: Any, max_tokens: int = 12, **changes: Any) -> Any:
    disagg = dataclasses.replace(for_decode(result.outputs[0].disaggregated_params), **changes)
    inputs = {"prompt_token_ids": result.prompt_token_ids}
    return llm.generate_async(inputs, params(max_tokens), streaming=True, disaggregated_params=disagg)


async def test_decode_goes_on_where_prefill_ended() -> None:
    result = await prefilled(prefill_engine())
    [output] = result.outputs
    expected = greedy(STORY, 12)
    assert (output.token_ids, output.finish_reason) == (expected[:1], "length")
    steps = await steps_of(decoding(decode_engine(), result))
    assert steps[0] == expected[:2], "the first output already has the first token"
    assert steps[-1] == expected, "which counts as one of max_tokens"


async def test_prefill_s_params_have_what_decode_needs_and_nothing_else() -> None:
    llm = prefill_engine()
    result = await prefilled(llm, SPELL)
    disagg = result.outputs[0].disaggregated_params
    assert disagg.request_type == "context_only"
    assert (disagg.first_gen_tokens, disagg.ctx_request_id) == (greedy(SPELL, 1), result.request_id)
    assert isinstance(disagg.opaque_state, bytes)
    assert {0x00, 0xFF, 0x80} <= set(disagg.opaque_state)
    assert disagg.multimodal_embedding_handles is None
    assert result.disaggregated_params is disagg
    assert control.of(llm).calls[-1].arguments["sampling_params"].max_tokens == 24


async def test_prefill_changes_max_tokens_to_one() -> None:
    given = params(24)
    disagg = DisaggregatedParams(request_type="context_only")
    await ended(prefill_engine().generate_async(SPELL, given, disaggregated_params=disagg))
    assert given.max_tokens == 1


async def test_an_unfinished_prefill_may_be_called_so() -> None:
    with installed(context_finish="not_finished") as other:
        transfer = {"backend": "NIXL"}
        with other.LLM(MODEL, cache_transceiver_config=transfer, disable_overlap_scheduler=True) as llm:
            disagg = other.llmapi.DisaggregatedParams(request_type="context_only")
            result = await ended(llm.generate_async(SPELL, other.SamplingParams(), disaggregated_params=disagg))
    assert result.outputs[0].finish_reason == "not_finished"


async def test_an_answer_of_one_token_ends_with_stop_and_holds_nothing() -> None:
    llm = prefill_engine()
    result = await prefilled(llm, stop_token_ids=greedy(STORY, 1), include_stop_str_in_output=True)
    assert (result.outputs[0].finish_reason, result.outputs[0].token_ids) == ("stop", greedy(STORY, 1))
    assert result.outputs[0].disaggregated_params is None
    assert (control.of(llm).num_held, control.of(llm).num_used_blocks()) == (0, 0)


async def test_blocks_stay_until_they_are_pulled() -> None:
    llm = prefill_engine()
    result = await prefilled(llm)
    held = control.of(llm)
    assert held.num_held == 1
    assert held.num_used_blocks() > 0
    await steps_of(decoding(decode_engine(), result))
    held.wait_until(lambda: held.num_held == 0 and held.num_used_blocks() == 0)


async def test_a_state_is_for_one_pull() -> None:
    result, decode = await prefilled(prefill_engine()), decode_engine()
    await steps_of(decoding(decode, result))
    with pytest.raises(RequestError, match="KV cache transfer failed"):
        await steps_of(decoding(decode, result))
    assert (await ended(decode.generate_async(SPELL, params(4)))).outputs[0].token_ids == greedy(SPELL, 4)


async def test_a_state_may_turn_out_to_last() -> None:
    with installed(single_use_state=False) as other:
        transfer = {"backend": "NIXL"}
        with other.LLM(MODEL, cache_transceiver_config=transfer, disable_overlap_scheduler=True) as llm:
            make = other.llmapi.DisaggregatedParams
            result = await ended(
                llm.generate_async(
                    SPELL, other.SamplingParams(), disaggregated_params=make(request_type="context_only")
                )
            )
            kept = result.outputs[0].disaggregated_params
            for _ in range(2):
                disagg = dataclasses.replace(kept, request_type="generation_only")
                inputs = {"prompt_token_ids": result.prompt_token_ids}
                answer = await ended(llm.generate_async(inputs, other.SamplingParams(), disaggregated_params=disagg))
                assert answer.outputs[0].token_ids == greedy(SPELL, 24)


@pytest.mark.parametrize(
    "wrong",
    [
        {"opaque_state": b"\x00\x01"},
        {"opaque_state": b"\x00\xff\x00\x80/nowhere"},
        {"ctx_request_id": 1 << 40},
        {"first_gen_tokens": [3]},
    ],
)
async def test_a_state_that_was_changed_fails_this_request(wrong: dict[str, Any]) -> None:
    result = await prefilled(prefill_engine())
    with pytest.raises(RequestError, match="KV cache transfer failed"):
        await steps_of(decoding(decode_engine(), result, **wrong))


async def test_decode_must_get_prefill_s_tokens_and_layout() -> None:
    prefill = prefill_engine()
    result = await prefilled(prefill)
    result.prompt_token_ids[3] += 1
    with pytest.raises(RequestError, match="token_ids differs"):
        await steps_of(decoding(decode_engine(), result))
    with pytest.raises(RequestError, match="layout differs"):
        await steps_of(decoding(decode_engine(kv_cache_config={"tokens_per_block": 64}), await prefilled(prefill)))
    with pytest.raises(RequestError, match="layout differs"):
        await steps_of(decoding(decode_engine(transfer={"backend": "UCX"}), await prefilled(prefill)))


async def test_a_pull_after_the_time_out_fails() -> None:
    prefill = prefill_engine(transfer={"kv_transfer_timeout_ms": 60_000})
    result = await prefilled(prefill)
    control.of(prefill).expire_transfers()
    assert (control.of(prefill).num_held, control.of(prefill).num_used_blocks()) == (0, 0)
    with pytest.raises(RequestError, match="released or taken"):
        await steps_of(decoding(decode_engine(), result))


async def test_the_time_out_comes_by_itself_too() -> None:
    prefill = prefill_engine(transfer={"kv_transfer_timeout_ms": 1})
    await prefilled(prefill)
    control.of(prefill).wait_until(lambda: control.of(prefill).num_held == 0)


async def test_a_prefill_that_is_gone_takes_its_blocks_along() -> None:
    prefill = prefill_engine()
    result = await prefilled(prefill)
    prefill.shutdown()
    with pytest.raises(RequestError, match="KV cache transfer failed"):
        await steps_of(decoding(decode_engine(), result))


@pytest.mark.parametrize("pins", [True, False])
async def test_aborting_a_pull_may_leave_prefill_s_blocks_held(pins: bool) -> None:
    with installed(abort_pins_state=pins) as other:
        hands = sys.modules["tensorrt_llm._stand_in.control"].control
        options = {"cache_transceiver_config": {"backend": "NIXL"}, "disable_overlap_scheduler": True}
        make, sampling = other.llmapi.DisaggregatedParams, other.SamplingParams
        with other.LLM(MODEL, **options) as prefill, other.LLM(MODEL, **options) as decode:
            first = await ended(
                prefill.generate_async(STORY, sampling(), disaggregated_params=make(request_type="context_only"))
            )
            hands.of(decode).transfers.close()
            disagg = dataclasses.replace(first.outputs[0].disaggregated_params, request_type="generation_only")
            inputs = {"prompt_token_ids": first.prompt_token_ids}
            handle = decode.generate_async(inputs, sampling(), streaming=True, disaggregated_params=disagg)
            await asyncio.to_thread(hands.of(decode).transfers.wait_reached)
            handle.abort()
            assert (await ended(handle)).outputs[0].finish_reason == "cancelled"
            assert hands.of(decode).num_used_blocks() == 0
            if pins:
                assert hands.of(prefill).num_held == 1
                hands.of(prefill).expire_transfers()
            hands.of(prefill).wait_until(lambda: hands.of(prefill).num_held == 0)


async def test_other_requests_run_while_a_pull_takes_its_time() -> None:
    decode, result = decode_engine(), await prefilled(prefill_engine())
    control.of(decode).transfers.close()
    slow = decoding(decode, result)
    await asyncio.to_thread(control.of(decode).transfers.wait_reached)
    assert (await ended(decode.generate_async(SPELL, params(4)))).outputs[0].token_ids == greedy(SPELL, 4)
    assert not slow.finished
    control.of(decode).transfers.open()
    assert (await steps_of(slow))[-1] == greedy(STORY, 12)


async def test_both_sides_need_a_transceiver_and_prefill_no_overlap() -> None:
    only = DisaggregatedParams(request_type="context_only")
    with pytest.raises(RequestError, match="cache transceiver"):
        await ended(engine().generate_async(SPELL, params(), disaggregated_params=only))
    with pytest.raises(RequestError, match="disable_overlap_scheduler"):
        await prefilled(decode_engine())
    with pytest.raises(RequestError, match="max_tokens_in_buffer"):
        await prefilled(prefill_engine(transfer={"max_tokens_in_buffer": 4}))
    both = DisaggregatedParams(request_type="context_and_generation")
    result = await ended(engine().generate_async(SPELL, params(), disaggregated_params=both))
    assert result.outputs[0].token_ids == greedy(SPELL, 24)


async def test_generation_only_takes_tokens_and_no_pictures() -> None:
    decode, result = decode_engine(), await prefilled(prefill_engine())
    disagg = for_decode(result.outputs[0].disaggregated_params)
    seen = {"prompt_token_ids": result.prompt_token_ids, "multi_modal_data": {"image": [picture()]}}
    with pytest.raises(ValueError, match="multimodal parameters"):
        decode.generate_async(seen, params(), disaggregated_params=disagg)
    with pytest.raises(ValueError, match="multimodal parameters"):
        decoding(decode, result, multimodal_embedding_handles=[{}], multimodal_hashes=[[0] * 8])
    with pytest.raises(ValueError, match="first_gen_tokens"):
        decoding(decode, result, first_gen_tokens=None)
    with pytest.raises(ValueError, match="n = 1"):
        decode.generate_async(result.prompt_token_ids, params(n=2), disaggregated_params=disagg)


async def test_a_picture_goes_through_all_three_engines() -> None:
    tower = encoder()
    inputs = {"prompt": LOOK, "multi_modal_data": {"image": [picture()]}}
    encoded = (await ended(tower.generate_async(inputs))).disaggregated_params
    assert [len(item) for item in encoded.multimodal_hashes] == [8]
    assert control.of(tower).num_held == 1
    result = await prefilled(prefill_engine(), inputs, disagg=encoded)
    control.of(tower).wait_until(lambda: control.of(tower).num_held == 0)
    kept = result.outputs[0].disaggregated_params
    assert (kept.multimodal_embedding_handles, kept.multimodal_hashes) == (None, encoded.multimodal_hashes)
    decode = decode_engine()
    with pytest.raises(RequestError, match="Token ID out of range"):
        await steps_of(decoding(decode, result))
    # A decode has no media, so any id of the vocabulary has to stand in their place.
    result.prompt_token_ids = [0 if token_id >= 2048 else token_id for token_id in result.prompt_token_ids]
    assert (await steps_of(decoding(decode, result)))[-1] == greedy(LOOK, 12, picture())
