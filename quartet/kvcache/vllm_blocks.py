"""Our blocks in vLLM's form, and names of ours for blocks that came in that form.

``VllmTranslator`` makes vLLM's events of ours; block hashes are then our sequence hashes. ``block_name`` goes the other
way: it names a block by what an event says of it. For blocks that a Quartet worker has published it gives the same
sequence hash; for plain text it is the public scheme (``block_hash``), whoever published it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from quartet.events.kv import Cleared, KvEvent, Removed, Stored, Tier
from quartet.events.vllm import MEDIA, AllBlocksCleared, BlockRemoved, BlockStored, ExtraKeys, VllmEvent
from quartet.kvcache.block_hash import (
    TOKEN_SIZE_BYTES,
    ExtraKey,
    chain_hash,
    hash_bytes,
    pack_media,
    pack_token_ids,
    unpack_media,
    unpack_token_ids,
)

_MEDIA_ID = re.compile(r"[0-9a-f]{64}", re.ASCII)
_I64 = 1 << 63

# A Quartet engine has one cache.
_GROUP = 0


class VllmTranslator:
    """Makes vLLM's events of one rank's events, all of them, in order.

    vLLM's form needs tokens. Blocks whose contents no event has told are left out, and those after them as well.

    Attributes:
        num_untold: blocks that were left out.
    """

    def __init__(self, block_size: int) -> None:
        """Translate blocks of ``block_size`` tokens."""
        self._block_size = block_size
        self._blocks: dict[int, _Block] = {}
        self.num_untold = 0

    def translate(self, events: Sequence[KvEvent]) -> list[VllmEvent]:
        """The same changes, as far as they can be told."""
        return [translated for event in events for translated in self._translate(event)]

    def _translate(self, event: KvEvent) -> Iterator[VllmEvent]:
        match event:
            case Stored():
                yield from self._store(event)
            case Removed(sequence_hashes, tier):
                removed = [name for name in sequence_hashes if self._is_removed(name, tier)]
                if removed:
                    yield BlockRemoved(block_hashes=removed, medium=MEDIA[tier], group_idx=_GROUP)
            case Cleared():
                self._blocks.clear()
                yield AllBlocksCleared()

    def _store(self, event: Stored) -> Iterator[BlockStored]:
        blocks: list[_Block] = []
        parent = event.parent_hash
        for index, name in enumerate(event.sequence_hashes):
            block = self._block(event, index)
            if block is None or not (parent is None or parent in self._blocks):
                self.num_untold += len(event.sequence_hashes) - index
                break
            block.tiers.add(event.tier)
            self._blocks[name] = block
            blocks.append(block)
            parent = name
        if blocks:
            yield self._stored(event, blocks)

    def _block(self, event: Stored, index: int) -> _Block | None:
        known, told = self._blocks.get(event.sequence_hashes[index]), event.contents
        if known is not None or told is None:
            return known
        is_first = event.parent_hash is None and not index
        return _Block(told.blocks[index], told.adapter, told.cache_salt if is_first else "")

    def _stored(self, event: Stored, blocks: Sequence[_Block]) -> BlockStored:
        num_token_bytes = self._block_size * TOKEN_SIZE_BYTES
        extra_keys = [block.extra_keys(num_token_bytes) for block in blocks]
        return BlockStored(
            block_hashes=event.sequence_hashes[: len(blocks)],
            parent_hash=event.parent_hash,
            token_ids=unpack_token_ids(b"".join(block.content[:num_token_bytes] for block in blocks)),
            block_size=self._block_size,
            medium=MEDIA[event.tier],
            lora_name=blocks[0].adapter or None,
            extra_keys=extra_keys if any(extra_keys) else None,
            group_idx=_GROUP,
        )

    def _is_removed(self, name: int, tier: Tier) -> bool:
        block = self._blocks.get(name)
        if block is None or tier not in block.tiers:
            return False
        block.tiers.remove(tier)
        if not block.tiers:
            del self._blocks[name]
        return True


def block_name(parent: int | None, token_ids: Sequence[int], lora_name: str | None, keys: ExtraKeys | None) -> int:
    """The name of a block with these tokens and extra keys, after the block with the name ``parent``.

    vLLM puts into the keys, in this order: the adapter's name, media of the block with where they begin in it, and in
    the first block the salt. What else is there, such as digests of embeddings, is part of the name as it is.

    Raises:
        OverflowError: a token id is not an unsigned 32-bit integer.
    """
    rest = list(keys or ())
    if lora_name and lora_name in rest:
        rest.remove(lora_name)
    suffixes = list(map(_media_suffix, rest))
    media = b"".join(suffixes)
    rest = [key for key, suffix in zip(rest, suffixes, strict=True) if not suffix]
    cache_salt = ""
    if parent is None and rest and isinstance(rest[-1], str):
        cache_salt = str(rest.pop())
    content = pack_token_ids(token_ids) + media + (msgspec.msgpack.encode(rest) if rest else b"")
    before = ExtraKey(lora_name or "", cache_salt).hash_seed if parent is None else parent
    return chain_hash(before, hash_bytes(content))


@dataclass
class _Block:
    """A block that was told, and where it lies.

    Attributes:
        cache_salt: empty also for all but the first block of a sequence.
    """

    content: bytes
    adapter: str
    cache_salt: str
    tiers: set[Tier] = field(default_factory=set)

    def extra_keys(self, num_token_bytes: int) -> ExtraKeys | None:
        """What, besides tokens, its name is made of; ``None``: nothing."""
        # We say where in the item the block begins, vLLM where in the block the item does.
        media = [(media_id.hex(), -offset) for media_id, offset in unpack_media(self.content[num_token_bytes:])]
        return [*filter(None, [self.adapter]), *media, *filter(None, [self.cache_salt])] or None


def _media_suffix(key: object) -> bytes:
    """What a pair of media id and offset adds to the hashed bytes of its block; empty for any other key."""
    match key:
        case (str(media_id), int(offset)) if _MEDIA_ID.fullmatch(media_id) and -_I64 < offset < _I64:
            return pack_media(bytes.fromhex(media_id), -offset)
    return b""
