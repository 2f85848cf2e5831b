"""Text grows token by token, and is in the end what decoding everything gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from quartet.errors import InvalidRequestError
from quartet.text.detokenizer import (
    IncrementalDetokenizer,
    PieceDetokenizer,
    WindowDetokenizer,
    make_detokenizer,
)
from quartet.text.tokenizer import Tokenizer
from tests.text import builders

MakeTokenizer = Callable[[], Tokenizer]
TEXT_TOKENIZERS = [builders.byte_level_tokenizer, builders.byte_fallback_tokenizer, builders.gemma_like_tokenizer]
JOINING_TOKENIZERS = [*TEXT_TOKENIZERS, builders.metaspace_tokenizer]
ALL_TOKENIZERS = [*JOINING_TOKENIZERS, builders.word_piece_tokenizer]

CLUSTERS = [
    "👩‍👩‍👧‍👦",
    "👋🏽",
    "🇩🇪",
    "é",
    "ज़्",
    "你好",
    "한국",
    "שָׁ",
    " ",
    "  ",
    "\n",
    "▁",
    "Ġ",
    "\ufffd",
    "<s>",
    "the fox ",
]
texts = st.one_of(st.text(), st.lists(st.sampled_from(CLUSTERS)).map("".join))


def in_pieces(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    """Split at the given positions, taken modulo the length."""
    bounds = sorted({cut % (len(ids) + 1) for cut in cuts})
    return [ids[begin:end] for begin, end in zip([0, *bounds], [*bounds, len(ids)], strict=True)]


def stream(detokenizer: IncrementalDetokenizer, pieces: Sequence[Sequence[int]]) -> str:
    return "".join([*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()])


@pytest.mark.parametrize("make_tokenizer", TEXT_TOKENIZERS)
@given(text=texts, cuts=st.lists(st.integers(0, 10_000)), skip=st.booleans())
def test_pieces_of_any_text_add_up_to_the_decoded_text(
    make_tokenizer: MakeTokenizer, text: str, cuts: list[int], skip: bool
) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(text)
    decoded = tokenizer.decode(ids, skip_special_tokens=skip)
    assert stream(make_detokenizer(tokenizer, skip_special_tokens=skip), in_pieces(ids, cuts)) == decoded
    one_by_one = [(token_id,) for token_id in ids]
    assert stream(make_detokenizer(tokenizer, skip_special_tokens=skip), one_by_one) == decoded
    for _ in range(2):  # the tables are shared, so that the second finds more of it there
        seldom_pushed = make_detokenizer(tokenizer, skip_special_tokens=skip)
        shown: list[str] = []
        for token_id in ids:
            known = seldom_pushed.texts.get(token_id)
            shown.append(seldom_pushed.push((token_id,)) if known is None else known)
        assert "".join([*shown, seldom_pushed.finish()]) == decoded


@pytest.mark.parametrize("make_tokenizer", TEXT_TOKENIZERS)
@given(text=st.text(alphabet=st.characters(exclude_characters="�", exclude_categories=["Cs"])))
def test_text_shown_is_at_all_times_a_beginning_of_the_whole(make_tokenizer: MakeTokenizer, text: str) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    detokenizer = make_detokenizer(tokenizer)
    shown = ""
    for token_id in ids:
        shown += detokenizer.push([token_id])
        assert whole.startswith(shown)


@pytest.mark.parametrize("make_tokenizer", [builders.byte_level_tokenizer, builders.metaspace_tokenizer])
@given(data=st.data(), skip=st.booleans())
def test_any_ids_add_up_to_the_decoded_text(make_tokenizer: MakeTokenizer, data: st.DataObject, skip: bool) -> None:
    tokenizer = make_tokenizer()
    # Ids beyond the vocabulary come up too: models pad their tables.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5)))
    cuts = data.draw(st.lists(st.integers(0, 100)))
    decoded = tokenizer.decode(ids, skip_special_tokens=skip)
    assert stream(make_detokenizer(tokenizer, skip_special_tokens=skip), in_pieces(ids, cuts)) == decoded


@pytest.mark.parametrize("make_tokenizer", [builders.byte_fallback_tokenizer, builders.gemma_like_tokenizer])
@given(data=st.data(), skip=st.booleans())
def test_any_ids_without_broken_bytes_add_up_with_byte_fallback(
    make_tokenizer: MakeTokenizer, data: st.DataObject, skip: bool
) -> None:
    tokenizer = make_tokenizer()
    no_bytes = [i for i in range(tokenizer.vocab_size) if not str(tokenizer.token_text(i)).startswith("<0x")]
    character = st.characters(exclude_categories=["Cs"]).map(lambda c: [byte_id(tokenizer, b) for b in c.encode()])
    groups = data.draw(st.lists(st.one_of(st.sampled_from(no_bytes).map(lambda i: [i]), character)))
    ids = [token_id for group in groups for token_id in group]
    decoded = tokenizer.decode(ids, skip_special_tokens=skip)
    assert stream(make_detokenizer(tokenizer, skip_special_tokens=skip), [(i,) for i in ids]) == decoded


@pytest.mark.parametrize("make_tokenizer", [builders.byte_level_tokenizer, builders.byte_fallback_tokenizer])
def test_a_character_appears_with_its_last_byte_and_not_before(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    ids = [*tokenizer.encode("a", add_special_tokens=False), *(byte_id(tokenizer, byte) for byte in "🦊".encode())]
    detokenizer = make_detokenizer(tokenizer)
    shown = [detokenizer.push([token_id]) for token_id in ids]
    assert shown[-4:] == ["", "", "", "🦊"]
    assert not detokenizer.is_mid_character


@pytest.mark.parametrize("make_tokenizer", [builders.byte_level_tokenizer, builders.byte_fallback_tokenizer])
def test_broken_bytes_are_shown_at_once_and_good_text_around_them_survives(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    broken = [byte_id(tokenizer, byte) for byte in b"\xff" + "é".encode() + b"\xe4\xbd" + b"A"]
    detokenizer = make_detokenizer(tokenizer)
    assert [detokenizer.push([token_id]) for token_id in broken] == ["�", "", "é", "", "", "�A"]


def test_an_incomplete_character_is_released_when_the_stream_ends() -> None:
    tokenizer = builders.byte_level_tokenizer()
    detokenizer = make_detokenizer(tokenizer)
    assert detokenizer.push([byte_id(tokenizer, 0xF0), byte_id(tokenizer, 0x9F)]) == ""
    assert detokenizer.is_mid_character
    assert detokenizer.finish() == "�"
    assert detokenizer.finish() == ""


def test_the_first_word_keeps_its_space_only_where_it_continues_the_prompt() -> None:
    tokenizer = builders.byte_fallback_tokenizer()
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    prompt = tokenizer.encode("quick", add_special_tokens=False)
    assert stream(make_detokenizer(tokenizer), [ids]) == "the fox"
    assert stream(make_detokenizer(tokenizer, prompt_tail=prompt), [ids]) == " the fox"


def test_a_prompt_of_special_tokens_only_does_not_keep_the_first_space() -> None:
    tokenizer = builders.byte_fallback_tokenizer()
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    beginning = tokenizer.token_to_id("<s>")
    assert beginning in tokenizer.special_token_ids
    assert stream(make_detokenizer(tokenizer, prompt_tail=[beginning]), [ids]) == "the fox"


@pytest.mark.parametrize("make_tokenizer", ALL_TOKENIZERS)
@given(data=st.data())
def test_windows_give_what_decoding_gives_for_every_kind(make_tokenizer: MakeTokenizer, data: st.DataObject) -> None:
    tokenizer = make_tokenizer()
    sentence = data.draw(st.lists(st.sampled_from(["the", "fox", "foxes", "jumping", "stop", "你", "s,"]), min_size=1))
    ids = tokenizer.encode(" ".join(sentence))
    decoded = tokenizer.decode(ids)
    windows = WindowDetokenizer(tokenizer, skip_special_tokens=True)
    assert stream(windows, in_pieces(ids, data.draw(st.lists(st.integers(0, 100))))) == decoded


def test_spaces_are_stripped_also_where_another_stream_has_read_the_token_before() -> None:
    backend = builders.byte_fallback_backend()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = Tokenizer(backend, builders.SPECIAL_TOKENS)
    ids = [backend.token_to_id(token) for token in ("▁", "▁", "▁", "t")]
    for _ in range(2):
        detokenizer = make_detokenizer(tokenizer)
        assert isinstance(detokenizer, PieceDetokenizer)
        assert [detokenizer.push([token_id]) for token_id in ids] == ["", "", " ", "t"]
    assert tokenizer.decode(ids) == " t"


def test_windows_release_broken_bytes_after_at_most_four_tokens() -> None:
    tokenizer = builders.byte_level_tokenizer()
    windows = WindowDetokenizer(tokenizer, skip_special_tokens=True)
    shown = [windows.push([byte_id(tokenizer, 0xE4)]) for _ in range(8)]
    assert shown == ["", "", "", "����", "", "", "", "����"]


@pytest.mark.parametrize(
    ("make_tokenizer", "kind"),
    [(make, PieceDetokenizer) for make in JOINING_TOKENIZERS] + [(builders.word_piece_tokenizer, WindowDetokenizer)],
)
def test_only_decoders_that_do_not_join_pieces_need_windows(make_tokenizer: MakeTokenizer, kind: type) -> None:
    assert isinstance(make_detokenizer(make_tokenizer()), kind)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    ],
)
def test_unknown_chains_of_decoders_do_not_count_as_known_ones(decoder: decoders.Decoder | None) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    if decoder is not None:
        backend.decoder = decoder
    assert Tokenizer(backend).piece_rule is None


@pytest.mark.parametrize("token_id", [-1, 2**32])
@pytest.mark.parametrize("make_tokenizer", [builders.byte_level_tokenizer, builders.word_piece_tokenizer])
def test_an_id_that_is_no_u32_is_the_callers_fault(make_tokenizer: MakeTokenizer, token_id: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make_detokenizer(make_tokenizer()).push([token_id])
    assert caught.value.field == "token_ids"


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    """Id of the token that stands for one byte."""
    table = tokenizer.piece_table(skip_special_tokens=True)
    assert table is not None
    return next(token_id for token_id in range(tokenizer.vocab_size) if table[token_id] == bytes([byte]))
