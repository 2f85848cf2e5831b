"""What one choice gives: nothing more after its end."""

from __future__ import annotations

from quartet.api.answer import Answer
from quartet.api.output import ChoiceOutput, OutputSettings
from quartet.api.request import Accepted, ChoiceFinished, Delta
from quartet.engine.base import FinishReason
from quartet.text.text_stream import TextStream


class Unobserved:
    def observe(self, amount: float) -> None:
        """Nobody looks."""


async def test_tokens_that_come_after_the_end_are_neither_shown_nor_counted() -> None:
    answer = Answer()
    answer.accept(Accepted(request_id="0" * 32, choices=(), num_prompt_tokens=1, seed=0))
    settings = OutputSettings(
        num_prompt_tokens=1,
        arrived_at=0.0,
        tokenize_s=0.0,
        omits_token_ids=False,
        ttft=Unobserved(),
        itl=Unobserved(),
    )
    output = ChoiceOutput(settings, 0, TextStream(None), answer)
    assert output.take(0, [7, 8], (), 1.0)
    finished = output.finish(FinishReason.CANCELLED)
    answer.finish(finished)
    # A worker that was asked to cancel sent these before the cancel arrived.
    assert not output.take(2, [9], (), 2.0)
    [_accepted, delta, end] = await answer.next()
    assert isinstance(delta, Delta) and delta.token_ids == (7, 8)
    assert isinstance(end, ChoiceFinished) and end.usage.num_output_tokens == 2
