"""An end that does not count the tokens that came."""

from __future__ import annotations

import pytest

from quartet.api.answer import Answer
from quartet.api.output import ChoiceOutput, OutputSettings
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


@pytest.mark.parametrize("num_counted", [0, 1, 3])
def test_an_end_that_counts_more_or_fewer_tokens_than_came_breaks_the_attempt(num_counted: int) -> None:
    output = make_output(Answer())
    output.take(0, [7, 8], (), 1.0)
    output.check_count(2)
    with pytest.raises(WorkerUnavailableError, match=f"2 of {num_counted}"):
        output.check_count(num_counted)
