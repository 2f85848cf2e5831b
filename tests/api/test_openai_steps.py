"""Parsing long bodies in steps."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.api.openai import steps as steps_module
from quartet.api.openai.steps import MAX_VALUES, STEP_WORK, is_unicode, put_together, take_apart
from quartet.errors import MessageTooLargeError

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
_LONG_TEXT = st.builds(lambda text, times: text * times, _TEXT, st.integers(0, 400))
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | _LONG_TEXT | st.lists(st.integers(0, 2**32 - 1)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=12,
)


def read(body: bytes) -> Any:
    steps = take_apart(body)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return _plain(put_together(*end.value))


def chat(num_messages: int, num_characters: int) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x" * num_characters}] * num_messages}).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, array):
        return list(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


@given(_VALUES, st.booleans())
def test_a_body_read_in_steps_is_what_the_parser_reads_at_once(value: Any, is_ascii: bool) -> None:
    body = json.dumps({"value": value}, ensure_ascii=is_ascii).encode()
    assert read(body) == {"value": value}


def test_long_strings_and_token_ids_are_taken_out_and_no_escape_is_cut_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "_PIECE_BYTES", 1000)
    for unit in ('\\"\\\\\n', "\U0001f600", "é\x01", "日本"):
        for shift in (0, 1, 2, 3, 5, 7):
            value = {"t": "x" * shift + unit * 400, "prompt": list(range(5_000))}
            for is_ascii in (True, False):
                body = json.dumps(value, ensure_ascii=is_ascii).encode()
                assert read(body) == value
    rest, taken = b"", []
    steps = take_apart(json.dumps({"url": "data:" + "QUJD" * 10_000, "prompt": list(range(9_000))}).encode())
    while True:
        try:
            next(steps)
        except StopIteration as end:
            rest, taken = end.value
            break
    assert rest == b'{"url": NaN, "prompt": NaN}' and len(taken) == 2


@pytest.mark.parametrize(
    "bomb",
    [
        b'{"a":[' + b"[]," * MAX_VALUES + b"1]}",
        b'{"a":[' + b'{"b":1},' * MAX_VALUES + b"1]}",
        b'{"a":[' + b"1.5e9," * (MAX_VALUES + 1) + b"1]}",
        b'{"a":' + b"[" * (MAX_VALUES + 1),
    ],
)
def test_bombs_are_refused_before_they_are_parsed(bomb: bytes) -> None:
    with pytest.raises(MessageTooLargeError):
        read(bomb)


@pytest.mark.parametrize(
    "wrong",
    [
        b'{"a":NaN,"b":"' + b"x" * 600 + b'"}',
        b'{"a":Infinity}',
        b'{"a":"' + b"x" * 600,
        b'{"a":"' + b"\\ud800" * 200 + b'"}',
        b'{"a":"' + b"\\x" * 300 + b'"}',
        b'{"prompt":[' + b"1," * 3_000 + b",1]}",
        b'{"prompt":[' + b"1," * 3_000 + b"]}",
        b'{"prompt":[' + b"1," * 3_000 + b" ,1]}",
        b'{"prompt":[' + b"1 " * 3_000 + b"]}",
        b'{"prompt":[' + b"1," * 3_000 + b"01]}",
        b'{"prompt":[' + b"1," * 3_000,
        b'{"a":"' + b"\xff" * 600 + b'"}',
        b'{"' + b"k" * 600 + b'"}',
        b'{"' + b"k" * 600 + b'":NaN}',
    ],
)
def test_what_is_no_json_is_refused(wrong: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for piece_bytes in (512, 1_000, 1_001, 64 << 10):
        monkeypatch.setattr(steps_module, "_PIECE_BYTES", piece_bytes)
        with pytest.raises(ValueError):
            read(wrong)


@pytest.mark.parametrize("last", [-1, None, 1.5, 2**32, "x", [7], {}, [[]], True])
def test_a_list_that_begins_like_token_ids_may_go_on_with_any_value(last: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for piece_bytes in (1_000, 64 << 10):
        monkeypatch.setattr(steps_module, "_PIECE_BYTES", piece_bytes)
        value = {"enum": [*range(1000, 3000), last], "prompt": [[*range(2000), last], list(range(2000))], "b": {}}
        assert read(json.dumps(value).encode()) == value


def test_a_long_name_of_a_field_stays_with_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "_PIECE_BYTES", 1000)
    value = {"k" * 600: "v" * 600, "é\\" * 800: {"\U0001f600" * 700: [list(range(2000)), "w" * 600]}}
    for separators in ((",", ":"), (" , ", " " * 5000 + ": ")):
        assert read(json.dumps(value, separators=separators).encode()) == value


def test_many_lists_of_token_ids_pass_where_prompts_stand_and_nowhere_else() -> None:
    lists = [list(range(2_048))] * 32 + [list(range(200))] * 32
    assert read(json.dumps({"prompt": lists}).encode()) == {"prompt": lists}
    for value in ({"user": lists}, {"prompt": {"a": lists}}, {"a": list(range(MAX_VALUES + 1))}):
        with pytest.raises(MessageTooLargeError):
            read(json.dumps(value).encode())


@pytest.mark.parametrize(("num_messages", "num_characters"), [(20, 2_000), (100, 2_000), (200, 2_000), (4_000, 520)])
def test_a_chat_of_long_messages_is_paid_for_by_its_work_in_few_steps(num_messages: int, num_characters: int) -> None:
    body = chat(num_messages, num_characters)
    works = list(take_apart(body))
    assert len(works) <= len(body) >> 16
    assert sum(works) <= len(body) // 32 + 100 * num_messages


def test_a_picture_is_copied_in_a_step_of_its_own_and_paid_for() -> None:
    num_bytes = 4 << 20
    before, copied = take_apart(chat(1, num_bytes))
    assert before < 200 and num_bytes // 200 <= copied <= num_bytes // 50


@pytest.mark.parametrize(
    ("body", "least_work"),
    [
        (b'{"a":' + b'""' * 100_000 + b"1}", 10 * 100_000),
        (b"{" + b'"a":1,' * 30_000 + b'"a":1}', 10 * 30_000),
        (b'{"a":[' + (b'"' + b"x" * 513 + b'",') * 30_000 + b"1]}", 30 * 30_000),
        (b'{"a":"' + b"\\n" * 300_000 + b'"}', 600_000 // 4),
        (b'{"a":[' + (b'"' + b"\\n" * 300 + b'",') * 1_000 + b"1]}", 600_000 // 4),
        (b'{"prompt":[' + b"1," * 300_000 + b"1]}", 600_000 // 4),
        (b'{"prompt":[' + (b"[" + b"1," * 300 + b"1],") * 1_000 + b"1]}", 600_000 // 4),
        (b'{"prompt":[' + (b"[" + b"1," * 280 + b"-1],") * 110 + b"1]}", 0),
        (b'{"a":' + b" " * 3_000_000 + b"1}", 3_000_000 // 40),
        (b'{"' + b"k" * 600 + b'"' + b" " * 3_000_000 + b":1}", 3_000_000 // 40),
    ],
)
def test_work_is_paid_for_whatever_a_body_is_made_of_and_no_step_is_long(body: bytes, least_work: int) -> None:
    works = list(take_apart(body))
    assert sum(works) >= least_work - STEP_WORK, "all but the last step"
    assert max(works, default=0) <= 1.5 * STEP_WORK


@given(st.text(st.characters() | st.sampled_from(["\ud83d", "\ude00", "\\", "u", '"'])), st.booleans())
def test_half_of_a_surrogate_pair_is_found_wherever_the_parser_finds_it(text: str, is_upper: bool) -> None:
    body = json.dumps([text, {text: 1}])
    body = body.replace("\\ud", "\\uD") if is_upper else body
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        assert not is_unicode(body.encode())
    else:
        assert is_unicode(body.encode())


def test_a_number_that_takes_long_to_read_is_none() -> None:
    assert read(b'{"a":[' + b"9" * 400 + b"," + b"1.5," * 200 + b"1]}")["a"][0] == 10**400 - 1
    for number in (b"9" * 401, b"-" + b"9" * 400):
        with pytest.raises(ValueError, match="too many digits"):
            read(b'{"a":[' + number + b"," + b"1.5," * 200 + b"1]}")


def test_a_bomb_ends_in_its_first_step() -> None:
    for bomb in (b'{"a":[' + b"[]," * 1_000_000 + b"1]}", b'{"a":"x","b":' + b"[" * 1_000_000):
        works = []
        with pytest.raises(MessageTooLargeError):
            works += take_apart(bomb)
        assert not works
