"""What requests may ask for, on an LLM whose uncertain sides are either way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quartet.engine.base import EngineRequest, Failed, Finished, FinishReason, Prefilled, RequestKind
from quartet.engine.sampling import GrammarKind, GuidedDecoding, OutputOptions, Sampling, guided_choice, guided_fields
from quartet.engine.settings import Backend
from quartet.engine.trtllm import hand_off
from quartet.engine.trtllm.model_facts import ModelFacts
from quartet.engine.trtllm.package import Package
from quartet.engine.trtllm.sampling import sampling_params
from quartet.errors import ConfigError, EngineError, NoHandOffError
from tests.engine.fakes import make_request
from tests.engine.trtllm.engines import ON_1_2, Running, asked, decode_of, greedily, running, stand_in
from tests.engine.trtllm.specs import arguments
from tests.fakes.driving import SPELL, STORY, greedy, text_of, token_ids_of
from tests.tiny import CHECKPOINT

PREFILL = RequestKind.PREFILL
EOS = 1
#: Each switch the other way than elsewhere in these tests, as few together as time allows.
SWITCHES: list[dict[str, Any]] = [
    {},
    {"kv_event_form": "queue", "disagg_request_id": True},
    {"kv_event_form": "queue", "kv_event_lists": True, "mrope_handles": False, "mm_keys": True},
    {"no_kv_cache_stats": True, "context_finish": "not_finished", "result_timeout_works": True},
    {"end_id_in_tokens": False, "check_health": True},
    {"version": "1.4.0rc1"},
    {"version": "1.4.0rc1", "kv_event_form": "queue", "logprobs_as_floats": True},
    {"logprobs_as_floats": True, "single_use_state": False, "abort_pins_state": False},
    {"logprobs_as_floats": True, "end_id_in_tokens": False, "kv_event_lists": True},
]


async def prefilled_by(prefill: Running, request: EngineRequest) -> Prefilled:
    end = await prefill.end_of(request)
    assert isinstance(end, Prefilled), end
    return end


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
async def test_answers_are_the_same_whatever_a_release_is_like(switches: dict[str, Any]) -> None:
    expected = greedy(SPELL, 64)
    assert expected[-1] == EOS
    options = OutputOptions(logprobs=2)
    with stand_in(**switches):
        async with running(PREFILL) as prefill, running() as decode:
            whole = asked(SPELL, 64, output=options)
            assert await decode.end_of(whole) == Finished(whole.id, FinishReason.STOP_ID, len(expected))
            assert decode.tokens_of(whole) == expected
            assert_logprobs(decode, whole, expected, switches)
            first = asked(SPELL, 64, PREFILL, output=options)
            prefilled = await prefilled_by(prefill, first)
            assert (prefilled.token_id, prefilled.finished) == (expected[0], None)
            assert prefilled.logprobs is not None
            assert prefilled.logprobs.token_id == expected[0]
            rest = decode_of(first, prefilled)
            assert await decode.end_of(rest) == Finished(rest.id, FinishReason.STOP_ID, len(expected))
            assert decode.tokens_of(rest) == expected[1:]
            assert_logprobs(decode, rest, expected[1:], switches)
            assert decode.consumer.started[rest.id].transfer_s > 0
            [stats] = decode.engine.stats()
            assert stats.num_total_blocks == decode.engine.capabilities.num_blocks > 0
            counts = (stats.num_in_use_blocks, stats.num_held_blocks, stats.num_cached_blocks, stats.num_free_blocks)
            assert sum(counts) == stats.num_total_blocks
            if switches.get("single_use_state", True):
                await prefill.until(lambda: prefill.control.num_held == 0)


def assert_logprobs(decode: Running, request: EngineRequest, expected: list[int], switches: dict[str, Any]) -> None:
    logprobs = decode.consumer.logprobs[request.id]
    assert [entry.token_id for entry in logprobs] == expected
    said = logprobs if switches.get("end_id_in_tokens", True) else logprobs[:-1]
    for entry in said:
        assert entry.logprob <= 0
        if not switches.get("logprobs_as_floats"):
            assert (len(entry.top_token_ids), entry.top_token_ids[0]) == (2, entry.token_id), "it is greedy"
            assert entry.top_logprobs[0] == entry.logprob >= entry.top_logprobs[1]


@pytest.mark.parametrize("num_top", [None, 0])
async def test_as_many_alternatives_come_as_were_asked_for(package: Any, num_top: int | None) -> None:
    async with running() as decode:
        request = asked(STORY, 3, output=OutputOptions(logprobs=num_top))
        await decode.end_of(request)
        assert [entry.top_token_ids for entry in decode.consumer.logprobs[request.id]] == [()] * (
            0 if num_top is None else 3
        )


@ON_1_2
@pytest.mark.parametrize("interval", [1, 4])
async def test_a_resumed_answer_goes_on_and_counts_what_was_given(package: Any, interval: int) -> None:
    expected = greedy(STORY, 12)
    settings = {"override_engine_args": {"stream_interval": interval}}
    async with running(PREFILL, **settings) as prefill, running(**settings) as decode:
        request = asked(STORY, 12, generated=expected[:5])
        assert await decode.end_of(request) == Finished(request.id, FinishReason.LENGTH, 12)
        assert decode.tokens_of(request) == expected[5:]
        assert decode.consumer.offsets[request.id] == list(range(5, 12))
        assert decode.last_call["sampling_params"].max_tokens == 7
        again = asked(STORY, 12, PREFILL, generated=expected[:5])
        prefilled = await prefilled_by(prefill, again)
        assert (prefilled.token_id, prefilled.num_tokens) == (expected[5], len(token_ids_of(STORY)) + 5)
        rest = decode_of(again, prefilled)
        assert await decode.end_of(rest) == Finished(rest.id, FinishReason.LENGTH, 12)
        assert decode.tokens_of(rest) == expected[6:]
        assert decode.consumer.offsets[rest.id] == list(range(6, 12))


@pytest.mark.parametrize("end_id_in_tokens", [True, False])
async def test_a_prefill_whose_token_ends_the_answer_hands_nothing_off(end_id_in_tokens: bool) -> None:
    expected = greedy(SPELL, 64)
    with stand_in(end_id_in_tokens=end_id_in_tokens):
        async with running(PREFILL) as prefill:
            for request, token_id, reason in (
                (asked(SPELL, 64, PREFILL, generated=expected[:-1]), EOS, FinishReason.STOP_ID),
                (asked(SPELL, 1, PREFILL), expected[0], FinishReason.LENGTH),
                (asked(SPELL, 3, PREFILL, generated=expected[:2]), expected[2], FinishReason.LENGTH),
                (
                    asked(SPELL, kind=PREFILL, sampling=greedily(9, stop_token_ids=(expected[0],))),
                    expected[0],
                    FinishReason.STOP_ID,
                ),
            ):
                prefilled = await prefilled_by(prefill, request)
                assert (prefilled.token_id, prefilled.finished) == (token_id, reason)
                assert (prefilled.opaque, prefilled.num_tokens, prefilled.block_ids) == (None, 0, ())
            assert prefill.control.num_held == 0


async def test_stop_ids_end_an_answer_and_are_its_last_token(package: Any) -> None:
    expected = greedy(STORY, 12)
    stop = expected[4]
    first = expected.index(stop) + 1
    async with running() as decode:
        request = asked(STORY, sampling=greedily(12, stop_token_ids=(stop,)))
        assert await decode.end_of(request) == Finished(request.id, FinishReason.STOP_ID, first)
        assert decode.tokens_of(request) == expected[:first]
        late = asked(STORY, sampling=greedily(12, stop_token_ids=(stop,), min_tokens=first + 2))
        assert (await decode.end_of(late)).num_output_tokens >= first + 2


async def test_the_model_s_own_end_may_be_ignored(package: Any) -> None:
    expected = greedy(SPELL, 64)
    num_tokens = len(expected) + 3
    async with running() as decode:
        request = asked(SPELL, sampling=greedily(num_tokens, ignore_eos=True))
        assert await decode.end_of(request) == Finished(request.id, FinishReason.LENGTH, num_tokens)
        assert decode.tokens_of(request)[: len(expected)] == expected


async def test_without_a_limit_the_model_s_own_holds(package: Any) -> None:
    num_given = len(token_ids_of(STORY))
    async with running(max_model_len=num_given + 6) as decode:
        request = asked(STORY, sampling=greedily(None, ignore_eos=True))
        assert await decode.end_of(request) == Finished(request.id, FinishReason.LENGTH, 6)


COMPLETE_SAMPLERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"override_engine_args": {"sampler_type": "TRTLLMSampler"}}),
    ({"version": "1.4.0rc1"}, {}),
]


@pytest.mark.parametrize(("switches", "settings"), COMPLETE_SAMPLERS, ids=str)
async def test_a_seed_decides_and_choices_differ(switches: dict[str, Any], settings: dict[str, Any]) -> None:
    with stand_in(**switches):
        async with running(**settings) as decode:
            await assert_seeded(decode)


async def assert_seeded(decode: Running) -> None:
    answers = []
    for seed, choice in ((7, 0), (7, 0), (7, 1), (8, 0)):
        request = make_request(token_ids_of(STORY), sampling=Sampling(temperature=2.0, max_tokens=12))
        request = replace(request, generation=replace(request.generation, seed=seed, choice=choice))
        await decode.end_of(request)
        answers.append(tuple(decode.tokens_of(request)))
    assert answers[0] == answers[1]
    assert len(set(answers)) == 3


@ON_1_2
async def test_every_sampling_field_reaches_the_engine(package: Any) -> None:
    sampling = Sampling(
        temperature=0.5,
        top_k=9,
        top_p=0.8,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        max_tokens=7,
        min_tokens=2,
        stop_token_ids=(44,),
        ignore_eos=True,
    )
    async with running(override_engine_args={"sampler_type": "TRTLLMSampler"}) as decode:
        await decode.end_of(make_request(token_ids_of(STORY), sampling=sampling))
        said = decode.last_call["sampling_params"]
    for name in (
        "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty max_tokens min_tokens"
    ).split():
        assert getattr(said, name) == getattr(sampling, name), name
    assert (said.stop_token_ids, said.ignore_eos, said.detokenize, said.end_id) == ([44], True, False, EOS)
    assert said.seed is not None
    assert "disaggregated_params" not in decode.last_call or decode.last_call["disaggregated_params"] is None


IGNORED = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@ON_1_2
async def test_fields_that_the_default_sampler_of_1_2_ignores_are_neither_announced_nor_taken(package: Any) -> None:
    async with running() as decode:
        assert not decode.engine.capabilities.sampling_fields & {*IGNORED, "seed"}
        for name in IGNORED:
            request = asked(STORY, sampling=greedily(4, **{name: 0.5}))
            assert (await decode.end_of(request)).error.field == f"sampling.{name}"


@pytest.mark.parametrize(("switches", "settings"), COMPLETE_SAMPLERS, ids=str)
async def test_what_other_samplers_honour_is_announced_and_decides(
    switches: dict[str, Any], settings: dict[str, Any]
) -> None:
    with stand_in(**switches):
        async with running(**settings) as decode:
            assert decode.engine.capabilities.sampling_fields > {*IGNORED, "seed"}
            request = asked(STORY, sampling=greedily(12, repetition_penalty=2.0))
            await decode.end_of(request)
            assert decode.tokens_of(request) != greedy(STORY, 12)


def test_a_release_without_a_choice_of_samplers_has_the_complete_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As late ones of 1.3."""
    with stand_in() as module:
        assert not Package().has_one_sampler
        monkeypatch.delitem(module.llmapi.llm_args.TorchLlmArgs.model_fields, "sampler_type")
        assert Package().has_one_sampler


