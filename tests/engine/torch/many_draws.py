"""A million draws with rules of all kinds, in steps of long requests: what they are, and the CPU's tokens for them.

The CPU takes minutes for them: ``draw_on_cpu`` runs in several processes, which import this module and little else.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from quartet.engine.base import EngineRequest, Generation, RequestKind
from quartet.engine.runner import RunningRequest, SampledToken
from quartet.engine.sampling import OutputOptions, Sampling
from quartet.engine.torch.sampler import RequestRules, Row, Sampler, apply_rules, gumbel_noise
from quartet.kvcache.sequence import Sequence as TokenSequence

#: More than the kernels' searches hold at once.
VOCAB_SIZE = 5003
#: Steps of a request.
NUM_STEPS = 100

_STOP_IDS = (6, 8)
_NUM_LOGITS = 8
_PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3}
_BIAS = {token_id: (-1.0) ** token_id * (token_id % 5) for token_id in range(0, VOCAB_SIZE, 100)}


@dataclass(frozen=True)
class Kind:
    """What a row asks for, and the deviation of its logits."""

    sampling: Sampling
    spread: float = 3.0
    num_logprobs: int | None = None


_KINDS = (
    Kind(Sampling()),
    Kind(Sampling(temperature=0.8, top_p=0.95)),
    Kind(Sampling(temperature=1.5, top_k=50)),
    Kind(Sampling(top_p=0.99, **_PENALTIES)),
    Kind(Sampling(top_k=20, top_p=0.9, min_p=0.02)),
    Kind(Sampling(min_p=0.05, logit_bias=_BIAS)),
    Kind(Sampling(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.3)),
    Kind(Sampling(temperature=1.2, top_p=0.9, logit_bias=_BIAS, repetition_penalty=0.8)),
    Kind(Sampling(temperature=0.7, min_tokens=NUM_STEPS // 2), num_logprobs=3),
    Kind(Sampling(top_k=200, min_tokens=NUM_STEPS // 4, logit_bias=_BIAS, presence_penalty=0.7)),
    Kind(Sampling(temperature=1e-3, frequency_penalty=0.5)),
    Kind(Sampling(temperature=0.0), num_logprobs=5),
)
# The CPU sorts the vocabulary for them: so there are few.
_WIDE_KINDS = (
    Kind(Sampling(temperature=2.0, top_k=4500, top_p=0.999), spread=6.0),
    Kind(Sampling(top_k=3000, frequency_penalty=-0.2)),
    Kind(Sampling(temperature=0.7, top_p=0.8, min_p=0.001, **_PENALTIES), spread=1.0),
    Kind(Sampling(top_p=0.9), spread=1.5, num_logprobs=0),
)
KINDS = _KINDS * 3 + _WIDE_KINDS


@dataclass(frozen=True)
class Batch:
    """Requests of all kinds in turn, which run together for ``NUM_STEPS`` steps.

    Attributes:
        number: gives their seeds.
        dtype: of their logits.
    """

    number: int
    num_rows: int
    dtype: torch.dtype

    @property
    def num_draws(self) -> int:
        return self.num_rows * NUM_STEPS

    def requests(self) -> list[RunningRequest]:
        """New ones, before their first step."""
        return [self.request(row) for row in range(self.num_rows)]

    def request(self, row: int, output: tuple[int, ...] = ()) -> RunningRequest:
        """That of a row, once these tokens were drawn for it."""
        kind = KINDS[row % len(KINDS)]
        prompt = tuple((row + 7 * i) % VOCAB_SIZE for i in range(20))
        generation = Generation(
            prompt_token_ids=prompt,
            sampling=kind.sampling,
            seed=1000 * self.number + row,
            output=OutputOptions(logprobs=kind.num_logprobs),
        )
        request = EngineRequest(id=row, kind=RequestKind.DECODE, generation=generation)
        seq = TokenSequence([*prompt, *output], block_size=16)
        return RunningRequest(request=request, seq=seq, stop_ids=frozenset(_STOP_IDS))

    def logits(self, step: int) -> torch.Tensor:
        """``[num_rows, VOCAB_SIZE]``: those of a step, which other steps share; not to be changed."""
        return all_logits(self.num_rows, self.dtype)[step % _NUM_LOGITS]

    def sums(self, row: int, output: tuple[int, ...], token_ids: tuple[int, int]) -> list[float]:
        """What a row's next token is chosen by, of each of these tokens; filters aside."""
        request = self.request(row, output)
        logits = self.logits(len(output))[row : row + 1].float()
        rules, pair = RequestRules(request), torch.tensor([token_ids])
        apply_rules(logits, [Row(0, request, rules)])
        if rules.sampling.is_greedy:
            return logits[0, pair[0]].tolist()
        scaled = (logits - logits.amax()) / rules.sampling.temperature
        sums = gumbel_noise(torch.tensor([rules.key(len(request.seq))]), pair) + scaled.gather(1, pair)
        return sums[0].tolist()


@functools.cache
def all_logits(num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """``[_NUM_LOGITS, num_rows, VOCAB_SIZE]``."""
    generator = torch.Generator().manual_seed(num_rows)
    spreads = torch.tensor([KINDS[row % len(KINDS)].spread for row in range(num_rows)])
    logits = torch.randn(_NUM_LOGITS, num_rows, VOCAB_SIZE, generator=generator) * spreads[:, None]
    logits[:, :, list(_STOP_IDS)] += 3 * spreads[:, None]
    return logits.to(dtype)


def draw_on_cpu(batch: Batch, num_steps: int = NUM_STEPS) -> list[list[SampledToken]]:
    """The tokens of each step, by the CPU's sampler."""
    requests, sampler, steps = batch.requests(), Sampler(), []
    for step in range(num_steps):
        steps.append(sampler.sample(batch.logits(step).clone(), requests))
        for request, token in zip(requests, steps[-1], strict=True):
            request.seq.append(token.token_id)
    return steps
