"""Tools, calls, reasoning and arguments reach chat templates in the form that these take, as transformers passes it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from quartet.errors import InvalidRequestError
from quartet.text.chat_message import ChatMessage, Tool, ToolCall
from quartet.text.chat_template import ChatTemplate
from quartet.text.json_object import MAX_JSON_DEPTH, JsonObject
from quartet.text.model_text import ModelText
from quartet.text.tokenizer import Tokenizer
from tests.text import builders

_TURNS = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
"""
_END = """\
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

#: Takes arguments as an object or as text, as Qwen's do; keeps reasoning.
TOJSON_LIKE = (
    "{%- for tool in tools or () %}{{ tool | tojson ~ '\\n' }}{% endfor %}"
    + _TURNS
    + """\
    {%- if message.reasoning_content is string %}{{ '<think>' ~ message.reasoning_content ~ '</think>' }}{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or () %}{% set made = call.function.arguments %}
        {{- '<tool_call>{"name": "' ~ call.function.name ~ '", "arguments": ' }}
        {{- made if made is string else made | tojson }}{{ '}</tool_call>' }}
    {%- endfor %}
    {%- if message.tool_call_id %}{{ '=' + message.tool_call_id + '@' + message.name }}{% endif %}
"""
    + _END
)

#: Reads arguments one by one, as those of GLM and Qwen3 Coder do; and effort, as that of gpt-oss.
ITEMS_LIKE = (
    "{{- 'effort: ' ~ (reasoning_effort or 'medium') }}"
    "{%- for tool in tools or () %}{{ tool.function.name ~ (tool.function.parameters.properties | join(',')) }}"
    "{%- endfor %}"
    + _TURNS
    + """\
    {%- if message.thinking %}{{ '(' + message.thinking + ')' }}{% endif %}{{ message.content }}
    {%- for call in message.tool_calls or () %}{{ '<call>' ~ call.function.name }}
        {%- for key, value in call.function.arguments.items() %}{{ ' ' ~ key ~ '=' ~ value | tojson }}{% endfor %}
    {%- endfor %}
