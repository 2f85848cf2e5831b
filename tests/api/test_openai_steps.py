"""Parsing long bodies in steps."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.api.openai import steps as steps_module
from quartet.api.openai.steps import MAX_VALUES, STEP_BYTES, put_together, take_apart
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
    monkeypatch.setattr(steps_module, "STEP_BYTES", 1000)
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
    for step_bytes in (512, 1_000, 1_001, 64 << 10):
        monkeypatch.setattr(steps_module, "STEP_BYTES", step_bytes)
        with pytest.raises(ValueError):
            read(wrong)


@pytest.mark.parametrize("last", [-1, None, 1.5, 2**32, "x", [7], {}, [[]], True])
def test_a_list_that_begins_like_token_ids_may_go_on_with_any_value(last: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for step_bytes in (1_000, 64 << 10):
        monkeypatch.setattr(steps_module, "STEP_BYTES", step_bytes)
        value = {"enum": [*range(1000, 3000), last], "prompt": [[*range(2000), last], list(range(2000))], "b": {}}
        assert read(json.dumps(value).encode()) == value


def test_a_long_name_of_a_field_stays_with_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "STEP_BYTES", 1000)
    value = {"k" * 600: "v" * 600, "é\\" * 800: {"\U0001f600" * 700: [list(range(2000)), "w" * 600]}}
    for separators in ((",", ":"), (" , ", " " * 5000 + ": ")):
        assert read(json.dumps(value, separators=separators).encode()) == value


def test_many_lists_of_token_ids_pass_where_prompts_stand_and_nowhere_else() -> None:
    lists = [list(range(2_048))] * 32 + [list(range(200))] * 32
    assert read(json.dumps({"prompt": lists}).encode()) == {"prompt": lists}
    for value in ({"user": lists}, {"prompt": {"a": lists}}, {"a": list(range(MAX_VALUES + 1))}):
        with pytest.raises(MessageTooLargeError):
            read(json.dumps(value).encode())


def test_no_step_goes_through_much_more_than_its_bytes() -> None:
    for unit in (["1" * 600], [list(range(200)), "a"], list(range(70_000)), [[*range(150), -1]], {"k" * 600: 1}):
        rows = [unit] * (1 if len(unit) > 2 else 200)
        body = json.dumps({"prompt": rows}, indent=1).encode()
        steps, num_steps = take_apart(body), 0
        while True:
            try:
                next(steps)
            except StopIteration:
                break
            num_steps += 1
        assert num_steps >= len(body) // (2 * STEP_BYTES), (str(unit)[:20], len(body), num_steps)
