"""What each field of OpenAI's requests becomes in the request that runs, and at its worker."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from quartet.api.request import GenerateStart, TextOptions
from quartet.engine.sampling import GrammarKind, GuidedDecoding, OutputOptions, Sampling
from tests.router.http.face import open_face
from tests.router.records import ALL_SAMPLING_FIELDS

SCHEMA_TEXT = '{"type": "object"}'
TAG = {"type": "structural_tag", "structures": [], "triggers": ["<f="]}
TAGGED = GuidedDecoding(GrammarKind.STRUCTURAL_TAG, json.dumps(TAG))
JSON = GuidedDecoding(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "description": "d", "strict": True, "schema": {"a": 1}}}

#: Fields of both kinds of completions, and the attributes of the request that they become.
FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"priority": 7}, {"priority": -7}),
    ({"priority": -2}, {"priority": 2}),
    ({"cache_salt": "mine"}, {"cache_salt": "mine"}),
    ({"request_id": "r-1"}, {"client_request_id": "r-1"}),
    ({"ttft_target": 250, "itl_target": 0}, {"ttft_target_s": 0.25, "itl_target_s": 0.0}),
    ({"nvext": {"ttft_target": 1000}}, {"ttft_target_s": 1.0, "itl_target_s": None}),
    ({"seed": 9}, {"seed": 9}),
    ({"seed": -1}, {"seed": 2**64 - 1}),
    ({"n": 3}, {"num_choices": 3}),
    ({"temperature": 0}, {"sampling": {"temperature": 0.0}}),
    ({"top_p": 0.5}, {"sampling": {"top_p": 0.5}}),
    ({"top_k": 40}, {"sampling": {"top_k": 40}}),
    ({"top_k": -1}, {"sampling": {"top_k": 0}}),
    ({"min_p": 0.25}, {"sampling": {"min_p": 0.25}}),
    ({"presence_penalty": 0.5}, {"sampling": {"presence_penalty": 0.5}}),
    ({"frequency_penalty": -0.5}, {"sampling": {"frequency_penalty": -0.5}}),
    ({"repetition_penalty": 1.5}, {"sampling": {"repetition_penalty": 1.5}}),
    ({"logit_bias": {"5": -100, "7": 1.5}}, {"sampling": {"logit_bias": {5: -100.0, 7: 1.5}}}),
    ({"min_tokens": 2}, {"sampling": {"min_tokens": 2}}),
    ({"stop_token_ids": [5, 6]}, {"sampling": {"stop_token_ids": (5, 6)}}),
    ({"ignore_eos": True}, {"sampling": {"ignore_eos": True}}),
    ({"nvext": {"ignore_eos": True}}, {"sampling": {"ignore_eos": True}}),
    ({"ignore_eos": True, "nvext": {"ignore_eos": False}}, {"sampling": {"ignore_eos": True}}),
    ({"response_format": {"type": "text"}}, {"sampling": {}}),
    ({"response_format": {"type": "json_object"}}, {"sampling": {"guided": JSON}}),
    ({"response_format": SCHEMA}, {"sampling": {"guided": GuidedDecoding(GrammarKind.JSON_SCHEMA, '{"a": 1}')}}),
    ({"structured_outputs": {"json": SCHEMA_TEXT}}, {"sampling": {"guided": JSON}}),
    ({"structured_outputs": {"json_object": True}}, {"sampling": {"guided": JSON}}),
    ({"structured_outputs": {"regex": "a+"}}, {"sampling": {"guided": GuidedDecoding(GrammarKind.REGEX, "a+")}}),
    (
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"sampling": {"guided": GuidedDecoding(GrammarKind.CHOICE, '["a", "b"]')}},
    ),
    ({"structured_outputs": {"structural_tag": TAG}}, {"sampling": {"guided": TAGGED}}),
    ({"response_format": TAG}, {"sampling": {"guided": TAGGED}}),
    ({"structured_outputs": {"grammar": "r"}}, {"sampling": {"guided": GuidedDecoding(GrammarKind.EBNF, "r")}}),
    ({"stop": "END"}, {"text_options": {"stop_strings": ("END",)}}),
    ({"stop": ["", "a", "b"]}, {"text_options": {"stop_strings": ("a", "b")}}),
    (
        {"include_stop_str_in_output": True, "stop": "z"},
        {"text_options": {"stop_strings": ("z",), "include_stop_string": True}},
    ),
    ({"skip_special_tokens": False}, {"text_options": {"show_special_tokens": True}}),
    ({"user": "u", "metadata": {}, "store": True, "service_tier": "flex", "prompt_cache_key": "k"}, {}),
]
COMPLETION_FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"logprobs": 3}, {"output": OutputOptions(logprobs=3)})
]
CHAT_FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"logprobs": True}, {"output": OutputOptions(logprobs=0)}),
    ({"logprobs": True, "top_logprobs": 4}, {"output": OutputOptions(logprobs=4)}),
    ({"stream_tool_arguments": True}, {"text_options": {"stream_tool_arguments": True}}),
    ({"max_completion_tokens": 3}, {"sampling": {"max_tokens": 3}}),
]
MAX_TOKENS = 4


async def run(path: str, prompt: dict[str, Any], fields: dict[str, Any], **headers: str) -> tuple[GenerateStart, Any]:
    """The request that the fields became, and what the worker of its first choice was told."""
    starts = list[GenerateStart]()
    # Without Lark, so that the router leaves grammars to the engine: those here are none.
    fields_of_engine = (*ALL_SAMPLING_FIELDS, "guided", "guided.choice", "guided.structural_tag")
    async with open_face(sampling_fields=fields_of_engine) as face:
        generate = face.fleet.pipeline.generate

        def note(start: GenerateStart, *rest: Any, **options: Any) -> Any:
            starts.append(replace(start))
            return generate(start, *rest, **options)

        face.fleet.pipeline.generate = note  # type: ignore[method-assign]
        status, answer = await face.post(path, {**prompt, "max_tokens": MAX_TOKENS, **fields}, **headers)
        assert status == 200, answer
        [start] = starts
        return start, face.fleet.hops.calls[0].start


def wanted_of(prompt: Any, changes: dict[str, Any]) -> GenerateStart:
    known: dict[str, Any] = {"prompt": prompt, **changes}
    known["sampling"] = Sampling(**{"max_tokens": MAX_TOKENS, **changes.get("sampling", {})})
    known["text_options"] = TextOptions(**changes.get("text_options", {}))
    return GenerateStart(**known)


@pytest.mark.parametrize(
    ("path", "prompt", "fields"),
    [
        ("/v1/completions", {"prompt": "hi"}, FIELDS + COMPLETION_FIELDS),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, FIELDS + CHAT_FIELDS),
    ],
    ids=["completions", "chats"],
)
async def test_each_field_reaches_the_pipeline_and_the_worker_as_what_it_means_and_changes_nothing_else(
    path: str, prompt: dict[str, Any], fields: list[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    for asked, changes in fields:
        start, at_worker = await run(path, prompt, asked)
        assert replace(start, has_entered=False) == wanted_of(start.prompt, changes), asked
        generation = at_worker.generation
        # Stop strings end what workers go on with, and the model's end is named by the router.
        told = replace(generation.sampling, stop_token_ids=start.sampling.stop_token_ids)
        assert told == start.sampling, asked
        assert set(start.sampling.stop_token_ids) <= set(generation.sampling.stop_token_ids)
        assert generation.output == start.output and generation.cache_salt == start.cache_salt
        assert start.seed is None or generation.seed == start.seed


async def test_headers_reach_the_pipeline_too_and_the_field_goes_before_the_header() -> None:
    headers = {"X-Session-Id": "talk", "X-Request-Id": "header"}
    start, _ = await run("/v1/completions", {"prompt": "hi"}, {}, **headers)
    assert (start.session_key, start.client_request_id) == ("talk", "header")
    start, _ = await run("/v1/completions", {"prompt": "hi"}, {"request_id": "field"}, **headers)
    assert start.client_request_id == "field"