async def test_log_probabilities_of_prompts_are_neither_announced_nor_taken(package: Any) -> None:
    async with running() as decode:
        assert "num_prompt_logprobs" not in decode.engine.capabilities.sampling_fields
        request = asked(STORY, 4, output=OutputOptions(num_prompt_logprobs=1))
        assert (await decode.end_of(request)).error.field == "output.num_prompt_logprobs"


async def test_log_probabilities_are_refused_where_a_hand_off_does_not_carry_them() -> None:
    options = OutputOptions(logprobs=1)
    with stand_in(first_gen_log_probs=False):
        async with running(PREFILL) as prefill, running() as decode:
            assert "logprobs" not in prefill.engine.capabilities.sampling_fields
            assert "logprobs" in decode.engine.capabilities.sampling_fields, "of prompts that it computes itself"
            refused = await prefill.end_of(asked(STORY, 8, PREFILL, output=options))
            assert refused.error.field == "output.logprobs"
            plain = asked(STORY, 8, PREFILL)
            prefilled = await prefilled_by(prefill, plain)
            rest = decode_of(plain, prefilled)
            asking = replace(rest, generation=replace(rest.generation, output=options))
            assert (await decode.end_of(asking)).error.field == "output.logprobs"
            alone = asked(STORY, 3, output=options)
            await decode.end_of(alone)
            assert len(decode.consumer.logprobs[alone.id]) == 3


