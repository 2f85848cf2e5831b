"""What a step has to do, in the terms that its time depends on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quartet.engine.running import RunningRequest, ScheduledChunk


@dataclass(frozen=True)
class StepWork:
    """The work of one step.

    Attributes:
        num_prompt_tokens: tokens to compute of prompts, and of outputs that have to be computed again.
        num_context_tokens: tokens that the requests attend to that decode, all together.
    """

    num_prompt_tokens: int
    num_context_tokens: int


@dataclass(frozen=True)
class Backlog:
    """What requests have to compute before the next step.

    Attributes:
        num_tokens: of those that do not decode yet.
        num_decoding: requests that decode.
        num_context_tokens: tokens that these have together.
    """

    num_tokens: int
    num_decoding: int
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


def backlog(running: Iterable[RunningRequest]) -> Backlog:
    """That of ``running``."""
    num_tokens = num_decoding = num_context_tokens = 0
    for request in running:
        # What ``RunningRequest.is_decoding`` says, without asking it: this is looked at twice a step for everybody.
        seq = request.seq
        num_uncomputed = len(seq.token_ids) - seq.num_computed_tokens
        if num_uncomputed == 1:
            num_decoding += 1
            num_context_tokens += len(seq.token_ids)
        else:
            num_tokens += num_uncomputed
    return Backlog(num_tokens, num_decoding, num_context_tokens)


def _decodes(chunk: ScheduledChunk) -> bool:
    """Whether it computes its request's newest token: sampled here, or by the prefill that the request came from."""
    running = chunk.running
    is_newest = chunk.num_tokens == 1 and chunk.samples
    return is_newest and (chunk.first_position >= running.num_initial_tokens or running.request.hand_off is not None)
