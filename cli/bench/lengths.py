"""Numbers of tokens as an option says them: ``128``, or ``32-512`` for an even draw."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import typer

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class IntRange:
    """Whole numbers from ``low`` to ``high``, both included."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator) -> int:
        """One of them, each as likely."""
        return self.low if self.low == self.high else int(rng.integers(self.low, self.high, endpoint=True))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def parse_range(text: str, option: str) -> IntRange:
    """``N`` or ``LOW-HIGH``, at least 1. Raises ``typer.BadParameter`` naming ``option``."""
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        message = f"{text!r} is neither a number such as 128 nor a range such as 32-512"
        raise typer.BadParameter(message, param_hint=option)
    low, high = int(found[1]), int(found[2] or found[1])
    if not 1 <= low <= high:
        message = f"{text!r}: the lower bound must be at least 1 and at most the upper bound"
        raise typer.BadParameter(message, param_hint=option)
    return IntRange(low, high)
