"""What requests do to their logits before tokens are chosen: penalties, bias, tokens not to be chosen yet.

Each kind of rule is applied to all rows that have it at once; rows without rules are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quartet.engine.running import RunningRequest
from quartet.engine.torch.noise import noise_key


class RequestRules:
    """One request's part in sampling, prepared once. Lives in the engine thread.

    Attributes:
        sampling: its parameters.
        num_logprobs: alternatives to report, ``None`` for no report.
        has_penalties: some penalty differs from its neutral value.
        stop_ids: tokens not to be chosen before ``min_tokens`` are out.
    """

    def __init__(self, running: RunningRequest) -> None:
        generation = running.request.generation
        self.sampling = sampling = generation.sampling
        self.num_logprobs = generation.output.logprobs
        self.has_penalties = sampling.repetition_penalty != 1.0 or bool(
            sampling.presence_penalty or sampling.frequency_penalty
        )
        self.stop_ids = tuple(sorted(running.stop_ids))
        self._seed, self._choice = generation.seed, generation.choice
        self._num_prompt_tokens = running.num_prompt_tokens
        self._counts: TokenCounts | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the best token is all that is asked for, without rules or report."""
        return self.sampling.is_greedy and not self.changes_logits and self.num_logprobs is None

    @property
    def changes_logits(self) -> bool:
        """Whether some rule applies, now or at times."""
        return self.has_penalties or bool(self.sampling.logit_bias) or self.sampling.min_tokens > 0

    def key(self, position: int) -> int:
        """The noise's state for the token at ``position`` of the sequence."""
        return noise_key(self._seed, self._choice, position)

    def counts(self, token_ids: Sequence[int], vocab_size: int, device: torch.device) -> TokenCounts:
        """What the sequence holds, which only ever grows from call to call."""
        if self._counts is None:
            self._counts = TokenCounts(self._num_prompt_tokens, vocab_size, device)
        self._counts.update(token_ids)
        return self._counts


class TokenCounts:
    """Which tokens one sequence holds, kept up step by step.

    Attributes:
        is_seen: ``[V]`` bool: in prompt or output.
        num_in_output: ``[V]`` int32: times in the output.
    """

    def __init__(self, num_prompt_tokens: int, vocab_size: int, device: torch.device) -> None:
        self.is_seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.num_in_output = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = 0

    def update(self, token_ids: Sequence[int]) -> None:
        """Count the tokens that are new since the last call."""
        new = torch.tensor(token_ids[self._num_counted :], dtype=torch.long, device=self.is_seen.device)
        output = new[max(0, self._num_prompt_tokens - self._num_counted) :]
        self.is_seen[new] = True
        self.num_in_output.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self._num_counted = len(token_ids)


@dataclass(frozen=True)
class Row:
    """One row of a step's logits, with the request whose next token it yields."""

    index: int
    running: RunningRequest
    rules: RequestRules


def apply_rules(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """Change ``[N, V]`` logits in place: penalties, then bias, then stop ids where it is too early for them.

    Bias comes after penalties so that a bias moves a token by the same amount whether it was seen or not.
    """
    if penalised := [row for row in rows if row.rules.has_penalties]:
        _apply_penalties(logits, penalised)
    if biased := [row for row in rows if row.rules.sampling.logit_bias]:
        _add_bias(logits, biased)
    if early := [row for row in rows if row.running.num_output_tokens < row.rules.sampling.min_tokens]:
        indices, token_ids = _pairs([(row.index, row.rules.stop_ids) for row in early], logits.device)
        logits[indices, token_ids] = float("-inf")


def _apply_penalties(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    counts = [row.rules.counts(row.running.seq.token_ids, logits.shape[1], logits.device) for row in rows]
    sampling = [row.rules.sampling for row in rows]
    indices = torch.tensor([row.index for row in rows], dtype=torch.long, device=logits.device)
    is_seen = torch.stack([item.is_seen for item in counts])
    num_in_output = torch.stack([item.num_in_output for item in counts])
    repetition = _column([item.repetition_penalty for item in sampling], logits)
    presence = _column([item.presence_penalty for item in sampling], logits)
    frequency = _column([item.frequency_penalty for item in sampling], logits)
    penalised = logits[indices]
    repeated = torch.where(penalised > 0, penalised / repetition, penalised * repetition)
    penalised = torch.where(is_seen, repeated, penalised)
    logits[indices] = penalised - num_in_output * frequency - (num_in_output > 0) * presence


def _add_bias(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    biases = [bias for row in rows for bias in row.rules.sampling.logit_bias.values()]
    pairs = _pairs([(row.index, tuple(row.rules.sampling.logit_bias)) for row in rows], logits.device)
    logits[pairs] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)


def _pairs(
    tokens_by_row: Sequence[tuple[int, tuple[int, ...]]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every token."""
    rows = [row for row, token_ids in tokens_by_row for _ in token_ids]
    columns = [token_id for _, token_ids in tokens_by_row for token_id in token_ids]
    return (
        torch.tensor(rows, dtype=torch.long, device=device),
        torch.tensor(columns, dtype=torch.long, device=device),
    )


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
