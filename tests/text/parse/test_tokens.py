"""From tokens to events: which special tokens are in a parser's text."""

import pytest

from quartet.text.parse import CallArguments, CallBegin, CallEnd, OutputParser, Reasoning, choose_format
from quartet.text.text_stream import TextStream
from quartet.text.tokenizer import Tokenizer
from tests.text import builders


def test_a_parser_sees_the_special_tokens_of_its_format_and_no_others() -> None:
    backend = builders.byte_level_backend()
    backend.add_special_tokens(["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|other|>"])
    tokenizer = Tokenizer(backend)
    format = choose_format("gpt_oss", "harmony")
    stream = TextStream(tokenizer, shown=tokenizer.special_tokens_where(format.needs))
    parser = OutputParser(format, make_id=lambda: "id")
    output = (
        "<|channel|>analysis<|message|>Hm<|other|><|turn|><|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    )
    events = [
        event
        for token_id in tokenizer.encode(output, add_special_tokens=False)
        for event in parser.push(stream.push_text([token_id]))
    ]
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == "Hm"
    assert events[-3:] == [CallBegin(0, "id", "f"), CallArguments(0, "{}"), CallEnd(0)]
    assert parser.finish() == []


@pytest.mark.parametrize("make", [builders.byte_level_tokenizer, builders.word_piece_tokenizer])
def test_special_tokens_that_are_shown_are_in_the_text_as_others(make: object) -> None:
    assert callable(make)
    tokenizer: Tokenizer = make()
    bos, eos = (tokenizer.token_to_id(token) for token in (builders.BOS, builders.EOS))
    assert bos is not None
    assert eos is not None
    shown = tokenizer.special_tokens_where(lambda text: text == builders.EOS)
    assert shown == {eos}
    for ids, expected in (([bos, eos], [eos]), ([eos, bos, eos], [eos, eos])):
        stream = TextStream(tokenizer, shown=shown)
        text = "".join(stream.push_text([token_id]) for token_id in ids)
        assert text.replace(" ", "") == builders.EOS * len(expected)
