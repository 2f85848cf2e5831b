"""Parameters of requests: their fields, what they refuse, and that a request changes them."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.driving import SPELL, engine, params
from tests.fakes.installation import installed

with installed():
    from tensorrt_llm import SamplingParams
    from tensorrt_llm._stand_in import schema
    from tensorrt_llm._stand_in.schema import StandInError
    from tensorrt_llm.executor.request import LoRARequest
    from tensorrt_llm.executor.utils import RequestError
    from tensorrt_llm.llmapi import DisaggregatedParams, GuidedDecodingParams
    from tensorrt_llm.scheduling_params import SchedulingParams


@pytest.mark.parametrize(
    "kind", [SamplingParams, GuidedDecodingParams, DisaggregatedParams, SchedulingParams, LoRARequest]
)
def test_fields_are_the_description_s(kind: Any) -> None:
    names = {field.name for field in dataclasses.fields(kind)}
    described = set(schema.params_of(kind.__name__))
    assert described <= names <= set(schema.params_of(kind.__name__, uncertain=True))
    for name in ["surprise", *schema.API["classes"][kind.__name__].get("not_in_1_2", [])]:
        with pytest.raises(TypeError, match=name):
            kind(**{name: 1})


def test_parameters_are_given_by_keyword_and_have_no_dict() -> None:
    with pytest.raises(TypeError):
        SamplingParams(3)
    assert not hasattr(SamplingParams(), "__dict__")
    assert dataclasses.asdict(DisaggregatedParams())["opaque_state"] is None
    assert SamplingParams().max_tokens == 32


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_p": 1.5},
        {"top_k": -1},
        {"temperature": -0.1},
        {"max_tokens": 0},
        {"n": 2, "best_of": 1},
        {"truncate_prompt_tokens": 0},
        {"guided_decoding": GuidedDecodingParams(regex="a", json_object=True)},
    ],
)
def test_values_that_no_request_can_have_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        SamplingParams(**wrong)


def test_a_call_checks_types() -> None:
    llm = engine()
    with pytest.raises(TypeError, match=r"SamplingParams\.n"):
        llm.generate_async(SPELL, params(n=True))
    with pytest.raises(TypeError, match=r"SamplingParams\.seed"):
        llm.generate_async(SPELL, params(seed=1.5))
    with pytest.raises(TypeError, match="sampling_params"):
        llm.generate_async(SPELL, {"max_tokens": 3})
    with pytest.raises(TypeError, match="priority"):
        llm.generate_async(SPELL, params(), priority=1.0)
    with pytest.raises(TypeError, match="cache_salt"):
        llm.generate_async(SPELL, params(), cache_salt=1)
    with pytest.raises(TypeError, match=r"DisaggregatedParams\.opaque_state"):
        llm.generate_async(SPELL, params(), disaggregated_params=DisaggregatedParams(opaque_state="text"))


def test_a_request_changes_its_parameters_so_they_cannot_be_reused() -> None:
    llm = engine(stream_interval=3)
    given = params(2)
    untouched = copy.copy(given)
    llm.generate(SPELL, given)
    assert (given.end_id, given.pad_id, given._stream_interval) == (1, 2, 3)
    with pytest.raises(StandInError, match="fresh"):
        llm.generate_async(SPELL, given)
    llm.generate(SPELL, untouched)
    llm.generate(SPELL, copy.deepcopy(given))
    with pytest.raises(StandInError, match="of its own"):
        llm.generate([SPELL, SPELL], params())


def test_without_a_tokenizer_the_caller_gives_the_end_id() -> None:
    llm = engine(skip_tokenizer_init=True)
    assert llm.tokenizer is None
    with pytest.raises(ValueError, match="end_id"):
        llm.generate_async([0, 4, 5], params())
    with pytest.raises(ValueError, match="tokenizer"):
        llm.generate_async(SPELL, params(end_id=1))
    assert llm.generate([0, 4, 5], params(3, end_id=1)).outputs[0].text == ""


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        (3, TypeError),
        ({"text": "x"}, TypeError),
        ({"prompt_token_ids": [1.0]}, TypeError),
        ({"prompt_token_ids": []}, ValueError),
        ({"prompt_token_ids": [-1]}, ValueError),
        ({"prompt": "x", "surprise": 1}, StandInError),
        ({"prompt": "x", "multi_modal_data": {"audio": []}}, ValueError),
    ],
)
def test_malformed_prompts_are_refused_by_the_call(inputs: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        engine().generate_async(inputs, params())


def test_a_prompt_beyond_max_num_tokens_needs_chunked_prefill() -> None:
    ids = [9] * 40
    with pytest.raises(RequestError, match="max_num_tokens"):
        engine(max_num_tokens=32).generate_async(ids, params(1))
    assert engine(max_num_tokens=32, enable_chunked_prefill=True).generate(ids, params(1)).finished
    with installed(long_prompt_error="value_error") as other, pytest.raises(ValueError, match="max_num_tokens"):
        llm = other.LLM(engine().args.model, max_num_tokens=32)
        llm.generate_async(ids, other.SamplingParams(max_tokens=1))


def test_request_types_are_lower_cased_and_known() -> None:
    assert DisaggregatedParams(request_type="CONTEXT_ONLY").request_type == "context_only"
    with pytest.raises(ValueError, match="Unknown request type"):
        DisaggregatedParams(request_type="prefill")


def test_handles_and_hashes_come_in_pairs() -> None:
    made_up = [DisaggregatedParams(multimodal_embedding_handles=[{}]).multimodal_hashes for _ in range(2)]
    assert made_up[0] != made_up[1]
    assert [len(item) for item in made_up[0]] == [8]
    with pytest.raises(ValueError, match="2 multimodal_embedding_handles, but 1"):
        DisaggregatedParams(multimodal_embedding_handles=[{}, {}], multimodal_hashes=[[0] * 8])
    with pytest.raises(ValueError, match="8 ints"):
        DisaggregatedParams(multimodal_hashes=[[0] * 7])
    with pytest.raises(ValueError, match="both or neither"):
        DisaggregatedParams(mrope_position_ids_handle={})


def test_uncertain_fields_of_the_hand_off_can_be_detected() -> None:
    with installed(disagg_request_id=True, mrope_handles=False) as other:
        fields = {field.name for field in dataclasses.fields(other.llmapi.DisaggregatedParams)}
    assert "disagg_request_id" in fields
    assert "mrope_position_ids_handle" not in fields


def test_an_adapter_s_path_exists(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        LoRARequest("one", 1, str(tmp_path / "nowhere"))
    request = LoRARequest("one", 1, str(tmp_path))
    with pytest.raises(ValueError, match="enable_lora"):
        engine().generate_async(SPELL, params(), lora_request=request)


def test_a_parameter_that_is_not_imitated_raises() -> None:
    llm = engine()
    with pytest.raises(StandInError, match="use_beam_search"):
        llm.generate_async(SPELL, params(use_beam_search=True))
    with pytest.raises(StandInError, match="kv_cache_retention_config"):
        llm.generate_async(SPELL, params(), kv_cache_retention_config=object())
