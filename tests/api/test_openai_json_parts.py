"""JSON whose long lists were written before: the same bytes, whatever texts stand beside them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.api.openai.json_parts import JsonParts, tokens_json

_ITEMS = st.lists(st.lists(st.integers() | st.text() | st.none() | st.dictionaries(st.text(), st.text())))


@given(st.lists(_ITEMS, max_size=4), st.text())
def test_lists_that_were_written_in_parts_stand_in_their_places(lists: list[list[list[Any]]], beside: str) -> None:
    parts = JsonParts()
    value: dict[str, Any] = {beside: beside}
    wanted = dict(value)
    for number, given_parts in enumerate(lists):
        some = [one for one in given_parts if one]
        value[f"list {number}"] = parts.place([json.dumps(one)[1:-1] for one in some])
        wanted[f"list {number}"] = [item for one in some for item in one]
    assert parts.encode(value) == json.dumps(wanted).encode()


@pytest.mark.parametrize("count", [0, 1, 1024, 5000])
def test_tokens_are_shown_in_steps(count: int) -> None:
    steps, num_steps = tokens_json(range(count), 8192, lambda token_id: f'"{token_id}"' if token_id else None), 1
    while True:
        try:
            next(steps)
        except StopIteration as end:
            shown = json.loads(end.value)
            break
        num_steps += 1
    assert num_steps == max(1, -(-count // 1024))
    assert shown == {
        "count": count,
        "max_model_len": 8192,
        "tokens": list(range(count)),
        "token_strs": ["", *(f'"{token_id}"' for token_id in range(1, count))][:count],
    }
