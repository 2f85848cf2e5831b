"""The messages of one Generate: in order, merged while they wait, ended once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.api import generate_answer
from quartet.api.convert.answer import from_generate_response, put_delta
from quartet.api.generate_answer import GenerateAnswer
from quartet.api.request import (
    Accepted,
    AnswerPart,
    ChoiceFinished,
    ChoicePlacement,
    Delta,
    Placed,
    TimeBreakdown,
    Usage,
)
from quartet.discovery.base import Rank
from quartet.engine.base import FinishReason
from quartet.engine.sampling import TokenLogprobs
from quartet.errors import RequestCancelledError
from quartet.text.parsed import Parsed, ToolCallDelta
from quartet.v1 import router_pb2

_ACCEPTED = Accepted(request_id="00" * 16, choices=(), num_prompt_tokens=3, seed=1)
_TIMEOUT_S = 30.0


def _placement(choice: int) -> ChoicePlacement:
    return ChoicePlacement(choice=choice, prefill=None, decode=Rank("d", 0))


def _finished(choice: int) -> ChoiceFinished:
    usage = Usage(num_prompt_tokens=3, num_cached_tokens=0, num_output_tokens=2, num_attempts=1)
    return ChoiceFinished(choice=choice, reason=FinishReason.LENGTH, usage=usage, time=TimeBreakdown(total_s=1.0))


async def _next(answer: GenerateAnswer) -> AnswerPart | None:
    async with asyncio.timeout(_TIMEOUT_S):
        message = await answer.next()
    return None if message is None else from_generate_response(message)


async def _rest(answer: GenerateAnswer) -> list[AnswerPart]:
    parts = []
    while (part := await _next(answer)) is not None:
        parts.append(part)
    return parts


async def test_unread_output_is_one_message_a_choice() -> None:
    answer = GenerateAnswer()
    answer.accept(_ACCEPTED)
    answer.placed(_placement(1))
    answer.placed(_placement(0))
    answer.add(0, 0, [5], "a", (TokenLogprobs(5, -1.0),))
    answer.add(1, 0, [9], "x", ())
    answer.add(0, 1, [6, 7], "bc", (TokenLogprobs(6, -1.0), TokenLogprobs(7, -2.0)))
    answer.finish(_finished(0))
    answer.end()
    accepted, first, second, finished = await _rest(answer)
    assert isinstance(accepted, Accepted)
    assert [placement.choice for placement in accepted.choices] == [0, 1]
    logprobs = tuple(TokenLogprobs(token_id, logprob) for token_id, logprob in ((5, -1.0), (6, -1.0), (7, -2.0)))
    assert first == Delta(choice=0, token_offset=0, token_ids=(5, 6, 7), text="abc", logprobs=logprobs)
    assert second == Delta(choice=1, token_offset=0, token_ids=(9,), text="x")
    assert finished == _finished(0)


async def test_a_message_that_was_read_is_not_changed_later() -> None:
    answer = GenerateAnswer()
    answer.accept(_ACCEPTED)
    await _next(answer)
    answer.add(0, 0, [5], "a", ())
    assert await _next(answer) == Delta(choice=0, token_offset=0, token_ids=(5,), text="a")
    answer.placed(_placement(1))
    answer.add(0, 1, [6], "b", ())
    assert await _next(answer) == Placed(placement=_placement(1))
    assert await _next(answer) == Delta(choice=0, token_offset=1, token_ids=(6,), text="b")


async def test_a_reader_that_waits_is_woken_and_the_error_comes_last() -> None:
    answer = GenerateAnswer()
    waiting = asyncio.create_task(_rest(answer))
    await asyncio.sleep(0)
    answer.accept(_ACCEPTED)
    answer.add(0, 0, [5], "", ())
    answer.end(RequestCancelledError("as asked"))
    with pytest.raises(RequestCancelledError):
        await waiting


async def test_a_wait_that_is_cancelled_loses_nothing() -> None:
    answer = GenerateAnswer()
    answer.accept(_ACCEPTED)
    await _next(answer)
    waiting = asyncio.create_task(answer.next())
    await asyncio.sleep(0)
    answer.add(0, 0, [5], "", ())
    waiting.cancel()
    await asyncio.wait([waiting])
    if waiting.cancelled():
        assert await _next(answer) == Delta(choice=0, token_offset=0, token_ids=(5,))


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 9), min_size=1, max_size=3), st.booleans())))
async def test_however_it_is_read_each_choice_gets_its_tokens_in_order(
    steps: list[tuple[int, list[int], bool]],
) -> None:
    answer = GenerateAnswer()
    answer.accept(_ACCEPTED)
    given_out: dict[int, list[int]] = {}
    read: list[AnswerPart] = []
    for choice, token_ids, reads in steps:
        known = given_out.setdefault(choice, [])
        answer.add(choice, len(known), token_ids, "", ())
        known += token_ids
        if reads and (part := await _next(answer)) is not None:
            read.append(part)
    answer.end()
    read += await _rest(answer)
    got: dict[int, list[int]] = {}
    for part in read:
        if isinstance(part, Delta):
            assert part.token_offset == len(got.setdefault(part.choice, []))
            got[part.choice] += part.token_ids
    assert got == given_out


async def test_reasoning_and_calls_that_wait_go_out_with_their_choices_tokens() -> None:
    answer = GenerateAnswer()
    answer.accept(_ACCEPTED)
    answer.add(1, 0, [9], "x", ())
    answer.add_parsed(0, 0, [5], Parsed("", "a", [ToolCallDelta(0, "id", "f", "{")]), ())
    answer.add_parsed(0, 1, [6], Parsed("b", "c", [ToolCallDelta(0, arguments="}", is_complete=True)]), ())
    answer.end()
    _accepted, other, delta = await _rest(answer)
    assert other == Delta(choice=1, token_offset=0, token_ids=(9,), text="x")
    calls = (ToolCallDelta(0, "id", "f", "{}", True),)
    assert delta == Delta(choice=0, token_offset=0, token_ids=(5, 6), text="b", reasoning="ac", tool_calls=calls)


async def test_text_that_waits_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protobuf copies the whole text of a message for each piece, and keeps all copies: 15,000 took 14 GB."""
    put: list[str] = []

    def note(into: router_pb2.Delta, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]) -> None:
        put.append(text)
        put_delta(into, token_ids, text, logprobs)

    monkeypatch.setattr(generate_answer, "put_delta", note)
    answer = GenerateAnswer()
    answer.accept(_ACCEPTED)
    for number in range(100):
        answer.add(0, number, [number], f"{number}\r\n", ())
        answer.add(1, number, [number], "", ())
    answer.end()
    _accepted, first, second = await _rest(answer)
    assert isinstance(first, Delta) and isinstance(second, Delta)
    assert first.text == "".join(f"{number}\r\n" for number in range(100)) and second.text == ""
    assert first.token_ids == second.token_ids == tuple(range(100))
    assert [text for text in put if text] == ["0\r\n"]
