"""What fills the prefix index in ``benchmarks.index``, and what is looked up in it: sessions that share system prompts.

A system prompt has 16 to 64 blocks and some are far more popular than others; a session goes on from one to 256 blocks
(8 k tokens in blocks of 32). It was served by one rank, and in three of ten cases, up to some point, by a second.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

#: Blocks of a prompt.
PROMPT_BLOCKS = 256
_NUM_SYSTEM_PROMPTS = 100
_SYSTEM_PROMPT_BLOCKS = (16, 64)
_SECOND_PLACE_SHARE = 0.3


@dataclass(frozen=True)
class StoredRun:
    """Blocks that one rank stores at once.

    Attributes:
        worker: its number.
        parent_hash: of the block before them.
        hashes: packed; ``tolist()`` makes new integers, as reading a message does.
    """

    worker: int
    parent_hash: int | None
    hashes: array[int]


@dataclass(frozen=True)
class _Session:
    system_prompt: array[int]
    own: array[int]


class Workload:
    """Of at least ``num_blocks`` different blocks at ``num_workers`` places; the same for the same numbers."""

    def __init__(self, num_blocks: int, num_workers: int) -> None:
        self._rng = random.Random(f"{num_blocks} {num_workers}")
        self._system_prompts = [
            self._hashes(self._rng.randint(*_SYSTEM_PROMPT_BLOCKS)) for _ in range(_NUM_SYSTEM_PROMPTS)
        ]
        self._sessions: list[_Session] = []
        self.runs: list[StoredRun] = []
        self._fill(num_blocks, num_workers)

    @property
    def num_stored(self) -> int:
        """Blocks of all runs: a block counts once for each rank."""
        return sum(len(run.hashes) for run in self.runs)

    def prompts(self, count: int) -> Iterator[list[int]]:
        """Prompts that each follow some session to some block, none and all included, and then go their own way."""
        for _ in range(count):
            session = self._rng.choice(self._sessions)
            prompt = (session.system_prompt + session.own)[: self._rng.randint(0, PROMPT_BLOCKS)]
            yield (prompt + self._hashes(PROMPT_BLOCKS - len(prompt))).tolist()

    def _fill(self, num_blocks: int, num_workers: int) -> None:
        weights = [1 / rank for rank in range(1, _NUM_SYSTEM_PROMPTS + 1)]
        at_rank: set[tuple[int, int]] = set()

        def serve(worker: int, which: int, own: array[int]) -> None:
            system_prompt = self._system_prompts[which]
            if (worker, which) not in at_rank:
                at_rank.add((worker, which))
                self.runs.append(StoredRun(worker, None, system_prompt))
            self.runs.append(StoredRun(worker, system_prompt[-1], own))

        num_made = 0
        while num_made < num_blocks:
            [which] = self._rng.choices(range(_NUM_SYSTEM_PROMPTS), weights)
            own = self._hashes(PROMPT_BLOCKS - len(self._system_prompts[which]))
            self._sessions.append(_Session(self._system_prompts[which], own))
            num_made += len(own)
            serve(self._rng.randrange(num_workers), which, own)
            if self._rng.random() < _SECOND_PLACE_SHARE:
                serve(self._rng.randrange(num_workers), which, own[: self._rng.randint(1, len(own))])

    def _hashes(self, count: int) -> array[int]:
        return array("Q", self._rng.randbytes(8 * count))
