"""What a request does to its logits before a token is chosen: penalties, bias, tokens it must not choose yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quartet.engine.running import RunningRequest
from quartet.engine.torch.noise import noise_key


class RequestRules:
    """One request's part in sampling, prepared once. Lives in the engine thread.

    Attributes:
        is_greedy: the best token is taken.
        changes_logits: some rule applies to it, now or at times.
        num_logprobs: alternatives to report, ``None`` for no report.
    """

    def __init__(self, running: RunningRequest, vocab_size: int, device: torch.device) -> None:
        generation = running.request.generation
        self.sampling = sampling = generation.sampling
        self.is_greedy = sampling.is_greedy
        self.num_logprobs = generation.output.logprobs
        self._seed, self._choice = generation.seed, generation.choice
        self._stop_ids = torch.tensor(sorted(running.stop_ids), dtype=torch.long, device=device)
        self._bias_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.long, device=device)
        self._biases = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float64, device=device)
        self._has_penalties = sampling.repetition_penalty != 1.0 or bool(
            sampling.presence_penalty or sampling.frequency_penalty
        )
        self._tokens = _TokenCounts(running, vocab_size, device) if self._has_penalties else None
        self.changes_logits = self._has_penalties or bool(sampling.logit_bias) or sampling.min_tokens > 0

    def key(self, position: int) -> int:
        """The noise's state for the token at ``position`` of the sequence."""
        return noise_key(self._seed, self._choice, position)

    def apply(self, logits: torch.Tensor, token_ids: Sequence[int], num_output_tokens: int) -> None:
        """Change ``[V]`` logits in place: penalties, then bias, then stop ids where it is too early for them.

        Bias comes after penalties so that a bias moves a token by the same amount whether it was seen or not.
        """
        if self._tokens is not None:
            self._tokens.update(token_ids)
            self._apply_penalties(logits, self._tokens)
        if len(self._bias_ids):
            logits.index_add_(0, self._bias_ids, self._biases.to(logits.dtype))
        if num_output_tokens < self.sampling.min_tokens:
            logits.index_fill_(0, self._stop_ids, float("-inf"))

    def _apply_penalties(self, logits: torch.Tensor, tokens: _TokenCounts) -> None:
        penalty = self.sampling.repetition_penalty
        if penalty != 1.0:
            seen = logits[tokens.is_seen]
            logits[tokens.is_seen] = torch.where(seen > 0, seen / penalty, seen * penalty)
        if self.sampling.frequency_penalty:
            logits.sub_(tokens.num_in_output, alpha=self.sampling.frequency_penalty)
        if self.sampling.presence_penalty:
            logits.sub_(tokens.num_in_output > 0, alpha=self.sampling.presence_penalty)


class _TokenCounts:
    """Which tokens a sequence holds, kept up step by step: a sequence only ever grows."""

    def __init__(self, running: RunningRequest, vocab_size: int, device: torch.device) -> None:
        self.is_seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.num_in_output = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self._num_prompt_tokens = running.num_prompt_tokens
        self._num_counted = 0

    def update(self, token_ids: Sequence[int]) -> None:
        """Count the tokens that are new since the last call."""
        device = self.is_seen.device
        new = torch.tensor(token_ids[self._num_counted :], dtype=torch.long, device=device)
        output = new[max(0, self._num_prompt_tokens - self._num_counted) :]
        self.is_seen[new] = True
        self.num_in_output.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self._num_counted = len(token_ids)
