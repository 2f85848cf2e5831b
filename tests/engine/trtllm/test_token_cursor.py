"""The new tokens of an output, whatever TensorRT-LLM changes in it meanwhile."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from quartet.engine.sampling import TokenLogprobs
from quartet.engine.trtllm.token_cursor import NewTokens, TokenCursor


@dataclass
class Output:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Logprob:
    logprob: float


def cursor(num_known: int = 0, stop_ids: tuple[int, ...] = (1, 9), num_top: int | None = None) -> TokenCursor:
    return TokenCursor(num_known=num_known, stop_ids=stop_ids, num_top_logprobs=num_top)


def read(reader: TokenCursor, *outputs: Output) -> list[tuple[int, ...]]:
    return [reader.take(output).token_ids for output in outputs]


def test_each_token_is_given_once() -> None:
    reader, output = cursor(), Output()
    output.token_ids = [5]
    assert reader.take(output) == NewTokens(0, (5,), ())
    output.token_ids = [5, 6, 7]
    assert reader.take(output) == NewTokens(1, (6, 7), ())
    assert reader.take(output) == NewTokens(3, (), ())
    assert reader.num_tokens == 3


def test_the_token_that_prefill_gave_is_left_out() -> None:
    assert cursor(num_known=1).take(Output([5, 6])) == NewTokens(1, (6,), ())
    assert cursor(num_known=1).take(Output([5])) == NewTokens(1, (), ())


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # The end's id is there, or was taken away.
        ([Output([5]), Output([5, 1], finish_reason="stop")], [5, 1]),
        ([Output([5]), Output([5], finish_reason="stop")], [5, 1]),
        ([Output([], finish_reason="stop")], [1]),
        # A stop id is there, or was taken away before or after it was given out.
        ([Output([5]), Output([5, 9], finish_reason="stop", stop_reason=9)], [5, 9]),
        ([Output([5]), Output([5], finish_reason="stop", stop_reason=9)], [5, 9]),
        ([Output([5, 9]), Output([5], finish_reason="stop", stop_reason=9)], [5, 9]),
        ([Output([5, 9]), Output([5, 9], finish_reason="stop")], [5, 9]),
        # Whatever else shortens it.
        ([Output([5, 6, 7]), Output([5], finish_reason="length")], [5, 6, 7]),
        ([Output([5]), Output([5], finish_reason="length")], [5]),
    ],
)
def test_a_stop_id_is_the_last_token_and_nothing_comes_twice(steps: list[Output], expected: list[int]) -> None:
    reader = cursor()
    assert [token_id for new in read(reader, *steps) for token_id in new] == expected
    assert reader.num_tokens == len(expected)


def test_without_any_stop_id_nothing_is_made_up() -> None:
    assert read(cursor(stop_ids=()), Output([5], finish_reason="stop")) == [(5,)]


def test_logprobs_by_token_have_the_best_first() -> None:
    entry = {5: Logprob(-2.0), 7: Logprob(-0.5), 8: Logprob(-1.0)}
    new = cursor(num_top=2).take(Output([5], [entry]))
    assert new.logprobs == (TokenLogprobs(5, -2.0, (7, 8), (-0.5, -1.0)),)
    assert cursor(num_top=0).take(Output([5], [entry])).logprobs == (TokenLogprobs(5, -2.0),)


def test_logprobs_may_be_bare_numbers() -> None:
    assert cursor(num_top=2).take(Output([5, 6], [-1.0, -2.0])).logprobs == (
        TokenLogprobs(5, -1.0),
        TokenLogprobs(6, -2.0),
    )


@pytest.mark.parametrize("form", [float, lambda value: {6: Logprob(value), 7: Logprob(value)}])
def test_the_first_token_of_a_decode_may_come_without(form: Any) -> None:
    reader = cursor(num_known=1, num_top=0)
    assert reader.take(Output([5, 6], [form(-1.0)])).logprobs == (TokenLogprobs(6, -1.0),)
    assert reader.take(Output([5, 6, 7], [form(-1.0), form(-2.0)])).logprobs == (TokenLogprobs(7, -2.0),)


def test_the_first_token_of_a_decode_may_come_with_them() -> None:
    reader = cursor(num_known=1, num_top=0)
    assert reader.take(Output([5, 6], [-3.0, -1.0])).logprobs == (TokenLogprobs(6, -1.0),)


def test_a_token_without_a_word_has_no_number() -> None:
    [entry] = cursor(num_top=1).take(Output([], [], finish_reason="stop")).logprobs
    assert (entry.token_id, entry.top_token_ids) == (1, ())
    assert math.isnan(entry.logprob)
