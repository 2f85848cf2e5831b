"""What requests ask for: prompts and lengths, drawn at random or taken from a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cli.traces.format import BLOCK_SIZE, TraceRequest

# Each of these words is about one token to every tokenizer for English.
_WORDS = (
    "the of and to in is that for it was on are as with they at be this from have or by one had not but what all were"
    " when we there can an your which their said if do will each about how up out them then she many some so these"
    " would other into has more her two like him see time could no make than first been its who now people my made over"
    " did down only way find use may water long little very after words called just where most know get through back"
).split()
# Separate streams of random numbers: for blocks that the trace names, and for tails that it doesn't.
_BLOCKS, _TAILS = 0, 1


@dataclass(frozen=True)
class IntRange:
    """Whole numbers from ``low`` to ``high``, both included, as ``128`` or ``32-512``."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator) -> int:
        """Draw one of them; each is as likely."""
        return self.low if self.low == self.high else int(rng.integers(self.low, self.high, endpoint=True))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """One request to send.

    Attributes:
        token_ids: the prompt; ``None`` where it is ``text``.
        num_output_tokens: exact length of the answer; end-of-sequence is ignored.
        at_s: its time in the trace, counted from the first request; ``None`` without a trace.
        session_key: of its conversation in the trace; empty: none.
    """

    token_ids: Sequence[int] | None = field(default=None, repr=False)
    text: str | None = field(default=None, repr=False)
    num_output_tokens: int
    at_s: float | None = None
    session_key: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """What a workload is made of.

    Attributes:
        prompt_tokens, output_tokens: lengths, where there is no trace.
        trace: requests that lengths, shared prefixes and times are taken from, each once.
        ids: token ids that prompts are drawn from.
        is_text: send random words, about one a token, instead of token ids.
    """

    prompt_tokens: IntRange
    output_tokens: IntRange
    ids: IntRange
    trace: Sequence[TraceRequest] | None = field(default=None, repr=False)
    is_text: bool = False

    def __str__(self) -> str:
        kind = "words" if self.is_text else "tokens"
        if self.trace is not None:
            return f"a trace of {len(self.trace)} requests, as {kind}"
        return f"prompts of {self.prompt_tokens} {kind}, answers of {self.output_tokens} tokens"


def make_workload(config: WorkloadConfig, seed: Sequence[int]) -> Iterator[BenchRequest]:
    """The requests of a workload from its start, the same for the same seed. Prompts of different seeds share nothing.

    Without a trace it is endless, and no two of its prompts share a prefix.
    """
    if config.trace is not None:
        prompts = TracePrompts(seed, config.ids)
        for request in config.trace:
            made = _make_request(config, prompts.make(request), request.num_output_tokens)
            yield replace(made, at_s=request.arrival_s, session_key=_session_key(request, seed))
        return
    rng = np.random.default_rng(seed)
    while True:
        count, num_output_tokens = config.prompt_tokens.draw(rng), config.output_tokens.draw(rng)
        ids = rng.integers(config.ids.low, config.ids.high, size=count, endpoint=True).tolist()
        yield _make_request(config, ids, num_output_tokens)


class TracePrompts:
    """Makes prompts of random token ids; blocks with equal hash ids have equal tokens, for one seed."""

    def __init__(self, seed: Sequence[int], ids: IntRange) -> None:
        self._seed = tuple(seed)
        self._ids = ids
        self._num_tails = 0

    def make(self, request: TraceRequest) -> list[int]:
        """The prompt of ``request``; no other request shares the tokens beyond its hash ids."""
        token_ids: list[int] = []
        for hash_id in request.hash_ids:
            token_ids += self._draw(_BLOCKS, hash_id, BLOCK_SIZE)
        num_missing = request.num_input_tokens - len(token_ids)
        if num_missing > 0:
            self._num_tails += 1
            token_ids += self._draw(_TAILS, self._num_tails, num_missing)
        return token_ids[: request.num_input_tokens]

    def _draw(self, stream: int, name: int, count: int) -> list[int]:
        rng = np.random.default_rng((*self._seed, stream, name))
        drawn: list[int] = rng.integers(self._ids.low, self._ids.high, size=count, endpoint=True).tolist()
        return drawn


def _session_key(request: TraceRequest, seed: Sequence[int]) -> str:
    """Conversations of other seeds are others."""
    return f"{'-'.join(map(str, seed))}-{request.session}" if request.session else ""


def _make_request(config: WorkloadConfig, token_ids: list[int], num_output_tokens: int) -> BenchRequest:
    if not config.is_text:
        return BenchRequest(token_ids=token_ids, num_output_tokens=num_output_tokens)
    text = " ".join(_WORDS[token_id % len(_WORDS)] for token_id in token_ids)
    return BenchRequest(text=text, num_output_tokens=num_output_tokens)
