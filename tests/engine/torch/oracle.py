"""What ``model.generate`` says, and how the engine's tokens are held against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

# Two logits this close are a tie: rounding decides.
_TIE = 1e-6


@dataclass(frozen=True)
class Continuation:
    """The oracle's greedy tokens after one prompt, and the logits each of them was chosen from."""

    token_ids: tuple[int, ...]
    logits: torch.Tensor


class Oracle:
    """``generate`` on one checkpoint, one prompt at a time.

    Attributes:
        num_ties: comparisons that passed only because two logits were closer than ``_TIE``.
    """

    def __init__(self, directory: Path) -> None:
        auto: Any = transformers.AutoModelForCausalLM
        self._model: Any = auto.from_pretrained(
            directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        self._known: dict[tuple[tuple[int, ...], int], Continuation] = {}
        self.num_ties = 0

    def generate(self, prompt: Sequence[int], num_tokens: int) -> Continuation:
        key = (tuple(prompt), num_tokens)
        if key not in self._known:
            self._known[key] = self._generate(*key)
        return self._known[key]

    def check(self, prompt: Sequence[int], token_ids: Sequence[int], num_tokens: int) -> None:
        """``token_ids`` are the greedy continuation, or leave it where two tokens tie."""
        expected = self.generate(prompt, num_tokens)
        assert len(token_ids) == num_tokens
        for i, (ours, theirs) in enumerate(zip(token_ids, expected.token_ids, strict=True)):
            if ours != theirs:
                distance = float(expected.logits[i, theirs] - expected.logits[i, ours])
                assert distance < _TIE, f"token {i}: {ours}, not {theirs}; logits differ by {distance}"
                self.num_ties += 1
                print(f"tie at token {i}: {distance}")
                return

    def losses(self, prompt: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """How far each token's logit lies below the best one's, given the prompt and the tokens before it."""
        with torch.no_grad():
            [logits] = self._model(torch.tensor([[*prompt, *token_ids]])).logits
        logits = logits[len(prompt) - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
        losses: list[float] = (logits.max(-1).values - chosen).tolist()
        return losses

    def prompt_logprobs(self, prompt: Sequence[int]) -> torch.Tensor:
        """Log probabilities of all tokens at each position of the prompt but the first: ``[len(prompt) - 1, V]``."""
        with torch.no_grad():
            [logits] = self._model(torch.tensor([list(prompt)])).logits
        logprobs: torch.Tensor = logits[:-1].log_softmax(-1)
        return logprobs

    def _generate(self, prompt: tuple[int, ...], num_tokens: int) -> Continuation:
        output = self._model.generate(
            torch.tensor([prompt]),
            max_new_tokens=num_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits = torch.cat(output.logits)
        return Continuation(tuple(output.sequences[0, len(prompt) :].tolist()), logits)
