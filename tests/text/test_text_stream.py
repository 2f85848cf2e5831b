"""Tokens on their way to the user: what is shown, what counts, where it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.errors import InvalidRequestError
from quartet.text.stop_strings import StopStrings
from quartet.text.text_stream import TextDelta, TextStream
from quartet.text.tokenizer import Tokenizer
from tests.text import builders

MakeTokenizer = Callable[[], Tokenizer]
KINDS = [builders.byte_level_tokenizer, builders.byte_fallback_tokenizer, builders.word_piece_tokenizer]


@dataclass(frozen=True)
class Outcome:
    text: str
    token_ids: tuple[int, ...]
    stop_string: str | None


def collect(stream: TextStream, pieces: Sequence[Sequence[int]]) -> Outcome:
    deltas = [*(stream.push(piece) for piece in pieces), stream.finish()]
    stops = [delta.stop_string for delta in deltas if delta.stop_string is not None]
    assert len(stops) <= 1
    ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
    return Outcome("".join(delta.text for delta in deltas), ids, stops[0] if stops else None)


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    """Ids of tokens by their own text, one each."""
    found = [tokenizer.token_to_id(token) for token in tokens]
    assert all(token_id is not None for token_id in found), tokens
    return [token_id for token_id in found if token_id is not None]


def letters(text: str) -> list[int]:
    """One byte-level token for each character."""
    return ids_of(builders.byte_level_tokenizer(), *text)


def test_without_stop_strings_every_token_is_shown_at_once() -> None:
    tokenizer = builders.byte_level_tokenizer()
    ids = tokenizer.encode("the quick 🦊", add_special_tokens=False)
    stream = TextStream(tokenizer)
    deltas = [stream.push([token_id]) for token_id in ids]
    assert [delta.token_ids for delta in deltas] == [(token_id,) for token_id in ids]
    assert "".join(delta.text for delta in deltas) == "the quick 🦊"
    assert stream.finish().is_empty


def test_without_a_tokenizer_only_ids_are_shown() -> None:
    stream = TextStream(None)
    assert stream.push([5, 6]) == TextDelta("", (5, 6))
    assert stream.finish().is_empty
    assert stream.push([7]).is_empty


def test_tokens_of_the_stop_string_and_past_it_are_neither_shown_nor_counted() -> None:
    stream = TextStream(builders.byte_level_tokenizer(), StopStrings(["STOP"]))
    outcome = collect(stream, [letters("abS"), letters("TOP"), letters("xyz")])
    assert outcome == Outcome("ab", tuple(letters("ab")), "STOP")
    assert stream.finish().is_empty


def test_the_token_in_whose_middle_the_stop_string_begins_counts() -> None:
    tokenizer = builders.byte_level_tokenizer()
    ids = ids_of(tokenizer, "a", "<think>", "b")
    assert collect(TextStream(tokenizer, StopStrings(["nk>b"])), [ids]) == Outcome("a<thi", tuple(ids[:2]), "nk>b")


def test_a_stop_string_that_is_shown_takes_its_tokens_along() -> None:
    stream = TextStream(builders.byte_level_tokenizer(), StopStrings(["ST"]), include_stop=True)
    assert collect(stream, [letters("abSTx")]) == Outcome("abST", tuple(letters("abST")), "ST")


def test_tokens_wait_for_text_that_is_held_back() -> None:
    stream = TextStream(builders.byte_level_tokenizer(), StopStrings(["STOP"]))
    assert stream.push(letters("aS")) == TextDelta("a", tuple(letters("a")))
    assert stream.push(letters("T")).is_empty
    assert stream.push(letters("x")) == TextDelta("STx", tuple(letters("STx")))


def test_text_held_back_comes_when_the_choice_ends_for_another_reason() -> None:
    stream = TextStream(builders.byte_level_tokenizer(), StopStrings(["STOP"]))
    stream.push(letters("aST"))
    assert stream.finish() == TextDelta("ST", tuple(letters("ST")))
    assert stream.finish().is_empty


def test_an_incomplete_last_character_is_shown_and_counted_at_the_end() -> None:
    tokenizer = builders.byte_level_tokenizer()
    half = ids_of(tokenizer, "ð", "Ł")
    stream = TextStream(tokenizer, StopStrings(["STOP"]))
    assert stream.push(half).is_empty
    assert stream.finish() == TextDelta("�", tuple(half))


def test_parts_of_a_character_that_begins_a_stop_string_do_not_count() -> None:
    tokenizer = builders.byte_level_tokenizer()
    fox = ids_of(tokenizer, "ð", "Ł", "¦", "Ĭ")
    assert collect(TextStream(tokenizer, StopStrings(["🦊"])), [letters("a"), fox]) == Outcome(
        "a", tuple(letters("a")), "🦊"
    )


def test_a_special_token_without_text_is_shown_when_nothing_is_held_back() -> None:
    tokenizer = builders.byte_level_tokenizer()
    [eos] = ids_of(tokenizer, builders.EOS)
    stream = TextStream(tokenizer, StopStrings(["STOP"]))
    assert stream.push([*letters("a"), eos]) == TextDelta("a", (*letters("a"), eos))


def test_special_tokens_are_text_where_they_are_wanted() -> None:
    tokenizer = builders.byte_level_tokenizer()
    stream = TextStream(tokenizer, skip_special_tokens=False)
    assert stream.push(ids_of(tokenizer, builders.EOS)).text == builders.EOS


def test_the_text_may_continue_the_prompt() -> None:
    tokenizer = builders.byte_fallback_tokenizer()
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert collect(TextStream(tokenizer, prompt_tail=ids), [ids]).text == " the fox"


def test_a_stop_string_may_end_in_the_mark_of_a_broken_character() -> None:
    tokenizer = builders.byte_level_tokenizer()
    stream = TextStream(tokenizer, StopStrings(["b�"]))
    outcome = collect(stream, [letters("ab"), ids_of(tokenizer, "ð")])
    assert outcome == Outcome("a", tuple(letters("a")), "b�")


def test_an_empty_stop_string_is_refused_when_the_choice_starts() -> None:
    with pytest.raises(InvalidRequestError):
        TextStream(builders.byte_level_tokenizer(), StopStrings([""]))


@pytest.mark.parametrize("make_tokenizer", KINDS)
@given(data=st.data(), include_stop=st.booleans())
def test_the_splitting_into_pushes_makes_no_difference(
    make_tokenizer: MakeTokenizer, data: st.DataObject, include_stop: bool
) -> None:
    tokenizer = make_tokenizer()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=12))
    whole = collect(TextStream(tokenizer), [ids]).text
    # Mostly stop strings that do occur.
    occurring = [whole[begin : begin + size] for begin in range(len(whole)) for size in (1, 2, 5)]
    stops = data.draw(st.lists(st.sampled_from([*occurring, "never so"]), max_size=3))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)))))
    pieces = [ids[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    at_once = collect(TextStream(tokenizer, StopStrings(stops), include_stop=include_stop), [ids])
    assert collect(TextStream(tokenizer, StopStrings(stops), include_stop=include_stop), pieces) == at_once


@given(data=st.data(), include_stop=st.booleans())
def test_tokens_shown_are_those_that_begin_before_the_end_of_the_text_shown(
    data: st.DataObject, include_stop: bool
) -> None:
    tokenizer = builders.byte_level_tokenizer()
    text = data.draw(st.text(alphabet="ab the☃🦊", max_size=20))
    stop = data.draw(st.text(alphabet="ab the☃🦊", min_size=1, max_size=4))
    ids = tokenizer.encode(text, add_special_tokens=False)
    outcome = collect(TextStream(tokenizer, StopStrings([stop]), include_stop=include_stop), [ids])
    position = text.find(stop)
    end = len(text) if position < 0 else position + (len(stop) if include_stop else 0)
    # Characters complete before a token say where it begins: decoding cuts a half character off again.
    begins = [len(tokenizer.decode(ids[:index]).rstrip("�")) for index in range(len(ids))]
    assert outcome.text == text[:end]
    assert outcome.token_ids == tuple(token_id for token_id, begin in zip(ids, begins, strict=True) if begin < end)
    assert outcome.stop_string == (None if position < 0 else stop)
