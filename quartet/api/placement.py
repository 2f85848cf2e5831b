"""The answer of Place in domain terms: where each choice continues, and the signed start for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from quartet.api.request import ChoiceFinished, ChoicePlacement
from quartet.engine.sampling import TokenLogprobs
from quartet.streams.messages import SignedPlacement


@dataclass(frozen=True, kw_only=True)
class PlacedChoice:
    """One choice's first token and how to get the rest.

    Attributes:
        placement: where it runs; ``None``: it was resumed with nothing left to do.
        token_ids: the first token, if it was prefilled remotely.
        logprobs: the first token's log probabilities, if the client asked for them.
        next: how to get the rest, or how the first token ended the choice.
        num_cached_tokens: prompt tokens whose KV was cached where it was prefilled.
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
        attempt: the highest attempt's number among the choices; a request that resumes it needs a higher number.
        model_fingerprint: identifies the text files that the decode worker gives.
        prompt_tail_token_ids: the prompt's last few tokens, which the answer's text continues.
        parsing: how reasoning and tool calls are found in it; ``None``: they are not looked for.
        tokenize_s: seconds that template and tokenizer took.
        sent_at_unix_ns: when the router that placed it sent this; 0: it does not say, or has not sent it.
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
    parsing: PlacedParsing | None = None
    sent_at_unix_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class PlacedParsing:
    """The parsers of a model's output, by name, and where an answer begins.

    Attributes:
        prompt_end: the end of the prompt's text, special tokens included.
    """

    reasoning_parser: str
    tool_call_parser: str
    prompt_end: str = field(repr=False)
