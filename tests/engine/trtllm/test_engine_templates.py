"""The chat template that comes with an engine's files writes the turns that its model was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.errors import InvalidRequestError
from quartet.media.items import MediaFile, MediaKind
from quartet.text.chat_message import ChatMessage
from quartet.text.chat_template import ChatTemplate
from quartet.text.tokenizer import SpecialTokens

FILE = Path(__file__).parents[3] / "configs" / "engines" / "llava-v1.6-mistral-7b" / "template.jinja"
PICTURE = MediaFile(MediaKind.IMAGE, b"\x89PNG")


def rendered(*messages: ChatMessage) -> str:
    special_tokens = SpecialTokens(named={"bos_token": "<s>", "eos_token": "</s>"})
    return ChatTemplate(FILE.read_text(encoding="utf-8"), special_tokens).render(messages)


def test_pictures_come_before_the_text_of_their_turn() -> None:
    question = ChatMessage("user", ("Compare", PICTURE, " these.", PICTURE))
    assert rendered(question) == "<s>[INST] <image>\n<image>\nCompare these. [/INST]"


def test_text_alone_needs_no_pieces() -> None:
    assert rendered(ChatMessage("user", "What is a cat?")) == "<s>[INST] What is a cat? [/INST]"


def test_later_turns_follow_the_answers_and_a_system_text_opens_the_first_one_only() -> None:
    chat = (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", (PICTURE, "What is this?")),
        ChatMessage("assistant", "A cat."),
        ChatMessage("user", "Sure?"),
    )
    assert rendered(*chat) == ("<s>[INST] <image>\nBe brief.\n\nWhat is this? [/INST] A cat.</s>[INST] Sure? [/INST]")


@pytest.mark.parametrize(
    "messages",
    [
        (ChatMessage("tool", "42"),),
        (ChatMessage("user", "Hello."), ChatMessage("system", "Be brief.")),
    ],
)
def test_a_message_without_a_turn_in_the_template_is_refused(messages: tuple[ChatMessage, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="refuses"):
        rendered(*messages)
