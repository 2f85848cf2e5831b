"""JSON whose long lists were written before: the same bytes, whatever texts stand beside them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.api.openai.answers import Head, logprobs_json, to_event
from quartet.api.openai.json_parts import JsonParts, tokens_json
from quartet.api.openai.requests import Asked
from quartet.engine.sampling import TokenLogprobs

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


def _asked(is_chat: bool) -> Asked:
    return Asked(starts=(), model="tiny", num_choices=1, is_chat=is_chat, num_logprobs=1)


@pytest.mark.parametrize("is_chat", [False, True])
def test_log_probabilities_that_the_engine_does_not_tell_are_json_all_the_same(is_chat: bool) -> None:
    head = Head(_asked(is_chat), "tiny", lambda token_id: bytes([token_id]))
    entries = [TokenLogprobs(97, math.nan, (98,), (-0.5,)), TokenLogprobs(99, -1.5, (100,), (-math.inf,))]
    event = to_event({"logprobs": logprobs_json(head, entries)})
    said = json.loads(event.removeprefix("data: "), parse_constant=pytest.fail)["logprobs"]
    if is_chat:
        assert [one["logprob"] for one in said["content"]] == [-9999.0, -1.5]
        assert [one["top_logprobs"][0]["logprob"] for one in said["content"]] == [-0.5, -9999.0]
    else:
        assert said["token_logprobs"] == [None, -1.5]
        assert said["top_logprobs"] == [{"b": -0.5}, {"d": -9999.0}]


def test_what_is_no_number_of_json_is_never_written() -> None:
    for write in (JsonParts().encode, to_event):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write({"number": math.nan})
