"""Parsing long bodies in steps."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.api.openai import steps as steps_module
from quartet.api.openai.steps import MAX_VALUES, put_together, take_apart
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


@settings(max_examples=40, deadline=None)
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
        b'{"prompt":[' + b"1," * 3_000 + b"99999999999]}",
        b'{"a":"' + b"\xff" * 600 + b'"}',
        b'{"' + b"k" * 600 + b'":1}',
    ],
)
def test_what_is_no_json_is_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError):
        read(wrong)