@ON_1_2
async def test_a_result_that_contradicts_itself_fails_its_request_alone(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(PREFILL) as prefill, running() as decode:
        request = asked(STORY, 8, PREFILL, output=OutputOptions(logprobs=1))
        prefilled = await prefilled_by(prefill, request)
        # Without prefill's log probabilities TensorRT-LLM has fewer of them than tokens.
        monkeypatch.setattr(hand_off, "_made_logprobs", lambda *_: None)
        failed = await decode.end_of(decode_of(request, prefilled))
        assert isinstance(failed, Failed)
        assert type(failed.error) is EngineError
        assert decode.engine.is_alive
        plain = asked(STORY, 3)
        await decode.end_of(plain)
        assert decode.tokens_of(plain) == greedy(STORY, 3)


async def test_what_1_4_wants_of_a_call_is_given_and_1_2_does_not_get_it() -> None:
    for version in ("1.2.1", "1.4.0rc1"):
        is_1_4 = version == "1.4.0rc1"
        with stand_in(version=version):
            async with running(PREFILL) as prefill, running() as decode:
                assert ("priority" in decode.last_call) == is_1_4, "the canary's"
                ids = set()
                for priority in (0, 0, 3, -3):
                    request = replace(asked(STORY, 4, PREFILL), priority=priority)
                    prefilled = await prefilled_by(prefill, request)
                    ids.add(getattr(prefill.last_call["disaggregated_params"], "disagg_request_id", None))
                    if is_1_4:
                        assert (prefill.last_call["priority"] > 0.5, prefill.last_call["priority"] < 0.5) == (
                            priority > 0,
                            priority < 0,
                        )
                assert (len(ids), None in ids) == ((4, False) if is_1_4 else (1, True))
                rest = decode_of(request, prefilled)
                await decode.end_of(rest)
                assert decode.tokens_of(rest) == greedy(STORY, 4)[1:]
                taken = decode.last_call["disaggregated_params"]
                assert (getattr(taken, "ctx_info_endpoint", None) is not None) == is_1_4


async def test_a_grammar_is_followed_where_the_engine_has_one_and_is_not_taken_up_in_the_middle(package: Any) -> None:
    guided = GuidedDecoding(GrammarKind.REGEX, "(yes|no)")
    args = {"override_engine_args": {"guided_decoding_backend": "xgrammar"}}
    async with running(**args) as decode:
        assert "guided" in decode.engine.capabilities.sampling_fields
        request = asked(STORY, sampling=greedily(12, guided=guided))
        await decode.end_of(request)
        assert text_of(decode.tokens_of(request)).strip() in ("yes", "no")
        chosen = asked(STORY, sampling=greedily(12, guided=guided_choice(["sun (hot)", "sea"])))
        await decode.end_of(chosen)
        assert text_of(decode.tokens_of(chosen)).strip() in ("sun (hot)", "sea")
        broken = asked(STORY, sampling=greedily(12, guided=guided), generated=[5])
        assert (await decode.end_of(broken)).error.reason == "WORKER_UNAVAILABLE"
        wrong = asked(STORY, sampling=greedily(12, guided=GuidedDecoding(GrammarKind.REGEX, "(")))
        assert (await decode.end_of(wrong)).error.field == "sampling.guided"


@pytest.mark.parametrize(("backend", "takes_tags"), [("xgrammar", True), ("llguidance", False)])
async def test_kinds_of_grammars_are_announced_as_its_backend_follows_them(
    backend: str, takes_tags: bool, package: Any
) -> None:
    tag = GuidedDecoding(GrammarKind.STRUCTURAL_TAG, '{"type": "structural_tag"}')
    async with running(override_engine_args={"guided_decoding_backend": backend}) as decode:
        fields = decode.engine.capabilities.sampling_fields
        assert fields >= guided_fields((GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE))
        assert ("guided.structural_tag" in fields) == takes_tags
        lark = asked(STORY, sampling=greedily(12, guided=GuidedDecoding(GrammarKind.LARK, 'start: "a"')))
        assert (await decode.end_of(lark)).error.field == "sampling.guided"
    # The stand-in imitates no tags: only what it would be given can be seen.
    taken = SimpleNamespace(SamplingParams=dict, GuidedDecodingParams=dict)
    generation = asked(STORY, sampling=greedily(12, guided=tag)).generation
    params = sampling_params(taken, generation, (), max_output_tokens=12, num_done=0)  # type: ignore[arg-type]
    assert params["guided_decoding"] == {"structural_tag": tag.text}


@ON_1_2
async def test_a_trace_reaches_the_engine(package: Any) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with running() as decode, running(RequestKind.PREFILL) as prefill:
        first = replace(asked(STORY, kind=RequestKind.PREFILL), traceparent=trace)
        prefilled = await prefill.end_of(first)
        assert prefill.last_call["trace_headers"] == {"traceparent": trace}
        await decode.end_of(replace(decode_of(first, prefilled), traceparent=trace))
        assert decode.last_call["trace_headers"] == {"traceparent": trace}
        await decode.end_of(asked(STORY, 1))
        assert decode.last_call["trace_headers"] is None


async def test_a_rank_a_salt_and_the_load_are_each_rank_s_own(package: Any) -> None:
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "enable_attention_dp": True, "max_batch_size": 6}
    async with running(**settings) as decode:
        assert [stats.max_running for stats in decode.engine.stats()] == [6, 6]
        assert decode.engine.capabilities.data_parallel_size == len(decode.engine.stats()) == 2
        request = asked(STORY, 3)
        request = replace(request, generation=replace(request.generation, data_parallel_rank=1, cache_salt="pepper"))
        await decode.end_of(request)
        scheduling = decode.last_call["scheduling_params"]
        assert (scheduling.attention_dp_rank, scheduling.attention_dp_relax) == (1, False)
        assert decode.last_call["cache_salt"] == "pepper"
        assert [stats.num_output_tokens for stats in decode.engine.stats()] == [0, 3]


