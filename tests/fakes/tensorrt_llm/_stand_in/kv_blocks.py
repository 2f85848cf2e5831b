"""The book of one window's KV blocks on one rank: how many each sequence holds, what is reused, which events come.

Only the book is kept by blocks; each sequence's KV lies in a cache of its own, and a prefix that the book calls reused
is computed again.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm._stand_in import kv_events
from tensorrt_llm._stand_in.kv_events import EventLog, Item

Keys = Sequence[tuple[int, int]]  # token id and token extra id


@dataclass
class _Block:
    block_hash: int
    parent_hash: int | None
    num_tokens: int
    num_users: int = 0
    level: int = 0
    num_children: int = 0


@dataclass
class Holding:
    """What one sequence holds: cached blocks, in order, and room for others.

    Attributes:
        salt: what decides, besides tokens, whose blocks can be shared.
        told_salt: what events say of it.
        items: its pictures.
    """

    salt: str
    told_salt: str = ""
    items: Sequence[Item] = ()
    blocks: list[_Block] = field(default_factory=list)
    num_private: int = 0

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in its cached blocks."""
        return sum(block.num_tokens for block in self.blocks)


class BlockBook:
    """The blocks of one rank and window size."""

    def __init__(
        self, window_size: int, num_blocks: int, num_host_blocks: int, block_size: int, log: EventLog | None
    ) -> None:
        self.window_size, self.num_blocks, self.block_size = window_size, num_blocks, block_size
        self._num_host_blocks, self._log = num_host_blocks, log
        self._cached: OrderedDict[int, _Block] = OrderedDict()
        self._num_private = 0
        self.num_allocated = self.num_reused = self.num_missed = 0
        self._report(kv_events.created(num_blocks, num_host_blocks))

    @property
    def num_used(self) -> int:
        """Blocks that other requests can't get now."""
        return self._num_private + sum(block.num_users > 0 and block.level == 0 for block in self._cached.values())

    def admit(self, holding: Holding, keys: Keys, num_tokens: int, *, reuse: bool) -> bool:
        """Have an empty ``holding`` hold room for ``num_tokens``, sharing the longest cached prefix of ``keys``.

        False if there is no room.
        """
        if reuse:
            # A prompt's last token must be computed to have logits.
            holding.blocks = self._longest_prefix(keys[:-1], holding.salt)
        for block in holding.blocks:
            block.num_users += 1
        num_needed = -(-num_tokens // self.block_size) - len(holding.blocks)
        num_needed += sum(block.level == 1 for block in holding.blocks)
        if num_needed > self.num_blocks - self.num_used:
            for block in holding.blocks:
                block.num_users -= 1
            holding.blocks = []
            return False
        self._make_room(num_needed)
        for block in holding.blocks:
            if block.level == 1:
                num_needed -= 1
                self._move(block, 0)
        self.num_reused += len(holding.blocks)
        self.num_missed += num_needed
        self.num_allocated += num_needed
        holding.num_private = num_needed
        self._num_private += num_needed
        return True

    def store(self, holding: Holding, keys: Keys, *, reuse: bool, partial: bool = False) -> None:
        """Make what is complete of ``keys`` reusable, the last token (not computed yet) left out."""
        if not reuse:
            return
        complete, reported = keys[:-1], list[dict[str, Any]]()
        first_parent: _Block | None = None
        for number in range(len(holding.blocks), -(-len(complete) // self.block_size)):
            part = complete[number * self.block_size : (number + 1) * self.block_size]
            if (len(part) < self.block_size and not partial) or holding.num_private == 0:
                break
            parent = holding.blocks[-1] if holding.blocks else None
            block, is_new = self._take_in(part, parent, holding.salt)
            if is_new:
                first_parent = parent if not reported else first_parent
                pictures = kv_events.mm_keys(holding.items, number * self.block_size, len(part))
                told = kv_events.stored_block(
                    block.block_hash, *zip(*part, strict=True), salt=holding.told_salt, mm_keys=pictures
                )
                reported.append(told)
            block.num_users += 1
            holding.blocks.append(block)
            holding.num_private -= 1
            self._num_private -= 1
        if reported:
            self._report(kv_events.stored(first_parent.block_hash if first_parent else None, reported))

    def release(self, holding: Holding, num_tokens: int) -> None:
        """Give all of it back; what left the window of ``num_tokens`` is forgotten."""
        self._num_private -= holding.num_private
        holding.num_private = 0
        gone, end = [], 0
        for block in holding.blocks:
            block.num_users -= 1
            end += block.num_tokens
            if end <= num_tokens - self.window_size and block.num_users == 0:
                gone.append(block)
            else:
                self._cached.move_to_end(block.block_hash)
        holding.blocks = []
        if gone:
            self._forget(gone)

    def _longest_prefix(self, keys: Keys, salt: str) -> list[_Block]:
        found: list[_Block] = []
        for start in range(0, len(keys) - self.block_size + 1, self.block_size):
            parent = found[-1].block_hash if found else None
            block = self._cached.get(_hash(parent, keys[start : start + self.block_size], salt))
            if block is None:
                break
            found.append(block)
        return found

    def _take_in(self, part: Keys, parent: _Block | None, salt: str) -> tuple[_Block, bool]:
        block_hash = _hash(parent.block_hash if parent else None, part, salt)
        if (block := self._cached.get(block_hash)) is not None:
            return block, False
        block = _Block(block_hash, parent.block_hash if parent else None, len(part))
        self._cached[block_hash] = block
        if parent:
            parent.num_children += 1
        return block, True

    def _make_room(self, num_needed: int) -> None:
        """Evict unused blocks, the longest unused and last of their chain first."""
        while num_needed > self.num_blocks - self._num_private - self._num_at(0):
            victim = next(
                block
                for block in self._cached.values()
                if block.level == 0 and block.num_users == 0 and not self._has_child_at(block, 0)
            )
            if self._num_host_blocks == 0:
                self._forget([victim])
                continue
            if self._num_at(1) == self._num_host_blocks:
                self._forget([next(b for b in self._cached.values() if b.level == 1 and b.num_children == 0)])
            self._move(victim, 1)

    def _num_at(self, level: int) -> int:
        return sum(block.level == level for block in self._cached.values())

    def _has_child_at(self, parent: _Block, level: int) -> bool:
        return any(b.parent_hash == parent.block_hash and b.level == level for b in self._cached.values())

    def _move(self, block: _Block, level: int) -> None:
        self._report(kv_events.moved(block.block_hash, block.level, level))
        block.level = level

    def _forget(self, blocks: list[_Block]) -> None:
        for block in blocks:
            del self._cached[block.block_hash]
            parent = None if block.parent_hash is None else self._cached.get(block.parent_hash)
            if parent is not None:
                parent.num_children -= 1
        self._report(kv_events.removed([block.block_hash for block in blocks]))

    def _report(self, data: dict[str, object]) -> None:
        if self._log is not None:
            self._log.put(self.window_size, data)


def _hash(parent_hash: int | None, keys: Keys, salt: str) -> int:
    """Chain 64 unsigned bits; half of all are above what a signed integer holds."""
    digest = hashlib.blake2b(struct.pack("<Q", parent_hash or 0), digest_size=8, key=salt.encode()[:64])
    for token_id, extra_id in keys:
        digest.update(struct.pack("<qq", token_id, extra_id))
    return int.from_bytes(digest.digest(), "little")
