"""Draws tokens from many rows of logits at once: temperature, top-k, top-p, min-p, then Gumbel-max.

All three filters keep what is at least as likely as some token, so each of them is a threshold on the logit, and the
strictest one counts. Tokens that are exactly as likely as the last one kept are kept too: which of them a sort puts
first is an accident. The order is the usual one: temperature, top-k, top-p of what is left, min-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quartet.engine.torch.noise import gumbel_noise

# A nucleus or a min-p set is mostly far smaller: these many best tokens are tried before the vocabulary is sorted.
_NUM_CANDIDATES = 1024
# Room for tokens that tie with the k-th one.
_NUM_SPARE_CANDIDATES = 64
# Rows are taken in groups, so that the noise and its passes stay near the processor.
_MAX_NOISE = 1 << 21
# Below it the best token is all there is, and dividing by it would overflow.
_MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class DrawParameters:
    """One entry a row.

    Attributes:
        temperature: ``[N]`` float, above 0.
        top_k: ``[N]`` int64, 0 for all.
        top_p: ``[N]`` float64, 1 for all.
        min_p: ``[N]`` float64, 0 for all.
        keys: ``[N]`` int64, the noise's states.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    keys: torch.Tensor

    def __getitem__(self, rows: slice | torch.Tensor) -> DrawParameters:
        """The parameters of these rows."""
        return DrawParameters(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.keys[rows]
        )


def draw(logits: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    """Draw one token a row.

    A row's token depends on its own logits and parameters alone.

    Args:
        logits: ``[N, V]`` float32 or float64; not changed.
        parameters: of these rows.

    Returns:
        ``[N]`` int64 token ids.
    """
    num_rows = max(1, _MAX_NOISE // logits.shape[1])
    groups = [slice(first, first + num_rows) for first in range(0, len(logits), num_rows)]
    return torch.cat([_draw_group(logits[rows], parameters[rows]) for rows in groups])


def _draw_group(logits: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    temperature = parameters.temperature.to(logits.dtype).clamp(min=_MIN_TEMPERATURE)[:, None]
    # Less the maximum first: what would overflow becomes minus infinity, which it is.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    is_filtered = (parameters.top_k > 0) | (parameters.top_p < 1) | (parameters.min_p > 0)
    if not bool(is_filtered.any()):
        return _draw_all(scaled, parameters.keys)
    if bool(is_filtered.all()):
        return _draw_filtered(scaled, parameters, _num_candidates(parameters, scaled.shape[1]))
    winners = torch.empty_like(parameters.keys)
    winners[~is_filtered] = _draw_all(scaled[~is_filtered], parameters.keys[~is_filtered])
    filtered = parameters[is_filtered]
    winners[is_filtered] = _draw_filtered(scaled[is_filtered], filtered, _num_candidates(filtered, scaled.shape[1]))
    return winners


def _draw_all(scaled: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    token_ids = torch.arange(scaled.shape[1], device=scaled.device)
    return gumbel_noise(keys, token_ids).add_(scaled).argmax(-1)


def _num_candidates(parameters: DrawParameters, vocab_size: int) -> int:
    """How many of the best tokens most likely hold every row's kept set."""
    num_kept = int(parameters.top_k.max())
    if bool((parameters.top_k == 0).any()):
        num_kept = max(num_kept, _NUM_CANDIDATES)
    return min(vocab_size, num_kept + _NUM_SPARE_CANDIDATES)


def _draw_filtered(scaled: torch.Tensor, parameters: DrawParameters, num_candidates: int) -> torch.Tensor:
    best = torch.topk(scaled, num_candidates, dim=-1)
    values = best.values.double()
    threshold = _threshold(values, scaled, parameters)[:, None]
    scores = gumbel_noise(parameters.keys, best.indices).add_(values).masked_fill_(values < threshold, float("-inf"))
    winners = best.indices.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
    if num_candidates == scaled.shape[1]:
        return winners
    # Where even the last candidate was kept, there may be more to keep.
    is_open = values[:, -1] >= threshold[:, 0]
    if bool(is_open.any()):
        winners[is_open] = _draw_filtered(scaled[is_open], parameters[is_open], scaled.shape[1])
    return winners


def _threshold(values: torch.Tensor, scaled: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    """The least logit kept in each row, ``[N]``.

    Args:
        values: ``[N, C]`` float64, the best logits of ``scaled``, best first.
        scaled: ``[N, V]``, all logits.
        parameters: of these rows.
    """
    lowest = torch.full_like(values[:, 0], float("-inf"))
    last_k = parameters.top_k.clamp(max=values.shape[1]).sub(1).clamp(min=0)
    least_k = torch.where(parameters.top_k > 0, _pick(values, last_k), lowest)
    least_p = torch.where(parameters.top_p < 1, _least_of_nucleus(values, scaled, least_k, parameters), lowest)
    return torch.stack((least_k, least_p, values[:, 0] + parameters.min_p.log())).amax(0)


def _least_of_nucleus(
    values: torch.Tensor, scaled: torch.Tensor, least_k: torch.Tensor, parameters: DrawParameters
) -> torch.Tensor:
    """The last logit of the smallest set whose probability, among what top-k keeps, reaches top-p."""
    kept = values.masked_fill(values < least_k[:, None], float("-inf"))
    total = torch.where(parameters.top_k > 0, kept.logsumexp(-1), scaled.double().logsumexp(-1))
    probabilities = (kept - total[:, None]).exp()
    mass_before = probabilities.cumsum(-1) - probabilities
    return _pick(values, (mass_before < parameters.top_p[:, None]).sum(-1).sub(1).clamp(min=0))


def _pick(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return values.gather(1, columns[:, None])[:, 0]
