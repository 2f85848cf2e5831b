"""An answer on its way to its reader: in order, merged while its reader is away, and bounded if that is asked for."""

from __future__ import annotations

import asyncio

import pytest

from quartet.api.answer import Answer
from quartet.api.request import Accepted, ChoiceFinished, ChoicePlacement, Delta, Placed, TimeBreakdown, Usage
from quartet.discovery.base import Rank
from quartet.engine.base import FinishReason
from quartet.errors import StalledStreamError, WorkerUnavailableError
from quartet.text.parsed import Parsed, ToolCallDelta

WAIT_S = 30.0
ACCEPTED = Accepted(request_id="0" * 32, choices=(), num_prompt_tokens=1, seed=0)


def placement(choice: int) -> ChoicePlacement:
    return ChoicePlacement(choice=choice, prefill=None, decode=Rank("decode-0"))


def finished(choice: int) -> ChoiceFinished:
    usage = Usage(num_prompt_tokens=1, num_cached_tokens=0, num_output_tokens=1, num_attempts=1)
    return ChoiceFinished(choice=choice, reason=FinishReason.LENGTH, usage=usage, time=TimeBreakdown())


async def test_unread_parts_come_in_order_and_merged_by_choice() -> None:
    answer = Answer()
    answer.accept(ACCEPTED)
    answer.add(0, 0, [1], "a", ())
    assert await answer.next() == [ACCEPTED, Delta(choice=0, token_offset=0, token_ids=(1,), text="a")]
    answer.placed(placement(1))
    answer.finish(finished(0))
    for number in range(3):
        answer.add(1, number, [number], "b", ())
    merged = Delta(choice=1, token_offset=0, token_ids=(0, 1, 2), text="bbb")
    assert await answer.next() == [Placed(placement=placement(1)), merged, finished(0)]
    assert answer.take() == ()
    answer.end()
    assert answer.take() is None
    assert await answer.next() == ()


async def test_a_failure_comes_after_all_parts_before_it() -> None:
    answer = Answer()
    answer.accept(ACCEPTED)
    answer.add(0, 0, [1], "a", ())
    answer.end(WorkerUnavailableError("gone"))
    assert len(await answer.next()) == 2
    with pytest.raises(WorkerUnavailableError):
        await answer.next()


async def test_no_part_comes_before_the_request_is_accepted() -> None:
    answer = Answer()
    reading = asyncio.create_task(answer.next())
    answer.placed(placement(1))
    await asyncio.sleep(0)
    assert not reading.done()
    answer.accept(ACCEPTED)
    async with asyncio.timeout(WAIT_S):
        assert await reading == [ACCEPTED, Placed(placement=placement(1))]


async def test_a_reader_whose_wait_was_cancelled_can_read_again() -> None:
    answer = Answer()
    reading = asyncio.create_task(answer.next())
    await asyncio.sleep(0)
    reading.cancel()
    answer.accept(ACCEPTED)
    async with asyncio.timeout(WAIT_S):
        assert await anext(answer.parts()) == ACCEPTED


async def test_reasoning_and_calls_go_with_their_choices_delta_and_are_bounded() -> None:
    answer = Answer(max_unread=9)
    answer.accept(ACCEPTED)
    answer.add_parsed(0, 0, (), Parsed("", "abcd"), ())
    answer.add_parsed(0, 3, (7,), Parsed("x", "", [ToolCallDelta(0, "id", "f", "{}", True)]), ())
    [_accepted, delta] = await answer.next()
    calls = (ToolCallDelta(0, "id", "f", "{}", True),)
    assert delta == Delta(choice=0, token_offset=3, token_ids=(7,), text="x", reasoning="abcd", tool_calls=calls)
    answer.add_parsed(0, 4, (), Parsed("", "abcdefgh"), ())
    with pytest.raises(StalledStreamError, match="unread"):
        answer.add_parsed(0, 4, (), Parsed("", "ij"), ())


@pytest.mark.parametrize(("token_ids", "text"), [((1, 2), ""), ((), "ab"), ((1,), "a")])
async def test_unread_parts_are_bounded(token_ids: tuple[int, ...], text: str) -> None:
    answer = Answer(max_unread=9)
    answer.accept(ACCEPTED)
    for round_number in range(2):  # reading makes room again
        for number in range(4):
            answer.add(0, number, token_ids, text, ())
        parts = await answer.next()
        assert len(parts) == 2 - round_number
    for number in range(4):
        answer.add(0, number, token_ids, text, ())
    with pytest.raises(StalledStreamError, match="unread"):
        answer.add(0, 4, token_ids, text, ())
