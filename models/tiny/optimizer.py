"""Muon for the matrices of layers, AdamW for all other weights, and one schedule of learning rates for both.

Muon: Keller Jordan, https://kellerjordan.github.io/posts/muon; here matrices of one shape are updated as one stack.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rates: up over the first steps, level, then straight down to 0 at the last.

    Attributes:
        num_steps: of the whole training.
        num_warmup_steps: of rising.
        decay_share: of ``num_steps``, at the end.
        muon_rate: of Muon while level.
        adam_rate: of AdamW while level.
    """

    num_steps: int
    num_warmup_steps: int = 150
    decay_share: float = 0.7
    muon_rate: float = 0.015
    adam_rate: float = 2e-3

    def factor(self, step: int) -> float:
        """Return the factor of both rates at ``step``."""
        left = (self.num_steps - step) / (self.decay_share * self.num_steps)
        return max(0.0, min(1.0, (step + 1) / self.num_warmup_steps, left))


class Optimizer:
    """Updates a model's weights."""

    def __init__(self, model: nn.Module, schedule: Schedule) -> None:
        """Sort the weights: matrices within layers go to Muon."""
        self._schedule = schedule
        matrices = {name for name, weight in model.named_parameters() if weight.ndim == 2 and ".layers." in name}
        weights = dict(model.named_parameters())
        self._muon = _Muon(weights[name] for name in sorted(matrices))
        others = [weights[name] for name in sorted(set(weights) - matrices)]
        self._adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=others[0].is_cuda)

    def step(self, step: int) -> None:
        """Update the weights from their gradients, and drop the gradients; ``step`` counts from 0."""
        factor = self._schedule.factor(step)
        self._muon.step(factor * self._schedule.muon_rate)
        for group in self._adam.param_groups:
            group["lr"] = factor * self._schedule.adam_rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Return the state that a later process needs to continue."""
        return {"muon": [stack.cpu() for stack in self._muon.momenta], "adam": self._adam.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what ``state`` returned."""
        for mine, saved in zip(self._muon.momenta, state["muon"], strict=True):
            mine.copy_(saved)
        self._adam.load_state_dict(state["adam"])


class _Muon:
    _MOMENTUM, _DECAY = 0.95, 0.01

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for weight in weights:
            by_shape[tuple(weight.shape)].append(weight)
        self._stacks = list(by_shape.values())
        self.momenta = [torch.zeros(len(stack), *stack[0].shape, device=stack[0].device) for stack in self._stacks]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for stack, momentum in zip(self._stacks, self.momenta, strict=True):
            gradient = torch.stack([weight.grad for weight in stack if weight.grad is not None])
            momentum.lerp_(gradient, 1 - self._MOMENTUM)
            update = _orthogonal(gradient.lerp_(momentum, self._MOMENTUM))
            # The same change per output for matrices of every shape.
            scale = max(1.0, momentum.shape[1] / momentum.shape[2]) ** 0.5
            torch._foreach_mul_(stack, 1 - rate * self._DECAY)
            torch._foreach_add_(stack, list(update.to(momentum.dtype).unbind()), alpha=-rate * scale)
            for weight in stack:
                weight.grad = None


def _orthogonal(matrices: Tensor, num_steps: int = 5) -> Tensor:
    """Return the nearest orthogonal matrices, roughly: five steps of Newton and Schulz, in bfloat16."""
    x: Tensor = matrices.bfloat16()
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x
