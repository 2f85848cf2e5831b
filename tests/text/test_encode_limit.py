"""A text with far too many tokens is refused before all of it is tokenized; any other has the tokens it ever had."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.errors import InvalidRequestError, PromptTooLongError, RequestCancelledError
from quartet.text import tokenizer as tokenizer_module
from quartet.text.chat_message import ChatMessage
from quartet.text.chat_template import ChatTemplate
from quartet.text.model_text import ModelText
from quartet.text.tokenizer import EncodeLimit, SpecialTokens, Tokenizer
from tests.text.builders import byte_fallback_backend, byte_level_backend, byte_level_tokenizer

# Both keep every character of a text, as those of nearly all language models do.
TOKENIZERS = [Tokenizer(byte_level_backend()), Tokenizer(byte_fallback_backend())]
WORDS = st.sampled_from(["the fox ", " ", "\n\n", "dogs", "你好", "é", "👋🏽", "<|turn|>", "a"])


class CountingTokenizer(Tokenizer):
    """Notes how many characters it has tokenized."""

    num_characters = 0

    def _encode(self, text: str, add_special_tokens: bool, field: str) -> list[int]:
        self.num_characters += len(text)
        return super()._encode(text, add_special_tokens, field)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(words=st.lists(st.tuples(WORDS, st.integers(1, 40)), max_size=12), spare=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_a_text_that_fits_has_the_tokens_it_has_without_a_limit(
    tokenizer: Tokenizer, words: list[tuple[str, int]], spare: int
) -> None:
    text = "".join(word * times for word, times in words)
    token_ids = tokenizer.encode(text)
    # A few pieces, so that the count in pieces is tried too.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "_PIECE_LENGTH", 50)
        patch.setattr(tokenizer_module, "_USUAL_TOKEN_LENGTH", 1)
        assert tokenizer.encode(text, limit=EncodeLimit(len(token_ids) + spare)) == token_ids


def test_a_text_that_no_tokens_could_hold_is_not_tokenized_at_all() -> None:
    tokenizer = CountingTokenizer(byte_level_backend())
    longest = max(tokenizer._backend.get_vocab(), key=lambda token: len(token.encode()))
    assert tokenizer.longest_token_bytes == len(longest.encode()) > 1
    text = "a" * (10 * tokenizer.longest_token_bytes + 1)
    with pytest.raises(PromptTooLongError, match=f"{len(text)} characters; 10 tokens have at most") as caught:
        tokenizer.encode(text, field="text", limit=EncodeLimit(10))
    assert caught.value.field == "text"
    assert tokenizer.num_characters == 0


def test_a_text_with_far_too_many_tokens_is_tokenized_no_further_than_shows_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer_module, "_PIECE_LENGTH", 1_000)
    tokenizer = CountingTokenizer(byte_level_backend())
    text = "x" * 1_000_000
    with pytest.raises(PromptTooLongError, match=r"more than \d+ tokens; it and the answer have room for 100000"):
        tokenizer.encode(text, limit=EncodeLimit(100_000))
    assert 100_000 < tokenizer.num_characters < 200_000


def test_a_text_that_nobody_waits_for_is_tokenized_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "_PIECE_LENGTH", 1_000)
    tokenizer = CountingTokenizer(byte_level_backend())
    answers = iter([True, True, False])
    with pytest.raises(RequestCancelledError):
        tokenizer.encode("x" * 1_000_000, limit=EncodeLimit(100_000, lambda: next(answers)))
    assert tokenizer.num_characters == 2_000


def test_half_a_character_in_a_piece_is_still_the_callers_fault() -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        byte_level_tokenizer().encode("a" * 900 + "\ud800", limit=EncodeLimit(100))


def test_a_chat_is_written_no_longer_than_its_tokens_could_be() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", SpecialTokens())
    text = ModelText(byte_level_tokenizer(), template, (), 500)
    messages = [ChatMessage("user", "fox " * 10)] * 100
    assert len(text.encode_messages(messages, limit=EncodeLimit(4_000))) == len(text.encode_messages(messages))
    with pytest.raises(PromptTooLongError, match="too long") as caught:
        text.encode_messages(messages, limit=EncodeLimit(10))
    assert caught.value.field == "messages"
