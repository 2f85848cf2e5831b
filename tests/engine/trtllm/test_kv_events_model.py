"""A cache that evicts, offloads, loses events and restarts, against what is reported of it."""

from __future__ import annotations

import random

from hypothesis import example, given
from hypothesis import strategies as st

from quartet.kvcache.block_hash import sequence_hashes
from tests.engine.trtllm.kv_truth import BLOCK_SIZE, Listener, RawEvents


class Cache:
    """Blocks by their tokens from the first on; reports truly what happens, where it is not lost."""

    def __init__(self) -> None:
        self.raw = RawEvents()
        self.levels: dict[tuple[int, ...], int] = {}
        self.pending = [self.raw.created()]

    def hash_of(self, tokens: tuple[int, ...]) -> int:
        return random.Random(repr(tokens)).getrandbits(64)

    def store(self, tokens: tuple[int, ...]) -> None:
        """All full blocks, and the partial one at the end, in one event from the first that is new."""
        stored, parent = [], None
        for start in range(0, len(tokens), BLOCK_SIZE):
            block = tokens[: start + BLOCK_SIZE]
            if block in self.levels:
                if self.levels[block]:
                    self._move(block, 0)
                parent = block
                continue
            self.levels[block] = 0
            stored.append((self.hash_of(block), block[start:]))
        if stored:
            self.pending.append(self.raw.stored(None if parent is None else self.hash_of(parent), stored))

    def evict(self, choice: int) -> None:
        leaves = [b for b in self.levels if not any(o[: len(b)] == b and o != b for o in self.levels)]
        if leaves:
            leaf = leaves[choice % len(leaves)]
            del self.levels[leaf]
            self.pending.append(self.raw.removed(self.hash_of(leaf)))

    def offload(self, choice: int) -> None:
        here = [block for block, level in self.levels.items() if level == 0]
        if here:
            self._move(here[choice % len(here)], 1)

    def restart(self) -> None:
        self.raw, self.levels = RawEvents(), {}
        self.pending.append(self.raw.created())

    def _move(self, block: tuple[int, ...], level: int) -> None:
        self.levels[block] = level
        self.pending.append(self.raw.moved(self.hash_of(block), level))

    def names(self) -> set[int]:
        return {sequence_hashes(b, BLOCK_SIZE)[-1] for b in self.levels if len(b) % BLOCK_SIZE == 0}


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
steps = st.one_of(
    st.tuples(st.just("store"), tokens),
    st.tuples(st.just("store"), tokens),
    st.tuples(st.sampled_from(["evict", "offload"]), st.integers(0, 99)),
    st.tuples(st.sampled_from(["receive", "lose", "restart"]), st.none()),
)

#: Stored while its first block is lost, the second one has no name. Stored again after a restart, both have.
ORPHAN = ("store", (2, 2, 0, 1))


@given(st.lists(steps, max_size=40))
@example([("store", (0, 0)), ("store", (2, 2)), ("lose", None), ORPHAN, ("restart", None), ORPHAN])
def test_reported_blocks_all_exist_and_are_complete_while_nothing_is_lost(
    changes: list[tuple[str, object]],
) -> None:
    cache, listener, is_whole = Cache(), Listener(), True
    for change, argument in [*changes, ("receive", None)]:
        match change, argument:
            case "store", tuple():
                cache.store(argument)
            case "evict", int():
                cache.evict(argument)
            case "offload", int():
                cache.offload(argument)
            case "restart", _:
                # All that the old engine reported was received, else the new one's numbers might seem to follow.
                listener.receive(*cache.pending)
                cache.pending = []
                cache.restart()
                is_whole = True
            case "lose", _:
                # A gap shows once something comes after it.
                is_whole &= not cache.pending
                created = [event for event in cache.pending if event["data"]["type"] == "created"]
                cache.pending = created
                cache.store((0, 1))
                cache.evict(0)
            case _:
                listener.receive(*cache.pending)
                cache.pending = []
    listener.receive(*cache.pending, cache.raw.removed(1))
    assert listener.replica.named <= cache.names()
    if is_whole:
        assert listener.replica.named == cache.names()
    on_host = {sequence_hashes(b, BLOCK_SIZE)[-1] for b, level in cache.levels.items() if level and not len(b) % 2}
    if is_whole:
        assert {name for tier, table in listener.replica.parents.items() if tier for name in table} == on_host
