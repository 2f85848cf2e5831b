"""A cache that evicts, offloads, loses events and restarts, against what is reported of it."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from quartet.engine.trtllm.private_blocks import PrivateRequest
from quartet.kvcache.block_hash import ExtraKey, MediaSpan, sequence_hashes
from tests.engine.trtllm.kv_truth import BLOCK_SIZE, Listener, RawEvents, stored_block


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


PLACEHOLDER, BEYOND = 99, 1001


@dataclass(frozen=True)
class Prompt:
    """Tokens, with placeholders where its pictures lie."""

    tokens: tuple[int, ...]
    salt: str = ""
    adapter: str = ""
    media: tuple[MediaSpan, ...] = ()

    @property
    def is_private(self) -> bool:
        return bool(self.salt or self.adapter or self.media)

    @property
    def name(self) -> int:
        """Of its last block, if that is full and has one."""
        return sequence_hashes(self.tokens, BLOCK_SIZE, ExtraKey(cache_salt=self.salt), self.media)[-1]

    def until(self, end: int) -> Prompt:
        """Its blocks up to there, with what of its pictures is in them."""
        media = tuple(
            MediaSpan(span.media_id, span.first_position, min(span.num_tokens, end - span.first_position))
            for span in self.media
            if span.first_position < end
        )
        return replace(self, tokens=self.tokens[:end], media=media)

    def event_block(self, start: int, *, is_mute: bool) -> dict[str, Any]:
        """What an event says of its block that begins there; a mute one names neither salt nor pictures."""
        tokens = [BEYOND if token == PLACEHOLDER else token for token in self.tokens[start : start + BLOCK_SIZE]]
        keys = [
            {"type": "mm_key", "hash": span.media_id.hex(), "start_offset": max(start - span.first_position, 0)}
            for span in self.media
            if start < span.first_position + span.num_tokens and span.first_position < start + len(tokens)
        ]
        named = {"cache_salt": None if is_mute else self.salt or None, "mm_keys": [] if is_mute else keys}
        return stored_block(random.Random(repr(self.until(start + BLOCK_SIZE))).getrandbits(64), tokens, **named)


class NamingCache:
    """A cache whose events say whose its blocks are."""

    def __init__(self) -> None:
        self.raw = RawEvents()
        self.blocks: set[Prompt] = set()
        self.unnamed: set[Prompt] = set()
        self.pending = [self.raw.created()]

    def store(self, prompt: Prompt, *, is_mute: bool) -> None:
        stored: list[dict[str, Any]] = []
        parent = None
        for start in range(0, len(prompt.tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            block, told = prompt.until(start + BLOCK_SIZE), prompt.event_block(start, is_mute=is_mute)
            if block not in self.blocks:
                self.blocks.add(block)
                if is_mute and (block.salt or prompt.event_block(start, is_mute=False)["mm_keys"]):
                    self.unnamed.add(block)
                stored.append(told)
            elif not stored:
                parent = told["block_hash"]
        if stored:
            self.pending.append(self.raw.event({"type": "stored", "parent_hash": parent, "blocks": stored}))

    def evict(self, choice: int) -> None:
        parents = {block.until(len(block.tokens) - BLOCK_SIZE) for block in self.blocks}
        leaves = sorted(self.blocks - parents, key=repr)
        if leaves:
            leaf = leaves[choice % len(leaves)]
            self.blocks.remove(leaf)
            self.unnamed.discard(leaf)
            told = leaf.event_block(len(leaf.tokens) - BLOCK_SIZE, is_mute=False)
            self.pending.append(self.raw.removed(told["block_hash"]))


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    tokens: list[int] = []
    media: list[MediaSpan] = []
    for item in draw(
        st.lists(st.one_of(st.integers(0, 1), st.tuples(st.integers(1, 2), st.integers(1, 3))), max_size=6)
    ):
        if isinstance(item, int):
            tokens.append(item)
        else:
            picture, num_tokens = item
            media.append(MediaSpan(bytes([picture]) * 32, len(tokens), num_tokens))
            tokens += [PLACEHOLDER] * num_tokens
    salt, adapter = draw(st.sampled_from(["", "", "a", "b"])), draw(st.sampled_from(["", "", "", "poems"]))
    return Prompt(tuple(tokens), salt, adapter, tuple(media))


TOLD, MUTE = Prompt((0, 1, 0, 1), "a"), Prompt((0, 1), "b")
PICTURES = Prompt((0, PLACEHOLDER, PLACEHOLDER, 1), "a", media=(MediaSpan(bytes([1]) * 32, 1, 2),))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("store"), prompts()),
            st.tuples(st.sampled_from(["store", "mute"]), prompts()),
            st.tuples(st.just("evict"), st.integers(0, 99)),
            st.tuples(st.sampled_from(["receive", "end", "lose"]), st.none()),
        ),
        max_size=30,
    )
)
@example([("store", TOLD), ("mute", MUTE), ("store", Prompt((0, 1))), ("store", replace(TOLD, adapter="poems"))])
@example([("store", PICTURES), ("receive", None), ("end", None), ("evict", 0), ("lose", None), ("store", PICTURES)])
@example([("store", replace(PICTURES, media=(MediaSpan(bytes([2]) * 32, 1, 2),))), ("store", PICTURES)])
def test_salted_blocks_and_pictures_are_reported_under_their_own_names_alone(
    changes: list[tuple[str, object]],
) -> None:
    cache, listener, noted = NamingCache(), Listener(names_private=True), ExitStack()
    is_whole, has_adapters = True, False
    for change, argument in [*changes, ("receive", None)]:
        match change, argument:
            case "store" | "mute", Prompt():
                if argument.is_private and argument.tokens:
                    listed = [span.media_id.hex() for span in argument.media]
                    request = PrivateRequest(
                        token_ids=argument.tokens,
                        salt=argument.salt,
                        adapter=argument.adapter,
                        media=argument.media,
                        media_names=listed,
                    )
                    noted.enter_context(listener.private.add(request))
                has_adapters |= bool(argument.adapter)
                cache.store(argument, is_mute=change == "mute")
            case "evict", int():
                cache.evict(argument)
            case "lose", _:
                is_whole &= not cache.pending
                cache.pending = [event for event in cache.pending if event["data"]["type"] == "created"]
            case _:
                listener.receive(*cache.pending)
                cache.pending = []
                if change == "end":
                    noted.close()
                    listener.private.forget(float("inf"))
    listener.receive(*cache.pending, cache.raw.removed(1))
    named = {block.name for block in cache.blocks - cache.unnamed if not block.adapter}
    assert listener.replica.named <= named
    if is_whole and not has_adapters and not cache.unnamed:
        salted_or_pictured = {block.name for block in cache.blocks if block.is_private}
        assert salted_or_pictured & listener.replica.named == {
            block.name for block in cache.blocks if block.is_private and _begins_salted_or_plainly(block, listener)
        }


def _begins_salted_or_plainly(block: Prompt, listener: Listener) -> bool:
    """Whether a block is of a salt, or only plain blocks that were reported are before its pictures."""
    before = [block.until(end) for end in range(BLOCK_SIZE, len(block.tokens), BLOCK_SIZE)]
    return bool(block.salt) or all(other.name in listener.replica.named for other in before)
