"""The stand-in really generates, and its results behave as TensorRT-LLM's do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.fakes.driving import (
    LOOK,
    MODEL,
    SPELL,
    STORY,
    WAIT_S,
    ended,
    engine,
    greedy,
    params,
    picture,
    steps_of,
    text_of,
    token_ids_of,
    word_ids_of,
)
from tests.fakes.installation import installed

with installed():
    from tensorrt_llm._stand_in.control import control
    from tensorrt_llm.executor.request import LoRARequest
    from tensorrt_llm.executor.utils import RequestError
    from tensorrt_llm.llmapi import GuidedDecodingParams


@pytest.mark.parametrize("text", [SPELL, STORY])
async def test_greedy_answers_are_transformers_own(text: str) -> None:
    expected = greedy(text, 24)
    result = await ended(engine().generate_async(text, params(24)))
    [output] = result.outputs
    assert output.token_ids == expected
    assert output.text == text_of(expected)
    assert result.prompt_token_ids == token_ids_of(text)
    assert output.finish_reason == ("stop" if expected[-1] == 1 else "length")
    assert result.finished


async def test_all_forms_of_a_prompt_give_the_same_answer() -> None:
    llm, ids = engine(), token_ids_of(SPELL)
    handles = [
        llm.generate_async(form, params()) for form in (SPELL, ids, {"prompt": SPELL}, {"prompt_token_ids": ids})
    ]
    answers = [(await ended(handle)).outputs[0].token_ids for handle in handles]
    assert answers == [greedy(SPELL, 24)] * 4


async def test_streaming_yields_the_same_object_with_cumulative_tokens() -> None:
    handle = engine().generate_async(STORY, params(6), streaming=True)
    seen, texts = [], ""
    async with asyncio.timeout(WAIT_S):
        async for step in handle:
            assert step is handle
            assert step.outputs[0].token_ids_diff == step.outputs[0].token_ids[-1:]
            seen.append(list(step.outputs[0].token_ids))
            texts += step.outputs[0].text_diff
    assert [len(token_ids) for token_ids in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[-1] == greedy(STORY, 6)
    assert texts == text_of(seen[-1])
    assert handle.decoding_iter == 6


async def test_without_streaming_there_is_one_step() -> None:
    assert len(await steps_of(engine().generate_async(STORY, params(6)))) == 1


async def test_a_stream_interval_gathers_tokens() -> None:
    steps = await steps_of(engine(stream_interval=4).generate_async(STORY, params(10), streaming=True))
    assert [len(token_ids) for token_ids in steps] == [1, 4, 8, 10]


async def test_two_outputs_take_turns_and_keep_each_other_s_diff() -> None:
    handle = engine().generate_async(STORY, params(4, n=2, temperature=1.0, seed=5), streaming=True)
    lengths, diffs = [], []
    async with asyncio.timeout(WAIT_S):
        async for step in handle:
            lengths.append(tuple(len(output.token_ids) for output in step.outputs))
            diffs.append([list(output.token_ids_diff) for output in step.outputs])
    assert lengths == [(1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 3), (4, 4)]
    for before, after, number in zip(diffs, diffs[1:], range(1, 8), strict=False):
        untouched = 1 - number % 2
        assert before[untouched] == after[untouched]


async def test_a_seed_repeats_an_answer_and_temperature_varies_it() -> None:
    llm = engine(sampler_type="TRTLLMSampler")
    answers = [
        (await ended(llm.generate_async(STORY, params(16, temperature=1.5, seed=seed)))).outputs[0].token_ids
        for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


@pytest.mark.parametrize(("changes", "is_greedy"), [({"temperature": 0.0, "top_p": 0.5}, True), ({"top_k": 1}, True)])
async def test_sampling_parameters_decide_whether_decoding_is_greedy(
    changes: dict[str, float], is_greedy: bool
) -> None:
    result = await ended(engine().generate_async(STORY, params(8, **changes)))
    assert (result.outputs[0].token_ids == greedy(STORY, 8)) is is_greedy


async def test_banned_and_least_tokens_are_heeded() -> None:
    llm, expected = engine(sampler_type="TRTLLMSampler"), greedy(SPELL, 24)
    longer = await ended(llm.generate_async(SPELL, params(24, min_tokens=10)))
    assert len(longer.outputs[0].token_ids) >= 10
    endless = await ended(llm.generate_async(SPELL, params(12, ignore_eos=True)))
    assert endless.outputs[0].token_ids[: len(expected)] == expected
    assert (len(endless.outputs[0].token_ids), endless.outputs[0].finish_reason) == (12, "length")
    other = await ended(llm.generate_async(SPELL, params(4, bad_token_ids=expected[:1])))
    assert expected[0] not in other.outputs[0].token_ids
    fresh = await ended(llm.generate_async(STORY, params(40, no_repeat_ngram_size=2, temperature=0.0)))
    pairs = list(zip(fresh.outputs[0].token_ids, fresh.outputs[0].token_ids[1:], strict=False))
    assert len(pairs) == len(set(pairs))


async def test_the_default_sampler_ignores_penalties() -> None:
    penalized = await ended(engine().generate_async(STORY, params(24, repetition_penalty=2.0, temperature=0.0)))
    assert penalized.outputs[0].token_ids == greedy(STORY, 24)


async def test_a_stop_id_is_trimmed_and_reported_unless_it_is_included() -> None:
    llm, expected = engine(), greedy(STORY, 8)
    stop_id = next(token_id for token_id in expected[2:] if token_id not in expected[:2])
    length = expected.index(stop_id)
    handle = llm.generate_async(STORY, params(8, stop_token_ids=[stop_id]), streaming=True)
    steps = await steps_of(handle)
    assert steps[-1] == expected[:length]
    assert (handle.outputs[0].finish_reason, handle.outputs[0].stop_reason) == ("stop", stop_id)
    kept = await ended(llm.generate_async(STORY, params(8, stop_token_ids=[stop_id], include_stop_str_in_output=True)))
    assert kept.outputs[0].token_ids == expected[: length + 1]


async def test_a_stop_word_of_several_tokens_shortens_what_was_streamed() -> None:
    llm, expected = engine(), greedy(STORY, 12)
    word = text_of(expected[4:6])
    assert word_ids_of(word) == expected[4:6]
    handle = llm.generate_async(STORY, params(12, stop=word), streaming=True)
    steps = await steps_of(handle)
    assert [len(token_ids) for token_ids in steps] == [1, 2, 3, 4, 5, 4]
    assert handle.outputs[0].token_ids_diff == []
    assert (handle.outputs[0].text, handle.outputs[0].stop_reason) == (text_of(expected[:4]), word)


async def test_a_stop_string_inside_of_tokens_ends_the_handle_by_itself() -> None:
    llm, expected = engine(), greedy(STORY, 12)
    text = text_of(expected)
    inside = text[len(text_of(expected[:4])) - 1 : len(text_of(expected[:5])) - 1]
    handle = llm.generate_async(STORY, params(4_000, stop=[inside], ignore_eos=True), streaming=True)
    await steps_of(handle)
    assert handle.outputs[0].text == text[: text.index(inside)]
    assert (handle.outputs[0].finish_reason, handle.outputs[0].stop_reason) == ("stop", inside)
    control.of(llm).wait_until(lambda: control.of(llm).num_running == 0)


async def test_the_end_id_may_turn_out_to_be_left_out() -> None:
    assert (await ended(engine().generate_async(SPELL, params()))).outputs[0].token_ids[-1] == 1
    with installed(end_id_in_tokens=False) as other, other.LLM(MODEL) as llm:
        result = await ended(llm.generate_async(SPELL, other.SamplingParams(max_tokens=24)))
    assert result.outputs[0].token_ids == greedy(SPELL, 24)[:-1]
    assert result.outputs[0].finish_reason == "stop"


async def test_log_probabilities_come_by_token_with_ranks() -> None:
    result = await ended(engine().generate_async(SPELL, params(4, logprobs=2, prompt_logprobs=1)))
    [output] = result.outputs
    for entry, token_id in zip(output.logprobs, output.token_ids, strict=True):
        assert len(entry) == 2
        assert entry[token_id].rank == 1
    total = sum(entry[token_id].logprob for entry, token_id in zip(output.logprobs, output.token_ids, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)
    assert len(output.prompt_logprobs) == len(token_ids_of(SPELL)) - 1
    with installed(logprobs_as_floats=True) as other, other.LLM(MODEL) as llm:
        floats = await ended(llm.generate_async(SPELL, other.SamplingParams(max_tokens=4, logprobs=1)))
    assert sum(floats.outputs[0].logprobs) == pytest.approx(total)


async def test_requests_run_side_by_side() -> None:
    llm = engine()
    control.of(llm).steps.close()
    handles = [llm.generate_async(STORY, params(5), streaming=True) for _ in range(3)]
    control.of(llm).steps.let_through(5)
    assert [len(await steps_of(handle)) for handle in handles] == [5, 5, 5]
    control.of(llm).wait_until(lambda: control.of(llm).num_steps == 5)


async def test_requests_beyond_the_batch_or_the_blocks_wait() -> None:
    for limit in ({"max_batch_size": 1}, {"kv_cache_config": {"max_tokens": 64}}):
        llm = engine(**limit)
        first, second = (llm.generate_async(STORY, params(20), streaming=True) for _ in range(2))
        assert (await steps_of(first))[-1] == (await steps_of(second))[-1] == greedy(STORY, 20)
        control.reset()


async def test_a_prompt_too_long_for_the_cache_fails_alone() -> None:
    llm = engine(kv_cache_config={"max_tokens": 64})
    with pytest.raises(RequestError, match="exceeds"):
        await ended(llm.generate_async([9] * 100, params()))
    assert (await ended(llm.generate_async(SPELL, params()))).outputs[0].token_ids == greedy(SPELL, 24)


async def test_an_answer_ends_with_the_longest_sequence() -> None:
    num_tokens = len(token_ids_of(STORY))
    result = await ended(engine(max_seq_len=num_tokens + 3).generate_async(STORY, params(50)))
    assert (len(result.outputs[0].token_ids), result.outputs[0].finish_reason) == (3, "length")


async def test_guides_hold_and_their_faults_come_while_iterating() -> None:
    llm = engine(guided_decoding_backend="xgrammar")
    choice = await ended(llm.generate_async(SPELL, params(guided_decoding=GuidedDecodingParams(regex="(dog|bird)"))))
    assert choice.outputs[0].text in ("dog", "bird")
    assert choice.outputs[0].finish_reason == "stop"
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"enum": [True]}}}
    guided = await ended(llm.generate_async(SPELL, params(60, guided_decoding=GuidedDecodingParams(json=schema))))
    assert json.loads(guided.outputs[0].text)["ok"] is True
    with pytest.raises(RequestError, match="compilation"):
        await ended(llm.generate_async(SPELL, params(guided_decoding=GuidedDecodingParams(regex="("))))
    with pytest.raises(RequestError, match="guided_decoding_backend"):
        await ended(engine().generate_async(SPELL, params(guided_decoding=GuidedDecodingParams(regex="a"))))


async def test_an_adapter_changes_the_answer(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 400}))
    name = "base_model.model.model.layers.2.mlp.down_proj.lora_{}.weight"
    generator = torch.Generator().manual_seed(1)
    down, up = torch.randn(4, 704, generator=generator), torch.randn(256, 4, generator=generator)
    save_file({name.format("A"): down, name.format("B"): up}, tmp_path / "adapter_model.safetensors")
    llm = engine(enable_lora=True)
    request = LoRARequest("other", 1, str(tmp_path))
    adapted = await ended(llm.generate_async(SPELL, params(), lora_request=request))
    plain = await ended(llm.generate_async(SPELL, params()))
    assert plain.outputs[0].token_ids == greedy(SPELL, 24)
    assert adapted.outputs[0].token_ids != plain.outputs[0].token_ids


async def test_a_picture_is_seen_as_transformers_sees_it() -> None:
    prompt = {"prompt": LOOK, "multi_modal_data": {"image": [picture()]}}
    result = await ended(engine().generate_async(prompt, params(16)))
    assert result.outputs[0].token_ids == greedy(LOOK, 16, picture())
    assert result.prompt_token_ids.count(2049) == 64, "an id beyond the vocabulary, not the placeholder"


def test_generate_blocks_and_takes_lists() -> None:
    llm = engine(return_perf_metrics=True)
    results = llm.generate([SPELL, STORY], [params(8, return_perf_metrics=True), params(8)], use_tqdm=False)
    assert [result.outputs[0].token_ids for result in results] == [greedy(SPELL, 8), greedy(STORY, 8)]
    assert {"ttft", "e2e", "tpot"} < {name.value for name in results[0].metrics_dict}
    assert llm.generate(SPELL, params(8)).finished


async def test_a_handle_made_without_a_loop_can_only_be_waited_for_in_its_thread() -> None:
    llm = engine()
    handle = await asyncio.to_thread(llm.generate_async, SPELL, params())
    with pytest.raises(AssertionError, match="event loop"):
        await handle
    assert (await asyncio.to_thread(handle.result)).outputs[0].token_ids == greedy(SPELL, 24)
