"""Prompts for the requests of a trace: equal hash ids become equal blocks of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cli.bench.lengths import IntRange
from cli.traces.format import BLOCK_SIZE, TraceRequest

# Streams of random numbers that must not meet: blocks that the trace names, and tails that it doesn't.
_BLOCKS, _TAILS = 0, 1


class TracePrompts:
    """Makes prompts of random ids in which equal hash ids are equal blocks of tokens, for one seed."""

    def __init__(self, seed: Sequence[int], ids: IntRange) -> None:
        self._seed = tuple(seed)
        self._ids = ids
        self._num_tails = 0

    def make(self, request: TraceRequest) -> list[int]:
        """The prompt of ``request``; tokens beyond its hash ids are its own."""
        token_ids: list[int] = []
        for hash_id in request.hash_ids:
            token_ids += self._draw(_BLOCKS, hash_id, BLOCK_SIZE)
        num_missing = request.num_input_tokens - len(token_ids)
        if num_missing > 0:
            self._num_tails += 1
            token_ids += self._draw(_TAILS, self._num_tails, num_missing)
        return token_ids[: request.num_input_tokens]

    def _draw(self, stream: int, name: int, count: int) -> list[int]:
        rng = np.random.default_rng((*self._seed, stream, name))
        drawn: list[int] = rng.integers(self._ids.low, self._ids.high, size=count, endpoint=True).tolist()
        return drawn
