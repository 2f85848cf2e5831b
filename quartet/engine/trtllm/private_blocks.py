"""Which blocks must not be told of: those of requests with a salt, an adapter or media, which look like plain ones.

TensorRT-LLM 1.2's events carry tokens, and nothing of what else decides a block's contents.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quartet.kvcache.block_hash import TOKEN_SIZE_BYTES, pack_token_ids, sequence_hashes

# How much later than a request's end its last events may be sent on, by which time its last steps are long over.
_GRACE_S = 5.0
# Requests that ended and whose events may still come, some 500 bytes each.
_MAX_ENDED = 1 << 15


@dataclass(frozen=True)
class _Start:
    """The first private block of a sequence: after the block named ``parent``, and with these tokens at its front."""

    parent: int | None
    token_bytes: bytes


class PrivateTokens:
    """One private request, from before it is submitted until ``end``."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end: Callable[[], None] | None = on_end

    def end(self) -> None:
        """Its last output came. May be called twice."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


class PrivateBlocks:
    """What private requests' first private blocks look like, for as long as events may still tell of such blocks.

    What follows a block without a name of ours has none either, so one block a request is enough; and the tokens that
    it had at first are, as any block that begins with them might be its. That also withholds plain blocks that look
    the same and are stored meanwhile: too little is told, never too much. Should too many end while nothing is heard,
    they are forgotten one by one, and every block counts as theirs until events catch up. Thread-safe.
    """

    def __init__(self, block_size: int, clock: Callable[[], float] = time.monotonic, max_ended: int = _MAX_ENDED):
        self._block_size_bytes = block_size * TOKEN_SIZE_BYTES
        self._block_size = block_size
        self._clock = clock
        self._max_ended = max_ended
        self._lock = threading.Lock()
        # By parent: how many have exactly this block, or only its front yet.
        self._full: dict[int | None, dict[bytes, int]] = {}
        self._fronts: dict[int | None, dict[bytes, int]] = {}
        self._ended: deque[tuple[float, _Start]] = deque()
        self._overflowed_at: float | None = None

    def __len__(self) -> int:
        """Requests that are remembered."""
        with self._lock:
            return sum(sum(blocks.values()) for kind in (self._full, self._fronts) for blocks in kind.values())

    def add(self, token_ids: Sequence[int], first_position: int = 0) -> PrivateTokens:
        """A private request is about to be submitted.

        Args:
            token_ids: of its prompt and what is generated already.
            first_position: where its contents begin to differ from a plain request's.
        """
        first_block = first_position // self._block_size
        before = sequence_hashes(token_ids[: first_block * self._block_size], self._block_size)
        block = token_ids[first_block * self._block_size : (first_block + 1) * self._block_size]
        start = _Start(before[-1] if before else None, pack_token_ids(block))
        with self._lock:
            self._count(start, 1)
        return PrivateTokens(lambda: self._end(start))

    def matches(self, parent: int | None, token_bytes: bytes) -> bool:
        """Whether a block with these tokens, after the one with that sequence hash, might be private."""
        with self._lock:
            if self._overflowed_at is not None or token_bytes in self._full.get(parent, ()):
                return True
            return any(token_bytes.startswith(front) for front in self._fronts.get(parent, ()))

    def forget(self, told_until: float) -> None:
        """All that the engine had to say before ``told_until``, in ``clock``'s seconds, was heard."""
        with self._lock:
            while self._ended and self._ended[0][0] + _GRACE_S <= told_until:
                self._count(self._ended.popleft()[1], -1)
            if self._overflowed_at is not None and self._overflowed_at + _GRACE_S <= told_until:
                self._overflowed_at = None

    def _end(self, start: _Start) -> None:
        with self._lock:
            self._ended.append((self._clock(), start))
            if len(self._ended) > self._max_ended:
                self._overflowed_at = self._ended[-1][0]
                while self._ended:
                    self._count(self._ended.popleft()[1], -1)

    def _count(self, start: _Start, change: int) -> None:
        by_parent = self._full if len(start.token_bytes) == self._block_size_bytes else self._fronts
        blocks = by_parent.setdefault(start.parent, {})
        blocks[start.token_bytes] = blocks.get(start.token_bytes, 0) + change
        if not blocks[start.token_bytes]:
            del blocks[start.token_bytes]
        if not blocks:
            del by_parent[start.parent]
