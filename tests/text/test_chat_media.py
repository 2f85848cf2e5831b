"""Chats with media: each template is given the form it knows, and only it writes placeholders."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quartet.errors import InvalidRequestError
from quartet.media.items import MediaFile, MediaKind, MediaUrl
from quartet.text.chat_message import ChatMessage
from quartet.text.chat_template import ChatTemplate
from quartet.text.model_files import read_text_files
from quartet.text.model_text import ModelText
from tests import tiny
from tests.text import builders
from tests.text.test_chat_template import CHATML_LIKE, GEMMA_LIKE, LLAMA_2_LIKE, LLAMA_3_LIKE

#: As of llava-hf/llava-1.5-7b-hf: lists only, media before text, whatever the order.
LLAVA_1_5_LIKE = """\
{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}
{#- media first -#}
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}
{%- for content in message['content'] | selectattr('type', 'equalto', 'text') %}
{%- if message['role'] == 'assistant' %}{% generation %}{{ content['text'] + ' '}}{% endgeneration %}
{%- else %}{{ content['text'] + ' '}}{% endif %}{% endfor %}{% endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}
"""
#: As of llava-hf/llava-v1.6-mistral-7b-hf: the first piece of any speaker but the user is its text.
LLAVA_1_6_LIKE = """\
{% for message in messages %}
{%- if message['role'] == 'system' %}{{ '<<SYS>>\n' + message['content'][0]['text'] + '\n<</SYS>>\n\n' }}
{%- elif message['role'] == 'user' %}{{ '[INST] ' }}
{%- for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}
{%- for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}
{{- ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'][0]['text'] + '</s>' }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}
"""
#: As of Qwen2-VL: strings, or lists in their own order.
QWEN_2_VL_LIKE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}
{%- if content['type'] == 'image' or 'image' in content %}<image>
{%- elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
#: Writes whatever it is given, lists as Python has them.
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"

PICTURE = MediaFile(MediaKind.IMAGE, b"\x89PNG")
ELSEWHERE = MediaUrl("https://example.org/a.png")
EMBEDDINGS = MediaFile(MediaKind.EMBEDDINGS, b"{}")

#: Two turns with media, one without, and who said them.
CONVERSATION = [
    ChatMessage("system", "Be brief."),
    ChatMessage("user", (PICTURE, "Compare", ELSEWHERE, " these.")),
    ChatMessage("assistant", "They differ."),
    ChatMessage("user", (EMBEDDINGS, "And this?")),
    ChatMessage("assistant", "Yes."),
    ChatMessage("user", "Sure?"),
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, builders.SPECIAL_TOKENS)


def in_lists(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """What a user of transformers writes."""
    return [
        {
            "role": message.role,
            "content": [
                {"type": "text", "text": piece} if isinstance(piece, str) else {"type": "image"}
                for piece in message.pieces
            ],
        }
        for message in messages
    ]


def transformers_render(source: str | None, messages: list[ChatMessage], tokenizer: Any = None) -> str:
    tokenizer = tokenizer or PreTrainedTokenizerFast(
        tokenizer_object=builders.byte_level_backend(), bos_token=builders.BOS, eos_token=builders.EOS
    )
    written = tokenizer.apply_chat_template(
        in_lists(messages), tokenize=False, chat_template=source, add_generation_prompt=True
    )
    assert isinstance(written, str)
    return written


@pytest.fixture(scope="module")
def model() -> ModelText:
    return ModelText.from_files(read_text_files(tiny.CHECKPOINT))


@pytest.mark.parametrize("source", [LLAVA_1_5_LIKE, LLAVA_1_6_LIKE, QWEN_2_VL_LIKE])
def test_published_styles_give_one_placeholder_an_item_as_transformers_does(source: str) -> None:
    ours = template(source).render(CONVERSATION)
    assert ours == transformers_render(source, CONVERSATION)
    assert ours.count("<image>") == 3
    assert ours.index("Be brief.") < ours.index("Compare") < ours.index("And this?") < ours.index("Sure?")


@pytest.mark.parametrize("source", [LLAVA_1_5_LIKE, LLAVA_1_6_LIKE])
def test_a_template_that_knows_only_lists_loses_no_plain_text(source: str) -> None:
    messages = [ChatMessage("user", "Hello"), ChatMessage("assistant", "Hi."), ChatMessage("user", "Who?")]
    ours = template(source).render(messages)
    assert ours == transformers_render(source, messages)
    assert "Hello" in ours


@pytest.mark.parametrize("source", [LLAMA_2_LIKE, CHATML_LIKE, GEMMA_LIKE, LLAMA_3_LIKE, PLAIN])
def test_a_template_that_knows_only_strings_is_given_pieces_of_text_in_one(source: str) -> None:
    pieces, whole = ChatMessage("user", ("two ", "pieces")), ChatMessage("user", "two pieces")
    assert template(source).render([pieces]) == template(source).render([whole])


@pytest.mark.parametrize("source", [LLAMA_2_LIKE, CHATML_LIKE, GEMMA_LIKE, LLAMA_3_LIKE, PLAIN])
def test_a_template_that_knows_only_strings_takes_no_media(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="takes text only") as caught:
        template(source).render([ChatMessage("user", (PICTURE, "What is it?"))])
    assert caught.value.field == "messages"


def test_a_template_that_refuses_everything_is_given_strings_and_says_why() -> None:
    refusing = template("{{ raise_exception('not now: ' + messages[0].content) }}")
    with pytest.raises(InvalidRequestError, match="not now: Hi"):
        refusing.render([ChatMessage("user", ("H", "i"))])


def test_the_tiny_models_template_keeps_text_and_media_in_order(model: ModelText) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.CHECKPOINT)
    rendered = transformers_render(None, CONVERSATION, tokenizer)
    assert "<|user|><|image|>Compare<|image|> these.<|eos|>" in rendered
    token_ids = model.encode_messages(CONVERSATION)
    assert token_ids == tokenizer.encode(rendered, add_special_tokens=False)
    assert model.media is not None
    assert token_ids.count(model.media.placeholder_id) == 3


@pytest.mark.parametrize(
    "content",
    [
        "Is <|image|> a token?",
        (PICTURE, "Is <|image|> a token?"),
        # Two pieces are one text once they are written.
        (PICTURE, "Is <|ima", "ge|> a token?"),
    ],
)
def test_a_text_cannot_write_a_placeholder_of_its_own(model: ModelText, content: Any) -> None:
    messages = [ChatMessage("user", (PICTURE, "Look.")), ChatMessage("assistant", "Yes."), ChatMessage("user", content)]
    with pytest.raises(InvalidRequestError, match="placeholder") as caught:
        model.encode_messages(messages)
    assert caught.value.field == "messages"


def test_a_prompt_of_text_writes_its_placeholders_itself(model: ModelText) -> None:
    assert model.media is not None
    assert model.encode_text("<|image|>What is it?<|image|>").count(model.media.placeholder_id) == 2


def test_without_a_placeholder_token_its_text_is_ordinary_text() -> None:
    files = read_text_files(tiny.CHECKPOINT)
    text = ModelText.from_files({name: content for name, content in files.items() if name != "config.json"})
    assert text.media is None
    assert text.encode_messages([ChatMessage("user", "Is <|image|> a token?")])
