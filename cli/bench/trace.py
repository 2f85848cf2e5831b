"""Request traces in Mooncake's format: JSON lines of ``timestamp``, ``input_length``, ``output_length``, ``hash_ids``.

See kvcache-ai/Mooncake, FAST25-release/traces: a hash id names a block of 512 prompt tokens (the last one may be
shorter) together with all before it, so that requests with equal leading ids share a prefix.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cli.bench.lengths import IntRange

#: Prompt tokens that one hash id stands for.
BLOCK_SIZE = 512

# Streams of random numbers that must not meet: blocks that the trace names, and tails that it doesn't.
_BLOCKS, _TAILS = 0, 1


class TraceError(ValueError):
    """A trace can't be used; the message names the line."""


@dataclass(frozen=True, kw_only=True)
class TraceRecord:
    """One request of a trace; ``at_s`` counts from the trace's first request."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path) -> list[TraceRecord]:
    """The requests of ``path`` in the order of their times. Raises ``TraceError``."""
    records = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                records.append(_parse(line, f"{path}, line {number}"))
    if not records:
        raise TraceError(f"{path} holds no requests")
    records.sort(key=lambda record: record.at_s)
    first = records[0].at_s
    return [
        TraceRecord(
            at_s=record.at_s - first,
            num_prompt_tokens=record.num_prompt_tokens,
            num_output_tokens=record.num_output_tokens,
            hash_ids=record.hash_ids,
        )
        for record in records
    ]


class TracePrompts:
    """Makes prompts of random ids in which equal hash ids are equal blocks of tokens, for one seed."""

    def __init__(self, seed: Sequence[int], ids: IntRange) -> None:
        self._seed = tuple(seed)
        self._ids = ids
        self._num_tails = 0

    def make(self, record: TraceRecord) -> list[int]:
        """The prompt of ``record``; tokens beyond its hash ids are its own."""
        token_ids: list[int] = []
        for hash_id in record.hash_ids:
            token_ids += self._draw(_BLOCKS, hash_id, BLOCK_SIZE)
        num_missing = record.num_prompt_tokens - len(token_ids)
        if num_missing > 0:
            self._num_tails += 1
            token_ids += self._draw(_TAILS, self._num_tails, num_missing)
        return token_ids[: record.num_prompt_tokens]

    def _draw(self, stream: int, name: int, count: int) -> list[int]:
        rng = np.random.default_rng((*self._seed, stream, name))
        drawn: list[int] = rng.integers(self._ids.low, self._ids.high, size=count, endpoint=True).tolist()
        return drawn


def _parse(line: str, where: str) -> TraceRecord:
    try:
        row = json.loads(line)
        record = TraceRecord(
            at_s=float(row["timestamp"]) / 1e3,
            num_prompt_tokens=int(row["input_length"]),
            num_output_tokens=int(row["output_length"]),
            hash_ids=tuple(int(hash_id) for hash_id in row.get("hash_ids") or ()),
        )
    except KeyError as error:
        raise TraceError(f"{where} has no {error.args[0]}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise TraceError(f"{where} is no request of a Mooncake trace: {error}") from error
    if record.num_prompt_tokens < 1 or record.num_output_tokens < 1 or min(record.hash_ids, default=0) < 0:
        raise TraceError(f"{where}: lengths must be at least 1 and hash ids must not be negative")
    return record
