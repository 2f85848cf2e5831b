"""What one choice gives: nothing more after its end, and nothing less than its worker counts."""

from __future__ import annotations

import pytest

from quartet.api.answer import Answer
from quartet.api.output import ChoiceOutput, OutputSettings
from quartet.api.request import Accepted, ChoiceFinished, Delta
from quartet.engine.base import FinishReason
from quartet.errors import WorkerUnavailableError
from quartet.text.text_stream import TextStream


class Unobserved:
    def observe(self, amount: float) -> None:
        """Nobody looks."""


def make_output(answer: Answer) -> ChoiceOutput:
    settings = OutputSettings(
        num_prompt_tokens=1,
        arrived_at=0.0,
        tokenize_s=0.0,
        omits_token_ids=False,
        ttft=Unobserved(),
        itl=Unobserved(),
    )
    return ChoiceOutput(settings, 0, TextStream(None), answer)


async def test_tokens_that_come_after_the_end_are_neither_shown_nor_counted() -> None:
    answer = Answer()
    answer.accept(Accepted(request_id="0" * 32, choices=(), num_prompt_tokens=1, seed=0))
    output = make_output(answer)
    assert output.take(0, [7, 8], (), 1.0)
    finished = output.finish(FinishReason.CANCELLED)
    answer.finish(finished)
    # A worker that was asked to cancel sent these before the cancel arrived.
    assert not output.take(2, [9], (), 2.0)
    [_accepted, delta, end] = await answer.next()
    assert isinstance(delta, Delta) and delta.token_ids == (7, 8)
    assert isinstance(end, ChoiceFinished) and end.usage.num_output_tokens == 2


@pytest.mark.parametrize("num_counted", [0, 1, 3])
def test_an_end_that_counts_more_or_fewer_tokens_than_came_breaks_the_attempt(num_counted: int) -> None:
    output = make_output(Answer())
    output.take(0, [7, 8], (), 1.0)
    output.check_count(2)
    with pytest.raises(WorkerUnavailableError, match=f"2 of {num_counted}"):
        output.check_count(num_counted)
