"""What Place answers, in domain terms: where each choice goes on, and under which sign."""

from __future__ import annotations

from dataclasses import dataclass

from quartet.api.request import ChoiceFinished, ChoicePlacement
from quartet.engine.sampling import TokenLogprobs
from quartet.streams.messages import SignedPlacement


@dataclass(frozen=True, kw_only=True)
class PlacedChoice:
    """One choice's first token and the way to the rest.

    Attributes:
        placement: where it runs; ``None``: it was resumed where nothing was left to do.
        token_ids: the first token, where it was prefilled remotely.
        logprobs: its log probabilities, where asked for.
        next: the way to the rest, or how the first token ended it.
        num_cached_tokens: of the prompt's, those whose KV was cached where it was prefilled.
        num_attempts: attempts that this placement took.
        router_queue_s, prefill_s, prefill_queue_s: as in ``TimeBreakdown``.
    """

    choice: int
    placement: ChoicePlacement | None
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    next: SignedPlacement | ChoiceFinished
    num_cached_tokens: int
    num_attempts: int
    router_queue_s: float | None = None
    prefill_s: float | None = None
    prefill_queue_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlacedRequest:
    """A request whose tokens its client fetches itself.

    Attributes:
        attempt: the highest attempt's number among the choices; one that resumes it needs a higher one.
        model_fingerprint: names the text files that the decode worker gives.
        prompt_tail_token_ids: the prompt's last few tokens, which the answer's text continues.
        tokenize_s: seconds that template and tokenizer took.
    """

    request_id: str
    attempt: int
    seed: int
    num_prompt_tokens: int
    choices: tuple[PlacedChoice, ...]
    model: str
    model_fingerprint: str
    prompt_tail_token_ids: tuple[int, ...]
    tokenize_s: float
