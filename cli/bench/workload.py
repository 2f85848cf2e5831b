"""What is asked for: prompts and lengths, one request after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cli.bench.lengths import IntRange
from cli.bench.trace import TracePrompts
from cli.traces.format import TraceRequest

# Words that are one token, or nearly, to every English tokenizer.
_WORDS = (
    "the of and to in is that for it was on are as with they at be this from have or by one had not but what all were"
    " when we there can an your which their said if do will each about how up out them then she many some so these"
    " would other into has more her two like him see time could no make than first been its who now people my made over"
    " did down only way find use may water long little very after words called just where most know get through back"
).split()


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """One request to send.

    Attributes:
        token_ids: the prompt; ``None`` where it is ``text``.
        num_output_tokens: of the answer, whatever the model would like.
        at_s: when the trace has it, counted from its first request; ``None`` without a trace.
    """

    token_ids: Sequence[int] | None = field(default=None, repr=False)
    text: str | None = field(default=None, repr=False)
    num_output_tokens: int
    at_s: float | None = None


class Workload(Protocol):
    """A sequence of requests, the same for the same seed."""

    def next(self) -> BenchRequest | None:
        """The next one; ``None``: there are no more."""


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """What a workload is made of.

    Attributes:
        prompt_tokens, output_tokens: lengths, where there is no trace.
        trace: requests to take lengths, shared prefixes and times from, each once.
        ids: token ids that prompts are drawn from.
        is_text: send as many random words instead of token ids; a word is about a token.
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


def make_workload(config: WorkloadConfig, seed: Sequence[int]) -> Workload:
    """A workload from its start. Another ``seed`` gives prompts that share nothing with these."""
    if config.trace is None:
        return _RandomWorkload(config, seed)
    return _TraceWorkload(config, config.trace, seed)


class _RandomWorkload:
    """Endless; prompts are random, so that no two share a prefix."""

    def __init__(self, config: WorkloadConfig, seed: Sequence[int]) -> None:
        self._config = config
        self._rng = np.random.default_rng(seed)

    def next(self) -> BenchRequest:
        config = self._config
        count, num_output_tokens = config.prompt_tokens.draw(self._rng), config.output_tokens.draw(self._rng)
        ids = self._rng.integers(config.ids.low, config.ids.high, size=count, endpoint=True).tolist()
        return _make_request(config, ids, num_output_tokens, None)


class _TraceWorkload:
    def __init__(self, config: WorkloadConfig, trace: Sequence[TraceRequest], seed: Sequence[int]) -> None:
        self._config = config
        self._prompts = TracePrompts(seed, config.ids)
        self._requests = iter(trace)

    def next(self) -> BenchRequest | None:
        request = next(self._requests, None)
        if request is None:
            return None
        return _make_request(self._config, self._prompts.make(request), request.num_output_tokens, request.arrival_s)


def _make_request(
    config: WorkloadConfig, token_ids: list[int], num_output_tokens: int, at_s: float | None
) -> BenchRequest:
    if not config.is_text:
        return BenchRequest(token_ids=token_ids, num_output_tokens=num_output_tokens, at_s=at_s)
    text = " ".join(_WORDS[token_id % len(_WORDS)] for token_id in token_ids)
    return BenchRequest(text=text, num_output_tokens=num_output_tokens, at_s=at_s)
