"""Marks in the blocks of a pool without KV, by which bytes that came wrong over a transfer are found."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from quartet.engine.running import RunningRequest, ScheduledChunk
from quartet.transfer.base import PoolMemory


class WrongBlocksError(Exception):
    """Blocks do not hold the tokens of the request that they were given to."""


class BlockStamps:
    """Stamps each full block with a digest of its tokens, and looks at the stamps of blocks that a request was given.

    A block has the stamp in its first and its last word, so that one that came half is found, too.
    """

    def __init__(self, memory: PoolMemory, block_size: int, first_block: int = 0) -> None:
        """``memory``: of blocks of ``block_size`` tokens, whose bytes are whole words of 4, two at least.

        Block 0 of who asks is its block ``first_block``.
        """
        pool = np.frombuffer(memory.view, np.uint32).reshape(memory.num_blocks, -1)[first_block:]
        self._first_words, self._last_words = pool[:, 0], pool[:, -1]
        self._block_size = block_size
        self._last_ids: frozenset[int] = frozenset()

    def take(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Stamp the blocks that one step's ``chunks`` fill, after a look at those before, where a request is new.

        Raises:
            WrongBlocksError: a block does not hold what its request's tokens give, whoever computed it.
        """
        last_ids, self._last_ids = self._last_ids, frozenset(chunk.running.id for chunk in chunks)
        for chunk in chunks:
            if chunk.running.id not in last_ids:
                self._check(chunk.running, chunk.first_position // self._block_size)
            self._stamp(chunk)

    def _stamp(self, chunk: ScheduledChunk) -> None:
        size, seq = self._block_size, chunk.running.seq
        first, end = chunk.first_position // size, (chunk.first_position + chunk.num_tokens) // size
        if first < end:
            blocks = seq.block_table[first:end]
            self._first_words[blocks] = self._last_words[blocks] = _stamps(
                seq.token_ids[first * size : end * size], size
            )

    def _check(self, running: RunningRequest, num_full: int) -> None:
        blocks = running.seq.block_table[:num_full]
        expected = _stamps(running.seq.token_ids[: num_full * self._block_size], self._block_size)
        wrong = (self._first_words[blocks] != expected) | (self._last_words[blocks] != expected)
        if wrong.any():
            raise WrongBlocksError(f"blocks {np.flatnonzero(wrong).tolist()} of the sequence hold something else")


def _stamps(token_ids: Sequence[int], block_size: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """One digest a block, never 0: a block that nobody wrote is."""
    tokens = np.asarray(token_ids, np.uint32).reshape(-1, block_size)
    return np.array([zlib.crc32(block.data) or 1 for block in tokens], np.uint32)
