"""Names of KV blocks: the field's public hash scheme, so that other indexers understand ours.

All hashes are XXH3-64 with seed 1337, as unsigned 64-bit integers; all integers inside hashed bytes are little-endian.

- *Block hash*: of the block's token ids as u32, followed, for each media item that the block overlaps and in the
  order of the prompt, by 40 bytes: the 32-byte media id and, as i64, the offset in the item of the block's first
  position; negative where the item begins inside the block, so that where it begins is part of the name.
- *Sequence hash*, which names a block together with all before it: of (parent's sequence hash, own block hash) as two
  u64. The first block has no parent, and its block hash is its sequence hash, unless the extra key is not empty: then
  the extra key's hash is its parent.
- *Extra key*: nothing where adapter and salt are both empty, else the adapter's name and then the cache salt, each as
  the u32 length of its UTF-8 bytes followed by those bytes.

Collisions of XXH3 can be crafted: a hash names a block to others and never decides, alone, what is reused.
For text without extra key it is the scheme of ai-dynamo/dynamo (``lib/kv-router/src/protocols.rs``).
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from xxhash import xxh3_64_intdigest

from quartet.errors import InvalidRequestError

#: Seed of every hash here.
HASH_SEED = 1337
#: Bytes of one token id.
TOKEN_SIZE_BYTES = 4

_MEDIA_ID_SIZE_BYTES = 32
_LENGTH = struct.Struct("<I")
_MEDIA = struct.Struct("<32sq")
_PARENT_AND_BLOCK = struct.Struct("<QQ")


@dataclass(frozen=True)
class MediaSpan:
    """Positions of a sequence that one media item fills.

    Attributes:
        media_id: SHA-256 of the item and of how it is preprocessed, so it also decides the number of tokens.
        first_position: of the item's first token in the sequence.
        num_tokens: at least one.

    Raises:
        InvalidRequestError: field ``media``.
    """

    media_id: bytes
    first_position: int
    num_tokens: int

    def __post_init__(self) -> None:
        if len(self.media_id) != _MEDIA_ID_SIZE_BYTES:
            raise InvalidRequestError(f"a media id has {_MEDIA_ID_SIZE_BYTES} bytes", field="media")
        if self.first_position < 0 or self.num_tokens < 1:
            raise InvalidRequestError("a media item fills at least one position, from 0 on", field="media")


@dataclass(frozen=True)
class ExtraKey:
    """What, besides tokens and media, must be equal for KV to be reused."""

    adapter: str = ""
    cache_salt: str = ""

    @cached_property
    def canonical_bytes(self) -> bytes:
        """The pair, unambiguously; empty where both are."""
        if not self.adapter and not self.cache_salt:
            return b""
        parts = (self.adapter.encode(), self.cache_salt.encode())
        return b"".join(_LENGTH.pack(len(part)) + part for part in parts)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical bytes: what reuse compares."""
        return hashlib.sha256(self.canonical_bytes).digest()

    @cached_property
    def hash_seed(self) -> int | None:
        """Parent hash of a first block; ``None`` where the key is empty."""
        return hash_bytes(self.canonical_bytes) if self.canonical_bytes else None


#: The extra key of a base model's unsalted requests.
NO_EXTRA_KEY = ExtraKey()


def hash_bytes(content: bytes) -> int:
    """The scheme's hash, unsigned 64 bit; of a block's hashed bytes it is the block hash."""
    return xxh3_64_intdigest(content, HASH_SEED)


def chain_hash(parent_hash: int | None, block_hash: int) -> int:
    """Sequence hash of the block that follows ``parent_hash``, which is ``None`` where there is no parent."""
    if parent_hash is None:
        return block_hash
    return xxh3_64_intdigest(_PARENT_AND_BLOCK.pack(parent_hash, block_hash), HASH_SEED)


def chain_digest(parent: bytes, content: bytes) -> bytes:
    """BLAKE2b-256 of a block and all before it, which no collision can be crafted for.

    ``parent``: the digest of the block before it, or for a first block ``ExtraKey.digest``, of 32 bytes both.
    ``content``: as ``Sequence.block_content`` gives it.
    """
    return hashlib.blake2b(parent + content, digest_size=32).digest()


