"""Chooses the next token of every row of a step's logits.

Rows pay for what they ask for: where all are greedy and plain it is one argmax. A row's choice does not depend on the
rest of the batch, except through its logits, whose last bits may differ from one composition of a batch to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from quartet.engine.runner import SampledToken
from quartet.engine.running import RunningRequest
from quartet.engine.sampling import TokenLogprobs
from quartet.engine.torch.draw import DrawParameters, draw
from quartet.engine.torch.rules import RequestRules, Row, apply_rules


class Sampler:
    """Samples with all fields of ``Sampling`` and ``OutputOptions``. Lives in the engine thread."""

    def __init__(self) -> None:
        self._rules: WeakKeyDictionary[RunningRequest, RequestRules] = WeakKeyDictionary()

    def sample(self, logits: torch.Tensor, requests: Sequence[RunningRequest]) -> list[SampledToken]:
        """Choose a token for each request.

        Args:
            logits: ``[N, V]``, row ``i`` for the token that follows ``requests[i].seq``; may be changed.
            requests: one a row.
        """
        rows = [Row(i, running, self._rules_of(running)) for i, running in enumerate(requests)]
        if all(row.rules.is_plain for row in rows):
            return [SampledToken(token_id) for token_id in logits.argmax(-1).tolist()]
        if logits.dtype != torch.float64:
            logits = logits.float()
        reported = [row for row in rows if row.rules.num_logprobs is not None]
        # Before the rules: log probabilities are the model's own.
        model_logprobs = logits[_indices(reported, logits.device)].log_softmax(-1) if reported else None
        apply_rules(logits, [row for row in rows if row.rules.changes_logits])
        token_ids = _choose(logits, rows)
        reports: dict[int, TokenLogprobs] = {}
        if model_logprobs is not None:
            reports = _report(model_logprobs, reported, token_ids)
        return [SampledToken(token_id, reports.get(i)) for i, token_id in enumerate(token_ids)]

    def _rules_of(self, running: RunningRequest) -> RequestRules:
        rules = self._rules.get(running)
        if rules is None:
            rules = self._rules[running] = RequestRules(running)
        return rules


def _choose(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    drawn = [row for row in rows if not row.rules.sampling.is_greedy]
    if len(drawn) == len(rows):
        winners = draw(logits, _parameters(drawn, logits.device))
    else:
        winners = logits.argmax(-1)
        if drawn:
            indices = _indices(drawn, logits.device)
            winners[indices] = draw(logits[indices], _parameters(drawn, logits.device))
    token_ids: list[int] = winners.tolist()
    return token_ids


def _indices(rows: Sequence[Row], device: torch.device) -> torch.Tensor:
    return torch.tensor([row.index for row in rows], dtype=torch.long, device=device)


def _parameters(rows: Sequence[Row], device: torch.device) -> DrawParameters:
    sampling = [row.rules.sampling for row in rows]
    return DrawParameters(
        temperature=torch.tensor([item.temperature for item in sampling], dtype=torch.float64, device=device),
        top_k=torch.tensor([item.top_k for item in sampling], dtype=torch.long, device=device),
        top_p=torch.tensor([item.top_p for item in sampling], dtype=torch.float64, device=device),
        min_p=torch.tensor([item.min_p for item in sampling], dtype=torch.float64, device=device),
        keys=torch.tensor([row.rules.key(len(row.running.seq)) for row in rows], dtype=torch.long, device=device),
    )


def _report(logprobs: torch.Tensor, rows: Sequence[Row], token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
    """Log probabilities by row index; ``logprobs`` is ``[len(rows), V]``."""
    chosen = torch.tensor([token_ids[row.index] for row in rows], dtype=torch.long, device=logprobs.device)
    chosen_logprobs: list[float] = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    num_top = max(row.rules.num_logprobs or 0 for row in rows)
    top = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    top_ids: list[list[int]] = top.indices.tolist()
    top_values: list[list[float]] = top.values.tolist()
    reports = {}
    for row, logprob, ids, values in zip(rows, chosen_logprobs, top_ids, top_values, strict=True):
        num = row.rules.num_logprobs or 0
        reports[row.index] = TokenLogprobs(token_ids[row.index], logprob, tuple(ids[:num]), tuple(values[:num]))
    return reports