@ON_1_2
async def test_adapters_are_known_by_their_folders_and_named_in_the_call(package: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_adapter(tmp_path / name)
    folders = [str(tmp_path / "one"), str(tmp_path / "two")]
    async with running(override_engine_args={"enable_lora": True, "lora_config": {"lora_dir": folders}}) as decode:
        assert decode.engine.capabilities.adapters == ("one", "two")
        request = asked(STORY, 3)
        decode.engine.submit(replace(request, generation=replace(request.generation, adapter="two")))
        await decode.consumer.wait_terminal(request)
        lora = decode.last_call["lora_request"]
        assert (lora.lora_name, lora.lora_int_id, lora.lora_path) == ("two", 2, folders[1])
        plain = asked(STORY, 3)
        await decode.end_of(plain)
        assert decode.tokens_of(plain) == greedy(STORY, 3) != decode.tokens_of(request)


@pytest.mark.parametrize("autodeploy_from_torch", [False, True])
async def test_autodeploy_answers_by_itself_and_takes_nothing_over(autodeploy_from_torch: bool) -> None:
    with stand_in(autodeploy_from_torch=autodeploy_from_torch):
        async with running(PREFILL) as prefill, running(backend=Backend.AUTODEPLOY) as decode:
            request = asked(STORY, 12)
            await decode.end_of(request)
            assert decode.tokens_of(request) == greedy(STORY, 12)
            first = asked(STORY, 12, PREFILL)
            refused = await decode.end_of(decode_of(first, await prefilled_by(prefill, first)))
            assert (type(refused.error), refused.error.field) == (NoHandOffError, "hand_off")


def make_adapter(folder: Path) -> None:
    """A LoRA adapter that changes every answer."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 400}))
    name = "base_model.model.model.layers.2.mlp.down_proj.lora_{}.weight"
    generator = torch.Generator().manual_seed(0)
    down, up = (torch.randn(shape, generator=generator) for shape in ((4, 704), (256, 4)))
    save_file({name.format("A"): down, name.format("B"): up}, folder / "adapter_model.safetensors")


def test_two_adapters_of_one_name_are_refused(tmp_path: Path) -> None:
    folders = [str(tmp_path / part / "same") for part in ("a", "b")]
    given = arguments(override={"enable_lora": True, "lora_config": {"lora_dir": folders}})
    with pytest.raises(ConfigError, match="same"):
        ModelFacts.read(str(CHECKPOINT), given)
