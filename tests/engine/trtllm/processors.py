"""Logits processors such as a deployment brings along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FIRST_ID = 100


def only_odd(token_ids: Sequence[int], logits: Any) -> None:
    logits[0::2] = float("-inf")


def fails(token_ids: Sequence[int], logits: Any) -> None:
    raise ValueError(str(token_ids))


class CountsUp:
    """Lets only the next number through: it keeps count of its own request, and of the tokens that it is shown."""

    def __init__(self) -> None:
        self.first_length: int | None = None
        self.num_calls = 0

    def __call__(self, token_ids: Sequence[int], logits: Any) -> None:
        self.first_length = self.first_length or len(token_ids)
        assert len(token_ids) == self.first_length + self.num_calls
        kept = logits[FIRST_ID + self.num_calls].clone()
        logits[:] = float("-inf")
        logits[FIRST_ID + self.num_calls] = kept
        self.num_calls += 1


nameless = lambda token_ids, logits: None  # noqa: E731 - what pickle can't find is the point
NOT_CALLABLE = 7