def pack_token_ids(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian u32; fastest from an ``array("I")``. Raises ``OverflowError`` for other numbers."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(packed: bytes) -> list[int]:
    """The token ids that ``pack_token_ids`` has packed."""
    token_ids = array("I")
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tolist()


def ordered_spans(media: Iterable[MediaSpan], num_tokens: int) -> list[MediaSpan]:
    """``media`` by position.

    Raises:
        InvalidRequestError: field ``media``; items overlap or go beyond ``num_tokens``.
    """
    spans, end = sorted(media, key=lambda span: span.first_position), 0
    for span in spans:
        if span.first_position < end:
            raise InvalidRequestError("media items overlap", field="media")
        end = span.first_position + span.num_tokens
    if end > num_tokens:
        raise InvalidRequestError("a media item goes beyond the prompt", field="media")
    return spans


def media_suffixes(media: Iterable[MediaSpan], block_size: int, num_tokens: int) -> dict[int, bytes]:
    """What media adds to the hashed bytes of each block that it overlaps, by the block's place in the sequence.

    Raises:
        InvalidRequestError: field ``media``; items overlap or go beyond ``num_tokens``.
    """
    suffixes: dict[int, bytes] = {}
    for span in ordered_spans(media, num_tokens):
        end = span.first_position + span.num_tokens
        for block in range(span.first_position // block_size, (end - 1) // block_size + 1):
            suffix = pack_media(span.media_id, block * block_size - span.first_position)
            suffixes[block] = suffixes.get(block, b"") + suffix
    return suffixes


def pack_media(media_id: bytes, offset: int) -> bytes:
    """What one media item adds to the hashed bytes of a block, whose first position has that offset in the item."""
    return _MEDIA.pack(media_id, offset)


def unpack_media(suffix: bytes) -> list[tuple[bytes, int]]:
    """Id and offset of each media item in what comes after a block's tokens."""
    return list(_MEDIA.iter_unpack(suffix))


def split_blocks(packed: bytes, block_size: int) -> list[bytes]:
    """Token bytes of each full block of ``packed``, as ``pack_token_ids`` gives it; the rest is left out."""
    size_bytes = block_size * TOKEN_SIZE_BYTES
    full = len(packed) - len(packed) % size_bytes
    # Twice as fast as slicing; a prompt of 32 k tokens has 1024 blocks.
    return [block for (block,) in struct.iter_unpack(f"{size_bytes}s", memoryview(packed)[:full])]


def sequence_hashes(
    token_ids: Sequence[int], block_size: int, extra_key: ExtraKey = NO_EXTRA_KEY, media: Iterable[MediaSpan] = ()
) -> list[int]:
    """Sequence hash of every full block of ``token_ids``, first to last.

    Raises:
        InvalidRequestError: field ``media``; items overlap or go beyond the tokens.
        OverflowError: a token id is not an unsigned 32-bit integer.
    """
    blocks = split_blocks(pack_token_ids(token_ids), block_size)
    for index, suffix in media_suffixes(media, block_size, len(token_ids)).items() if media else ():
        if index < len(blocks):
            blocks[index] += suffix
    return chain_hashes(extra_key.hash_seed, blocks)


def chain_hashes(parent: int | None, blocks: Sequence[bytes]) -> list[int]:
    """Sequence hash of each of ``blocks``, which follow ``parent`` and one another, of their hashed bytes.

    Without a call of ours for each: a long prompt has a thousand.
    """
    pack, digest = _PARENT_AND_BLOCK.pack, xxh3_64_intdigest
    block_hashes = [digest(block, HASH_SEED) for block in blocks]
    if parent is not None or not block_hashes:
        return [parent := digest(pack(parent, block_hash), HASH_SEED) for block_hash in block_hashes]
    parent = block_hashes[0]
    return [parent, *(parent := digest(pack(parent, block_hash), HASH_SEED) for block_hash in block_hashes[1:])]
