"""From logits to a token: what `SamplingParams` asks for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: Says which of the most likely tokens a guide lets through.
Guide = Callable[[Sequence[int], torch.Tensor], torch.Tensor]


class Drawer:
    """Draws the tokens of one sequence, which has its own random numbers."""

    def __init__(
        self,
        params: Any,
        index: int,
        prompt: Sequence[int],
        guide: Guide | None,
        process: Callable[[torch.Tensor, list[int]], None],
        *,
        honours_all: bool,
    ) -> None:
        """Draw.

        Args:
            process: changes the logits after so many tokens, in place.
            honours_all: penalties, ``min_p`` and the seed count, too.
        """
        params = params if honours_all else _plain(params)
        self._params, self._prompt, self._guide, self._process = params, list(prompt), guide, process
        self._generator = torch.Generator()
        self._generator.manual_seed((params.seed if params.seed is not None else torch.seed()) + index)
        given = (params.temperature, params.top_k, params.top_p)
        self._is_greedy = given == (None, None, None) or params.temperature == 0 or params.top_k == 1

    def draw(self, logits: torch.Tensor, generated: Sequence[int], *, num_unseen: int = 0) -> tuple[int, torch.Tensor]:
        """Return the next token and the log-probabilities (of the model, before any of the parameters).

        The last ``num_unseen`` of the ``generated`` tokens are not known yet to what changes the logits.
        """
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        scores = logits.float().clone()
        self._process(scores, [*self._prompt, *generated[: len(generated) - num_unseen]])
        scores = self._penalized(scores, generated)
        self._ban(scores, generated)
        if self._guide is not None:
            scores = self._guide(generated, scores)
        if self._is_greedy:
            return int(scores.argmax()), log_probs
        probs = self._kept(torch.softmax(scores / (self._params.temperature or 1.0), dim=-1))
        return int(torch.multinomial(probs, 1, generator=self._generator)), log_probs

    def _penalized(self, scores: torch.Tensor, generated: Sequence[int]) -> torch.Tensor:
        params, prompt = self._params, self._prompt[self._params.prompt_ignore_length or 0 :]
        if params.repetition_penalty is not None:
            seen = torch.tensor(sorted({*prompt, *generated}), dtype=torch.long)
            values = scores[seen]
            scores[seen] = torch.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
        if generated and (params.presence_penalty or params.frequency_penalty):
            counts = torch.bincount(torch.tensor(list(generated)), minlength=len(scores)).float()
            scores -= (params.presence_penalty or 0.0) * (counts > 0) + (params.frequency_penalty or 0.0) * counts
        return scores

    def _ban(self, scores: torch.Tensor, generated: Sequence[int]) -> None:
        params = self._params
        banned = set(params.bad_token_ids or [])
        if len(generated) < (params.min_tokens or 0):
            banned |= {params.end_id, *(params.stop_token_ids or [])} - {None, -1}
        if params.no_repeat_ngram_size:
            banned |= _repeats([*self._prompt, *generated], params.no_repeat_ngram_size)
        if params.embedding_bias is not None:
            scores += params.embedding_bias
        scores[list(banned)] = float("-inf")

    def _kept(self, probs: torch.Tensor) -> torch.Tensor:
        params = self._params
        if params.top_k:
            probs = torch.where(probs < probs.topk(min(params.top_k, len(probs))).values[-1], 0.0, probs)
        if params.top_p is not None and params.top_p < 1:
            ordered, ids = probs.sort(descending=True)
            before = ordered.cumsum(0) - ordered
            ordered = torch.where(before > params.top_p * ordered.sum(), 0.0, ordered)
            probs = torch.zeros_like(probs).scatter(0, ids, ordered)
        if params.min_p:
            probs = torch.where(probs < params.min_p * probs.max(), 0.0, probs)
        return probs


def _repeats(token_ids: list[int], size: int) -> set[int]:
    """Tokens that would end an n-gram of ``size`` a second time."""
    tail = token_ids[len(token_ids) - size + 1 :] if size > 1 else []
    starts = range(len(token_ids) - size + 1)
    return {token_ids[start + size - 1] for start in starts if token_ids[start : start + size - 1] == tail}


def _plain(params: Any) -> Any:
    """``params`` as `TorchSampler` reads them."""
    plain = copy.copy(params)
    for name in (
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "no_repeat_ngram_size",
        "min_p",
        "seed",
    ):
        setattr(plain, name, None)
    return plain
