"""Chat templates give the text that transformers gives, and stay within bounds."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quartet.errors import InvalidRequestError, ModelFilesError
from quartet.text import chat_template
from quartet.text.chat_message import ChatMessage
from quartet.text.chat_template import ChatTemplate
from quartet.text.model_files import read_text_files
from quartet.text.model_text import ModelText
from tests import tiny
from tests.text import builders

LLAMA_2_LIKE = """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{%- else %}{% set loop_messages = messages %}{% set system = '' %}{% endif %}
{% for message in loop_messages %}
  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Roles must alternate: user, assistant, user, ...') }}
  {% endif %}
  {% set content = system + message['content'] if loop.index0 == 0 else message['content'] %}
  {% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
  {%- elif message['role'] == 'assistant' %}{% generation %}{{ ' ' + content.strip() + ' ' + eos_token }}
  {%- endgeneration %}{% endif %}
{% endfor %}
"""
CHATML_LIKE = """\
{%- if tools %}{{ '# Tools: ' + tools | tojson }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
GEMMA_LIKE = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
LLAMA_3_LIKE = """\
{%- set ns = namespace(num_turns=0) %}
{{- bos_token }}
{%- if documents is none and not custom_tools is defined %}{{- '{"year": ' ~ strftime_now('%Y') ~ '}\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.num_turns = ns.num_turns + 1 %}
    {{- '<|' ~ message['role'] ~ '|>' ~ message | tojson(indent=1) ~ unk_token }}
    {%- if 'name' in message %}{{- ' by ' + message.name | upper }}{% endif %}
{%- endfor %}
{{- ns.num_turns }}
"""
TEMPLATES = [LLAMA_2_LIKE, CHATML_LIKE, GEMMA_LIKE, LLAMA_3_LIKE]

contents = st.one_of(st.text(max_size=20), st.sampled_from(["<b>'&\"</b>", " padded\n", "{{ 7 * 7 }}", "</s>"]))
dialogues = st.lists(contents, min_size=1, max_size=5).map(
    lambda texts: [ChatMessage("assistant" if index % 2 else "user", text) for index, text in enumerate(texts)]
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, builders.SPECIAL_TOKENS)


def transformers_render(source: str, messages: list[ChatMessage], **arguments: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=builders.byte_level_backend(), bos_token=builders.BOS, eos_token=builders.EOS
    )
    return render_with(tokenizer, messages, chat_template=source, **arguments)


def render_with(tokenizer: Any, messages: list[ChatMessage], **arguments: Any) -> str:
    plain = [
        {"role": one.role, "content": one.content} | ({} if one.name is None else {"name": one.name})
        for one in messages
    ]
    rendered = tokenizer.apply_chat_template(plain, tokenize=False, **arguments)
    assert isinstance(rendered, str)
    return rendered


@pytest.mark.parametrize("source", TEMPLATES)
@given(messages=dialogues, add_generation_prompt=st.booleans())
def test_published_styles_give_what_transformers_gives(
    source: str, messages: list[ChatMessage], add_generation_prompt: bool
) -> None:
    ours = template(source).render(messages, add_generation_prompt)
    assert ours == transformers_render(source, messages, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize("source", [LLAMA_2_LIKE, CHATML_LIKE, LLAMA_3_LIKE])
def test_a_system_message_gives_what_transformers_gives(source: str) -> None:
    messages = [ChatMessage("system", "Be <brief>."), ChatMessage("user", "Grüße")]
    assert template(source).render(messages) == transformers_render(source, messages, add_generation_prompt=True)


def test_extra_variables_reach_the_template_as_in_transformers() -> None:
    messages = [ChatMessage("user", "hi")]
    ours = template(CHATML_LIKE).render(messages, arguments={"enable_thinking": False})
    assert "</think>" in ours
    assert ours == transformers_render(CHATML_LIKE, messages, add_generation_prompt=True, enable_thinking=False)


def test_a_speakers_name_reaches_the_template() -> None:
    messages = [ChatMessage("user", "hi", name="ada"), ChatMessage("skip", "not this")]
    ours = template(LLAMA_3_LIKE).render(messages)
    assert "by ADA" in ours
    assert ours == transformers_render(LLAMA_3_LIKE, messages, add_generation_prompt=True)


def test_the_tiny_models_template_gives_what_transformers_gives() -> None:
    messages = [ChatMessage("system", "Be good."), ChatMessage("user", "The river is long.")]
    text = ModelText.from_files(read_text_files(tiny.CHECKPOINT))
    assert text.chat_template is not None
    tokenizer = AutoTokenizer.from_pretrained(tiny.CHECKPOINT)
    rendered = render_with(tokenizer, messages, add_generation_prompt=True)
    assert text.chat_template.render(messages) == rendered
    assert text.encode_messages(messages) == tokenizer.encode(rendered, add_special_tokens=False)


def test_the_date_comes_from_the_clock_given() -> None:
    stamped = ChatTemplate("{{ strftime_now('%d %b %Y') }}", builders.SPECIAL_TOKENS, now=lambda: datetime(2031, 2, 3))
    assert stamped.render([ChatMessage("user", "")]) == "03 Feb 2031"


def test_a_templates_refusal_is_an_invalid_request_with_the_templates_message() -> None:
    with pytest.raises(InvalidRequestError, match="System role not supported") as caught:
        template(GEMMA_LIKE).render([ChatMessage("system", "x")])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}{{ missing.attribute }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content | int / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro loop() %}{{ loop() }}{% endmacro %}{{ loop() }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 'x' | nope }}",
    ],
)
def test_an_error_in_a_template_does_not_quote_the_messages(source: str) -> None:
    with pytest.raises((InvalidRequestError, ModelFilesError)) as caught:
        template(source).render([ChatMessage("user", "secret")])
    assert "secret" not in caught.value.message


def test_the_text_written_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_LENGTH", 1_000)
    endless = template("{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}{% endfor %}")
    with pytest.raises(InvalidRequestError, match="too long"):
        endless.render([ChatMessage("user", "")])


def test_no_messages_are_the_callers_fault() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template(CHATML_LIKE).render([])
    assert caught.value.field == "messages"


def test_a_template_that_does_not_parse_is_the_models_fault() -> None:
    with pytest.raises(ModelFilesError):
        template("{% for %}")


def config_files(chat_template: object) -> dict[str, bytes]:
    return {"tokenizer_config.json": json.dumps({"chat_template": chat_template}).encode()}


@pytest.mark.parametrize(
    "files",
    [
        config_files("yes"),
        config_files([{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]),
        config_files({"default": "yes"}),
        {**config_files("no"), "chat_template.jinja": b"yes"},
    ],
)
def test_the_default_template_is_found_wherever_it_is_kept(files: dict[str, bytes]) -> None:
    found = ChatTemplate.from_files(files, builders.SPECIAL_TOKENS)
    assert found is not None
    assert found.render([ChatMessage("user", "")]) == "yes"


def test_a_model_may_have_no_template() -> None:
    assert ChatTemplate.from_files({}, builders.SPECIAL_TOKENS) is None


@pytest.mark.parametrize("value", [7, [{"name": "rag", "template": "x"}], ["x"]])
def test_a_malformed_list_of_templates_is_the_models_fault(value: object) -> None:
    with pytest.raises(ModelFilesError):
        ChatTemplate.from_files(config_files(value), builders.SPECIAL_TOKENS)
