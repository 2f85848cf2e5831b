"""Bodies of responses and messages in which anything may stand anywhere: they are read, or refused by a field."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.api.anthropic.requests import read_count, read_messages
from quartet.api.openai.requests import Asked, Caller
from quartet.api.request import check_start
from quartet.api.responses.requests import read_response
from quartet.errors import InvalidRequestError
from tests.router.http.answering import run

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, None]}}}
RESPONSE = {
    "model": "tiny",
    "instructions": "Be brief.",
    "input": [
        {"role": "developer", "content": "a"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:,"}],
        },
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "metadata": {"a": "b"},
    "max_output_tokens": 5,
    "stop": ["a"],
    "stream": True,
}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
MESSAGE = {
    "model": "tiny",
    "system": [{"type": "text", "text": "a"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, PICTURE]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "a", "signature": "b"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [PICTURE]}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1_024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "max_tokens": 5,
    "stop_sequences": ["a"],
}
Read = Callable[[Mapping[str, Any], Caller], Generator[int, None, Asked]]

#: Words and values that mean something somewhere.
KNOWN = [
    "type",
    "text",
    "image",
    "tool_use",
    "tool_result",
    "function",
    "function_call",
    "json_object",
    "assistant",
    "",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.sampled_from(KNOWN) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=9), inner),
    max_leaves=5,
) | st.just(array("I", [5] * 600))  # as a long list of ids comes


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in ``value``, with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from places(value[key])


def changed(body: Any, draw: Callable[[Any], Any]) -> Any:
    """``body`` with up to three values that are others, or gone."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(list(places(body))))
        if draw(st.booleans()):
            container[key] = draw(VALUES)
        elif isinstance(container, dict):
            del container[key]
            container[draw(st.sampled_from(KNOWN))] = draw(VALUES)
        if not body:
            break
    return body


@pytest.mark.parametrize(("read", "body"), [(read_response, RESPONSE), (read_messages, MESSAGE), (read_count, MESSAGE)])
@given(data=st.data())
def test_a_body_is_read_or_refused_by_a_field_that_is_its_own(read: Read, body: dict[str, Any], data: Any) -> None:
    sent = changed(body, data.draw)
    try:
        asked = run(read(sent, Caller()))
        names = asked.field_names
    except InvalidRequestError as error:
        assert error.message
        check_field(error.field, sent)
        return
    assert names is not None
    try:
        check_start(asked.starts[0])
    except InvalidRequestError as error:
        names.rename(error)
        check_field(error.field, sent)


def check_field(field: str | None, body: Mapping[str, Any]) -> None:
    """The path begins with a field of the body, or with one that is missing."""
    assert field is not None
    known = {"input", "messages", "max_tokens", *[name[:64] for name in body]}
    assert any(field == name or field.startswith((f"{name}.", f"{name}[")) for name in known), field


def test_the_bodies_themselves_are_read() -> None:
    assert run(read_response(RESPONSE, Caller())).streams
    assert run(read_messages(MESSAGE, Caller())).starts[0].has_media
