"""What both sides of the engine benchmark compute: random prompts, and how many tokens follow each."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

VOCAB_SIZE = 4096

_NUM_STREAMS = 32
_MAX_PROMPT, _MAX_OUTPUT = 512, 256


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request: greedy, exactly ``num_output_tokens``."""

    prompt: tuple[int, ...] = field(repr=False)
    num_output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that come at once.

    Attributes:
        counts_prompts: what is useful are the prompts' tokens, not the output's; each request wants one token.
    """

    jobs: Sequence[Job]
    counts_prompts: bool = False

    @property
    def num_useful_tokens(self) -> int:
        """Tokens that somebody asked for: padding, and what comes after a request's end, are none."""
        return sum(len(job.prompt) if self.counts_prompts else job.num_output_tokens for job in self.jobs)


def one_stream(source: random.Random) -> Workload:
    """A single request that decodes."""
    return Workload(jobs=[Job(prompt=_tokens(source, 32), num_output_tokens=128)])


def equal_32(source: random.Random) -> Workload:
    """32 requests of one length: what a padded batch does best."""
    return Workload(jobs=[Job(prompt=_tokens(source, 64), num_output_tokens=64) for _ in range(_NUM_STREAMS)])


def ragged_32(source: random.Random) -> Workload:
    """32 requests with prompts of 32 to 512 tokens and outputs of 16 to 256, evenly spread and paired at random."""
    prompts = _spread(32, _MAX_PROMPT)
    outputs = _spread(16, _MAX_OUTPUT)
    source.shuffle(prompts)
    source.shuffle(outputs)
    return Workload(
        jobs=[
            Job(prompt=_tokens(source, num_prompt), num_output_tokens=num_output)
            for num_prompt, num_output in zip(prompts, outputs, strict=True)
        ]
    )


def prefill(source: random.Random) -> Workload:
    """32 prompts of 256 tokens, one token each."""
    jobs = [Job(prompt=_tokens(source, 256), num_output_tokens=1) for _ in range(_NUM_STREAMS)]
    return Workload(jobs=jobs, counts_prompts=True)


def long_prompt(source: random.Random) -> Workload:
    """One prompt of 1500 tokens, one token."""
    return Workload(jobs=[Job(prompt=_tokens(source, 1500), num_output_tokens=1)], counts_prompts=True)


def shared_prefix_32(source: random.Random) -> Workload:
    """32 requests that begin with the same 1024 tokens, go on with 16 of their own, and want 16 more."""
    prefix = _tokens(source, 1024)
    return Workload(jobs=[Job(prompt=prefix + _tokens(source, 16), num_output_tokens=16) for _ in range(_NUM_STREAMS)])


#: By the name under which results are given.
WORKLOADS: Mapping[str, Callable[[random.Random], Workload]] = {
    make.__name__: make for make in (one_stream, equal_32, ragged_32, prefill, long_prompt, shared_prefix_32)
}


def _tokens(source: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(source.randrange(VOCAB_SIZE) for _ in range(num_tokens))


def _spread(first: int, last: int) -> list[int]:
    return [first + round((last - first) * i / (_NUM_STREAMS - 1)) for i in range(_NUM_STREAMS)]
