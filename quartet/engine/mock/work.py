"""What a step has to do, in the terms that ``StepTiming`` knows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quartet.engine.running import ScheduledChunk


@dataclass(frozen=True)
class StepWork:
    """The work of one step.

    Attributes:
        num_prompt_tokens: tokens to compute of prompts, and of outputs that have to be computed again.
        num_context_tokens: tokens that the requests attend to that decode, all together.
    """

    num_prompt_tokens: int
    num_context_tokens: int


def step_work(chunks: Iterable[ScheduledChunk]) -> StepWork:
    """The work of a step that computes ``chunks``."""
    num_prompt_tokens = num_context_tokens = 0
    for chunk in chunks:
        if _decodes(chunk):
            num_context_tokens += chunk.first_position + 1
        else:
            num_prompt_tokens += chunk.num_tokens
    return StepWork(num_prompt_tokens, num_context_tokens)


def _decodes(chunk: ScheduledChunk) -> bool:
    """Whether it computes its request's newest token: sampled here, or by the prefill that the request came from."""
    running = chunk.running
    is_newest = chunk.num_tokens == 1 and chunk.samples
    return is_newest and (chunk.first_position >= running.num_initial_tokens or running.request.hand_off is not None)