"""
    + _END
)

#: Demands ids of nine characters, as Mistral's do, and lists of pieces.
PIECES_LIKE = (
    _TURNS
    + """\
    {%- for piece in message.content %}{{ piece.text }}{% endfor %}
    {%- for call in message.tool_calls or () %}
        {%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
        {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
    {%- endfor %}
"""
    + _END
)

#: Joins arguments as text, and shows calls only where the content is none, as DeepSeek's first ones do.
JOINING_LIKE = (
    _TURNS
    + """\
    {%- if message.content is none %}{% for call in message.tool_calls %}
        {{- call.type + ' ' + call.function.name + '```' + call.function.arguments + '```' }}{% endfor %}
    {%- else %}{{ message.content }}{% endif %}
"""
    + _END
)

ARGUMENTS = {"city": "Köln", "days": [1, 2.5, None], "nested": {"<b>": True}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}
TOOLS = [Tool("weather", "Says the <weather>.", JsonObject.of_text(json.dumps(SCHEMA))), Tool("now", strict=True)]
PLAIN_TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Says the <weather>.", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
            "strict": True,
        },
    },
]
CALL = ToolCall("weather", JsonObject.of_text(json.dumps(ARGUMENTS, ensure_ascii=False)), "call00001")
MESSAGES = [
    ChatMessage("user", "How is it?"),
    ChatMessage("assistant", "", tool_calls=(CALL, ToolCall("now", id="call00002")), reasoning="Look."),
    ChatMessage("tool", "sunny", name="weather", tool_call_id="call00001"),
]


def template(source: str, **changes: Any) -> ChatTemplate:
    return ChatTemplate(source, builders.SPECIAL_TOKENS, **changes)


def transformers_render(source: str, *, has_pieces: bool, **arguments: Any) -> str:
    def content(text: str) -> object:
        return [{"type": "text", "text": text}] if has_pieces else text

    calls = [(ARGUMENTS, "weather", "call00001"), ({}, "now", "call00002")]
    messages = [
        {"role": "user", "content": content("How is it?")},
        {
            "role": "assistant",
            "content": content(""),
            "reasoning_content": "Look.",
            "thinking": "Look.",
            "tool_calls": [
                {"id": id, "type": "function", "function": {"name": name, "arguments": value}}
                for value, name, id in calls
            ],
        },
        {"role": "tool", "content": content("sunny"), "name": "weather", "tool_call_id": "call00001"},
    ]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=builders.byte_level_backend())
    rendered = tokenizer.apply_chat_template(
        messages, tools=PLAIN_TOOLS, tokenize=False, chat_template=source, add_generation_prompt=True, **arguments
    )
    assert isinstance(rendered, str)
    return rendered


@pytest.mark.parametrize(
    "source",
    [
        TOJSON_LIKE,
        ITEMS_LIKE,
        PIECES_LIKE,
    ],
    ids=["tojson", "items", "pieces"],
)
def test_calls_and_tools_are_written_as_transformers_writes_them(source: str) -> None:
    ours = template(source).render(MESSAGES, tools=TOOLS, arguments={"reasoning_effort": "low"})
    assert "weather" in ours and "Köln" in ours and "days" in ours
    assert ours == transformers_render(source, has_pieces=source is PIECES_LIKE, reasoning_effort="low")


def test_calls_are_also_shown_where_a_template_wants_text_and_no_content_beside_them() -> None:
    ours = template(JOINING_LIKE).render(MESSAGES, tools=TOOLS)
    assert f"<|assistant|>function weather```{CALL.arguments.text}```function now```{{}}```<|tool|>" in ours


def test_what_a_template_reads_is_known() -> None:
    known = template(
        "{%- if not tools is defined %}{%- set tools = none %}{% endif %}{{ bos_token }}{{ strftime_now('%Y') }}"
        "{% if enable_thinking %}{{ messages }}{% endif %}{% for x in range(3) %}{{ tools }}{{ x }}{% endfor %}"
    )
    assert known.takes_tools
    assert known.arguments == ("enable_thinking",)
    assert not template("{{ messages }}{{ add_generation_prompt }}").takes_tools


def test_a_template_of_its_own_for_tools_is_taken_where_there_are_some() -> None:
    two = template("plain{{ messages[0].content }}", source_for_tools="tools{{ tools[0].function.name }}")
    assert two.takes_tools
    assert two.render([ChatMessage("user", "hi")]) == "plainhi"
    assert two.render([ChatMessage("user", "hi")], tools=TOOLS) == "toolsweather"


def test_reasoning_beside_content_and_calls_is_left_out_where_a_template_takes_one_of_them() -> None:
    turn = ChatMessage("assistant", "Wait.", tool_calls=(CALL,), reasoning="Look.")
    assert "(Look.)" not in template(ITEMS_LIKE).render([turn])
    assert "<think>Look.</think>Wait." in template(TOJSON_LIKE).render([turn])


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ("{}", True),
        ('{"a": "\\"[{[{"}', True),
        ("[]", False),
        ("{", False),
        ('{"a": NaN}', False),
        ('{"a": ' * 40 + "[" * (MAX_JSON_DEPTH - 40) + "]" * (MAX_JSON_DEPTH - 40) + "}" * 40, True),
        ('{"a": ' * (MAX_JSON_DEPTH + 1) + "0" + "}" * (MAX_JSON_DEPTH + 1), False),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", False),
        ('{"a": "' + "[" * 1_000 + '"}', True),
    ],
)
def test_json_that_is_none_or_nested_too_deep_is_refused_by_its_place(text: str, is_taken: bool) -> None:
    value = JsonObject.of_text(text)
    call = ChatMessage("assistant", "", tool_calls=(ToolCall("f"), ToolCall("f", value)))
    backend = Tokenizer(builders.byte_level_backend(), builders.SPECIAL_TOKENS)
    model = ModelText(backend, template(TOJSON_LIKE), (), 500)
    for arguments, field in (
        ({"messages": [call]}, "messages[0].tool_calls[1].arguments"),
        ({"messages": [ChatMessage("user", "")], "tools": [Tool("f", "", value)]}, "tools[0].parameters"),
        ({"messages": [ChatMessage("user", "")], "arguments": value}, "template_arguments"),
    ):
        if is_taken:
            assert model.encode_messages(**arguments)  # type: ignore[arg-type]
            continue
        with pytest.raises(InvalidRequestError) as caught:
            model.encode_messages(**arguments)  # type: ignore[arg-type]
        assert caught.value.field == field


def test_arguments_can_not_replace_the_chat() -> None:
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(InvalidRequestError, match=name):
            template(TOJSON_LIKE).render([ChatMessage("user", "")], arguments={name: ()})
