"""Bodies that are wrong: each gets the right code, names the right field, and leaves nothing behind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.http.face import Face, open_face

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look"}}


def chat(**changes: Any) -> dict[str, Any]:
    return {"messages": [USER], **changes}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER, fields]}


def part(**fields: Any) -> dict[str, Any]:
    return message(role="user", content=[{"type": "text", "text": "a"}, fields])


def call(**fields: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": "{}"}
    return message(role="assistant", tool_calls=[{"id": "c", "type": "function", "function": function, **fields}])


def long_list(*last: Any) -> list[Any]:
    return [*range(1_000, 3_000), *last]


LONG = {"role": "user", "content": "a" * 40_000}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


#: Body, code, and the parameter that the error names; of /v1/chat/completions.
CHATS: list[tuple[Any, int, str | None]] = [
    (b"", 400, None),
    (b"{", 400, None),
    (b"[]", 400, None),
    (b'"chat"', 400, None),
    (b"null", 400, None),
    (b"\xff\xfe{}", 400, None),
    (b'{"messages": NaN}', 400, None),
    (b"[" * 20_000, 400, None),
    (b'{"a": ' * 5_000, 400, None),
    (b'{"messages":[{"role":"user","content":"\\ud800"}]}', 400, None),
    (b'{"messages":[{"role":"user","content":"\\udc00"}],"user":"' + b"x" * 40_000 + b'"}', 400, None),
    (b'{"messages":[{"role":"user","content":"a"}],"seed":' + b"9" * 5_000 + b"}", 400, None),
    ({}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": ["hi"]}, 400, "messages[0]"),
    ({"messages": [USER] * 4097}, 400, "messages"),
    ({"messages": [{"content": "hi"}]}, 400, "messages[0].role"),
    (message(role="user"), 400, "messages[1].content"),
    (message(role="user", content=5), 400, "messages[1].content"),
    (message(role="user", content="a", colour="red"), 400, "messages[1].colour"),
    (message(role="user", content="a", audio={"id": "x"}), 400, "messages[1].audio"),
    (message(role="user", content="a", name="n" * 257), 400, "messages[1].name"),
    (message(role="assistant", tool_calls=[{"type": "function"}]), 400, "messages[1].tool_calls[0].function.name"),
    (message(role="assistant", function_call={"name": "a"}), 400, "messages[1].function_call"),
    (message(role="assistant", content="a", annotations=[{}]), 400, "messages[1].annotations"),
    (message(role="assistant", content="a", refusal="b"), 400, "messages[1].refusal"),
    (message(role="assistant", content="a", reasoning="b", reasoning_content="c"), 400, "messages[1].reasoning"),
    (message(role="assistant", tool_calls=[5]), 400, "messages[1].tool_calls[0]"),
    (message(role="assistant", tool_calls=long_list(), content="a" * 40_000), 400, "messages[1].tool_calls[0]"),
    (call(function={"name": "look", "arguments": "x" * 300_000}), 400, "messages[1].tool_calls[0].function.arguments"),
    (call(index="first"), 400, "messages[1].tool_calls[0].index"),
    (call(function={"name": "look", "arguments": '{"a": '}), 400, "messages[1].tool_calls[0].function.arguments"),
    (part(), 400, "messages[1].content[1]"),
    (part(type="sound"), 400, "messages[1].content[1].type"),
    (part(type="input_audio", input_audio={"data": ""}), 400, "messages[1].content[1].input_audio"),
    (part(type="file", file={"file_id": "x"}), 400, "messages[1].content[1].file"),
    (part(type="text", text="a", image_url="data:,"), 400, "messages[1].content[1].image_url"),
    (part(type="image_url", image_url="data:,", uuid="u"), 400, "messages[1].content[1].uuid"),
    (part(type="text", text="a", prompt_cache_breakpoint={}), 400, "messages[1].content[1].prompt_cache_breakpoint"),
    (part(type="image_url", image_url={}), 400, "messages[1].content[1].image_url.url"),
    (part(type="image_url", image_url={"url": 5}), 400, "messages[1].content[1].image_url.url"),
    (part(type="image_url", image_url={"url": "x", "detail": "most"}), 400, "messages[1].content[1].image_url.detail"),
    (part(type="image_url", image_url={"url": "data:image/png;base64,AAAA"}), 400, "messages"),
    (chat(colour="red"), 400, "colour"),
    (chat(model=5), 400, "model"),
    (chat(model="huge"), 404, "model"),
    (chat(stream="yes"), 400, "stream"),
    (chat(stream_options={"include_usage": True}), 400, "stream_options"),
    (chat(stream=True, stream_options={"usage": True}), 400, "stream_options.usage"),
    (chat(temperature="hot"), 400, "temperature"),
    (chat(temperature=True), 400, "temperature"),
    (b'{"messages":[{"role":"user","content":"a"}],"temperature":1e999}', 400, "temperature"),
    (chat(top_p=0), 400, "top_p"),
    (chat(top_k=1.5), 400, "top_k"),
    (chat(n=0), 400, "n"),
    (chat(n=65), 400, "n"),
    (chat(max_tokens=-1), 400, "max_tokens"),
    (chat(max_completion_tokens=0), 400, "max_completion_tokens"),
    (chat(max_completion_tokens=10**6), 400, "max_completion_tokens"),
    (chat(min_tokens=5, max_tokens=4), 400, "min_tokens"),
    (chat(stop=["a"] * 17), 400, "stop"),
    (chat(stop=["a", 5]), 400, "stop[1]"),
    (chat(seed=2**64), 400, "seed"),
    (chat(logit_bias={"a": 1}), 400, "logit_bias"),
    (chat(logit_bias={"5": 101}), 400, "logit_bias"),
    (chat(top_logprobs=3), 400, "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (chat(stop_token_ids=[99_999_999]), 400, "stop_token_ids"),
    (chat(priority=2**40), 400, "priority"),
    (chat(cache_salt="s" * 257), 400, "cache_salt"),
    (chat(request_id="r" * 129), 400, "request_id"),
    (chat(prompt_logprobs=1), 400, "prompt_logprobs"),
    (chat(response_format={"type": "xml"}), 400, "response_format.type"),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {"a": "\n" * 300_000}}}),
        400,
        "response_format.json_schema.schema",
    ),
    (chat(chat_template_kwargs={"a": ["ab" * 100_000, "b" * 100_000]}), 400, "chat_template_kwargs"),
    (chat(response_format={"type": "json_schema"}), 400, "response_format"),
    (chat(structured_outputs={"json": {}, "regex": "a"}), 400, "structured_outputs"),
    (chat(structured_outputs={"choice": []}), 400, "structured_outputs"),
    (chat(structured_outputs={"choice": ["a"] * 1025}), 400, "structured_outputs.choice"),
    (chat(structured_outputs={"choice": [1]}), 400, "structured_outputs.choice[0]"),
    (chat(structured_outputs={"whitespace_pattern": " "}), 400, "structured_outputs.whitespace_pattern"),
    (
        chat(structured_outputs={"regex": "a", "disable_any_whitespace": True}),
        400,
        "structured_outputs.disable_any_whitespace",
    ),
    (chat(structured_outputs={"regex": ""}), 400, "structured_outputs"),
    (chat(structured_outputs={"regex": "a"}, response_format=SCHEMA), 400, "structured_outputs"),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}),
        400,
        "response_format.json_schema.strict",
    ),
    (chat(stop_token_ids=long_list(), messages=[LONG]), 400, "stop_token_ids"),
    (chat(stop=long_list(), messages=[LONG]), 400, "stop"),
    (chat(messages=long_list(), user="a" * 40_000), 400, "messages[0]"),
    ({"messages": [LONG, {"role": "user", "content": long_list()}]}, 400, "messages[1].content[0]"),
    (chat(moderation={"model": "m"}), 400, "moderation"),
    (chat(prompt_cache_options={"mode": "explicit"}), 400, "prompt_cache_options"),
    (chat(thinking_token_budget=5), 400, "thinking_token_budget"),
    (chat(nvext={"greedy": True}), 400, "nvext.greedy"),
    (chat(ttft_target=-1), 400, "ttft_target"),
    (chat(nvext={"itl_target": "soon"}), 400, "nvext.itl_target"),
    (chat(tools=[{"type": "function", "function": {}}]), 400, "tools[0].function.name"),
    (chat(tools="look"), 400, "tools"),
    (chat(tools=[TOOL] * 1025), 400, "tools"),
    (chat(tools=[{**TOOL, "function": {"name": "n", "parameters": {"a": "x" * 200_000}}}] * 3), 400, "tools"),
    (chat(tools=[{**TOOL, "function": {"name": "n", "parameters": [1]}}]), 400, "tools[0].function.parameters"),
    (chat(tools=[TOOL], tool_choice="must"), 400, "tool_choice"),
    (chat(tools=[TOOL], tool_choice="required"), 400, "tool_choice"),
    (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}), 400, "tool_choice"),
    (chat(tools=[{**TOOL, "function": {"name": "n" * 257}}]), 400, "tools[0].function.name"),
    (chat(chat_template_kwargs=nested(65)), 400, "chat_template_kwargs"),
    (chat(chat_template="{{ 1 }}"), 400, "chat_template"),
    (chat(functions=[]), 400, "functions"),
    (chat(modalities=["text", "audio"]), 400, "modalities"),
    (chat(continue_final_message=True), 400, "continue_final_message"),
]

#: The same, of /v1/completions.
COMPLETIONS: list[tuple[Any, int, str | None]] = [
    ({}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": 5}, 400, "prompt"),
    ({"prompt": [1, "a"]}, 400, "prompt"),
    ({"prompt": [[1], ["a"]]}, 400, "prompt[1]"),
    ({"prompt": [2**32]}, 400, "prompt"),
    ({"prompt": [2**31]}, 400, "prompt"),
    ({"prompt": ["a"] * 65}, 400, "prompt"),
    ({"prompt": ["a"] * 10, "n": 10}, 400, "prompt"),
    ({"prompt": [5] * 5_000}, 400, "prompt"),
    ({"prompt": "hi " * 20_000}, 400, "prompt"),
    ({"prompt": "a", "echo": True, "stream": True}, 400, "echo"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": [2**31], "echo": True}, 400, "prompt"),
    ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    ({"prompt": "a", "best_of": 2}, 400, "best_of"),
    ({"prompt": "a", "messages": [USER]}, 400, "messages"),
    (b'{"prompt": [' + b"[]," * 40_000 + b"1]}", 413, None),
    (b'{"prompt": [' + b"1," * 20_000 + b"1.5]}", 400, "prompt"),
    (b'{"prompt": [' + b"1," * 20_000 + b"1,]}", 400, None),
    ({"prompt": long_list(-1), "user": "a" * 40_000}, 400, "prompt"),
    ({"prompt": [[1], long_list(2**32)], "user": "a" * 40_000}, 400, "prompt[1]"),
    ({"prompt": long_list() * 9, "user": long_list(None) * 9}, 400, "prompt"),
    ({"prompt": "a", "add_special_tokens": False}, 400, "add_special_tokens"),
]


async def refuse(face: Face, path: str, body: Any, code: int, parameter: str | None) -> None:
    status, answer = await face.post(path, body)
    error = answer["error"]
    assert (status, error["param"]) == (code, parameter), (body if len(str(body)) < 500 else "", answer)
    assert error["type"] == "invalid_request_error" and error["message"] and error["code"]


@pytest.mark.parametrize(
    ("path", "bodies"),
    [("/v1/chat/completions", CHATS), ("/v1/completions", COMPLETIONS)],
    ids=["chats", "completions"],
)
async def test_each_wrong_body_gets_its_code_and_its_field_and_nothing_is_held(
    path: str, bodies: list[tuple[Any, int, str | None]]
) -> None:
    async with open_face() as face:
        for body, code, parameter in bodies:
            await refuse(face, path, body, code, parameter)
            face.fleet.assert_nothing_left()
            assert not face.server._bodies._num_held and not face.server._num_running
        good = json.dumps({"messages": [USER], "prompt": "hi", "max_tokens": 1})
        keep = "messages" if "chat" in path else "prompt"
        status, _ = await face.post(path, {keep: json.loads(good)[keep], "max_tokens": 1})
        assert status == 200 and not face.fleet.hops.calls[:-1]


#: Bodies of /v1/chat/completions that are answered: what is odd in them means nothing, or is only long.
TAKEN: list[dict[str, Any]] = [
    {"messages": [USER], "metadata": {"pad": "a" * 40_000, "ids": long_list(-1)}},
    {"messages": [USER], "metadata": {"pad": "a" * 40_000, "a": long_list(), "b": long_list(None), "k" * 600: 1.5}},
    message(role="assistant", content="a", annotations=[], refusal=None, audio=None, function_call=None),
    message(role="assistant", content="a", refusal="", reasoning="b", reasoning_content="b"),
    message(role="assistant", content=None, refusal="no"),
    part(type="text", text="b", image_url=None, uuid=None),
    chat(bad_words=[], response_format={"type": "text"}, structured_outputs={"json_object": False}),
]


async def test_what_is_odd_and_means_nothing_is_taken() -> None:
    async with open_face() as face:
        for body in TAKEN:
            status, answer = await face.post("/v1/chat/completions", {**body, "max_tokens": 1})
            assert status == 200, (body if len(str(body)) < 500 else "", answer)


async def test_lists_of_ids_of_an_evaluation_pass_however_many_there_are() -> None:
    async with open_face(max_model_len=2_100, num_blocks=20_000) as face:
        prompts = [[72] * 2_048 for _ in range(32)]
        status, answer = await face.post("/v1/completions", {"prompt": prompts, "max_tokens": 1})
        assert (status, len(answer.get("choices", ()))) == (200, 32), answer
        assert answer["usage"]["prompt_tokens"] == 32 * 2_048
